"""What a MeshServer does around every call, over real gRPC on loopback.

Goal: no exception's text reaches a
client, deadlines have defaults and caps, cancels reach handlers and leave nothing behind, refusals
before the first message are trailers only. Each test names the mutant on which it was seen to fail.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from sluice import context, deadline
from sluice.channels import open_channel
from sluice.deadline import MethodDeadline
from sluice.errors import Code, SluiceError, exhausted, invalid, unavailable
from sluice.frames import FrameBroken, LossKind
from sluice.reflection import REFLECTION_SERVICES
from sluice.server import Health, MeshServer, ServerLimits
from tests.contract.server_rig import KINDS, SERVICE, Rig, Things, rig

SECRET = "canary-4f1c"
PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

Act = Callable[[Any], Awaitable[None]]


def _raise(error: BaseException) -> Act:
    async def act(_: object) -> None:
        raise error

    return act


# --- Errors --------------------------------------------------------------------------------------

_UNTYPED: list[BaseException] = [
    RuntimeError(SECRET),
    KeyError(SECRET),
    OSError(5, SECRET),
    TimeoutError(SECRET),
    StopAsyncIteration(SECRET),
    AssertionError(SECRET),
    UnicodeDecodeError("utf-8", b"x", 0, 1, SECRET),
    ExceptionGroup(SECRET, [ValueError(SECRET), TypeError(SECRET)]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", _UNTYPED, ids=lambda error: type(error).__name__)
async def test_an_exceptions_text_never_reaches_the_client(kind: str, error: Exception) -> None:
    """Mutant: the interceptor lets unknown exceptions pass (the library sends their text)."""
    async with rig(things=Things(before=_raise(error))) as server:
        got, failed = await server.outcome(kind)
        assert failed is not None
        assert got == []
        assert failed.code() is grpc.StatusCode.INTERNAL
        seen = f"{failed.details()} {failed.debug_error_string()} {failed.trailing_metadata()}"
        assert SECRET not in seen
        assert "Traceback" not in seen
        trailing = dict(failed.trailing_metadata() or ())
        assert trailing["x-request-id"]
        info = error_details_pb2.ErrorInfo()
        status = server_status(failed)
        assert status.details[0].Unpack(info)
        assert (info.domain, info.reason) == ("sluice", "INTERNAL")
        assert info.metadata["request_id"] == trailing["x-request-id"]


def server_status(failed: grpc.aio.AioRpcError) -> Any:
    from google.rpc import status_pb2

    trailing = dict(failed.trailing_metadata() or ())
    return status_pb2.Status.FromString(trailing["grpc-status-details-bin"])


@pytest.mark.parametrize("kind", ["ServerStream", "Both"])
async def test_an_exception_after_the_first_message_is_as_silent(kind: str) -> None:
    """Mutant: generator handlers are not wrapped."""
    async with rig(things=Things(after=_raise(RuntimeError(SECRET)))) as server:
        got, failed = await server.outcome(kind)
        assert got == ["first"]
        assert failed is not None
        assert failed.code() is grpc.StatusCode.INTERNAL
        assert SECRET not in f"{failed.details()} {failed.trailing_metadata()}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (exhausted("BUSY", "Busy.", 1.5), (Code.RESOURCE_EXHAUSTED, "BUSY", 1.5)),
        (invalid("a.b", "is wrong"), (Code.INVALID_ARGUMENT, "INVALID_FIELD", None)),
        (FrameBroken(LossKind.SILENT, SECRET), (Code.UNAVAILABLE, "STREAM_SILENT", None)),
        (
            ExceptionGroup("g", [ExceptionGroup("h", [unavailable("DRAINING", "Draining.")])]),
            (Code.UNAVAILABLE, "DRAINING", None),
        ),
        (NotImplementedError(SECRET), (Code.UNIMPLEMENTED, "METHOD_NOT_AVAILABLE", None)),
    ],
    ids=["shed", "invalid", "stream", "group", "unimplemented"],
)
async def test_a_typed_error_arrives_whole(
    kind: str, error: Exception, expected: tuple[Code, str, float | None]
) -> None:
    """Mutant: groups are not looked into; retry delays are dropped."""
    async with rig(things=Things(before=_raise(error))) as server:
        typed = await server.error(kind)
        assert (typed.code, typed.reason, typed.retry_after_s) == expected
        assert SECRET not in str(typed)


async def test_a_failed_inner_call_is_passed_on_when_typed_and_hidden_when_foreign() -> None:
    """Mutant: every AioRpcError is passed on, its text included."""
    inner = Things(before=_raise(exhausted("QUOTA", "Over.", 2.0)))
    async with rig(things=inner) as below:

        async def relay(_: object) -> None:
            await below.call("Unary")

        async with rig(things=Things(before=relay)) as server:
            assert (await server.error("Unary")).reason == "QUOTA"
    metadata = grpc.aio.Metadata()
    foreign = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, metadata, metadata, SECRET, None)
    async with rig(things=Things(before=_raise(foreign))) as server:
        assert (await server.error("Unary")).reason == "INTERNAL"
    down = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, SECRET, None)
    async with rig(things=Things(before=_raise(down))) as server:
        typed = await server.error("Unary")
        assert (typed.code, typed.reason) == (Code.UNAVAILABLE, "PEER_UNAVAILABLE")
        assert SECRET not in str(typed)


@pytest.mark.parametrize("method", ["Unfinished", "Nowhere"])
async def test_a_method_that_is_not_there_says_so_in_type(method: str) -> None:
    """Mutant: unknown methods are left to the library (no details)."""
    async with rig() as server:
        typed = await server.error(method)
        assert (typed.code, typed.reason) == (Code.UNIMPLEMENTED, "METHOD_NOT_AVAILABLE")


# --- Messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_size_limit_is_exact_and_typed(kind: str) -> None:
    """One below, at, one above. Mutant: the limit is left to the library
    (RESOURCE_EXHAUSTED without a reason, which reads as busy)."""
    limit = 100_000
    overhead = 4  # tag and length of the text inside its message
    async with rig(limits=ServerLimits(message_bytes=limit)) as server:
        for size in (limit - 1, limit):
            got, failed = await server.outcome(kind, "x" * (size - overhead))
            assert failed is None
            assert got
            assert len(server.things.received.pop()) == size - overhead
        typed = await server.error(kind, "x" * (limit + 1 - overhead))
        assert (typed.code, typed.reason) == (Code.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")
        assert server.things.received == []


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unreadable_message_is_the_callers_fault(kind: str) -> None:
    """Mutant: decoding is left to the library."""
    async with rig() as server:
        path = f"/{SERVICE}/{kind}"
        raw = b"\xff\xff\xff"
        channel: Any = server.channel
        if kind == "Unary":
            call = channel.unary_unary(path, None, None)(raw)
        elif kind == "ServerStream":
            call = channel.unary_stream(path, None, None)(raw).read()
        elif kind == "ClientStream":
            call = channel.stream_unary(path, None, None)(iter([raw]))
        else:
            call = channel.stream_stream(path, None, None)(iter([raw])).read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert server_status(caught.value).details


async def test_a_refusal_before_the_first_message_is_trailers_only() -> None:
    """Only then can a transcoder choose the HTTP status. Oracle: the first HEADERS frame
    ends the stream. Mutant: the interceptor sends initial metadata first."""
    async with rig(things=Things(before=_raise(exhausted("BUSY", "Busy.", 1.5)))) as server:
        events = await asyncio.to_thread(_raw_call, server.server.ports[0], "ServerStream")
        headers = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
        assert len(headers) == 1
        assert headers[0].stream_ended is not None
        fields = dict(headers[0].headers)
        assert fields[b"grpc-status"] == b"8"
        assert fields[b"retry-after"] == b"2"
        assert b"grpc-status-details-bin" in fields


def _begin_call(method: str) -> h2.connection.H2Connection:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    connection.initiate_connection()
    connection.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"/{SERVICE}/{method}"),
            (":authority", "test"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ],
    )
    connection.send_data(1, struct.pack(">BI", 0, 0), end_stream=True)
    return connection


def _raw_call(port: int, method: str) -> list[h2.events.Event]:
    connection = _begin_call(method)
    events: list[h2.events.Event] = []
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(connection.data_to_send())
        while not any(isinstance(event, h2.events.StreamEnded) for event in events):
            data = sock.recv(65536)
            assert data, "closed before the stream ended"
            events += connection.receive_data(data)
            sock.sendall(connection.data_to_send())
    return events


# --- Context and deadlines -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_request_id_and_trace_context_are_bound_for_the_handler(kind: str) -> None:
    """Mutant: the context variables are set in the interceptor's own context only."""
    seen: list[tuple[str, str, str]] = []

    async def look(_: object) -> None:
        async def inside() -> None:
            values = (context.request_id, context.traceparent, context.tracestate)
            seen.append((values[0].get(), values[1].get(), values[2].get()))

        await asyncio.create_task(inside())

    async with rig(things=Things(before=look)) as server:
        metadata = [("x-request-id", "r-1"), ("traceparent", PARENT), ("tracestate", "a=b")]
        await server.outcome(kind, metadata=metadata)
        await server.outcome(kind, metadata=[("x-request-id", "a b"), ("traceparent", "00-x")])
        await server.outcome(kind)
    assert seen[0] == ("r-1", PARENT, "a=b")
    assert seen[1][0] not in ("", "a b")
    assert seen[1][1:] == ("", "")
    assert seen[2][1:] == ("", "")
    assert len({request_id for request_id, _, _ in seen}) == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_every_call_of_a_method_has_a_deadline(kind: str) -> None:
    """Mutants: no default; no cap; the caller's deadline is ignored."""
    remaining: list[float] = []

    async def look(_: object) -> None:
        bound = deadline.current()
        assert bound is not None
        remaining.append(bound.remaining(asyncio.get_running_loop().time()))

    method = MethodDeadline(default_s=10.0, cap_s=60.0)
    async with rig(deadline=method, things=Things(before=look)) as server:
        for timeout in (None, 30.0, 3600.0):
            _, failed = await server.outcome(kind, timeout=timeout)
            assert failed is None, failed
    assert remaining[0] == pytest.approx(10.0, abs=0.5)
    assert remaining[1] == pytest.approx(30.0, abs=1.0)
    assert remaining[2] == pytest.approx(60.0, abs=0.5)


