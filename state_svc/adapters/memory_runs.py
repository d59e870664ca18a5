"""Runs, sessions and live text in this process's memory: twins of the real stores for tests and
simulation. Their clock is the event loop's, in milliseconds. Nothing survives the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from state_svc.adapters.inbox import Inbox
from state_svc.domain.claim_order import Allowance, ClaimOrder, ClaimRoom, shares
from state_svc.domain.run_book import RunBook
from state_svc.domain.run_values import (
    PRIORITIES,
    Append,
    Claimed,
    EventPage,
    Lease,
    LeaseState,
    NewRun,
    Phase,
    Position,
    RunLimits,
    RunPage,
    RunRecord,
    SessionLimits,
    SessionPage,
    SessionRecord,
)
from state_svc.domain.session_book import PAGE_BYTES, SessionBook
from state_svc.run_ports import POKE, TEXT_BYTES_MAX, ClaimBatch, LiveText, Order, Poke

NOTHING_DUE_MS = 60_000


class MemoryTenants:
    """What tenants have. ``clock_ms`` is a test's own time; 0: the event loop's."""

    def __init__(
        self, limits: RunLimits | None = None, session_limits: SessionLimits | None = None
    ) -> None:
        self._limits = limits or RunLimits()
        self._session_limits = session_limits or SessionLimits()
        self._books: dict[str, tuple[RunBook, SessionBook]] = {}
        self.clock_ms = 0

    def now(self) -> int:
        """Milliseconds."""
        return self.clock_ms or round(asyncio.get_running_loop().time() * 1000)

    def runs(self, tenant: str) -> RunBook:
        """A tenant's runs."""
        return self._of(tenant)[0]

    def sessions(self, tenant: str) -> SessionBook:
        """A tenant's sessions."""
        return self._of(tenant)[1]

    def names(self) -> Sequence[str]:
        """Tenants that have anything."""
        return list(self._books)

    def forget(self, tenant: str) -> None:
        """Takes all of one tenant away."""
        self._books.pop(tenant, None)

    def _of(self, tenant: str) -> tuple[RunBook, SessionBook]:
        if tenant not in self._books:
            sessions = SessionBook(self._session_limits)
            self._books[tenant] = (RunBook(self._limits, sessions), sessions)
        return self._books[tenant]


