"""One ``GenerateFrames`` stream to one instance, on behalf of one scheduler stream.

Owns the frames on their way to the instance, their numbering, and which slots are open. Deltas are
passed on unopened. Concurrency: :meth:`InstanceLink.run` reads and writes in two tasks; the
scheduler's reader hands in parts synchronously.

Failures: whatever ends the stream is the result of :meth:`InstanceLink.run`, never an exception;
everything open on it is lost then. An instance that takes no frames while more than
:data:`BACKLOG_BYTES_MAX` wait for it counts as broken: it must not hold up its neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from execution_svc.adapters.counts import Counts
from execution_svc.adapters.relay import Relay
from execution_svc.domain.open_slots import OpenSlots
from execution_svc.domain.outgoing import Outgoing, QueuedStart, remaining_at_write
from sluice import logs
from sluice.common.v1 import result_pb2
from sluice.context import is_sampled, is_traceparent
from sluice.frames import FrameBroken, FrameWriter, LossKind, read_frames
from sluice.inference.v1 import inference_pb2
from sluice.telemetry_names import (
    ATTR_ATTEMPT,
    ATTR_FRAME,
    ATTR_INSTANCE,
    ATTR_REQUEST_ID,
    SPAN_RELAY,
)

if TYPE_CHECKING:
    from execution_svc.ports import InstanceConnection
    from sluice.telemetry import Span, Telemetry

BACKLOG_BYTES_MAX = 32 * 1024 * 1024
CLOSE_S = 2.0  # from a half-close to the end of the stream

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Loss:
    """How a stream ended; ``detail`` is for logs."""

    kind: LossKind
    detail: str


class InstanceLink:
    """See the module. ``name`` is the instance's name in grants."""

    def __init__(
        self,
        name: str,
        address: str,
        connection: InstanceConnection,
        relay: Relay,
        telemetry: Telemetry,
        counts: Counts,
    ) -> None:
        self.name = name
        self.address = address
        self._connection = connection
        self._relay = relay
        self._telemetry = telemetry
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._outgoing: Outgoing[inference_pb2.Start, inference_pb2.Cancel] = Outgoing()
        self._demand: inference_pb2.Demand | None = None
        self._open: OpenSlots[Span | None] = OpenSlots()
        self._writer = FrameWriter(connection, self._compose)
        self._sent = 0
        self._received = 0
        self._drain_due = False
        self.closing = False  # it takes no parts any more
        self.detached = False  # nobody waits for how it ends
        self._closer: asyncio.TimerHandle | None = None
        self._overrun: asyncio.Future[None] = self._loop.create_future()

    # What the scheduler says.

    def submit(
        self, frame: inference_pb2.GenerateFramesRequest, received_at: float, number: int
    ) -> None:
        """Takes over what a part of the scheduler's frame ``number`` holds."""
        for cancel in frame.cancels:
            self._outgoing.add_cancel((cancel.slot, cancel.attempt), cancel)
        for start in frame.starts:
            use = (start.slot, start.attempt)
            self._open.open(use, self._trace(start, number))
            self._outgoing.add_start(
                use,
                start,
                priority=start.priority_class,
                size_bytes=start.ByteSize(),
                now=received_at,
            )
        if frame.HasField("demand"):
            self._demand = frame.demand
        if frame.draining:
            self._drain_due = True
        if self._outgoing.bytes > BACKLOG_BYTES_MAX and not self._overrun.done():
            self._counts.limit_hits["instance_backlog_bytes"] += 1
            self._overrun.set_result(None)
        self._writer.wake()

    def _trace(self, start: inference_pb2.Start, number: int) -> Span | None:
        if not (is_traceparent(start.traceparent) and is_sampled(start.traceparent)):
            return None
        span = self._telemetry.span(
            SPAN_RELAY,
            start.traceparent,
            {
                ATTR_REQUEST_ID: start.work.request_id,
                ATTR_INSTANCE: self.name,
                ATTR_ATTEMPT: start.attempt,
                ATTR_FRAME: number,
            },
        )
        start.traceparent = span.traceparent
        return span

    @property
    def open_slots(self) -> int:
        """Starts taken over and not ended."""
        return len(self._open)

    def drain(self) -> None:
        """The scheduler starts nothing more."""
        self._drain_due = True
        self._writer.wake()

    def detach(self) -> None:
        """The scheduler wants nothing more of this stream: it is half-closed, which aborts what is
        open on it, and nothing of it is relayed any more."""
        self.detached = True
        self._outgoing = Outgoing()
        self.close()

    def close(self) -> None:
        """Half-closes the stream. What is open on it ends; the stream does within
        :data:`CLOSE_S`. Idempotent."""
        if not self.closing:
            self.closing = True
            self._writer.close()
            self._closer = self._loop.call_later(CLOSE_S, self._connection.cancel)

    # The stream.

    async def run(self) -> Loss:
        """Relays until the stream ends, and says how it did."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._writer.run())
                overrun = group.create_task(self._until_overrun())
                await self._read()
                overrun.cancel()
                self.close()
            return Loss(LossKind.CLOSED, "the instance closed the stream in order")
        except* FrameBroken as group_of_breaks:
            loss = _first_loss(group_of_breaks)
        except* Exception as failures:
            log.failure("relaying to an instance failed", failures, instance=self.name)
            loss = Loss(LossKind.DISCONNECTED, "internal error")
        finally:
            if self._closer is not None:
                self._closer.cancel()
            self._connection.cancel()
            for span in self._open.close_all():
                if span is not None:
                    span.end("INSTANCE_LOST")
        return loss

    async def _until_overrun(self) -> None:
        await self._overrun
        raise FrameBroken(LossKind.DISCONNECTED, "the instance does not take its frames")

    async def _read(self) -> None:
        async with aclosing(read_frames(self._connection)) as frames:
            async for frame in frames:
                self._received += 1
                self._counts.frames["instance_in"] += 1
                if frame.sequence != self._received:
                    raise FrameBroken(
                        LossKind.PROTOCOL, f"frame {frame.sequence} instead of {self._received}"
                    )
                if self.detached:
                    continue
                self._relay.add(self.name, frame)
                for event in frame.events:
                    self._note(event)
                if frame.draining and not self._open:
                    self.close()
                if not self._relay.has_room:
                    await self._relay.room()

    def _note(self, event: inference_pb2.Event) -> None:
        kind = event.WhichOneof("kind")
        if kind == "accepted":
            return
        span = self._open.close((event.slot, event.attempt))
        if span is None:
            return
        if kind == "rejected":
            span.end(_reject_name(event.rejected.reason))
        elif any(
            output.finish_reason == result_pb2.FINISH_REASON_ERROR for output in event.ended.outputs
        ):
            span.end("ENGINE_ERROR")
        else:
            span.end()

    def _compose(self, heartbeat_due: bool) -> inference_pb2.GenerateFramesRequest | None:
        if not (heartbeat_due or self._outgoing or self._demand is not None or self._drain_due):
            return None
        self._sent += 1
        self._counts.frames["instance_out"] += 1
        frame = inference_pb2.GenerateFramesRequest(sequence=self._sent)
        cancels, starts = self._outgoing.take()
        frame.cancels.extend(cancels)
        for queued in starts:
            self._write_start(frame.starts.add(), queued)
        if self._demand is not None:
            frame.demand.CopyFrom(self._demand)
            self._demand = None
        if self._drain_due:
            frame.draining = True
            self._drain_due = False
        return frame

    def _write_start(
        self, entry: inference_pb2.Start, queued: QueuedStart[inference_pb2.Start]
    ) -> None:
        entry.CopyFrom(queued.start)
        if not entry.HasField("remaining"):
            return  # the instance refuses it, naming the field
        left = remaining_at_write(
            entry.remaining.seconds + entry.remaining.nanos / 1e9,
            queued.arrived_at,
            self._loop.time(),
        )
        nanos = int(left * 1e9)
        entry.remaining.seconds = nanos // 10**9
        entry.remaining.nanos = nanos % 10**9


def _first_loss(group: BaseExceptionGroup[FrameBroken]) -> Loss:
    """The break that says most: one of the peer's before one of this side's cancelling."""
    breaks = list(_breaks(group))
    for broken in breaks:
        if broken.reason is not LossKind.CLOSED:
            return Loss(broken.reason, broken.detail)
    return Loss(breaks[0].reason, breaks[0].detail)


def _breaks(error: BaseException) -> Iterator[FrameBroken]:
    if isinstance(error, FrameBroken):
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _breaks(inner)


def _reject_name(reason: int) -> str:
    known = inference_pb2.RejectReason.DESCRIPTOR.values_by_number.get(reason)
    return "REJECT_REASON_UNKNOWN" if known is None else known.name
