"""The scheduler: the life of a ticket, one sentence each."""

from __future__ import annotations

import pytest

from scheduler_svc.domain.limits import ClassLimits
from scheduler_svc.domain.model import (
    Abort,
    Demand,
    Dispatch,
    FaultKind,
    InstanceName,
    Outcome,
    PriorityClass,
    Refusal,
    Refuse,
    RejectKind,
    TicketState,
    WorkKind,
)
from sluice.errors import Code
from tests.unit.scheduler.scheduling import NO_SHARE, Bench, a_report, a_ticket

A, B = InstanceName("a"), InstanceName("b")
LOST = FaultKind.LOST_CONNECTION


def test_a_ticket_is_placed_runs_and_ends_once_and_nothing_is_left() -> None:
    bench = Bench("a")
    ticket = a_ticket()
    effect = bench.dispatch(ticket)
    assert (effect.instance, effect.attempt) == (A, 1)
    scheduler = bench.scheduler
    scheduler.attempts.accepted(ticket.id, 1, 90, 0, 0.1)
    scheduler.attempts.first_token(ticket.id, 1, 0.2)
    scheduler.attempts.progressed(ticket.id, 1, 20)
    scheduler.attempts.ended(ticket.id, 1, 1.0, output_tokens=40)
    scheduler.attempts.ended(ticket.id, 1, 1.0)  # a second end is stale
    assert bench.is_empty()
    assert scheduler.snapshot().outcomes == {Outcome.FINISHED: 1}
    assert scheduler.expected_output_tokens("t", "m", None) == 40


def test_nothing_is_placed_before_the_first_credit() -> None:
    bench = Bench()
    bench.scheduler.instances.report(a_report(), 0.0)
    bench.submit(a_ticket())
    assert bench.turn() == []
    bench.scheduler.instances.credit(A, 1, 1_000, 0.0)
    assert len(bench.turn()) == 1


def test_never_more_than_the_credit_runs_on_an_instance() -> None:
    bench = Bench("a")
    bench.scheduler.instances.credit(A, 2, 100_000, 0.0)
    tickets = [a_ticket() for _ in range(4)]
    bench.submit(*tickets)
    assert [e.ticket for e in bench.turn()] == tickets[:2]
    bench.scheduler.attempts.ended(tickets[0].id, 1, 0.0)
    assert [e.ticket for e in bench.turn()] == tickets[2:3]
    bench.scheduler.instances.credit(A, 1, 100_000, 0.0)  # less than what runs
    bench.scheduler.attempts.ended(tickets[1].id, 1, 0.0)
    assert bench.turn() == []


def test_a_ticket_larger_than_the_credit_runs_where_nothing_else_does() -> None:
    # With several schedulers none of them ever has the credit for all of an instance's memory.
    bench = Bench("a")
    bench.scheduler.instances.credit(A, 4, 50_000, 0.0)
    large, other = a_ticket(prompt_tokens=60_000), a_ticket()
    bench.dispatch(other)
    bench.submit(large)
    assert bench.turn() == []
    bench.scheduler.attempts.ended(other.id, 1, 0.0)
    assert [e.ticket for e in bench.turn()] == [large]
    bench.submit(a_ticket())
    assert bench.turn() == []  # beyond the credit until that has ended
    bench.scheduler.attempts.ended(large.id, 1, 0.0)
    bench.scheduler.instances.credit(A, 0, 0, 0.0)
    assert bench.turn() == []  # without a credit nothing starts


def test_a_prompt_is_never_taken_for_longer_than_every_context() -> None:
    bench = Bench("a", report={"context_tokens": 2_000})
    assert bench.scheduler.readable_tokens("m", 1_000_000) == 2_000
    bench.up("b", context_tokens=4_000)
    assert bench.scheduler.readable_tokens("m", 1_000_000) == 4_000
    assert bench.scheduler.readable_tokens("m", 3_000) == 3_000
    bench.up("c", model="other", context_tokens=0)  # it does not say
    assert bench.scheduler.readable_tokens("other", 1_000_000) == 1_000_000
    for name in ("a", "b"):
        bench.scheduler.instances.remove(InstanceName(name), 0.0)
    assert bench.scheduler.readable_tokens("m", 1_000_000) == 1_000_000
    bench.scheduler.check_invariants()


