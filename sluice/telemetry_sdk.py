"""The OpenTelemetry SDK behind ``sluice.telemetry``; imported only when there is an endpoint.

Owns how providers are built: explicit queue, batch, time and attribute limits. The SDK's threads
are daemons and never block the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from sluice import __version__, telemetry

SPAN_KINDS: dict[telemetry.SpanKindName, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}


@dataclass(frozen=True, slots=True)
class Sdk:
    """The SDK's objects of one process."""

    tracers: TracerProvider
    meters: MeterProvider
    span_exporter: OTLPSpanExporter
    metric_exporter: OTLPMetricExporter

    def shutdown(self) -> None:
        """Exports what is left. Blocks for as long as the collector takes."""
        self.tracers.shutdown()
        self.meters.shutdown()

    def give_up(self) -> None:
        """Ends exports in progress, whose retries would go on in their threads."""
        self.span_exporter.shutdown()
        self.metric_exporter.shutdown()


def make(service: str, instance: str, endpoint: str, metric_interval_s: float) -> Sdk:
    """An SDK that exports to ``endpoint``."""
    insecure = not endpoint.startswith("https://")
    resource = Resource.create(
        {
            "service.namespace": "sluice",
            "service.name": service,
            "service.instance.id": instance or service,
            "service.version": __version__,
        }
    )
    tracers = TracerProvider(
        # Whether to sample was decided before the SDK is asked.
        sampler=ALWAYS_ON,
        resource=resource,
        shutdown_on_exit=False,
        span_limits=SpanLimits(
            max_attributes=telemetry.ATTRIBUTES_MAX,
            max_events=0,
            max_links=0,
            max_attribute_length=telemetry.ATTRIBUTE_CHARS_MAX,
        ),
    )
    timeout_s = telemetry.EXPORT_TIMEOUT_S
    span_exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=timeout_s)
    metric_exporter = OTLPMetricExporter(endpoint=endpoint, insecure=insecure, timeout=timeout_s)
    tracers.add_span_processor(
        BatchSpanProcessor(
            span_exporter,
            max_queue_size=telemetry.SPAN_QUEUE_MAX,
            schedule_delay_millis=telemetry.SPAN_DELAY_S * 1000,
            max_export_batch_size=telemetry.SPAN_BATCH_MAX,
        )
    )
    reader = PeriodicExportingMetricReader(
        metric_exporter,
        export_interval_millis=metric_interval_s * 1000,
        export_timeout_millis=timeout_s * 1000,
    )
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    return Sdk(tracers, meters, span_exporter, metric_exporter)


def remote_parent(traceparent: str) -> Context:
    """The context in which a span becomes a child of ``traceparent`` (valid and sampled)."""
    parent = SpanContext(
        trace_id=int(traceparent[3:35], 16),
        span_id=int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def empty_context() -> Context:
    """The context in which a span becomes a root, whatever is active."""
    return Context()
