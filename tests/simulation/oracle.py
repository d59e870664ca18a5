"""What a request's output has to be: the simulated engine's function of the prefix, written anew.

Token by token from the definition, without the engine's batches, writers or continuations: so a
token that is lost, repeated or exchanged anywhere between engine and client shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.adapters.simulated.model import (
    ROW_SHIFT,
    ROWS,
    TOKEN_BYTES,
    encode,
    fold,
    next_state,
)
from inference_svc.adapters.simulated.prompt import first_state
from inference_svc.domain.stop_text import spell
from inference_svc.ports import Sampling


@dataclass(frozen=True, slots=True)
class Expected:
    """An output as it has to be at its end."""

    token_ids: tuple[int, ...]
    text: str

    def fits(self, token_ids: Sequence[int], text: str, *, whole: bool) -> bool:
        """Whether what was delivered so far is a beginning of it; ``whole``: all of it."""
        got = tuple(token_ids)
        if whole:
            return got == self.token_ids and text == self.text
        return got == self.token_ids[: len(got)] and self.text.startswith(text)


def expected(fingerprint: str, text: str, sampling: Sampling, index: int = 0) -> Expected:
    """The output ``index`` of a text prompt that runs to ``sampling.max_tokens``."""
    assert sampling.max_tokens is not None
    state = fold(first_state(fingerprint, sampling, index), encode(text))
    row = ROWS[0]
    ids: list[int] = []
    for _ in range(sampling.max_tokens):
        choice = row[state >> ROW_SHIFT]
        ids.append(choice.token)
        state = next_state(state, choice.token)
        row = ROWS[choice.row]
    return Expected(tuple(ids), spell([TOKEN_BYTES[token] for token in ids]))
