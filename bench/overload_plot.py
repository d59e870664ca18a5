"""A picture of ``make bench-overload``: goodput and critical waits by offered load and subject."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.overload_figures import Run, class_figures
from bench.overload_profile import Profile


def plot(
    profile: Profile,
    titles: Mapping[str, str],
    runs: Mapping[str, Mapping[str, Run]],
    path: Path,
) -> None:
    """Writes the picture (PNG). ``titles`` and ``runs`` by subject; runs by load, as "2x"."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws into memory, without a display
    from matplotlib import pyplot

    figure, (good, slo, wait) = pyplot.subplots(1, 3, figsize=(14.0, 4.2), layout="constrained")
    rates = list(profile.rates)
    for subject, title in titles.items():
        found = [class_figures(runs[subject][f"{rate:g}x"], profile) for rate in rates]
        good.plot(rates, [one["goodput_tokens_per_s"] for one in found], marker="o", label=title)
        slo.plot(rates, [100.0 * one["critical_slo"] for one in found], marker="o", label=title)
        waits = [one.get("critical_ttft_ms_p99", 0.0) / 1_000.0 for one in found]
        wait.plot(rates, waits, marker="o", label=title)
    good.set(title="Goodput", ylabel="output tokens/s within the SLO")
    slo.set(title="Critical requests within their SLO", ylabel="%")
    wait.set(title="Critical time to first token, p99", ylabel="s", yscale="log")
    for axes in (good, slo, wait):
        axes.set_xlabel("offered load, times capacity")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    good.set_ylim(bottom=0.0)
    slo.set_ylim(-5.0, 105.0)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)
