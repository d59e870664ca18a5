"""A collector for tests: a real OTLP/gRPC server on a free port that keeps what it is sent.

Owns the spans and the latest metric points of everything that exports to it. The server's threads
write, the test reads, under one lock. `OtlpReceiver.hang` makes it take connections and calls and
never answer, as a collector that is stuck does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

TRACES = "opentelemetry.proto.collector.trace.v1.TraceService"
METRICS = "opentelemetry.proto.collector.metrics.v1.MetricsService"
THREADS = 16  # more than the processes of a mesh, which may all hang in a call
POLL_S = 0.02

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Span:
    """One span. Ids in hexadecimal; `parent_id` is empty for a root."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any]

    @property
    def error(self) -> str:
        """Its error type, empty for none."""
        return str(self.attributes.get("error.type", ""))


@dataclass(frozen=True)
class Point:
    """The latest value of one series; for a histogram, `value` is how many were recorded."""

    value: float
    total: float = 0.0
    """Sum of a histogram's values."""


class OtlpReceiver:
    """See the module."""

    def __init__(self) -> None:
        self.hang = False
        self.calls = 0
        self.endpoint = ""
        self.stop: Callable[[], None] = self.release
        """Ends the server before its block does; the port is free then."""
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._spans: list[Span] = []
        self._points: dict[tuple[str, str, str, Labels], Point] = {}
        self._raw: list[bytes] = []

    # What it has.

    def spans(self, trace_id: str = "") -> list[Span]:
        """All spans, or those of a trace, in the order of their starts."""
        with self._lock:
            found = [span for span in self._spans if trace_id in ("", span.trace_id)]
        return sorted(found, key=lambda span: span.start_ns)

    def metric_names(self) -> set[str]:
        """Names of everything measured."""
        with self._lock:
            return {name for _, _, name, _ in self._points}

    def series(self) -> set[tuple[str, frozenset[str]]]:
        """Every metric's name with the names of its labels."""
        with self._lock:
            return {(name, frozenset(k for k, _ in have)) for _, _, name, have in self._points}

    def sum(self, service: str, name: str, **labels: str) -> Point:
        """The sum over a service's series that carry these labels."""
        wanted = frozenset(labels.items())
        with self._lock:
            found = [
                point
                for (of, _, metric, have), point in self._points.items()
                if (of, metric) == (service, name) and wanted <= have
            ]
        return Point(sum(p.value for p in found), sum(p.total for p in found))

    def labels(self, service: str, name: str, label: str) -> set[str]:
        """The values of a label over a service's series of this name."""
        with self._lock:
            return {
                value
                for of, _, metric, have in self._points
                if (of, metric) == (service, name)
                for key, value in have
                if key == label
            }

    def contains(self, text: str) -> bool:
        """Whether anything that arrived holds a text."""
        with self._lock:
            return any(text.encode() in data for data in self._raw)

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = 15.0) -> None:
        """Waits for exports, which announce themselves by nothing."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{self.text()}"
            time.sleep(POLL_S)

    def text(self) -> str:
        """The spans as lines, for a failing test."""
        return "\n".join(
            f"{s.trace_id[:8]} {s.parent_id or '-':16} {s.span_id} {s.service} {s.name} {s.error}"
            for s in self.spans()
        )

    # What it is sent.

    def traces(self, data: bytes, _: object) -> bytes:
        """TraceService.Export."""
        self._arrived(data)
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            origin = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._add_span(origin, span)
        return trace_service_pb2.ExportTraceServiceResponse().SerializeToString()

    def metrics(self, data: bytes, _: object) -> bytes:
        """MetricsService.Export."""
        self._arrived(data)
        request = metrics_service_pb2.ExportMetricsServiceRequest.FromString(data)
        for resource in request.resource_metrics:
            origin = _values(resource.resource.attributes)
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self._add_metric(origin, metric)
        return metrics_service_pb2.ExportMetricsServiceResponse().SerializeToString()

    def release(self) -> None:
        """Lets calls go that hang."""
        self._released.set()

    def _arrived(self, data: bytes) -> None:
        with self._lock:
            self.calls += 1
            self._raw.append(data)
        if self.hang:
            self._released.wait()

    def _add_span(self, origin: Mapping[str, Any], span: Any) -> None:
        seen = Span(
            service=str(origin.get("service.name", "")),
            instance=str(origin.get("service.instance.id", "")),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            failed=span.status.code == 2,
            attributes=_values(span.attributes),
        )
        with self._lock:
            self._spans.append(seen)

    def _add_metric(self, origin: Mapping[str, Any], metric: Any) -> None:
        service = str(origin.get("service.name", ""))
        instance = str(origin.get("service.instance.id", ""))
        histogram = metric.HasField("histogram")
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            labels = frozenset((k, str(v)) for k, v in _values(point.attributes).items())
            value = (
                Point(point.count, point.sum)
                if histogram
                else Point(float(point.as_int or point.as_double))
            )
            with self._lock:
                # Cumulative: what comes later holds what came before.
                self._points[service, instance, metric.name, labels] = value


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def otlp_receiver(*, hang: bool = False, endpoint: str = "127.0.0.1:0") -> Iterator[OtlpReceiver]:
    """A collector for the time of the block, on a free port or on one that another had."""
    receiver = OtlpReceiver()
    receiver.hang = hang
    server = grpc.server(
        futures.ThreadPoolExecutor(THREADS), options=(("grpc.max_receive_message_length", 1 << 26),)
    )
    handlers = ((TRACES, receiver.traces), (METRICS, receiver.metrics))
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                service, {"Export": grpc.unary_unary_rpc_method_handler(export)}
            )
            for service, export in handlers
        ]
    )
    receiver.endpoint = f"127.0.0.1:{server.add_insecure_port(endpoint)}"

    def stop() -> None:
        receiver.release()
        server.stop(0).wait()

    receiver.stop = stop
    server.start()
    try:
        yield receiver
    finally:
        receiver.stop()
