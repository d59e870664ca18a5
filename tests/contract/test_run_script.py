"""The scripts inside the store do what the books in Python do.

Goal: run_book.py and session_book.py are the specification of runs.lua and sessions.lua. Method:
random histories of creations, claims, renewals, appends, cancels, decisions, turns, ends and
lapses of time, at narrow bounds, given to both; every answer and refusal is compared. Oracle: the
books. Seed: the parameter.

Seen to fail on the mutants run_fence_dropped, session_version_not_checked, cancel_forgotten.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from state_svc.adapters.memory_runs import MemoryRuns
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.domain.run_values import (
    DEDUP_MS,
    Append,
    Claimed,
    Lease,
    NewRun,
    Phase,
    RunLimits,
    SessionLimits,
)
from tests.contract.state_rig import LEASE_MS, Stores, stores_of
from tests.valkey import ValkeyProcess, valkey

STEPS = 600
TENANT = "t"
LIMITS = RunLimits(
    open_max=12, tenant_bytes_max=40_000, events_max=12, run_bytes_max=6_000, kept_ms=DEDUP_MS + 1
)
SESSION_LIMITS = SessionLimits(
    sessions_max=4, tenant_bytes_max=9_000, messages_max=9, session_bytes_max=4_000
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


class Histories:
    """Draws operations and gives each to both."""

    def __init__(self, rng: random.Random, memory: Stores, real: Stores) -> None:
        self._rng, self._memory, self._real = rng, memory, real
        self._names = 0
        self.runs: list[NewRun] = []
        self.claims: list[Claimed] = []
        self.appends: list[Append] = []
        self.sessions: list[str] = []
        self.requests: list[str] = []
        self.refusals: set[str] = set()

    def wait(self, ms: int) -> None:
        self._real.now_ms = self._memory.now_ms
        for stores in (self._memory, self._real):
            stores.wait(ms)

    async def both(self, call: Callable[[Stores], Awaitable[Any]]) -> Any:
        """The answer of both, which is the same; ``None`` for a refusal."""
        answers = []
        for stores in (self._memory, self._real):
            try:
                answers.append(await call(stores))
            except Exception as error:
                answers.append((type(error).__name__, str(error)))
        assert answers[0] == answers[1]
        if isinstance(answers[0], tuple) and str(answers[0][0]).endswith("Error"):
            self.refusals.add(answers[0][0])
            return None
        return answers[0]

    async def step(self) -> None:
        self.wait(self._rng.choice((0, 1, 7, 400, 1_500)))
        if self._rng.random() < 0.01:
            self.wait(self._rng.choice((LEASE_MS, 60_000, DEDUP_MS)))
        names = ("create", "create", "claim", "claim", "append", "append", "append", "append")
        more = ("renew", "cancel", "resume", "look", "session", "talk", "forget", "repeat")
        await getattr(self, "do_" + self._rng.choice(names + more))()

    def name(self) -> str:
        self._names += 1
        return f"n{self._names}"

    def known(self) -> str:
        """A run's id, most often one that exists."""
        return self._rng.choice(self.runs[-12:]).run_id if self.runs else "none"

    async def do_create(self) -> None:
        rng = self._rng
        new = NewRun(
            tenant=TENANT,
            run_id=self.name(),
            request_id=self.name(),
            spec=b"s" * rng.choice((0, 10, 300, 3_000, 6_000)),
            summary=b"m" * rng.choice((0, 100)),
            events=tuple(b"e" * rng.choice((1, 50)) for _ in range(rng.choice((1, 1, 2, 13)))),
            priority=rng.choice((1, 2, 2, 4)),
            active_max=rng.choice((0, 2, 2, 3)),
            wall_ms=rng.choice((0, 0, 3_000, 70_000)),
            open_max=rng.choice((0, 3, 5)),
            session_id=rng.choice((*self.sessions[-4:], "", "", "")),
        )
        if await self.both(lambda stores: stores.runs.create(new)):
            self.runs.append(new)

    async def do_repeat(self) -> None:
        if self.runs and self._rng.random() < 0.5:
            new = self._rng.choice(self.runs)
            await self.both(lambda stores: stores.runs.create(new))
        elif self.appends:
            append = self._rng.choice(self.appends[-3:])
            await self.both(lambda stores: stores.runs.append(append))

    async def do_claim(self) -> None:
        priority, most = self._rng.choice((1, 2, 2, 4)), self._rng.choice((1, 3))
        size = self._rng.choice((0, 4_000, 10**6))
        only = self._rng.random() < 0.2

        async def claim(stores: Stores) -> Any:
            if isinstance(stores.runs, MemoryRuns):
                book = stores.runs._tenants.runs(TENANT)
                now = stores.now_ms
                found = book.claim("h", priority, most, LEASE_MS, size, now, only_to_end=only)
                due = -1 if found.due_ms is None else found.due_ms
                return due, found.too_large, list(found.runs)
            assert isinstance(stores.runs, ValkeyRuns)
            asked = [(TENANT, most)]
            answers = await stores.runs._ask(asked, priority, "h", LEASE_MS, size, endings=only)
            return answers[0]

        self.claims += (await self.both(claim))[2]

    async def do_renew(self) -> None:
        leases = [Lease(TENANT, one.run.run_id, one.token) for one in self.claims[-5:]]
        await self.both(lambda stores: stores.runs.renew(leases, LEASE_MS))

    async def do_append(self) -> None:
        if not self.claims:
            return
        rng, claimed = self._rng, self._rng.choice(self.claims[-6:])
        lease = Lease(TENANT, claimed.run.run_id, claimed.token)
        at = await self.both(lambda stores: stores.runs.position(lease))
        last = 1 if at is None else at.sequence
        phase = rng.choice((*Phase, Phase.RUNNING, Phase.RUNNING, Phase.SUCCEEDED))
        append = Append(
            lease=lease,
            expected_sequence=last - (rng.random() < 0.05),
            append_id=self.name(),
            events=tuple(b"e" * rng.choice((1, 900)) for _ in range(rng.choice((0, 1, 1, 3)))),
            summary=b"n" * rng.choice((0, 0, 300)),
            phase=phase,
            ready_ms=self._memory.now_ms + rng.choice((-5, 0, 2_000)),
            waiting_step=rng.choice((1, 2)),
            session_messages=(b"u", b"a" * rng.choice((1, 2_000)))
            if phase is Phase.SUCCEEDED and rng.random() < 0.7
            else (),
        )
        self.appends.append(append)
        await self.both(lambda stores: stores.runs.append(append))

    async def do_cancel(self) -> None:
        if self._rng.random() < 0.4:
            run_id = self.known()
            await self.both(lambda stores: stores.runs.cancel(TENANT, run_id))

    async def do_resume(self) -> None:
        run_id, step = self.known(), self._rng.choice((1, 2))
        decision = b"d" * self._rng.choice((0, 500, 5_000))
        self.requests.append(self.name() if self._rng.random() < 0.8 else "again")
        request = self.requests[-1]
        await self.both(lambda stores: stores.runs.resume(TENANT, run_id, step, decision, request))

    async def do_look(self) -> None:
        run_id, size = self.known(), self._rng.choice((1, 3, 50))
        phase = self._rng.choice((None, None, *Phase))
        await self.both(lambda stores: stores.runs.get(TENANT, run_id))
        await self.both(lambda stores: stores.runs.read(TENANT, run_id, 2))
        await self.both(lambda stores: stores.runs.page(TENANT, size, phase=phase))
        await self.both(lambda stores: stores.sessions.page(TENANT, size))

    async def do_session(self) -> None:
        name, request, ttl = self.name(), self.name(), self._rng.choice((60_000, 900_000, 10**9))
        messages = [b"m" * self._rng.choice((1, 1_500))] * self._rng.choice((0, 1, 10))
        if await self.both(
            lambda stores: stores.sessions.create(TENANT, name, request, ttl, messages)
        ):
            self.sessions.append(name)

    async def do_talk(self) -> None:
        if not self.sessions:
            return
        session_id = self._rng.choice(self.sessions[-4:])
        found = await self.both(lambda stores: stores.sessions.get(TENANT, session_id, 0, 99))
        expected = self._rng.choice((None, found[0].version if found else 1, 1))
        request = self.name() if self._rng.random() < 0.9 else "again"
        messages = [b"w" * self._rng.choice((1, 700))]
        await self.both(
            lambda stores: stores.sessions.append(TENANT, session_id, messages, expected, request)
        )

    async def do_forget(self) -> None:
        if self.sessions and self._rng.random() < 0.3:
            session_id = self._rng.choice(self.sessions[-4:])
            await self.both(lambda stores: stores.sessions.delete(TENANT, session_id))


@pytest.mark.parametrize("seed", range(6))
async def test_the_scripts_agree_with_the_books(server: ValkeyProcess, seed: int) -> None:
    async with (
        stores_of("memory", "", LIMITS, SESSION_LIMITS) as memory,
        stores_of("valkey", server.url, LIMITS, SESSION_LIMITS) as real,
    ):
        histories = Histories(random.Random(seed), memory, real)
        for _ in range(STEPS):
            await histories.step()
        assert len(histories.claims) > 10 and len(histories.refusals) > 7
