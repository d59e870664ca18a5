"""The edge and its schedulers: failover, drain, health, keepalive and traces.

With the real Envoy before scripted schedulers.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from sluice.mesh_config import MeshSettings
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.server import PROBE_LAG_S
from tests.hermetic.edge_harness import (
    Edge,
    edge,
    free_port,
    script,
    stub,
    wait_until,
)
from tests.hermetic.raw_h2 import GENERATE, RawH2, generate_body


def ask(running: Edge, prompt: str = "x", **values: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/chat", json={"prompt": prompt}, timeout=10, **values)


def server_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["instance"]
    return name


def health(running: Edge) -> int:
    return httpx.get(f"{running.url}/healthz").status_code


def test_a_refused_connection_is_tried_at_another_scheduler(tmp_path: Path) -> None:
    """Health checks are rare here, so that nothing but the retry can help. Seen to fail without the
    template's retry policy."""
    with (
        stub("a") as first,
        stub("b") as second,
        edge(tmp_path, [first, second], health_interval_s=60.0) as running,
    ):
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 2)
        first.process.kill()
        first.process.wait()
        # Sizes up to what is kept for a retry.
        for size in (1, 1_000, running.settings.retry_body_bytes - 1_000) * 7:
            assert server_of(ask(running, "p" * size)) == "b"
        assert running.stat("cluster.scheduler.upstream_rq_retry_success") > 0


def test_a_scheduler_that_dies_costs_no_later_request_an_error(tmp_path: Path) -> None:
    with stub("a") as first, stub("b") as second, edge(tmp_path, [first, second]) as running:
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 2)
        assert {server_of(ask(running)) for _ in range(20)} == {"a", "b"}
        first.process.kill()
        first.process.wait()
        for _ in range(40):
            assert server_of(ask(running)) == "b"
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 1, 3)
        with stub("c", port=first.port):
            # A come-back on the same address takes traffic within 2 s of probes.
            wait_until(lambda: server_of(ask(running)) == "c", 3)


def test_what_a_scheduler_has_seen_is_not_tried_again(tmp_path: Path) -> None:
    with stub("a") as first, stub("b") as second, edge(tmp_path, [first, second]) as running:
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 2)
        assert ask(running, script("fail", code="UNAVAILABLE")).status_code == 503
        assert first.control()["calls"] + second.control()["calls"] == 1
        with RawH2(running.settings.port) as client:
            stream = client.request(GENERATE, generate_body(script("hang")))
            wait_until(lambda: first.control()["active"] + second.control()["active"] == 1)
            busy = first if first.control()["active"] else second
            other = second if busy is first else first
            before = other.control()["calls"]
            busy.process.kill()
            assert client.outcome(stream)["grpc-status"] == "14"
            assert other.control()["calls"] == before


def test_a_draining_scheduler_gets_nothing_new_and_ends_its_streams(tmp_path: Path) -> None:
    with stub("a") as first, stub("b") as second, edge(tmp_path, [first, second]) as running:
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 2)
        with RawH2(running.settings.port) as client:
            prompt = script("stream", count=20, pause_ms=100)
            streams = [client.request(GENERATE, generate_body(prompt)) for _ in range(4)]
            client.pump(0.2)
            assert first.control()["active"] > 0
            begin = time.monotonic()
            first.control(serving=False)
            wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 1, 2)
            assert time.monotonic() - begin < PROBE_LAG_S
            assert {server_of(ask(running)) for _ in range(20)} == {"b"}
            assert [client.outcome(each)["grpc-status"] for each in streams] == ["0"] * 4
        first.control(serving=True)
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 2, 2)


def test_the_health_endpoint_follows_the_schedulers(tmp_path: Path) -> None:
    with stub("a") as first, stub("b") as second, edge(tmp_path, [first, second]) as running:
        wait_until(lambda: health(running) == 200)
        first.control(serving=False)
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 1, 3)
        assert health(running) == 200
        second.control(serving=False)
        wait_until(lambda: health(running) == 503, 3)
        # The worker threads learn it after the statistics do.
        refused = wait_until(lambda: [each for each in [ask(running)] if each.is_error], 1)[0]
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        second.control(serving=True)
        wait_until(lambda: health(running) == 200, 3)


def test_a_scheduler_that_comes_up_late_is_found(tmp_path: Path) -> None:
    port = free_port()
    with edge(tmp_path, [], schedulers=(f"127.0.0.1:{port}",)) as running:
        assert health(running) == 503
        with stub("late", port=port):
            wait_until(lambda: health(running) == 200, 2)
            assert server_of(ask(running)) == "late"


def test_schedulers_are_found_by_name(tmp_path: Path) -> None:
    with stub("a") as one:
        name = f"localhost:{one.port}"
        with edge(tmp_path, [one], schedulers=(name,)) as running:
            assert server_of(ask(running)) == "a"


