"""Traces and metrics over OTLP/gRPC; nothing at all without an endpoint.

Owns the OpenTelemetry objects of a process. Spans are exported in batches by the SDK's thread from
a bounded queue; a full queue or an absent collector loses spans and delays nobody. Metrics are
observable instruments that read plain Python numbers from the SDK's thread once per interval.

Sampling follows the traceparent's flag, which Envoy decides for all that passes it. A call without
a traceparent starts a root here, sampled at ``sample_ratio``; the decision is passed on either way,
so that no hop decides again. An unsampled span costs about 1 µs and never touches the SDK.

The library's client and server interceptors are not used: those for asyncio swallow
CancelledError. Trace context is passed by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from sluice import context
from sluice.telemetry_names import ATTR_ERROR_TYPE, METRICS, SPANS, Kind, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation
    from opentelemetry.trace import Span as SdkSpan

    from sluice.telemetry_sdk import Sdk

Value = str | int | float | bool
Labels = Mapping[str, str]
Reading = int | float | Iterable[tuple[int | float, Labels]]
SpanKindName = Literal["internal", "server", "client", "producer", "consumer"]

SPAN_QUEUE_MAX = 4096  # ended spans waiting for export; about 8 MB
SPAN_BATCH_MAX = 512
SPAN_DELAY_S = 1.0
ATTRIBUTES_MAX = 64
ATTRIBUTE_CHARS_MAX = 512
EXPORT_TIMEOUT_S = 2.0
SHUTDOWN_S = 2.0
METRIC_INTERVAL_S = 10.0
OTHER = "other"


def current_traceparent() -> str:
    """The traceparent of the call being served, as it came in; empty when it had none."""
    return context.traceparent.get()


def current_tracestate() -> str:
    """The tracestate of the call being served."""
    return context.tracestate.get()


class Span:
    """One piece of work. This class is the span that is not recorded; it only passes on."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent  # what calls made for this work carry

    @property
    def recording(self) -> bool:
        """Whether attributes are kept: ask before computing an expensive one."""
        return False

    def set(self, key: str, value: Value) -> None:
        """Sets an attribute; names from ``sluice.telemetry_names``."""

    def end(self, error: str | None = None, *, end_unix_ns: int | None = None) -> None:
        """Ends it; ``error`` is a reason (never a text). Idempotent."""


