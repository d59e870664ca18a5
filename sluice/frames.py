"""The frame transport: a port for long-lived bidirectional streams of frames.

Owns the port (:class:`FrameConnection`), the one writer of a stream (:class:`FrameWriter`) and the
one reader (:func:`read_frames`). ``sluice.frames_grpc`` implements the port over gRPC,
``sluice.frames_memory`` in memory; both pass ``tests/contract/test_frame_transport.py``.

Concurrency: one task writes and one task reads a connection; everything is called from one event
loop. No task and no timer per frame: a writer has one timer per heartbeat, a reader one per
silence limit, however many frames pass.

Failures: reads and writes raise :class:`FrameBroken` and nothing else, apart from CancelledError.
Cancelling a task inside :meth:`FrameConnection.read` or :meth:`FrameConnection.write` breaks the
connection: a half-sent frame has no meaning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from sluice.errors import Code, SluiceError

Out = TypeVar("Out")
In = TypeVar("In")
OutContra = TypeVar("OutContra", contravariant=True)
InCo = TypeVar("InCo", covariant=True)

HEARTBEAT_S = 1.0  # an empty frame at least this often
SILENCE_LIMIT_S = 3.0  # nothing for this long: the stream is broken

# A watchdog that fires this late was not served in time: the loop stood still (a stopped process,
# a long callback), so frames may wait unread and silence cannot be judged. It then looks once more
# after STALL_GRACE_S.
STALL_S = 0.25
STALL_GRACE_S = 0.25


class LossKind(Enum):
    """How a stream broke; the names equal those of ``sluice.execution.v1.LossReason``."""

    UNREACHABLE = "unreachable"  # no connection could be made
    DISCONNECTED = "disconnected"  # an open connection broke
    SILENT = "silent"  # nothing came within the silence limit
    CLOSED = "closed"  # ended in order, or cancelled on this side
    PROTOCOL = "protocol"  # the peer broke the protocol, or said that this side did


_ERRORS: dict[LossKind, tuple[Code, str]] = {
    LossKind.UNREACHABLE: (Code.UNAVAILABLE, "No connection could be made."),
    LossKind.DISCONNECTED: (Code.UNAVAILABLE, "The stream broke."),
    LossKind.SILENT: (Code.UNAVAILABLE, "The stream was silent for too long."),
    LossKind.CLOSED: (Code.UNAVAILABLE, "The stream is closed."),
    LossKind.PROTOCOL: (Code.INVALID_ARGUMENT, "The stream's protocol was broken."),
}


class FrameBroken(Exception):  # noqa: N818 - names an event, as the protocol does
    """A stream is broken; everything open on it is lost.

    ``detail`` is for logs. ``error`` is the typed status with which the peer ended the stream, if
    it sent one."""

    def __init__(self, kind: LossKind, detail: str, error: SluiceError | None = None) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail
        self.error = error

    @classmethod
    def protocol(cls, detail: str) -> FrameBroken:
        """For a reader that finds the peer in breach of the protocol."""
        return cls(LossKind.PROTOCOL, detail)

    @property
    def reason(self) -> LossKind:
        """The same as ``kind``."""
        return self.kind

    def to_error(self) -> SluiceError:
        """What a server answers on a stream that broke: reason ``STREAM_<KIND>``, fixed text."""
        code, message = _ERRORS[self.kind]
        return SluiceError(code, f"STREAM_{self.kind.name}", message)


# Codes with which a server says that it, or the way to it, is at fault: the stream may be opened
# again. All others mean that it will not have this stream.
_LOST_CODES = frozenset(
    {
        Code.CANCELLED,
        Code.UNKNOWN,
        Code.DEADLINE_EXCEEDED,
        Code.ABORTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    }
)


def loss_kind(code: Code, *, connected: bool) -> LossKind:
    """The kind of loss that a status means. ``connected``: the peer answered before."""
    if code is Code.OK:
        return LossKind.CLOSED
    if code not in _LOST_CODES:
        return LossKind.PROTOCOL
    if code is Code.UNAVAILABLE and not connected:
        return LossKind.UNREACHABLE
    return LossKind.DISCONNECTED


class FrameConnection(Protocol, Generic[OutContra, InCo]):
    """One side of a bidirectional stream. ``write`` and ``read`` each have one caller at a time."""

    async def write(self, frame: OutContra) -> None:
        """Hands over a frame, in order. Waits while the peer does not read (backpressure). A
        frame that was handed over may still be lost with the stream. After :meth:`half_close`:
        an AssertionError."""

    async def read(self) -> InCo | None:
        """The next frame, or ``None`` for ever after the peer half-closed in order."""

    async def half_close(self) -> None:
        """Writes nothing more; what was written still arrives. Reading goes on. Idempotent. The
        server side of a gRPC stream ends when its handler returns, which it does after this."""

    def cancel(self) -> None:
        """Breaks the stream at once, both ways: the peer sees DISCONNECTED, calls on this side
        raise CLOSED. Idempotent; does nothing after the end."""


class FrameWriter(Generic[Out]):
    """Writes a stream's frames: what has gathered, as soon as the previous write is done. Under
    load frames therefore grow by themselves.

    ``compose(heartbeat_due)`` is called synchronously when the connection can take a frame, and
    returns the frame or ``None`` for nothing to send; it is asked again after each frame until it
    returns ``None``, so it may cut frames at a size. When ``heartbeat_due`` is true it returns a
    frame in any case, an empty one at need. It is true in the first call, which opens the stream.
    """

    def __init__(
        self,
        connection: FrameConnection[Out, Any],
        compose: Callable[[bool], Out | None],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        assert heartbeat_s > 0
        self._connection = connection
        self._compose = compose
        self._heartbeat_s = heartbeat_s
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False
        self._closing = False
        self._written_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self.frames_written = 0
        self.writing_since: float | None = None  # loop time of a write in progress, for metrics

    def wake(self) -> None:
        """Says that there is something to send. Cheap; any number of times; never blocks."""
        self._woken = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Ends :meth:`run` in order: what ``compose`` still has is sent, then the stream is
        half-closed. Idempotent."""
        self._closing = True
        self.wake()

    async def run(self) -> None:
        """Writes until :meth:`close`. Raises FrameBroken when the stream breaks. Called once."""
        loop = asyncio.get_running_loop()
        assert self._timer is None
        self._timer = loop.call_later(self._heartbeat_s, self._beat, loop)
        try:
            while True:
                self._woken = False
                now = loop.time()
                frame = self._compose(now >= self._written_at + self._heartbeat_s)
                if frame is not None:
                    self.writing_since = now
                    await self._connection.write(frame)
                    self.writing_since = None
                    self._written_at = loop.time()
                    self.frames_written += 1
                elif self._closing:
                    await self._connection.half_close()
                    return
                elif not self._woken:
                    self._waiter = loop.create_future()
                    await self._waiter
        finally:
            self.writing_since = None
            self._waiter = None
            self._timer.cancel()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        # Runs once per heartbeat, not per frame: a frame in between only moves the next beat.
        # `run` compares the same sum: a rounding difference would skip a beat.
        now = loop.time()
        due_at = self._written_at + self._heartbeat_s
        if now >= due_at:
            self.wake()
            due_at = now + self._heartbeat_s
        self._timer = loop.call_at(due_at, self._beat, loop)


