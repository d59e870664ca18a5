"""What a sequence of the simulated engine writes when it is not plain.

A :class:`Writer` belongs to one sequence that has stop strings, stop tokens, a bias, log
probabilities, a script (structured output, a scripted reply), a continuation or a fault. Plain
sequences need none and are written by the step loop itself; both choose the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from inference_svc.adapters.simulated.faults import Fault
from inference_svc.adapters.simulated.model import (
    EOS,
    EOS_TEXT,
    ROW_BITS,
    ROW_SHIFT,
    ROWS,
    TOKEN_BYTES,
    VOCABULARY_SIZE,
    Choice,
    next_state,
)
from inference_svc.domain.stop_text import StopText
from inference_svc.ports import FinishReason, OutputEnd, Sampling, TokenLogprob, TopLogprob

_ROW_MASK = (1 << ROW_BITS) - 1
BIAS_BANS, BIAS_FORCES = -100.0, 100.0  # the ends of the range of a bias
# A word of a token's logprob: eleven bits of the state, up to about -0.69 (one half).
_LOGPROB_BITS = 11


@dataclass(frozen=True, slots=True)
class Script:
    """Tokens that an output consists of; ``ends`` are the counts of tokens at which a delta ends,
    growing (empty: each token is a delta)."""

    token_ids: tuple[int, ...]
    ends: tuple[int, ...] = ()

    def delta_tokens(self, position: int) -> int:
        """How many tokens the delta at ``position`` has."""
        for end in self.ends:
            if end > position:
                return end - position
        return 1 if not self.ends else max(1, len(self.token_ids) - position)


@dataclass(frozen=True, slots=True)
class Written:
    """What a sequence writes in one step."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: OutputEnd | None


class WritingState(Protocol):
    """What a writer reads and advances of its sequence."""

    index: int
    state: int
    row: list[Choice]
    position: int
    limit: int
    eos_below: int