def test_work_is_spread_over_equal_instances() -> None:
    bench = Bench("a", "b")
    bench.submit(*(a_ticket() for _ in range(8)))
    assert sorted(e.instance for e in bench.turn()) == ["a"] * 4 + ["b"] * 4


def test_a_full_model_does_not_hold_up_another_one() -> None:
    """Mutant seen to fail: ``_place`` that ends the turn with the first line that is full."""
    bench = Bench("a")
    bench.up("b", model="n")
    bench.submit(*(a_ticket(priority_class=PriorityClass.CRITICAL) for _ in range(6)))
    bench.submit(a_ticket(model="n", priority_class=PriorityClass.BATCH))
    assert [e.instance for e in bench.turn()] == ["a"] * 4 + ["b"]


def test_a_ticket_that_fits_nowhere_now_lets_a_smaller_one_of_its_class_pass_but_not_for_ever() -> (
    None
):
    """Goal: neither idle memory nor starvation of large prompts. Method: a large ticket waits
    while small ones come and go. Oracle: it is passed over ``passed_over_max`` times, then runs
    next. Mutant seen to fail: ``took`` that does not count."""
    bench = Bench(
        "a", report={"kv_tokens": 1_000}, passed_over_max=5, kv_reserve=0.0, classes=NO_SHARE
    )
    running = [bench.dispatch(a_ticket())]
    large = a_ticket(prompt_tokens=800)
    bench.submit(large)
    for _ in range(5):
        running.append(bench.dispatch(a_ticket()))
        done = running.pop(0)
        bench.scheduler.attempts.ended(done.ticket.id, done.attempt, 0.0)
    bench.submit(a_ticket())
    assert bench.turn() == []  # what it could use is kept for the large one
    bench.scheduler.attempts.ended(running[0].ticket.id, 1, 0.0)
    assert bench.turn()[0].ticket is large


def test_a_lower_class_never_takes_the_room_that_a_waiting_higher_class_could_use() -> None:
    """Mutant seen to fail: ``find`` without the rule on classes."""
    bench = Bench("a", "b", report={"kv_tokens": 1_000}, kv_reserve=0.0, classes=NO_SHARE)
    bench.submit(a_ticket(), a_ticket())
    assert len(bench.turn()) == 2
    urgent = a_ticket(priority_class=PriorityClass.CRITICAL, prompt_tokens=900, excluded={B})
    bench.submit(urgent, *(a_ticket(priority_class=PriorityClass.BATCH) for _ in range(4)))
    assert [e.instance for e in bench.turn()] == ["b"] * 3  # all that b has; none on a
    bench.submit(a_ticket(priority_class=PriorityClass.CRITICAL))
    assert [e.instance for e in bench.turn()] == ["a"]  # within its class a ticket may pass


def test_a_ticket_that_may_not_use_an_instance_does_not_keep_others_from_it() -> None:
    bench = Bench("a", "b")
    picky = [a_ticket(excluded={A}) for _ in range(6)]
    bench.submit(*picky)
    assert [e.instance for e in bench.turn()] == ["b"] * 4
    bench.submit(a_ticket(priority_class=PriorityClass.BATCH), a_ticket())
    assert [e.instance for e in bench.turn()] == ["a", "a"]


# --- refusals ----------------------------------------------------------------------------------


def refusal_of(result: Refusal | None) -> tuple[Outcome, Code, str]:
    assert isinstance(result, Refusal)
    return result.outcome, result.code, result.reason