class MemoryFeed:
    """A :class:`state_svc.run_ports.RunFeed`; the other twins here tell it."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], set[Inbox[Poke | LiveText]]] = {}
        self._orders: set[Inbox[Order]] = set()

    @asynccontextmanager
    async def run(self, tenant: str, run_id: str) -> AsyncIterator[AsyncIterator[Poke | LiveText]]:
        """See :class:`state_svc.run_ports.RunFeed`."""
        inbox: Inbox[Poke | LiveText] = Inbox(POKE)
        self._runs.setdefault((tenant, run_id), set()).add(inbox)
        try:
            yield inbox
        finally:
            self._runs[tenant, run_id].discard(inbox)

    @asynccontextmanager
    async def orders(self) -> AsyncIterator[AsyncIterator[Order]]:
        """See :class:`state_svc.run_ports.RunFeed`."""
        inbox: Inbox[Order] = Inbox(Order("", ""))
        inbox.again()
        self._orders.add(inbox)
        try:
            yield inbox
        finally:
            self._orders.discard(inbox)

    def close(self) -> None:
        """Ends all that follow."""
        inboxes: list[Inbox[Any]] = [one for many in self._runs.values() for one in many]
        for inbox in [*inboxes, *self._orders]:
            inbox.close()

    def changed(self, tenant: str, run_id: str, text: LiveText | None = None) -> None:
        """The run has a new event, or text."""
        for inbox in self._runs.get((tenant, run_id), ()):
            if text is None:
                inbox.again()
            else:
                inbox.put(text, len(text.text))

    def ready(self) -> None:
        """A run became ready."""
        for inbox in self._orders:
            inbox.again()

    def order(self, order: Order) -> None:
        """A holder is to cancel."""
        for inbox in self._orders:
            inbox.put(order)


class MemoryRuns:
    """A :class:`state_svc.run_ports.RunStore`."""

    def __init__(self, tenants: MemoryTenants, feed: MemoryFeed | None = None) -> None:
        self._tenants, self._feed = tenants, feed or MemoryFeed()
        self._order = ClaimOrder()

    async def create(self, run: NewRun) -> tuple[RunRecord, bool]:
        """See :class:`state_svc.run_ports.RunStore`."""
        record, repeated = self._tenants.runs(run.tenant).create(run, self._tenants.now())
        if not repeated:
            self._feed.ready()
        return record, repeated

    async def get(self, tenant: str, run_id: str) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        return self._tenants.runs(tenant).get(run_id)

    async def page(
        self, tenant: str, size: int, *, before: int = 0, phase: Phase | None = None
    ) -> RunPage:
        """See :class:`state_svc.run_ports.RunStore`."""
        return self._tenants.runs(tenant).page(size, before, phase)

    async def read(
        self, tenant: str, run_id: str, first: int, bytes_max: int = PAGE_BYTES
    ) -> EventPage:
        """See :class:`state_svc.run_ports.RunStore`."""
        return self._tenants.runs(tenant).read(run_id, first, bytes_max)

    async def cancel(self, tenant: str, run_id: str) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        record, holder = self._tenants.runs(tenant).cancel(run_id, self._tenants.now())
        if holder:
            self._feed.order(Order(tenant, run_id, holder))
        self._feed.ready()
        return record

    async def resume(
        self, tenant: str, run_id: str, step: int, decision: bytes, request_id: str
    ) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        now = self._tenants.now()
        record = self._tenants.runs(tenant).resume(run_id, step, decision, request_id, now)
        self._feed.ready()
        return record

    async def claim(
        self, holder: str, runs_max: int, lease_ms: int, room: ClaimRoom | None = None
    ) -> ClaimBatch:
        """See :class:`state_svc.run_ports.RunStore`."""
        room = room or ClaimRoom()
        if ending := self._claim_endings(holder, lease_ms, room.endings_max):
            return ClaimBatch(tuple(ending), 0)
        if not runs_max:
            return ClaimBatch((), NOTHING_DUE_MS)
        now, claimed, left = self._tenants.now(), list[Claimed](), PAGE_BYTES
        allowance = Allowance(runs_max, room)
        places = [
            (name, one)
            for name in self._tenants.names()
            for one in PRIORITIES
            if allowance.of_tenant(name, one) > 0
        ]

        def due(tenant: str, priority: int) -> int | None:
            return self._tenants.runs(tenant).due(priority, now)

        def waiting(priority: int) -> list[str]:
            names = [
                name for name in self._tenants.names() if allowance.of_tenant(name, priority) > 0
            ]
            ready = [name for name in names if _not_after(due(name, priority), now)]
            return self._order.arrange(priority, ready)

        for priority in PRIORITIES:
            large: set[str] = set()
            while left > 0 and allowance.of_class(priority) > 0:
                asked = [name for name in waiting(priority) if name not in large]
                if not asked:
                    break
                tenant, share = shares(asked, allowance.of_class(priority))[0]
                share = min(share, allowance.of_tenant(tenant, priority))
                most = left // len(asked) if claimed else 0
                book = self._tenants.runs(tenant)
                found = book.claim(holder, priority, share if most else 1, lease_ms, most, now)
                if not most:
                    self._order.went_alone(priority, tenant)
                elif found.too_large:
                    self._order.too_large(priority, tenant)
                claimed += found.runs
                allowance.take(tenant, priority, len(found.runs))
                left -= sum(len(one.run.spec) + len(one.run.summary) for one in found.runs)
                if found.runs:
                    self._order.served(priority, tenant)
                else:
                    large.add(tenant)
        times = [due(name, one) for name, one in places]
        known = [time for time in times if time is not None]
        return ClaimBatch(tuple(claimed), max(min(known, default=now + NOTHING_DUE_MS) - now, 0))

    def _claim_endings(self, holder: str, lease_ms: int, most: int) -> list[Claimed]:
        now, claimed = self._tenants.now(), list[Claimed]()
        for name in self._tenants.names():
            for priority in PRIORITIES:
                if len(claimed) == most:
                    return claimed
                book = self._tenants.runs(name)
                found = book.claim(holder, priority, 1, lease_ms, 0, now, only_to_end=True)
                claimed += found.runs
        return claimed

    async def renew(self, leases: Sequence[Lease], lease_ms: int) -> Sequence[LeaseState]:
        """See :class:`state_svc.run_ports.RunStore`."""
        now = self._tenants.now()
        return [
            self._tenants.runs(lease.tenant).renew(lease.run_id, lease.token, lease_ms, now)
            for lease in leases
        ]

    async def append(self, append: Append) -> int:
        """See :class:`state_svc.run_ports.RunStore`."""
        lease = append.lease
        last = self._tenants.runs(lease.tenant).append(append, self._tenants.now())
        self._feed.changed(lease.tenant, lease.run_id)
        if append.phase is not Phase.RUNNING:
            self._feed.ready()
        return last

    async def position(self, lease: Lease) -> Position:
        """See :class:`state_svc.run_ports.RunStore`."""
        return self._tenants.runs(lease.tenant).position(lease.run_id, lease.token)


class MemorySessions:
    """A :class:`state_svc.run_ports.SessionStore`."""

    def __init__(self, tenants: MemoryTenants) -> None:
        self._tenants = tenants

    async def create(
        self, tenant: str, session_id: str, request_id: str, ttl_ms: int, messages: Sequence[bytes]
    ) -> SessionRecord:
        """See :class:`state_svc.run_ports.SessionStore`."""
        book, now = self._tenants.sessions(tenant), self._tenants.now()
        return book.create(session_id, request_id, ttl_ms, messages, now)

    async def get(
        self, tenant: str, session_id: str, first: int, size: int
    ) -> tuple[SessionRecord, Sequence[bytes]]:
        """See :class:`state_svc.run_ports.SessionStore`."""
        return self._tenants.sessions(tenant).get(session_id, first, size, self._tenants.now())

    async def page(self, tenant: str, size: int, *, before: int = 0) -> SessionPage:
        """See :class:`state_svc.run_ports.SessionStore`."""
        return self._tenants.sessions(tenant).page(size, before, self._tenants.now())

    async def append(
        self,
        tenant: str,
        session_id: str,
        messages: Sequence[bytes],
        expected_version: int | None,
        request_id: str,
    ) -> SessionRecord:
        """See :class:`state_svc.run_ports.SessionStore`."""
        book, now = self._tenants.sessions(tenant), self._tenants.now()
        return book.append(session_id, messages, expected_version, request_id, now)

    async def delete(self, tenant: str, session_id: str) -> None:
        """See :class:`state_svc.run_ports.SessionStore`."""
        self._tenants.sessions(tenant).delete(session_id, self._tenants.now())


class MemoryTexts:
    """A :class:`state_svc.run_ports.TextStore`. Texts are never dropped."""

    def __init__(
        self, feed: MemoryFeed | None = None, text_bytes_max: int = TEXT_BYTES_MAX
    ) -> None:
        self._feed, self._max = feed or MemoryFeed(), text_bytes_max
        self._texts: dict[tuple[str, str], tuple[int, int, LiveText]] = {}  # token, size, kept
        self._version = 0

    async def publish(
        self, lease: Lease, at: Position, step: int, text: str, *, replaces: bool
    ) -> bool:
        """See :class:`state_svc.run_ports.TextStore`."""
        place = (lease.tenant, lease.run_id)
        token, size, known = self._texts.get(place, (0, 0, LiveText(0, 0, 0, 0, "", 0)))
        if lease.token < token:
            return True
        is_whole = replaces or lease.token == token
        if not known.version or lease.token > token or step != known.step or replaces:
            self._version += 1
            known, size = LiveText(self._version, at.sequence, step, 0, "", at.create_ms), 0
        new = LiveText(known.version, at.sequence, step, size, text, at.create_ms)
        whole = known.text
        after = size + len(text.encode())
        if len(whole.encode()) == size and after <= self._max:
            whole += text
        kept = LiveText(known.version, at.sequence, step, 0, whole, at.create_ms)
        self._texts[place] = (lease.token, after, kept)
        self._feed.changed(*place, new)
        return is_whole

    async def whole(self, tenant: str, run_id: str) -> LiveText | None:
        """See :class:`state_svc.run_ports.TextStore`."""
        known = self._texts.get((tenant, run_id))
        return None if known is None else known[2]


def _not_after(due: int | None, now: int) -> bool:
    return due is not None and due <= now
