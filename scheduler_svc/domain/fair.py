"""The order inside one class of one line: fair between tenants, due first inside a tenant.

A virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) says
how much each tenant was served: prompt tokens, plus output tokens times ``OUTPUT_WEIGHT``, divided
by the tenant's weight. The waiting tenant with the least counter goes next; among equal counters
the one that has been where it is for longest, so that a stream of newcomers passes nobody for ever.

- **Charged at dispatch**, once per ticket, with the expected tokens, and **settled** at its end
  with what it took, as if that had been known before. A ticket that comes back has paid: it goes
  before all others of the class, costs nothing more, and moves its tenant nowhere.
- **Lifted**: a tenant that begins to wait starts at the least counter of those who wait, or at
  where the last dispatch was made, whichever is more (the start tags of Goyal et al., "Start-time
  Fair Queueing", 1996). So nobody saves up by being away, and nobody pays for having used what no
  one else wanted, beyond its last dispatch.
- **Bound**: over any time in which two tenants have tickets waiting that fit, the weighted tokens
  that they are served differ by at most 2 * (w + e): w the largest charge of one ticket, e the
  largest sum of what a tenant's running tickets were charged wrongly. A waiting tenant is served
  after each other one was served at most its lead plus one charge.

A ticket in the caller's hand lets the heads of other tenants be tried before the next one of its
own. Counters of tenants that neither wait nor run are kept only where they say more than the lift
would, and at most ``idle_max`` of them: then the least goes, which forgives the least.
Owned by the queue; O(log n) for every change, O(1) for questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from scheduler_svc.domain.heap import Entry, LazyHeap
from scheduler_svc.domain.model import Ticket

BUCKETS: Final = 48  # up to 2^48 tokens waiting of one tenant


@dataclass(slots=True, eq=False)
class Account:
    """One tenant in one class of one line.

    ``counter``, ``lifted`` (where it was when it last began to wait) in weighted tokens divided by
    ``weight``; ``work``: weighted tokens that wait; ``bucket``: where ``Backlogs`` counts it;
    ``since`` orders equal counters; ``aside``: its tickets in the caller's hand; ``unsettled``: its
    tickets that were charged and not settled."""

    tenant: str
    weight: float
    counter: float
    lifted: float
    since: int
    tickets: LazyHeap[Ticket] = field(default_factory=LazyHeap)
    latest_due_s: float = 0.0
    work: int = 0
    bucket: int = 0
    aside: int = 0
    unsettled: int = 0

    @property
    def waits(self) -> bool:
        return self.aside > 0 or len(self.tickets) > 0


class Backlogs:
    """How much waits of how many tenants, by size: bucket ``b`` has those with 2^(b-1) to 2^b - 1
    (tokens divided by weight). O(1) to change; ``served`` is exact but for one bucket."""

    __slots__ = ("_tenants", "_weights", "_works", "work")

    def __init__(self) -> None:
        self._tenants = [0] * BUCKETS
        self._works = [0] * BUCKETS
        self._weights = [0.0] * BUCKETS
        self.work = 0

    def change(self, account: Account, by: int) -> None:
        """So many weighted tokens more of the account wait."""
        before, old = account.work, account.bucket
        account.work = after = before + by
        account.bucket = new = _bucket(after, account.weight)
        self.work += by
        if old == new and before and after:
            self._works[new] += by
            return
        if before:
            self._add(old, -1, -before, account.weight)
        if after:
            self._add(new, 1, after, account.weight)

    def served(self, depth: float) -> float:
        """Weighted tokens that are served of all until each has got ``depth`` (divided by weight)
        or has nothing waiting."""
        if not depth:
            return 0.0
        total = 0.0
        for work, weight in zip(self._works, self._weights, strict=True):
            if work:
                total += min(work, weight * depth)
        return total

    def check(self, accounts: Mapping[str, Account]) -> None:
        assert self.work == sum(account.work for account in accounts.values())
        for bucket in range(BUCKETS):
            here = [a for a in accounts.values() if a.work and a.bucket == bucket]
            assert self._tenants[bucket] == len(here)
            assert self._works[bucket] == sum(a.work for a in here)
            assert abs(self._weights[bucket] - sum(a.weight for a in here)) < 1e-6

    def _add(self, bucket: int, tenants: int, work: int, weight: float) -> None:
        self._tenants[bucket] += tenants
        self._works[bucket] += work
        # No sum of fractions is left over when the bucket is empty.
        left = self._tenants[bucket]
        self._weights[bucket] = self._weights[bucket] + tenants * weight if left else 0.0


class FairQueue:
    """The tickets of one class of one line. A ticket that was taken must be restored or removed;
    pushes and settlements come when none is in hand."""

    __slots__ = (
        *("_accounts", "_backlogs", "_idle", "_idle_max", "_last", "_order", "_out", "_returned"),
        *("_returned_work", "_since", "_start", "_taken", "_weights"),
    )

    def __init__(self, weights: Mapping[str, float], idle_max: int) -> None:
        self._weights = weights
        self._idle_max = idle_max
        self._accounts: dict[str, Account] = {}
        self._order: LazyHeap[Account] = LazyHeap()  # those with a ticket that is not in hand
        self._idle: LazyHeap[Account] = LazyHeap()  # those that neither wait nor run
        self._returned: LazyHeap[Ticket] = LazyHeap()
        self._returned_work = 0
        self._taken: dict[int, tuple[Entry[Ticket], Account | None]] = {}
        self._out: Account | None = None  # taken from last: back into the order before the next
        self._backlogs = Backlogs()
        self._last: Account | None = None  # charged last, ...
        self._start = 0.0  # ... when its counter was here
        self._since = 0

    @property
    def work(self) -> int:
        """Weighted tokens that wait."""
        return self._backlogs.work + self._returned_work

    def tickets(self) -> Iterator[Ticket]:
        """Those that are not in hand, in no order."""
        yield from self._returned.items()
        for account in self._accounts.values():
            yield from account.tickets.items()

    # --- waiting -----------------------------------------------------------------------------

    def push(self, ticket: Ticket) -> None:
        if ticket.charged_tokens:
            self._returned.push(ticket.id, (ticket.due_s, ticket.deadline_s), ticket)
            self._returned_work += ticket.work_tokens
            return
        account = self._accounts.get(ticket.tenant) or self._account(ticket.tenant)
        if not account.tickets:
            self._begin(account)
            account.latest_due_s = ticket.due_s
            account.tickets.push(ticket.id, (ticket.due_s, ticket.deadline_s), ticket)
            self._rank(account)
        else:
            account.latest_due_s = max(account.latest_due_s, ticket.due_s)
            account.tickets.push(ticket.id, (ticket.due_s, ticket.deadline_s), ticket)
        self._backlogs.change(account, ticket.work_tokens)

    @property
    def has_next(self) -> bool:
        """Whether there is a ticket that is not in hand."""
        return bool(self._returned or self._order or (self._out and self._out.tickets))

    def peek(self) -> Ticket | None:
        """The next ticket."""
        self._put_back()
        entry = self._returned.peek()
        if entry is None:
            first = self._order.peek()
            entry = None if first is None else first[2].tickets.peek()
        return None if entry is None else entry[2]

    def take(self) -> Ticket | None:
        """The next ticket, in the caller's hand until it is restored or removed."""
        self._put_back()
        entry = self._returned.pop()
        if entry is not None:
            self._taken[entry[2].id] = (entry, None)
            return entry[2]
        first = self._order.pop()
        if first is None:
            return None
        account = self._out = first[2]
        entry = account.tickets.pop()
        assert entry is not None
        account.aside += 1
        self._taken[entry[2].id] = (entry, account)
        return entry[2]

    def restore(self, ticket: Ticket) -> None:
        """Puts a taken ticket back to where it was."""
        entry, account = self._taken.pop(ticket.id)
        if account is None:
            self._returned.restore(ticket.id, entry)
            return
        account.aside -= 1
        account.tickets.restore(ticket.id, entry)
        self._rank(account)

    def remove(self, ticket: Ticket, *, served: bool) -> int:
        """The ticket waits no more; ``served``: it was dispatched, and is charged. Returns the
        weighted tokens that it was charged now."""
        taken = self._taken.pop(ticket.id, None)
        if ticket.charged_tokens:
            assert taken or self._returned.remove(ticket.id), "ticket is not here"
            self._returned_work -= ticket.work_tokens
            return 0
        account = self._accounts[ticket.tenant]
        if taken is None:
            assert account.tickets.remove(ticket.id), "ticket is not here"
        else:
            account.aside -= 1
        self._backlogs.change(account, -ticket.work_tokens)
        charge = self._charge(account, ticket) if served else 0
        self._rank(account)
        self._rest(account)
        return charge

    # --- counters ----------------------------------------------------------------------------

    def settle(self, ticket: Ticket, tokens: int) -> None:
        """A charged ticket is over and took so many weighted tokens: as if they had been charged
        at its dispatch. A tenant that was lifted since then is not let below where it was."""
        account = self._accounts[ticket.tenant]
        before = account.counter
        changed = before + (tokens - ticket.charged_tokens) / account.weight
        account.counter = max(changed, account.lifted)
        if account is self._last:
            self._start += account.counter - before
        account.unsettled -= 1
        assert account.unsettled >= 0, "settled twice"
        ticket.charged_tokens = 0
        if account.waits:
            self._rank(account)
        self._rest(account)

    def counter(self, tenant: str) -> float:
        """Where the tenant stands, or would if it began to wait now."""
        account = self._accounts.get(tenant)
        if account is None:
            return self._level()
        return account.counter if account.waits else max(account.counter, self._level())

    def ahead_of(self, ticket: Ticket) -> float:
        """About how many weighted tokens of the class are served before this ticket, were it
        pushed now: those of its tenant that are due before, and what the others get until their
        counters have caught up with that. A tenant with nothing waiting goes next."""
        account = self._accounts.get(ticket.tenant)
        own, weight = 0.0, self._weight(ticket.tenant)
        if account is not None:
            own = account.work * _share_before(account, ticket.due_s)
        depth = max(0.0, self.counter(ticket.tenant) - self._level() + own / weight)
        others = self._backlogs.served(depth)
        if account is not None:
            others -= min(account.work, depth * weight)
        return self._returned_work + own + max(0.0, others)

    def check(self) -> int:
        """Everything agrees with a recount; returns the tickets that were charged and not settled.
        O(n), for tests."""
        assert not self._taken, "a ticket was taken and neither restored nor removed"
        self._put_back()
        for heap in (self._order, self._idle, self._returned):
            heap.check()
        assert self._returned_work == sum(t.work_tokens for t in self._returned.items())
        assert len(self._idle) <= self._idle_max
        self._backlogs.check(self._accounts)
        for tenant, account in self._accounts.items():
            account.tickets.check()
            assert account.tenant == tenant
            assert account.aside == 0
            assert account.work == sum(t.work_tokens for t in account.tickets.items())
            assert (tenant in self._order) == account.waits
            assert (tenant in self._idle) == (not account.waits and not account.unsettled)
        return sum(account.unsettled for account in self._accounts.values())

    # --- parts -------------------------------------------------------------------------------

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _account(self, tenant: str) -> Account:
        level = self._level()
        account = Account(tenant, self._weight(tenant), level, level, 0)
        self._accounts[tenant] = account
        return account

    def _level(self) -> float:
        """The counter of a tenant that begins to wait now and is owed nothing."""
        first = self._order.peek()
        return self._start if first is None else max(self._start, first[2].counter)

    def _begin(self, account: Account) -> None:
        """It has something waiting again."""
        self._idle.remove(account.tenant)
        account.lifted = self._level()
        account.counter = max(account.counter, account.lifted)
        account.since = self._next_since()

    def _charge(self, account: Account, ticket: Ticket) -> int:
        tokens = ticket.charged_tokens = ticket.work_tokens
        self._last, self._start = account, account.counter
        account.counter += tokens / account.weight
        account.since = self._next_since()
        account.unsettled += 1
        return tokens

    def _rank(self, account: Account) -> None:
        """Puts the account to its place in the order, if it has a ticket that is not in hand."""
        if account is self._out:
            self._out = None
        if account.tickets:
            key = (account.aside, account.counter, account.since)
            self._order.push(account.tenant, key, account)
        else:
            self._order.remove(account.tenant)

    def _put_back(self) -> None:
        if self._out is not None:
            self._rank(self._out)

    def _rest(self, account: Account) -> None:
        """Where it neither waits nor runs: keeps its counter while that says more than the lift."""
        if account.waits or account.unsettled:
            return
        self._idle.push(account.tenant, (account.counter,), account)
        level = self._level()
        while (least := self._idle.peek()) is not None and (
            least[2].counter <= level or len(self._idle) > self._idle_max
        ):
            self._idle.pop()
            del self._accounts[least[2].tenant]

    def _next_since(self) -> int:
        self._since += 1
        return self._since


def _share_before(account: Account, due_s: float) -> float:
    """The share of a tenant's waiting tickets that go before one due then: exact at both ends, in
    between as if due times were spread evenly."""
    head = account.tickets.peek()
    if head is None:
        return 0.0
    first, last = head[2].due_s, account.latest_due_s
    if due_s >= last:
        return 1.0
    return (due_s - first) / (last - first) if due_s > first else 0.0


def _bucket(work: int, weight: float) -> int:
    return min(BUCKETS - 1, int(work / weight).bit_length())
