"""Live text costs the store no write a message, and who comes late sees all of it.

Method: a real Valkey server and two processes' stores on it, with a clock of the test's own.
Oracle: the server's own count of changes (``rdb_changes_since_last_save``), and the text that was
published. Seen to fail on the mutants live_text_written_each_time and live_text_loss_not_told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

import pytest

from state_svc.adapters import valkey_text
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_text import STORE_S, ValkeyTexts
from state_svc.domain.run_values import Lease, Position
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

LEASE = Lease("a", "r", 10)
AT, LATER = Position(1, 5), Position(2, 5)


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    link: ValkeyLink
    clock: Clock

    def store(self) -> ValkeyTexts:
        """The store of one more process."""
        return ValkeyTexts(self.link, self.clock)

    async def changes(self) -> int:
        found = await self.link.run(lambda client: client.info("persistence"))
        return int(found["rdb_changes_since_last_save"])


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture
async def world(server: ValkeyProcess) -> AsyncIterator[World]:
    link = ValkeyLink(server.url, PATIENT_S)
    await link.run(lambda client: client.flushdb())
    yield World(link, Clock())
    await link.close()


async def whole(store: ValkeyTexts) -> str | None:
    found = await store.whole("a", "r")
    return None if found is None else found.text


async def test_a_message_is_no_write_to_the_store(world: World) -> None:
    store = world.store()
    before = await world.changes()
    for n in range(200):
        assert await store.publish(LEASE, AT, 1, f"wörd{n} ", replaces=n == 0)
        assert await whole(store) == "".join(f"wörd{m} " for m in range(n + 1))
    assert await world.changes() == before
    for _ in range(20):
        world.clock.now += STORE_S / 10
        await store.publish(LEASE, AT, 1, "more", replaces=False)
    assert 1 <= await world.changes() - before <= 4  # written twice, with a time to live


async def test_another_process_shows_what_was_stored_moments_ago(world: World) -> None:
    store, other = world.store(), world.store()
    assert await whole(other) is None
    await store.publish(LEASE, AT, 1, "one ", replaces=True)
    await store.publish(LEASE, AT, 1, "two ", replaces=False)
    assert await whole(other) is None
    world.clock.now += STORE_S
    await store.publish(LEASE, AT, 1, "three", replaces=False)
    assert await whole(other) == "one two three"
    # The run goes on over there, and here it is known before what was here is used again.
    later = replace(LEASE, token=11)
    assert await other.publish(later, LATER, 2, "anew", replaces=True)
    world.clock.now += STORE_S
    assert await other.publish(later, LATER, 2, " now", replaces=False)
    assert await whole(store) == "anew now"
    assert await store.publish(later, LATER, 2, " and on", replaces=False) is False


async def test_a_process_that_began_anew_says_that_it_knows_nothing(world: World) -> None:
    store = world.store()
    await store.publish(LEASE, AT, 1, "one", replaces=True)
    world.clock.now += STORE_S
    await store.publish(LEASE, AT, 1, " ", replaces=False)
    fresh = world.store()
    assert await whole(fresh) == "one "
    assert await fresh.publish(LEASE, AT, 1, "two ", replaces=False) is False
    assert await fresh.publish(LEASE, AT, 1, "one two three", replaces=True)
    assert await whole(fresh) == "one two three"


async def test_a_smaller_token_changes_nothing(world: World) -> None:
    store = world.store()
    await store.publish(LEASE, AT, 1, "mine", replaces=True)
    await store.publish(replace(LEASE, token=9), AT, 1, "theirs", replaces=True)
    assert await whole(store) == "mine"


async def test_texts_are_bounded_and_old_ones_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_text, "KEPT_BYTES", 50_000)
    store = world.store()
    for n in range(100):
        await store.publish(Lease("a", f"r{n}", 1), AT, 1, "x" * 1000, replaces=True)
        assert store.kept_bytes <= 50_000
    world.clock.now += valkey_text.KEPT_S + 1
    await store.publish(LEASE, AT, 1, "x", replaces=True)
    assert store.kept_bytes <= 1_000
    monkeypatch.setattr(valkey_text, "TEXT_BYTES_MAX", 10)
    for _ in range(5):
        await store.publish(LEASE, AT, 1, "12345", replaces=False)
    assert await whole(store) == "x12345"
