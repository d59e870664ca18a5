"""The frame transport over grpc.aio.

Stateless but for the two adapters, one per stream; see ``sluice.frames`` for the port. They hide
what differs between the library's sides: a client call reports its end as a status, as an
InvalidStateError or, after a local cancel, as a CancelledError of a task that nobody cancelled; a
server context reports a lost client as an end of the stream and cancels the handler's task.
"""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar, cast

import grpc.aio

from sluice.errors import Code, SluiceError
from sluice.frames import FrameBroken, LossKind, loss_kind
from sluice.status import from_call, from_rpc_error

Out = TypeVar("Out")
In = TypeVar("In")

_EOF: object = grpc.aio.EOF

# How long a server waits after the end of a stream for the library to say that the client was
# lost, and not half-closed: both are learnt from one completion queue, in either order.
END_SETTLE_S = 0.02


class GrpcClientConnection(Generic[Out, In]):
    """The client's side of a stream-stream call."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Out, In]) -> None:
        self._call = call
        self._connected = False  # the peer answered
        self._ended = False
        self._half_closed = False
        self._cancelled = False

    async def write(self, frame: Out) -> None:
        assert not self._half_closed, "write after half_close"
        try:
            await self._call.write(frame)
        except asyncio.CancelledError:
            self._raise_if_own_cancel()
            raise
        except grpc.aio.AioRpcError as error:
            raise self._broken(from_rpc_error(error), error.details()) from None
        except asyncio.InvalidStateError:
            raise await self._broken_by_status() from None

    async def read(self) -> In | None:
        if self._ended:
            return None
        try:
            frame = await self._call.read()
        except asyncio.CancelledError:
            self._raise_if_own_cancel()
            raise
        except grpc.aio.AioRpcError as error:
            raise self._broken(from_rpc_error(error), error.details()) from None
        if frame is _EOF:
            self._ended = True
            return None
        self._connected = True
        return cast("In", frame)

    async def half_close(self) -> None:
        self._half_closed = True
        try:
            await self._call.done_writing()
        except asyncio.CancelledError:
            self._raise_if_own_cancel()
            raise

    def cancel(self) -> None:
        if not self._call.done():
            self._cancelled = True
            self._call.cancel()

    def _raise_if_own_cancel(self) -> None:
        """After :meth:`cancel` the library raises CancelledError in tasks that nobody cancelled.
        In a task that was cancelled the stream is broken: half a frame may be on its way."""
        task = asyncio.current_task()
        if self._cancelled and (task is None or not task.cancelling()):
            raise FrameBroken(LossKind.CLOSED, "cancelled on this side") from None
        self.cancel()

    async def _broken_by_status(self) -> FrameBroken:
        if self._cancelled:
            return FrameBroken(LossKind.CLOSED, "cancelled on this side")
        return self._broken(await from_call(self._call), await self._call.details())

    def _broken(self, error: SluiceError, details: str | None) -> FrameBroken:
        kind = loss_kind(error.code, connected=self._connected)
        typed = None if error.code is Code.OK else error
        return FrameBroken(kind, f"{error.code.name}: {details}", typed)


class GrpcServerConnection(Generic[Out, In]):
    """The server's side, made inside the handler by the handler's own task. The stream lasts until
    the handler returns. When the client is lost, the library cancels that task: its read or write
    raises CancelledError, that of another task FrameBroken. :meth:`cancel` cancels the task too;
    the server's error interceptor then tells the client."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._task = asyncio.current_task()
        self._ended = False
        self._half_closed = False
        self._cancelled = False

    async def write(self, frame: Out) -> None:
        assert not self._half_closed, "write after half_close"
        self._check()
        try:
            await self._context.write(frame)
        except grpc.aio.BaseError as error:
            raise self._broken(type(error).__name__) from None

    async def read(self) -> In | None:
        if self._ended:
            return None
        self._check()
        try:
            frame = await self._context.read()
        except grpc.aio.BaseError as error:
            raise self._broken(type(error).__name__) from None
        if frame is _EOF:
            await asyncio.sleep(END_SETTLE_S)
            if self._task is not None and (self._task.done() or self._task.cancelling()):
                raise self._broken("the client was lost")
            self._ended = True
            return None
        return cast("In", frame)

    async def half_close(self) -> None:
        self._half_closed = True

    def cancel(self) -> None:
        if not self._cancelled and self._task is not None and not self._task.done():
            self._cancelled = True
            self._task.cancel()

    def _check(self) -> None:
        if self._cancelled:
            raise FrameBroken(LossKind.CLOSED, "cancelled on this side")

    def _broken(self, detail: str) -> FrameBroken:
        if self._cancelled:
            return FrameBroken(LossKind.CLOSED, "cancelled on this side")
        return FrameBroken(LossKind.DISCONNECTED, detail)


def client_connection(
    call: grpc.aio.StreamStreamCall[Out, In],
) -> GrpcClientConnection[Out, In]:
    """The port over a call that was just made."""
    return GrpcClientConnection(call)


def server_connection(
    context: grpc.aio.ServicerContext[In, Out],
) -> GrpcServerConnection[Out, In]:
    """The port over a handler's context; the handler must be a coroutine, not a generator, and
    must not touch its request iterator."""
    return GrpcServerConnection(context)
