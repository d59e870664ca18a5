"""The transports of the frame contract suite: in memory under virtual time, and gRPC on loopback.

A transport runs a scenario on its kind of event loop and opens pairs of connected ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import uvloop

from sluice.channels import open_channel
from sluice.clock import run_virtual
from sluice.errors import SluiceError
from sluice.frames import FrameConnection
from sluice.frames_grpc import client_connection, server_connection
from sluice.frames_memory import MemoryConnection, memory_pair, memory_unreachable
from sluice.server import Health, MeshServer

METHOD = "/test.Frames/Exchange"
CALL_S = 20.0  # bound of everything in a scenario, in case a mutant hangs

End = FrameConnection[bytes, bytes]


@dataclass
class Pair:
    """Two ends. ``abort(error)`` ends the stream by the server's error, ``sever()`` breaks what
    is between them."""

    client: End
    server: End
    abort: Callable[[SluiceError], None]
    sever: Callable[[], Coroutine[Any, Any, None]]


@dataclass
class Transport:
    """``step_s`` is a time that is short and yet long enough for frames to arrive."""

    name: str
    run: Callable[[Coroutine[Any, Any, None]], None]
    open: Callable[[], AbstractAsyncContextManager[Pair]]
    unreachable: Callable[[], AbstractAsyncContextManager[End]]
    step_s: float


# --- Memory --------------------------------------------------------------------------------------


@asynccontextmanager
async def _memory() -> AsyncIterator[Pair]:
    client: MemoryConnection[bytes, bytes]
    server: MemoryConnection[bytes, bytes]
    client, server = memory_pair(capacity=4, delay_s=0.001)

    async def sever() -> None:
        client.sever()

    yield Pair(client, server, server.abort, sever)


@asynccontextmanager
async def _memory_unreachable() -> AsyncIterator[End]:
    yield memory_unreachable()


# --- gRPC ----------------------------------------------------------------------------------------


class _ServerEnd:
    """The server's end with the handler's life tied to it: the handler returns at half-close."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._inner = server_connection(context)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, frame: bytes) -> None:
        await self._inner.write(frame)

    async def read(self) -> bytes | None:
        return await self._inner.read()

    async def half_close(self) -> None:
        await self._inner.half_close()
        if not self.over.done():
            self.over.set_result(None)

    def cancel(self) -> None:
        self._inner.cancel()

    def abort(self, error: SluiceError) -> None:
        self.over.set_exception(error)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.ends: asyncio.Queue[_ServerEnd] = asyncio.Queue()

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self._exchange)

    async def _exchange(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        end = _ServerEnd(context)
        self.ends.put_nowait(end)
        await end.over


@asynccontextmanager
async def _grpc() -> AsyncIterator[Pair]:
    handlers = _Handlers()
    server = MeshServer("test", ["127.0.0.1:0"], Health())
    server.grpc.add_generic_rpc_handlers((handlers,))
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.ports[0]}")
    await channel.channel_ready()
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD, None, None)()
    client = client_connection(call)
    try:
        async with asyncio.timeout(CALL_S):
            # A call reaches its handler without a first frame.
            end = await handlers.ends.get()

            async def sever() -> None:
                await server.stop(0)

            yield Pair(client, end, end.abort, sever)
    finally:
        client.cancel()
        await channel.close()
        await server.stop(0)


@asynccontextmanager
async def _grpc_unreachable() -> AsyncIterator[End]:
    channel = open_channel("127.0.0.1:1")
    try:
        async with asyncio.timeout(CALL_S):
            yield client_connection(channel.stream_stream(METHOD, None, None)())
    finally:
        await channel.close()


def _run_uvloop(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario)


TRANSPORTS = [
    Transport("memory", run_virtual, _memory, _memory_unreachable, 0.05),
    Transport("grpc", asyncio.run, _grpc, _grpc_unreachable, 0.1),
    Transport("grpc-uvloop", _run_uvloop, _grpc, _grpc_unreachable, 0.1),
]
