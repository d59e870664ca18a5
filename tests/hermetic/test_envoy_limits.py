"""Bounds at the edge: sizes, floods, slow readers, memory and names of statistics.

With the real Envoy before a scripted scheduler.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import h2.errors
import httpx
import pytest

from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.server_limits import MESSAGE_SLACK_BYTES, ServerLimits
from tests.hermetic.edge_harness import Edge, edge, edge_with_stub, script, wait_until
from tests.hermetic.raw_h2 import GENERATE, GENERATE_TEXT, RawH2, generate_body

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge_with_stub(tmp_path_factory.mktemp("edge")) as running:
        yield running


def answers(running: Edge) -> bool:
    """Whether a new client is served."""
    return httpx.post(f"{running.url}/chat", json={"prompt": "x"}).status_code == 200


def test_header_bytes_are_taken_up_to_the_limit(shared: Edge) -> None:
    limit = shared.settings.header_kib_max * KIB

    def ask(size: int) -> httpx.Response:
        return httpx.post(
            f"{shared.url}/chat", json={"prompt": "x"}, headers={"x-fill": "a" * size}
        )

    assert ask(limit - 512).status_code == 200
    refused = ask(limit)
    assert refused.status_code == 431
    assert refused.json()["details"][0]["reason"] == "HEADERS_TOO_LARGE"
    with RawH2(shared.settings.port) as client:
        fit = client.request(GENERATE_TEXT, generate_body("x"), [("x-fill", "a" * (limit - 512))])
        assert client.outcome(fit)["grpc-status"] == "0"
        large = client.request(GENERATE_TEXT, generate_body("x"), [("x-fill", "a" * limit)])
        # HTTP/2 knows no answer to headers that were not read; the connection stays.
        assert client.outcome(large)["reset"] == h2.errors.ErrorCodes.INTERNAL_ERROR
        after = client.request(GENERATE_TEXT, generate_body("x"))
        assert client.outcome(after)["grpc-status"] == "0"
        assert client.h2.remote_settings.max_header_list_size == limit


def test_header_fields_are_taken_up_to_the_limit(shared: Edge) -> None:
    limit = shared.settings.headers_max
    base = 6  # those that the raw client sends itself
    with RawH2(shared.settings.port) as client:
        for count, fits in ((limit - base, True), (limit - base + 1, False)):
            fields = [(f"x-fill-{number}", "a") for number in range(count)]
            outcome = client.outcome(client.request(GENERATE_TEXT, generate_body("x"), fields))
            assert ("reset" in outcome) != fits


def test_a_message_over_the_services_limit_is_refused_by_code(shared: Edge) -> None:
    """The edge sets no limit to a gRPC message; the service's answer comes through."""
    limit = ServerLimits().message_bytes + MESSAGE_SLACK_BYTES
    with grpc.insecure_channel(shared.target) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).GenerateText
        for extra in (0, 1):
            request = generate_pb2.GenerateTextRequest(prompt="a" * (limit + extra - 5))
            assert request.ByteSize() == limit + extra
            if not extra:
                assert call(request, timeout=20).instance == "a"
                continue
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_of_many_messages_is_not_held_back(shared: Edge) -> None:
    with grpc.insecure_channel(shared.target) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate
        prompt = script("stream", count=20, pause_ms=20)
        begin = time.monotonic()
        seen = [time.monotonic() - begin for _ in call(generate_pb2.GenerateRequest(prompt=prompt))]
        assert len(seen) == 20
        assert seen[0] < 0.25
        assert seen[-1] - seen[0] > 0.3  # they came one by one
        many = call(generate_pb2.GenerateRequest(prompt=script("stream", count=5_000)))
        assert [message.sequence for message in many] == list(range(1, 5_001))


def test_slow_readers_take_bounded_memory_and_stop_nobody_else(shared: Edge) -> None:
    """Goal: a client that does not read costs the edge a window, and others nothing.

    Method: 100 streams of 8 MiB each whose window stays closed, then one ordinary stream over the
    same upstream connection. Oracle: messages that left the scheduler, memory of the process, and
    the ordinary stream ends. Seen to fail with an upstream connection window of 1 MiB (the ordinary
    stream stalls) and with stream windows of 16 MiB (everything is taken in).
    """
    before = shared.memory_bytes()
    written = shared.stubs[0].control()["written"]
    slow = script("stream", count=2_048, bytes=4 * KIB)
    with RawH2(shared.settings.port, stream_window=0) as client:
        for _ in range(100):
            client.request(GENERATE, generate_body(slow))
        client.pump(1.5)
        taken = (shared.stubs[0].control()["written"] - written) * 4 * KIB
        assert taken < 100 * 256 * KIB
        assert shared.memory_bytes() - before < 100 * 128 * KIB
        with RawH2(shared.settings.port) as other:
            quick = other.request(GENERATE, generate_body(script("stream", count=200, bytes=100)))
            assert other.outcome(quick, 5)["grpc-status"] == "0"
    wait_until(lambda: shared.stubs[0].control()["active"] == 0, 5, "calls of gone clients end")


