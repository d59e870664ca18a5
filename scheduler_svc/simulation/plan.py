"""How many instances a load needs: a search over fleets, one simulation for each.

For one kind: the least count that reaches every goal, by doubling and then halving the interval.
For two kinds: along the border between fleets that reach the goals and fleets that do not, from the
answer of the first kind alone towards the second, in at most :data:`STEPS_MAX` steps; fleets that
cost no less than the best known are not run. Both take for granted that more instances never serve
a class worse, which holds up to noise: near the goal another seed may give a neighbouring count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from rich.table import Table

from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.report import Report, make_report
from scheduler_svc.simulation.run import Options, Simulation

Goals = Mapping[PriorityClass, float]  # least SLO attainment, 0 to 1
Counts = tuple[int, ...]

# Counts of the first kind that are tried together with the second.
STEPS_MAX = 12


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated fleet. ``attained``: SLO attainment of the classes with a goal."""

    counts: Counts
    price_per_hour: float
    attained: Mapping[PriorityClass, float]
    busy: float
    reached: bool


class Planner:
    """Runs simulations and keeps every trial, in order."""

    def __init__(
        self,
        kinds: Sequence[GpuKind],
        goals: Goals,
        simulate: Callable[[Counts], Report],
        instances_max: int,
    ) -> None:
        if not 1 <= len(kinds) <= 2:
            raise ValueError("a plan is for one kind or two")
        self._kinds = kinds
        self._goals = goals
        self._simulate = simulate
        self._instances_max = instances_max
        self._known: dict[Counts, Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        return list(self._known.values())

    def search(self) -> Trial | None:
        """The cheapest fleet that reaches the goals; of equal prices the smaller one. None: none
        with up to ``instances_max`` instances of a kind does."""
        alone = [self._alone(which) for which in range(len(self._kinds))]
        if len(self._kinds) == 2 and (alone[0] or alone[1]):
            self._mixes(alone[0] or self._instances_max, alone[1] or self._instances_max)
        reached = [trial for trial in self.trials if trial.reached]
        return min(reached, key=lambda t: (t.price_per_hour, sum(t.counts)), default=None)

    def _alone(self, which: int) -> int | None:
        """The least count of one kind without the other."""

        def reaches(count: int) -> bool:
            counts = [0] * len(self._kinds)
            counts[which] = count
            return self.trial(tuple(counts)).reached

        high = 1
        while not reaches(high):
            if high == self._instances_max:
                return None
            high = min(2 * high, self._instances_max)
        low = high // 2  # does not, or is 0
        while high - low > 1:
            middle = (low + high) // 2
            if reaches(middle):
                high = middle
            else:
                low = middle
        return high

    def _mixes(self, first: int, most: int) -> None:
        """Walks the border: with fewer of the first kind, more of the second are needed; at most
        ``most``. Only fleets that cost less than the best known are tried."""
        stride = -(-first // STEPS_MAX)
        missing = 0  # so many of the second kind are too few, from here on
        for count in range(first - stride, 0, -stride):
            high = missing
            while high < most and self._price((count, high + 1)) < self._best_price():
                high += 1
            if high == missing:
                continue  # what could be enough costs too much
            if not self.trial((count, high)).reached:
                missing = high
                continue
            while high - missing > 1:
                middle = (missing + high) // 2
                if self.trial((count, middle)).reached:
                    high = middle
                else:
                    missing = middle

    def _best_price(self) -> float:
        return min((trial.price_per_hour for trial in self.trials if trial.reached), default=inf)

    def trial(self, counts: Counts) -> Trial:
        """Simulates a fleet, once."""
        known = self._known.get(counts)
        if known is None:
            known = self._known[counts] = self._run(counts)
        return known

    def _run(self, counts: Counts) -> Trial:
        report = self._simulate(counts)
        attained = {
            cls: report["classes"][cls.name.lower()]["slo_attainment"]
            for cls in self._goals
            if cls.name.lower() in report["classes"]
        }
        total = sum(counts)
        return Trial(
            counts=counts,
            price_per_hour=self._price(counts),
            attained=attained,
            busy=sum(row["busy"] * row["instances"] for row in report["fleet"]) / total,
            reached=all(attained.get(cls, 1.0) >= goal for cls, goal in self._goals.items()),
        )

    def _price(self, counts: Counts) -> float:
        pairs = zip(self._kinds, counts, strict=True)
        return sum(kind.price_per_hour * count for kind, count in pairs)


def simulate_fleet(
    options: Options, kinds: Sequence[GpuKind], arrivals: Callable[[], Iterator[Arrival]]
) -> Callable[[Counts], Report]:
    """What a planner runs: the same arrivals on a fleet of so many instances of each kind."""

    def run(counts: Counts) -> Report:
        fleet = [(kind, count) for kind, count in zip(kinds, counts, strict=True) if count]
        return make_report(Simulation(replace(options, fleet=fleet)).run(arrivals()))

    return run


def plan_table(kinds: Sequence[GpuKind], goals: Goals, trials: Sequence[Trial]) -> Table:
    """Every fleet of the search, cheapest first."""
    table = Table(box=None, pad_edge=False)
    for kind in kinds:
        table.add_column(kind.name, justify="right")
    table.add_column("price/h", justify="right")
    for cls, goal in goals.items():
        table.add_column(f"{cls.name.lower()} >= {goal:.2%}", justify="right")
    table.add_column("busy", justify="right")
    table.add_column("")
    for trial in sorted(trials, key=lambda trial: (trial.price_per_hour, trial.counts)):
        table.add_row(
            *(str(count) for count in trial.counts),
            f"{trial.price_per_hour:.2f}",
            *(f"{trial.attained[cls]:.2%}" if cls in trial.attained else "-" for cls in goals),
            f"{trial.busy:.1%}",
            "reached" if trial.reached else "missed",
        )
    return table
