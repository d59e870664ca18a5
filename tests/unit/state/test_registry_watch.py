"""Watches of the registry, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from state_svc.adapters.memory_stores import MemoryRegistry
from state_svc.adapters.registry_watch import POLL_S, Change, RegistryWatch
from state_svc.ports import Kind, StoreUnavailableError

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Flaky(MemoryRegistry):
    """A registry whose store can be gone."""

    gone = False

    async def revisions(self, kinds: Sequence[Kind]) -> list[int]:
        if self.gone:
            raise StoreUnavailableError("gone")
        return await super().revisions(kinds)


async def _follow(watch: RegistryWatch, seen: list[Change]) -> None:
    async for change in watch.follow((Kind.TENANTS,)):
        seen += [change]  # as it comes: not when all have come


def test_changes_of_another_process_arrive_within_a_poll_also_after_an_outage(
    run_virtual: Run,
) -> None:
    """Mutant: a failed poll ends the watch."""

    async def scenario() -> None:
        store = Flaky()
        await store.put(Kind.TENANTS, "a", b"1")
        watch = RegistryWatch(store)
        running = asyncio.create_task(watch.run())
        seen: list[Change] = []
        following = asyncio.create_task(_follow(watch, seen))
        await asyncio.sleep(0.01)
        assert seen[0].snapshot and set(seen[0].put[Kind.TENANTS]) == {"a"}
        await store.put(Kind.TENANTS, "b", b"1")
        await asyncio.sleep(POLL_S)
        assert not seen[1].snapshot and set(seen[1].put[Kind.TENANTS]) == {"b"}
        store.gone = True
        await store.delete(Kind.TENANTS, "a")
        await asyncio.sleep(10.0)
        assert len(seen) == 2
        store.gone = False
        await asyncio.sleep(POLL_S)
        assert list(seen[2].deleted[Kind.TENANTS]) == ["a"]
        watch.close()
        await asyncio.wait_for(following, 1.0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtual(scenario())


def test_a_slow_watcher_is_told_the_difference_once(run_virtual: Run) -> None:
    """Mutant: changes are queued for each watcher."""

    async def scenario() -> None:
        store = MemoryRegistry()
        watch = RegistryWatch(store)
        running = asyncio.create_task(watch.run())
        follower = watch.follow((Kind.TENANTS,))
        await anext(follower)
        for number in range(1000):
            await store.put(Kind.TENANTS, "a", str(number).encode())
            watch.poke()
            await asyncio.sleep(0.001)
        await store.put(Kind.TENANTS, "b", b"")
        await store.delete(Kind.TENANTS, "b")
        await asyncio.sleep(1.0)
        change = await anext(follower)
        assert change.put[Kind.TENANTS]["a"].value == b"999"
        assert not change.deleted[Kind.TENANTS]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtual(scenario())
