"""The picture of a burst: what it shows, and that it can be drawn."""

from __future__ import annotations

from pathlib import Path

from bench.burst_picture import draw, figures, simulate


def test_the_burst_of_one_tenant_spoils_the_others_only_without_fairness(tmp_path: Path) -> None:
    """Goal: isolation of tenants, end to end in simulation. Method: one tenant asks for three times
    what the instance can do, four for a third of it. Oracle: the quiet ones' times to first token
    and refusals, in the order by tokens served and in the order by due times alone. Mutant seen to
    fail: counters that are never charged."""
    runs = {"without": simulate(fair=False), "fair": simulate(fair=True)}
    without, fair = figures(runs["without"]), figures(runs["fair"])
    assert without["quiet"][0] > 10.0
    assert without["quiet"][2] > 0
    assert fair["quiet"][0] < 0.5
    assert fair["quiet"][1] < 2.0
    assert fair["quiet"][2] == 0
    assert fair["noisy"][2] > 0
    draw(runs, tmp_path / "burst.png")
    assert (tmp_path / "burst.png").stat().st_size > 10_000