def test_idle_connections_are_pinged_and_survive(tmp_path: Path) -> None:
    """A server ends a connection after some pings that come too fast.

    tests/unit/sluice/test_edge.py compares the real distances. Seen to fail with `--ping-min-s 30`.
    """
    with (
        stub("a", 0, "--ping-min-s", "0.9") as one,
        edge(tmp_path, [one], keepalive_s=1.0) as running,
        RawH2(running.settings.port) as client,
    ):
        stream = client.request(GENERATE, generate_body(script("hang")))
        wait_until(lambda: one.control()["active"] == 1)
        client.pump(6)
        assert one.control()["active"] == 1
        ended = "cluster.scheduler.upstream_cx_destroy_remote_with_active_rq"
        assert running.stat(ended) == 0
        client.h2.reset_stream(stream)
        client.flush()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = Collector()
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def traceparent_of(answer: httpx.Response) -> str:
    metadata = dict(json.loads(answer.json()["text"])["metadata"])
    found: str = metadata.get("traceparent", "")
    return found


def test_the_edge_opens_the_root_span_and_passes_its_context_on(
    tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    servicer, endpoint = collector
    mesh = MeshSettings(log_level="warning", otlp_endpoint=endpoint, trace_sample_ratio=1.0)
    with stub() as one, edge(tmp_path, [one], mesh=mesh) as running:
        seen = traceparent_of(ask(running, headers={"authorization": "Bearer secret"}))
        match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", seen)
        assert match
        httpx.post(f"{running.url}/chat?token=secret", json={"prompt": "x"})
        httpx.get(f"{running.url}/elsewhere?token=secret")
        theirs = f"00-{'a' * 32}-{'b' * 16}-01"
        joined = traceparent_of(ask(running, headers={"traceparent": theirs}))
        assert joined.startswith(f"00-{'a' * 32}-")
        assert joined != theirs
        wait_until(lambda: len(servicer.spans) >= 4, 10, "spans are exported")
    root = next(span for span in servicer.spans if span.trace_id.hex() == match[1])
    assert (root.span_id.hex(), root.parent_span_id, root.name) == (match[2], b"", "POST /chat")
    child = next(span for span in servicer.spans if span.trace_id.hex() == "a" * 32)
    assert child.parent_span_id.hex() == "b" * 16
    others = [span.name for span in servicer.spans if span not in (root, child)]
    assert others == ["refused", "refused"]
    assert "secret" not in str(servicer.spans)


def test_without_sampling_the_context_of_a_client_is_passed_on(
    tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    servicer, endpoint = collector
    mesh = MeshSettings(log_level="warning", otlp_endpoint=endpoint, trace_sample_ratio=0.0)
    with stub() as one, edge(tmp_path, [one], mesh=mesh) as running:
        assert traceparent_of(ask(running)).endswith("-00")
    with stub() as one, edge(tmp_path, [one]) as running:
        theirs = f"00-{'a' * 32}-{'b' * 16}-01"
        assert traceparent_of(ask(running, headers={"traceparent": theirs})) == theirs
    assert servicer.spans == []


def test_the_loss_of_the_collector_costs_no_request(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    mesh = MeshSettings(log_level="warning", otlp_endpoint=endpoint, trace_sample_ratio=1.0)
    with stub() as one, edge(tmp_path, [one], mesh=mesh) as running:
        for _ in range(50):
            assert server_of(ask(running)) == "a"


def test_streams_go_to_the_scheduler_with_fewer_open_ones(tmp_path: Path) -> None:
    with stub("a") as first, stub("b") as second, edge(tmp_path, [first, second]) as running:
        wait_until(lambda: running.stat("cluster.scheduler.membership_healthy") == 2)
        with grpc.insecure_channel(running.target) as channel:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate
            request = generate_pb2.GenerateRequest(prompt=script("hang"))
            calls = [call(request) for _ in range(40)]
            wait_until(
                lambda: first.control()["active"] + second.control()["active"] == 40, 5, "40 run"
            )
            assert abs(first.control()["active"] - second.control()["active"]) <= 8
            for each in calls:
                each.cancel()


def test_the_edge_itself_drains(tmp_path: Path) -> None:
    """What a supervisor does before it ends the process: fail the health, wait, SIGTERM."""
    with (
        stub() as one,
        edge(tmp_path, [one]) as running,
        RawH2(running.settings.port) as client,
    ):
        stream = client.request(GENERATE, generate_body(script("stream", count=10, pause_ms=100)))
        wait_until(lambda: one.control()["active"] == 1)
        running.admin("/healthcheck/fail", "POST")
        assert health(running) == 503
        assert client.outcome(stream)["grpc-status"] == "0"
        wait_until(lambda: running.stat("http.clear.downstream_rq_active") == 0)
        running.process.terminate()
        assert running.process.wait(5) == 0