def test_an_unknown_model_is_refused_at_once() -> None:
    bench = Bench("a")
    refused = bench.scheduler.submit(a_ticket(model="x"), 0.0)
    assert refusal_of(refused) == (Outcome.NO_INSTANCE, Code.UNAVAILABLE, "NO_INSTANCE")
    embedding = a_ticket(kind=WorkKind.EMBED)  # the model is there, but does not embed
    assert refusal_of(bench.scheduler.submit(embedding, 0.0))[0] is Outcome.NO_INSTANCE
    assert bench.is_empty()


def test_a_full_queue_refuses_with_a_delay_that_comes_from_its_length() -> None:
    bounds = ClassLimits(80, 10**6, 80, 10**6, 0.0)
    bench = Bench("a", classes=dict.fromkeys(PriorityClass, bounds), retry_after_jitter=0.0)
    first = bench.dispatch(a_ticket())
    bench.now = 4.0
    bench.scheduler.attempts.ended(
        first.ticket.id, 1, 4.0, output_tokens=50
    )  # 4 s of service learnt
    tickets = [a_ticket(deadline_s=999.0, first_token_limit_s=999.0) for _ in range(44)]
    bench.submit(*tickets[:4])
    bench.turn()
    bench.submit(*tickets[4:])
    refused = bench.scheduler.submit(a_ticket(deadline_s=999.0, first_token_limit_s=999.0), 4.0)
    assert refusal_of(refused) == (
        Outcome.QUEUE_FULL,
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
    )
    assert refused is not None
    assert refused.retry_after_s == 40.0  # 40 ahead, 4 s each, 4 at once
    assert refused.metadata == {"scope": "tenant"}


def test_retry_delays_of_those_who_were_refused_together_differ() -> None:
    bench = Bench("a", classes={c: ClassLimits(0, 0, 0, 0, 0.0) for c in PriorityClass})
    delays = set()
    for _ in range(50):
        refused = bench.scheduler.submit(a_ticket(), 0.0)
        assert refused is not None
        assert refused.retry_after_s is not None
        assert 0.4 <= refused.retry_after_s <= 0.6
        delays.add(refused.retry_after_s)
    assert len(delays) > 40


def test_a_ticket_whose_wait_would_outlast_its_limit_is_refused_at_entry() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    first = bench.dispatch(a_ticket())
    bench.scheduler.attempts.ended(first.ticket.id, 1, 10.0, output_tokens=9)
    bench.now = 10.0
    patient = {"deadline_s": 500.0, "first_token_limit_s": 400.0}
    bench.submit(*(a_ticket(**patient) for _ in range(6)))
    bench.turn()
    later = a_ticket(deadline_s=500.0, first_token_limit_s=401.0)
    assert bench.scheduler.submit(later, 10.0) is None
    hasty = a_ticket(arrival_s=10.0, first_token_limit_s=39.0, priority_class=PriorityClass.BATCH)
    refused = bench.scheduler.submit(hasty, 10.0)
    assert refusal_of(refused) == (Outcome.HOPELESS, Code.RESOURCE_EXHAUSTED, "HOPELESS")
    # As urgent, but it goes ahead of the patient ones of its class: not hopeless.
    assert bench.scheduler.submit(a_ticket(first_token_limit_s=39.0), 10.0) is None


def test_a_prompt_that_cannot_be_read_in_time_is_refused_once_the_rate_is_known() -> None:
    bench = Bench("a")
    assert bench.scheduler.submit(a_ticket(prompt_tokens=10**6), 0.0) is None  # nothing measured
    bench.turn()
    for second in range(1, 4):
        bench.scheduler.instances.report(a_report(prompt_tokens_per_s=1_000.0), float(second))
    refused = bench.scheduler.submit(a_ticket(prompt_tokens=40_000), 3.0)
    assert refusal_of(refused)[0] is Outcome.HOPELESS
    assert bench.scheduler.submit(a_ticket(prompt_tokens=20_000), 3.0) is None


