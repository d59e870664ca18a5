"""The retry budget and the pace of failovers, alone and in the scheduler."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.domain.limits import BreakerLimits, RetryLimits
from scheduler_svc.domain.model import (
    FaultKind,
    InstanceName,
    Outcome,
    PriorityClass,
    Refusal,
    Ticket,
)
from scheduler_svc.domain.retry_budget import LOSSES, Bucket, Pacing, RetryBudget
from tests.unit.scheduler.scheduling import NO_SHARE, SEARCH, Bench, a_ticket

NEVER = BreakerLimits(faults_max=10**9, volume_min=10**9)
ERROR = FaultKind.ENGINE_ERROR


@SEARCH
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["served", "take", "take"]), st.sampled_from([0.0, 0.5, 30.0])),
        max_size=80,
    )
)
def test_the_budget_agrees_with_a_sum(steps: list[tuple[str, float]]) -> None:
    limits = RetryLimits(budget_max=3.0, budget_ratio=0.25, budget_min_per_s=0.125)
    budget = RetryBudget(limits)
    now, before, tokens, taken = 0.0, 0.0, 3.0, 0
    for step, later in steps:
        now += later
        if step == "served":
            budget.served()
            tokens = min(3.0, tokens + 0.25)
            continue
        tokens = min(3.0, tokens + (now - before) * 0.125) if before or taken else tokens
        before = now
        allowed = tokens >= 1.0 - 1e-6
        assert budget.take(now) == allowed
        tokens -= allowed
        taken += 1
    assert budget.taken + budget.refused == taken


def test_a_bucket_says_when_it_has_one_again() -> None:
    bucket = Bucket(2.0, 4.0)
    assert [bucket.take(1.0) for _ in range(3)] == [True, True, False]
    assert bucket.next_s(1.0) == pytest.approx(1.25)
    assert bucket.take(1.25)


def run(fails: random.Random, share: float, calls: int = 1_000) -> tuple[int, int]:
    """Calls whose attempts fail by chance, one after the other; successes and attempts."""
    bench = Bench("a", "b", breaker=NEVER)
    good = attempts = 0
    for number in range(calls):
        bench.now = number * 0.01
        if number % 100 == 0:
            bench.up("a")
            bench.up("b")
        ticket = a_ticket(deadline_s=bench.now + 100, first_token_limit_s=bench.now + 50)
        bench.submit(ticket)
        while bench.turn():
            attempts += 1
            if fails.random() < share:
                bench.scheduler.attempts.failed(ticket.id, ticket.attempt, ERROR, bench.now, False)
            else:
                good += 1
                bench.scheduler.attempts.ended(
                    ticket.id, ticket.attempt, bench.now, output_tokens=1
                )
    assert bench.is_empty()
    return good, attempts


def test_with_everything_down_attempts_are_calls() -> None:
    """1,000 calls, every attempt fails, no breaker in the way: at most 1 % further attempts, and
    the least rate of one in 10 s. Seed 1."""
    good, attempts = run(random.Random(1), 1.0)
    assert good == 0
    assert attempts <= 1_000 * 1.01 + 1


def test_with_a_twentieth_failing_nearly_all_succeed() -> None:
    """Seed 1."""
    good, attempts = run(random.Random(1), 0.05)
    assert good >= 990
    assert attempts <= 1_100


def test_the_first_failover_after_a_loss_is_free_and_the_next_is_not() -> None:
    empty = RetryLimits(budget_max=1.0, budget_ratio=0.0, budget_min_per_s=1e-9)
    for kind in FaultKind:
        bench = Bench("a", "b", breaker=NEVER, retry=empty, attempts_max=10)
        spender, ticket = a_ticket(), a_ticket()
        bench.dispatch(spender)
        bench.scheduler.attempts.failed(spender.id, 1, ERROR, 0.0, False)
        bench.scheduler.cancel(spender.id, 0.0)  # and nothing is left of the budget
        bench.dispatch(ticket)
        first = bench.scheduler.attempts.failed(ticket.id, 1, kind, 0.0, False)
        assert (first == "requeued") == (kind in LOSSES)
        if kind not in LOSSES:
            assert isinstance(first, Refusal)
            assert first.outcome is Outcome.INSTANCE_FAILED
            continue
        bench.up("a")
        bench.up("b")
        assert len(bench.turn()) == 1
        assert isinstance(bench.scheduler.attempts.failed(ticket.id, 2, ERROR, 0.0, False), Refusal)


# --- pace -----------------------------------------------------------------------------------------


def orphans(bench: Bench, count: int, **fields: object) -> list[Ticket]:
    tickets = [
        a_ticket(**{"deadline_s": 100.0, "first_token_limit_s": 90.0, "prompt_tokens": 10} | fields)
        for _ in range(count)
    ]
    bench.submit(*tickets)
    assert len(bench.turn()) == count
    return tickets


def lose(bench: Bench, name: str, kind: FaultKind = FaultKind.LOST_RELAY) -> None:
    for ticket_id in bench.scheduler.instances.lost(InstanceName(name), bench.now):
        assert bench.scheduler.attempts.failed(ticket_id, 1, kind, bench.now, False) == "requeued"


def test_what_one_death_orphaned_returns_at_its_rate_and_all_of_it() -> None:
    pace = RetryLimits(failover_burst=4.0, failover_per_s=10.0)
    bench = Bench("a", report={"sequences_max": 100}, breaker=NEVER, retry=pace, classes=NO_SHARE)
    tickets = orphans(bench, 24)
    bench.up("b", sequences_max=100)
    lose(bench, "a")
    times: list[float] = []
    while len(times) < 24:
        times += [bench.now] * len(bench.turn())
        wakeup = bench.scheduler.next_wakeup(bench.now)
        assert wakeup is not None
        assert wakeup > bench.now, "the owner spins"
        bench.now = min(wakeup, 2.9)
    assert times[:4] == [0.0] * 4
    assert times[-1] == pytest.approx(2.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[4:])]
    assert gaps == pytest.approx([0.1] * len(gaps))
    for ticket in tickets:
        bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now)
    assert bench.is_empty()


def test_higher_classes_return_first() -> None:
    pace = RetryLimits(failover_burst=1.0, failover_per_s=10.0)
    bench = Bench("a", report={"sequences_max": 100}, breaker=NEVER, retry=pace, classes=NO_SHARE)
    for cls in reversed(PriorityClass):
        orphans(bench, 2, priority_class=cls)
    bench.up("b", sequences_max=100)
    lose(bench, "a")
    order = []
    for _ in range(8):
        order += [effect.ticket.priority_class for effect in bench.turn()]
        bench.now += 0.101
    assert order == sorted(order)
    assert len(order) == 8


def test_on_the_way_back_deadlines_and_cancels_count() -> None:
    pace = RetryLimits(failover_burst=1.0, failover_per_s=0.1)
    bench = Bench("a", report={"sequences_max": 100}, breaker=NEVER, retry=pace)
    first, late, left = orphans(bench, 3, deadline_s=2.0, first_token_limit_s=2.0)
    bench.up("b", sequences_max=100)
    lose(bench, "a")
    assert [effect.ticket for effect in bench.turn()] == [first]
    bench.scheduler.cancel(left.id, 0.5)
    bench.scheduler.attempts.ended(first.id, first.attempt, 0.6)
    bench.now = 2.0
    (refused,) = bench.refused()
    assert refused.ticket is late
    assert bench.is_empty()


def test_the_pace_lets_those_pass_that_need_not_wait() -> None:
    pacing = Pacing(RetryLimits(failover_burst=8.0))
    tickets = [a_ticket() for _ in range(6)]
    for ticket in tickets:
        pacing.push(ticket, 0)
    held = tickets[:3]
    assert list(pacing.release(0.0, lambda ticket: ticket not in held)) == tickets[3:]
    assert len(pacing) == 3
    assert pacing.next_s(0.0, lambda ticket: 5.0 + ticket.id - tickets[0].id) == 5.0
    pacing.remove(tickets[0])
    assert list(pacing.release(1.0, lambda ticket: True)) == tickets[1:3]
    assert pacing.next_s(1.0, lambda ticket: None) is None
