"""Whether an output that one attempt began may be continued by another. Pure, without state.

The same rule as the inference service's own (``inference_svc.domain.continuation``), which refuses
what is not continuable; a test compares the two over a table. The gate has to know before it acts:
what cannot go on elsewhere must not be asked to yield.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

TAIL_BYTES_MAX: Final = 1_024
"""Of the delivered text that a continuation carries, so that the instance can compare it."""


class Obstacle(Enum):
    """Why an output cannot be continued: the engine keeps state that is not in its tokens, or what
    was delivered could not be completed."""

    SEED = "a seeded generator's position is not in the tokens"
    PENALTY = "presence and frequency penalties count output tokens apart from the prompt"
    STRUCTURED = "a grammar's position is not in the tokens"
    OUTPUTS = "several outputs are one request"
    LOGPROBS = "log probabilities of earlier tokens would be missing"


def obstacle(
    *,
    seeded: bool = False,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    structured: bool = False,
    outputs: int = 1,
    logprobs: bool = False,
) -> Obstacle | None:
    """What keeps an output sampled so from being continued; ``None``: nothing does.

    Greedy and unseeded sampling with any truncation, a repetition penalty, a bias, stop strings and
    ids, and token limits are no obstacle: each next token depends on the tokens before it alone."""
    if seeded:
        return Obstacle.SEED
    if presence_penalty or frequency_penalty:
        return Obstacle.PENALTY
    if structured:
        return Obstacle.STRUCTURED
    if outputs != 1:
        return Obstacle.OUTPUTS
    if logprobs:
        return Obstacle.LOGPROBS
    return None


def tail_of(text: str) -> str:
    """The last whole characters of ``text``, at most :data:`TAIL_BYTES_MAX` bytes of UTF-8."""
    return text.encode()[-TAIL_BYTES_MAX:].decode(errors="ignore")