def test_a_rate_over_a_time_that_was_not_all_busy_refuses_nobody() -> None:
    """Mutant seen to fail: one busy report is enough. A prompt that was cancelled in the middle
    would then teach what little the engine read in its window, and refuse prompts of its size."""
    bench = Bench("a")
    ticket = a_ticket(prompt_tokens=10**6)
    assert bench.scheduler.submit(ticket, 0.0) is None
    bench.turn()
    instances = bench.scheduler.instances
    for tenth in range(1, 20):  # full steps from the first report on, for 1.8 s
        instances.report(a_report(prompt_tokens_per_s=60.0), tenth / 10)
    assert bench.scheduler.submit(a_ticket(prompt_tokens=20_000), 1.9) is None
    for tenth in range(20, 40):
        instances.report(a_report(prompt_tokens_per_s=60.0), tenth / 10)
    refused = bench.scheduler.submit(a_ticket(prompt_tokens=20_000), 4.0)
    assert refusal_of(refused)[0] is Outcome.HOPELESS


def test_what_would_most_likely_miss_its_limit_is_refused_and_not_begun() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    for _ in range(20):
        ticket = a_ticket()
        bench.dispatch(ticket)
        bench.scheduler.attempts.first_token(ticket.id, 1, 2.0)  # each takes 2 s
        bench.scheduler.attempts.ended(ticket.id, 1, 2.0, output_tokens=1)
    running, waiting = a_ticket(), a_ticket(first_token_limit_s=20.0)
    bench.dispatch(running)
    bench.submit(waiting)
    bench.now = 18.5
    bench.scheduler.attempts.ended(running.id, 1, 18.5, output_tokens=1)
    (refuse,) = bench.refused()
    assert (refuse.ticket, refuse.outcome) == (waiting, Outcome.HOPELESS)


def test_however_long_first_tokens_took_only_the_last_quarter_of_the_time_is_refused() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    slow = a_ticket(first_token_limit_s=50.0)
    bench.dispatch(slow)
    bench.scheduler.attempts.first_token(slow.id, 1, 45.0)
    waiting = a_ticket(first_token_limit_s=20.0)
    bench.submit(waiting)
    bench.now = 14.9
    bench.scheduler.attempts.ended(slow.id, 1, 14.9, output_tokens=1)
    assert [dispatch.ticket for dispatch in bench.turn()] == [waiting]


def test_a_wrong_estimate_heals_because_an_empty_queue_is_never_hopeless() -> None:
    bench = Bench("a")
    for _ in range(20):
        ticket = a_ticket()
        bench.dispatch(ticket)
        bench.scheduler.attempts.ended(
            ticket.id, 1, 10_000.0, output_tokens=9
        )  # absurd service times
    assert bench.scheduler.submit(a_ticket(), 0.0) is None


def test_a_ticket_that_waited_in_vain_is_refused_at_its_time_with_the_reason() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    bench.dispatch(a_ticket(deadline_s=500.0, first_token_limit_s=499.0))
    limit, deadline = a_ticket(first_token_limit_s=20.0), a_ticket(deadline_s=25.0)
    bench.submit(limit, deadline)
    assert bench.scheduler.next_wakeup(0.0) == 3.0  # the report goes stale first
    bench.now = 3.0
    bench.turn()
    assert bench.scheduler.next_wakeup(3.0) == 20.0
    bench.now = 20.0
    (refuse,) = bench.refused()
    assert refuse.ticket is limit
    assert refusal_of(refuse.error) == (Outcome.HOPELESS, Code.RESOURCE_EXHAUSTED, "HOPELESS")  # type: ignore[arg-type]
    assert refuse.error.retry_after_s is not None
    bench.now = 25.0
    (refuse,) = bench.refused()
    assert (refuse.ticket, refuse.outcome) == (deadline, Outcome.DEADLINE_EXCEEDED)
    assert refuse.error.code is Code.DEADLINE_EXCEEDED


def test_a_request_past_its_deadline_never_enters() -> None:
    bench = Bench("a")
    refused = bench.scheduler.submit(a_ticket(deadline_s=5.0), 5.0)
    assert refusal_of(refused)[:2] == (Outcome.DEADLINE_EXCEEDED, Code.DEADLINE_EXCEEDED)


