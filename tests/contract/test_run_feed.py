"""Hints by pub/sub come at once, come again after a lost connection, and leave nothing behind.

Method: real Valkey servers, a durable and a volatile one. Oracle: what the follower hears within a
time that no poll explains; the server's own list of channels. Seed: none, nothing is drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from state_svc.adapters import run_watch
from state_svc.adapters.run_watch import Entry, RunWatch, WatchParts, Words, watch_room
from state_svc.adapters.valkey_feed import ANYTHING_READY, Channels, ValkeyFeed
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.adapters.valkey_text import ValkeyTexts
from state_svc.adapters.watch_reads import WatchReads
from state_svc.domain.run_values import Claimed, Position
from state_svc.run_ports import Order
from tests.contract.state_rig import LEASE_MS, a_run, an_append, lease_of
from tests.valkey import PATIENT_S, valkey

POLL_S = 60.0
SOON_S = 10.0  # also on a machine that stands still for a while


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    with valkey() as durable, valkey() as volatile:
        yield durable.url, volatile.url


@dataclass
class World:
    durable: ValkeyLink
    volatile: ValkeyLink
    runs: ValkeyRuns
    texts: ValkeyTexts
    feed: ValkeyFeed
    held: Claimed

    def follow(self) -> AsyncIterator[Entry | Words]:
        run = self.held.run
        parts = WatchParts(WatchReads(self.runs), self.texts, watch_room(1 << 20))
        return RunWatch(parts, run.tenant, run.run_id, 1).follow(self.feed)

    async def append(self, last: int) -> None:
        await self.runs.append(an_append(self.held, b"event", expected_sequence=last))

    async def say(self, word: str, sequence: int) -> None:
        at = Position(sequence, self.held.run.create_ms)
        await self.texts.publish(lease_of(self.held), at, 1, word, replaces=False)


@pytest.fixture
async def world(urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(run_watch, "POLL_S", POLL_S)
    durable, volatile = (ValkeyLink(url, PATIENT_S) for url in urls)
    for link in (durable, volatile):
        await link.run(lambda client: client.flushdb())
    runs = ValkeyRuns(durable)
    feed = ValkeyFeed(durable, volatile)
    running = asyncio.create_task(feed.run_forever())
    await runs.create(a_run())
    (held,) = (await runs.claim("h", 1, 10 * LEASE_MS)).runs
    yield World(durable, volatile, runs, ValkeyTexts(volatile), feed, held)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for link in (durable, volatile):
        await link.close()


async def soon(messages: AsyncIterator[Any]) -> Any:
    async with asyncio.timeout(SOON_S):
        return await anext(messages)


async def test_events_and_text_of_two_servers_come_at_once(world: World) -> None:
    seen = world.follow()
    assert await soon(seen) == Entry(1, b"queued")
    for last in range(1, 4):
        waiting = asyncio.ensure_future(soon(seen))
        await asyncio.sleep(0.05)
        await world.say(f"word {last} ", last)
        words = await waiting
        assert isinstance(words, Words) and words.text.endswith(f"word {last} ")
        await world.append(last)
        assert await soon(seen) == Entry(last + 1, b"event")


async def test_a_lost_connection_is_found_again_with_what_was_missed(world: World) -> None:
    seen = world.follow()
    assert await soon(seen) == Entry(1, b"queued")
    async with world.feed.orders() as orders:
        for last in range(1, 4):
            waiting = asyncio.ensure_future(soon(seen))
            await asyncio.sleep(0.2)
            async with asyncio.timeout(SOON_S):
                while not await world.durable.run(
                    lambda client: client.client_list(_type="pubsub")
                ):
                    await asyncio.sleep(0.01)
            killed = await world.durable.run(
                lambda client: client.client_kill_filter(_type="pubsub", skipme=True)
            )
            assert killed == 1
            await world.append(last)
            assert await waiting == Entry(last + 1, b"event")
        assert await soon(orders) == ANYTHING_READY
        await world.runs.cancel("a", world.held.run.run_id)
        heard = await soon(orders)
        while heard == ANYTHING_READY:
            heard = await soon(orders)
        assert heard == Order("a", world.held.run.run_id, "h")


async def test_a_connection_dropped_under_a_subscription_is_a_lost_one(world: World) -> None:
    seen = world.follow()
    assert await soon(seen) == Entry(1, b"queued")
    async with asyncio.timeout(SOON_S):
        while world.feed._durable._connection is None:
            await asyncio.sleep(0.01)

    async def first_order() -> Order:
        async with world.feed.orders() as orders:
            order: Order = await soon(orders)
            return order

    hearing = asyncio.create_task(first_order())
    await asyncio.sleep(0)  # what it writes is a task of its own, which has not begun
    await world.feed._durable._connection.disconnect(nowait=True)
    assert await hearing == ANYTHING_READY
    await world.append(1)
    assert await soon(seen) == Entry(2, b"event")


async def test_a_connection_dropped_under_a_ping_is_followed_by_the_next() -> None:
    class Dropped:
        async def connect(self) -> None: ...

        async def read_response(self, timeout: float) -> None: ...

        async def send_command(self, *_: object, check_health: bool) -> None:
            raise AttributeError  # as redis-py, whose writer is gone

        async def disconnect(self, nowait: bool) -> None:
            made.put_nowait(self)

    class Link:
        def own_connection(self) -> Dropped:
            return Dropped()

    made: asyncio.Queue[Dropped] = asyncio.Queue()
    running = asyncio.create_task(Channels(cast("ValkeyLink", Link())).run())
    async with asyncio.timeout(SOON_S):
        assert await made.get() is not await made.get()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_who_stops_following_leaves_no_subscription(world: World) -> None:
    followers = [world.follow() for _ in range(3)]
    for seen in followers:
        assert await soon(seen) == Entry(1, b"queued")
    async with asyncio.timeout(SOON_S):
        while len(await channels(world)) != 2:
            await asyncio.sleep(0.01)
    for seen in followers:
        await seen.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(SOON_S):
        while await channels(world):
            await asyncio.sleep(0.01)
    assert not world.feed._durable._listeners and not world.feed._volatile._listeners
    assert not world.feed._inboxes


async def channels(world: World) -> list[bytes | str]:
    found: list[bytes | str] = []
    for link in (world.durable, world.volatile):
        found += await link.client.pubsub_channels()
    return found
