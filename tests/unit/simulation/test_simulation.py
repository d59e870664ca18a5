"""The whole simulation: the real scheduler over engine models.

Seen to fail on mutants: arrivals drawn without the seed; an abort that leaves the engine running;
an invalid request that keeps its room.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from scheduler_svc.config import SchedulerConfig, class_times
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import Outcome, PriorityClass
from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.simulation.arrivals import Arrival, Lengths, Mix, generated
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.report import Report, make_report
from scheduler_svc.simulation.run import Options, Simulation

KIND = GpuKind("test", sequences_max=16, kv_tokens=32_768)
MIX = Mix(prompts=Lengths(300.0, 0.8, 2_000), outputs=Lengths(50.0, 0.7, 400))


def simulated(options: Options, rate: float, requests: int = 1_000) -> Report:
    simulation = Simulation(options)
    outcomes = simulation.run(islice(generated(MIX, rate, 2.0, options.seed), requests))
    simulation.check()
    return make_report(outcomes)


@pytest.mark.parametrize("rate", [5.0, 40.0, 160.0])
def test_the_same_seed_is_the_same_history_event_for_event(rate: float) -> None:
    """Goal: determinism. Method: two runs of one seed, one of another, below and above capacity.
    Oracle: the hash of all events, their times included."""
    options = Options([(KIND, 3)], seed=5)
    first, second = simulated(options, rate), simulated(options, rate)
    assert first == second
    assert first["events"] > 1_500
    assert simulated(replace(options, seed=6), rate)["event_hash"] != first["event_hash"]


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_and_no_room_is_left_taken(seed: int) -> None:
    """Goal: conservation over load, refusals, deadlines and full memory. Oracle: the domain's own
    recount, and the report's sums."""
    times = class_times(SchedulerConfig())
    short = replace(
        times,
        deadlines_s={cls: 2.0 + 4.0 * cls for cls in PriorityClass},
        first_tokens_s={cls: 0.5 + cls for cls in PriorityClass},
    )
    kind = replace(KIND, kv_tokens=8_192)
    report = simulated(Options([(kind, 2)], seed=seed, times=short), 60.0)
    assert report["totals"]["offered"] == sum(report["totals"]["outcomes"].values()) == 1_000
    assert {"finished", "hopeless"} <= set(report["totals"]["outcomes"])
    assert set(report["totals"]["outcomes"]) & {"deadline_exceeded", "first_token_timeout"}
    for rows in (report["classes"], report["tenants"]):
        assert sum(row["offered"] for row in rows.values()) == 1_000


def test_a_full_queue_refuses_by_name() -> None:
    limits = SchedulerLimits()
    small = {
        cls: replace(limit, requests_max=20, tenant_requests_max=10)
        for cls, limit in limits.classes.items()
    }
    report = simulated(Options([(KIND, 1)], limits=replace(limits, classes=small)), 100.0)
    assert report["totals"]["outcomes"]["queue_full"] > 100


def test_a_prompt_that_no_context_holds_is_invalid() -> None:
    simulation = Simulation(Options([(KIND, 1)]))
    arrivals = [
        Arrival(0.0, "a", PriorityClass.STANDARD, 8_192, 10),
        Arrival(0.1, "a", PriorityClass.STANDARD, 8_191, 10),
    ]
    outcomes = simulation.run(iter(arrivals))
    simulation.check()
    (group,) = outcomes.recorder.groups.values()
    assert group.outcomes == {Outcome.INVALID: 1, Outcome.FINISHED: 1}
    assert group.served_tokens == 1  # cut at the context


def test_critical_requests_are_served_first_under_overload() -> None:
    report = simulated(Options([(KIND, 2)]), 100.0)
    ttfts = [report["classes"][cls.name.lower()]["ttft_s"] for cls in PriorityClass]
    p50 = [spread["p50"] for spread in ttfts if spread is not None]
    assert len(p50) == 4
    assert p50 == sorted(p50)
    assert p50[0] < 0.5 < p50[3]


def test_more_instances_serve_better_and_cost_more() -> None:
    few, many = (simulated(Options([(KIND, count)]), 30.0) for count in (2, 6))
    assert many["totals"]["slo_attainment"] > few["totals"]["slo_attainment"]
    assert many["fleet"][0]["filled"] < few["fleet"][0]["filled"]


def test_kinds_are_mixed_and_the_faster_one_does_more() -> None:
    fast = replace(KIND, name="fast", decode_step_ms=5.0, prefill_tokens_per_s=60_000.0)
    simulation = Simulation(Options([(KIND, 2), (fast, 2)]))
    outcomes = simulation.run(islice(generated(MIX, 20.0, 1.0, 1), 1_000))
    done = {"test": 0, "fast": 0}
    for engine in simulation._engines:
        done[engine.kind.name] += engine.output_tokens
    assert done["fast"] > 1.5 * done["test"]
    assert [use.kind for use in outcomes.uses] == ["test", "test", "fast", "fast"]


def test_without_reports_of_progress_it_runs_too() -> None:
    report = simulated(Options([(KIND, 2)], progress=False), 10.0)
    assert report["totals"]["finished"] == 1_000


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_can_be_simulated_and_those_that_read_prefixes_find_more(policy: str) -> None:
    kind = replace(KIND, kv_tokens=65_536)
    arrivals = [
        # 13 conversations, each prompt the last one and more.
        Arrival(
            turn * 6.5 + talk / 2,
            "a",
            PriorityClass.STANDARD,
            prompt_tokens=256 * (turn + 2),
            output_tokens=20,
            prefix=tuple(range(100 * talk, 100 * talk + turn + 2)),
        )
        for turn in range(8)
        for talk in range(13)
    ]
    options = Options([(kind, 4)], policy=policy, prefix_block_tokens=256)
    simulation = Simulation(options)
    report = make_report(simulation.run(iter(arrivals)))
    simulation.check()
    hit_rate = report["prefix_hit_rate"]
    assert hit_rate is not None
    assert (hit_rate > 0.7) == POLICIES[policy](0).reads_prefixes


def test_a_fleet_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one instance"):
        Simulation(Options([(KIND, 0)]))


def test_nothing_that_arrives_is_no_simulation() -> None:
    outcomes = Simulation(Options([(KIND, 1)])).run(iter(()))
    assert outcomes.recorder.events == 0
