"""Works off runs: claims as many as it may hold, keeps their leases, follows orders, hands over.

One event loop and one task per run. Three loops beside them: claims (when nudged, when a run
became ready, or at the store's poll delay), renewals (all leases in one call), orders. What one
loop misses another finds: a lost nudge costs one poll, a lost order one renewal. Bounds:
``runs_max`` runs, of which each tenant and the later classes have their shares
(``domain/slots.py``), and ``history_bytes_max`` of history in all, beyond which nothing more is
claimed; a few beyond that which have only to be ended.

The end of a process: :meth:`Worker.drain` claims nothing more, lets each run finish its step, and
hands it over. What is not done in time is cut: the step is lost, as by a crash, and the run is
given back at once instead of after its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from agent_svc.adapters.held_run import HeldRun
from agent_svc.domain.model import Ended, RunId
from agent_svc.domain.slots import SHARES, Room, Shares, room
from agent_svc.run_ports import Claimed, LeaseKey, Runs
from sluice import logs
from sluice.errors import Code, SluiceError
from sluice.fault_points import fault_point
from sluice.telemetry import Labels

CLAIM_MAX: Final = 16  # of one call; several agents then share a crowd of ready runs
RENEW_MAX: Final = 1024
ENDINGS_EVERY_S: Final = 0.25  # between two looks for nothing but runs that are to be ended
BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 1.0
CUT_S: Final = 2.0  # before the end of the grace: steps that are still under way are cut

log = logs.get(__name__)


class RunOfKind(Protocol):
    """Works on a held run until it is given back."""

    async def __call__(self, held: HeldRun) -> Ended | None:
        """The run's end, if it came. Raises SluiceError."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``lease_s``: how long a claim holds; ``renew_s``: between renewals, less than a third."""

    runs_max: int = 200
    history_bytes_max: int = 256 << 20
    lease_s: float = 5.0
    renew_s: float = 1.5
    shares: Shares = SHARES


