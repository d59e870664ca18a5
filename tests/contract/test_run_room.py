"""Room for runs: in the store, and at who claims them. One contract for memory and Valkey.

Goal: ended runs hold up nobody; a claim takes what there is room for and leaves the rest to others
at once; what has only to be ended needs no room. Method: each test runs on both stores, at a clock
that it moves itself. Oracle: the words of state_svc/run_ports.py and domain/run_book.py.

Seen to fail on the mutants run_room_kept_by_ended, run_growth_held_up_by_ended,
run_place_taken_without_room, run_overdue_needs_a_slot, sessions_expired_hold_a_turn,
run_room_of_a_few_old_ones, run_room_in_a_day.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from state_svc.adapters.run_watch import Entry, RunWatch, WatchParts, watch_room
from state_svc.adapters.watch_reads import WatchReads
from state_svc.domain.claim_order import ClaimRoom
from state_svc.domain.run_values import (
    DEDUP_MS,
    Phase,
    RunLimits,
    RunsFullError,
    SessionLimits,
    SessionsFullError,
)
from tests.contract.state_rig import KINDS, LEASE_MS, Stores, a_run, new_id, stores_of
from tests.valkey import ValkeyProcess, valkey

LIMITS = RunLimits(open_max=50, tenant_bytes_max=400_000, run_bytes_max=100_000)
SESSION_LIMITS = SessionLimits(tenant_bytes_max=9_000)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Stores]:
    async with stores_of(request.param, server.url, LIMITS, SESSION_LIMITS) as found:
        yield found


# --- in the store --------------------------------------------------------------------------------


async def test_ended_runs_give_their_events_up_for_others(stores: Stores) -> None:
    slow = await stores.hold()
    made = [a_run(spec=b"s" * 40_000, request_digest=b"\xff%d" % n) for n in range(8)]
    for new in made:
        await stores.runs.create(new)
        (claimed,) = await stores.claim()
        await stores.append(claimed, b"e" * 40_000)
        await stores.end(claimed, summary=b"told")
    assert await stores.append(slow, b"x" * 50_000) == 2
    # The oldest is known by its summary and its end; the newest is whole.
    oldest = await stores.runs.get("a", made[0].run_id)
    assert (oldest.phase, oldest.summary, oldest.spec) == (Phase.SUCCEEDED, b"told", b"")
    assert oldest.last_sequence == 3
    # Mutant digest_goes_with_the_spec: what tells its request from another one stays.
    assert oldest.request_digest == b"\xff0"
    page = await stores.runs.read("a", made[0].run_id, 1)
    assert (page.first, page.events, page.more, page.ended) == (3, (b"end",), False, True)
    parts = WatchParts(WatchReads(stores.runs), stores.texts, watch_room(1 << 20))
    watch = RunWatch(parts, "a", made[0].run_id, 1)
    assert [seen async for seen in watch.follow(stores.feed)] == [Entry(3, b"end")]
    assert len((await stores.runs.read("a", made[-1].run_id, 1)).events) == 3
    # Its request makes no second run.
    assert (await stores.runs.create(made[0]))[1]
    assert not await stores.claim()


async def test_what_is_left_of_ended_runs_holds_up_no_run_under_way(stores: Stores) -> None:
    slow = await stores.hold()
    for _ in range(7):
        await stores.end(await stores.hold(), summary=b"s" * 60_000)
    with pytest.raises(RunsFullError) as refused:
        await stores.queue()
    assert await stores.append(slow, b"x" * 20_000) == 2
    # A new one has room when the first of them is dropped, and is told so.
    assert DEDUP_MS - 60_000 < refused.value.retry_ms <= DEDUP_MS
    stores.wait(refused.value.retry_ms)
    await stores.queue()


async def test_a_refusal_that_only_an_end_mends_names_no_day(stores: Stores) -> None:
    for _ in range(4):
        await stores.append(await stores.hold(), b"x" * 90_000)
    with pytest.raises(RunsFullError) as refused:
        await stores.queue(spec=b"s" * 60_000)
    assert refused.value.retry_ms == 0


async def end_many(stores: Stores, count: int) -> None:
    """So many small runs."""
    for begin in range(0, count, 25):
        made = range(min(count - begin, 25))
        await asyncio.gather(*(stores.runs.create(a_run(active_max=0)) for _ in made))
        ends = [
            stores.append(claimed, b"end" * 40, phase=Phase.SUCCEEDED)
            for claimed in await stores.claim()
        ]
        await asyncio.gather(*ends)


async def test_any_number_of_runs_that_no_request_asks_for_makes_room(stores: Stores) -> None:
    """Mutant run_room_of_a_few_old_ones. Many small ones, for a large one."""
    await end_many(stores, 325)
    stores.wait(DEDUP_MS + 1)
    fresh = await stores.hold(spec=b"s" * 5_000)
    await stores.end(fresh)
    await stores.queue(spec=b"s" * 95_000)
    assert (await stores.runs.get("a", fresh.run.run_id)).spec  # old ones go first


async def test_who_is_refused_while_more_can_be_given_up_is_told_to_come_again_at_once(
    server: ValkeyProcess,
) -> None:
    """Mutant run_room_in_a_day. One script gives up the events of at most 1,000 runs."""
    limits = RunLimits(tenant_bytes_max=1_646_649)
    async with stores_of("valkey", server.url, limits) as stores:
        await end_many(stores, 1_100)  # each gives up 26 bytes; 27,300 are missing
        large = a_run(spec=b"s" * 365_000)
        with pytest.raises(RunsFullError) as refused:
            await stores.runs.create(large)
        assert refused.value.retry_ms == 1
        await stores.runs.create(large)


async def test_expired_sessions_make_room_for_the_end_of_a_turn(stores: Stores) -> None:
    session = new_id()
    await stores.sessions.create("a", new_id(), new_id(), 1_000, [b"m" * 6_000])
    await stores.sessions.create("a", session, new_id(), 60_000, [])
    claimed = await stores.hold(session_id=session)
    with pytest.raises(SessionsFullError):
        await stores.end(claimed, session_messages=(b"u" * 4_000,))
    stores.wait(1_000)
    await stores.end(claimed, session_messages=(b"u" * 4_000,))
    assert (await stores.sessions.get("a", session, 0, 9))[0].message_count == 1


# --- at who claims -------------------------------------------------------------------------------


async def test_a_claim_takes_no_more_of_a_tenant_than_there_is_room_for(stores: Stores) -> None:
    for _ in range(4):
        await stores.queue("a", active_max=0)
        await stores.queue("b", active_max=0)
    room = ClaimRoom(tenant_max=2, tenants={"a": 1})
    batch = await stores.runs.claim("h", 64, LEASE_MS, room)
    assert Counter(one.run.tenant for one in batch.runs) == {"a": 1, "b": 2}
    assert len(await stores.claim(holder="other")) == 5


async def test_a_claim_takes_no_more_of_the_later_classes_than_there_is_room_for(
    stores: Stores,
) -> None:
    for priority in (4, 3, 2, 1):
        await stores.queue("a", priority=priority)
    batch = await stores.runs.claim("h", 64, LEASE_MS, ClaimRoom(later_max=1))
    assert [one.run.priority for one in batch.runs] == [1, 2, 3]
    batch = await stores.runs.claim("h", 64, LEASE_MS, ClaimRoom(later_max=0))
    assert not batch.runs
    assert len(await stores.claim(holder="other")) == 1


@pytest.mark.parametrize("room", [ClaimRoom(tenants={"a": 0}), ClaimRoom(later_max=0)])
async def test_what_there_is_no_room_for_is_found_by_others_at_once(
    stores: Stores, room: ClaimRoom
) -> None:
    await stores.queue("a", priority=3)
    for _ in range(3):
        batch = await stores.runs.claim("h", 8, LEASE_MS, room)
        # Nor does it call the asker back at once.
        assert not batch.runs and batch.next_ms > 1_000
    assert len(await stores.claim(holder="other")) == 1


async def test_what_has_only_to_be_ended_is_claimed_without_room(stores: Stores) -> None:
    cancelled = await stores.queue("a")
    over = await stores.queue("b", wall_ms=1_000)
    waits = await stores.queue("c")
    await stores.runs.cancel("a", cancelled.run_id)
    room = ClaimRoom(endings_max=4)
    (first,) = (await stores.runs.claim("h", 0, LEASE_MS, room)).runs
    assert (first.run.run_id, first.to_end, first.run.cancelled) == (cancelled.run_id, True, True)
    stores.wait(1_000)
    (second,) = (await stores.runs.claim("h", 0, LEASE_MS, room)).runs
    assert (second.run.run_id, second.to_end) == (over.run_id, True)
    batch = await stores.runs.claim("h", 0, LEASE_MS, room)
    assert not batch.runs and batch.next_ms > 1_000
    (third,) = await stores.claim(holder="other")
    assert (third.run.run_id, third.to_end) == (waits.run_id, False)


async def test_waiting_for_people_is_no_part_of_the_time_of_a_queued_run(stores: Stores) -> None:
    claimed = await stores.hold("a", wall_ms=10_000)
    await stores.append(claimed, b"asked", phase=Phase.WAITING, waiting_step=1)
    stores.wait(60_000)
    await stores.runs.resume("a", claimed.run.run_id, 1, b"yes", new_id())
    room = ClaimRoom(endings_max=4)
    stores.wait(9_000)
    assert not (await stores.runs.claim("h", 0, LEASE_MS, room)).runs
    stores.wait(1_000)
    (late,) = (await stores.runs.claim("h", 0, LEASE_MS, room)).runs
    assert late.to_end


async def test_a_run_that_is_ended_without_a_slot_holds_no_place_among_the_active(
    stores: Stores,
) -> None:
    over = await stores.queue("a", wall_ms=1_000, active_max=1)
    stores.wait(1_000)
    await stores.queue("a", active_max=1)
    assert {one.to_end for one in await stores.claim()} == {True, False}
    assert (await stores.runs.get("a", over.run_id)).phase is Phase.RUNNING
