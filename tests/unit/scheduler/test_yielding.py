"""When running work gives its place away, and that it comes back: the domain alone."""

from __future__ import annotations

import pytest

from scheduler_svc.domain.model import (
    Abort,
    Dispatch,
    Effect,
    FaultKind,
    GpuState,
    InstanceName,
    Outcome,
    PriorityClass,
    Refusal,
    Refuse,
    RejectKind,
    Ticket,
    TicketState,
    Yield,
)
from tests.unit.scheduler.scheduling import Bench, a_ticket

A, B = InstanceName("a"), InstanceName("b")
LOST = FaultKind.LOST_CONNECTION
ERROR = FaultKind.ENGINE_ERROR
CRITICAL, INTERACTIVE = PriorityClass.CRITICAL, PriorityClass.INTERACTIVE
STANDARD, BATCH = PriorityClass.STANDARD, PriorityClass.BATCH


def a_batch(**changes: object) -> Ticket:
    """A continuable batch ticket with time."""
    values = {"priority_class": BATCH, "continuable": True, "deadline_s": 600.0} | changes
    return a_ticket(**values)


def begin(bench: Bench, ticket: Ticket, tokens: int = 10) -> Ticket:
    """Runs, and has made so many tokens."""
    (effect,) = [e for e in _turn(bench, ticket) if isinstance(e, Dispatch)]
    bench.scheduler.attempts.accepted(ticket.id, effect.attempt, ticket.prompt_tokens, 0, bench.now)
    bench.scheduler.attempts.first_token(ticket.id, effect.attempt, bench.now)
    bench.scheduler.attempts.progressed(ticket.id, effect.attempt, tokens)
    return ticket


def _turn(bench: Bench, *tickets: Ticket) -> list[Effect]:
    bench.submit(*tickets)
    effects = bench.scheduler.turn(bench.now)
    bench.scheduler.check_invariants()
    return effects


def yields(effects: list[Effect]) -> list[Ticket]:
    """Who is asked to yield, where nothing else happens."""
    assert all(isinstance(effect, Yield) for effect in effects), effects
    return [effect.ticket for effect in effects]


def stopped(bench: Bench, ticket: Ticket, tokens: int) -> None:
    """The instance confirms a yield."""
    told = bench.scheduler.attempts.yielded(ticket.id, ticket.attempt, bench.now, tokens)
    assert told == "requeued"
    bench.scheduler.check_invariants()


# --- going on ------------------------------------------------------------------------------------


def test_what_was_begun_goes_on_elsewhere_and_reads_its_output_again() -> None:
    bench = Bench("a", "b")
    ticket = begin(bench, a_batch(prompt_tokens=100, output_tokens=50), 20)
    first = ticket.instance
    assert bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, 20) == "requeued"
    (second,) = bench.turn()
    assert second.instance != first
    assert (ticket.resumed_tokens, ticket.migrations, ticket.yields) == (20, 1, 0)
    assert bench.scheduler.snapshot().instances[second.instance].prefill_tokens == 120
    assert ticket.kv_tokens == 150, "what it holds at its end is the same as ever"
    bench.scheduler.attempts.ended(ticket.id, 2, 1.0, output_tokens=30)
    assert bench.scheduler.expected_output_tokens("t", "m", None) == 50, "over all attempts"
    assert bench.is_empty()


def test_it_goes_on_only_with_the_model_that_began_it() -> None:
    """Mutant seen to fail: fingerprint_ignored."""
    bench = Bench("a")
    ticket = begin(bench, a_batch())
    bench.up("other", fingerprint="g")
    bench.up("same", sequences_max=1)
    filler = bench.dispatch(a_ticket())
    while filler.instance != "same":
        filler = bench.dispatch(a_ticket())
    bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, 10)
    assert bench.turn() == [], "the other model has room, the same has not"
    bench.scheduler.attempts.ended(filler.ticket.id, 1, 0.0)
    (effect,) = bench.turn()
    assert effect.instance == "same"


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": "g"}, {"model": "n", "fingerprint": "f"}],
    ids=["another fingerprint", "another model"],
)
def test_where_no_other_instance_has_the_model_it_is_over(changes: dict[str, object]) -> None:
    bench = Bench("a")
    ticket = begin(bench, a_batch())
    bench.up("b", **changes)
    final = bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, 10)
    assert isinstance(final, Refusal)
    assert (final.outcome, final.reason) == (Outcome.INSTANCE_FAILED, "INSTANCE_LOST")
    assert bench.is_empty()


