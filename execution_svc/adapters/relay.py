"""What gathers from all instances for one scheduler until its connection takes the next message.

Owns the messages in the making. Concurrency: called from the event loop only. Bound: when more than
:data:`PENDING_BYTES_MAX` wait, :meth:`Relay.room` blocks the instance streams' readers, and through
them the instances' writers; memory stays at that plus one frame per instance.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from execution_svc.adapters.counts import Counts
from sluice import frames
from sluice.execution.v1 import execution_pb2
from sluice.inference.v1 import inference_pb2

# One message carries what gathered, cut here; an instance's frame is at most half of it.
MESSAGE_BYTES_MAX = 1024 * 1024
PENDING_BYTES_MAX = 4 * 1024 * 1024
DETAIL_CHARS_MAX = 256

# An estimate of what a part holds beside its deltas: exact sizes would cost a serialization.
_PART_BYTES = 64
_EVENT_BYTES = 96

_LOSS_REASONS = {
    kind: execution_pb2.LossReason.Value(f"LOSS_REASON_{kind.name}") for kind in frames.LossKind
}


class Relay:
    """Messages in the making. ``wake`` is called when something has gathered."""

    def __init__(self, wake: Callable[[], None], counts: Counts) -> None:
        self._wake = wake
        self._counts = counts
        self._full: deque[tuple[execution_pb2.ExecuteFramesResponse, int]] = deque()
        self._gathering = execution_pb2.ExecuteFramesResponse()
        self._gathering_bytes = 0
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def add(self, instance: str, frame: inference_pb2.GenerateFramesResponse) -> None:
        """A frame of an instance, its deltas unopened."""
        part = self._gathering.parts.add()
        part.instance = instance
        part.frame.CopyFrom(frame)
        self._added(_PART_BYTES + len(frame.deltas) + _EVENT_BYTES * len(frame.events))

    def lost(self, instance: str, kind: frames.LossKind, detail: str) -> None:
        """The stream to an instance is over; everything before is relayed before."""
        part = self._gathering.parts.add()
        part.instance = instance
        part.lost.reason = _LOSS_REASONS[kind]
        part.lost.detail = detail[:DETAIL_CHARS_MAX]
        self._added(_PART_BYTES + len(detail))

    def _added(self, size: int) -> None:
        self._gathering_bytes += size
        self._pending_bytes += size
        if self._gathering_bytes >= MESSAGE_BYTES_MAX // 2:
            self._full.append((self._gathering, self._gathering_bytes))
            self._gathering = execution_pb2.ExecuteFramesResponse()
            self._gathering_bytes = 0
        if self._pending_bytes > PENDING_BYTES_MAX and self._room.is_set():
            self._room.clear()
            self._counts.limit_hits["relay_pending_bytes"] += 1
        self._wake()

    @property
    def has_room(self) -> bool:
        """Whether readers may go on without waiting."""
        return self._room.is_set()

    async def room(self) -> None:
        """Waits until the scheduler has taken half of what waits."""
        await self._room.wait()

    def take(self) -> execution_pb2.ExecuteFramesResponse | None:
        """The next message, without its sequence; ``None`` when nothing has gathered."""
        if self._full:
            message, size = self._full.popleft()
        elif self._gathering_bytes:
            message, size = self._gathering, self._gathering_bytes
            self._gathering = execution_pb2.ExecuteFramesResponse()
            self._gathering_bytes = 0
        else:
            return None
        self._pending_bytes -= size
        if self._pending_bytes <= PENDING_BYTES_MAX // 2:
            self._room.set()
        return message
