"""The picture of docs/SCHEDULING.md: what the burst of one tenant does to the others, with and
without fairness between tenants. Simulated; virtual time.

`python -m bench.burst_picture` writes docs/burst.png and prints the figures: four quiet tenants ask
for a third of what one instance can do, and for 20 s a fifth one asks for three times of it.
Without fairness all five are one tenant to the scheduler: due first, whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from bench.harness import ROOT, table
from scheduler_svc.domain.model import Outcome, PriorityClass
from scheduler_svc.simulation.arrivals import Arrival, Lengths
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.record import SLOS, Recorder
from scheduler_svc.simulation.run import Options, Simulation

PICTURE = ROOT / "docs" / "burst.png"
QUIET = tuple(f"quiet-{number}" for number in range(1, 5))
NOISY = "noisy"
DURATION_S, BURST_S = 80.0, (20.0, 40.0)
QUIET_RATE, NOISY_RATE, BURST_RATE = 2.0, 2.0, 70.0  # requests per second
PROMPTS, OUTPUTS = Lengths(400.0, 0.7, 4_000), Lengths(100.0, 0.7, 1_000)
SEED = 1


class Seen(Recorder):
    """Also keeps, for every request, when it came and how long its first token took; ``None``: it
    was refused."""

    def __init__(self, tenants: dict[float, str]) -> None:
        super().__init__(SLOS)
        self._tenants = tenants
        self.firsts: dict[str, list[tuple[float, float | None]]] = {}

    def finished(
        self, arrival: Arrival, tokens: int, first_s: float, now: float, unloaded_s: float
    ) -> None:
        self._note(arrival, first_s - arrival.at_s)
        super().finished(arrival, tokens, first_s, now, unloaded_s)

    def refused(self, arrival: Arrival, outcome: Outcome, now: float) -> None:
        self._note(arrival, None)
        super().refused(arrival, outcome, now)

    def _note(self, arrival: Arrival, ttft_s: float | None) -> None:
        self.firsts.setdefault(self._tenants[arrival.at_s], []).append((arrival.at_s, ttft_s))


def arrivals() -> list[Arrival]:
    """In order of time; no two at the same."""
    random = Random(SEED)
    made = [arrival for tenant in (*QUIET, NOISY) for arrival in _of(tenant, random)]
    return sorted(made, key=lambda arrival: arrival.at_s)


def _of(tenant: str, random: Random) -> Iterator[Arrival]:
    at_s = 0.0
    while True:
        rate = QUIET_RATE
        if tenant == NOISY:
            rate = BURST_RATE if BURST_S[0] <= at_s < BURST_S[1] else NOISY_RATE
        at_s += random.expovariate(rate)
        if at_s >= DURATION_S:
            return
        prompt_tokens, output_tokens = PROMPTS.draw(random), OUTPUTS.draw(random)
        yield Arrival(at_s, tenant, PriorityClass.INTERACTIVE, prompt_tokens, output_tokens)


def simulate(fair: bool) -> Seen:
    """One run; not ``fair``: the scheduler sees one tenant."""
    made = arrivals()
    simulation = Simulation(Options(fleet=[(GpuKind("default"), 1)], seed=SEED))
    seen = Seen({arrival.at_s: arrival.tenant for arrival in made})
    simulation.recorder = seen
    simulation.run(iter(made if fair else [replace(one, tenant="all") for one in made]))
    simulation.check()
    return seen


def figures(seen: Seen) -> dict[str, tuple[float, float, int]]:
    """Of quiet tenants and the noisy one: TTFT p50 and p99 in s of those that came in the burst or
    in the 20 s after it, and how many were refused."""
    groups = {"quiet": QUIET, "noisy": (NOISY,)}
    found = {}
    for name, tenants in groups.items():
        of = [
            ttft_s
            for tenant in tenants
            for at_s, ttft_s in seen.firsts[tenant]
            if BURST_S[0] <= at_s < BURST_S[1] + 20.0
        ]
        served = [ttft_s for ttft_s in of if ttft_s is not None]
        p50, p99 = np.percentile(served, (50, 99))
        found[name] = (float(p50), float(p99), len(of) - len(served))
    return found


def draw(runs: dict[str, Seen], path: Path) -> None:
    """Dots: requests by arrival and time to first token; crosses: refused."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws into memory, without a display
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(runs), figsize=(11.0, 4.0), sharey=True, layout="constrained"
    )
    figure.suptitle("A burst of one tenant (sluice simulate, one simulated instance)")
    for axes, (title, seen) in zip(panels, runs.items(), strict=True):
        axes.axvspan(*BURST_S, color="orange", alpha=0.12)
        for label, tenants, color in (
            ("noisy tenant", (NOISY,), "tab:orange"),
            ("four quiet tenants", QUIET, "tab:blue"),
        ):
            points = [point for tenant in tenants for point in seen.firsts[tenant]]
            served = [(at_s, ttft_s) for at_s, ttft_s in points if ttft_s is not None]
            refused = [at_s for at_s, ttft_s in points if ttft_s is None]
            axes.scatter(*zip(*served, strict=True), s=7, color=color, label=label)
            axes.scatter(refused, [0.012] * len(refused), s=12, marker="x", color=color)
        axes.set(title=title, xlabel="arrival, s", yscale="log", ylim=(0.01, 60.0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("time to first token, s (crosses: refused)")
    panels[0].legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=100, format="png")
    pyplot.close(figure)


def main() -> None:
    runs = {
        "without fairness: due first": simulate(fair=False),
        "fair between tenants": simulate(fair=True),
    }
    rows = [["order", "tenant", "TTFT p50", "p99", "refused"]]
    for name, seen in runs.items():
        for group, (p50, p99, refused) in figures(seen).items():
            rows.append([name, group, f"{p50:.2f} s", f"{p99:.2f} s", str(refused)])
    print(table(rows))
    draw(runs, PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
