"""The real engine as the contract sees it: prepared models, a tokenizer, what vLLM was given.

Owns nothing at import; :func:`running_engine` starts one engine and closes it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_svc.adapters.vllm_engine.engine import VllmEngine
from inference_svc.adapters.vllm_engine.settings import EngineTask, VllmSettings
from tests.contract.engine_harness import EngineHarness

MODELS = Path(os.environ.get("SLUICE_TEST_MODELS", ".sluice/models"))
CHAT_MODEL = "smollm2-135m-instruct"
EMBEDDING_MODEL = "all-minilm-l6-v2"

MARKS = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),  # the first case waits for the model to load
    # Raised inside the libraries on import and at exit; our own warnings stay errors.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:(torch|vllm|transformers|xgrammar|tvm_ffi|zmq|multiprocessing)"
    ),
    pytest.mark.filterwarnings("ignore::UserWarning:(torch|vllm|transformers)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|vllm|transformers)"),
]

# What vLLM shows for a field that is unset, where the model's own configuration says nothing.
NEUTRAL: Mapping[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


def settings(name: str, task: EngineTask = EngineTask.GENERATE, **more: Any) -> VllmSettings:
    """Settings with which a small machine starts an engine within a minute."""
    return VllmSettings(
        path=str(MODELS.resolve() / name),
        model=name,
        task=task,
        dtype="float32",
        enforce_eager=True,
        kv_cache_gib=0.5,
        **more,
    )


class Received:
    """Remembers the sampling parameters with which vLLM itself was called, by request id."""

    def __init__(self, engine: VllmEngine) -> None:
        self._params: dict[str, Any] = {}
        running = engine._running
        assert running is not None
        generate = running.llm.generate

        def spy(prompt: Any, params: Any, request_id: str, **kwargs: Any) -> Any:
            self._params[request_id] = params
            return generate(prompt, params, request_id, **kwargs)

        running.llm.generate = spy

    def __call__(self, request_id: str) -> Mapping[str, object]:
        params = self._params[request_id]
        values: dict[str, object] = {
            name: getattr(params, name) for name in (*NEUTRAL, "seed", "logprobs", "ignore_eos")
        }
        values["keep_special_tokens"] = not params.skip_special_tokens
        values["stop"] = tuple(params.stop)
        values["include_stop"] = params.include_stop_str_in_output
        return values


def harness_of(engine: VllmEngine, name: str) -> EngineHarness:
    """The contract's view of a started engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODELS / name))

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def decode(ids: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        return text.rstrip("\N{REPLACEMENT CHARACTER}")

    running = engine._running
    assert running is not None
    return EngineHarness(
        engine=engine,
        encode=encode,
        decode=decode,
        vocabulary_size=running.text.vocabulary,
        received=Received(engine),
        defaults={**NEUTRAL, **running.defaults},
        exact=False,  # vLLM promises the same next token in another batch on GPUs only
        cuts=lambda total: (0, 1, total // 2, total),
    )


@asynccontextmanager
async def running_engine(wanted: VllmSettings) -> AsyncIterator[VllmEngine]:
    """A started engine; closed at the end whatever happened to it."""
    engine = VllmEngine(wanted)
    await engine.start()
    try:
        yield engine
    finally:
        async with asyncio.timeout(35):
            await engine.close()
