"""A peer that speaks to an instance's ``GenerateFrames`` by hand, over any frame connection.

It numbers its frames and keeps the stream alive as a real peer does, but has no rules of its own:
tests send what they like, also what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf import duration_pb2

from sluice.common.v1 import grant_pb2, result_pb2
from sluice.frames import FrameBroken, FrameConnection
from sluice.inference.v1 import inference_pb2

WAIT_S = 5.0

ClientConnection = FrameConnection[
    inference_pb2.GenerateFramesRequest, inference_pb2.GenerateFramesResponse
]


def make_start(
    slot: int,
    attempt: int = 1,
    *,
    text: str = "hello",
    max_tokens: int | None = 4,
    remaining_s: float | None = 30.0,
    request_id: str = "",
    grant: grant_pb2.SignedGrant | None = None,
    traceparent: str = "",
) -> inference_pb2.Start:
    """A start with a plain text prompt."""
    start = inference_pb2.Start(slot=slot, attempt=attempt, traceparent=traceparent)
    start.work.request_id = request_id or f"r{slot}-{attempt}"
    start.work.input.text = text
    if max_tokens is not None:
        start.work.sampling.max_tokens = max_tokens
    if remaining_s is not None:
        nanos = round(remaining_s * 1e9)
        start.remaining.CopyFrom(duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9))
    if grant is not None:
        start.grant.CopyFrom(grant)
    return start


@dataclass
class Peer:
    """One end of a stream. ``frames`` holds everything that came, in order."""

    connection: ClientConnection
    frames: list[inference_pb2.GenerateFramesResponse] = field(default_factory=list)
    deltas: list[inference_pb2.Delta] = field(default_factory=list)
    events: list[inference_pb2.Event] = field(default_factory=list)
    credit: inference_pb2.Credit | None = None
    broken: FrameBroken | None = None
    ended: bool = False
    sequence: int = 0
    _reader: asyncio.Task[None] | None = None
    _heart: asyncio.Task[None] | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, *, heartbeats: bool = True) -> Peer:
        """Starts to read, and to keep the stream alive."""
        self._reader = asyncio.create_task(self._read())
        if heartbeats:
            self._heart = asyncio.create_task(self._beat())
        return self

    async def stop(self) -> None:
        """Breaks the stream, if it is not over."""
        self.connection.cancel()
        for task in (self._reader, self._heart):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def send(
        self,
        *starts: inference_pb2.Start,
        cancels: tuple[tuple[int, int], ...] = (),
        reason: result_pb2.FinishReason.ValueType = result_pb2.FINISH_REASON_CANCELLED,
        demand: tuple[int, int] | None = None,
        sequence: int | None = None,
    ) -> None:
        """Sends one frame."""
        self.sequence += 1
        frame = inference_pb2.GenerateFramesRequest(
            sequence=self.sequence if sequence is None else sequence,
            starts=starts,
            cancels=[
                inference_pb2.Cancel(slot=slot, attempt=attempt, reason=reason)
                for slot, attempt in cancels
            ],
        )
        if demand is not None:
            frame.demand.sequences, frame.demand.kv_tokens = demand
        await self.connection.write(frame)

    async def half_close(self) -> None:
        """Sends nothing more."""
        if self._heart is not None:
            self._heart.cancel()
        await self.connection.half_close()

    async def until(self, met: Callable[[], object], within_s: float = WAIT_S) -> None:
        """Waits until something holds that depends on what came."""
        async with asyncio.timeout(within_s):
            while not met():
                self._came.clear()
                await self._came.wait()

    async def until_over(self, within_s: float = WAIT_S) -> None:
        """Waits for the end of the stream."""
        await self.until(lambda: self.ended or self.broken is not None, within_s)

    def event(self, kind: str, slot: int, attempt: int = 1) -> inference_pb2.Event | None:
        """The event of that kind for a use of a slot, if it came."""
        for event in self.events:
            if (event.slot, event.attempt, event.WhichOneof("kind")) == (slot, attempt, kind):
                return event
        return None

    async def accepted(self, slot: int, attempt: int = 1) -> inference_pb2.Accepted:
        """Waits for it."""
        await self.until(lambda: self.event("accepted", slot, attempt))
        event = self.event("accepted", slot, attempt)
        assert event is not None
        return event.accepted

    async def over(self, slot: int, attempt: int = 1) -> inference_pb2.Ended:
        """Waits for the end of a slot."""
        await self.until(lambda: self.event("ended", slot, attempt))
        event = self.event("ended", slot, attempt)
        assert event is not None
        return event.ended

    async def rejected(self, slot: int, attempt: int = 1) -> inference_pb2.Rejected:
        """Waits for the rejection of a start."""
        await self.until(lambda: self.event("rejected", slot, attempt))
        event = self.event("rejected", slot, attempt)
        assert event is not None
        return event.rejected

    def text(self, slot: int, attempt: int = 1) -> str:
        """The text of a use of a slot so far."""
        return "".join(
            delta.text for delta in self.deltas if (delta.slot, delta.attempt) == (slot, attempt)
        )

    def take(self, frame: inference_pb2.GenerateFramesResponse) -> None:
        """Keeps a frame and what is in it."""
        self.frames.append(frame)
        if frame.HasField("credit"):
            self.credit = frame.credit
        if frame.deltas:
            self.deltas.extend(inference_pb2.DeltaBatch.FromString(frame.deltas).deltas)
        self.events.extend(frame.events)
        self._came.set()

    async def _read(self) -> None:
        try:
            while (frame := await self.connection.read()) is not None:
                self.take(frame)
            self.ended = True
        except FrameBroken as broken:
            self.broken = broken
        finally:
            self._came.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.send()
            except (FrameBroken, AssertionError):
                return
