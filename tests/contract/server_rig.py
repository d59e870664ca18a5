"""A MeshServer on loopback with one method of each kind, whose handlers do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.wrappers_pb2 import StringValue

from sluice.channels import ending, open_channel
from sluice.deadline import MethodDeadline
from sluice.errors import SluiceError
from sluice.server import Health, MeshServer, ServerLimits
from sluice.status import from_rpc_error

SERVICE = "test.Things"
descriptor_pool.Default().AddSerializedFile(
    descriptor_pb2.FileDescriptorProto(
        name="test/things.proto",
        package="test",
        service=[descriptor_pb2.ServiceDescriptorProto(name="Things")],
    ).SerializeToString()
)
KINDS = ("Unary", "ServerStream", "ClientStream", "Both")

Act = Callable[["grpc.aio.ServicerContext[Any, Any]"], Awaitable[None]]


async def nothing(_: object) -> None:
    """A handler that is done at once."""


@dataclass
class Things(grpc.GenericRpcHandler):
    """``before`` runs before the first response, ``after`` after it. Answers with the message
    that came (unary requests) and counts handlers that are running."""

    before: Act = nothing
    after: Act = nothing
    running: int = 0
    received: list[str] = field(default_factory=list)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method.removeprefix(f"/{SERVICE}/"))

    def __post_init__(self) -> None:
        codec: Any = (StringValue.FromString, StringValue.SerializeToString)
        unary: Any = self._unary
        stream: Any = self._stream
        unfinished: Any = self._unfinished
        self._handlers: Mapping[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(unary, *codec),
            "ServerStream": grpc.unary_stream_rpc_method_handler(stream, *codec),
            "ClientStream": grpc.stream_unary_rpc_method_handler(unary, *codec),
            "Both": grpc.stream_stream_rpc_method_handler(stream, *codec),
            "Unfinished": grpc.unary_unary_rpc_method_handler(unfinished, *codec),
        }

    async def _take(self, request: Any) -> None:
        if isinstance(request, StringValue):
            self.received.append(request.value)
        else:
            async for message in request:
                self.received.append(message.value)

    async def _unary(self, request: Any, context: Any) -> StringValue:
        self.running += 1
        try:
            await self._take(request)
            await self.before(context)
            await self.after(context)
            return StringValue(value="done")
        finally:
            self.running -= 1

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[StringValue]:
        self.running += 1
        try:
            await self._take(request)
            await self.before(context)
            yield StringValue(value="first")
            await self.after(context)
        finally:
            self.running -= 1

    def _unfinished(self, request: Any, context: Any) -> StringValue:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        raise NotImplementedError("as generated servicers do")


@dataclass
class Rig:
    """A running server and a channel to it."""

    server: MeshServer
    things: Things
    channel: grpc.aio.Channel

    def call(self, method: str, *requests: str, **options: Any) -> Any:
        """A call of a kind in ``KINDS``."""
        codec: Any = (StringValue.SerializeToString, StringValue.FromString)
        messages = [StringValue(value=text) for text in requests or ("x",)]
        path = f"/{SERVICE}/{method}"
        if method == "ServerStream":
            return self.channel.unary_stream(path, *codec)(messages[0], **options)
        if method == "ClientStream":
            return self.channel.stream_unary(path, *codec)(iter(messages), **options)
        if method == "Both":
            return self.channel.stream_stream(path, *codec)(iter(messages), **options)
        return self.channel.unary_unary(path, *codec)(messages[0], **options)

    async def outcome(
        self, method: str, *requests: str, **options: Any
    ) -> tuple[list[str], grpc.aio.AioRpcError | None]:
        """What came, and the status if it is not OK."""
        call = self.call(method, *requests, **options)
        got: list[str] = []
        try:
            if method in ("ServerStream", "Both"):
                with ending(call):
                    async for message in call:
                        got.append(message.value)  # noqa: PERF401
            else:
                got.append((await call).value)
        except grpc.aio.AioRpcError as error:
            return got, error
        return got, None

    async def error(self, method: str, *requests: str, **options: Any) -> SluiceError:
        """The typed error of a call that must fail."""
        got, error = await self.outcome(method, *requests, **options)
        assert error is not None, f"{method} answered {got}"
        return from_rpc_error(error)


@asynccontextmanager
async def rig(
    *,
    deadline: MethodDeadline | None = None,
    limits: ServerLimits | None = None,
    things: Things | None = None,
) -> AsyncIterator[Rig]:
    """A started server; ``deadline`` is that of every method."""
    things = things or Things()
    deadlines = {} if deadline is None else {f"/{SERVICE}/{kind}": deadline for kind in KINDS}
    server = MeshServer("things", ["127.0.0.1:0"], Health(), limits, deadlines)
    server.grpc.add_generic_rpc_handlers((things,))
    server.add_service(SERVICE)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.ports[0]}")
    try:
        async with asyncio.timeout(30):
            await channel.channel_ready()
            yield Rig(server, things, channel)
    finally:
        await channel.close()
        await server.stop(0)
