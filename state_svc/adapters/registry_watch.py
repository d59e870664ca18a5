"""Follows the registry for watchers.

One task asks the store for the kinds' revisions every ``POLL_S`` and reads a kind again when it
changed; a write through this process asks at once. There is no queue per watcher: each is told the
difference between what it has and what is there when it can be written to, so a slow one costs
nothing. While the store is unreachable the last good snapshot stays. Changes are never missed,
because they are not events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from state_svc.ports import Kind, Record, RegistryStore, Snapshot, StoreUnavailableError

POLL_S: Final = 0.25
WATCHED: Final = (Kind.TENANTS, Kind.KEYS, Kind.ALIASES, Kind.DRAINS)


@dataclass(frozen=True, slots=True)
class Change:
    """What is new or changed, and what is gone, by kind. ``snapshot``: it is everything."""

    snapshot: bool
    put: Mapping[Kind, Mapping[str, Record]]
    deleted: Mapping[Kind, Sequence[str]]


class RegistryWatch:
    """The registry as last read."""

    def __init__(self, store: RegistryStore) -> None:
        self._store = store
        self._snapshots: dict[Kind, Snapshot] = {}
        self._changed = asyncio.Event()
        self._poke = asyncio.Event()
        self._closing = False

    async def run(self) -> None:
        """Keeps it fresh until cancelled."""
        while True:
            self._poke.clear()
            with suppress(StoreUnavailableError):
                revisions = await self._store.revisions(WATCHED)
                for kind, revision in zip(WATCHED, revisions, strict=True):
                    await self._refresh(kind, revision)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._poke.wait()
            except TimeoutError:
                pass

    def poke(self) -> None:
        """Something was written here: looks now."""
        self._poke.set()

    def close(self) -> None:
        """Ends every :meth:`follow`."""
        self._closing = True
        self._announce()

    async def _refresh(self, kind: Kind, revision: int) -> None:
        known = self._snapshots.get(kind)
        # Another number, not a larger one: a store that was emptied starts anew.
        if known is not None and known.revision == revision:
            return
        self._snapshots[kind] = await self._store.read(kind)
        self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, kinds: Sequence[Kind]) -> AsyncIterator[Change]:
        """Everything once it is known, then changes, until :meth:`close`."""
        have: dict[Kind, Mapping[str, Record]] | None = None
        while not self._closing:
            changed = self._changed
            if all(kind in self._snapshots for kind in kinds):
                now = {kind: self._snapshots[kind].records for kind in kinds}
                change = _difference(have, now)
                if change is not None:
                    have = now
                    yield change
                    continue
            await changed.wait()


def _difference(
    have: Mapping[Kind, Mapping[str, Record]] | None, now: Mapping[Kind, Mapping[str, Record]]
) -> Change | None:
    if have is None:
        return Change(True, now, dict.fromkeys(now, ()))
    put = {
        kind: {name: record for name, record in records.items() if have[kind].get(name) != record}
        for kind, records in now.items()
    }
    deleted = {
        kind: [name for name in have[kind] if name not in records] for kind, records in now.items()
    }
    if not any(put.values()) and not any(deleted.values()):
        return None
    return Change(False, put, deleted)
