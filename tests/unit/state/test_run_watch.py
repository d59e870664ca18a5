"""Whoever follows a run gets its events, whatever becomes of hints and of the store; virtual time.

Oracle: the run's events by number. Seen to fail on the mutants watch_stops_with_the_store and
watch_trusts_hints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sluice.clock import run_virtual
from state_svc.adapters.inbox import ITEMS_MAX, Inbox
from state_svc.adapters.memory_runs import MemoryFeed, MemoryRuns, MemoryTenants, MemoryTexts
from state_svc.adapters.run_watch import (
    POLL_S,
    RETRY_S,
    Entry,
    RunWatch,
    WatchParts,
    Words,
    watch_room,
)
from state_svc.adapters.watch_reads import WatchReads
from state_svc.domain.run_values import Append, Lease, NewRun, Phase
from state_svc.ports import StoreUnavailableError
from state_svc.run_ports import POKE, LiveText, Poke


class SilentFeed(MemoryFeed):
    """Loses every hint."""

    @asynccontextmanager
    async def run(self, tenant: str, run_id: str) -> AsyncIterator[AsyncIterator[Poke | LiveText]]:
        yield Inbox(POKE)


class World:
    """A run that is held, and what one who follows it saw, with when."""

    def __init__(self, feed: MemoryFeed) -> None:
        self.feed = feed
        self.runs = MemoryRuns(MemoryTenants(), MemoryFeed())
        self.texts = MemoryTexts(feed)
        self.seen: list[tuple[float, Any]] = []
        self.away = False
        read = self.runs.read

        async def reading(tenant: str, run_id: str, first: int, bytes_max: int) -> Any:
            if self.away:
                raise StoreUnavailableError
            return await read(tenant, run_id, first, bytes_max)

        self.runs.read = reading  # type: ignore[method-assign,assignment]

    async def begin(self) -> None:
        new = NewRun("a", "r", "q", b"", b"", (b"1",), 1)
        await self.runs.create(new)
        (claimed,) = (await self.runs.claim("h", 1, 60_000)).runs
        self.lease = Lease("a", "r", claimed.token)
        self.following = asyncio.ensure_future(self._follow())
        await asyncio.sleep(0)

    async def _follow(self) -> None:
        parts = WatchParts(WatchReads(self.runs), self.texts, watch_room(1 << 20))
        watch = RunWatch(parts, "a", "r", 0)
        async for one in watch.follow(self.feed):
            self.seen.append((asyncio.get_running_loop().time(), one))

    async def append(self, last: int, phase: Phase = Phase.RUNNING) -> float:
        await self.runs.append(
            Append(self.lease, last, f"a{last}", (b"%d" % (last + 1),), phase=phase)
        )
        return asyncio.get_running_loop().time()

    async def say(self, text: str, sequence: int, step: int) -> None:
        at = replace(await self.runs.position(self.lease), sequence=sequence)
        await self.texts.publish(self.lease, at, step, text, replaces=False)

    def numbers(self) -> list[int]:
        return [one.sequence for _, one in self.seen if isinstance(one, Entry)]

    def text(self) -> str:
        text = ""
        for _, one in self.seen:
            if isinstance(one, Words):
                text = one.text if one.replaces else text + one.text
        return text


def test_without_any_hint_events_are_late_by_a_poll_and_no_more() -> None:
    async def scenario() -> None:
        world = World(SilentFeed())
        await world.begin()
        for last in range(1, 5):
            at = await world.append(last)
            await asyncio.sleep(POLL_S + 0.01)
            assert world.numbers() == list(range(1, last + 2))
            assert world.seen[-1][0] - at <= POLL_S
        await world.append(5, Phase.FAILED)
        await asyncio.wait_for(world.following, POLL_S + 0.01)
        assert world.numbers() == [1, 2, 3, 4, 5, 6]

    run_virtual(scenario())


def test_a_store_that_is_away_ends_no_watch() -> None:
    async def scenario() -> None:
        world = World(MemoryFeed())
        await world.begin()
        await asyncio.sleep(0.01)
        world.away = True
        world.feed.changed("a", "r")
        await world.append(1)
        await asyncio.sleep(60.0)
        assert world.numbers() == [1] and not world.following.done()
        world.away = False
        await world.append(2, Phase.SUCCEEDED)
        await asyncio.wait_for(world.following, RETRY_S + 0.01)
        assert world.numbers() == [1, 2, 3]

    run_virtual(scenario())


def test_text_that_was_missed_is_read_whole() -> None:
    async def scenario() -> None:
        world = World(MemoryFeed())
        await world.begin()
        for word in ("one ", "two "):
            await world.say(word, 1, 1)
        await asyncio.sleep(0.01)
        assert world.text() == "one two "
        # More than is kept for a reader that does not read: dropped, and found again.
        for number in range(3 * ITEMS_MAX):
            await world.say(f"{number} ", 1, 1)
        await asyncio.sleep(0.01)
        whole = await world.texts.whole("a", "r")
        assert whole is not None and world.text() == whole.text
        world.following.cancel()

    run_virtual(scenario())


def test_text_ahead_of_its_event_waits_for_it() -> None:
    async def scenario() -> None:
        world = World(MemoryFeed())
        await world.begin()
        await asyncio.sleep(0.01)
        await world.append(1)  # its hint is lost: the store here tells another feed
        await world.say("second", 2, 2)
        await asyncio.sleep(0.01)
        kinds = [type(one).__name__ for _, one in world.seen]
        assert kinds == ["Entry", "Entry", "Words"] and world.text() == "second"
        world.following.cancel()

    run_virtual(scenario())


def test_text_beyond_what_is_kept_is_still_passed_on() -> None:
    async def scenario() -> None:
        world = World(MemoryFeed())
        world.texts = MemoryTexts(world.feed, text_bytes_max=4)
        await world.begin()
        await asyncio.sleep(0.01)
        for word in ("abcd", "ef", "gh"):
            await world.say(word, 1, 1)
            await asyncio.sleep(0.01)
        assert world.text() == "abcdefgh"
        world.following.cancel()

    run_virtual(scenario())