def test_when_only_the_relay_is_lost_the_same_instance_goes_on() -> None:
    bench = Bench("a")
    ticket = begin(bench, a_batch())
    bench.scheduler.instances.lost(A, 0.0)
    assert (
        bench.scheduler.attempts.failed(ticket.id, 1, FaultKind.LOST_RELAY, 0.0, 10) == "requeued"
    )
    assert bench.turn() == []
    bench.scheduler.instances.credit(A, 4, 100_000, 0.0)
    (effect,) = bench.turn()
    assert effect.instance == A


def test_it_goes_on_after_so_many_failures_and_no_more() -> None:
    bench = Bench("a", "b", migrations_max=3)
    ticket = a_batch()
    for attempt in range(1, 4):
        if attempt == 1:
            begin(bench, ticket)
        assert (
            bench.scheduler.attempts.failed(ticket.id, attempt, ERROR, 0.0, 10 * attempt)
            == "requeued"
        )
        bench.turn()
    assert isinstance(bench.scheduler.attempts.failed(ticket.id, 4, ERROR, 0.0, 40), Refusal)
    assert ticket.migrations == 3
    assert bench.is_empty()


def test_what_was_begun_waits_for_its_end_and_not_for_a_first_token() -> None:
    """Its client has output already: the first-token limit is met for good."""
    bench = Bench("a", "b", report={"sequences_max": 1})
    ticket = begin(bench, a_batch(first_token_limit_s=5.0, deadline_s=100.0))
    blocker = bench.dispatch(a_ticket(deadline_s=500.0))
    bench.scheduler.attempts.first_token(blocker.ticket.id, 1, 0.0)
    bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, 10)
    bench.scheduler.instances.unreachable(InstanceName("a"), "gone", 0.0)
    if ticket.instance == B:
        bench.scheduler.instances.unreachable(B, "gone", 0.0)
    bench.now = 50.0
    assert bench.turn() == []
    assert ticket.state is TicketState.WAITING
    bench.now = 100.0
    (refuse,) = bench.refused()
    assert refuse.outcome is Outcome.DEADLINE_EXCEEDED


def test_what_waits_for_a_model_that_is_gone_is_given_up_in_time() -> None:
    """Others of its line are served meanwhile, so that the line's own patience does not end."""
    bench = Bench("a", "b", no_instance_wait_s=10.0)
    bench.up("other", fingerprint="g")
    ticket = begin(bench, a_batch())
    while ticket.instance == "other":
        ticket = begin(bench, a_batch())
    bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, 10)
    for name in (A, B):
        bench.scheduler.instances.unreachable(name, "gone", 0.0)
    assert bench.turn() == []
    bench.now = 9.0
    assert bench.turn() == []
    bench.now = 10.0
    assert bench.turn() == []
    bench.now = 20.0
    (refuse,) = bench.refused()
    assert (refuse.outcome, refuse.error.reason) == (Outcome.INSTANCE_FAILED, "INSTANCE_LOST")


# --- preemption ----------------------------------------------------------------------------------


def full_of_batch(count: int = 2, **changes: object) -> tuple[Bench, list[Ticket]]:
    """An instance whose sequences are all taken by batch work that has run for a while."""
    bench = Bench("a", report={"sequences_max": count}, **changes)
    tickets = [begin(bench, a_batch(prompt_tokens=100 + 300 * i)) for i in range(count)]
    bench.now = 2.0
    return bench, tickets


@pytest.mark.parametrize("cls", [CRITICAL, INTERACTIVE])
def test_urgent_work_takes_the_place_of_the_cheapest_batch_work(cls: PriorityClass) -> None:
    bench, (cheap, _) = full_of_batch()
    urgent = a_ticket(priority_class=cls, arrival_s=2.0)
    assert _turn(bench, urgent) == [], "room may come free by itself"
    wake = bench.scheduler.next_wakeup(bench.now)
    assert wake == pytest.approx(2.1)
    bench.now = 2.1
    assert yields(_turn(bench)) == [cheap]
    assert cheap.state is TicketState.YIELDING
    bench.now = 2.5
    assert _turn(bench) == [], "one is enough, and it is on its way"
    stopped(bench, cheap, 12)
    (effect,) = bench.turn()
    assert effect.ticket is urgent
    assert (cheap.resumed_tokens, cheap.yields, cheap.migrations) == (12, 1, 0)
    assert bench.scheduler.snapshot().moves == {"preempted": 1}