class Writer:
    """The output of one sequence, step by step."""

    __slots__ = (
        "_banned",
        "_forced",
        "_ignore_eos",
        "_include_stop",
        "_keep_special",
        "_least",
        "_logprobs",
        "_script",
        "_stop_ids",
        "_text",
        "backlog",
        "fault",
        "hung",
    )

    def __init__(
        self, sampling: Sampling, *, script: Script | None = None, fault: Fault | None = None
    ) -> None:
        self._least = sampling.min_tokens or 0
        self._text = StopText(
            sampling.stop, include_stop=sampling.include_stop, min_tokens=self._least
        )
        self._stop_ids = frozenset(sampling.stop_token_ids)
        bias = sampling.logit_bias
        self._banned = frozenset(token for token in bias if bias[token] <= BIAS_BANS)
        self._forced = next((token for token in bias if bias[token] >= BIAS_FORCES), None)
        self._ignore_eos = sampling.ignore_eos
        self._include_stop = sampling.include_stop
        self._keep_special = sampling.keep_special_tokens
        self._logprobs = sampling.logprobs
        self._script = script
        self.fault = fault
        self.hung = False
        self.backlog = ""  # text of earlier attempts that was not delivered

    def resume(
        self, index: int, token_ids: tuple[int, ...], delivered_bytes: int, limit: int
    ) -> OutputEnd | None:
        """Takes in the output of earlier attempts; returns how it ended, if it is complete."""
        last = len(token_ids) - 1
        ended = self._ends_at(token_ids[last], last) if token_ids else False
        shown = token_ids[:last] if ended and not self._include_stop else token_ids
        pieces = (self._piece(token) for token in shown)
        self.backlog = self._text.resume(pieces, delivered_bytes)
        if self._text.matched is not None:
            return OutputEnd(index, FinishReason.STOP, stop_string=self._text.matched)
        end: OutputEnd | None = None
        if ended:
            end = self._token_end(index, token_ids[last])
        elif len(token_ids) >= limit:
            end = OutputEnd(index, FinishReason.LENGTH)
        if end is not None:
            self.backlog += self._text.finish()
        return end

    def write(self, sequence: WritingState) -> Written:
        """Writes the tokens of one step."""
        text, self.backlog = self.backlog, ""
        count = self._script.delta_tokens(sequence.position) if self._script else 1
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        end: OutputEnd | None = None
        while len(token_ids) < count and end is None:
            state, row, position = sequence.state, sequence.row, sequence.position
            token = self._next_token(sequence)
            sequence.position = position + 1
            token_ids.append(token)
            if self._logprobs is not None:
                logprobs.append(_logprob(token, state, row, self._logprobs))
            ended = self._ends_at(token, position)
            if not ended or self._include_stop:
                text += self._text.push(self._piece(token))
            if self._text.matched is not None:
                end = OutputEnd(sequence.index, FinishReason.STOP, stop_string=self._text.matched)
            elif ended:
                end = self._token_end(sequence.index, token)
            elif sequence.position >= sequence.limit:
                end = OutputEnd(sequence.index, FinishReason.LENGTH)
        if end is not None and end.stop_string is None:
            text += self._text.finish()
        return Written(text, tuple(token_ids), tuple(logprobs), end)

    def _next_token(self, sequence: WritingState) -> int:
        """Chooses the next token and folds it into the sequence's state."""
        state, position = sequence.state, sequence.position
        if self._script is not None:
            script = self._script.token_ids
            token = script[position] if position < len(script) else EOS
            sequence.state = next_state(state, token)
            return token
        early = position < self._least
        if self._forced is not None and not (early and self._forced in self._stop_ids):
            sequence.state = next_state(state, self._forced)
            return self._forced
        if (
            state < sequence.eos_below
            and sequence.row is ROWS[0]
            and EOS not in self._banned
            and not (early and (not self._ignore_eos or EOS in self._stop_ids))
        ):
            sequence.state = next_state(state, EOS)
            return EOS
        banned = self._banned | self._stop_ids if early else self._banned
        choice = _choice(state >> ROW_SHIFT, sequence.row, banned)
        sequence.state = next_state(state, choice.token)
        sequence.row = ROWS[choice.row]
        return choice.token

    def _ends_at(self, token: int, position: int) -> bool:
        if token == EOS and not self._ignore_eos:
            return True
        return token in self._stop_ids and position >= self._least

    def _token_end(self, index: int, token: int) -> OutputEnd:
        asked = token in self._stop_ids
        return OutputEnd(index, FinishReason.STOP, stop_token_id=token if asked else None)

    def _piece(self, token: int) -> bytes:
        if token == EOS:
            return EOS_TEXT.encode() if self._keep_special else b""
        return TOKEN_BYTES[token]


def _choice(index: int, row: list[Choice], banned: Collection[int]) -> Choice:
    """The entry of a row at an index, or the next one that is not banned."""
    choice = row[index]
    if choice.token not in banned:
        return choice
    # A row whose tokens are all banned: better a broken character than a banned token.
    for candidates in (row, ROWS[0]):
        for step in range(1, len(candidates)):
            choice = candidates[(index + step) & _ROW_MASK]
            if choice.token not in banned:
                return choice
    return row[index]


def _logprob(token: int, state: int, row: list[Choice], count: int) -> TokenLogprob:
    """Log probabilities that look like a model's: the sampled token is the best candidate."""
    word = (state >> 20) & ((1 << _LOGPROB_BITS) - 1)
    best = math.log(1.0 - word / (1 << (_LOGPROB_BITS + 1)))
    others: list[int] = []
    index = state >> ROW_SHIFT
    step = 0
    while len(others) + 1 < count and step < VOCABULARY_SIZE * 2:
        # The row may hold a few different tokens only; then the bytes fill up.
        candidate = row[(index + step) & _ROW_MASK].token if step < 64 else step - 64
        if candidate != token and candidate not in others and candidate < VOCABULARY_SIZE:
            others.append(candidate)
        step += 1
    ranked = [token, *others] if count else []
    top = tuple(
        TopLogprob(candidate, best - 1.5 * rank, TOKEN_BYTES[candidate])
        for rank, candidate in enumerate(ranked)
    )
    return TokenLogprob(token, best, TOKEN_BYTES[token], top)
