"""One ``GenerateFrames`` stream: many generations over one connection, a frame per engine step.

Owns the stream's slots. Concurrency: one task reads and starts, one writes
(:class:`sluice.frames.FrameWriter`), one per start renders its prompt; everything is on the event
loop, and between two awaits the slots are consistent. Per token nothing happens but
:meth:`Slot.delta`: no task, no timer, no measurement.

Order: of one slot, ``accepted`` is in an earlier frame than its first delta and ``ended`` in the
same frame as its last or a later one, since a receiver applies a frame's deltas before its events.

Failures: a broken, silent, unread or ill-numbered stream, its end, and a new engine all come to the
same: what was started on it is aborted at once and its room is given back.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from inference_svc.adapters.convert import to_spec
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.outbox import Outbox
from inference_svc.adapters.reasons import (
    RejectError,
    abort_reason,
    finish_label,
    first_reason,
    reject_label,
    reject_reason,
)
from inference_svc.adapters.results import (
    aborted_end,
    to_ended,
    to_seconds,
    typed_error,
)
from inference_svc.adapters.slot import Slot
from inference_svc.domain.credit import Room
from inference_svc.ports import Engine, GenerateSpec, GenerationEnd
from sluice.common.v1 import result_pb2
from sluice.context import is_sampled, is_traceparent
from sluice.errors import SluiceError, exhausted, invalid, unavailable
from sluice.frames import FrameConnection, FrameWriter, read_frames
from sluice.inference.v1 import inference_pb2
from sluice.status import to_status
from sluice.telemetry_names import ATTR_FRAME, ATTR_INSTANCE, ATTR_REQUEST_ID, SPAN_GENERATE

if TYPE_CHECKING:
    from inference_svc.adapters.reasons import FinishWire, RejectWire

# A start costs about 0.3 ms, most of it the grant's signature: after so many the loop gets a turn.
STARTS_PER_TURN = 4
# The longest deadline that is kept: timers far beyond it overflow in some event loops.
REMAINING_S_MAX = 86_400.0

Connection = FrameConnection[
    inference_pb2.GenerateFramesResponse, inference_pb2.GenerateFramesRequest
]


class FrameStream:
    """A stream, from its opening to its end; made and run by the handler of the call."""

    def __init__(self, connection: Connection, instance: Instance) -> None:
        self._connection = connection
        self._instance = instance
        self._counts = instance.counts
        self._host = instance.host
        self._epoch = instance.host.epoch
        self._loop = asyncio.get_running_loop()
        self._writer: FrameWriter[inference_pb2.GenerateFramesResponse] = FrameWriter(
            connection, self._compose
        )
        self._outbox = Outbox(self._writer.wake)
        self._slots: dict[int, Slot] = {}
        self._kv_tokens_bound = 0
        self._renders: asyncio.TaskGroup | None = None
        self._received = 0
        self._sent = 0
        self._credit: Room | None = None  # to be told
        self._draining_told = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._number = instance.room.join(self)

    # The holder of room.

    def held(self) -> Room:
        return Room(len(self._slots), sum(slot.kv_tokens for slot in self._slots.values()))

    def kv_tokens_bound(self) -> int:
        return self._kv_tokens_bound

    def credit_changed(self, credit: Room) -> None:
        self._credit = credit
        self._writer.wake()

    # The life of the stream.

    async def run(self) -> None:
        """Serves the stream until its end. Raises a group with the SluiceError to end it with, or
        the FrameBroken that ended it."""
        unwatch = self._host.watch(self._host_changed)
        try:
            async with asyncio.TaskGroup() as group:
                self._renders = group
                group.create_task(self._writer.run())
                over = group.create_task(self._until_over())
                async with aclosing(read_frames(self._connection)) as frames:
                    async for frame in frames:
                        await self._take(frame)
                # The peer half-closed: its slots have ended, or it wants them to.
                self._abort_all()
                over.cancel()
                self._writer.close()
        finally:
            unwatch()
            self._abort_all()
            for slot in list(self._slots.values()):  # the engine's own ends come too late now
                self._close(slot, result_pb2.FINISH_REASON_CANCELLED)
            self._instance.room.leave(self._number)

    def end(self, error: SluiceError) -> None:
        """Ends the stream with an error. Idempotent."""
        if not self._over.done():
            self._over.set_exception(error)

    async def _until_over(self) -> None:
        await self._over

    def _host_changed(self) -> None:
        if self._host.epoch != self._epoch:
            self.end(unavailable("ENGINE_RESTARTED", "The engine of this instance is a new one."))
        self._writer.wake()

    def _abort_all(self) -> None:
        for slot in list(self._slots.values()):
            self._abort(slot, result_pb2.FINISH_REASON_CANCELLED)

    def _compose(self, heartbeat_due: bool) -> inference_pb2.GenerateFramesResponse | None:
        frame = self._outbox.take()
        draining = self._host.draining
        if frame is None:
            if not heartbeat_due and self._credit is None and draining == self._draining_told:
                return None
            frame = inference_pb2.GenerateFramesResponse()
        self._sent += 1
        self._counts.frames["out"] += 1
        frame.sequence = self._sent
        frame.epoch = self._epoch
        if self._credit is not None:
            frame.credit.sequences = self._credit.sequences
            frame.credit.kv_tokens = self._credit.kv_tokens
            self._credit = None
        if draining:
            frame.draining = self._draining_told = True
        return frame

    # What the peer says.

    async def _take(self, frame: inference_pb2.GenerateFramesRequest) -> None:
        received_at = self._loop.time()
        self._received += 1
        self._counts.frames["in"] += 1
        if frame.sequence != self._received:
            raise invalid("sequence", f"must be {self._received}, the next of the stream")
        if self._outbox.overfull:
            raise exhausted("STREAM_NOT_READ", "The peer does not read this stream.", 1.0)
        for cancel in frame.cancels:
            slot = self._slots.get(cancel.slot)
            if slot is not None and slot.attempt == cancel.attempt:
                self._abort(slot, abort_reason(cancel.reason))
        if frame.HasField("demand"):
            demand = Room(frame.demand.sequences, frame.demand.kv_tokens)
            self._instance.room.demand(self._number, demand)
        for count, start in enumerate(frame.starts, 1):
            self._start(start, received_at)
            if count % STARTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _start(self, start: inference_pb2.Start, received_at: float) -> None:
        """Takes a start up or rejects it; the rendering of its prompt goes on in a task."""
        try:
            engine, spec = self._admit(start)
        except SluiceError as error:
            self._reject(start.slot, start.attempt, reject_reason(error), error)
            return
        except RejectError as refusal:
            self._reject(start.slot, start.attempt, refusal.reason)
            return
        slot = Slot(
            start.slot,
            start.attempt,
            spec.request_id,
            spec.sampling.n,
            self._outbox,
            self._ended,
        )
        self._slots[start.slot] = slot
        slot.timer = self._loop.call_at(
            received_at + min(to_seconds(start.remaining), REMAINING_S_MAX),
            partial(self._abort, slot, result_pb2.FINISH_REASON_DEADLINE),
        )
        if is_traceparent(start.traceparent) and is_sampled(start.traceparent):
            slot.span = self._instance.telemetry.span(
                SPAN_GENERATE,
                start.traceparent,
                {
                    ATTR_REQUEST_ID: spec.request_id,
                    ATTR_INSTANCE: self._instance.name,
                    ATTR_FRAME: self._received,
                },
            )
        assert self._renders is not None
        slot.task = self._renders.create_task(self._render(slot, engine, spec))

    def _admit(self, start: inference_pb2.Start) -> tuple[Engine, GenerateSpec]:
        """Everything that can be said without rendering the prompt. The grant comes first: who has
        none learns nothing about the work."""
        if start.slot in self._slots:
            raise RejectError(inference_pb2.REJECT_REASON_SLOT_BUSY)
        self._instance.verify(start.grant, start.work.request_id)
        if self._host.draining:
            raise RejectError(inference_pb2.REJECT_REASON_DRAINING)
        if not start.HasField("remaining"):
            raise invalid("remaining", "is required")
        if to_seconds(start.remaining) <= 0:
            raise RejectError(inference_pb2.REJECT_REASON_EXPIRED)
        engine = self._host.generator()
        if len(self._slots) >= self._instance.room.credit(self._number).sequences:
            raise RejectError(inference_pb2.REJECT_REASON_NO_ROOM)
        return engine, to_spec(start.work, self._host.served_names)

    async def _render(self, slot: Slot, engine: Engine, spec: GenerateSpec) -> None:
        try:
            prepared = await engine.prepare(spec)
            if self._slots.get(slot.number) is not slot:
                return  # aborted, and the engine did not let itself be interrupted
            tokens = len(prepared.prompt_token_ids)
            if spec.continuation is not None:
                tokens += len(spec.continuation.output_token_ids)
            if not self._instance.room.prompt_fits(self._number, tokens):
                self._refuse(slot, inference_pb2.REJECT_REASON_NO_ROOM)
                return
            slot.admit(prepared, tokens, self._loop.time())
            self._kv_tokens_bound += slot.kv_tokens_bound
            slot.running = engine.submit(prepared, slot)
        except Exception as failure:
            error = typed_error(failure, spec.request_id)
            self._refuse(slot, reject_reason(error, spec), error)
            return
        finally:
            slot.task = None
        event = inference_pb2.Event(slot=slot.number, attempt=slot.attempt)
        event.accepted.prompt_tokens = len(prepared.prompt_token_ids)
        event.accepted.simulated = self._host.simulated
        self._counts.starts["accepted"] += 1
        slot.accepted_in = self._outbox.put(event)

    # Ends.

    def _abort(self, slot: Slot, reason: FinishWire) -> None:
        if not slot.claim_abort(reason):
            return
        self._counts.aborts[finish_label(reason)] += 1
        if slot.running is not None:
            slot.running.abort(slot.to_finish_reason())
            return
        if slot.task is not None:
            slot.task.cancel()
        self._close(slot, reason)
        event = inference_pb2.Event(slot=slot.number, attempt=slot.attempt)
        event.ended.CopyFrom(aborted_end(reason, slot.outputs, simulated=self._host.simulated))
        self._outbox.put(event)

    def _ended(self, slot: Slot, end: GenerationEnd) -> None:
        if self._slots.get(slot.number) is not slot:
            return  # the stream is over
        self._counts.tokens["input"] += end.prompt_tokens
        self._counts.tokens["output"] += end.completion_tokens
        now = self._loop.time()
        event = inference_pb2.Event(slot=slot.number, attempt=slot.attempt)
        event.ended.CopyFrom(
            to_ended(
                end,
                request_id=slot.request_id,
                simulated=self._host.simulated,
                first_token_s=None if slot.first_at is None else slot.first_at - slot.accepted_at,
                total_s=now - slot.accepted_at,
                abort_reason=slot.abort_reason,
            )
        )
        self._close(slot, first_reason(event.ended))
        self._outbox.put(event)

    def _refuse(self, slot: Slot, reason: RejectWire, error: SluiceError | None = None) -> None:
        """Rejects a start that holds its slot already."""
        if self._slots.get(slot.number) is slot:
            self._close(slot, result_pb2.FINISH_REASON_ERROR)
            self._reject(slot.number, slot.attempt, reason, error)

    def _reject(
        self, number: int, attempt: int, reason: RejectWire, error: SluiceError | None = None
    ) -> None:
        self._counts.starts[reject_label(reason)] += 1
        event = inference_pb2.Event(slot=number, attempt=attempt)
        event.rejected.reason = reason
        if error is not None:
            event.rejected.status.CopyFrom(to_status(error))
        self._outbox.put(event)

    def _close(self, slot: Slot, reason: FinishWire) -> None:
        """The slot is free."""
        del self._slots[slot.number]
        self._kv_tokens_bound -= slot.kv_tokens_bound
        if slot.timer is not None:
            slot.timer.cancel()
        if slot.span is not None:
            slot.end_span(reason, self._loop.time())
        self._instance.room.released()
