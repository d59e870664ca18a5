"""The frame stream to one execution replica, and the choice of the replica for an instance.

A link holds one ``ExecuteFrames`` stream and the lanes of the instances that this scheduler
reaches through it. Its reader opens the opaque delta batches (nobody before it does) and appends
them to the live requests directly: output never passes the owner task. Events and losses go to
the owner through :class:`LinkObserver`.

Failure modes: a broken stream loses all lanes of the link; the link reconnects with backoff and
the lanes move to another replica meanwhile. Silence of 3 s is a broken stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from scheduler_svc.adapters.lane import FRAME_BYTES_MAX, Lane, Slot
from scheduler_svc.domain.model import FaultKind, InstanceName
from sluice import logs
from sluice.execution.v1 import execution_pb2
from sluice.frames import FrameBroken, FrameConnection, FrameWriter, LossKind, read_frames
from sluice.inference.v1 import inference_pb2

RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 1.0

ExecuteConnection = FrameConnection[
    execution_pb2.ExecuteFramesRequest, execution_pb2.ExecuteFramesResponse
]

_LOSSES: Final = {
    execution_pb2.LOSS_REASON_UNREACHABLE: FaultKind.UNREACHABLE,
    execution_pb2.LOSS_REASON_CLOSED: FaultKind.GOING_DOWN,
    execution_pb2.LOSS_REASON_PROTOCOL: FaultKind.PROTOCOL,
}

log = logs.get(__name__)


class LinkObserver(Protocol):
    """What the owner hears. Calls are synchronous, on the event loop, and never raise."""

    def slot_event(self, lane: Lane, number: int, slot: Slot, event: inference_pb2.Event) -> None:
        """Something happened to a slot; deltas of the same frame were appended before."""

    def slot_fault(self, lane: Lane, number: int, slot: Slot) -> None:
        """A delta did not fit its request: a gap, an overlap or an unknown output."""

    def lane_credit(self, lane: Lane, credit: inference_pb2.Credit) -> None:
        """The instance grants this stream another share of its room."""

    def lane_lost(self, lane: Lane, slots: list[Slot], kind: FaultKind, reason: str) -> None:
        """Everything that ran on the lane is gone."""

    def link_changed(self, link: ExecutionLink) -> None:
        """The link connected, broke, or drains."""


class ExecutionLink:
    """See the module's docstring."""

    def __init__(
        self, target: str, connect: Callable[[], ExecuteConnection], observer: LinkObserver
    ) -> None:
        self.target = target
        self.lanes: dict[InstanceName, Lane] = {}
        self.connected = False
        self.draining = False
        self.stale_deltas = 0
        self.frames_read = 0
        self.frames_written = 0
        self.deltas_read = 0
        self._connect = connect
        self._observer = observer
        self._writer: FrameWriter[execution_pb2.ExecuteFramesRequest] | None = None
        self._dirty: dict[Lane, None] = {}
        self._sequence_out = 0
        self._sequence_in = 0
        self._drain_due = False

    @property
    def usable(self) -> bool:
        """Whether new work may go this way."""
        return self.connected and not self.draining

    def lane(self, name: InstanceName, address: str) -> Lane:
        """The lane of an instance, opened if it was not."""
        lane = self.lanes.get(name)
        if lane is None or lane.address != address:
            lane = self.lanes[name] = Lane(name, address, self._wake)
        if not lane.open:
            lane.open_stream()
        return lane

    def drain(self) -> None:
        """Tells the replica that nothing more will be started; the stream closes in order."""
        self._drain_due = True
        if self._writer is not None:
            self._writer.wake()

    def open_slots(self) -> int:
        """Slots in use over all lanes."""
        return sum(len(lane) for lane in self.lanes.values())

    def close(self) -> None:
        """Half-closes the stream once everything written is out."""
        if self._writer is not None:
            self._writer.close()

    async def run(self) -> None:
        """Keeps the link connected until cancelled."""
        backoff_s = RECONNECT_MIN_S
        while True:
            connection = self._connect()
            try:
                reason = await self._converse(connection)
            finally:
                connection.cancel()
                was_connected, self.connected = self.connected, False
            if was_connected:
                backoff_s = RECONNECT_MIN_S
                log.warning("execution replica lost", target=self.target, reason=reason)
            self._lose_all(reason)
            self._observer.link_changed(self)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, RECONNECT_MAX_S)

    async def _converse(self, connection: ExecuteConnection) -> str:
        """Reads and writes until the stream ends; returns how it ended."""
        self._sequence_out = self._sequence_in = 0
        self.draining = False
        self._writer = FrameWriter(connection, self._compose)
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(_write(self._writer))
            try:
                async for response in read_frames(connection):
                    self._read(response)
                return "closed in order"
            except FrameBroken as broken:
                return str(broken)
            finally:
                writing.cancel()
                self._writer = None

    def _wake(self, lane: Lane) -> None:
        self._dirty[lane] = None
        if self._writer is not None:
            self._writer.wake()

    def _compose(self, heartbeat: bool) -> execution_pb2.ExecuteFramesRequest | None:
        dirty, self._dirty = self._dirty, {}
        request = execution_pb2.ExecuteFramesRequest()
        now = asyncio.get_running_loop().time()
        room = FRAME_BYTES_MAX
        for lane in dirty:
            part = execution_pb2.InstanceRequest()
            written = lane.compose(part, room, now)
            if written is None:
                continue
            part.instance.name = lane.name
            part.instance.address = lane.address
            request.parts.append(part)
            room = max(room - written, 1)
        if self._drain_due:
            request.draining = True
        elif not request.parts and not heartbeat:
            return None
        self._drain_due = False
        self._sequence_out += 1
        self.frames_written += 1
        request.sequence = self._sequence_out
        return request

    def _read(self, response: execution_pb2.ExecuteFramesResponse) -> None:
        self._sequence_in += 1
        if response.sequence != self._sequence_in:
            raise FrameBroken(
                LossKind.PROTOCOL,
                f"frame {response.sequence} came where {self._sequence_in} was due",
            )
        self.frames_read += 1
        now = asyncio.get_running_loop().time()
        if not self.connected:
            self.connected = True
            self._observer.link_changed(self)
        for part in response.parts:
            lane = self.lanes.get(InstanceName(part.instance))
            if lane is None:
                continue
            if part.HasField("lost"):
                reason = execution_pb2.LossReason.Name(part.lost.reason)
                kind = _LOSSES.get(part.lost.reason, FaultKind.LOST_CONNECTION)
                self._observer.lane_lost(lane, list(lane.take_all()), kind, reason)
            else:
                self._read_instance(lane, part.frame, now)
        if response.draining != self.draining:
            self.draining = response.draining
            self._observer.link_changed(self)
        if self.draining and not self.open_slots():
            self.close()  # the replica stops when its streams are half-closed

    def _read_instance(
        self, lane: Lane, frame: inference_pb2.GenerateFramesResponse, now: float
    ) -> None:
        if frame.epoch != lane.epoch:
            if lane.epoch:
                lost = list(lane.take_all())
                lane.open = True  # the stream lives on, with a new engine behind it
                self._observer.lane_lost(lane, lost, FaultKind.ENGINE_DOWN, "EPOCH_CHANGED")
            lane.epoch = frame.epoch
        if frame.deltas:
            self._read_deltas(lane, frame.deltas, now)
        for event in frame.events:
            slot = lane.slot(event.slot, event.attempt)
            if slot is not None:
                self._observer.slot_event(lane, event.slot, slot, event)
            elif event.HasField("accepted"):
                lane.cancel_stray(event.slot, event.attempt)
        if frame.HasField("credit"):
            self._observer.lane_credit(lane, frame.credit)
        lane.draining = frame.draining

    def _read_deltas(self, lane: Lane, batch: bytes, now: float) -> None:
        slots = lane.slots()
        try:
            deltas = inference_pb2.DeltaBatch.FromString(batch).deltas
        except DecodeError:
            lane.close_due = True
            lost = list(lane.take_all())
            self._observer.lane_lost(lane, lost, FaultKind.PROTOCOL, "MALFORMED_OUTPUT")
            self._wake(lane)
            return
        self.deltas_read += len(deltas)
        for delta in deltas:
            slot = slots.get(delta.slot)
            if slot is None or slot.attempt != delta.attempt or slot.live is None:
                self.stale_deltas += 1
            elif not slot.live.append(delta, now):
                self._observer.slot_fault(lane, delta.slot, slot)

    def _lose_all(self, reason: str) -> None:
        for lane in self.lanes.values():
            self._observer.lane_lost(lane, list(lane.take_all()), FaultKind.LOST_RELAY, reason)
        self.lanes.clear()
        self._dirty.clear()


async def _write(writer: FrameWriter[execution_pb2.ExecuteFramesRequest]) -> None:
    """Runs a writer; a broken stream is reported by the reader alone."""
    try:
        await writer.run()
    except FrameBroken as broken:
        log.debug("writing stopped", reason=broken.detail)


def choose_link(name: InstanceName, links: Iterable[ExecutionLink]) -> ExecutionLink | None:
    """The replica for an instance by rendezvous hashing (highest random weight, Thaler and
    Ravishankar 1998) over the usable links: when one goes, only its instances move."""
    best: ExecutionLink | None = None
    best_weight = b""
    for link in links:
        weight = hashlib.blake2b(f"{link.target}|{name}".encode(), digest_size=8).digest()
        if link.usable and (best is None or weight > best_weight):
            best, best_weight = link, weight
    return best