def test_tickets_wait_a_bounded_time_for_a_model_without_an_instance_that_is_up() -> None:
    """Goal: an engine that restarts loses nobody, one that stays away holds nobody. Oracle: the
    named wait, counted from when the absence was first seen."""
    bench = Bench("a", no_instance_wait_s=10.0)
    bench.scheduler.instances.unreachable(A, "connection refused", 0.0)
    early = a_ticket()
    bench.submit(early)
    bench.now = 9.0
    assert bench.turn() == []
    late = a_ticket()
    bench.submit(late)
    assert bench.scheduler.next_wakeup(9.0) == 10.0
    bench.now = 10.0
    refused = bench.refused()
    assert [r.ticket for r in refused] == [early, late]
    assert refused[0].error.code is Code.UNAVAILABLE
    assert bench.scheduler.next_wakeup(10.0) is None
    assert refusal_of(bench.scheduler.submit(a_ticket(), 11.0))[0] is Outcome.NO_INSTANCE
    bench.up("a")
    assert len(bench.turn()) == 0
    bench.scheduler.instances.unreachable(A, "again", 12.0)
    bench.now = 12.0
    bench.submit(a_ticket())  # a new absence begins
    bench.up("a")
    assert len(bench.turn()) == 1


def test_a_model_that_left_the_fleet_refuses_its_waiting_tickets() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    running = bench.dispatch(a_ticket())
    bench.submit(a_ticket())
    bench.scheduler.instances.remove(A, 0.0)
    bench.scheduler.attempts.ended(running.ticket.id, 1, 0.0)
    (refuse,) = bench.refused()
    assert refuse.outcome is Outcome.NO_INSTANCE
    assert bench.is_empty()


def test_a_draining_scheduler_refuses_new_tickets_and_finishes_the_old_ones() -> None:
    bench = Bench("a")
    ticket = a_ticket()
    bench.submit(ticket)
    bench.scheduler.drain()
    refused = bench.scheduler.submit(a_ticket(), 0.0)
    assert refusal_of(refused) == (Outcome.DRAINING, Code.UNAVAILABLE, "DRAINING")
    assert [e.ticket for e in bench.turn()] == [ticket]


# --- rejections --------------------------------------------------------------------------------


def test_no_room_sends_a_ticket_back_to_the_head_uncharged_and_pauses_the_instance() -> None:
    """Goal: no hot loop. Oracle: no dispatch to the instance before a credit, a report, an end or
    the pause's end. Mutant seen to fail: ``rejected`` without the pause."""
    bench = Bench("a", no_room_pause_s=0.1)
    other = bench.dispatch(a_ticket())
    ticket = a_ticket()
    bench.dispatch(ticket)
    for attempt, event in enumerate(("time", "credit", "report", "end"), start=1):
        bench.submit(a_ticket(first_token_limit_s=5.0))
        bench.scheduler.attempts.rejected(ticket.id, attempt, RejectKind.NO_ROOM, bench.now)
        assert bench.turn() == []
        assert bench.scheduler.next_wakeup(bench.now) == bench.now + 0.1
        if event == "time":
            bench.now += 0.1
        elif event == "credit":
            bench.scheduler.instances.credit(A, 4, 100_000, bench.now)
        elif event == "report":
            bench.scheduler.instances.report(a_report(), bench.now)
        else:
            bench.scheduler.attempts.ended(other.ticket.id, other.attempt, bench.now)
        effect, *rest = bench.turn()
        assert (effect.ticket, effect.attempt) == (ticket, attempt + 1)
        for extra in rest:
            bench.scheduler.attempts.ended(extra.ticket.id, extra.attempt, bench.now)
    assert ticket.attempts == 0
    assert not ticket.excluded


