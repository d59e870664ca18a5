"""Expiry: who has waited or run for too long, and who comes back into the queue after a loss.

The part of a turn that time alone brings about, before placing. Synchronous; time is passed in.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.domain import refusals
from scheduler_svc.domain.life import RUNS, WAITS, Life
from scheduler_svc.domain.model import Effect, Line, Refusal, Refuse, Ticket, TicketState
from scheduler_svc.domain.state import State
from scheduler_svc.domain.turn import allowed_rows


class Expiry:
    """See the module's text."""

    def __init__(self, state: State, life: Life) -> None:
        self._life = life
        self._limits = state.limits
        self._queue = state.queue
        self._fleet = state.fleet
        self._pacing = state.pacing
        self._quarantine = state.quarantine
        self._timers = state.timers
        self._admission = state.admission

    def release(self, now: float, effects: list[Effect]) -> None:
        """Lets tickets back into the queue after a loss, at their pace and suspects apart."""
        if not self._pacing:
            return
        for ticket in self._pacing.release(now, lambda ticket: self._may_go(ticket, now)):
            if ticket.suspicion is not None and ticket.suspicion.poison:
                error = refusals.poison(ticket)  # its like was convicted meanwhile
                effects.append(Refuse(ticket, error.outcome, error))
                self._life.finish(ticket, error.outcome)
            else:
                self._life.enqueue(ticket, now)

    def expire(self, now: float, effects: list[Effect]) -> None:
        """Ends tickets whose time has come, and those that waited too long for any instance."""
        while (entry := self._timers.peek()) is not None and entry[0][0] <= now:
            self._timers.pop()
            ticket = entry[2]
            if ticket.state in RUNS:
                error = self._too_late_running(ticket, now)
                effects.append(self._life.abort(ticket, error.outcome, error, now))
                continue
            if self._waits_on(ticket, now):
                continue
            error = self._too_late_waiting(ticket, now)
            if ticket.state is TicketState.WAITING:
                self._life.note_refusal(ticket, now)
            self._life.withdraw(ticket)
            effects.append(Refuse(ticket, error.outcome, error))
            self._life.finish(ticket, error.outcome)
        for line in self._queue.lines():
            if self._admission.patience_until(line, now) <= now:
                self._refuse_line(line, now, effects)

    def _refuse_line(self, line: Line, now: float, effects: list[Effect]) -> None:
        for ticket in sorted(self._queue.tickets(line), key=lambda t: t.id):
            error = self._admission.no_instance(ticket, now)
            if ticket.resumed_tokens:
                error = refusals.instance_lost(ticket, delivered=True)
            self._queue.leave(ticket, served=False)
            self._life.note_refusal(ticket, now)
            effects.append(Refuse(ticket, error.outcome, error))
            self._life.finish(ticket, error.outcome)

    def _may_go(self, ticket: Ticket, now: float) -> bool:
        if ticket.suspicion is None:
            return True
        usable = self._fleet.usable(ticket.line)
        known = filter(None, map(self._fleet.get, ticket.excluded))
        spent = sum(bool(usable[instance.row]) for instance in known)
        return self._quarantine.may_go(ticket, int(np.count_nonzero(usable)) - spent, now)

    def _waits_on(self, ticket: Ticket, now: float) -> bool:
        """Whether a ticket that was begun and waits may wait on: one whose model was to be had
        nowhere at two looks in a row is given up. Others of its line may be served meanwhile."""
        if not ticket.resumed_tokens or ticket.state not in WAITS:
            return False
        usable = allowed_rows(ticket, self._fleet, self._fleet.usable(ticket.line)).any()
        if ticket.deadline_s <= now or (ticket.stranded and not usable):
            return False
        ticket.stranded = not usable
        at = min(ticket.deadline_s, now + self._limits.no_instance_wait_s)
        self._timers.push(ticket.id, (at,), ticket)
        return True

    def _too_late_waiting(self, ticket: Ticket, now: float) -> Refusal:
        if ticket.resumed_tokens and ticket.deadline_s > now:
            return refusals.instance_lost(ticket, delivered=True)
        return self._admission.too_late(ticket, now)

    @staticmethod
    def _too_late_running(ticket: Ticket, now: float) -> Refusal:
        if ticket.deadline_s <= now or ticket.first_token or ticket.resumed_tokens:
            return refusals.deadline_exceeded()
        return refusals.first_token_timeout()
