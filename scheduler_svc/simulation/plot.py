"""A picture of a simulation: PNG, four panels. matplotlib is imported when it is called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.run import Outcomes

POINTS_MAX = 400  # of a line over time


def plot(outcomes: Outcomes, path: Path) -> None:
    """Writes the picture; OSError when it cannot."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws into memory, without a display
    from matplotlib import pyplot

    recorder = outcomes.recorder
    seconds = recorder.seconds
    figure, ((tokens, waits), (ttft, tpot)) = pyplot.subplots(
        2, 2, figsize=(13.0, 8.0), layout="constrained"
    )
    fleet = ", ".join(f"{count} x {kind.name}" for kind, count in outcomes.options.fleet if count)
    figure.suptitle(f"sluice simulate (simulated engines): {fleet}")

    width, times = _binned([float(second) for second in range(len(seconds))])
    for name, label in (
        ("offered_tokens", "asked for, by arrival"),
        ("served_tokens", "served, by end"),
        ("goodput_tokens", "goodput, by end"),
    ):
        _, line = _binned([getattr(second, name) for second in seconds])
        tokens.plot(times, line, label=label)
    tokens.set(
        title=f"Output tokens per second (means of {width} s)", xlabel="s", ylabel="tokens/s"
    )

    for cls in PriorityClass:
        _, line = _binned([s.waiting[cls] if s.waiting else 0 for s in seconds])
        waits.plot(times, line, label=f"{cls.name.lower()}, waiting")
    _, line = _binned([second.running for second in seconds])
    waits.plot(times, line, label="running", color="gray", linestyle=":")
    waits.set(title="Requests in the queue, and running", xlabel="s", ylabel="requests")
    waits.set_yscale("symlog")

    for cls in PriorityClass:
        groups = list(recorder.of_class(cls))
        for axes, parts in (
            (ttft, [np.frombuffer(group.ttft_s) for group in groups if group.ttft_s]),
            (tpot, [np.frombuffer(group.tpot_s) for group in groups if group.tpot_s]),
        ):
            if parts:
                values = np.quantile(np.concatenate(parts), np.linspace(0.0, 1.0, 1_001))
                axes.plot(values, np.linspace(0.0, 100.0, 1_001), label=cls.name.lower())
    ttft.set(title="Time to first token", xlabel="s", ylabel="% of finished requests")
    ttft.set_xscale("log")
    tpot.set(title="Time per output token", xlabel="s", ylabel="% of finished requests")
    for axes in (tokens, waits, ttft, tpot):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _binned(values: list[float]) -> tuple[int, NDArray[np.float64]]:
    """Means over so many seconds that there are at most POINTS_MAX."""
    width = max(1, -(-len(values) // POINTS_MAX))
    starts = np.arange(0, len(values), width)
    sums = np.add.reduceat(np.asarray(values, dtype=np.float64), starts)
    return width, sums / np.diff(np.append(starts, len(values)))
