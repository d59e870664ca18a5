"""Embeddings of the simulated engine: texts that share words have nearer vectors. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference_svc.adapters.simulated_model import decode, state_of

_MIX_ONE, _MIX_TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
