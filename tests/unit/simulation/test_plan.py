"""The search for the cheapest fleet, over a stand-in for the simulation.

Seen to fail on mutants: halving that keeps the failing half; a walk that does not look for the
least of the second kind.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, product
from typing import cast

import pytest

from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import Mix, generated
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.plan import Counts, Planner, plan_table, simulate_fleet
from scheduler_svc.simulation.report import Report
from scheduler_svc.simulation.run import Options

GOALS = {PriorityClass.INTERACTIVE: 0.99}
A = GpuKind("a", price_per_hour=2.0)


def needs(power: float, per_kind: tuple[float, ...]) -> Callable[[Counts], Report]:
    """A fleet whose instances together have that power reaches the goal."""

    def run(counts: Counts) -> Report:
        has = sum(count * each for count, each in zip(counts, per_kind, strict=True))
        share = min(1.0, round(0.99 * has / power, 9))
        fleet = [{"busy": 0.5, "instances": sum(counts)}]
        return cast(
            "Report", {"classes": {"interactive": {"slo_attainment": share}}, "fleet": fleet}
        )

    return run


@pytest.mark.parametrize("power", [1, 2, 3, 7, 8, 9, 100, 255, 256])
def test_for_one_kind_the_least_count_is_found_in_few_trials(power: int) -> None:
    planner = Planner([A], GOALS, needs(power, (1.0,)), 256)
    best = planner.search()
    assert best is not None
    assert best.counts == (power,)
    assert len(planner.trials) <= 17


def test_a_goal_beyond_the_most_instances_has_no_answer() -> None:
    planner = Planner([A], GOALS, needs(257, (1.0,)), 256)
    assert planner.search() is None
    assert planner.trials[-1].counts == (256,)


@pytest.mark.parametrize(
    ("power", "each", "price"),
    [(10, 3.0, 5.0), (10, 3.0, 6.5), (11, 2.5, 4.9), (7, 0.4, 0.7), (23, 5.0, 9.0), (5, 1.0, 2.0)],
)
def test_for_two_kinds_no_mix_is_cheaper(power: int, each: float, price: float) -> None:
    """Oracle: every mix of up to 12 of the first kind, since all of those are walked."""
    planner = Planner([A, GpuKind("b", price_per_hour=price)], GOALS, needs(power, (1.0, each)), 64)
    best = planner.search()
    assert best is not None
    if power <= 12:
        cheapest = min(
            2.0 * a + price * b
            for a, b in product(range(65), range(65))
            if a + each * b >= power - 1e-9
        )
        assert best.price_per_hour == pytest.approx(cheapest)
    assert len(planner.trials) == len({trial.counts for trial in planner.trials}) < 60


def test_kinds_that_help_each_other_are_mixed_to_the_least() -> None:
    """Oracle: by hand. 4 and 3 are the cheapest with 12 pairs; every second count is walked."""

    def run(counts: Counts) -> Report:
        enough = counts[0] * counts[1] >= 12 or sum(counts) >= 20
        return needs(1, (1.0, 1.0))((1, 0)) if enough else needs(2, (1.0, 1.0))((1, 0))

    planner = Planner([A, GpuKind("b", price_per_hour=2.0)], GOALS, run, 64)
    best = planner.search()
    assert best is not None
    assert best.counts == (4, 3)
    reached = {trial.counts for trial in planner.trials if trial.reached}
    assert {(18, 1), (16, 1), (6, 2)} <= reached


def test_the_table_has_every_fleet_tried_cheapest_first() -> None:
    planner = Planner([A], GOALS, needs(5, (1.0,)), 16)
    planner.search()
    table = plan_table([A], GOALS, planner.trials)
    assert table.row_count == len(planner.trials)


def test_only_one_kind_or_two_are_planned() -> None:
    with pytest.raises(ValueError, match="one kind or two"):
        Planner([A, A, A], GOALS, needs(1, (1.0, 1.0, 1.0)), 4)


def test_a_real_load_is_planned_with_the_same_arrivals_for_every_fleet() -> None:
    kind = GpuKind("k", sequences_max=16, price_per_hour=1.0)
    mix = Mix(classes={PriorityClass.INTERACTIVE: 1.0})
    run = simulate_fleet(
        Options([(kind, 1)]), [kind], lambda: islice(generated(mix, 12.0, 1.0, 1), 300)
    )
    planner = Planner([kind], GOALS, run, 32)
    best = planner.search()
    assert best is not None
    below = planner.trial((best.counts[0] - 1,))
    assert not below.reached
    assert best.attained[PriorityClass.INTERACTIVE] >= 0.99