class _RecordedSpan(Span):
    __slots__ = ("_span",)

    def __init__(self, span: SdkSpan) -> None:
        spoken = span.get_span_context()
        super().__init__(f"00-{spoken.trace_id:032x}-{spoken.span_id:016x}-01")
        self._span = span

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def set(self, key: str, value: Value) -> None:
        self._span.set_attribute(key, value)

    def end(self, error: str | None = None, *, end_unix_ns: int | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute(ATTR_ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(end_unix_ns)


class Histogram:
    """Records values, e.g. one per request (20 µs); this one is off."""

    __slots__ = ()

    def record(self, value: float, labels: Labels | None = None) -> None:
        """Adds a value in the metric's unit."""


class _SdkHistogram(Histogram):
    __slots__ = ("_bound", "_instrument")

    def __init__(self, instrument: Any, bound: _Bound) -> None:
        self._instrument = instrument
        self._bound = bound

    def record(self, value: float, labels: Labels | None = None) -> None:
        self._instrument.record(value, self._bound.labels(labels or {}))


class Telemetry:
    """The telemetry of one process; :meth:`off` costs nothing."""

    def __init__(
        self,
        sdk: Sdk | None = None,
        sample_ratio: float = 0.0,
    ) -> None:
        self._sdk = sdk
        self._tracer = None if sdk is None else sdk.tracers.get_tracer("sluice")
        self._meter = None if sdk is None else sdk.meters.get_meter("sluice")
        self._sample_ratio = sample_ratio
        self._random = random.Random()
        self._reads: dict[str, list[Callable[[], Reading]]] = {}

    @classmethod
    def off(cls) -> Telemetry:
        """Records nothing and passes trace context on."""
        return cls()

    @classmethod
    def setup(
        cls,
        service: str,
        otlp_endpoint: str = "",
        sample_ratio: float = 0.01,
        *,
        instance: str = "",
        metric_interval_s: float = METRIC_INTERVAL_S,
    ) -> Telemetry:
        """For a service; ``instance`` tells its replicas apart. ``otlp_endpoint`` is ``host:port``
        or a URL (``https://`` for TLS); empty is :meth:`off`. Never waits for the collector."""
        if not otlp_endpoint:
            return cls.off()
        from sluice.telemetry_sdk import make

        return cls(make(service, instance, otlp_endpoint, metric_interval_s), sample_ratio)

    @property
    def enabled(self) -> bool:
        """Whether anything is exported."""
        return self._sdk is not None

    def span(
        self,
        name: str,
        traceparent: str = "",
        attributes: Mapping[str, Value] | None = None,
        kind: SpanKindName = "internal",
        *,
        start_unix_ns: int | None = None,
    ) -> Span:
        """Starts a span under ``traceparent``; without one, a root. ``start_unix_ns`` sets a start
        in the past."""
        if self._tracer is None:
            return Span(traceparent)
        assert name in SPANS, f"{name} is not in telemetry_names"
        if not traceparent:
            if self._random.random() >= self._sample_ratio:
                bits = self._random.getrandbits
                return Span(f"00-{bits(128) | 1:032x}-{bits(64) | 1:016x}-00")
            parent = None
        elif not context.is_sampled(traceparent):
            return Span(traceparent)
        else:
            from sluice.telemetry_sdk import remote_parent

            parent = remote_parent(traceparent)
        from sluice.telemetry_sdk import SPAN_KINDS, empty_context

        return _RecordedSpan(
            self._tracer.start_span(
                name,
                context=empty_context() if parent is None else parent,
                kind=SPAN_KINDS[kind],
                attributes=attributes,
                start_time=start_unix_ns,
                record_exception=False,
                set_status_on_exception=False,
            )
        )

    def counter(self, metric: Metric, read: Callable[[], Reading]) -> None:
        """Exports a number that only grows. ``read`` runs in the SDK's thread, must be quick, only
        reads, and returns a number or (number, labels) pairs. What several ``read`` give for the
        same labels is summed."""
        self._observe(metric, Kind.COUNTER, read)

    def gauge(self, metric: Metric, read: Callable[[], Reading]) -> None:
        """Exports a reading; ``read`` as for :meth:`counter`."""
        self._observe(metric, Kind.GAUGE, read)

    def histogram(self, metric: Metric) -> Histogram:
        """A histogram; record at most a few values per request."""
        _check(metric, Kind.HISTOGRAM)
        if self._meter is None:
            return Histogram()
        instrument = self._meter.create_histogram(
            metric.name,
            metric.unit,
            metric.help,
            explicit_bucket_boundaries_advisory=list(metric.buckets),
        )
        return _SdkHistogram(instrument, _Bound(metric))

    def _observe(self, metric: Metric, kind: Kind, read: Callable[[], Reading]) -> None:
        _check(metric, kind)
        if self._meter is None:
            return
        reads = self._reads.get(metric.name)
        if reads is not None:
            # Several parts of a process may feed one metric; the SDK would report it twice.
            if read not in reads:
                reads.append(read)
            return
        reads = self._reads[metric.name] = [read]
        bound = _Bound(metric)

        def callback(_: object) -> Iterable[Observation]:
            return bound.observe(reads)

        create = (
            self._meter.create_observable_counter
            if kind is Kind.COUNTER
            else self._meter.create_observable_gauge
        )
        create(metric.name, [callback], metric.unit, metric.help)

    async def shutdown(self) -> None:
        """Exports what is left, for at most :data:`SHUTDOWN_S` seconds. Idempotent."""
        sdk = self._sdk
        self._sdk = self._tracer = self._meter = None
        if sdk is None:
            return
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def work() -> None:
            # In a daemon thread of its own: the SDK may wait for a collector that is gone, and a
            # pool's thread would hold up the process.
            sdk.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, name="telemetry-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(SHUTDOWN_S):
                await done.wait()
        except TimeoutError:
            sdk.give_up()


class _Bound:
    """Keeps a metric to its labels and to ``series_max`` combinations of them."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._seen: set[tuple[str, ...]] = set()

    def key(self, labels: Labels) -> tuple[str, ...]:
        metric = self._metric
        assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
        key = tuple(labels[name] for name in metric.labels)
        if key in self._seen:
            return key
        if len(self._seen) >= metric.series_max:
            return (OTHER,) * len(key)
        self._seen.add(key)
        return key

    def labels(self, labels: Labels) -> dict[str, str]:
        return dict(zip(self._metric.labels, self.key(labels), strict=True))

    def observe(self, reads: Iterable[Callable[[], Reading]]) -> list[Observation]:
        from opentelemetry.metrics import Observation

        totals: dict[tuple[str, ...], int | float] = {}
        for read in reads:
            reading = self._read(read)
            pairs = [(reading, {})] if isinstance(reading, int | float) else reading
            for value, labels in pairs:
                key = self.key(labels)
                totals[key] = totals.get(key, 0) + value
        names = self._metric.labels
        return [Observation(v, dict(zip(names, k, strict=True))) for k, v in totals.items()]

    @staticmethod
    def _read(read: Callable[[], Reading]) -> int | float | list[tuple[int | float, Labels]]:
        # The loop's thread may grow a dict while it is read here; reading again then helps.
        for _ in range(3):
            try:
                reading = read()
                return reading if isinstance(reading, int | float) else list(reading)
            except RuntimeError:
                continue
        return []


def _check(metric: Metric, kind: Kind) -> None:
    assert METRICS.get(metric.name) is metric, f"{metric.name} is not in telemetry_names"
    assert metric.kind is kind, f"{metric.name} is a {metric.kind.value}"