def test_the_preempted_goes_on_before_its_class_when_there_is_room() -> None:
    """Mutant seen to fail: preempted_is_lost."""
    bench, (cheap, _) = full_of_batch()
    urgent = a_ticket(priority_class=CRITICAL, arrival_s=1.0)
    later = a_batch()
    assert yields(_turn(bench, urgent, later)) == [cheap]
    stopped(bench, cheap, 12)
    bench.turn()
    bench.scheduler.attempts.ended(urgent.id, 1, 3.0)
    (effect,) = bench.turn()
    assert effect.ticket is cheap
    assert effect.attempt == 2


def test_standard_work_takes_nobodys_place_and_standard_work_gives_none() -> None:
    bench, _ = full_of_batch()
    assert _turn(bench, a_ticket(priority_class=STANDARD, arrival_s=0.0)) == []
    bench = Bench("a", report={"sequences_max": 1})
    begin(bench, a_ticket(priority_class=STANDARD, continuable=True))
    bench.now = 5.0
    assert _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=0.0)) == []


def test_what_cannot_go_on_is_never_preempted() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    begin(bench, a_batch(continuable=False))
    bench.now = 5.0
    assert _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=0.0)) == []


def test_what_has_just_begun_runs_a_while_first() -> None:
    bench = Bench("a", report={"sequences_max": 1}, yield_run_min_s=1.0)
    ticket = begin(bench, a_batch())
    bench.now = 0.9
    assert _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=0.0)) == []
    while bench.now < 1.0:
        wake = bench.scheduler.next_wakeup(bench.now)
        assert wake is not None and wake > bench.now
        bench.now = wake
        effects = _turn(bench)
    assert yields(effects) == [ticket]
    assert bench.now < 1.2


def test_a_ticket_gives_its_place_away_only_so_often() -> None:
    """So batch work comes to its end under any stream of urgent work."""
    bench = Bench("a", report={"sequences_max": 1}, yields_max=2)
    ticket = begin(bench, a_batch())
    for round_ in range(1, 3):
        bench.now += 2.0
        urgent = a_ticket(priority_class=CRITICAL, arrival_s=bench.now - 1.0)
        assert yields(_turn(bench, urgent)) == [ticket]
        stopped(bench, ticket, 10 * round_)
        bench.turn()
        bench.scheduler.attempts.ended(urgent.id, 1, bench.now)
        (effect,) = bench.turn()
        bench.scheduler.attempts.first_token(ticket.id, effect.attempt, bench.now)
    bench.now += 2.0
    assert _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=bench.now - 1.0)) == []


def test_no_more_go_than_those_who_wait_need() -> None:
    bench, tickets = full_of_batch(4)
    urgent = [a_ticket(priority_class=CRITICAL, arrival_s=0.0) for _ in range(2)]
    assert yields(_turn(bench, *urgent)) == tickets[:2]
    bench.now += 1.0
    assert _turn(bench) == []
    third = a_ticket(priority_class=CRITICAL, arrival_s=0.0)
    assert yields(_turn(bench, third)) == [tickets[2]]


def test_memory_is_made_free_too() -> None:
    bench = Bench("a", report={"sequences_max": 8, "kv_tokens": 1_000})
    small, large = (begin(bench, a_batch(prompt_tokens=n, output_tokens=32)) for n in (160, 600))
    bench.now = 2.0
    urgent = a_ticket(priority_class=CRITICAL, prompt_tokens=500, arrival_s=0.0)
    assert yields(_turn(bench, urgent)) == [large], "the small one's memory is not enough"
    stopped(bench, large, 10)
    (effect,) = bench.turn()
    assert effect.ticket is urgent
    assert small.state is TicketState.RUNNING


def test_a_yield_that_the_end_overtakes_is_an_end() -> None:
    bench, (cheap, _) = full_of_batch()
    _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=0.0))
    bench.scheduler.attempts.ended(cheap.id, 1, 2.0)
    assert cheap.state is TicketState.ENDED
    assert bench.scheduler.attempts.yielded(cheap.id, 1, 2.0, 12) == "ended"


def test_who_yields_can_be_cancelled_and_is_then_over() -> None:
    bench, (cheap, dear) = full_of_batch()
    _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=0.0))
    assert isinstance(bench.scheduler.cancel(cheap.id, 2.0), Abort)
    assert bench.scheduler.attempts.yielded(cheap.id, 1, 2.0, 12) == "ended"
    assert cheap.state is TicketState.ENDED
    assert dear.state is TicketState.RUNNING
    bench.scheduler.check_invariants()


