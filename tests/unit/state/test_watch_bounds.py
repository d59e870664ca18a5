"""Watchers that do not read cost bounded memory and few reads, and hold up nobody else's; virtual
time.

Method: runs in memory with events larger than a page, hundreds of watchers that take one event and
no more. Oracle: what is counted, and how often the store is asked. Seen to fail on the mutants
watch_bytes_not_counted, watch_reads_not_shared, watch_reads_of_one_tenant,
watch_read_shared_late, watch_pages_of_an_earlier_run and watch_text_of_an_earlier_run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from sluice.clock import run_virtual
from sluice.errors import Code, SluiceError
from state_svc.adapters.inbox import BYTES_MAX, Inbox
from state_svc.adapters.memory_runs import MemoryFeed, MemoryRuns, MemoryTenants, MemoryTexts
from state_svc.adapters.run_watch import (
    ROOM_WAIT_S,
    SMALL_BYTES,
    Entry,
    RunWatch,
    WatchParts,
    Words,
    watch_room,
)
from state_svc.adapters.watch_reads import (
    KEPT_BYTES,
    PAGE_BYTES,
    READS_MAX,
    TENANT_READS_MAX,
    WatchReads,
)
from state_svc.domain.run_values import SEQUENCE_MAX, Lease, NewRun, RunUnknownError

EVENT_BYTES = 60_000
IN_A_PAGE = PAGE_BYTES // EVENT_BYTES
ROOM_BYTES = 8 * PAGE_BYTES  # two pages for each tenant


class World:
    """A run of large events for each of two tenants, and who watches them."""

    def __init__(self, events: int = 20, size: int = EVENT_BYTES) -> None:
        self.tenants = MemoryTenants()
        self.runs = MemoryRuns(self.tenants, MemoryFeed())
        self.feed = MemoryFeed()
        self.texts = MemoryTexts(self.feed)
        self.room = watch_room(ROOM_BYTES)
        self.parts = WatchParts(WatchReads(self.runs), self.texts, self.room)
        self.asked: list[tuple[str, int]] = []
        self.reading: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.read_s = 0.01
        self._events = tuple(bytes([n]) * size for n in range(events))
        read = self.runs.read

        async def reading(tenant: str, run_id: str, first: int, bytes_max: int) -> Any:
            self.asked.append((tenant, first))
            self.reading[tenant] += 1
            self.most[tenant] = max(self.most[tenant], self.reading[tenant])
            self.most["all"] = max(self.most["all"], self.reading.total())
            await asyncio.sleep(self.read_s)
            self.reading[tenant] -= 1
            return await read(tenant, run_id, first, bytes_max)

        self.runs.read = reading  # type: ignore[method-assign,assignment]

    async def begin(self, *tenants: str) -> None:
        for tenant in tenants:
            await self.runs.create(NewRun(tenant, "r", "q", b"", b"", self._events, 1))

    async def say(self, run_id: str, token: int, text: str, *, replaces: bool = False) -> None:
        lease = Lease("a", run_id, token)
        at = await self.runs.position(lease)
        await self.texts.publish(lease, at, 1, text, replaces=replaces)

    def watch(self, tenant: str = "a", first: int = 1) -> AsyncGenerator[Entry | Words, None]:
        return RunWatch(self.parts, tenant, "r", first).follow(self.feed)


async def first_of(watch: AsyncGenerator[Entry | Words, None]) -> Entry:
    entry = await anext(watch)
    assert isinstance(entry, Entry)
    return entry


async def last_of(old: AsyncGenerator[Entry | Words, None]) -> None:
    async for one in old:
        assert isinstance(one, Entry) and one.event[0] < 100


async def end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_watchers_that_do_not_read_hold_a_bounded_number_of_bytes() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin("a", "b")
        watches = [world.watch() for _ in range(300)]
        tasks = [asyncio.ensure_future(first_of(watch)) for watch in watches]
        await asyncio.sleep(1.0)
        assert sum(task.done() for task in tasks) == 2
        assert PAGE_BYTES < world.room.held("a") <= ROOM_BYTES // 4
        # Another tenant's watcher reads all of its run meanwhile.
        began_s = asyncio.get_running_loop().time()
        other = world.watch("b")
        numbers = [(await first_of(other)).sequence for _ in range(20)]
        assert numbers == list(range(1, 21))
        assert asyncio.get_running_loop().time() - began_s < 1.0
        # One that goes away makes room for the next, which misses nothing.
        await watches[0].aclose()
        await asyncio.sleep(1.0)
        assert sum(task.done() for task in tasks) == 3
        await end(*tasks)

    run_virtual(scenario())


def test_who_finds_no_room_waits_for_it_and_misses_nothing() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin("a")
        slow = [world.watch() for _ in range(2)]
        for watch in slow:
            await first_of(watch)
        waiting = world.watch(first=3)
        first = asyncio.ensure_future(first_of(waiting))
        await asyncio.sleep(ROOM_WAIT_S / 2)
        assert not first.done()
        await slow[0].aclose()
        numbers = [(await first).sequence]
        numbers += [(await first_of(waiting)).sequence for _ in range(17)]
        assert numbers == list(range(3, 21))
        await waiting.aclose()
        await slow[1].aclose()
        assert not world.room.held("a")

    run_virtual(scenario())


def test_who_waits_too_long_for_room_is_told_the_bound() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin("a")
        slow = [world.watch() for _ in range(2)]
        for watch in slow:
            await first_of(watch)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(SluiceError) as raised:
            await first_of(world.watch())
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(ROOM_WAIT_S, abs=0.1)
        error = raised.value
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "WATCH_BYTES")
        assert error.metadata == {"limit": "watch_bytes_max"} and error.retry_after_s
        assert len(slow) == 2

    run_virtual(scenario())


def test_small_events_and_words_never_wait() -> None:
    async def scenario() -> None:
        world = World()
        await world.begin("a")
        slow = [world.watch() for _ in range(2)]
        for watch in slow:
            await first_of(watch)
        small = NewRun("a", "s", "q2", b"", b"", (b"x" * (SMALL_BYTES // 2), b"y"), 1)
        await world.runs.create(small)
        (held,) = [
            one for one in (await world.runs.claim("h", 2, 60_000)).runs if one.run.run_id == "s"
        ]
        watch = RunWatch(world.parts, "a", "s", 1).follow(world.feed)
        assert [(await first_of(watch)).sequence for _ in range(2)] == [1, 2]
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.1)
        await world.say("s", held.token, "word")
        assert await waiting == Words(1, "word", True)
        # What is large is left out while there is no room, and comes whole with the next.
        large = "l" * (PAGE_BYTES // 5)  # less than an inbox holds, more than there is room for
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        await world.say("s", held.token, large)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        for one in slow:
            await one.aclose()
        await world.say("s", held.token, "end")
        assert await waiting == Words(1, "word" + large + "end", True)

    run_virtual(scenario())


def test_watchers_at_one_place_share_a_read() -> None:
    async def scenario() -> None:
        world = World(size=10)
        await world.begin("a")
        watches = [world.watch() for _ in range(300)]
        tasks = [asyncio.ensure_future(first_of(watch)) for watch in watches]
        await asyncio.gather(*tasks)
        assert len(world.asked) <= 2
        large = World()
        await large.begin("a")
        for _ in range(5):  # one after the other: pages that have a successor are kept
            watch = large.watch()
            for _ in range(20):
                await first_of(watch)
            await watch.aclose()
        pages = -(-20 // IN_A_PAGE)
        places = [first for _, first in large.asked if first < SEQUENCE_MAX]
        assert len(places) == pages + 4  # the last page has none, and is read each time
        assert len(large.asked) == len(places) + 4  # whether it is the same run, once a watch
        assert large.parts.reads.kept_bytes <= KEPT_BYTES

    run_virtual(scenario())


def test_reads_are_bounded_and_those_of_others_come_through() -> None:
    async def scenario() -> None:
        world = World(size=10)
        world.read_s = 1.0
        tenants = [f"t{n}" for n in range(6)]
        await world.begin("a", "b", *tenants)
        tasks = [asyncio.ensure_future(first_of(world.watch("a", n % 20 + 1))) for n in range(100)]
        await asyncio.sleep(0.5)
        began_s = asyncio.get_running_loop().time()
        await first_of(world.watch("b"))
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.0, abs=0.01)
        assert world.most["a"] == TENANT_READS_MAX
        for tenant in tenants:
            tasks += [
                asyncio.ensure_future(first_of(world.watch(tenant, n + 1))) for n in range(20)
            ]
        await asyncio.sleep(2.0)
        assert world.most["all"] == READS_MAX
        await end(*tasks)

    run_virtual(scenario())


def test_a_read_that_has_begun_is_not_shared_with_who_knows_more() -> None:
    async def scenario() -> None:
        world = World(events=1, size=10)
        world.read_s = 1.0
        await world.begin("a")
        early = asyncio.ensure_future(world.parts.reads.page("a", "r", 1))
        await asyncio.sleep(0.5)
        late = asyncio.ensure_future(world.parts.reads.page("a", "r", 1))
        early.cancel()
        await asyncio.sleep(0.1)
        joined = asyncio.ensure_future(world.parts.reads.page("a", "r", 1))
        await asyncio.gather(late, joined)
        assert len(world.asked) == 3

    run_virtual(scenario())


def test_a_later_run_of_the_same_name_shows_nothing_of_the_one_before() -> None:
    """Names of runs follow from request ids: a later holder of a tenant's name, or the tenant
    itself after the time that ended runs are kept, may make one of the same name."""

    async def scenario() -> None:
        world = World()
        await world.begin("a")
        old = world.watch()
        for _ in range(20):
            await first_of(old)
        (held,) = (await world.runs.claim("h", 1, 60_000)).runs
        await world.say("r", held.token, "old", replaces=True)
        assert await anext(old) == Words(1, "old", True)
        still = world.watch()
        await first_of(still)
        await asyncio.sleep(10.0)
        world.tenants.forget("a")
        events = tuple(bytes([100 + n]) * EVENT_BYTES for n in range(20))
        await world.runs.create(NewRun("a", "r", "q", b"", b"", events, 1))
        watch = world.watch()
        seen = [await first_of(watch) for _ in range(20)]
        assert [one.event for one in seen] == list(events)
        words = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(10.0)
        assert not words.done()
        (held,) = (await world.runs.claim("h", 1, 60_000)).runs
        await world.say("r", held.token, "new", replaces=True)
        assert await words == Words(1, "new", True)
        # Who followed the one before sees nothing of this one.
        for one in (old, still):
            with pytest.raises(RunUnknownError):
                await last_of(one)

    run_virtual(scenario())


def test_an_inbox_holds_bounded_bytes() -> None:
    async def scenario() -> None:
        inbox: Inbox[str] = Inbox("again")
        for n in range(100):
            inbox.put(str(n), BYTES_MAX // 10)
        seen = [await anext(inbox)]
        while seen[-1] != "99":
            seen.append(await anext(inbox))
        assert seen[0] == "again" and len(seen) <= 11
        inbox.put("large", 2 * BYTES_MAX)
        assert await anext(inbox) == "large"

    run_virtual(scenario())