async def read_frames(
    connection: FrameConnection[Any, In], silence_limit_s: float = SILENCE_LIMIT_S
) -> AsyncGenerator[In, None]:
    """Yields the peer's frames in order until it half-closes. Raises FrameBroken, with SILENT when
    no frame comes within ``silence_limit_s`` seconds of waiting for one; the peer then sees a
    loss. Time that the consumer spends between two frames is not silence. Must be iterated
    by one task."""
    task = asyncio.current_task()
    assert task is not None
    watch = _SilenceWatch(asyncio.get_running_loop(), task, silence_limit_s)
    try:
        while True:
            watch.waiting_since = watch.loop.time()
            try:
                frame = await connection.read()
            except asyncio.CancelledError:
                # The watch ends the read by cancelling the task, as asyncio.timeout does; a
                # cancellation by anybody else goes on.
                if watch.fired and task.uncancel() <= watch.cancelling:
                    raise FrameBroken(
                        LossKind.SILENT, f"no frame for {silence_limit_s:g} s"
                    ) from None
                raise
            finally:
                watch.waiting_since = None
            if frame is None:
                return
            yield frame
    finally:
        watch.stop()


class _SilenceWatch:
    """One timer per stream that re-arms itself at most once per silence limit."""

    __slots__ = ("_limit_s", "_task", "_timer", "cancelling", "fired", "loop", "waiting_since")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[object], limit_s: float
    ) -> None:
        self.loop = loop
        self._task = task
        self._limit_s = limit_s
        self.waiting_since: float | None = None  # None: the consumer is at work
        self.fired = False
        self.cancelling = task.cancelling()  # cancels that were there before
        self._arm(loop.time() + limit_s)

    def _arm(self, when: float, *, last: bool = False) -> None:
        self._timer = self.loop.call_at(when, self._check, when, last)

    def _check(self, when: float, last: bool) -> None:
        now = self.loop.time()
        since = self.waiting_since
        if since is None or now < since + self._limit_s:
            self._arm((now if since is None else since) + self._limit_s)
        elif now - when > STALL_S and not last:
            self._arm(now + STALL_GRACE_S, last=True)
        else:
            self.fired = True
            self._task.cancel()

    def stop(self) -> None:
        self._timer.cancel()
