"""One contract for sessions in memory and on Valkey, and for the turns that runs take of them.

Goal: what holds for one holds for the other. Method: each test runs on both, at a clock that it
moves itself. Oracle: the words of state_svc/run_ports.py and the protos.

Seen to fail on mutants: session_request_id_for_anything, append_request_id_for_anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from state_svc.domain.run_values import (
    DEDUP_MS,
    Phase,
    SessionBusyError,
    SessionFullError,
    SessionLimits,
    SessionRecord,
    SessionsFullError,
    SessionUnknownError,
)
from state_svc.ports import RequestIdReusedError, VersionConflictError
from tests.contract.state_rig import KINDS, LEASE_MS, Stores, new_id, stores_of
from tests.valkey import ValkeyProcess, valkey

LIMITS = SessionLimits(
    sessions_max=6, tenant_bytes_max=12_000, messages_max=8, session_bytes_max=5_000
)
TTL_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Stores]:
    async with stores_of(request.param, server.url, session_limits=LIMITS) as found:
        yield found


async def a_session(stores: Stores, *messages: bytes, tenant: str = "a") -> SessionRecord:
    stores.wait(1)
    return await stores.sessions.create(tenant, new_id(), new_id(), TTL_MS, messages)


async def append(
    stores: Stores, session: SessionRecord, *messages: bytes, **more: Any
) -> SessionRecord:
    return await stores.sessions.append(
        "a",
        session.session_id,
        messages,
        more.get("expected"),
        more.get("request_id") or new_id(),
    )


async def messages_of(stores: Stores, session: SessionRecord) -> list[bytes]:
    return list((await stores.sessions.get("a", session.session_id, 0, 1_000))[1])


async def test_a_session_is_created_once_per_request(stores: Stores) -> None:
    request = new_id()
    first = await stores.sessions.create("a", new_id(), request, TTL_MS, [b"hello", b"\xff"])
    assert (first.version, first.message_count, first.open_run_id) == (1, 2, "")
    assert first.expire_ms == stores.now_ms + TTL_MS
    assert (
        await stores.sessions.create("a", new_id(), request, TTL_MS, [b"hello", b"\xff"]) == first
    )
    assert await messages_of(stores, first) == [b"hello", b"\xff"]
    await append(stores, first, b"more")
    again = await stores.sessions.create("a", new_id(), request, TTL_MS, [b"hello", b"\xff"])
    assert (again.session_id, again.version) == (first.session_id, 2)
    other = await stores.sessions.create("b", new_id(), request, TTL_MS, [])
    assert other.session_id != first.session_id


@pytest.mark.parametrize(
    ("ttl_ms", "messages"),
    [
        (TTL_MS, [b"other"]),
        (TTL_MS, []),
        (TTL_MS, [b"hell", b"o"]),
        (TTL_MS, [b"hello", b""]),
        (TTL_MS + 1, [b"hello"]),
    ],
    ids=str,
)
async def test_a_creations_request_id_is_not_used_for_another_session(
    stores: Stores, ttl_ms: int, messages: list[bytes]
) -> None:
    request, ids = new_id(), new_id()
    first = await stores.sessions.create("a", ids, request, TTL_MS, [b"hello"])
    with pytest.raises(RequestIdReusedError):
        await stores.sessions.create("a", new_id(), request, ttl_ms, messages)
    assert [one.session_id for one in (await stores.sessions.page("a", 9)).sessions] == [ids]
    assert await stores.sessions.create("a", new_id(), request, TTL_MS, [b"hello"]) == first
    # When its session is gone, it is free.
    await stores.sessions.delete("a", ids)
    again = await stores.sessions.create("a", new_id(), request, ttl_ms, messages)
    assert again.session_id != ids


@pytest.mark.parametrize(
    ("messages", "expected"),
    [([b"two"], None), ([b"one", b"two"], None), ([b"two"], 999), ([b"one"], 999), ([b"one"], 1)],
    ids=str,
)
async def test_an_appends_request_id_is_not_used_for_another_append(
    stores: Stores, messages: list[bytes], expected: int | None
) -> None:
    session, request = await a_session(stores), new_id()
    first = await append(stores, session, b"one", request_id=request)
    stores.wait(50)
    with pytest.raises(RequestIdReusedError):
        await append(stores, session, *messages, expected=expected, request_id=request)
    assert await messages_of(stores, session) == [b"one"]
    assert await append(stores, session, b"one", request_id=request) == first
    other = await a_session(stores)
    await append(stores, other, b"of another session", request_id=request)


async def test_messages_are_appended_by_compare_and_set(stores: Stores) -> None:
    session = await a_session(stores)
    second = await append(stores, session, b"1", b"2", expected=1)
    assert (second.version, second.message_count) == (2, 2)
    with pytest.raises(VersionConflictError):
        await append(stores, session, b"x", expected=1)
    third = await append(stores, session, b"3")
    assert third.version == 3
    assert await messages_of(stores, session) == [b"1", b"2", b"3"]


async def test_of_appends_at_once_to_one_version_exactly_one_wins(stores: Stores) -> None:
    session = await a_session(stores)

    async def one(n: int) -> bool:
        try:
            await append(stores, session, str(n).encode(), expected=1)
        except VersionConflictError:
            return False
        return True

    won = await asyncio.gather(*(one(n) for n in range(20)))
    assert sum(won) == 1
    assert await messages_of(stores, session) == [str(won.index(True)).encode()]


async def test_a_repeated_append_has_one_effect_and_the_same_answer(stores: Stores) -> None:
    session, request = await a_session(stores), new_id()
    first = await append(stores, session, b"1", expected=1, request_id=request)
    await append(stores, session, b"2")
    stores.wait(1_000)
    assert await append(stores, session, b"1", expected=1, request_id=request) == first
    assert await messages_of(stores, session) == [b"1", b"2"]
    # A refused one was none: the same id may try again.
    refused = new_id()
    with pytest.raises(VersionConflictError):
        await append(stores, session, b"3", expected=1, request_id=refused)
    await append(stores, session, b"3", expected=3, request_id=refused)
    assert await messages_of(stores, session) == [b"1", b"2", b"3"]


async def test_messages_are_read_in_pages(stores: Stores) -> None:
    session = await a_session(stores, *(str(n).encode() for n in range(7)))

    async def page(first: int, size: int) -> list[bytes]:
        return list((await stores.sessions.get("a", session.session_id, first, size))[1])

    assert await page(0, 3) == [b"0", b"1", b"2"]
    assert await page(3, 100) == [b"3", b"4", b"5", b"6"]
    assert await page(6, 1) == [b"6"]
    assert await page(7, 5) == [] and await page(0, 0) == []


async def test_sessions_are_listed_newest_first(stores: Stores) -> None:
    made = [(await a_session(stores)).session_id for _ in range(5)]
    await a_session(stores, tenant="b")
    got, before = [], 0
    while True:
        page = await stores.sessions.page("a", 2, before=before)
        got += [session.session_id for session in page.sessions]
        before = page.next_number
        if not before:
            break
    assert got == made[::-1]


async def test_an_idle_session_is_gone(stores: Stores) -> None:
    session = await a_session(stores)
    stores.wait(TTL_MS - 2)
    assert (await append(stores, session, b"x")).expire_ms == stores.now_ms + TTL_MS
    stores.wait(TTL_MS - 1)
    await stores.sessions.get("a", session.session_id, 0, 1)
    stores.wait(1)
    with pytest.raises(SessionUnknownError):
        await stores.sessions.get("a", session.session_id, 0, 1)
    with pytest.raises(SessionUnknownError):
        await append(stores, session, b"x")
    assert (await stores.sessions.page("a", 10)).sessions == ()
    for _ in range(LIMITS.sessions_max):
        await a_session(stores)


async def test_a_deleted_session_is_gone_with_its_room(stores: Stores) -> None:
    session = await a_session(stores, b"x" * 4_000)
    await a_session(stores, b"x" * 4_000)
    with pytest.raises(SessionsFullError, match="sessions_bytes_max"):
        await a_session(stores, b"x" * 4_000)
    await stores.sessions.delete("a", session.session_id)
    with pytest.raises(SessionUnknownError):
        await stores.sessions.delete("a", session.session_id)
    with pytest.raises(SessionUnknownError):
        await stores.sessions.get("a", session.session_id, 0, 1)
    await a_session(stores, b"x" * 4_000)


async def test_bounds_are_exact_and_nothing_is_done_beyond_them(stores: Stores) -> None:
    session = await a_session(stores, *[b"m"] * 7)
    with pytest.raises(SessionFullError, match="session_messages_max"):
        await append(stores, session, b"m", b"m")
    await append(stores, session, b"m")
    other = await a_session(stores)
    with pytest.raises(SessionFullError, match="session_bytes_max"):
        await append(stores, other, b"x" * 5_000)
    await append(stores, other, b"x" * (5_000 - 16))
    assert (await stores.sessions.get("a", session.session_id, 0, 0))[0].message_count == 8
    for _ in range(LIMITS.sessions_max - 2):
        await a_session(stores)
    with pytest.raises(SessionsFullError, match="sessions_max"):
        await a_session(stores)
    await a_session(stores, tenant="b")


async def test_another_tenants_session_is_as_unknown_as_none(stores: Stores) -> None:
    session = await a_session(stores)
    for call in (
        lambda: stores.sessions.get("b", session.session_id, 0, 1),
        lambda: stores.sessions.append("b", session.session_id, [b"x"], None, new_id()),
        lambda: stores.sessions.delete("b", session.session_id),
        lambda: stores.queue("b", session_id=session.session_id),
    ):
        with pytest.raises(SessionUnknownError):
            await call()


async def test_a_turn_is_one_at_a_time_and_ends_with_its_messages(stores: Stores) -> None:
    session = await a_session(stores, b"hello")
    run = await stores.queue(session_id=session.session_id, active_max=0)
    record, _ = await stores.sessions.get("a", session.session_id, 0, 1)
    assert record.open_run_id == run.run_id
    with pytest.raises(SessionBusyError):
        await stores.queue(session_id=session.session_id)
    with pytest.raises(SessionBusyError):
        await append(stores, session, b"x")
    with pytest.raises(SessionBusyError):
        await stores.sessions.delete("a", session.session_id)
    stores.wait(TTL_MS + 1)  # it does not run out under its turn
    (claimed,) = await stores.claim()
    await stores.end(claimed, session_messages=(b"user", b"answer"))
    record, messages = await stores.sessions.get("a", session.session_id, 0, 10)
    assert (record.open_run_id, record.version, record.message_count) == ("", 2, 3)
    assert record.expire_ms == stores.now_ms + TTL_MS
    assert list(messages) == [b"hello", b"user", b"answer"]
    await stores.queue(session_id=session.session_id)


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.CANCELLED, Phase.SUCCEEDED])
async def test_a_turn_without_an_answer_frees_the_session_unchanged(
    stores: Stores, phase: Phase
) -> None:
    session = await a_session(stores, b"hello")
    await stores.queue(session_id=session.session_id)
    (claimed,) = await stores.claim()
    stores.wait(LEASE_MS + 1)
    (claimed,) = await stores.claim()  # taken over: the turn stays the run's
    await stores.end(claimed, phase)
    record, _ = await stores.sessions.get("a", session.session_id, 0, 1)
    assert (record.open_run_id, record.version) == ("", 1)
    assert (await append(stores, session, b"x")).version == 2


async def test_an_answer_that_does_not_fit_is_refused_whole(stores: Stores) -> None:
    session = await a_session(stores, *[b"m"] * 7)
    claimed = await stores.hold(session_id=session.session_id)
    with pytest.raises(SessionFullError):
        await stores.end(claimed, session_messages=(b"user", b"answer"))
    record = await stores.runs.get("a", claimed.run.run_id)
    assert (record.phase, record.last_sequence) == (Phase.RUNNING, 1)
    await stores.end(claimed, Phase.FAILED)
    assert len(await messages_of(stores, session)) == 7
    await append(stores, session, b"x")


async def test_a_run_that_is_not_stored_takes_no_turn(stores: Stores) -> None:
    session = await a_session(stores)
    with pytest.raises(SessionUnknownError):
        await stores.queue(session_id=new_id())
    run_id, request = new_id(), new_id()
    made = await stores.queue(session_id=session.session_id, run_id=run_id, request_id=request)
    again = await stores.queue(session_id=session.session_id, run_id=run_id, request_id=request)
    assert again.run_id == made.run_id
    (claimed,) = await stores.claim()
    await stores.end(claimed)
    # The run is found by its request: its repetition must not take the turn again.
    await stores.queue(session_id=session.session_id, run_id=run_id, request_id=request)
    assert (await stores.sessions.get("a", session.session_id, 0, 0))[0].open_run_id == ""


async def test_request_ids_are_free_again_after_a_day(stores: Stores) -> None:
    request = new_id()
    first = await stores.sessions.create("a", new_id(), request, 10 * DEDUP_MS, [])
    await append(stores, first, b"1", request_id=request)
    stores.wait(DEDUP_MS - 1)
    await append(stores, first, b"1", request_id=request)
    with pytest.raises(RequestIdReusedError):
        await append(stores, first, b"2", request_id=request)
    again = await stores.sessions.create("a", new_id(), request, 10 * DEDUP_MS, [])
    assert again.session_id == first.session_id and again.message_count == 1
    stores.wait(1)
    await append(stores, first, b"2", request_id=request)
    fresh = await stores.sessions.create("a", new_id(), request, TTL_MS, [])
    assert fresh.session_id != first.session_id
    assert await messages_of(stores, first) == [b"1", b"2"]
