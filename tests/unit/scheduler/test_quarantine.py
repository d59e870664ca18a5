"""Poison: who is suspected, kept apart, convicted and refused; by example and under search."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.domain.limits import BreakerLimits, PoisonLimits, RetryLimits
from scheduler_svc.domain.model import (
    FaultKind,
    InstanceName,
    Outcome,
    Refusal,
    Ticket,
    TicketState,
)
from sluice.errors import Code
from tests.unit.scheduler.scheduling import NO_SHARE, SEARCH, THOROUGH, Bench, a_ticket

NEVER = BreakerLimits(faults_max=10**9, volume_min=10**9)
DOWN = FaultKind.ENGINE_DOWN
POISON = PoisonLimits()


def a_bench(*names: str, poison: PoisonLimits = POISON, sequences_max: int = 8) -> Bench:
    return Bench(
        *names,
        report={"sequences_max": sequences_max},
        breaker=NEVER,
        classes=NO_SHARE,
        poison=poison,
        retry=RetryLimits(budget_max=1e9),
        attempts_max=5,
    )


def an_input(text: str, **fields: object) -> Ticket:
    base: dict[str, object] = {"deadline_s": 1e6, "first_token_limit_s": 1e6, "prompt_tokens": 10}
    return a_ticket(input_hash=partial(str.encode, text), **base | fields)


class Fleet:
    """Plays instances: dies where a poisonous input has made so many tokens, and comes back."""

    def __init__(self, bench: Bench, dies_at: dict[bytes, int]) -> None:
        self.bench = bench
        self.dies_at = dies_at
        self.running: dict[InstanceName, list[Ticket]] = {}
        self.touched: list[tuple[InstanceName, bytes]] = []
        self.ended: dict[int, Outcome] = {}
        self.deaths = 0

    def step(self) -> None:
        """A turn, and a token for everything that runs."""
        scheduler, now = self.bench.scheduler, self.bench.now
        for effect in self.bench.turn():
            self.running.setdefault(effect.instance, []).append(effect.ticket)
        for name, tickets in list(self.running.items()):
            dead = None
            for ticket in tickets:
                assert ticket.input_hash is not None
                if self.dies_at.get(ticket.input_hash()) == ticket.generated_tokens:
                    dead = ticket.input_hash()
            if dead is not None:
                self.touched.append((name, dead))
                self.die(name)
                continue
            for ticket in list(tickets):
                scheduler.attempts.first_token(ticket.id, ticket.attempt, now)
                scheduler.attempts.progressed(
                    ticket.id, ticket.attempt, ticket.generated_tokens + 1
                )
                if ticket.generated_tokens >= 24:
                    tickets.remove(ticket)
                    scheduler.attempts.ended(ticket.id, ticket.attempt, now)
                    self.ended[ticket.id] = Outcome.FINISHED
        self.bench.now += 0.05
        if self.bench.now % 1.0 < 0.05:  # else their reports would go stale
            for name in self.bench.scheduler.snapshot().instances:
                self.bench.up(name, sequences_max=8)

    def die(self, name: InstanceName) -> None:
        scheduler, now = self.bench.scheduler, self.bench.now
        self.deaths += 1
        for ticket in self.running.pop(name):
            result = scheduler.attempts.failed(ticket.id, ticket.attempt, DOWN, now, False)
            if isinstance(result, Refusal):
                self.ended[ticket.id] = result.outcome
        epoch = str(self.deaths)
        self.bench.up(name, sequences_max=8, epoch=epoch)


def test_an_input_that_two_instances_died_of_is_refused_for_its_time() -> None:
    bench = a_bench("a", "b", "c")
    ticket = an_input("bad")
    bench.dispatch(ticket)
    assert bench.scheduler.attempts.failed(ticket.id, 1, DOWN, 0.0, False) == "requeued"
    bench.turn()
    final = bench.scheduler.attempts.failed(ticket.id, 2, DOWN, 0.1, False)
    assert isinstance(final, Refusal)
    assert (final.outcome, final.code) == (Outcome.POISON, Code.FAILED_PRECONDITION)
    bench.now = 1.0
    again = bench.scheduler.submit(an_input("bad"), 1.0)
    assert again is not None
    assert again.outcome is Outcome.POISON
    assert bench.scheduler.submit(an_input("good"), 1.0) is None
    assert bench.scheduler.submit(an_input("bad"), POISON.quarantine_s + 1.0) is None


def test_one_death_marks_nobody_and_what_lives_on_is_cleared() -> None:
    bench = a_bench("a")
    tickets = [an_input(str(number)) for number in range(4)]
    bench.submit(*tickets)
    bench.turn()
    bench.up("b", sequences_max=8)
    for ticket in tickets:
        bench.scheduler.attempts.failed(ticket.id, 1, DOWN, 0.0, False)
    bench.now = 5.0  # later than any of them waits to be alone
    bench.up("a", sequences_max=8)
    bench.up("b", sequences_max=8)
    assert len(bench.turn()) == 4
    for ticket in tickets:
        bench.scheduler.attempts.first_token(ticket.id, 2, 5.0)
        bench.scheduler.attempts.progressed(ticket.id, 2, POISON.cleared_tokens)
        assert ticket.suspicion is None
    for ticket in tickets:  # so a second death is a first one
        result = bench.scheduler.attempts.failed(ticket.id, 2, DOWN, 6.0, False)
        assert result == "requeued"
    assert bench.scheduler.snapshot().poisoned == 0


def test_two_suspects_at_one_death_convict_nobody() -> None:
    for lost in (False, True):
        bench = a_bench("a", poison=replace(POISON, apart_s=0.0))
        pair = [an_input("x"), an_input("y")]
        bench.submit(*pair)
        bench.turn()
        bench.up("b", sequences_max=8)
        for ticket in pair:
            bench.scheduler.attempts.failed(ticket.id, 1, DOWN, 0.0, False)
        bench.scheduler.instances.unreachable(InstanceName("a"), "SILENT", 0.0)
        assert [effect.instance for effect in bench.turn()] == ["b", "b"]
        if lost:
            bench.scheduler.instances.lost(InstanceName("b"), 1.0)
        kind = FaultKind.LOST_CONNECTION if lost else DOWN
        results = [bench.scheduler.attempts.failed(t.id, 2, kind, 1.0, False) for t in pair]
        assert results == ["requeued", "requeued"]
        # From now on only one is out at a time per instance, however long that takes.
        bench.now = 100.0
        bench.up("a", sequences_max=8)
        bench.up("b", sequences_max=8)
        bench.up("c", sequences_max=8)
        bench.up("d", sequences_max=8)
        where = [effect.instance for effect in bench.turn()]
        assert len(set(where)) == 2
        final = bench.scheduler.attempts.failed(pair[0].id, pair[0].attempt, DOWN, 101.0, False)
        assert isinstance(final, Refusal)
        assert final.outcome is Outcome.POISON
        bench.scheduler.attempts.ended(pair[1].id, pair[1].attempt, 102.0)
        assert bench.is_empty()


def test_suspects_go_on_one_per_instance_and_the_rest_a_second_later() -> None:
    bench = a_bench("a")
    tickets = [an_input(str(number)) for number in range(6)]
    bench.submit(*tickets)
    bench.turn()
    for name in "bc":
        bench.up(name, sequences_max=8)
    for ticket in tickets:
        bench.scheduler.attempts.failed(ticket.id, 1, DOWN, 0.0, False)
    bench.scheduler.instances.unreachable(InstanceName("a"), "SILENT", 0.0)
    assert sorted(effect.instance for effect in bench.turn()) == ["b", "c"]
    wakeup = bench.scheduler.next_wakeup(0.0)
    assert wakeup == pytest.approx(POISON.apart_s)
    bench.now = POISON.apart_s
    assert len(bench.turn()) == 4


def test_a_client_that_sends_it_again_finds_it_suspected_still() -> None:
    """Output was delivered, so each call ends with its first death."""
    bench = a_bench("a", "b", "c")
    outcomes = []
    for number in range(2):
        ticket = an_input("bad")
        bench.submit(ticket)
        (effect,) = bench.turn()
        result = bench.scheduler.attempts.failed(ticket.id, 1, DOWN, number * 5.0, True)
        assert isinstance(result, Refusal)
        outcomes.append(result.outcome)
        bench.scheduler.instances.unreachable(effect.instance, "SILENT", 0.0)
        bench.now += 2.0
    assert outcomes == [Outcome.INSTANCE_FAILED, Outcome.POISON]


def test_on_a_single_instance_it_takes_three_deaths() -> None:
    bench = a_bench("a")
    ticket = an_input("bad")
    bench.submit(ticket)
    results = []
    for _ in range(3):
        bench.turn()
        results.append(
            bench.scheduler.attempts.failed(ticket.id, ticket.attempt, DOWN, bench.now, False)
        )
        bench.now += 3.0
        bench.up("a", sequences_max=8)
    assert results[:2] == ["requeued", "requeued"]
    assert isinstance(results[2], Refusal)
    assert results[2].outcome is Outcome.POISON


def test_the_same_input_twice_on_one_instance_is_one_death() -> None:
    bench = a_bench("a")
    twins = [an_input("same") for _ in range(4)]
    bench.submit(*twins)
    bench.turn()
    for ticket in twins:
        assert bench.scheduler.attempts.failed(ticket.id, 1, DOWN, 0.0, False) == "requeued"


def test_an_input_that_is_everywhere_is_not_taken_for_poison() -> None:
    """Many send the same: copies of it are at every death, and were there before the first."""
    bench = a_bench("a", "b", sequences_max=100)
    copies = [an_input("popular") for _ in range(8)]
    bench.submit(*copies)
    bench.turn()
    for name in "ab":
        bench.now += 1.0
        for ticket in [one for one in copies if one.instance == name and one.attempt == 1]:
            result = bench.scheduler.attempts.failed(ticket.id, 1, DOWN, bench.now, False)
            assert result == "requeued"
    other = an_input("popular")
    assert bench.scheduler.submit(other, bench.now) is None
    bench.now += 5.0
    bench.up("c", sequences_max=100)
    bench.turn()
    ended = next(one for one in [*copies, other] if one.state is TicketState.RUNNING)
    bench.scheduler.attempts.ended(ended.id, ended.attempt, bench.now)
    assert bench.scheduler.snapshot().suspected == 0


@pytest.mark.parametrize("same_engine", [True, False])
def test_a_connection_that_was_cut_is_no_death(same_engine: bool) -> None:
    bench = a_bench("a", "b")
    ticket = an_input("x")
    bench.submit(ticket)
    (effect,) = bench.turn()
    first = effect.instance
    lost = FaultKind.LOST_CONNECTION
    assert bench.scheduler.attempts.failed(ticket.id, 1, lost, 0.0, False) == "requeued"
    assert len(bench.turn()) == 1
    bench.up(first, sequences_max=8)  # sent before, for all that one knows
    bench.now = 1.0
    bench.up(first, sequences_max=8, epoch="" if same_engine else "2")
    result = bench.scheduler.attempts.failed(ticket.id, 2, DOWN, 1.0, False)
    assert (result == "requeued") == same_engine


def test_what_is_remembered_is_bounded() -> None:
    bench = a_bench("a", "b", poison=replace(POISON, inputs_max=8), sequences_max=100)
    for number in range(50):
        ticket = an_input(str(number))
        bench.submit(ticket)
        bench.turn()
        bench.scheduler.attempts.failed(ticket.id, ticket.attempt, DOWN, bench.now, True)
        bench.scheduler.check_invariants()
    assert bench.scheduler.snapshot().suspected == 8
    assert bench.scheduler.submit(an_input("new"), POISON.suspicion_s + 1.0) is None
    assert bench.scheduler.snapshot().suspected == 0


@settings(SEARCH, max_examples=2_000 if THOROUGH else 100)
@given(
    poisonous_at=st.integers(0, 20),
    arrivals=st.lists(st.integers(0, 3), min_size=10, max_size=20),
    poison_comes=st.integers(0, 9),
    copies=st.integers(1, 3),
)
def test_poison_meets_at_most_three_instances_and_nobody_else_is_taken_for_it(
    poisonous_at: int, arrivals: list[int], poison_comes: int, copies: int
) -> None:
    """Goal: at most k = 3 deaths of an input sent again and again, all others finish. Method: four
    instances, arrivals at random steps, one input that kills after a number of tokens; sent anew
    when its call has ended. Oracle: the deaths, and the outcomes of all others."""
    bench = a_bench("a", "b", "c", "d")
    fleet = Fleet(bench, {b"bad": poisonous_at})
    others: list[Ticket] = []
    sent = 0
    last: Ticket | None = None
    for number, gap in enumerate(arrivals):
        for _ in range(gap):
            fleet.step()
        others.append(an_input(f"good-{number}"))
        bench.submit(others[-1])
        if number >= poison_comes and sent < copies and (last is None or last.id in fleet.ended):
            last = an_input("bad")
            sent += 1
            refusal = bench.scheduler.submit(last, bench.now)
            if refusal is not None:
                assert refusal.outcome is Outcome.POISON
                fleet.ended[last.id] = refusal.outcome
    for _ in range(300):
        if len(fleet.ended) == len(others) + sent:
            break
        fleet.step()
    assert fleet.deaths <= 3
    assert {fleet.ended[ticket.id] for ticket in others} == {Outcome.FINISHED}
    if last is not None:
        assert fleet.ended[last.id] is Outcome.POISON
    assert bench.is_empty()
