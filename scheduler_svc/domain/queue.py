"""Waiting tickets: bounded per class and tenant, ordered per line.

A *line* is (model, kind of work): tickets of one line wait for the same instances, so a full model
never holds up another one. Inside a line there is one heap per priority class, earliest due first
(due: the time by which the first token must be there), then earliest deadline, then first come.
Tickets that were dispatched before and came back go first in their class.

Classes are served strictly in order, except that a class that waits is owed a named ``share`` of
the line's dispatches: each dispatch of a higher class adds the share to its due, and at 1 its head
goes next (a deficit counter in units of requests, capped at 1 so that nothing is saved up; the form
of deficit round robin, Shreedhar and Varghese 1995, with a strict order above it).

Bounds are counted from :meth:`TicketQueue.push` to :meth:`TicketQueue.leave`. A ticket that comes
back is not checked against them: it was admitted once, and there are never more of those than ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler_svc.domain.heap import Entry, LazyHeap
from scheduler_svc.domain.limits import ClassLimits
from scheduler_svc.domain.model import Line, PriorityClass, Ticket

_OWED = 1.0 - 1e-9  # sums of shares like 0.1 do not add up to 1 exactly


@dataclass(slots=True)
class Usage:
    """What a class, or a tenant inside a class, has waiting."""

    requests: int = 0
    size_bytes: int = 0


class ClassQueue:
    """The order inside one class of one line. Fairness between tenants belongs here."""

    __slots__ = ("_heap", "_latest_due_s", "_taken")

    def __init__(self) -> None:
        self._heap: LazyHeap[Ticket] = LazyHeap()
        self._taken: dict[int, Entry[Ticket]] = {}
        self._latest_due_s = 0.0

    def __len__(self) -> int:
        return len(self._heap) + len(self._taken)

    @property
    def has_next(self) -> bool:
        return len(self._heap) > 0

    def tickets(self) -> Iterator[Ticket]:
        yield from self._heap.items()

    def push(self, ticket: Ticket) -> None:
        latest = ticket.due_s if not len(self) else max(self._latest_due_s, ticket.due_s)
        self._latest_due_s = latest
        rank = 0.0 if ticket.returned else 1.0
        self._heap.push(ticket.id, (rank, ticket.due_s, ticket.deadline_s), ticket)

    def take(self) -> Ticket | None:
        """The next ticket, in the caller's hand until it is restored or leaves."""
        entry = self._heap.pop()
        if entry is None:
            return None
        self._taken[entry[2].id] = entry
        return entry[2]

    def restore(self, ticket: Ticket) -> None:
        self._heap.restore(ticket.id, self._taken.pop(ticket.id))

    def remove(self, ticket: Ticket) -> None:
        if self._taken.pop(ticket.id, None) is None:
            assert self._heap.remove(ticket.id), "ticket is not here"

    def ahead_of(self, due_s: float) -> float:
        """About how many tickets go before one that is due then: exact at both ends, in between
        as if due times were spread evenly. O(1)."""
        head = self._heap.peek()
        if head is None:
            return 0.0
        first, last = head[2].due_s, self._latest_due_s
        if due_s >= last:
            return float(len(self._heap))
        if due_s <= first:
            return 0.0
        return len(self._heap) * (due_s - first) / (last - first)

    def check(self) -> None:
        assert not self._taken, "a ticket was taken and neither restored nor removed"
        self._heap.check()


@dataclass(slots=True)
class LineQueue:
    """The classes of one line and what the lower ones are owed."""

    classes: tuple[ClassQueue, ...] = field(
        default_factory=lambda: tuple(ClassQueue() for _ in PriorityClass)
    )
    owed: list[float] = field(default_factory=lambda: [0.0] * len(PriorityClass))
    waiting: int = 0
    kv_tokens: int = 0

    def order(self, tried: Mapping[PriorityClass, int]) -> Iterator[PriorityClass]:
        """Classes in the order in which their heads have a right to go; an owed class offers one
        ticket ahead of its rank."""
        for cls in PriorityClass:
            if self.owed[cls] >= _OWED and not tried.get(cls):
                yield cls
        yield from PriorityClass

    def served(self, cls: PriorityClass, shares: Mapping[PriorityClass, ClassLimits]) -> None:
        """Settles what is owed after a dispatch of ``cls``."""
        self.owed[cls] = 0.0 if self.owed[cls] >= _OWED else self.owed[cls]
        for lower in PriorityClass:
            if lower > cls and len(self.classes[lower]):
                self.owed[lower] = min(1.0, self.owed[lower] + shares[lower].share)