class Worker:
    """See the module's docstring. ``clock``: seconds that also count while the process is stopped.
    ``on_state``: called with the reason why the store cannot be used, empty when it can."""

    def __init__(
        self,
        holder: str,
        runs: Runs,
        work: RunOfKind,
        limits: Limits,
        *,
        clock: Callable[[], float],
        on_state: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ends: Counter[tuple[str, str]] = Counter()  # (how, reason)
        self.leases_lost = 0
        self.claims = 0
        self._holder = holder
        self._runs = runs
        self._work = work
        self._limits = limits
        self._clock = clock
        self._on_state = on_state
        self._held: dict[tuple[str, RunId], HeldRun] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._claims_over = asyncio.Event()
        self._claiming = False
        # Runs that were cancelled while a claim was under way, which may be bringing them.
        self._cancelled: set[tuple[str, RunId]] = set()
        self._endings_s = float("-inf")  # when runs that are to be ended were last asked for

    # --- what others see -------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Runs that are held."""
        return len(self._held)

    @property
    def history_bytes(self) -> int:
        """Of the histories that are kept in memory."""
        return sum(held.history_bytes for held in self._held.values())

    def nudge(self) -> None:
        """A run is ready, somewhere."""
        self._wake.set()

    def end_readings(self) -> Iterator[tuple[int, Labels]]:
        """Runs that ended here, for a counter."""
        for (how, reason), count in list(self.ends.items()):
            yield count, {"end": how, "reason": reason}

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until cancelled. Runs that are held then are left to their leases."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_claiming(group))
                group.create_task(self._keep_renewing())
                group.create_task(self._keep_following())
        finally:
            self._held.clear()

    async def drain(self, grace_s: float) -> None:
        """Hands every run over, at the latest after ``grace_s``."""
        self._draining = True
        self._wake.set()
        for held in list(self._held.values()):
            held.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, grace_s - CUT_S)):
                await self._claims_over.wait()  # one under way may bring runs to hand over
                await self._idle.wait()
        for held in list(self._held.values()):
            held.drain(now=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                await self._idle.wait()

    # --- claims ----------------------------------------------------------------------------------

    async def _keep_claiming(self, group: asyncio.TaskGroup) -> None:
        try:
            await self._claim_until_drained(group)
        finally:
            self._claims_over.set()

    async def _claim_until_drained(self, group: asyncio.TaskGroup) -> None:
        backoff_s = BACKOFF_MIN_S
        while not self._draining:
            self._wake.clear()
            wait_s = BACKOFF_MAX_S
            free, next_s = self._room()
            if free.runs or free.endings:
                try:
                    wait_s = await self._claim(group, free)
                    backoff_s = BACKOFF_MIN_S
                    self._on_state("")
                except SluiceError as error:
                    self._on_state("the state service gives no runs")
                    log.warning("no claims", reason=error.reason)
                    wait_s, backoff_s = backoff_s, min(backoff_s * 2, BACKOFF_MAX_S)
            wait_s = min(wait_s, next_s)
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s * (0.75 + random.random() / 2)):
                        await self._wake.wait()

    def _room(self) -> tuple[Room, float]:
        """The room there is now, and the longest wait until the next claim."""
        held: Counter[str] = Counter()
        endings = 0
        for one in self._held.values():
            if one.claimed.to_end:
                endings += 1
            else:
                held[one.lease.tenant] += 1
        limits = self._limits
        most = CLAIM_MAX if self.history_bytes < limits.history_bytes_max else 0
        found = room(limits.shares, limits.runs_max, held, endings, most)
        if not found.is_limited:
            return replace(found, endings=0), BACKOFF_MAX_S
        wait_s = self._endings_s + ENDINGS_EVERY_S - self._clock()
        if wait_s > 0:
            return replace(found, endings=0), wait_s
        return found, BACKOFF_MAX_S

    async def _claim(self, group: asyncio.TaskGroup, free: Room) -> float:
        """Claims and begins; seconds until the next claim makes sense."""
        sent = self._clock()
        if free.endings:
            self._endings_s = sent
        self._cancelled.clear()
        self._claiming = True
        try:
            claims = await self._runs.claim(self._holder, free, self._limits.lease_s)
        finally:
            self._claiming = False
        self.claims += 1
        if claims.runs:
            fault_point("agent.claimed")
        for claimed in claims.runs:
            if claimed.losses > 1:
                log.warning(
                    "a run lost those that held it, one after another",
                    run_id=claimed.lease.run_id,
                    losses=claimed.losses,
                )
            self._begin(group, claimed, sent + self._limits.lease_s)
        return 0.0 if free.runs and len(claims.runs) >= free.runs else claims.poll_s

    def _begin(self, group: asyncio.TaskGroup, claimed: Claimed, valid_until: float) -> None:
        key = (claimed.lease.tenant, claimed.lease.run_id)
        if (old := self._held.get(key)) is not None:
            # This process claimed its own run anew, so its lease had lapsed: the old task's token
            # is void.
            old.lose()
        held = HeldRun(claimed, valid_until, self._clock)
        self._held[key] = held
        self._idle.clear()
        held.task = group.create_task(self._one(key, held))
        if self._draining:
            held.drain()
        if key in self._cancelled:
            held.cancel()

    async def _one(self, key: tuple[str, RunId], held: HeldRun) -> None:
        try:
            ended = await self._work(held)
            if ended is not None:
                reason = ended.failure.reason if ended.failure else ""
                self.ends[ended.end.value, reason] += 1
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if not held.lost or task.cancelling() > 1:
                raise
            self.leases_lost += 1
        except SluiceError as error:
            if error.reason == "LEASE_LOST":
                self.leases_lost += 1
            log.warning("a run is left to its lease", run_id=key[1], reason=error.reason)
        except Exception as error:
            log.failure("a run is left to its lease", error, run_id=key[1])
        finally:
            if self._held.get(key) is held:
                del self._held[key]
                if not self._held:
                    self._idle.set()
            self._wake.set()  # there is room

    # --- leases ----------------------------------------------------------------------------------

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._limits.renew_s)
            held = list(self._held.values())
            for begin in range(0, len(held), RENEW_MAX):
                await self._renew(held[begin : begin + RENEW_MAX])

    async def _renew(self, held: list[HeldRun]) -> None:
        leases: list[LeaseKey] = [one.lease for one in held]
        sent = self._clock()
        try:
            async with asyncio.timeout(self._limits.lease_s / 2):
                states = await self._runs.renew(leases, self._limits.lease_s)
        except (SluiceError, TimeoutError) as error:
            log.warning("leases are not renewed", reason=getattr(error, "reason", "TIMEOUT"))
            return
        for one, state in zip(held, states, strict=True):
            if not state.held:
                one.lose()
                continue
            one.renewed(sent + self._limits.lease_s)
            if state.cancelled:
                one.cancel()

    # --- orders ----------------------------------------------------------------------------------

    async def _keep_following(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                async for order in self._runs.orders(self._holder):
                    backoff_s = BACKOFF_MIN_S
                    if order is None or not order.cancelled:
                        self._wake.set()
                        continue
                    key = (order.tenant, order.run_id)
                    if self._claiming:
                        self._cancelled.add(key)
                    if (held := self._held.get(key)) is not None:
                        held.cancel()
            except SluiceError as error:
                if error.code is not Code.UNAVAILABLE:
                    log.warning("orders are not followed", reason=error.reason)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