def test_an_instance_that_stops_of_itself_was_not_asked() -> None:
    bench, (cheap, _) = full_of_batch()
    assert bench.scheduler.attempts.yielded(cheap.id, 1, 2.0, 12) == "unasked"
    assert cheap.state is TicketState.RUNNING


def test_who_yields_and_is_lost_or_rejected_goes_on_all_the_same() -> None:
    bench, (cheap, dear) = full_of_batch()
    bench.up("b", sequences_max=1)
    begin(bench, a_batch())
    bench.now = 4.0
    urgent = a_ticket(priority_class=CRITICAL, arrival_s=0.0)
    assert len(yields(_turn(bench, urgent))) == 1
    orphans = bench.scheduler.instances.lost(A, 4.0)
    assert set(orphans) == {cheap.id, dear.id}
    for ticket in (cheap, dear):
        assert bench.scheduler.attempts.failed(ticket.id, 1, LOST, 4.0, 10) == "requeued"
    bench.scheduler.check_invariants()
    bench, (cheap, _) = full_of_batch()
    _turn(bench, a_ticket(priority_class=CRITICAL, arrival_s=0.0))
    bench.scheduler.attempts.rejected(cheap.id, 1, RejectKind.NO_ROOM, 2.0)
    assert cheap.state is TicketState.WAITING


def test_the_deadline_counts_while_it_waits_again() -> None:
    bench, (cheap, _) = full_of_batch()
    cheap.deadline_s = 30.0
    urgent = a_ticket(priority_class=CRITICAL, arrival_s=0.0)
    _turn(bench, urgent)
    stopped(bench, cheap, 12)
    bench.turn()
    bench.scheduler.attempts.first_token(urgent.id, 1, 2.0)
    bench.now = 30.0
    effects = _turn(bench)
    (refuse,) = [e for e in effects if isinstance(e, Refuse)]
    assert refuse.ticket is cheap
    assert refuse.outcome is Outcome.DEADLINE_EXCEEDED


# --- credit --------------------------------------------------------------------------------------


def test_a_credit_below_what_runs_is_met_by_the_cheapest_work_that_can_go_on() -> None:
    bench = Bench("a", report={"sequences_max": 4})
    fixed = begin(bench, a_ticket(prompt_tokens=1))
    critical = begin(bench, a_ticket(prompt_tokens=1, priority_class=CRITICAL, continuable=True))
    dear, cheap = (begin(bench, a_batch(prompt_tokens=n)) for n in (2_000, 500))
    bench.now = 2.0
    bench.scheduler.instances.credit(A, 3, 100_000, 2.0)
    assert _turn(bench) == [], "something may end by itself"
    bench.now = bench.scheduler.next_wakeup(2.0) or 0.0
    assert bench.now == pytest.approx(2.25)
    assert yields(_turn(bench)) == [cheap]
    bench.scheduler.instances.credit(A, 1, 100_000, bench.now)
    bench.now += 1.0
    assert yields(_turn(bench)) == [dear, critical]
    for ticket in (cheap, dear, critical):
        stopped(bench, ticket, 10)
    assert _turn(bench) == [], "the credit is used up by what cannot go on"
    bench.now += 1.0
    assert _turn(bench) == []
    assert fixed.state is TicketState.RUNNING


def test_a_credit_that_comes_back_in_time_moves_nobody() -> None:
    bench = Bench("a", report={"sequences_max": 2})
    for _ in range(2):
        begin(bench, a_batch())
    bench.now = 2.0
    bench.scheduler.instances.credit(A, 1, 100_000, 2.0)
    bench.now = 2.2
    bench.scheduler.instances.credit(A, 2, 100_000, 2.2)
    bench.now = 3.0
    assert _turn(bench) == []


def test_a_credit_of_memory_counts_too() -> None:
    bench = Bench("a", report={"sequences_max": 4})
    cheap, _ = (begin(bench, a_batch(prompt_tokens=n)) for n in (400, 1_200))
    bench.now = 2.0
    bench.scheduler.instances.credit(A, 4, 1_300, 2.0)
    bench.now = 2.5
    assert yields(_turn(bench)) == [cheap]