def test_a_draining_instance_takes_nothing_until_its_next_report() -> None:
    bench = Bench("a")
    ticket = a_ticket()
    bench.dispatch(ticket)
    bench.scheduler.attempts.rejected(ticket.id, 1, RejectKind.DRAINING, 0.0)
    bench.scheduler.instances.credit(A, 4, 100_000, 0.0)
    assert bench.turn() == []
    bench.scheduler.instances.report(a_report(), 0.1)
    assert [e.ticket for e in bench.turn()] == [ticket]


def test_what_the_instance_calls_expired_is_refused_and_not_tried_again() -> None:
    bench = Bench("a")
    ticket = a_ticket()
    bench.dispatch(ticket)
    bench.scheduler.attempts.rejected(ticket.id, 1, RejectKind.EXPIRED, 1.0)
    bench.now = 1.0
    (refuse,) = bench.refused()
    assert refuse.outcome is Outcome.DEADLINE_EXCEEDED
    assert bench.is_empty()


# --- failures ----------------------------------------------------------------------------------


def test_a_failure_before_the_first_token_goes_to_another_instance() -> None:
    bench = Bench("a", "b")
    ticket = a_ticket()
    first = bench.dispatch(ticket)
    assert bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, delivered=False) == "requeued"
    (second,) = bench.turn()
    assert {first.instance, second.instance} == {A, B}
    assert (second.attempt, ticket.attempts, ticket.excluded) == (2, 1, {first.instance})


def test_it_waits_for_the_other_instance_rather_than_go_back_while_that_one_is_up() -> None:
    bench = Bench("a", "b", report={"sequences_max": 1})
    ticket = a_ticket()
    first = bench.dispatch(ticket)
    other = bench.dispatch(a_ticket())
    bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, delivered=False)
    assert bench.turn() == []
    bench.scheduler.attempts.ended(other.ticket.id, 1, 0.0)
    (second,) = bench.turn()
    assert second.instance == other.instance != first.instance


def test_when_every_instance_that_is_up_failed_it_they_may_try_again_within_the_attempts() -> None:
    """Waiting for an instance that may never come would be worse, and attempts are bounded.
    Mutants seen to fail: ``_allowed`` without the second chance; attempts without the bound."""
    bench = Bench("a", attempts_max=3)
    ticket = a_ticket()
    bench.dispatch(ticket)
    for attempt in (1, 2):
        assert (
            bench.scheduler.attempts.failed(ticket.id, attempt, LOST, 0.0, delivered=False)
            == "requeued"
        )
        assert [e.attempt for e in bench.turn()] == [attempt + 1]
    final = bench.scheduler.attempts.failed(ticket.id, 3, LOST, 0.0, delivered=False)
    assert isinstance(final, Refusal)
    assert refusal_of(final) == (Outcome.INSTANCE_FAILED, Code.UNAVAILABLE, "INSTANCE_LOST")
    assert final.metadata["attempts"] == "3"
    assert bench.is_empty()


def test_a_failure_after_the_first_token_is_a_typed_error_at_once() -> None:
    bench = Bench("a", "b")
    ticket = a_ticket()
    bench.dispatch(ticket)
    bench.scheduler.attempts.first_token(ticket.id, 1, 0.1)
    final = bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.2, delivered=True)
    assert refusal_of(final if isinstance(final, Refusal) else None)[2] == "INSTANCE_LOST"
    assert bench.turn() == []
    assert bench.is_empty()


def test_a_lost_stream_frees_all_its_room_and_hands_back_those_who_still_wait() -> None:
    bench = Bench("a", "b", report={"sequences_max": 3})
    tickets = [a_ticket() for _ in range(6)]
    bench.submit(*tickets)
    on_a = [e.ticket for e in bench.turn() if e.instance == A]
    assert isinstance(bench.scheduler.cancel(on_a[0].id, 0.0), Abort)
    assert bench.scheduler.instances.lost(A, 0.0) == [t.id for t in on_a[1:]]
    assert bench.scheduler.snapshot().instances[A].running == 0
    kind = FaultKind.GOING_DOWN  # nobody is suspected of it
    for ticket in on_a[1:]:
        assert (
            bench.scheduler.attempts.failed(ticket.id, 1, kind, 0.0, delivered=False) == "requeued"
        )
    assert bench.turn() == []  # b is full, and a has no credit before its new stream has
    bench.scheduler.attempts.ended(on_a[1].id, 1, 0.0)  # of the lost attempt
    bench.up("a")
    assert bench.turn() == []  # they wait for b, which is up
    bench.scheduler.instances.unreachable(B, "gone too", 0.0)
    assert sorted(e.ticket.id for e in bench.turn()) == [t.id for t in on_a[1:]]


