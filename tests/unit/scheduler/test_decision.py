"""Trails of tickets: what stood in the way, who was chosen, and how each placement went on."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import numpy as np
import pytest

from scheduler_svc.domain.decision import (
    CANDIDATES_KEPT,
    PLACEMENTS_KEPT,
    Closed,
    Placement,
    Trail,
)
from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.model import (
    FaultKind,
    GpuState,
    InstanceName,
    PriorityClass,
    RejectKind,
    Ticket,
    WorkKind,
    Yield,
)
from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.domain.turn import need_of
from scheduler_svc.ports import Need
from tests.unit.scheduler.scheduling import Bench, a_report, a_ticket, limits


def placements(ticket: Ticket) -> list[Placement]:
    assert ticket.trail is not None
    return ticket.trail.placements


def test_the_first_placement_is_noted_in_brief_and_in_full_where_it_is_sampled() -> None:
    bench = Bench("a", "b")
    plain, sampled = a_ticket(), a_ticket(sampled=True)
    bench.submit(plain, sampled)
    bench.turn()
    (brief,) = placements(plain)
    (full,) = placements(sampled)
    assert (brief.instance, brief.candidates, brief.best, brief.removed) == ("a", 2, (), None)
    assert brief.score > 0
    assert [one.instance for one in full.best] == ["b", "a"], "best first"
    assert full.best[0].score == full.score
    assert full.removed == {}


def test_a_later_placement_is_noted_in_full_with_what_removed_the_others() -> None:
    bench = Bench("a", "b", "c", "d", "e", "f", report={"sequences_max": 1})
    scheduler = bench.scheduler
    ticket = a_ticket()
    bench.dispatch(ticket)
    bench.up("b", draining=True)
    bench.up("c", gpus=GpuState(xid_errors=1))
    bench.up("d", model="other")
    scheduler.instances.unreachable(InstanceName("e"), "test", bench.now)
    bench.now = 0.2
    scheduler.attempts.failed(ticket.id, 1, FaultKind.LOST_CONNECTION, bench.now, delivered=False)
    bench.up("a", sequences_max=1)
    (again,) = bench.turn()
    assert again.instance == "f"
    first, second = placements(ticket)
    assert (first.end, first.cause) == ("lost", "lost_connection")
    assert second.removed == {"drain": 1, "gpu_fault": 1, "model": 1, "health": 1, "excluded": 1}
    assert [one.instance for one in second.best] == ["f"]


def test_a_rejected_placement_says_why_and_full_instances_are_counted() -> None:
    bench = Bench("a", "b", report={"sequences_max": 1})
    ticket, other = a_ticket(), a_ticket()
    bench.dispatch(ticket)
    bench.dispatch(other)
    bench.scheduler.attempts.rejected(ticket.id, 1, RejectKind.NO_ROOM, bench.now)
    bench.up("a", sequences_max=1)
    bench.turn()
    first, second = placements(ticket)
    assert (first.end, first.cause) == ("rejected", "no_room")
    assert second.removed == {"no_room": 1}


def test_who_is_refused_while_waiting_knows_what_stood_in_the_way() -> None:
    bench = Bench("a", "b", report={"sequences_max": 1})
    holders = [a_ticket(first_token_limit_s=200.0, deadline_s=200.0) for _ in range(2)]
    bench.submit(*holders)
    bench.turn()
    late = a_ticket(first_token_limit_s=5.0)
    behind = a_ticket(first_token_limit_s=6.0, deadline_s=7.0)
    bench.submit(late, behind)
    bench.turn()
    bench.now = 5.5
    bench.refused()
    (noted,) = placements(late)
    assert (noted.instance, noted.end, noted.at_s) == ("", "refused", 5.5)
    assert noted.removed == {"no_room": 2}
    assert late.trail is not None
    assert late.trail.ahead == 0
    assert behind.trail is not None
    assert behind.trail.ahead == 1


def test_who_is_refused_at_entry_has_a_trail() -> None:
    bench = Bench("a")
    ticket = a_ticket(model="unknown")
    assert bench.scheduler.submit(ticket, bench.now) is not None
    (noted,) = placements(ticket)
    assert (noted.end, noted.removed) == ("refused", {"model": 1})


def test_a_trail_keeps_the_first_placement_and_the_last_ones() -> None:
    trail = Trail(full=False)
    for number in range(20):
        trail.placed(Placement(str(number), float(number), base_tokens=3 * number))
        trail.ended("yielded")
    trail.close(60)
    kept = [placement.instance for placement in trail.placements]
    assert kept == ["0", *map(str, range(20 - PLACEMENTS_KEPT + 1, 20))]
    assert [placement.tokens for placement in trail.placements] == [3] * PLACEMENTS_KEPT
    assert {placement.end for placement in trail.placements} == {"yielded"}, "told first holds"


def test_only_the_best_candidates_are_kept() -> None:
    bench = Bench(*(f"i{number:02}" for number in range(8)), report={"sequences_max": 64})
    bench.scheduler.instances.report(
        a_report("i00", prompt_tokens_per_s=1.0, sequences_max=64), 0.0
    )
    ticket = a_ticket(sampled=True)
    bench.dispatch(ticket)
    (noted,) = placements(ticket)
    assert len(noted.best) == noted.candidates == CANDIDATES_KEPT == 8
    scores = [one.score for one in noted.best]
    assert scores == sorted(scores)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_parts_of_a_score_add_up_to_it(policy: str) -> None:
    made = POLICIES[policy](0)
    fleet = Fleet(limits(), Ledger(8))
    for name in "abc":
        instance = fleet.report(a_report(name, prompt_tokens_per_s=900.0), 0.0)
        assert instance is not None
        fleet.credit(instance, 4, 100_000)
    plain = need_of(a_ticket())
    cached = np.array([10.0, 0.0, 60.0])
    for need in (plain, replace_cached(plain, cached)):
        scores = made.score(fleet, need)
        for row in range(3):
            parts = made.parts(fleet, need, row)
            assert isclose(sum(parts.values()), float(scores[row]), abs_tol=1e-12)


def replace_cached(need: Need, cached: np.ndarray) -> Need:
    return replace(need, cached_tokens=cached)


def test_closed_instances_are_counted_at_most_every_so_often() -> None:
    fleet = Fleet(limits(), Ledger(8))
    closed = Closed(fleet, limits())
    line = ("m", WorkKind.GENERATE)
    assert closed.counts(line, 0.0) == {}
    fleet.report(a_report("a", serving=False), 0.0)
    assert closed.counts(line, 0.05) == {}
    assert closed.counts(line, 0.1) == {"health": 1}


def test_what_yields_and_goes_on_says_why_how_far_it_came_and_who_had_other_weights() -> None:
    bench = Bench("a", drain_run_max_s=0.0)
    scheduler = bench.scheduler
    ticket = a_ticket(continuable=True, priority_class=PriorityClass.BATCH)
    bench.dispatch(ticket)
    scheduler.attempts.accepted(ticket.id, 1, 100, 0, bench.now)
    scheduler.attempts.first_token(ticket.id, 1, bench.now)
    scheduler.attempts.progressed(ticket.id, 1, 7)
    bench.up("b", fingerprint="other")
    bench.up("c")
    bench.now = 1.0
    bench.up("a", draining=True)
    yields = [effect for effect in scheduler.turn(bench.now) if isinstance(effect, Yield)]
    assert [effect.ticket for effect in yields] == [ticket]
    assert scheduler.attempts.yielded(ticket.id, 1, bench.now, 7) == "requeued"
    (again,) = bench.turn()
    assert again.instance == "c"
    first, second = placements(ticket)
    assert (first.end, first.cause, first.tokens) == ("yielded", "drain", 7)
    assert second.removed == {"drain": 1, "fingerprint": 1}
    assert second.base_tokens == 7
