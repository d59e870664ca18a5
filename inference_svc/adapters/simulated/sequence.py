"""The simulated engine's running work: a generation and its sequences, one per output.

Plain state, owned by the step loop (``batch``); used from the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from inference_svc.adapters.simulated.kv import KvHold
from inference_svc.adapters.simulated.model import ROWS, Choice
from inference_svc.adapters.simulated.writer import Writer
from inference_svc.ports import FinishReason, GenerationEnd, OutputEnd, OutputSink
from sluice.errors import SluiceError


class Phase(Enum):
    """Where a sequence is."""

    WAITING = auto()  # for a place in the batch
    RUNNING = auto()  # reads its prompt or writes
    PARKED = auto()  # hangs or keeps a pace, by a scripted fault; holds its place and memory
    OVER = auto()


class Aborter(Protocol):
    """Who stops a generation."""

    def abort(self, generation: Generation, reason: FinishReason) -> None:
        """Stops it at once."""


class SequenceState:
    """One output in the making. ``position`` counts output tokens, those of earlier attempts
    included; ``limit`` is the position at which it ends by length."""

    __slots__ = (
        "base",
        "cached_tokens",
        "deliver",
        "edge",
        "eos_below",
        "generation",
        "hold",
        "index",
        "keys",
        "limit",
        "live",
        "order",
        "phase",
        "position",
        "prompt_tokens",
        "room",
        "row",
        "state",
        "timer",
        "unread",
        "writer",
    )

    def __init__(
        self,
        generation: Generation,
        index: int,
        *,
        state: int,
        limit: int,
        base: int = 0,
        row: int = 0,
        eos_below: int = 0,
        keys: Sequence[int] = (),
        writer: Writer | None = None,
    ) -> None:
        self.generation = generation
        self.index = index
        self.state = state
        self.row: list[Choice] = ROWS[row]
        self.base = base
        self.position = base
        self.limit = limit
        self.room = 0  # the position up to which its KV blocks reach
        self.edge = 0  # the lesser of limit and room: where the step loop has to look up
        self.eos_below = eos_below  # states below this are an end of sequence
        self.prompt_tokens = generation.prompt_tokens
        self.keys = keys  # of the prompt's whole blocks, for the prefix cache
        self.unread = 0  # tokens that are still to be read before it writes
        self.cached_tokens: int | None = None  # of its first admission
        self.order = 0  # of its admission; the latest is preempted first
        self.live = False  # running: what the step loop checks
        self.phase = Phase.WAITING
        self.hold = KvHold()
        self.writer = writer
        self.timer: asyncio.TimerHandle | None = None
        self.deliver: Callable[..., None] = generation.sink.delta


class Generation:
    """A submitted request; ``RunningRequest`` of the port."""

    __slots__ = ("_aborter", "counted", "ends", "open", "prompt_tokens", "sequences", "sink")

    def __init__(
        self, aborter: Aborter, sink: OutputSink, prompt_tokens: int, outputs: int
    ) -> None:
        self._aborter = aborter
        self.sink = sink
        self.prompt_tokens = prompt_tokens
        self.sequences: list[SequenceState] = []
        self.ends: list[OutputEnd | None] = [None] * outputs
        self.open = outputs
        self.counted = False  # whether the end was reported or is about to be

    def abort(self, reason: FinishReason) -> None:
        """Stops it at once; see the port."""
        self._aborter.abort(self, reason)

    @property
    def output_tokens(self) -> int:
        """Tokens of this attempt over all outputs."""
        return sum(sequence.position - sequence.base for sequence in self.sequences)

    def end(self, reason: FinishReason, error: SluiceError | None = None) -> GenerationEnd:
        """The end; outputs that did not end by themselves end for ``reason``."""
        outputs = tuple(
            end if end is not None else OutputEnd(index, reason)
            for index, end in enumerate(self.ends)
        )
        return GenerationEnd(
            outputs=outputs,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.sequences[0].cached_tokens or 0,
            completion_tokens=self.output_tokens,
            error=error,
        )
