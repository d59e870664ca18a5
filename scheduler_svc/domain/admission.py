"""Who may wait, and for how long: refusals at entry, patience without instances, retry delays.

Owns only the times since when lines have had no instance. Everything else is asked of the queue,
the ledger, the fleet and the estimates. Estimates err on the side of letting a ticket in: what was
not measured refuses nobody, and one that was let in wrongly is refused when its time is up.
"""

from __future__ import annotations

from math import inf
from typing import Final

from scheduler_svc.domain import refusals
from scheduler_svc.domain.estimate import Estimates
from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import Line, Refusal, Ticket
from scheduler_svc.domain.queue import TicketQueue

# Of the time that a ticket has until it is due: what the likely time to a first token may take.
FIRST_TOKEN_SHARE: Final = 0.25


class Admission:
    """Questions about tickets; answers are refusals and times. O(1) and a column or two."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queue: TicketQueue,
        ledger: Ledger,
        fleet: Fleet,
        estimates: Estimates,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._ledger = ledger
        self._fleet = fleet
        self._estimates = estimates
        self._absent_since: dict[Line, float] = {}

    def refusal(self, ticket: Ticket, now: float) -> Refusal | None:
        """Why the ticket cannot be queued, cheapest question first."""
        if ticket.deadline_s <= now:
            return refusals.deadline_exceeded()
        if self.patience_until(ticket.line, now) <= now:
            return self.no_instance(ticket, now)
        scope = self._queue.full_for(ticket)
        if scope is not None:
            return refusals.queue_full(scope, self.retry_after_s(ticket))
        if now + self._wait_s(ticket) > self.hopeless_at(ticket, now):
            return refusals.hopeless(self.retry_after_s(ticket))
        return None

    def too_late(self, ticket: Ticket, now: float) -> Refusal:
        """Why a ticket that does not run is over."""
        if ticket.deadline_s <= now:
            return refusals.deadline_exceeded()
        if self.patience_until(ticket.line, now) < inf:
            return self.no_instance(ticket, now)
        return refusals.hopeless(self.retry_after_s(ticket))

    def no_instance(self, ticket: Ticket, now: float) -> Refusal:
        """The delay is the time until an instance with an open breaker is tried again, if there is
        one; else nobody knows."""
        probe_s = self._fleet.next_probe_s(ticket.line)
        if probe_s is None:
            return refusals.no_instance(self._spread(ticket, self._limits.no_instance_wait_s))
        return refusals.no_instance(self._spread(ticket, probe_s - now))

    def hopeless_at(self, ticket: Ticket, now: float) -> float:
        """From then on the first token cannot come in time, or most likely does not: what is begun
        so late is aborted before it has an answer. The likely part is bounded by a share of the
        time that the ticket had, so that a wrong estimate refuses only the last of it."""
        prefill_s = self._estimates.prefill_s(ticket.model, ticket.prompt_tokens, now)
        likely_s = self._estimates.first_token_s(ticket.line)
        likely_s = min(likely_s, FIRST_TOKEN_SHARE * (ticket.due_s - ticket.arrival_s))
        return ticket.due_s - max(prefill_s, likely_s)

    def patience_until(self, line: Line, now: float) -> float:
        """When tickets of a line stop waiting for an instance: never while one may serve it, at
        once when no known instance ever does, else ``no_instance_wait_s`` after it was first seen
        that none can."""
        if self._fleet.is_served(line):
            self._absent_since.pop(line, None)
            return inf
        if not self._fleet.has_line(line):
            self._absent_since.pop(line, None)
            return -inf
        return self._absent_since.setdefault(line, now) + self._limits.no_instance_wait_s

    def look(self, now: float) -> None:
        """Forgets lines that are served again, or gone for good."""
        for line in list(self._absent_since):
            self.patience_until(line, now)

    def next_impatience(self) -> float | None:
        """When the patience of a waiting line ends."""
        ends = (
            since + self._limits.no_instance_wait_s
            for line, since in self._absent_since.items()
            if self._queue.waiting(line)[0]
        )
        return min(ends, default=None)

    def retry_after_s(self, ticket: Ticket) -> float:
        """When all that is ahead is expected to be gone, within bounds, spread by the ticket's id
        so that those who were refused together do not come back together."""
        return self._spread(ticket, self._wait_s(ticket, stays=False))

    def _spread(self, ticket: Ticket, wait_s: float) -> float:
        limits = self._limits
        wait_s = min(max(wait_s, limits.retry_after_min_s), limits.retry_after_max_s)
        return wait_s * refusals.spread(ticket.id, limits.retry_after_jitter)

    def ahead_of(self, ticket: Ticket, *, stays: bool = True) -> float:
        """About how many tickets of mean size are served before this one, were it queued now; not
        ``stays``: before it would go at once, were it to come back then."""
        work = self._queue.ahead_of(ticket, stays=stays)
        return work / (self._estimates.work_tokens(ticket.line) or ticket.work_tokens)

    def _wait_s(self, ticket: Ticket, *, stays: bool = True) -> float:
        """Expected time in the queue, or (not ``stays``) until it could go at once. What is ahead,
        less what finds room at once, goes at the rate at which as many as may run at once come to
        their end (Little's law). 0 when none is ahead or nothing is known, so that an estimate that
        went wrong heals by itself."""
        ahead = self.ahead_of(ticket, stays=stays)
        service_s = self._estimates.service_s(ticket.line)
        if not ahead or service_s is None:
            return 0.0
        free = self._fleet.free_for(ticket.line, ticket.kv_tokens)
        parallel = self._ledger.running(ticket.line) + free
        return (ahead - free) * service_s / parallel if ahead > free and parallel else 0.0