def test_a_slow_reader_that_ends_keeps_its_rest_for_a_bounded_time(tmp_path: Path) -> None:
    with (
        edge_with_stub(tmp_path, flush_timeout_s=1.0) as running,
        RawH2(running.settings.port, stream_window=1_000) as client,
    ):
        stream = client.request(GENERATE, generate_body(script("stream", count=10, bytes=KIB)))
        assert "reset" in client.outcome(stream, 4)


def test_rapid_resets_close_the_connection_and_not_the_edge(shared: Edge) -> None:
    """Goal: rapid reset is cut off. Method: 2,000 streams opened and reset at once. Oracle: the
    connection is closed, the counter rises, others are served. Seen to fail with
    `early_resets_max` at 1,000,000."""
    name = "http.clear.downstream_rq_too_many_premature_resets"
    before = shared.stat(name)
    with RawH2(shared.settings.port) as client:
        for _ in range(2_000):
            stream = client.request(GENERATE, generate_body(script("hang")))
            client.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
            client.flush()
            if client.closed:
                break
        client.pump(2)
        assert client.closed
    assert shared.stat(name) == before + 1
    assert answers(shared)
    wait_until(lambda: shared.stubs[0].control()["active"] == 0, 5, "reset calls end")


def test_a_client_that_cancels_some_streams_keeps_its_connection(shared: Edge) -> None:
    """Hundreds of early cancels are what a busy honest client may do."""
    with RawH2(shared.settings.port) as client:
        for _ in range(800):
            stream = client.request(GENERATE, generate_body(script("hang")))
            client.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
            client.flush()
        last = client.request(GENERATE_TEXT, generate_body("x"))
        assert client.outcome(last)["grpc-status"] == "0"


def raw_connection(port: int) -> socket.socket:
    """A socket after the HTTP/2 preface and empty settings."""
    opened = socket.create_connection(("127.0.0.1", port), timeout=5)
    opened.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    return opened


def is_closed(opened: socket.socket, limit_s: float = 3.0) -> bool:
    """Whether the peer closes within the limit; reads what it says until then."""
    end = time.monotonic() + limit_s
    while (rest := end - time.monotonic()) > 0:
        opened.settimeout(rest)
        try:
            if not opened.recv(65_536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    ("flood", "frame", "count"),
    [
        ("pings", b"\0\0\x08\6\0\0\0\0\0" + b"\0" * 8, 200_000),
        ("settings", b"\0\0\0\4\0\0\0\0\0", 200_000),
        # A HEADERS frame without its end, then CONTINUATION frames for ever.
        ("continuations", b"\0\x40\0\x09\0\0\0\0\1" + b"\0\1a\1b" * 3_277, 200),
        ("empty data", b"\0\0\0\0\0\0\0\0\1", 10_000),
    ],
)
def test_a_flood_of_frames_ends_its_connection_only(
    shared: Edge, flood: str, frame: bytes, count: int
) -> None:
    before = shared.resident_bytes()
    with raw_connection(shared.settings.port) as opened:
        try:
            if flood == "continuations":
                opened.sendall(b"\0\0\0\1\0\0\0\0\1")
            sent = 0
            while sent < count:
                batch = min(1_000, count - sent)
                opened.sendall(frame * batch)
                sent += batch
        except (OSError, TimeoutError):
            pass
        # Pings and settings are answered, which nobody reads: the answers are what is bounded.
        closed = is_closed(opened)
    assert closed
    assert answers(shared)
    assert shared.resident_bytes() - before < 50 * MIB


def test_streams_over_the_limit_of_a_connection_are_refused(tmp_path: Path) -> None:
    with (
        edge_with_stub(tmp_path, streams_per_connection_max=16) as running,
        RawH2(running.settings.port) as client,
    ):
        client.pump(0.2)
        assert client.h2.remote_settings.max_concurrent_streams == 16
        streams = [client.request(GENERATE, generate_body(script("hang"))) for _ in range(16)]
        assert len(streams) == 16
        wait_until(lambda: running.stubs[0].control()["active"] == 16, 5, "16 streams run")
        # A client that ignores the limit.
        client.h2.remote_settings._settings[3].append(1_000)
        client.h2.remote_settings.acknowledge()
        extra = client.request(GENERATE, generate_body(script("hang")))
        outcome = client.outcome(extra)
        assert outcome.get("reset") == h2.errors.ErrorCodes.REFUSED_STREAM or client.closed


