"""Embeddings of the simulated engine: texts that share words have nearer vectors.

Stateless. A call lasts as long as reading its tokens does, beside the step loop and not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from inference_svc.adapters.simulated.faults import Fault
from inference_svc.adapters.simulated.model import decode, state_of
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.adapters.simulated.prompt import tokenise
from inference_svc.ports import ChatPrompt, Prompt
from sluice.errors import failed_precondition, invalid

_MIX_ONE, _MIX_TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


async def embed(
    profile: SimulatedProfile, model: str, prompts: Sequence[Prompt], fault: Fault | None
) -> tuple[list[list[float]], int]:
    """Vectors in order and the tokens read; see ``Engine.embed``. ``model`` is its fingerprint."""
    if not profile.embedding_dimensions:
        raise failed_precondition("NO_EMBEDDINGS", "This model does not embed.")
    if fault is not None and (fault.refuse or fault.fail_after is not None):
        raise fault.error()
    batch: list[tuple[int, ...]] = []
    limit = profile.context_tokens
    for index, prompt in enumerate(prompts):
        field = f"inputs[{index}]"
        if isinstance(prompt, ChatPrompt):
            raise invalid(f"{field}.conversation", "conversations are not embedded")
        batch.append(await tokenise(prompt, field, limit, limit, chat=False))
    if fault is not None and fault.hang_after is not None:
        await _hang(fault.hang_ms)
    tokens = sum(map(len, batch))
    await asyncio.sleep(profile.step_s(0, tokens))
    vectors = []
    for ids in batch:
        vectors.append(embedding(model, ids, profile.embedding_dimensions))
        await asyncio.sleep(0)  # a long batch lets the step loop run between its texts
    return vectors, tokens


async def _hang(hang_ms: float | None) -> None:
    if hang_ms is None:
        await asyncio.get_running_loop().create_future()
    else:
        await asyncio.sleep(hang_ms / 1000.0)


def embedding(model: str, token_ids: Sequence[int], dimensions: int) -> list[float]:
    """A vector of length 1: the sum of a pseudo-random vector for each word of the text."""
    words = decode(token_ids).lower().split() or ["\x00".join(map(str, token_ids))]
    steps = np.arange(1, dimensions + 1, dtype=np.uint64) * _GOLDEN
    total = np.zeros(dimensions)
    for word in words:
        # splitmix64 (Steele, Lea and Flood, 2014) over a counter that starts at the word's hash.
        bits = steps + np.uint64(state_of("word", model, word))
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX_ONE
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX_TWO
        bits ^= bits >> np.uint64(31)
        total += (bits >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0
    norm = float(np.linalg.norm(total))
    if norm == 0.0:  # words that cancel out, which no test has met
        total[0], norm = 1.0, 1.0
    return [float(value) for value in total / norm]