class TicketQueue:
    """All waiting tickets. ``can``-questions change nothing; the caller asks before it acts."""

    def __init__(self, limits: Mapping[PriorityClass, ClassLimits]) -> None:
        self._limits = limits
        self._lines: dict[Line, LineQueue] = {}
        self._classes = {cls: Usage() for cls in PriorityClass}
        self._tenants: dict[tuple[PriorityClass, str], Usage] = {}

    def __len__(self) -> int:
        return sum(usage.requests for usage in self._classes.values())

    def full_for(self, ticket: Ticket) -> str | None:
        """The scope whose bound the ticket would break: "class", "tenant", or None."""
        limits = self._limits[ticket.priority_class]
        waiting = self._classes[ticket.priority_class]
        if (
            waiting.requests + 1 > limits.requests_max
            or waiting.size_bytes + ticket.size_bytes > limits.bytes_max
        ):
            return "class"
        tenant = self._tenants.get((ticket.priority_class, ticket.tenant))
        requests = tenant.requests if tenant else 0
        size_bytes = tenant.size_bytes if tenant else 0
        if (
            requests + 1 > limits.tenant_requests_max
            or size_bytes + ticket.size_bytes > limits.tenant_bytes_max
        ):
            return "tenant"
        return None

    def push(self, ticket: Ticket) -> None:
        line = self._lines.setdefault(ticket.line, LineQueue())
        line.classes[ticket.priority_class].push(ticket)
        line.waiting += 1
        line.kv_tokens += ticket.kv_tokens
        for usage in self._usages(ticket):
            usage.requests += 1
            usage.size_bytes += ticket.size_bytes

    def take(self, line: Line, tried: Mapping[PriorityClass, int], tries_max: int) -> Ticket | None:
        """The next ticket of a line, skipping classes of which ``tries_max`` are in hand. It must
        be restored or leave before the turn is over."""
        queue = self._lines.get(line)
        if queue is None:
            return None
        for cls in queue.order(tried):
            if tried.get(cls, 0) < tries_max and queue.classes[cls].has_next:
                return queue.classes[cls].take()
        return None

    def restore(self, ticket: Ticket) -> None:
        """Puts a taken ticket back to where it was."""
        self._lines[ticket.line].classes[ticket.priority_class].restore(ticket)

    def leave(self, ticket: Ticket, *, served: bool) -> None:
        """The ticket waits no more; ``served``: it was dispatched."""
        line = self._lines[ticket.line]
        queue = line.classes[ticket.priority_class]
        queue.remove(ticket)
        line.waiting -= 1
        line.kv_tokens -= ticket.kv_tokens
        if served:
            line.served(ticket.priority_class, self._limits)
        if not len(queue):
            line.owed[ticket.priority_class] = 0.0
        if not line.waiting:
            del self._lines[ticket.line]
        for usage in self._usages(ticket):
            usage.requests -= 1
            usage.size_bytes -= ticket.size_bytes
            assert usage.requests >= 0, "left twice"
            assert usage.size_bytes >= 0, "left twice"
        tenant = (ticket.priority_class, ticket.tenant)
        if not self._tenants[tenant].requests:
            del self._tenants[tenant]

    def lines(self) -> list[Line]:
        """Lines in which a ticket waits."""
        return list(self._lines)

    def waiting(self, line: Line) -> tuple[int, int]:
        """Tickets of a line, and the KV tokens that they are expected to hold."""
        queue = self._lines.get(line)
        return (queue.waiting, queue.kv_tokens) if queue else (0, 0)

    def tickets(self, line: Line) -> list[Ticket]:
        """All waiting tickets of a line, in no order. O(n)."""
        queue = self._lines.get(line)
        return [t for cls in queue.classes for t in cls.tickets()] if queue else []

    def ahead_of(self, ticket: Ticket) -> float:
        """About how many waiting tickets of its line go before this one, were it pushed now."""
        queue = self._lines.get(ticket.line)
        if queue is None:
            return 0.0
        higher = sum(len(queue.classes[c]) for c in PriorityClass if c < ticket.priority_class)
        return higher + queue.classes[ticket.priority_class].ahead_of(ticket.due_s)

    def usage(self, cls: PriorityClass) -> Usage:
        """What waits of a class, over all lines."""
        return self._classes[cls]

    def check(self) -> None:
        """Counters equal a recount. O(n), for tests."""
        classes = {cls: Usage() for cls in PriorityClass}
        tenants: dict[tuple[PriorityClass, str], Usage] = {}
        for name, line in self._lines.items():
            tickets = self.tickets(name)
            assert line.waiting == len(tickets) > 0
            assert line.kv_tokens == sum(t.kv_tokens for t in tickets)
            assert all(0.0 <= owed <= 1.0 for owed in line.owed)
            for cls in PriorityClass:
                line.classes[cls].check()
            for ticket in tickets:
                tenant = tenants.setdefault((ticket.priority_class, ticket.tenant), Usage())
                for usage in (classes[ticket.priority_class], tenant):
                    usage.requests += 1
                    usage.size_bytes += ticket.size_bytes
        assert classes == self._classes
        assert tenants == self._tenants

    def _usages(self, ticket: Ticket) -> tuple[Usage, Usage]:
        tenant = (ticket.priority_class, ticket.tenant)
        return self._classes[ticket.priority_class], self._tenants.setdefault(tenant, Usage())
