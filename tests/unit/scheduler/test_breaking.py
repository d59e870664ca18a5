"""Breakers in the scheduler: what opens one, what runs past it, and how it closes again."""

from __future__ import annotations

from scheduler_svc.domain.limits import BreakerLimits
from scheduler_svc.domain.model import (
    Dispatch,
    FaultKind,
    InstanceName,
    Outcome,
    Refuse,
    RejectKind,
    Ticket,
    WorkKind,
)
from sluice.errors import Code
from tests.unit.scheduler.scheduling import Bench, a_ticket

A, B = InstanceName("a"), InstanceName("b")
ERROR = FaultKind.ENGINE_ERROR
LIMITS = BreakerLimits(faults_max=3, volume_min=50, cooldown_s=2.0, probes_max=2)


def a_bench(*names: str, **report: object) -> Bench:
    return Bench(*names, report={"embeds": True, **report}, breaker=LIMITS, attempts_max=100)


def state(bench: Bench, name: str = "a") -> str:
    return bench.scheduler.snapshot().instances[InstanceName(name)].breaker


def run_one(bench: Bench, kind: WorkKind = WorkKind.GENERATE) -> Ticket:
    """A ticket that was dispatched."""
    ticket = a_ticket(kind=kind, deadline_s=bench.now + 100, first_token_limit_s=bench.now + 50)
    bench.submit(ticket)
    assert any(effect.ticket is ticket for effect in bench.turn())
    return ticket


def finish(bench: Bench, ticket: Ticket) -> None:
    bench.scheduler.attempts.first_token(ticket.id, ticket.attempt, bench.now)
    bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now, output_tokens=5)


def break_it(bench: Bench) -> None:
    """Faults in a row, each at its own time, by tickets that then leave."""
    for _ in range(LIMITS.faults_max):
        bench.now += 0.01
        ticket = run_one(bench)
        bench.scheduler.attempts.failed(ticket.id, ticket.attempt, ERROR, bench.now, False)
        bench.scheduler.cancel(ticket.id, bench.now)
    assert state(bench) == "open"


def test_nothing_is_dispatched_while_it_is_open_on_any_path() -> None:
    for kind in WorkKind:
        bench = a_bench("a")
        break_it(bench)
        bench.submit(a_ticket(kind=kind, deadline_s=100.0, first_token_limit_s=90.0))
        assert bench.turn() == []
        until = bench.scheduler.next_wakeup(bench.now)
        assert until is not None
        assert until <= bench.now + LIMITS.cooldown_s
        bench.now += LIMITS.cooldown_s
        assert len(bench.turn()) == 1
        assert state(bench) == "half_open"
        bench.scheduler.check_invariants()


def test_embeddings_open_and_close_it_too() -> None:
    bench = a_bench("a", generates=False)
    for _ in range(3):
        bench.now += 0.01
        ticket = run_one(bench, WorkKind.EMBED)
        bench.scheduler.attempts.failed(ticket.id, ticket.attempt, ERROR, bench.now, False)
        bench.scheduler.cancel(ticket.id, bench.now)
    assert state(bench) == "open"
    bench.now += LIMITS.cooldown_s
    for _ in range(2):
        ticket = run_one(bench, WorkKind.EMBED)
        bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now)
    assert state(bench) == "closed"


def test_it_is_half_open_for_a_bounded_number_and_closes_after_the_set_successes() -> None:
    bench = a_bench("a", sequences_max=8)
    break_it(bench)
    bench.now += LIMITS.cooldown_s
    tickets = [
        a_ticket(deadline_s=100.0, first_token_limit_s=90.0, request_id=str(n)) for n in range(5)
    ]
    bench.submit(*tickets)
    probes = [effect.ticket for effect in bench.turn()]
    assert len(probes) == LIMITS.probes_max
    assert bench.turn() == []
    for probe in probes:
        finish(bench, probe)
    assert state(bench) == "closed"
    assert len(bench.turn()) == 3
    bench.scheduler.check_invariants()


def test_a_refusal_a_cancel_and_a_client_error_give_their_probes_back() -> None:
    bench = a_bench("a")
    break_it(bench)
    bench.now += LIMITS.cooldown_s
    scheduler = bench.scheduler
    for way in range(6):
        ticket = run_one(bench)
        bench.now += 0.2
        if way == 0:
            scheduler.attempts.rejected(ticket.id, ticket.attempt, RejectKind.NO_ROOM, bench.now)
            scheduler.cancel(ticket.id, bench.now)
        elif way == 1:
            scheduler.cancel(ticket.id, bench.now)
            scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now)
        elif way == 2:
            scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now, Outcome.INVALID)
        elif way == 3:
            scheduler.attempts.rejected(ticket.id, ticket.attempt, RejectKind.EXPIRED, bench.now)
        elif way == 4:
            scheduler.attempts.failed(
                ticket.id, ticket.attempt, FaultKind.LOST_RELAY, bench.now, False
            )
            scheduler.cancel(ticket.id, bench.now)
        else:
            scheduler.attempts.ended(
                ticket.id, ticket.attempt, bench.now, Outcome.DEADLINE_EXCEEDED
            )
        bench.now += 0.2
        scheduler.turn(bench.now)
        assert state(bench) == "half_open"
    bench.scheduler.check_invariants()


def test_client_errors_do_not_open_it_and_do_not_hide_faults() -> None:
    bench = a_bench("a")
    for _ in range(20):
        ticket = run_one(bench)
        bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now, Outcome.INVALID)
    assert state(bench) == "closed"
    for _ in range(3):
        bench.now += 0.01
        ticket = run_one(bench)
        bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now, Outcome.INVALID)
        ticket = run_one(bench)
        bench.scheduler.attempts.failed(ticket.id, ticket.attempt, ERROR, bench.now, True)
    assert state(bench) == "open"


