"""The frame transport in memory: the gRPC adapter's twin for simulation and tests.

Owns the two ends and what is on its way between them. Runs on any event loop, the virtual-time one
included; draws no randomness. Besides what the port says, a direction can be delayed or frozen
(nothing arrives any more and neither side notices), and the pair severed (both see DISCONNECTED).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from sluice.errors import SluiceError
from sluice.frames import FrameBroken, LossKind, loss_kind

Frame = TypeVar("Frame")
Out = TypeVar("Out")
In = TypeVar("In")

CAPACITY = 16  # frames written and not yet read, per direction


class Way(Generic[Frame]):
    """One direction: a bounded queue with a delay. ``None`` in the queue is the half-close."""

    def __init__(self, capacity: int, delay_s: float) -> None:
        assert capacity >= 1
        assert delay_s >= 0
        self._capacity = capacity
        self._frozen = False
        self._queue: deque[tuple[float, Frame | None]] = deque()  # (due at, frame)
        self._last_due_at = float("-inf")
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.delay_s = delay_s

    def full(self) -> bool:
        return len(self._queue) >= self._capacity

    def push(self, frame: Frame | None) -> None:
        # Never due before an earlier frame, also when the delay was lowered in between.
        due_at = asyncio.get_running_loop().time() + self.delay_s
        self._last_due_at = max(self._last_due_at, due_at)
        self._queue.append((self._last_due_at, frame))
        self._notify_reader()

    def due_at(self) -> float | None:
        """When the next frame can be taken; ``None``: none is on its way."""
        return None if self._frozen or not self._queue else self._queue[0][0]

    def pop(self) -> Frame | None:
        _, frame = self._queue.popleft()
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        return frame

    def freeze(self, frozen: bool) -> None:
        """Stops the direction, or lets it go on with everything that was written meanwhile."""
        self._frozen = frozen
        self._notify_reader()

    def clear(self) -> None:
        """Drops what is on its way and wakes both sides."""
        self._queue.clear()
        self._notify_reader()
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _notify_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait_readable(self, due_at: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = None if due_at is None else loop.call_at(due_at, self._notify_reader)
        try:
            await self._reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    async def wait_writable(self) -> None:
        self._writer = asyncio.get_running_loop().create_future()
        try:
            await self._writer
        finally:
            self._writer = None


class MemoryConnection(Generic[Out, In]):
    """One end; see :class:`sluice.frames.FrameConnection`. ``outbound`` and ``inbound`` are its
    directions, for faults."""

    def __init__(self, outbound: Way[Out], inbound: Way[In]) -> None:
        self.outbound = outbound
        self.inbound = inbound
        self._peer: MemoryConnection[In, Out] | None = None
        self._broken: FrameBroken | None = None
        self._half_closed = False
        self._ended = False  # the peer's half-close was read

    def connect(self, peer: MemoryConnection[In, Out]) -> None:
        self._peer = peer

    async def write(self, frame: Out) -> None:
        assert not self._half_closed, "write after half_close"
        try:
            # A turn of the loop per write, as a socket takes: others can gather meanwhile.
            await asyncio.sleep(0)
            while self._broken is None and self.outbound.full():
                await self.outbound.wait_writable()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._check()
        self.outbound.push(frame)

    async def read(self) -> In | None:
        if self._ended:
            return None
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._check()
                due_at = self.inbound.due_at()
                if due_at is not None and due_at <= loop.time():
                    frame = self.inbound.pop()
                    self._ended = frame is None
                    return frame
                await self.inbound.wait_readable(due_at)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _check(self) -> None:
        if self._broken is not None:
            # A new exception for each caller: a raised one collects tracebacks.
            broken = self._broken
            raise FrameBroken(broken.kind, broken.detail, broken.error)

    async def half_close(self) -> None:
        if not self._half_closed and self._broken is None:
            self._half_closed = True
            self.outbound.push(None)

    def cancel(self) -> None:
        if self._peer is not None and not (self._ended and self._half_closed):
            self._break(LossKind.CLOSED, "cancelled on this side")
            self._peer._break(LossKind.DISCONNECTED, "cancelled by the peer")

    def abort(self, error: SluiceError) -> None:
        """Ends the stream with a typed error, as a gRPC server's handler does by raising it."""
        if self._peer is not None:
            kind = loss_kind(error.code, connected=True)
            self._break(LossKind.CLOSED, "aborted on this side")
            self._peer._break(kind, str(error), error)

    def sever(self) -> None:
        """The connection between the two breaks."""
        self._break(LossKind.DISCONNECTED, "severed")
        if self._peer is not None:
            self._peer._break(LossKind.DISCONNECTED, "severed")

    def _break(self, kind: LossKind, detail: str, error: SluiceError | None = None) -> None:
        if self._broken is None:
            self._broken = FrameBroken(kind, detail, error)
            self.inbound.clear()
            self.outbound.clear()


def memory_pair(
    capacity: int = CAPACITY, delay_s: float = 0.0
) -> tuple[MemoryConnection[Out, In], MemoryConnection[In, Out]]:
    """The two ends of a stream: (client, server). Each direction holds ``capacity`` frames and
    takes ``delay_s`` seconds."""
    to_server: Way[Out] = Way(capacity, delay_s)
    to_client: Way[In] = Way(capacity, delay_s)
    client: MemoryConnection[Out, In] = MemoryConnection(to_server, to_client)
    server: MemoryConnection[In, Out] = MemoryConnection(to_client, to_server)
    client.connect(server)
    server.connect(client)
    return client, server


def memory_unreachable() -> MemoryConnection[Out, In]:
    """A client's end that never found its server: UNREACHABLE."""
    connection: MemoryConnection[Out, In] = MemoryConnection(Way(1, 0.0), Way(1, 0.0))
    connection._break(LossKind.UNREACHABLE, "no server")
    return connection