async def test_a_method_without_one_has_only_its_callers_deadline() -> None:
    seen: list[deadline.Deadline | None] = []

    async def look(_: object) -> None:
        seen.append(deadline.current())

    async with rig(things=Things(before=look)) as server:
        await server.outcome("Both")
        await server.outcome("Both", timeout=5.0)
    assert seen[0] is None
    assert seen[1] is not None


@pytest.mark.parametrize("kind", ["Unary", "ServerStream"])
async def test_a_handler_that_overruns_its_default_is_ended(kind: str) -> None:
    """Mutant: no backstop (the client without a deadline waits for ever)."""

    async def hang(_: object) -> None:
        await asyncio.sleep(60)

    method = MethodDeadline(default_s=0.2, cap_s=60.0)
    async with rig(deadline=method, things=Things(before=hang)) as server:
        typed = await server.error(kind)
        assert (typed.code, typed.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert server.things.running == 0


# --- Cancels -------------------------------------------------------------------------------------


async def _until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_calls_leave_no_handler_behind(kind: str) -> None:
    """Goal: handlers and counts go back to zero. Method: 60 calls cancelled at
    seeded random moments before, in and after the first message. Seed 11. Mutant: the interceptor
    catches CancelledError and goes on."""

    async def linger(_: object) -> None:
        await asyncio.sleep(30)

    dice = random.Random(11)
    async with rig(things=Things(after=linger)) as server:
        counts = server.server.calls.counts
        tasks_before = len(asyncio.all_tasks())
        for _ in range(60):
            task = asyncio.create_task(server.outcome(kind))
            await asyncio.sleep(dice.random() * 0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await _until(lambda: server.things.running == 0)
        await _until(lambda: counts.open.get(f"/{SERVICE}/{kind}", 0) == 0)
        await _until(lambda: len(asyncio.all_tasks()) <= tasks_before + 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_cancelled_from_inside_ends_the_call(kind: str) -> None:
    """The library alone would let the client wait for ever. Mutant: nobody tells the client."""

    async def cancel_itself(_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10)

    async with rig(things=Things(before=cancel_itself)) as server:
        typed = await server.error(kind)
        assert (typed.code, typed.reason) == (Code.UNAVAILABLE, "CALL_CANCELLED")


async def test_calls_are_counted_by_method_and_code() -> None:
    async with rig(things=Things(before=_raise(unavailable("X", "x")))) as server:
        await server.outcome("Unary")
        server.things.before = Things().before
        await server.outcome("Unary")
        await server.outcome("Nowhere")
        counts = server.server.calls.counts
        method = f"/{SERVICE}/Unary"
        assert counts.ended == {(method, "UNAVAILABLE"): 1, (method, "OK"): 1}
        assert counts.open == {method: 0}


# --- Health and reflection -----------------------------------------------------------------------


async def test_a_probe_does_not_stand_behind_a_crowd_of_calls() -> None:
    """Calls are accepted one after the other, and a handler that works holds the loop. Mutant:
    health is known by name alone, like every other method."""
    crowd = 400

    async def work(_: object) -> None:
        time.sleep(0.002)  # noqa: ASYNC251 - what a request costs

    things = Things(before=work)
    async with rig(things=things) as server:
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        calls = [asyncio.create_task(server.outcome("Unary")) for _ in range(crowd)]
        await asyncio.sleep(0)  # all are sent
        await stub.Check(health_pb2.HealthCheckRequest())
        served = len(things.received)
        await asyncio.gather(*calls)
        assert len(things.received) == crowd
        assert served < crowd / 10


async def test_health_is_served_by_check_and_watch() -> None:
    async with rig() as server:
        health = server.server.health
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        component = health.component("engine")
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nope"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        component.up()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        health.terminate()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("version", REFLECTION_SERVICES)
async def test_reflection_answers_in_both_versions(version: str) -> None:
    """Mutant: only v1alpha is registered."""
    async with rig() as server:
        call: Any = server.channel.stream_stream(
            f"/{version}/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {s.name for s in (await call.read()).list_services_response.service}
        assert listed == {SERVICE, "grpc.health.v1.Health", *REFLECTION_SERVICES}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=version))
        answer = (await call.read()).file_descriptor_response
        file = descriptor_pb2.FileDescriptorProto.FromString(answer.file_descriptor_proto[0])
        assert f"{file.package}.ServerReflection" == version
        await call.done_writing()


async def test_a_service_that_no_module_describes_is_refused() -> None:
    """Reflection would name it and then not know it. Mutant: the pool is not asked."""
    server = MeshServer("t", [], Health())
    with pytest.raises(ValueError, match=r"test\.Undescribed"):
        server.add_service("test.Undescribed")
    await server.stop(0)


async def test_open_watch_and_reflection_streams_do_not_hold_up_a_stop() -> None:
    """Mutant: health and reflection streams are left open at stop (it takes the whole grace)."""
    async with rig() as server:
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        call: Any = server.channel.stream_stream(
            f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.read()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.server.stop(10.0)
        assert loop.time() - began < 5.0


# --- Binding and connections ---------------------------------------------------------------------


async def test_a_taken_port_refuses_the_start_by_name() -> None:
    """Mutant: ports may be shared (so_reuseport)."""
    async with rig() as server:
        address = f"127.0.0.1:{server.server.ports[0]}"
        other = MeshServer("other", [address], Health())
        try:
            with pytest.raises(OSError, match=address):
                await other.start()
        finally:
            await other.stop(0)


async def test_pings_are_permitted_at_the_stated_interval() -> None:
    """Method: a raw client holds a call open and pings every 50 ms, 20 times. Oracle:
    under a minimum of 10 ms it lives, under one of 60 s it is sent away (too_many_pings). Mutant:
    the option's often copied name, which the library ignores (the default is 5 minutes)."""

    async def hold(_: object) -> None:
        await asyncio.sleep(10)

    async def sent_away(ping_min_s: float) -> bool:
        limits = ServerLimits(ping_min_s=ping_min_s, ping_strikes_max=2)
        async with rig(limits=limits, things=Things(before=hold)) as server:
            return await asyncio.to_thread(_sent_away_by_pings, server.server.ports[0])

    assert not await sent_away(0.01)
    assert await sent_away(60.0)


def _sent_away_by_pings(port: int) -> bool:
    connection = _begin_call("Unary")
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as sock:
        for number in range(20):
            connection.ping(number.to_bytes(8, "big"))
            try:
                sock.sendall(connection.data_to_send())
                data = sock.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                return True
            if not data or b"too_many_pings" in data:  # a GOAWAY's debug text
                return True
            time.sleep(0.05)
    return False


async def test_channels_do_not_share_a_connection() -> None:
    """``WatchLoad`` must not wait behind frames. Mutant: the pool option is left out."""
    async with rig() as server:
        peers: set[str] = set()

        async def look(call: Any) -> None:
            peers.add(call.peer())

        server.things.before = look
        address = f"127.0.0.1:{server.server.ports[0]}"
        async with open_channel(address) as one, open_channel(address) as two:
            for channel in (one, two):
                await Rig(server.server, server.things, channel).outcome("Unary")
        assert len(peers) == 2


def test_a_sluice_error_is_shared_safely_between_calls() -> None:
    """A module keeps constant errors; raising one must not grow it."""
    error = SluiceError(Code.UNIMPLEMENTED, "X", "x")
    for _ in range(3):
        try:
            raise error
        except SluiceError as caught:
            caught.__traceback__ = None
    assert error.__traceback__ is None
