"""The instance's numbers for OTLP: read from plain integers and the engine's own statistics.

Stateless. Readings run in the exporter's thread once per interval; they only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from inference_svc.adapters.counts import Counts
from inference_svc.adapters.engine_host import EngineHost
from inference_svc.ports import EngineStats, GpuMonitor, GpuReading
from sluice import telemetry_names as names
from sluice.telemetry import Telemetry
from sluice.telemetry_names import Metric

Readings = list[tuple[int | float, Mapping[str, str]]]


def observe(
    telemetry: Telemetry,
    host: EngineHost,
    gpus: GpuMonitor,
    counts: Counts,
    frame_streams: Callable[[], int],
) -> None:
    """Exports everything this service knows."""

    def stat(read: Callable[[EngineStats], int | float | None]) -> Callable[[], Readings]:
        return lambda: [] if (value := _stat(host, read)) is None else [(value, {})]

    def gpu(read: Callable[[GpuReading], int | float | None]) -> Callable[[], Readings]:
        return lambda: [
            (value, {"gpu": str(reading.index)})
            for reading in gpus.read()
            if (value := read(reading)) is not None
        ]

    engine: dict[Metric, Callable[[EngineStats], int | float | None]] = {
        names.ENGINE_RUNNING: lambda stats: stats.running,
        names.ENGINE_WAITING: lambda stats: stats.waiting,
        names.ENGINE_KV_USED: lambda stats: stats.kv_tokens_used,
        names.ENGINE_KV_FREE: lambda stats: stats.kv_tokens_free,
        names.ENGINE_PREFIX_HITS: lambda stats: stats.prefix_hit_rate,
    }
    hardware: dict[Metric, Callable[[GpuReading], int | float | None]] = {
        names.GPU_UTILIZATION: lambda reading: reading.utilization,
        names.GPU_MEMORY_USED: lambda reading: reading.memory_used_bytes,
        names.GPU_POWER: lambda reading: reading.power_watts,
        names.GPU_TEMPERATURE: lambda reading: reading.temperature_celsius,
    }
    for metric, read_stat in engine.items():
        telemetry.gauge(metric, stat(read_stat))
    for metric, read_gpu in hardware.items():
        telemetry.gauge(metric, gpu(read_gpu))
    telemetry.counter(names.STARTS, lambda: _labelled(counts.starts, "result"))
    telemetry.counter(names.ENGINE_ABORTS, lambda: _labelled(counts.aborts, "reason"))
    telemetry.counter(names.ENGINE_TOKENS, lambda: _labelled(counts.tokens, "direction"))
    telemetry.counter(names.FRAMES, lambda: _labelled(counts.frames, "direction"))
    telemetry.counter(names.STREAM_LOSSES, lambda: _labelled(counts.losses, "kind"))
    telemetry.gauge(names.FRAME_STREAMS, lambda: [(frame_streams(), {"direction": "in"})])


def _stat(
    host: EngineHost, read: Callable[[EngineStats], int | float | None]
) -> int | float | None:
    return read(host.engine().stats()) if host.serving else None


def _labelled(
    counts: Mapping[str, int], label: str
) -> Iterable[tuple[int | float, Mapping[str, str]]]:
    return [(value, {label: key}) for key, value in list(counts.items())]
