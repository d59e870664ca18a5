"""What becomes of attempts: an instance took one, made progress, stopped, ended or failed.

Each event names the attempt that it is about; one for another attempt than the ticket's current
one is stale and changes nothing. Decides who is placed again after a failure, by attempts,
migrations, the retry budget and poison; what was learnt on the way goes to estimates, ledger and
breakers. After any call something may be placeable. Synchronous; time is passed in.
"""

from __future__ import annotations

from typing import Literal

from scheduler_svc.domain import refusals
from scheduler_svc.domain.breaker import BreakerState, Verdict, verdict_of_end, verdict_of_failure
from scheduler_svc.domain.life import HOLDS_ROOM, RUNS, Life
from scheduler_svc.domain.model import (
    FaultKind,
    Outcome,
    Refusal,
    RejectKind,
    Ticket,
    TicketId,
    TicketState,
)
from scheduler_svc.domain.retry_budget import LOSSES
from scheduler_svc.domain.state import State

_NOT_AS_REPORTED = (FaultKind.NOT_SERVING, FaultKind.FINGERPRINT)


class Attempts:
    """See the module's text."""

    def __init__(self, state: State, life: Life) -> None:
        self._life = life
        self._limits = state.limits
        self._ledger = state.ledger
        self._fleet = state.fleet
        self._estimates = state.estimates
        self._budget = state.budget
        self._quarantine = state.quarantine
        self._pace = state.pace
        self._yields = state.yields
        self.cached_seen = 0
        """Tokens of prompts with a prefix that engines had in their cache, so far."""

    def accepted(
        self, ticket_id: TicketId, attempt: int, prompt_tokens: int, cached_tokens: int, now: float
    ) -> None:
        """The engine took it; the exact prompt corrects the ledger and the learnt ratio."""
        ticket = self._life.holding(ticket_id, attempt)
        if ticket is None:
            return
        self._estimates.saw_prompt(ticket.model, ticket.size_bytes, prompt_tokens)
        ticket.prompt_tokens = prompt_tokens
        ticket.taken = True
        instance = self._fleet.at(ticket.row)
        block, kv_max = self._fleet.memory(instance)
        self._ledger.correct(ticket, cached_tokens, block, kv_max)
        if ticket.prefix is not None:
            self.cached_seen += cached_tokens
        self._fleet.changed(ticket.row)

    def first_token(self, ticket_id: TicketId, attempt: int, now: float) -> None:
        """The attempt made its first token; from here on only the total deadline counts."""
        ticket = self._life.holding(ticket_id, attempt)
        if ticket is None or ticket.first_token:
            return
        ticket.first_token = True
        self._estimates.saw_first_token(ticket.line, now - ticket.dispatched_s)
        self._judge_first_token(ticket, now)
        self._ledger.first_token(ticket)
        self._fleet.changed(ticket.row)
        if ticket.state in RUNS:
            self._life.watch_running(ticket)

    def progressed(self, ticket_id: TicketId, attempt: int, tokens: int) -> None:
        """``tokens``: output tokens of this attempt so far, over all its outputs."""
        ticket = self._life.holding(ticket_id, attempt)
        if ticket is None or tokens <= ticket.generated_tokens:
            return
        ticket.generated_tokens = tokens
        self._quarantine.progressed(ticket)
        block, kv_max = self._fleet.memory(self._fleet.at(ticket.row))
        self._ledger.progress(ticket, block, kv_max)
        self._fleet.changed(ticket.row)

    def rejected(self, ticket_id: TicketId, attempt: int, kind: RejectKind, now: float) -> None:
        """The instance did not take it: back to the head of its class, uncharged. NO_ROOM pauses
        the instance, DRAINING closes it until its next report, EXPIRED makes the ticket too late,
        LAPSED does nothing more.
        """
        ticket = self._life.holding(ticket_id, attempt)
        if ticket is None:
            return
        self._life.judge(ticket, Verdict.NEUTRAL, now)
        instance = self._life.free(ticket, now)
        _note_end(ticket, "rejected", kind.value)
        if kind is RejectKind.EXPIRED:
            ticket.deadline_s = min(ticket.deadline_s, now)
        elif kind is RejectKind.LAPSED or instance.removed:
            pass  # says nothing about the instance; and a removed one starts nothing any more
        elif kind is RejectKind.NO_ROOM:
            self._fleet.pause(instance, now + self._limits.no_room_pause_s)
        else:
            self._fleet.drain(instance)
        if ticket.state is TicketState.ABORTING:
            self._life.finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
        else:
            self._life.put_back(ticket, now)

    def ended(
        self,
        ticket_id: TicketId,
        attempt: int,
        now: float,
        outcome: Outcome = Outcome.FINISHED,
        output_tokens: int | None = None,
    ) -> None:
        """The generation is over and its room free. ``outcome``: how, unless an abort was under
        way; ``output_tokens``: the exact count, if known."""
        ticket = self._life.current(ticket_id, attempt)
        if ticket is None:
            return
        self._life.judge(ticket, verdict_of_end(outcome), now)
        if ticket.state in HOLDS_ROOM:
            self._life.free(ticket, now)
        if ticket.state is TicketState.ABORTING:
            outcome = ticket.abort_outcome or outcome
        elif outcome is Outcome.FINISHED:
            if output_tokens is not None:
                ticket.generated_tokens = output_tokens
            tokens = ticket.resumed_tokens + ticket.generated_tokens
            self._estimates.saw_end(ticket, tokens, ticket.ran_s + now - ticket.dispatched_s)
            self._quarantine.clear(ticket)
            self._budget.served()
        self._life.finish(ticket, outcome)

    def failed(
        self, ticket_id: TicketId, attempt: int, kind: FaultKind, now: float, delivered: int
    ) -> Literal["requeued", "ended"] | Refusal:
        """The attempt failed through no fault of the request. ``delivered``: output tokens over all
        attempts so far. None: "requeued" for another instance, ``attempts_max`` times in all. Some:
        "requeued" to go on with them elsewhere, if it can be, ``migrations_max`` times. Both as far
        as the retry budget goes. Otherwise, and for poison, the error for the client. "ended":
        stale or aborting, so nobody waits for an answer. What shows that the instance is not what
        its last report says also closes it until its next one: more would use up their attempts
        there."""
        ticket = self._life.current(ticket_id, attempt)
        if ticket is None:
            return "ended"
        self._life.judge(ticket, verdict_of_failure(kind), now)
        known = self._fleet.get(ticket.instance) if ticket.instance is not None else None
        if kind in _NOT_AS_REPORTED and known is not None:
            self._fleet.close(known, kind.value, silent=False)
        poison = self._quarantine.died(ticket, kind, now, int(delivered))
        if ticket.state in HOLDS_ROOM:
            self._life.free(ticket, now)
        if ticket.state is TicketState.ABORTING:
            self._life.finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
            return "ended"
        _note_end(ticket, "lost", kind.value)
        ticket.attempts += 1
        if poison:
            self._life.finish(ticket, Outcome.POISON)
            return refusals.poison(ticket)
        if delivered:
            again = self._goes_on(ticket, kind) and self._may_retry(ticket, kind, now)
            ticket.migrations += again
            self._yields.moves["failure"] += again
            ticket.resumed_tokens, ticket.generated_tokens = delivered, 0
        else:
            again = ticket.attempts < self._limits.attempts_max
            again = again and self._may_retry(ticket, kind, now)
        if not again:
            self._life.finish(ticket, Outcome.INSTANCE_FAILED)
            return refusals.instance_lost(ticket, delivered=bool(delivered))
        assert ticket.instance is not None
        if not (delivered and kind is FaultKind.LOST_RELAY):
            ticket.excluded.add(ticket.instance)
        self._life.put_back(ticket, now, paced=kind in LOSSES)
        return "requeued"

    def yielded(
        self, ticket_id: TicketId, attempt: int, now: float, delivered: int
    ) -> Literal["requeued", "ended", "unasked"]:
        """The instance stopped the attempt without an end of its own. ``delivered``: output tokens
        over all attempts so far. "requeued": it waits again, to go on with them. "ended": stale or
        aborting. "unasked": nothing has changed; an instance that stops of itself has failed."""
        ticket = self._life.current(ticket_id, attempt)
        if ticket is None:
            return "ended"
        if ticket.state is TicketState.ABORTING:
            self._life.free(ticket, now)
            self._life.finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
            return "ended"
        if ticket.state is not TicketState.YIELDING:
            return "unasked"
        self._life.judge(ticket, Verdict.NEUTRAL, now)
        _note_end(ticket, "yielded", ticket.yield_cause)
        self._life.free(ticket, now)
        ticket.resumed_tokens = delivered
        self._life.put_back(ticket, now)
        return "requeued"

    def _judge_first_token(self, ticket: Ticket, now: float) -> None:
        slow = self._life.is_slow(ticket, now)
        took_s = now - ticket.dispatched_s
        self._pace.saw(ticket.line, ticket.first_token_expected_s, took_s)
        if ticket.trial >= 0:
            instance = self._fleet.at(ticket.row)
            before = instance.breaker.state
            spare = slow and self._fleet.can_spare(ticket.row)
            instance.breaker.first_token(ticket.trial, slow, spare, now)
            if not instance.breaker.state is before is BreakerState.CLOSED:
                self._fleet.judged(instance)

    def _may_retry(self, ticket: Ticket, kind: FaultKind, now: float) -> bool:
        """The first failover after a loss is free; everything else is the budget's."""
        if kind in LOSSES and not ticket.failed_over:
            ticket.failed_over = True
            return True
        return self._budget.take(now)

    def _goes_on(self, ticket: Ticket, kind: FaultKind) -> bool:
        """Whether what was begun may go on after a failure: on another instance that has the model
        which began it, be it down for the moment. Losing the relay says nothing of the instance."""
        if not ticket.continuable or ticket.migrations >= self._limits.migrations_max:
            return False
        failed = None if kind is FaultKind.LOST_RELAY else ticket.instance
        return any(
            instance.name != failed
            and not instance.removed
            and instance.report.model == ticket.model
            and instance.report.fingerprint == ticket.fingerprint
            for instance in self._fleet.instances()
        )


def _note_end(ticket: Ticket, end: str, cause: str) -> None:
    if ticket.trail is not None:
        ticket.trail.ended(end, cause)