def test_an_embedding_outlives_the_loss_of_the_frame_stream() -> None:
    bench = Bench("a", report={"embeds": True})
    embedding = a_ticket(kind=WorkKind.EMBED, output_tokens=0)
    bench.dispatch(embedding)
    assert bench.scheduler.instances.lost(A, 0.0) == []
    bench.scheduler.attempts.ended(embedding.id, 1, 0.1)
    assert bench.is_empty()


def test_stale_attempts_change_nothing() -> None:
    bench = Bench("a", "b")
    ticket = a_ticket()
    bench.dispatch(ticket)
    bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, delivered=False)
    bench.turn()
    before = bench.scheduler.snapshot()
    scheduler = bench.scheduler
    scheduler.attempts.accepted(ticket.id, 1, 7, 7, 0.0)
    scheduler.attempts.first_token(ticket.id, 1, 0.0)
    scheduler.attempts.progressed(ticket.id, 1, 7)
    scheduler.attempts.rejected(ticket.id, 1, RejectKind.NO_ROOM, 0.0)
    scheduler.attempts.ended(ticket.id, 1, 0.0)
    assert scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, delivered=False) == "ended"
    assert scheduler.snapshot() == before
    assert ticket.state is TicketState.RUNNING


# --- the client's side -------------------------------------------------------------------------


def test_a_cancel_in_the_queue_is_the_end_and_in_flight_holds_the_room_until_confirmed() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    running, waiting = a_ticket(), a_ticket()
    bench.dispatch(running)
    bench.submit(waiting)
    assert bench.scheduler.cancel(waiting.id, 0.0) is None
    abort = bench.scheduler.cancel(running.id, 0.0)
    assert abort == Abort(running, A, 1, Outcome.CANCELLED)
    assert bench.scheduler.cancel(running.id, 0.0) is None
    bench.submit(a_ticket())
    assert bench.turn() == []
    bench.scheduler.attempts.ended(running.id, 1, 0.0)
    assert len(bench.turn()) == 1
    assert bench.scheduler.snapshot().outcomes == {Outcome.CANCELLED: 2}


@pytest.mark.parametrize("end", ["ended", "rejected", "failed", "lost"])
def test_an_aborted_ticket_ends_with_the_outcome_of_its_abort_however_it_ends(end: str) -> None:
    bench = Bench("a")
    ticket = a_ticket()
    bench.dispatch(ticket)
    bench.scheduler.cancel(ticket.id, 0.0, Outcome.SLOW_CONSUMER)
    if end == "ended":
        bench.scheduler.attempts.ended(ticket.id, 1, 0.0)
    elif end == "rejected":
        bench.scheduler.attempts.rejected(ticket.id, 1, RejectKind.NO_ROOM, 0.0)
    elif end == "failed":
        assert bench.scheduler.attempts.failed(ticket.id, 1, LOST, 0.0, delivered=False) == "ended"
    else:
        assert bench.scheduler.instances.lost(A, 0.0) == []
    assert bench.turn() == []
    assert bench.is_empty()
    assert bench.scheduler.snapshot().outcomes == {Outcome.SLOW_CONSUMER: 1}


