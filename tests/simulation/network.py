"""gRPC between nodes in one process: messages are serialised, everything else is in memory.

Owns the wires of all calls and what is done to them: a delay, a cut (both ends learn it), a block
of one direction (nobody learns it: neither frames nor cancels pass until it is lifted). A node is
what a process is: what it serves, the tasks in it, and a crash that takes both. Handlers run behind
the real call interceptor; clients are the generated stubs over :class:`Channel`.

Runs on the simulation's loop only; draws no randomness.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.rpc import status_pb2

from sluice.deadline import MethodDeadline
from sluice.errors import Code, SluiceError, deadline_exceeded, unavailable
from sluice.frames import FrameBroken, LossKind, loss_kind
from sluice.frames_memory import MemoryConnection, Way
from sluice.interceptors import CallInterceptor
from sluice.server_limits import MESSAGE_BYTES
from sluice.status import DETAILS_KEY, from_status, grpc_code, to_status, trailers

CAPACITY: Final = 16  # messages on their way, per direction of a call
CLIENT_CAPACITY: Final = 2  # ... of a client's: a flow window that a slow one fills
HEADERS: Final = b""

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

here: contextvars.ContextVar[Node] = contextvars.ContextVar("simulated_node")
"""The node whose code runs."""


class Trailers(bytes):
    """A status behind the last message, as bytes of google.rpc.Status."""


class Wire(MemoryConnection[bytes, bytes]):
    """One end of a call. ``lost`` is called when the other side or the network breaks it, ``over``
    however it breaks; each once."""

    def __init__(self, network: Network, owner: Node, outbound: Way[bytes], inbound: Way[bytes]):
        super().__init__(outbound, inbound)
        self.owner = owner
        self.other: Node = owner
        self.lost: Callable[[], object] | None = None
        self.over: Callable[[], object] | None = None
        self._network = network

    @property
    def broken(self) -> FrameBroken | None:
        """How it broke."""
        return self._broken

    def _break(self, kind: LossKind, detail: str, error: SluiceError | None = None) -> None:
        told = kind is not LossKind.CLOSED and detail != "severed"  # by the peer's own doing
        if told and self._network.is_blocked(self.other, self.owner):
            self._network.later.append((self, kind, detail, error))
        elif told and self.inbound.delay_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self.inbound.delay_s, self.break_now, kind, detail, error)
        else:
            self.break_now(kind, detail, error)

    def break_now(self, kind: LossKind, detail: str, error: SluiceError | None = None) -> None:
        """It breaks, whatever is blocked."""
        if self._broken is None:
            super()._break(kind, detail, error)
            self._network.wires.pop(self, None)
            if self.lost is not None and kind is not LossKind.CLOSED:
                self.lost()
            if self.over is not None:
                self.over()

    def end(self, error: SluiceError) -> None:
        """Ends the call with a status, behind what was written."""
        if self._broken is None:
            self._half_closed = True
            self.outbound.push(Trailers(to_status(error).SerializeToString()))

    async def read(self) -> bytes | None:
        """See the port. A status breaks it."""
        data = await super().read()
        if isinstance(data, Trailers):
            error = from_status(status_pb2.Status.FromString(data))
            self.break_now(loss_kind(error.code, connected=True), str(error), error)
            self._check()
        elif data is None:
            self._network.wires.pop(self, None)
        return data


class Node:
    """A process."""

    def __init__(self, network: Network, name: str, address: str = "") -> None:
        self.network = network
        self.name = name
        self.address = address  # empty: it serves nothing, as clients do
        self.alive = True
        self.on_crash: list[Callable[[], object]] = []
        self._deadlines: Mapping[str, MethodDeadline] = {}
        self._calls = CallInterceptor({}, MESSAGE_BYTES)
        self._handlers: dict[str, Any] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        if address:
            network.nodes[address] = self

    @property
    def server(self) -> Any:
        """What generated code registers a servicer with, by the two methods below."""
        return self

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Not used: methods are registered by name below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The methods of a service."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def enter(self) -> contextvars.Context:
        """A context in which code of this node runs."""
        context = contextvars.copy_context()
        context.run(here.set, self)
        return context

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Runs something in this process. Whatever it raises fails the simulation."""
        loop = asyncio.get_running_loop()
        task: asyncio.Task[Any] = loop.create_task(
            work, name=f"{self.name}:{name}", context=self.enter()
        )
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and self.alive:
            self.network.failed(self, error)

    @property
    def tasks(self) -> list[str]:
        """The names of what runs here."""
        return [task.get_name() for task in self._tasks]

    async def crash(self) -> None:
        """It is gone: nothing it does from now on reaches anybody."""
        self.alive = False
        self.network.nodes.pop(self.address, None)
        self.network.cut(self)
        for callback in self.on_crash:
            callback()
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(
        self, method: str, wire: Wire, metadata: Metadata, deadline_s: float | None
    ) -> None:
        """One call, from its arrival on."""
        task = asyncio.current_task()
        assert task is not None
        wire.lost = task.cancel
        try:
            await wire.read()  # the headers
            context = ServerContext(wire, metadata, deadline_s)

            async def look_up(_: object) -> Any:
                return self._handlers.get(method)

            details = _Details(method, metadata)
            handler: Any = await self._calls.intercept_service(look_up, details)
            context.encode = handler.response_serializer
            context.decode = handler.request_deserializer
            if handler.request_streaming:
                await handler.stream_stream(context, context)
            else:
                request = await context.read()
                if handler.response_streaming:
                    await handler.unary_stream(request, context)
                else:
                    await context.write(await handler.unary_unary(request, context))
            await wire.half_close()
        except (asyncio.CancelledError, FrameBroken, grpc.aio.AbortError):
            pass  # the client is gone, or has heard
        finally:
            wire.lost = None
            if wire.broken is None:
                self.network.wires.pop(wire, None)


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class Stream:
    """A frame connection over a wire: what ``client_connection`` and ``server_connection`` make of
    a call."""

    def __init__(
        self, wire: Wire, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> None:
        self._wire = wire
        self._encode = encode
        self._decode = decode

    async def write(self, frame: Any) -> None:
        """See :class:`sluice.frames.FrameConnection`."""
        await self._wire.write(self._encode(frame))

    async def read(self) -> Any:
        """See :class:`sluice.frames.FrameConnection`."""
        data = await self._wire.read()
        return None if data is None else self._decode(data)

    async def half_close(self) -> None:
        """See :class:`sluice.frames.FrameConnection`."""
        await self._wire.half_close()

    def cancel(self) -> None:
        """See :class:`sluice.frames.FrameConnection`."""
        self._wire.cancel()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Called when the call is over."""
        self._wire.over = lambda: callback(self)


class ServerContext:
    """The part of a servicer context that handlers use."""

    def __init__(self, wire: Wire, metadata: Metadata, deadline_s: float | None) -> None:
        self._wire = wire
        self._metadata = metadata
        self._deadline_s = deadline_s
        self.encode: Callable[[Any], bytes] = bytes
        self.decode: Callable[[bytes], Any] = bytes

    @property
    def stream(self) -> Stream:
        """For ``server_connection``."""
        return Stream(self._wire, self.encode, self.decode)

    def invocation_metadata(self) -> Metadata:
        """Of the client."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds, or ``None`` without a deadline."""
        if self._deadline_s is None:
            return None
        return self._deadline_s - asyncio.get_running_loop().time()

    async def read(self) -> Any:
        """The next request message."""
        data = await self._wire.read()
        return grpc.aio.EOF if data is None else self.decode(data)

    async def write(self, message: Any) -> None:
        """Waits while the client does not read."""
        try:
            await self._wire.write(self.encode(message))
        except FrameBroken:
            raise grpc.aio.UsageError("the call is over") from None

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """Ends the call with a status."""
        error = SluiceError(Code(code.value[0]), "UNKNOWN", details)
        for key, value in trailing_metadata:
            if key == DETAILS_KEY and isinstance(value, bytes):
                error = from_status(status_pb2.Status.FromString(value))
        self._wire.end(error)
        raise grpc.aio.AbortError(details)


class Call:
    """A client's call with one request message."""

    def __init__(
        self,
        wire: Wire,
        request: bytes,
        decode: Callable[[bytes], Any],
        timeout_s: float | None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._wire = wire
        self._request: bytes | None = request
        self._decode = decode
        self._deadline_s = None if timeout_s is None else now + timeout_s

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        """The one response of a unary call."""
        try:
            message = await self.read()
            if message is grpc.aio.EOF:
                raise _rpc_error(unavailable("NO_ANSWER", "The call ended without an answer."))
            return message
        finally:
            self._wire.cancel()

    async def read(self) -> Any:
        """The next response message, or EOF."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                if self._request is not None:
                    request, self._request = self._request, None
                    await self._wire.write(request)
                    await self._wire.half_close()
                data = await self._wire.read()
        except TimeoutError:
            self._wire.cancel()
            raise _rpc_error(deadline_exceeded()) from None
        except FrameBroken as broken:
            raise _rpc_error(broken.error or broken.to_error()) from None
        return grpc.aio.EOF if data is None else self._decode(data)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        """Ends it."""
        self._wire.cancel()
        return True


def _rpc_error(error: SluiceError) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc_code(error.code),
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*trailers(error)),
        error.message,
    )


class Channel:
    """The part of a channel that generated stubs use."""

    def __init__(self, network: Network, source: Node, address: str) -> None:
        self._network = network
        self._source = source
        self._address = address

    def _unary(self, method: str, encode: Any, decode: Any, **_: object) -> Callable[..., Call]:
        def call(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Iterable[tuple[str, str | bytes]] = (),
            **_: object,
        ) -> Call:
            wire = self._network.call(self._source, self._address, method, metadata, timeout)
            return Call(wire, encode(request), decode, timeout)

        return call

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Callable[..., Call]:
        """See grpc.aio.Channel."""
        return self._unary(method, request_serializer, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Callable[..., Call]:
        """See grpc.aio.Channel."""
        return self._unary(method, request_serializer, response_deserializer)

    def stream_unary(self, *_: object, **__: object) -> None:
        """No service has such a method."""

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Callable[..., Stream]:
        """See grpc.aio.Channel."""

        def call(**_: object) -> Stream:
            wire = self._network.call(self._source, self._address, method, (), None)
            return Stream(wire, request_serializer, response_deserializer)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Its calls end by themselves."""

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Network:
    """All nodes and what lies between them. ``failed`` hears what a node's own tasks raised."""

    def __init__(self, failed: Callable[[Node, BaseException], None]) -> None:
        self.failed = failed
        self.nodes: dict[str, Node] = {}
        self.wires: dict[Wire, None] = {}
        self.later: list[tuple[Wire, LossKind, str, SluiceError | None]] = []
        self.delay_s = 0.0005
        self._delays: dict[tuple[str, str], float] = {}
        self._blocked: set[tuple[str, str]] = set()

    def call(
        self,
        source: Node,
        address: str,
        method: str,
        metadata: Iterable[tuple[str, str | bytes]],
        timeout_s: float | None,
    ) -> Wire:
        """The client's end of a new call."""
        target = self.nodes.get(address)
        if target is None or not source.alive:
            lonely = Wire(self, source, Way(1, 0.0), Way(1, 0.0))
            lonely.break_now(LossKind.UNREACHABLE, "no server")
            return lonely
        capacity = CAPACITY if source.address in self.nodes else CLIENT_CAPACITY
        there: Way[bytes] = Way(CAPACITY, self._delay(source, target))
        back: Way[bytes] = Way(capacity, self._delay(target, source))
        client, server = Wire(self, source, there, back), Wire(self, target, back, there)
        client.other, server.other = target, source
        client.connect(server)
        server.connect(client)
        self.wires[client] = self.wires[server] = None
        there.freeze(self.is_blocked(source, target))
        back.freeze(self.is_blocked(target, source))
        there.push(HEADERS)
        now = asyncio.get_running_loop().time()
        deadline_s = None if timeout_s is None else now + timeout_s
        target.spawn(
            target.serve(method, server, tuple(metadata), deadline_s), method.rpartition("/")[2]
        )
        return client

    # What is done to it.

    def delay(self, source: str, target: str, seconds: float) -> None:
        """What goes from one node to another takes so long from now on."""
        self._delays[source, target] = seconds
        for wire in self.wires:
            if (wire.owner.name, wire.other.name) == (source, target):
                wire.outbound.delay_s = seconds

    def block(self, source: str, target: str, blocked: bool) -> None:
        """Nothing gets from one node to the other, or everything does that was held up."""
        (self._blocked.add if blocked else self._blocked.discard)((source, target))
        for wire in self.wires:
            if (wire.owner.name, wire.other.name) == (source, target):
                wire.outbound.freeze(blocked)
        if not blocked:
            held, self.later = self.later, []
            for wire, kind, detail, error in held:
                wire._break(kind, detail, error)

    def cut(self, node: Node, other: str = "") -> int:
        """Breaks all connections of a node, or those with one other; returns how many."""

        def between(one: Node, two: Node) -> bool:
            return one is node and other in ("", two.name)

        cut = [
            wire
            for wire in self.wires
            if between(wire.owner, wire.other) or between(wire.other, wire.owner)
        ]
        for wire in cut:
            wire.sever()
        return len(cut)

    def heal(self) -> None:
        """Nothing is delayed or blocked any more."""
        for source, target in list(self._delays):
            self.delay(source, target, self.delay_s)
        for source, target in sorted(self._blocked):
            self.block(source, target, False)

    def is_blocked(self, source: Node, target: Node) -> bool:
        """Whether nothing gets from one to the other."""
        return (source.name, target.name) in self._blocked

    def _delay(self, source: Node, target: Node) -> float:
        return self._delays.get((source.name, target.name), self.delay_s)


def open_channel(address: str, **_: object) -> Any:
    """Takes the place of :func:`sluice.channels.open_channel`."""
    node = here.get()
    return Channel(node.network, node, address)
