"""Telemetry against a real OTLP receiver on loopback, and against one that is not there.

Goal: parents are right, the flag decides, limits hold, and an absent or a hanging
collector delays nobody. Oracle: what the receiver got; times. Each test names its mutant.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from sluice import telemetry_names as names
from sluice.context import is_traceparent
from sluice.telemetry import SHUTDOWN_S, Telemetry

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
UNSAMPLED = PARENT[:-2] + "00"


class _Receiver:
    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.points: dict[str, list[tuple[dict[str, str], float]]] = {}
        self.resources: set[str] = set()
        self.endpoint = ""

    async def traces(self, request: Any, _: object) -> Any:
        for resource in request.resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.resources.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()

    async def metrics(self, request: Any, _: object) -> Any:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    data = getattr(metric, metric.WhichOneof("data"))
                    self.points[metric.name] = [
                        (
                            {a.key: a.value.string_value for a in point.attributes},
                            point.count
                            if metric.HasField("histogram")
                            else point.as_int or point.as_double,
                        )
                        for point in data.data_points
                    ]
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def _receiver() -> AsyncIterator[_Receiver]:
    receiver = _Receiver()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        Export = staticmethod(receiver.traces)

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        Export = staticmethod(receiver.metrics)

    server = grpc.aio.server()
    generated: tuple[Any, Any] = (trace_service_pb2_grpc, metrics_service_pb2_grpc)
    generated[0].add_TraceServiceServicer_to_server(Traces(), server)
    generated[1].add_MetricsServiceServicer_to_server(Metrics(), server)
    receiver.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0)


async def test_spans_arrive_under_their_parents_with_bounded_attributes() -> None:
    """Mutant: the remote parent is dropped."""
    async with _receiver() as receiver:
        telemetry = Telemetry.setup("scheduler", receiver.endpoint, 0.0)
        request = telemetry.span(names.SPAN_REQUEST, PARENT, {names.ATTR_TENANT: "dev"}, "server")
        assert request.recording
        attempt = telemetry.span(names.SPAN_RELAY, request.traceparent)
        attempt.set(names.ATTR_INSTANCE, "x" * 5000)
        attempt.end("INSTANCE_LOST")
        attempt.end()
        request.end()
        await telemetry.shutdown()
        outer, inner = receiver.spans[names.SPAN_REQUEST], receiver.spans[names.SPAN_RELAY]
        assert (outer.trace_id.hex(), outer.parent_span_id.hex()) == ("a" * 32, "b" * 16)
        assert (inner.trace_id, inner.parent_span_id) == (outer.trace_id, outer.span_id)
        assert request.traceparent == f"00-{'a' * 32}-{outer.span_id.hex()}-01"
        values = {a.key: a.value.string_value for a in inner.attributes}
        assert len(values[names.ATTR_INSTANCE]) == 512
        assert values[names.ATTR_ERROR_TYPE] == "INSTANCE_LOST"
        assert inner.status.code == 2
        assert inner.status.message == ""
        assert receiver.resources == {"scheduler"}


async def test_the_flag_decides_and_a_root_decides_once() -> None:
    """Mutant: an unsampled root passes nothing on, so that each hop decides again."""
    async with _receiver() as receiver:
        never = Telemetry.setup("s", receiver.endpoint, 0.0)
        always = Telemetry.setup("s", receiver.endpoint, 1.0)
        assert always.span(names.SPAN_QUEUE, UNSAMPLED).traceparent == UNSAMPLED
        assert not always.span(names.SPAN_QUEUE, UNSAMPLED).recording
        assert never.span(names.SPAN_QUEUE, PARENT).recording
        passed_on = never.span(names.SPAN_QUEUE).traceparent
        assert is_traceparent(passed_on)
        assert passed_on.endswith("-00")
        root = always.span(names.SPAN_RELAY)
        assert root.recording
        assert is_traceparent(root.traceparent)
        root.end()
        await always.shutdown()
        await never.shutdown()
        assert set(receiver.spans) == {names.SPAN_RELAY}
        assert receiver.spans[names.SPAN_RELAY].parent_span_id == b""


async def test_metrics_are_read_from_plain_numbers() -> None:
    """Mutant: the callback's labels are dropped."""
    async with _receiver() as receiver:
        telemetry = Telemetry.setup("s", receiver.endpoint, 0.0)
        ended = {("interactive", "FINISHED"): 3, ("batch", "CANCELLED"): 1}
        telemetry.counter(
            names.REQUESTS,
            lambda: [(n, {"class": c, "outcome": o}) for (c, o), n in ended.items()],
        )
        buffered: list[Callable[[], int]] = [lambda: 10, lambda: 7]
        for read in (*buffered, buffered[0]):  # the same one twice counts once
            telemetry.gauge(names.BUFFERED, read)
        histogram = telemetry.histogram(names.TTFT)
        for _ in range(4):
            histogram.record(0.3, {"class": "batch"})
        await telemetry.shutdown()
        assert {
            (point["class"], point["outcome"]): value
            for point, value in receiver.points[names.REQUESTS.name]
        } == {("interactive", "FINISHED"): 3, ("batch", "CANCELLED"): 1}
        assert receiver.points[names.BUFFERED.name] == [({}, 17)]
        assert receiver.points[names.TTFT.name] == [({"class": "batch"}, 4)]


@pytest.mark.parametrize("hangs", [False, True], ids=["absent", "hanging"])
async def test_a_collector_that_does_not_answer_delays_nobody(
    hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutants: spans are exported one by one when they end; shutdown waits for the SDK; it leaves
    the SDK's threads retrying."""
    threads_before = threading.active_count()
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    # One that never accepts: the kernel takes the connection and nobody answers on it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if hangs else 1
        telemetry = Telemetry.setup("s", f"127.0.0.1:{port}", 1.0)
        began = time.perf_counter()
        for _ in range(20_000):
            telemetry.span(names.SPAN_GENERATE).end()
        took_s = time.perf_counter() - began
        began = time.perf_counter()
        await telemetry.shutdown()
        await telemetry.shutdown()
        assert time.perf_counter() - began < SHUTDOWN_S + 1.0
        async with asyncio.timeout(10):
            while threading.active_count() > threads_before:
                await asyncio.sleep(0.01)
        assert took_s < 20.0  # one export by the caller alone would take up to 2 s
