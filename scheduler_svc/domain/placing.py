"""Placing: what waits goes to instances that have room, as long as they have it.

The hot path of a turn: per line, takes the next ticket in its order, asks the policy for a row
(``turn.Scan``), and either dispatches the ticket or sets it aside. A policy of placement is a class
in ``placement``; nothing changes here for a new one. Synchronous; time is passed in.
"""

from __future__ import annotations

from math import inf

from scheduler_svc.domain.breaker import BreakerState
from scheduler_svc.domain.life import Life
from scheduler_svc.domain.model import Dispatch, Effect, Ticket, TicketState
from scheduler_svc.domain.state import State
from scheduler_svc.domain.turn import Scan, side_by_side


class Placing:
    """See the module's text."""

    def __init__(self, state: State, life: Life) -> None:
        self._life = life
        self._limits = state.limits
        self._placement = state.placement
        self._prefixes = state.prefixes
        self._queue = state.queue
        self._ledger = state.ledger
        self._fleet = state.fleet
        self._engine_time = state.engine_time
        self._quarantine = state.quarantine
        self._closed = state.closed
        self._yields = state.yields
        self.cached_expected = 0
        """Tokens of prompts that were taken to be in an instance's cache, so far."""
        self.holds_until_s = inf
        """When the first ticket that waits for an instance with its prefix waits no longer."""

    def place(self, now: float, effects: list[Effect]) -> None:
        """Line by line: takes the next ticket, finds it a row, dispatches it or sets it aside."""
        self.holds_until_s = inf
        for line in self._queue.lines():
            dispatches: list[Dispatch] = []
            scan = Scan(
                line,
                self._fleet,
                self._placement,
                self._limits,
                self._prefixes,
                now,
                self._quarantine,
            )
            while scan.is_open:
                ticket = self._queue.take(line, scan.tried, self._limits.bypass_max)
                if ticket is None:
                    break
                row = scan.find(ticket)
                if row is None:
                    scan.set_aside(ticket)
                else:
                    if ticket.trail is not None:
                        ticket.trail.placed(scan.placement(ticket, row, self._closed))
                    dispatches.append(self._dispatch(ticket, row, now, scan.cached_tokens))
                    scan.took(row)
            for ticket in scan.aside:
                self._queue.restore(ticket)
            self.holds_until_s = min(self.holds_until_s, scan.holds_until_s)
            effects += side_by_side(dispatches)

    def _dispatch(self, ticket: Ticket, row: int, now: float, cached_tokens: int) -> Dispatch:
        self._queue.leave(ticket, served=True)
        instance = self._fleet.at(row)
        block, kv_max = self._fleet.memory(instance)
        self._ledger.take(ticket, row, block, kv_max, cached_tokens)
        ticket.engine_mark_s = self._engine_time.begin(row, now)
        self._fleet.refresh_row(row)
        if self._prefixes is not None and ticket.prefix is not None:
            self._prefixes.note(ticket.prefix.hashes, row, now)
            self.cached_expected += cached_tokens
        ticket.state = TicketState.RUNNING
        ticket.attempt += 1
        ticket.row, ticket.instance = row, instance.name
        ticket.dispatched_s = now
        ticket.first_token_expected_s = self._fleet.first_token_s(row)
        self._quarantine.boards(ticket)
        ticket.trial = instance.breaker.begin()
        if instance.breaker.state is BreakerState.HALF_OPEN:
            self._fleet.judged(instance)
        ticket.passed_over = 0
        if not ticket.resumed_tokens:
            ticket.fingerprint = instance.report.fingerprint
        self._yields.dispatched(ticket)
        self._life.watch_running(ticket)
        return Dispatch(ticket, instance.name, ticket.attempt)
