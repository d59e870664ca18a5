"""Load reports: the engine's own statistics and the GPU readings, at an interval and at once when
the instance changes state.

Owns nothing but the wake-up of its watchers. Concurrency: each ``WatchLoad`` call runs
:meth:`LoadWatch.reports` in its own task; a report costs some 20 µs and no I/O. Ends with
UNAVAILABLE when the service stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from google.protobuf import duration_pb2

from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.results import to_seconds
from inference_svc.ports import EngineStats, GpuMonitor, GpuReading
from sluice.errors import SluiceError, exhausted, invalid, unavailable
from sluice.inference.v1 import inference_pb2, load_pb2

INTERVAL_S = 0.25
INTERVAL_S_MIN = 0.05
INTERVAL_S_MAX = 60.0
WATCHERS_MAX = 64

_THROTTLE_REASONS = {
    name.removeprefix("THROTTLE_REASON_").lower(): value
    for name, value in load_pb2.ThrottleReason.items()
}


class LoadWatch:
    """Makes the reports of one instance. ``frame_streams`` tells how many are open now."""

    def __init__(
        self, host: EngineHost, gpus: GpuMonitor, frame_streams: Callable[[], int]
    ) -> None:
        self._host = host
        self._gpus = gpus
        self._frame_streams = frame_streams
        self._stopped = False
        self._wakes: dict[asyncio.Event, None] = {}  # in order of coming
        host.watch(self._wake)

    def stop(self) -> None:
        """Ends all watches. Idempotent."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    async def reports(
        self, interval_s: float
    ) -> AsyncGenerator[inference_pb2.WatchLoadResponse, None]:
        """The first at once, then one per interval, and one after each change of state."""
        if len(self._wakes) >= WATCHERS_MAX:
            raise exhausted("TOO_MANY_WATCHERS", "This instance is watched by too many.", 1.0)
        wake = asyncio.Event()
        self._wakes[wake] = None
        sequence = 0
        try:
            while not self._stopped:
                wake.clear()
                sequence += 1
                yield self.report(sequence)
                try:
                    async with asyncio.timeout(interval_s):
                        await wake.wait()
                except TimeoutError:
                    continue
            raise _stopping()
        finally:
            self._wakes.pop(wake, None)

    def report(self, sequence: int) -> inference_pb2.WatchLoadResponse:
        """How it is now."""
        host = self._host
        report = inference_pb2.WatchLoadResponse(
            sequence=sequence,
            epoch=host.epoch,
            serving=host.serving,
            draining=host.draining,
            frame_streams=self._frame_streams(),
            simulated=host.simulated,
        )
        if host.serving:
            load = _to_load(host.engine().stats())
            if load.ListFields():
                report.engine.CopyFrom(load)
        for reading in self._gpus.read():
            report.gpus.append(_to_gpu(reading))
        return report


def to_interval(asked: duration_pb2.Duration | None) -> float:
    """The interval in seconds. INVALID_ARGUMENT out of its range."""
    if asked is None:
        return INTERVAL_S
    seconds = to_seconds(asked)
    if not INTERVAL_S_MIN <= seconds <= INTERVAL_S_MAX:
        raise invalid("interval", f"must be {INTERVAL_S_MIN * 1000:g} ms to {INTERVAL_S_MAX:g} s")
    return seconds


def _stopping() -> SluiceError:
    return unavailable("STOPPING", "This instance stops.")


def _to_load(stats: EngineStats) -> load_pb2.EngineLoad:
    # A field that is None stays absent.
    return load_pb2.EngineLoad(
        running=stats.running,
        waiting=stats.waiting,
        kv_tokens_used=stats.kv_tokens_used,
        kv_tokens_free=stats.kv_tokens_free,
        prefix_hit_rate=stats.prefix_hit_rate,
        prompt_tokens_per_s=stats.prompt_tokens_per_s,
        output_tokens_per_s=stats.output_tokens_per_s,
        sequences_max=stats.sequences_max,
        preemptions=stats.preemptions,
        step_ms=stats.step_ms,
    )


def _to_gpu(reading: GpuReading) -> load_pb2.GpuReading:
    return load_pb2.GpuReading(
        index=reading.index,
        uuid=reading.uuid,
        name=reading.name,
        utilization=reading.utilization,
        memory_used_bytes=reading.memory_used_bytes,
        memory_total_bytes=reading.memory_total_bytes,
        power_watts=reading.power_watts,
        temperature_celsius=reading.temperature_celsius,
        throttle_reasons=[
            _THROTTLE_REASONS.get(reason.lower(), load_pb2.THROTTLE_REASON_UNSPECIFIED)
            for reason in reading.throttle_reasons
        ],
        ecc_uncorrected_errors=reading.ecc_uncorrected_errors,
        xid_errors=reading.xid_errors,
        last_xid=reading.last_xid,
    )
