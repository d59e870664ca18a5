"""The replica's numbers for OTLP, read from plain integers. Stateless."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from execution_svc.adapters.counts import Counts
from sluice import telemetry_names as names
from sluice.telemetry import Telemetry


def observe(telemetry: Telemetry, counts: Counts, scheduler_streams: Callable[[], int]) -> None:
    """Exports everything this service knows."""
    telemetry.counter(names.FRAMES, lambda: _labelled(counts.frames, "direction"))
    telemetry.counter(names.STREAM_LOSSES, lambda: _labelled(counts.losses, "kind"))
    telemetry.counter(names.LIMIT_HITS, lambda: _labelled(counts.limit_hits, "limit"))
    telemetry.gauge(
        names.FRAME_STREAMS,
        lambda: [
            (scheduler_streams(), {"direction": "in"}),
            (counts.links_open, {"direction": "out"}),
        ],
    )


def _labelled(counts: Mapping[str, int], label: str) -> Iterable[tuple[int, Mapping[str, str]]]:
    return [(value, {label: key}) for key, value in list(counts.items())]
