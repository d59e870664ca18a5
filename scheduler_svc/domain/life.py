"""The steps of a ticket's life: into the queue, off an instance, and to its one end.

Whoever decides that a ticket takes a step (the turn, what an instance said, a cancel) takes it
here, so that queue, ledger, timers, pacing and breakers always agree on where each ticket is; the
one step that has a single caller is there: a dispatch, in ``placing``. Synchronous; time is passed
in.
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.domain.breaker import BreakerState, Verdict, verdict_of_end
from scheduler_svc.domain.decision import Placement, removed_by
from scheduler_svc.domain.fleet import Instance
from scheduler_svc.domain.model import (
    OUTPUT_WEIGHT,
    Abort,
    Outcome,
    Refusal,
    Ticket,
    TicketId,
    TicketState,
    WorkKind,
    Yield,
)
from scheduler_svc.domain.state import State

WAITS = (TicketState.WAITING, TicketState.RETURNING)
RUNS = (TicketState.RUNNING, TicketState.YIELDING)
HOLDS_ROOM = (*RUNS, TicketState.ABORTING)


class Life:
    """See the module's text. ``outcomes``: how many tickets ended how."""

    def __init__(self, state: State) -> None:
        self._limits = state.limits
        self._tickets = state.tickets
        self._queue = state.queue
        self._ledger = state.ledger
        self._fleet = state.fleet
        self._engine_time = state.engine_time
        self._pacing = state.pacing
        self._quarantine = state.quarantine
        self._pace = state.pace
        self._closed = state.closed
        self._timers = state.timers
        self._admission = state.admission
        self._yields = state.yields
        self.outcomes: Counter[Outcome] = Counter()

    def current(self, ticket_id: TicketId, attempt: int) -> Ticket | None:
        """The ticket, if this attempt of it is not over."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.attempt != attempt:
            return None
        return None if ticket.state in WAITS else ticket

    def holding(self, ticket_id: TicketId, attempt: int) -> Ticket | None:
        """The ticket, if it holds room in this attempt."""
        ticket = self.current(ticket_id, attempt)
        return ticket if ticket is not None and ticket.state in HOLDS_ROOM else None

    def enqueue(self, ticket: Ticket, now: float) -> None:
        """Into the queue, until it is dispatched, withdrawn or too late."""
        ticket.state = TicketState.WAITING
        ticket.row = ticket.held_row = -1
        self._queue.push(ticket)
        self._quarantine.returns(ticket)
        self._watch_waiting(ticket, now)

    def _watch_waiting(self, ticket: Ticket, now: float) -> None:
        at = self._admission.hopeless_at(ticket, now)
        if ticket.resumed_tokens:
            ticket.stranded = False
            at = min(ticket.deadline_s, now + self._limits.no_instance_wait_s)
        self._timers.push(ticket.id, (at,), ticket)

    def put_back(self, ticket: Ticket, now: float, paced: bool = False) -> None:
        """Back to the head of its class, as if it had not run, or to go on from where it is.
        ``paced``: when its turn comes."""
        ticket.taken = bool(ticket.resumed_tokens)
        if ticket.resumed_tokens:
            ticket.ran_s += now - ticket.dispatched_s
        ticket.generated_tokens = 0
        ticket.first_token = False
        ticket.held_until_s = None
        if not paced:
            self.enqueue(ticket, now)
            return
        ticket.state = TicketState.RETURNING
        self._pacing.push(ticket, ticket.suspicion.tokens if ticket.suspicion is not None else 0)
        self._watch_waiting(ticket, now)

    def withdraw(self, ticket: Ticket) -> None:
        """Out of the queue, or off the way there."""
        if ticket.state is TicketState.WAITING:
            self._queue.leave(ticket, served=False)
        elif ticket.state is TicketState.RETURNING:
            self._pacing.remove(ticket)

    def watch_running(self, ticket: Ticket) -> None:
        """The instance ends it at its deadline; the timer is the backstop, hence the grace."""
        at = ticket.deadline_s + self._limits.deadline_grace_s
        begun = ticket.first_token or ticket.resumed_tokens
        if not begun and ticket.kind is WorkKind.GENERATE:
            at = min(at, ticket.first_token_limit_s)
        self._timers.push(ticket.id, (at,), ticket)

    def abort(self, ticket: Ticket, outcome: Outcome, error: Refusal | None, now: float) -> Abort:
        """Its room stays taken until the instance confirms; ``error``: what its client is told."""
        assert ticket.instance is not None
        verdict = verdict_of_end(outcome)
        if outcome is Outcome.FIRST_TOKEN_TIMEOUT and self.is_slow(ticket, now):
            verdict = Verdict.FAULT  # the limit is the client's word, which proves nothing
        self.judge(ticket, verdict, now)
        ticket.state = TicketState.ABORTING
        ticket.abort_outcome = outcome
        self._ledger.leave(ticket.id)
        self._timers.remove(ticket.id)
        return Abort(ticket, ticket.instance, ticket.attempt, outcome, error)

    def is_slow(self, ticket: Ticket, now: float) -> bool:
        """Whether its first token takes longer than those of its line do on such an instance."""
        limit_s = self._pace.limit_s(ticket.line, ticket.first_token_expected_s)
        return now - ticket.dispatched_s > limit_s

    def judge(self, ticket: Ticket, verdict: Verdict, now: float) -> None:
        """Tells the instance's breaker what became of the attempt; once per attempt."""
        trial, ticket.trial = ticket.trial, -1
        instance = self._fleet.get(ticket.instance) if ticket.instance is not None else None
        if trial < 0 or instance is None:
            return
        before = instance.breaker.state
        instance.breaker.end(trial, verdict, ticket.first_token, now)
        if not instance.breaker.state is before is BreakerState.CLOSED:
            self._fleet.judged(instance)

    def give_way(self, ticket: Ticket, cause: str, now: float) -> Yield:
        """Its place is wanted; ``yielded`` puts it back into the queue."""
        assert ticket.instance is not None
        assert ticket.state is TicketState.RUNNING
        ticket.state = TicketState.YIELDING
        ticket.yields += 1
        ticket.yielded_s, ticket.yield_cause = now, cause
        self._ledger.leave(ticket.id)
        return Yield(ticket, ticket.instance, ticket.attempt)

    def free(self, ticket: Ticket, now: float) -> Instance:
        """Gives the ticket's room back; returns the instance that had it."""
        self._quarantine.leaves(ticket)
        row = self._ledger.free(ticket.id)
        ticket.engine_s += self._engine_time.end(row, ticket.engine_mark_s, now)
        instance = self._fleet.at(row)
        self._yields.freed(ticket)
        self._fleet.freed(instance)
        return instance

    def note_refusal(self, ticket: Ticket, now: float) -> None:
        """It waits no more: notes what stood in its way."""
        usable = self._fleet.usable(ticket.line)
        sequence = usable & self._fleet.with_sequence(ticket.kind)
        closed = self._closed.counts(ticket.line, now)
        removed = removed_by(closed, (("usable", usable), ("no_room", sequence)))
        assert ticket.trail is not None
        ticket.trail.placed(
            Placement("", now, removed=removed, base_tokens=ticket.resumed_tokens, end="refused")
        )

    def finish(self, ticket: Ticket, outcome: Outcome) -> None:
        """The one place where a ticket ends."""
        assert ticket.state is not TicketState.ENDED, "ended twice"
        ticket.state = TicketState.ENDED
        self._quarantine.leaves(ticket)
        self._timers.remove(ticket.id)
        self._tickets.pop(ticket.id, None)
        self._queue.settle(ticket, _took(ticket, outcome))
        self.outcomes[outcome] += 1


def _took(ticket: Ticket, outcome: Outcome) -> int:
    """Weighted tokens that a ticket took of the engines over all its attempts: a prompt counts once
    an instance has taken it. What an instance that failed took for nothing is nobody's."""
    output = ticket.resumed_tokens + ticket.generated_tokens
    if outcome is Outcome.INSTANCE_FAILED and not output:
        return 0
    # Embeddings are not accepted before their end.
    taken = ticket.taken or outcome is Outcome.FINISHED
    return (ticket.prompt_tokens if taken else 0) + OUTPUT_WEIGHT * output
