"""Deletes what belonged to deleted tenants, and lets their names be used again.

Every replica does so, from the marks in the registry (``state_svc/deletion_ports.py``). Each step
may be repeated, and is, after a crash or an outage of a store, by whoever comes first:

1. The tenant is deleted and its name marked, in one script. *Crash here:* the mark stands.
2. The fences of all stores are closed; everything is deleted. *Crash:* the mark stands.
3. After ``settle_s``, which outlasts every call that began before, everything is deleted once more
   and the name is ``GONE``: another tenant may have it.
4. That tenant's creation marks it ``RETURNING``; the fences are opened and the mark taken away, by
   the call itself or, *after a crash*, here.
5. A name that nobody took for :data:`GONE_KEPT_MS` is deleted once more, opened and forgotten.

Two replicas at once do no harm: keys go only while the fence of that very deletion is closed, and a
fence that was opened is not closed again under the same number.

What can remain: usage, on purpose. Counts of a quota that a scheduler settles after the creation of
a new tenant: numbers, which leave the quota within its window or day; those settled before go when
the fences open. And who was cut off since before the deletion, and is heard after a new tenant
was made and before it hears of that itself (about 0.25 s), may write for its old caller under the
name: names are not versioned. A store that lost its data has lost its fence with it: what comes
late is then deleted in 5, or ends with its time to live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from sluice import logs
from sluice.fault_points import fault_point
from state_svc.deletion_ports import Deletion, DeletionMarks, DeletionState, TenantData
from state_svc.ports import StoreUnavailableError

POLL_S: Final = 5.0
BUSY_POLL_S: Final = 0.5
SETTLE_S: Final = 10.0
GONE_KEPT_MS: Final = 86_400_000

log = logs.get(__name__)


class TenantPurge:
    """See the module's text."""

    def __init__(
        self, marks: DeletionMarks, stores: Sequence[TenantData], settle_s: float = SETTLE_S
    ) -> None:
        self._marks, self._stores = marks, stores
        self._settle_ms = settle_s * 1000
        self._emptied: dict[str, int] = {}  # by name: the deletion of which step 2 is done
        self._poke = asyncio.Event()

    def poke(self) -> None:
        """A tenant was deleted here: looks now."""
        self._poke.set()

    async def run(self) -> None:
        """Goes on until cancelled."""
        while True:
            self._poke.clear()
            busy = True
            try:
                busy = await self.once()
            except StoreUnavailableError:
                log.info("deleted tenants wait for the store")
            try:
                async with asyncio.timeout(BUSY_POLL_S if busy else POLL_S):
                    await self._poke.wait()
            except TimeoutError:
                pass

    async def once(self) -> bool:
        """One step for each marked name; whether there is more to do soon. Raises
        StoreUnavailableError when the marks cannot be read."""
        now_ms, marks = await self._marks.deletions()
        self._emptied = {name: number for name, number in self._emptied.items() if name in marks}
        busy = False
        for name, mark in marks.items():
            try:
                busy = not await self._step(name, mark, now_ms) or busy
            except StoreUnavailableError as error:
                log.warning("a deleted tenant's data waits for the store", problem=str(error))
                busy = True
        return busy

    async def _step(self, name: str, mark: Deletion, now_ms: int) -> bool:
        """Whether nothing is left to do soon."""
        age_ms = now_ms - mark.number
        match mark.state:
            case DeletionState.RETURNING:
                await self.open(name, mark)
            case DeletionState.GONE:
                if age_ms >= GONE_KEPT_MS and await self._empty(name, mark):
                    await self.open(name, mark)
            case DeletionState.PURGING:
                settled = age_ms >= self._settle_ms
                if settled or self._emptied.get(name) != mark.number:
                    await self._empty(name, mark)
                    self._emptied[name] = mark.number
                if not settled:
                    return False
                fault_point("tenants.before_gone")
                if await self._marks.mark(name, mark, DeletionState.GONE):
                    log.info("a deleted tenant's data is gone")
        return True

    async def _empty(self, name: str, mark: Deletion) -> bool:
        """Whether this deletion was still to be done. All fences first: what one store holds makes
        nobody write into the other."""
        for store in self._stores:
            if not await store.close(name, mark.number):
                # Opened under the same number: forgetting it was begun, and only its mark is left.
                return mark.state is DeletionState.GONE
        fault_point("tenants.before_purge")
        for store in self._stores:
            if not await store.purge(name, mark.number):
                return False
        return True

    async def open(self, name: str, mark: Deletion) -> None:
        """The name's fences are open, and it has no mark. Raises StoreUnavailableError."""
        for store in self._stores:
            await store.open(name, mark.number)
        fault_point("tenants.before_unmark")
        await self._marks.mark(name, mark, None)

    async def created(self, name: str) -> None:
        """For who made a tenant: it may use its name when this returns. Raises
        StoreUnavailableError; then it may soon."""
        mark = await self._marks.deletion(name)
        if mark is not None and mark.state is DeletionState.RETURNING:
            await self.open(name, mark)