def test_a_short_limit_of_the_client_is_no_fault_of_the_instance_and_a_long_silence_is() -> None:
    for limit_s, opened in ((0.1, False), (LIMITS.slow_floor_s + 1.0, True)):
        bench = a_bench("a", sequences_max=8)
        for _ in range(3):
            ticket = a_ticket(deadline_s=bench.now + 100, first_token_limit_s=bench.now + limit_s)
            bench.submit(ticket)
            bench.turn()
            bench.now += limit_s + 0.1
            bench.up("a", sequences_max=8, embeds=True)
            bench.scheduler.turn(bench.now)
            bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now)
        assert (state(bench) == "open") == opened


def test_a_stream_that_stalls_or_breaks_the_protocol_is_a_fault() -> None:
    for outcome in (Outcome.INTER_TOKEN_TIMEOUT, Outcome.INSTANCE_FAILED):
        bench = a_bench("a")
        for _ in range(3):
            bench.now += 0.01
            ticket = run_one(bench)
            bench.scheduler.attempts.first_token(ticket.id, ticket.attempt, bench.now)
            bench.scheduler.cancel(ticket.id, bench.now, outcome)
            bench.scheduler.attempts.ended(ticket.id, ticket.attempt, bench.now)
        assert state(bench) == "open"


def test_an_instance_that_is_back_on_its_address_is_tried_at_once() -> None:
    bench = a_bench("a")
    break_it(bench)
    bench.up("a", epoch="2", embeds=True)
    assert state(bench) == "half_open"
    finish(bench, run_one(bench))
    finish(bench, run_one(bench))
    assert state(bench) == "closed"
    break_it(bench)
    bench.scheduler.instances.unreachable(A, "SILENT", bench.now)
    bench.up("a", epoch="2", embeds=True)
    assert state(bench) == "half_open"


def test_an_instance_whose_engine_is_down_takes_nothing_until_its_next_report() -> None:
    bench = a_bench("a")
    tickets = [a_ticket(deadline_s=100.0, first_token_limit_s=90.0) for _ in range(2)]
    bench.submit(*tickets)
    assert len(bench.turn()) == 2
    bench.scheduler.attempts.failed(tickets[0].id, 1, FaultKind.NOT_SERVING, bench.now, False)
    assert bench.turn() == []
    bench.up("a", embeds=True)
    assert [effect.ticket for effect in bench.turn()] == [tickets[0]]


def test_one_that_refuses_everything_but_says_it_serves_opens_all_the_same() -> None:
    bench = a_bench("a")
    for _ in range(3):
        bench.now += 0.25
        bench.up("a", embeds=True)
        ticket = run_one(bench)
        bench.scheduler.attempts.failed(ticket.id, 1, FaultKind.NOT_SERVING, bench.now, False)
        bench.scheduler.cancel(ticket.id, bench.now)
    bench.up("a", embeds=True)
    assert state(bench) == "open"


def test_a_recovering_instance_is_met_by_the_next_ticket_although_another_is_idle() -> None:
    bench = a_bench("b", "a")
    for _ in range(3):
        bench.now += 0.01
        tickets = [run_one(bench) for _ in range(2)]
        for ticket in tickets:
            if ticket.instance == A:
                bench.scheduler.attempts.failed(ticket.id, ticket.attempt, ERROR, bench.now, True)
            else:
                finish(bench, ticket)
    assert state(bench) == "open"
    bench.now += LIMITS.cooldown_s
    bench.up("a", embeds=True)
    bench.up("b", embeds=True)
    assert [run_one(bench).instance for _ in range(3)] == [A, A, B]


def test_with_all_barred_the_refusal_says_when_one_is_tried_again() -> None:
    bench = Bench("a", breaker=LIMITS, attempts_max=100, no_instance_wait_s=0.5)
    break_it(bench)
    waits = a_ticket(deadline_s=100.0, first_token_limit_s=90.0)
    bench.submit(waits)
    bench.turn()
    bench.now += 0.6
    (effect,) = bench.scheduler.turn(bench.now)
    assert isinstance(effect, Refuse)
    assert effect.error.code is Code.UNAVAILABLE
    assert effect.error.retry_after_s is not None
    assert 0.8 * 1.4 <= effect.error.retry_after_s <= 1.2 * 1.4
    refused = bench.scheduler.submit(a_ticket(deadline_s=100.0), bench.now)
    assert refused is not None
    assert refused.outcome is Outcome.NO_INSTANCE
    bench.now += 1.4
    finish(bench, run_one(bench))
    assert state(bench) == "half_open"


def test_slow_ones_are_barred_only_while_half_of_the_fleet_is_left() -> None:
    limits = BreakerLimits(volume_min=3, slow_floor_s=1.0)
    bench = Bench("a", "b", "c", report={"sequences_max": 100}, breaker=limits)
    finish(bench, run_one(bench))  # what is normal here
    tickets = []
    for _ in range(30):
        ticket = a_ticket(deadline_s=100.0, first_token_limit_s=90.0)
        bench.submit(ticket)
        (effect,) = bench.turn()
        assert isinstance(effect, Dispatch)
        tickets.append(ticket)
    bench.now = 2.5  # all are slow, for nobody could know better
    for name in "abc":
        bench.up(name, sequences_max=100)
    for ticket in tickets:
        bench.scheduler.attempts.first_token(ticket.id, ticket.attempt, bench.now)
    states = sorted(state(bench, name) for name in "abc")
    assert states == ["closed", "closed", "open"]