def test_connections_over_the_limit_are_closed(tmp_path: Path) -> None:
    with edge_with_stub(tmp_path, connections_max=4) as running:
        opened = [raw_connection(running.settings.port) for _ in range(4)]
        with raw_connection(running.settings.port) as fifth:
            assert is_closed(fifth)
        for each in opened:
            each.close()
        wait_until(lambda: running.stat("http.clear.downstream_cx_active") == 0, 5)
        assert answers(running)


def test_a_request_that_never_ends_is_ended(tmp_path: Path) -> None:
    with edge_with_stub(tmp_path, headers_timeout_s=1.0, request_timeout_s=1.0) as running:
        with socket.create_connection(("127.0.0.1", running.settings.port), timeout=5) as opened:
            opened.sendall(b"POST /chat HTTP/1.1\r\nhost: x\r\n")
            assert opened.recv(4_096).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", running.settings.port), timeout=5) as opened:
            opened.sendall(b"POST /chat HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            assert opened.recv(4_096).startswith(b"HTTP/1.1 408")


def test_a_silent_stream_ends_at_the_limit_and_a_steady_one_does_not(tmp_path: Path) -> None:
    with (
        edge_with_stub(tmp_path, silence_limit_s=1.0) as running,
        RawH2(running.settings.port) as client,
    ):
        steady = client.request(GENERATE, generate_body(script("stream", count=12, pause_ms=250)))
        silent = client.request(GENERATE, generate_body(script("hang")))
        outcome = client.outcome(silent, 3)
        assert outcome.get("grpc-status") in ("4", "14"), outcome
        assert client.outcome(steady)["grpc-status"] == "0"


def test_random_paths_and_models_add_no_statistics(shared: Edge) -> None:
    def names() -> int:
        return len(shared.admin("/stats?format=text").splitlines())

    def ask(client: httpx.Client, number: int) -> None:
        client.get(f"{shared.url}/random/{number}", headers={"x-random": str(number)})

    with httpx.Client(http1=False, http2=True) as client:
        for number in range(10):
            ask(client, number)
        httpx.post(f"{shared.url}/chat", json={"prompt": "x", "model": "m"})
        before = names()
        for number in range(3_000):
            ask(client, number)
    with RawH2(shared.settings.port) as raw:
        for number in range(7_000):
            path = (
                f"/sluice.scheduler.v1.SchedulerService/M{number}" if number % 2 else f"/r{number}"
            )
            stream = raw.request(path, b"")
            if number % 100 == 99:
                raw.outcome(stream)
                raw.events.clear()
    assert names() == before


def test_over_its_memory_limit_the_edge_sheds_and_recovers(tmp_path: Path) -> None:
    """64 MiB is the least that may be set; 100 unfinished bodies of 1 MiB go beyond it."""
    body = b'{"prompt":"%s' % (b"a" * MIB)
    head = b"POST /chat HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n"
    with edge_with_stub(tmp_path, heap_bytes_max=64 * MIB) as running:
        opened = []
        for _ in range(100):
            each = socket.create_connection(("127.0.0.1", running.settings.port), timeout=1)
            opened.append(each)
            try:
                each.sendall(head + body)
            except (OSError, TimeoutError):
                continue
        shed = "overload.envoy.overload_actions.stop_accepting_requests.active"
        wait_until(lambda: running.stat(shed) == 1, 5, "requests are shed")
        assert running.memory_bytes() < 160 * MIB
        for each in opened:
            each.close()
        wait_until(lambda: running.stat(shed) == 0, 10, "requests are taken again")
        assert answers(running)


def test_an_edge_without_schedulers_refuses_at_once(tmp_path: Path) -> None:
    with edge(tmp_path, [], schedulers=("127.0.0.1:1",)) as running:
        begin = time.monotonic()
        answer = httpx.post(f"{running.url}/chat", json={"prompt": "x"})
        assert time.monotonic() - begin < 3
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["details"][0]["reason"] == "NO_SCHEDULER"
        assert httpx.get(f"{running.url}/healthz").status_code == 503
        with RawH2(running.settings.port) as client:
            outcome = client.outcome(client.request(GENERATE, generate_body("x")))
        assert (outcome["grpc-status"], outcome["retry-after"]) == ("14", "1")
