"""One contract for runs in memory and on Valkey.

Goal: what holds for one holds for the other. Method: each test runs on both, at a clock that it
moves itself. Oracle: the words of state_svc/run_ports.py and the protos.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from state_svc.domain.claim_order import ClaimRoom
from state_svc.domain.run_values import (
    DEDUP_MS,
    LeaseLostError,
    NotWaitingError,
    Phase,
    RunFullError,
    RunLimits,
    RunsFullError,
    RunUnknownError,
    TooManyRunsError,
)
from state_svc.ports import RequestIdReusedError, VersionConflictError
from tests.contract.state_rig import (
    KINDS,
    LEASE_MS,
    Stores,
    a_run,
    an_append,
    lease_of,
    new_id,
    stores_of,
)
from tests.valkey import ValkeyProcess, valkey

LIMITS = RunLimits(
    open_max=50, tenant_bytes_max=400_000, events_max=10, run_bytes_max=100_000, kept_ms=DEDUP_MS
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Stores]:
    async with stores_of(request.param, server.url, LIMITS) as found:
        yield found


@pytest.fixture(params=KINDS)
async def roomy(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Stores]:
    """Stores with the bounds that they have by default."""
    async with stores_of(request.param, server.url) as found:
        yield found


async def test_a_run_is_stored_whole_and_read_back(stores: Stores) -> None:
    new = a_run(summary=b"\x00s", events=(b"one", b"\xff"), priority=3)
    made, repeated = await stores.runs.create(new)
    assert not repeated
    assert made == await stores.runs.get("a", new.run_id)
    assert (made.phase, made.spec, made.summary) == (Phase.QUEUED, b"spec", b"\x00s")
    assert (made.last_sequence, made.priority, made.end_ms) == (2, 3, 0)
    assert made.create_ms == stores.now_ms
    page = await stores.runs.read("a", new.run_id, 1)
    assert page.events == (b"one", b"\xff")
    assert (page.more, page.ended, page.last) == (False, False, 2)
    assert (await stores.runs.read("a", new.run_id, 2)).events == (b"\xff",)
    assert (await stores.runs.read("a", new.run_id, 9)).events == ()


async def test_the_same_request_makes_one_run(stores: Stores) -> None:
    new = a_run()
    first, _ = await stores.runs.create(new)
    other = replace(new, run_id=new_id(), spec=b"other")
    assert await stores.runs.create(other) == (first, True)
    same_run = replace(new, request_id=new_id())
    assert await stores.runs.create(same_run) == (first, True)
    (claimed,) = await stores.claim()
    await stores.end(claimed)
    stores.wait(DEDUP_MS - 10)
    again, repeated = await stores.runs.create(other)
    assert repeated and again.phase is Phase.SUCCEEDED
    assert not await stores.claim()
    # A day later the request id is free again; the ended run is dropped by age with it.
    stores.wait(DEDUP_MS)
    fresh, repeated = await stores.runs.create(other)
    assert not repeated and fresh.run_id == other.run_id


async def test_of_the_same_request_at_once_one_is_new(stores: Stores) -> None:
    new = a_run()
    made = await asyncio.gather(*(stores.runs.create(new) for _ in range(20)))
    assert sum(not repeated for _, repeated in made) == 1
    assert len({record.run_id for record, _ in made}) == 1
    assert len(await stores.claim()) == 1


async def test_another_tenants_run_is_as_unknown_as_no_run(stores: Stores) -> None:
    claimed = await stores.hold("a")
    run_id = claimed.run.run_id
    foreign = replace(claimed, run=replace(claimed.run, tenant="b"))
    for call in (
        lambda: stores.runs.get("b", run_id),
        lambda: stores.runs.read("b", run_id, 1),
        lambda: stores.runs.cancel("b", run_id),
        lambda: stores.runs.resume("b", run_id, 1, b"", new_id()),
        lambda: stores.append(foreign, b"x"),
        lambda: stores.runs.position(lease_of(foreign)),
    ):
        with pytest.raises(RunUnknownError):
            await call()
    assert not (await stores.runs.renew([lease_of(foreign)], LEASE_MS))[0].held
    assert (await stores.runs.page("b", 10)).runs == ()
    assert (await stores.runs.get("a", run_id)).last_sequence == 1


async def test_a_claim_takes_each_run_once_with_its_spec(stores: Stores) -> None:
    made = [await stores.queue() for _ in range(5)]
    first = await stores.claim(2)
    rest = await stores.claim()
    assert [one.run.run_id for one in first + rest] == [run.run_id for run in made]
    assert {one.run.spec for one in first + rest} == {b"spec"}
    assert {one.run.phase for one in first + rest} == {Phase.RUNNING}
    assert not await stores.claim()


async def test_of_many_that_claim_at_once_each_run_has_one_holder(stores: Stores) -> None:
    for n in range(12):
        await stores.queue("abc"[n % 3])
    batches = await asyncio.gather(*(stores.runs.claim(f"h{n}", 3, LEASE_MS) for n in range(8)))
    got = [one.run.run_id for batch in batches for one in batch.runs]
    stores.wait(1)
    got += [one.run.run_id for one in await stores.claim()]
    assert len(got) == len(set(got)) == 12


async def test_a_lease_lapses_and_the_next_holder_has_a_larger_token(stores: Stores) -> None:
    first = await stores.hold()
    stores.wait(LEASE_MS - 2)
    assert not await stores.claim()
    (state,) = await stores.runs.renew([lease_of(first)], LEASE_MS)
    assert state.held and not state.cancelled
    stores.wait(LEASE_MS - 2)
    assert not await stores.claim()
    (second,) = await stores.claim(holder="other")
    assert second.run.run_id == first.run.run_id and second.token > first.token
    # Everything that the first one does is refused, and changes nothing.
    assert not (await stores.runs.renew([lease_of(first)], LEASE_MS))[0].held
    with pytest.raises(LeaseLostError):
        await stores.append(first, b"late")
    with pytest.raises(LeaseLostError):
        await stores.runs.position(lease_of(first))
    assert await stores.append(second, b"next") == 2
    assert (await stores.runs.read("a", first.run.run_id, 1)).events == (b"queued", b"next")


async def test_a_run_that_loses_its_holders_waits_longer_and_longer(stores: Stores) -> None:
    """Mutant lost_run_claimed_at_once."""
    await stores.hold()
    waits = []
    for losses in range(1, 7):
        stores.wait(LEASE_MS)
        waited = 0
        while not (found := await stores.claim()):
            stores.wait(1_000)
            waited += 1_000
        waits.append(waited)
        assert found[0].losses == losses
    assert waits == [0, 2_000, 8_000, 32_000, 120_000, 120_000]
    # An event shows that it is not the run that ends who holds it.
    await stores.append(found[0], b"next")
    stores.wait(LEASE_MS)
    (again,) = await stores.claim()
    assert again.losses == 1


@pytest.mark.parametrize("tenants", ["aaaaaaaa", "abcdefgh"])
async def test_a_lost_run_that_a_claim_leaves_for_its_size_has_lost_one_holder(
    roomy: Stores, tenants: str
) -> None:
    """Eight runs that do not fit in one claim lose their holder once. All are claimed again at
    once, however many claims that takes."""
    for tenant in tenants:
        await roomy.runs.create(a_run(tenant, spec=b"x" * 900_000))
    for after_ms in (0, LEASE_MS):
        roomy.wait(after_ms)
        found = [one for _ in tenants for one in await roomy.claim()]
        assert [one.losses for one in found] == [int(after_ms > 0)] * len(tenants)


async def lose_twice(stores: Stores) -> None:
    """The run that is held loses its holder and the next one, and waits for 2 s."""
    stores.wait(LEASE_MS)
    (claimed,) = await stores.claim()
    assert claimed.losses == 1
    stores.wait(LEASE_MS)
    assert not await stores.claim()


async def test_a_run_that_waits_for_its_losses_holds_up_nobody_and_can_be_ended(
    stores: Stores,
) -> None:
    lost = await stores.hold(active_max=1)
    await lose_twice(stores)
    other = await stores.queue(active_max=1)
    (claimed,) = await stores.claim()
    assert claimed.run.run_id == other.run_id
    await stores.runs.cancel("a", lost.run.run_id)
    (ended,) = await stores.claim()
    assert (ended.run.run_id, ended.to_end) == (lost.run.run_id, True)


async def test_the_wall_time_of_a_run_that_waits_for_its_losses_ends_it(stores: Stores) -> None:
    lost = await stores.hold(wall_ms=2 * LEASE_MS + 1_000)
    await lose_twice(stores)
    stores.wait(2_000)
    (ended,) = await stores.claim()
    assert (ended.run.run_id, ended.to_end) == (lost.run.run_id, True)


async def test_tokens_grow_also_when_the_clock_does_not(stores: Stores) -> None:
    tokens = []
    claimed = await stores.hold()
    for _ in range(3):
        tokens.append(claimed.token)
        await stores.append(claimed, phase=Phase.QUEUED)
        stores.wait(-1)
        (claimed,) = await stores.claim()
    assert tokens == sorted(set(tokens))


async def test_a_lease_that_lapsed_is_still_the_holders_until_somebody_claims(
    stores: Stores,
) -> None:
    claimed = await stores.hold()
    stores.wait(3 * LEASE_MS)
    assert await stores.append(claimed, b"slow") == 2
    assert (await stores.runs.renew([lease_of(claimed)], LEASE_MS))[0].held
    assert not await stores.claim()


async def test_a_lease_that_lapsed_has_no_claim_to_a_place_that_was_taken(stores: Stores) -> None:
    first = await stores.hold(active_max=1)
    second = await stores.queue(priority=1, active_max=1)
    stores.wait(LEASE_MS)
    (other,) = await stores.claim(1)
    assert other.run.run_id == second.run_id
    assert not (await stores.runs.renew([lease_of(first)], LEASE_MS))[0].held
    with pytest.raises(LeaseLostError):
        await stores.append(first, b"late")
    assert not await stores.claim()
    await stores.end(other)
    (again,) = await stores.claim()
    assert again.run.run_id == first.run.run_id


async def test_an_append_is_all_or_nothing_and_repeatable(stores: Stores) -> None:
    claimed = await stores.hold()
    append = an_append(claimed, b"two", b"three", summary=b"going")
    assert await stores.runs.append(append) == 3
    assert await stores.runs.append(append) == 3
    with pytest.raises(VersionConflictError):
        await stores.append(claimed, b"four")
    assert await stores.append(claimed, b"four", expected_sequence=3) == 4
    record = await stores.runs.get("a", claimed.run.run_id)
    assert (record.last_sequence, record.summary, record.phase) == (4, b"going", Phase.RUNNING)
    page = await stores.runs.read("a", record.run_id, 1)
    assert page.events == (b"queued", b"two", b"three", b"four")


async def test_a_repeated_append_that_gave_the_lease_back_answers_as_before(
    stores: Stores,
) -> None:
    claimed = await stores.hold()
    append = an_append(claimed, b"bye", phase=Phase.QUEUED)
    assert await stores.runs.append(append) == 2
    assert await stores.runs.append(append) == 2
    (again,) = await stores.claim()
    assert await stores.runs.append(append) == 2  # and does not take the run from its new holder
    assert await stores.append(again, b"on") == 3
    with pytest.raises(LeaseLostError):
        await stores.runs.append(append)


async def test_a_paused_run_is_ready_at_its_time(stores: Stores) -> None:
    claimed = await stores.hold()
    await stores.append(claimed, b"p", phase=Phase.PAUSED, ready_ms=stores.now_ms + 3_000)
    record = await stores.runs.get("a", claimed.run.run_id)
    assert record.phase is Phase.PAUSED
    assert not (await stores.runs.renew([lease_of(claimed)], LEASE_MS))[0].held
    batch = await stores.runs.claim("h", 1, LEASE_MS)
    assert not batch.runs and 0 < batch.next_ms <= 3_000
    stores.wait(3_000)
    (again,) = await stores.claim()
    assert again.run.run_id == record.run_id and again.run.phase is Phase.RUNNING


async def test_a_waiting_run_waits_for_its_decision_alone(stores: Stores) -> None:
    claimed = await stores.hold()
    run_id = claimed.run.run_id
    with pytest.raises(NotWaitingError):
        await stores.runs.resume("a", run_id, 3, b"yes", new_id())
    await stores.append(claimed, b"w", phase=Phase.WAITING, waiting_step=3)
    stores.wait(30 * LEASE_MS)
    assert not await stores.claim()
    with pytest.raises(NotWaitingError):
        await stores.runs.resume("a", run_id, 2, b"yes", new_id())
    request = new_id()
    record = await stores.runs.resume("a", run_id, 3, b"yes", request)
    assert (record.phase, record.decision, record.decision_step) == (Phase.QUEUED, b"yes", 3)
    with pytest.raises(NotWaitingError):
        await stores.runs.resume("a", run_id, 3, b"no", new_id())
    assert (await stores.runs.resume("a", run_id, 3, b"yes", request)).decision == b"yes"
    (again,) = await stores.claim()
    assert (again.run.decision, again.run.decision_step) == (b"yes", 3)
    # The decision stays until an event is appended, also over a change of hands.
    await stores.append(again, phase=Phase.QUEUED)
    (again,) = await stores.claim()
    assert again.run.decision == b"yes"
    await stores.append(again, b"resumed", phase=Phase.WAITING, waiting_step=3)
    record = await stores.runs.resume("a", run_id, 3, b"yes", request)  # a late repetition
    assert (record.phase, record.decision, record.decision_step) == (Phase.WAITING, b"", 0)


@pytest.mark.parametrize(("step", "decision"), [(3, b"cancel"), (3, b""), (4, b"retry")], ids=str)
async def test_a_decisions_request_id_is_not_used_for_another_decision(
    stores: Stores, step: int, decision: bytes
) -> None:
    """Mutant decision_request_id_for_anything: the first one stays, and nobody hears of it."""
    claimed = await stores.hold()
    run_id, request = claimed.run.run_id, new_id()
    await stores.append(claimed, b"w", phase=Phase.WAITING, waiting_step=3)
    stores.wait(1)
    made = await stores.runs.resume("a", run_id, 3, b"retry", request)
    with pytest.raises(RequestIdReusedError):
        await stores.runs.resume("a", run_id, step, decision, request)
    assert await stores.runs.get("a", run_id) == made
    assert await stores.runs.resume("a", run_id, 3, b"retry", request) == made
    # Nor when it waits for the next one.
    (again,) = await stores.claim()
    await stores.append(again, b"w", phase=Phase.WAITING, waiting_step=4)
    with pytest.raises(RequestIdReusedError):
        await stores.runs.resume("a", run_id, 4, b"retry", request)
    stores.wait(DEDUP_MS)
    assert (await stores.runs.resume("a", run_id, 4, b"retry", request)).decision_step == 4


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED])
async def test_an_ended_run_stays_as_it_is(stores: Stores, phase: Phase) -> None:
    claimed = await stores.hold()
    assert await stores.end(claimed, phase, summary=b"done") == 2
    record = await stores.runs.get("a", claimed.run.run_id)
    assert (record.phase, record.end_ms, record.summary) == (phase, stores.now_ms, b"done")
    assert await stores.runs.cancel("a", record.run_id) == record
    with pytest.raises(NotWaitingError):
        await stores.runs.resume("a", record.run_id, 0, b"", new_id())
    with pytest.raises(LeaseLostError):
        await stores.append(claimed, b"more", expected_sequence=2)
    stores.wait(10 * LEASE_MS)
    assert not await stores.claim()
    assert (await stores.runs.read("a", record.run_id, 1)).ended


async def test_a_cancel_reaches_the_holder_and_is_kept(stores: Stores) -> None:
    claimed = await stores.hold()
    record = await stores.runs.cancel("a", claimed.run.run_id)
    assert record.cancelled and record.phase is Phase.RUNNING
    (state,) = await stores.runs.renew([lease_of(claimed)], LEASE_MS)
    assert state.held and state.cancelled
    stores.wait(LEASE_MS + 1)
    (again,) = await stores.claim()
    assert again.run.cancelled
    await stores.end(again, Phase.CANCELLED)


async def test_a_cancelled_run_that_loses_its_holder_is_ended_at_once(stores: Stores) -> None:
    """Mutant cancelled_run_waits_for_its_losses. It ends the process that holds it, again and
    again, so somebody cancels it; others of the tenant have taken its place meanwhile."""
    await stores.hold(active_max=1)
    stores.wait(LEASE_MS)
    (lost,) = await stores.claim()
    assert lost.losses == 1
    await stores.runs.cancel("a", lost.run.run_id)
    # While its holder may be at work it counts among the active.
    other = await stores.queue(active_max=1)
    assert not await stores.claim()
    stores.wait(LEASE_MS)
    room = ClaimRoom(endings_max=4)
    (ended,) = (await stores.runs.claim("h", 0, LEASE_MS, room)).runs
    assert (ended.run.run_id, ended.to_end) == (lost.run.run_id, True)
    (claimed,) = await stores.claim()
    assert claimed.run.run_id == other.run_id
    await stores.end(ended, Phase.CANCELLED)


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PAUSED, Phase.WAITING])
async def test_a_cancel_makes_a_run_ready_that_nobody_holds(stores: Stores, phase: Phase) -> None:
    claimed = await stores.hold(active_max=1)
    far = stores.now_ms + 10**9
    await stores.append(claimed, b"x", phase=phase, ready_ms=far, waiting_step=1)
    if phase is Phase.QUEUED:
        (other,) = await stores.claim()
        assert other.run.run_id == claimed.run.run_id
        await stores.append(other, phase=phase, expected_sequence=2)
    # Ending it needs no room among the active, or a full tenant's runs could not be cancelled.
    await stores.queue(active_max=1)
    held = await stores.claim(1) if phase is not Phase.QUEUED else []
    record = await stores.runs.cancel("a", claimed.run.run_id)
    assert record.cancelled and record.phase is Phase.QUEUED
    found = {one.run.run_id: one for one in await stores.claim()}
    assert found[claimed.run.run_id].run.cancelled
    assert len(held) in (0, 1)


@pytest.mark.parametrize("phase", [Phase.PAUSED, Phase.WAITING])
async def test_a_cancelled_run_does_not_wait(stores: Stores, phase: Phase) -> None:
    """The cancel came while the holder decided to wait: nobody else would ever look at it."""
    claimed = await stores.hold()
    await stores.runs.cancel("a", claimed.run.run_id)
    later = stores.now_ms + 10**9
    await stores.append(claimed, b"x", phase=phase, ready_ms=later, waiting_step=1)
    (again,) = await stores.claim()
    assert again.run.cancelled and again.run.run_id == claimed.run.run_id


async def test_classes_go_first_and_tenants_take_turns(stores: Stores) -> None:
    for tenant in "aaab":
        await stores.queue(tenant, priority=3)
    for tenant in "ccd":
        await stores.queue(tenant, priority=1)
    served = [(await stores.claim(1))[0].run for _ in range(7)]
    assert [run.priority for run in served] == [1, 1, 1, 3, 3, 3, 3]
    assert sorted(run.tenant for run in served[:2]) == ["c", "d"]
    assert sorted(run.tenant for run in served[3:5]) == ["a", "b"]


async def test_a_batch_is_shared_between_tenants(stores: Stores) -> None:
    for tenant in "a" * 10 + "b" * 10 + "c":
        await stores.queue(tenant)
    got = [one.run.tenant for one in await stores.claim(9)]
    assert {name: got.count(name) for name in "abc"} == {"a": 4, "b": 4, "c": 1}


async def test_only_so_many_of_a_tenant_are_active(stores: Stores) -> None:
    for _ in range(4):
        await stores.queue("a", active_max=2)
    await stores.queue("b", active_max=2)
    first = await stores.claim()
    assert sorted(one.run.tenant for one in first) == ["a", "a", "b"]
    batch = await stores.runs.claim("h", 9, LEASE_MS)
    assert not batch.runs and batch.next_ms > 0  # nobody is to ask again at once
    of_a = [one for one in first if one.run.tenant == "a"]
    await stores.append(of_a[0], b"w", phase=Phase.WAITING)
    (third,) = await stores.claim()
    assert not await stores.claim()
    await stores.end(third)
    assert len(await stores.claim()) == 1
    # A lease that lapsed makes room too, for that same run.
    stores.wait(LEASE_MS + 1)
    assert len(await stores.claim()) == 3


async def test_a_run_without_active_max_is_never_held_back(stores: Stores) -> None:
    await stores.hold(active_max=1)
    await stores.queue(active_max=1)
    free = await stores.queue(active_max=0)
    (claimed,) = await stores.claim()
    assert claimed.run.run_id == free.run_id


async def test_open_runs_are_counted_exactly(stores: Stores) -> None:
    first = await stores.hold(open_max=2)
    await stores.queue(open_max=2)
    await stores.queue(open_max=0)
    with pytest.raises(TooManyRunsError):
        await stores.queue(open_max=2)
    await stores.append(first, b"w", phase=Phase.WAITING, waiting_step=1)  # no longer counted
    third = await stores.queue(open_max=2)
    await stores.runs.resume("a", first.run.run_id, 1, b"", new_id())  # counted again
    with pytest.raises(TooManyRunsError):
        await stores.queue(open_max=3)
    for claimed in await stores.claim():
        if claimed.run.run_id in (first.run.run_id, third.run_id):
            await stores.end(claimed)
    await stores.queue(open_max=2)
    with pytest.raises(TooManyRunsError):
        await stores.queue(open_max=2)


async def test_runs_are_listed_newest_first_in_pages(stores: Stores) -> None:
    made = [(await stores.queue()).run_id for _ in range(7)]
    got, before = [], 0
    while True:
        page = await stores.runs.page("a", 3, before=before)
        assert all(not run.spec and run.summary == b"new" for run in page.runs)
        got += [run.run_id for run in page.runs]
        before = page.next_number
        if not before:
            break
        await stores.queue()  # what comes later is on no later page
    assert got == made[::-1]
    claimed = (await stores.claim(2))[0]
    await stores.end(claimed, Phase.FAILED)
    for phase, count in ((Phase.FAILED, 1), (Phase.RUNNING, 1), (Phase.PAUSED, 0)):
        found = await stores.runs.page("a", 10, phase=phase)
        assert [run.phase for run in found.runs] == [phase] * count


async def test_events_are_read_in_bounded_pages(roomy: Stores) -> None:
    claimed = await roomy.hold()
    body = b"x" * 1_000_000
    for n in range(5):
        await roomy.append(claimed, body, expected_sequence=1 + n)
    page = await roomy.runs.read("a", claimed.run.run_id, 1)
    assert len(page.events) == 4 and page.more and page.last == 6
    page = await roomy.runs.read("a", claimed.run.run_id, 5)
    assert len(page.events) == 2 and not page.more
    await roomy.append(claimed, b"x" * 4_000_000, expected_sequence=6)
    page = await roomy.runs.read("a", claimed.run.run_id, 7)
    assert len(page.events) == 1  # one event goes whatever its size


async def test_a_claim_is_bounded_in_bytes(roomy: Stores) -> None:
    for tenant in "aabbb":
        await roomy.queue(tenant, spec=b"x" * 1_400_000)
    await roomy.queue("c", spec=b"x" * 4_000_000)
    got: list[str] = []
    while len(got) < 6:
        batch = await roomy.claim()
        size = sum(len(one.run.spec) for one in batch)
        assert batch and (size <= 3 << 20 or len(batch) == 1)
        got += [one.run.tenant for one in batch]
    assert sorted(got) == list("aabbbc")


async def test_a_large_run_has_its_turn_beside_small_ones(roomy: Stores) -> None:
    """Mutant large_run_has_no_turn. Others always have something that fits in a claim of two,
    and one of them always has large ones too."""
    large = {(await roomy.queue(tenant, spec=b"x" * 2_000_000)).run_id for tenant in "mn"}
    for _ in range(10):
        await roomy.queue("b", spec=b"x" * 2_000_000)
        for tenant in "ayz":
            await roomy.queue(tenant)
        batch = await roomy.claim(2)
        assert batch and sum(len(one.run.spec) for one in batch) < 3 << 20
        large -= {one.run.run_id for one in batch}
    assert not large


async def test_bounds_are_exact_and_an_end_always_fits(stores: Stores) -> None:
    claimed = await stores.hold()
    with pytest.raises(RunFullError, match="run_bytes_max"):
        await stores.append(claimed, b"x" * 100_000)
    assert await stores.append(claimed, *[b"e"] * 9) == 10
    with pytest.raises(RunFullError, match="run_events_max"):
        await stores.append(claimed, b"e", expected_sequence=10)
    await stores.append(claimed, phase=Phase.QUEUED, expected_sequence=10)  # needs no room
    (claimed,) = await stores.claim()
    assert await stores.append(claimed, b"x" * 200_000, phase=Phase.FAILED) == 11
    with pytest.raises(RunFullError, match="run_bytes_max"):
        await stores.queue(spec=b"x" * 100_000)
    with pytest.raises(RunFullError, match="run_events_max"):
        await stores.queue(events=(b"e",) * 11)
    for _ in range(2):
        await stores.queue(spec=b"x" * 98_000)
    with pytest.raises(RunsFullError, match="runs_bytes_max"):
        await stores.queue(spec=b"x" * 98_000)
    await stores.queue("b", spec=b"x" * 98_000)  # another tenant has room of its own


async def test_open_runs_are_bounded(stores: Stores) -> None:
    for _ in range(LIMITS.open_max):
        await stores.queue()
    with pytest.raises(RunsFullError, match="runs_open_max"):
        await stores.queue()
    claimed = (await stores.claim(1))[0]
    await stores.append(claimed, b"w", phase=Phase.WAITING)
    with pytest.raises(RunsFullError):
        await stores.queue()
    await stores.end((await stores.claim(1))[0])
    await stores.queue()


async def test_ended_runs_go_after_their_time_and_give_their_room_back(stores: Stores) -> None:
    ended = []
    for _ in range(3):
        claimed = await stores.hold(spec=b"x" * 90_000)
        await stores.end(claimed)
        ended.append(claimed.run.run_id)
    stores.wait(LIMITS.kept_ms - 1_000)
    assert len((await stores.runs.page("a", 10)).runs) == 3
    for _ in range(2):  # for which the events of the ended ones make room
        await stores.queue(spec=b"x" * 90_000)
    assert len((await stores.runs.page("a", 10)).runs) == 5
    stores.wait(2_000)
    for _ in range(2):
        await stores.queue(spec=b"x" * 90_000)
    for run_id in ended:
        with pytest.raises(RunUnknownError):
            await stores.runs.get("a", run_id)


async def test_a_claim_says_when_to_come_again(stores: Stores) -> None:
    batch = await stores.runs.claim("h", 1, LEASE_MS)
    assert not batch.runs and batch.next_ms > 10_000
    for _ in range(2):
        await stores.queue()
    batch = await stores.runs.claim("h", 1, LEASE_MS)
    assert len(batch.runs) == 1 and batch.next_ms == 0
    batch = await stores.runs.claim("h", 1, LEASE_MS)
    assert len(batch.runs) == 1 and 0 < batch.next_ms <= LEASE_MS
