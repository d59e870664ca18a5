"""When running work gives its place away: for a higher class, a lowered credit, or a drain.

Owns no ticket: it says who is to yield, the scheduler does it. Keeps the running tickets that may
be preempted, by line, and since when an instance holds more than its credit. Looks are bounded:
nothing is looked at twice within ``yield_look_s``, and of each line at most
``preemption_candidates_max`` tickets, those dispatched last, since they are the cheapest.

A yield is worth its price only if it ends soon and is not repeated: who has run for less than
``yield_run_min_s`` in this attempt, or has yielded ``yields_max`` times, runs on (a drain is not
bounded by either: its instance goes away).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from math import inf

from scheduler_svc.domain.fleet import Fleet, Instance
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    InstanceName,
    Line,
    PriorityClass,
    Ticket,
    TicketId,
    TicketState,
    WorkKind,
)
from scheduler_svc.domain.preemption import PREEMPTIBLE, PREEMPTS, Spare, by_price, victims_for
from scheduler_svc.domain.queue import TicketQueue
from scheduler_svc.domain.turn import allowed_rows

_TAKE_NO_PLACE = tuple(cls for cls in PriorityClass if cls not in PREEMPTS)


class Yields:
    """See the module's text. ``tickets``: all tickets of the scheduler, by id; only read."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queue: TicketQueue,
        ledger: Ledger,
        fleet: Fleet,
        tickets: dict[TicketId, Ticket],
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._ledger = ledger
        self._fleet = fleet
        self._tickets = tickets
        self._preemptible: dict[Line, dict[TicketId, Ticket]] = {}
        self._over_since: dict[InstanceName, float] = {}
        self._looked_s: dict[object, float] = {}
        self.moves: Counter[str] = Counter()
        """Times that a ticket went on later or elsewhere, by cause."""
        self.next_s = inf
        """When to look again, by time alone."""

    def dispatched(self, ticket: Ticket) -> None:
        """It runs."""
        if ticket.continuable and ticket.priority_class in PREEMPTIBLE:
            self._preemptible.setdefault(ticket.line, {})[ticket.id] = ticket

    def freed(self, ticket: Ticket) -> None:
        """It runs no more."""
        line = self._preemptible.get(ticket.line)
        if line is not None and line.pop(ticket.id, None) is not None and not line:
            del self._preemptible[ticket.line]

    def credited(self, instance: Instance, now: float) -> None:
        """Its credit changed."""
        if self._is_over(instance):
            self._over_since.setdefault(instance.name, now)
        else:
            self._over_since.pop(instance.name, None)

    def look(self, now: float, stop: Callable[[Ticket, str, float], None]) -> None:
        """Who is to yield now: after placing, so that what waits found no room. ``stop`` is called
        for each at once, with the cause ("drain", "credit" that was lowered below what runs, or
        "preempted"), so that one who has many reasons is asked once."""
        self.next_s = inf
        for instance in self._fleet.draining():
            if self._ledger.load(instance.row).sequences and self._may_look(instance.name, now):
                self._ask("drain", self._drain(instance, now), now, stop)
        for name, since_s in list(self._over_since.items()):
            known = self._fleet.get(name)
            if known is None or not self._is_over(known):
                del self._over_since[name]
            elif now < since_s + self._limits.credit_grace_s:
                self.next_s = min(self.next_s, since_s + self._limits.credit_grace_s)
            elif self._may_look(name, now):
                self._ask("credit", self._give_back(known, now), now, stop)
        for line in list(self._preemptible):
            self._ask("preempted", self._preempt(line, now), now, stop)

    def check(self) -> None:
        """For tests."""
        for line, tickets in self._preemptible.items():
            assert tickets, "an empty line is kept"
            for ticket in tickets.values():
                assert self._ledger.hold(ticket.id).line == line
                assert ticket.continuable
        assert all(self._fleet.get(name) is not None for name in self._over_since)

    def _ask(
        self,
        cause: str,
        tickets: list[Ticket],
        now: float,
        stop: Callable[[Ticket, str, float], None],
    ) -> None:
        for ticket in tickets:
            self.moves[cause] += 1
            stop(ticket, cause, now)

    def _looked(self, key: object, now: float) -> bool:
        """Whether it was looked at a moment ago."""
        again_s = self._looked_s.get(key, -inf) + self._limits.yield_look_s
        if now >= again_s:
            return False
        self.next_s = min(self.next_s, again_s)
        return True

    def _may_look(self, key: object, now: float) -> bool:
        """At most one look per ``yield_look_s`` at an instance, or at a line."""
        if self._looked(key, now):
            return False
        if len(self._looked_s) > 2 * self._limits.instances_max:
            self._looked_s.clear()
        self._looked_s[key] = now
        self.next_s = min(self.next_s, now + self._limits.yield_look_s)
        return True

    @staticmethod
    def _can_yield(ticket: Ticket) -> bool:
        """Whether there is an output that may go on later."""
        return ticket.continuable and ticket.state is TicketState.RUNNING and ticket.first_token

    def _may_yield(self, ticket: Ticket, now: float) -> bool:
        """Whether it has not been asked too much already."""
        return (
            self._can_yield(ticket)
            and ticket.yields < self._limits.yields_max
            and now >= ticket.dispatched_s + self._limits.yield_run_min_s
        )

    # --- drain -----------------------------------------------------------------------------------

    def _drain(self, instance: Instance, now: float) -> list[Ticket]:
        """Continuable work that would run on for long, the longest first, as far as there is room
        elsewhere; always one, so that a fleet that is full moves on too."""
        moving = []
        for ticket_id in self._ledger.load(instance.row).tickets:
            ticket = self._tickets[ticket_id]
            if not self._can_yield(ticket):
                continue
            left_s = self._left_s(ticket, instance)
            if left_s > self._limits.drain_run_max_s and self._has_elsewhere(ticket):
                moving.append((-left_s, ticket.id, ticket))
        moving.sort()
        free = self._fleet.free_for((instance.report.model, WorkKind.GENERATE))
        waiting, _ = self._queue.waiting((instance.report.model, WorkKind.GENERATE))
        return [ticket for _, _, ticket in moving[: max(1, int(free) - waiting)]]

    def _left_s(self, ticket: Ticket, instance: Instance) -> float:
        """Expected seconds to its end. One that has outrun its estimate is taken to be half way."""
        left = ticket.output_left - ticket.generated_tokens
        if left <= 0:
            left = ticket.generated_tokens
        return left * instance.step_s

    def _has_elsewhere(self, ticket: Ticket) -> bool:
        """Whether another instance could go on with it. Its own is closed, so not among these."""
        usable = self._fleet.usable(ticket.line)
        if ticket.fingerprint is not None:
            usable = usable & self._fleet.with_fingerprint(ticket.fingerprint)
        return bool(usable.any())

    # --- credit ----------------------------------------------------------------------------------

    def _is_over(self, instance: Instance) -> bool:
        return self._excess(instance) != (0, 0)

    def _excess(self, instance: Instance) -> tuple[int, int]:
        """Sequences and KV tokens held beyond the credit, those that are leaving not counted. One
        sequence alone holds what it needs: elsewhere it would be as large."""
        if instance.credit_sequences is None or instance.credit_kv_tokens is None:
            return 0, 0
        load = self._ledger.load(instance.row)
        sequences, kv_tokens = load.sequences, load.kv_held
        if self._ledger.leaving()[instance.row]:
            holds = [self._ledger.hold(ticket_id) for ticket_id in load.tickets]
            sequences -= sum(hold.leaving for hold in holds)
            kv_tokens -= sum(hold.kv_held for hold in holds if hold.leaving)
        return (
            max(0, sequences - instance.credit_sequences),
            max(0, kv_tokens - instance.credit_kv_tokens) if sequences > 1 else 0,
        )

    def _give_back(self, instance: Instance, now: float) -> list[Ticket]:
        """The cheapest continuable work, until what is held is within the credit."""
        sequences, kv_tokens = self._excess(instance)
        tickets = (self._tickets[i] for i in self._ledger.load(instance.row).tickets)
        chosen = []
        for ticket in by_price(t for t in tickets if self._may_yield(t, now)):
            if sequences <= 0 and kv_tokens <= 0:
                break
            chosen.append(ticket)
            sequences -= 1
            kv_tokens -= self._ledger.hold(ticket.id).kv_held
        return chosen

    # --- preemption ------------------------------------------------------------------------------

    def _preempt(self, line: Line, now: float) -> list[Ticket]:
        """Victims for those of the line that may preempt, found no room and have waited a moment:
        room that comes free by itself within it is used first, and so is that of tickets that are
        leaving already."""
        if self._looked(line, now):
            return []
        waiting = self._without_room(line, now)
        if not waiting:
            return []
        usable = self._fleet.usable(line)
        leaving = sum(n for row, n in self._ledger.leaving().items() if usable[row])
        waiting = waiting[leaving:]
        if not waiting or not self._may_look(line, now):
            return []
        running = self._preemptible[line]
        recent = islice(reversed(running.values()), self._limits.preemption_candidates_max)
        candidates = by_price(t for t in recent if usable[t.row] and self._may_yield(t, now))
        spares: dict[int, Spare] = {}

        def spare_on(row: int) -> Spare:
            if row not in spares:
                load = self._ledger.load(row)
                foreign = self._fleet.at(row).foreign_sequences
                spares[row] = Spare(
                    float(self._fleet.free_sequences[row]),
                    float(self._fleet.free_kv_tokens[row]),
                    load.sequences + foreign,
                )
            return spares[row]

        chosen: list[Ticket] = []
        for ticket in waiting:
            classes = PREEMPTS[ticket.priority_class]
            rows = allowed_rows(ticket, self._fleet, usable)
            fitting = [
                t
                for t in candidates
                if t.priority_class in classes
                and rows[t.row]
                and self._fleet.has_prefill(t.row, ticket.read_tokens)
            ]
            found = victims_for(ticket.kv_tokens, fitting, spare_on, self._kv_of)
            if found is None:
                continue
            row, victims = found
            for victim in victims:
                spare_on(row).add(self._kv_of(victim))
                candidates.remove(victim)
            spare_on(row).take(ticket.kv_tokens)
            chosen += victims
        return chosen

    def _kv_of(self, ticket: Ticket) -> int:
        return self._ledger.hold(ticket.id).kv_tokens

    def _without_room(self, line: Line, now: float) -> list[Ticket]:
        """The first of those that may preempt and have waited long enough; in their order."""
        if not self._queue.waiting(line)[0]:
            return []
        most = self._limits.preemptions_per_look
        tried = dict.fromkeys(_TAKE_NO_PLACE, most)
        taken: list[Ticket] = []
        while len(taken) < most and (ticket := self._queue.take(line, tried, most)) is not None:
            taken.append(ticket)
            tried[ticket.priority_class] = tried.get(ticket.priority_class, 0) + 1
        for ticket in taken:
            self._queue.restore(ticket)
        ready = []
        ready_s = inf
        for ticket in taken:
            if ticket.held_row >= 0:
                continue  # it waits for its prefix, by choice
            if ticket.arrival_s + self._limits.preemption_wait_s <= now:
                ready.append(ticket)
            else:
                ready_s = min(ready_s, ticket.arrival_s + self._limits.preemption_wait_s)
        self.next_s = min(self.next_s, ready_s)
        if taken and not ready:  # those who come now are ready later still
            self._looked_s[line] = min(ready_s - self._limits.yield_look_s, now)
        return ready