def test_what_runs_alone_keeps_more_than_the_credit_of_memory() -> None:
    bench = Bench("a", report={"sequences_max": 4})
    alone = begin(bench, a_batch(prompt_tokens=1_200))
    bench.now = 2.0
    bench.scheduler.instances.credit(A, 4, 600, 2.0)
    bench.now = 5.0
    assert _turn(bench) == []
    assert alone.state is TicketState.RUNNING


def test_what_is_cut_off_runs_on() -> None:
    """No way to an instance is no wish of it."""
    bench = Bench("a", report={"sequences_max": 2})
    begin(bench, a_batch())
    bench.scheduler.instances.cut_off(A, 0.0)
    bench.now = 5.0
    assert _turn(bench) == []


def test_one_who_has_two_reasons_to_go_is_asked_once() -> None:
    """Its instance drains, and holds more than its credit."""
    bench = Bench("a", report={"sequences_max": 4})
    ticket = begin(bench, a_batch(output_tokens=1_000))
    bench.up("b")
    bench.now = 2.0
    bench.scheduler.instances.credit(A, 0, 0, 2.0)
    bench.now = 3.0
    bench.scheduler.instances.drain(A, True, 3.0)
    assert yields(_turn(bench)) == [ticket]
    assert bench.scheduler.snapshot().moves == {"drain": 1}


# --- drain ---------------------------------------------------------------------------------------


def draining(bench: Bench, how: str) -> None:
    if how == "operator":
        assert bench.scheduler.instances.drain(A, True, bench.now)
    elif how == "gpu fault":
        bench.up("a", gpus=GpuState(xid_errors=1), step_ms=20.0)
    else:
        bench.up("a", draining=True, step_ms=20.0)


@pytest.mark.parametrize("how", ["operator", "report", "gpu fault"])
def test_what_would_run_on_for_long_leaves_an_instance_that_drains(how: str) -> None:
    """With 20 ms a token: 1,000 tokens are long, 100 are not."""
    bench = Bench("a", drain_run_max_s=5.0)
    long, short, fixed = (
        begin(bench, a_ticket(output_tokens=n, continuable=can, deadline_s=600.0))
        for n, can in ((1_000, True), (100, True), (1_000, False))
    )
    bench.up("b")
    draining(bench, how)
    assert yields(_turn(bench)) == [long]
    stopped(bench, long, 11)
    (effect,) = bench.turn()
    assert effect.instance == B
    bench.now += 1.0
    assert _turn(bench) == []
    assert bench.scheduler.snapshot().instances[A].draining
    for ticket in (short, fixed):
        bench.scheduler.attempts.ended(ticket.id, 1, bench.now)
    bench.scheduler.attempts.ended(long.id, 2, bench.now)
    bench.now += 1.0
    assert _turn(bench) == []
    assert bench.is_empty()


def test_where_nobody_else_has_the_model_it_runs_on_there() -> None:
    bench = Bench("a")
    begin(bench, a_ticket(output_tokens=1_000, continuable=True, deadline_s=600.0))
    bench.up("b", fingerprint="g")
    draining(bench, "operator")
    assert _turn(bench) == []


def test_who_has_outrun_the_estimate_is_taken_to_be_half_way() -> None:
    bench = Bench("a", "b", drain_run_max_s=5.0)
    ticket = begin(bench, a_ticket(output_tokens=10, continuable=True, deadline_s=600.0), 400)
    bench.scheduler.instances.drain(ticket.instance or A, True, 0.0)
    assert yields(_turn(bench)) == [ticket]


def test_no_more_leave_at_a_time_than_have_room_elsewhere() -> None:
    bench = Bench("a", report={"sequences_max": 8})
    tickets = [
        begin(bench, a_ticket(output_tokens=1_000 + i, continuable=True, deadline_s=600.0))
        for i in range(6)
    ]
    bench.up("b", sequences_max=2)
    draining(bench, "operator")
    first = yields(_turn(bench))
    assert first == [tickets[5], tickets[4]], "the longest first"


def test_an_operator_opens_it_again_and_a_report_does_not() -> None:
    bench = Bench("a")
    draining(bench, "operator")
    bench.up("a")
    ticket = a_ticket()
    bench.submit(ticket)
    assert bench.turn() == []
    assert bench.scheduler.instances.drain(A, False, 0.0)
    assert [effect.ticket for effect in bench.turn()] == [ticket]
    assert not bench.scheduler.instances.drain(InstanceName("nobody"), True, 0.0)