def test_a_running_ticket_without_a_first_token_in_time_is_aborted_with_a_typed_error() -> None:
    bench = Bench("a")
    silent, slow = a_ticket(), a_ticket()
    bench.dispatch(silent)
    bench.dispatch(slow)
    bench.scheduler.attempts.first_token(slow.id, 1, 29.0)
    assert bench.scheduler.next_wakeup(29.0) == 30.0
    (abort,) = bench.scheduler.turn(30.0)
    assert isinstance(abort, Abort)
    assert (abort.ticket, abort.reason) == (silent, Outcome.FIRST_TOKEN_TIMEOUT)
    assert abort.error is not None
    assert abort.error.code is Code.DEADLINE_EXCEEDED
    (abort,) = bench.scheduler.turn(60.0 + bench.scheduler._limits.deadline_grace_s)
    assert isinstance(abort, Abort)
    assert (abort.ticket, abort.reason) == (slow, Outcome.DEADLINE_EXCEEDED)
    for ticket in (silent, slow):
        bench.scheduler.attempts.ended(ticket.id, 1, 60.1)
    assert bench.is_empty()


def test_a_lost_ticket_that_nobody_decided_on_is_refused_at_its_time() -> None:
    bench = Bench("a")
    ticket = a_ticket()
    bench.dispatch(ticket)
    assert bench.scheduler.instances.lost(A, 0.0) == [ticket.id]
    (effect,) = bench.scheduler.turn(30.0)
    assert isinstance(effect, Refuse)
    assert bench.is_empty()


def test_demand_is_what_runs_and_all_that_waits_for_the_instance() -> None:
    bench = Bench("a", report={"sequences_max": 1})
    bench.dispatch(a_ticket())
    bench.submit(a_ticket(), a_ticket())
    assert bench.scheduler.demand(A) == Demand(3, 160 + 300)
    assert bench.scheduler.demand(B) == Demand(0, 0)


def test_effects_come_in_the_order_of_class_and_due_time() -> None:
    bench = Bench("a", report={"sequences_max": 8})
    tickets = [a_ticket(priority_class=cls) for cls in reversed(PriorityClass) for _ in range(2)]
    bench.submit(*tickets)
    effects = bench.scheduler.turn(0.0)
    order = [e.ticket for e in effects if isinstance(e, Dispatch)]
    assert order == sorted(tickets, key=lambda t: (t.priority_class, t.id))


def test_no_map_grows_with_the_number_of_requests() -> None:
    """Goal: flat memory. Method: 3,000 tickets, each of its own tenant, on every way out. Oracle:
    the sizes of all maps. Mutant seen to fail: ``leave`` that keeps the tenant's counters."""
    bench = Bench("a", tenant_models_max=64)
    for number in range(3_000):
        ticket = a_ticket(tenant=f"t{number}", request_id=str(number))
        bench.submit(ticket)
        if number % 3 == 0:
            bench.scheduler.cancel(ticket.id, 0.0)
            continue
        bench.scheduler.turn(0.0)
        if number % 3 == 1:
            bench.scheduler.attempts.ended(ticket.id, 1, 0.0, output_tokens=5)
        else:
            bench.scheduler.attempts.failed(ticket.id, 1, FaultKind.GOING_DOWN, 0.0, delivered=True)
    assert bench.is_empty()
    scheduler = bench.scheduler
    assert not scheduler._tickets
    assert not any(scheduler._queue._tenants)
    assert not scheduler._queue._lines
    assert not scheduler._queue._lines
    assert len(scheduler._timers._heap) <= 64
    assert len(scheduler._estimates._tenant_output) <= 64


def test_what_would_be_refused_is_over_when_asked_and_what_would_not_is_as_new() -> None:
    bench = Bench("a")
    ticket = a_ticket()
    assert bench.scheduler.refuse(ticket, 0.0) is None
    assert bench.scheduler.snapshot().submitted == 0
    bench.submit(ticket)
    bench.scheduler.cancel(ticket.id, 0.0)
    unknown = a_ticket(model="other")
    refusal = bench.scheduler.refuse(unknown, 0.0)
    assert refusal is not None
    assert refusal.outcome is Outcome.NO_INSTANCE
    assert unknown.state is TicketState.ENDED
    assert bench.is_empty()
