"""Both kinds of stores for runs and sessions, with a clock that a test moves."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from state_svc.adapters.memory_runs import (
    MemoryFeed,
    MemoryRuns,
    MemorySessions,
    MemoryTenants,
    MemoryTexts,
)
from state_svc.adapters.valkey_feed import ValkeyFeed
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.adapters.valkey_sessions import ValkeySessions
from state_svc.adapters.valkey_text import ValkeyTexts
from state_svc.domain.run_values import (
    Append,
    Claimed,
    Lease,
    NewRun,
    Phase,
    RunLimits,
    RunRecord,
    SessionLimits,
)
from state_svc.run_ports import RunFeed, RunStore, SessionStore, TextStore
from tests.valkey import PATIENT_S

KINDS = ("memory", "valkey")
LEASE_MS = 5_000


def new_id() -> str:
    return str(uuid.uuid4())


@dataclass
class Stores:
    """The stores and shorthands for what tests do with them."""

    runs: RunStore
    sessions: SessionStore
    texts: TextStore
    feed: RunFeed
    clocks: list[Any] = field(default_factory=list)
    now_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    def wait(self, ms: int) -> None:
        """Moves the clock of the stores."""
        self.now_ms += ms
        for clock in self.clocks:
            clock.clock_ms = self.now_ms

    async def queue(self, tenant: str = "a", **more: Any) -> RunRecord:
        """A new run; one more millisecond has passed, so that the order is clear."""
        self.wait(1)
        return (await self.runs.create(a_run(tenant, **more)))[0]

    async def claim(self, most: int = 64, holder: str = "h") -> list[Claimed]:
        self.wait(1)
        return list((await self.runs.claim(holder, most, LEASE_MS)).runs)

    async def hold(self, tenant: str = "a", **more: Any) -> Claimed:
        """A new run, claimed."""
        await self.queue(tenant, **more)
        (claimed,) = await self.claim()
        return claimed

    async def append(self, claimed: Claimed, *events: bytes, **more: Any) -> int:
        """Appends to a run at what was its last event when it was claimed."""
        return await self.runs.append(an_append(claimed, *events, **more))

    async def end(self, claimed: Claimed, phase: Phase = Phase.SUCCEEDED, **more: Any) -> int:
        record = await self.runs.get(claimed.run.tenant, claimed.run.run_id)
        more.setdefault("expected_sequence", record.last_sequence)
        return await self.append(claimed, b"end", phase=phase, **more)


def a_run(tenant: str = "a", **more: Any) -> NewRun:
    run = NewRun(
        tenant=tenant,
        run_id=new_id(),
        request_id=new_id(),
        spec=b"spec",
        summary=b"new",
        events=(b"queued",),
        priority=2,
        active_max=100,
    )
    return replace(run, **more)


def lease_of(claimed: Claimed) -> Lease:
    return Lease(claimed.run.tenant, claimed.run.run_id, claimed.token)


def an_append(claimed: Claimed, *events: bytes, **more: Any) -> Append:
    append = Append(
        lease=lease_of(claimed),
        expected_sequence=claimed.run.last_sequence,
        append_id=new_id(),
        events=events,
    )
    return replace(append, **more)


@asynccontextmanager
async def stores_of(
    kind: str,
    url: str,
    limits: RunLimits | None = None,
    session_limits: SessionLimits | None = None,
) -> AsyncIterator[Stores]:
    """Empty stores."""
    if kind == "memory":
        tenants, feed = MemoryTenants(limits, session_limits), MemoryFeed()
        found = Stores(
            MemoryRuns(tenants, feed), MemorySessions(tenants), MemoryTexts(feed), feed, [tenants]
        )
        found.wait(0)
        yield found
        return
    link = ValkeyLink(url, PATIENT_S)
    await link.run(lambda client: client.flushdb())
    runs = ValkeyRuns(link, limits, session_limits)
    sessions = ValkeySessions(link, session_limits)
    found = Stores(runs, sessions, ValkeyTexts(link), ValkeyFeed(link, link), [runs, sessions])
    found.wait(0)
    try:
        yield found
    finally:
        await link.close()
