"""No crash and no interleaving between two scripts strands a run.

Goal: a stored run that is ready is claimed soon, whoever died between which two scripts, and
however a claim of somebody else fell between them. Method: every order in which the scripts of an
operation and of a claim can run on a real Valkey, at a clock that only the test moves, and every
point at which the one or the other can die; then somebody polls. Once with a place that is in use,
once with one that is about to be removed. Oracle: the run is claimed within the time that the
module of the index states, or was never stored. Seed: none, all are tried.

Seen to fail on the mutants run_place_written_once, run_place_not_written_before,
run_place_set_later, run_place_removed_at_once, run_places_passed_over_hide_others,
run_peeks_at_the_first_places_only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import permutations
from typing import Any

import pytest

from state_svc.adapters import run_sweep, valkey_run_index
from state_svc.adapters.memory_stores import MemoryRegistry
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_run_index import LATE_MS, LOOK_AGAIN_MS, PLACES_MAX, UNUSED_MS
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.domain.claim_order import ClaimRoom
from state_svc.domain.run_book import LOSS_WAIT_MS
from state_svc.domain.run_values import Phase, RunUnknownError
from state_svc.ports import Kind, StoreUnavailableError
from tests.contract.state_rig import LEASE_MS, Stores, a_run, new_id, stores_of
from tests.valkey import ValkeyProcess, valkey

SCRIPTS = 3  # of an operation that makes a run ready, and of a claim: before, tenant, after
POLL_MS = 500


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture
async def stores(server: ValkeyProcess) -> AsyncIterator[Stores]:
    async with stores_of("valkey", server.url) as found:
        yield found


class SteppedLink:
    """A link on which each script waits for leave, and on which its user can be made to die."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link
        self._asked = asyncio.Event()
        self._leave = asyncio.Event()
        self.done = 0

    async def scripts(self, script: Any, calls: Any) -> Any:
        self._asked.set()
        await self._leave.wait()
        self._leave.clear()
        replies = await self._link.scripts(script, calls)
        self.done += 1
        return replies

    async def script(self, script: Any, keys: Any, arguments: Any) -> Any:
        return (await self.scripts(script, [(keys, arguments)]))[0]

    async def one(self, task: asyncio.Task[Any]) -> None:
        """Lets one script run to its end."""
        before = self.done
        self._leave.set()
        while self.done == before and not task.done():
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)


class Actor:
    """An operation that goes on script by script and dies after ``lives`` of them."""

    def __init__(
        self, stores: Stores, lives: int, act: Callable[[ValkeyRuns], Awaitable[Any]]
    ) -> None:
        assert isinstance(stores.runs, ValkeyRuns)
        self._link = SteppedLink(stores.runs._link)
        runs = ValkeyRuns(self._link)  # type: ignore[arg-type]
        runs.clock_ms = stores.now_ms
        self._lives = lives
        self.task = asyncio.ensure_future(act(runs))

    async def step(self) -> None:
        if self._lives and not self.task.done():
            self._lives -= 1
            await self._link.one(self.task)

    async def die(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def found_after_ms(stores: Stores, run_id: str, most_ms: int) -> int:
    """How long somebody polls until the run is claimed."""
    waited = 0
    while waited <= most_ms:
        if any(one.run.run_id == run_id for one in await stores.claim()):
            return waited
        stores.wait(POLL_MS)
        waited += POLL_MS
    raise AssertionError(f"stranded for {most_ms} ms")


def interleavings() -> Iterator[tuple[str, int, int]]:
    """Orders of A's scripts and those of a claim B, and after how many each dies."""
    for order in sorted(set(permutations("A" * SCRIPTS + "B" * SCRIPTS))):
        for a_lives in range(1, SCRIPTS + 1):
            yield "".join(order), a_lives, SCRIPTS
        for b_lives in range(1, SCRIPTS):
            yield "".join(order), SCRIPTS, b_lives


async def an_old_place(stores: Stores) -> None:
    """A place that was used, and that the next look would remove."""
    await stores.end(await stores.hold())
    stores.wait(UNUSED_MS - 1_000)
    await stores.runs.claim("h", 1, LEASE_MS)
    stores.wait(LOOK_AGAIN_MS + 1_000)


async def try_all(
    stores: Stores, prepare: Callable[[], Awaitable[str]], act: Callable[[ValkeyRuns, str], Any]
) -> None:
    for order, a_lives, b_lives in interleavings():
        run_id = await prepare()
        a = Actor(stores, a_lives, lambda runs, run_id=run_id: act(runs, run_id))  # type: ignore[misc]
        b = Actor(stores, b_lives, lambda runs: runs.claim("b", 1, LEASE_MS))
        for letter in order:
            await (a if letter == "A" else b).step()
        await a.die()
        await b.die()
        try:
            record = await stores.runs.get("a", run_id)
        except RunUnknownError:
            assert a_lives < 2
            continue
        if record.phase is Phase.WAITING:
            assert a_lives < 2
            await stores.runs.cancel("a", run_id)
        # Claimed by B, who may have died: then when that lease is over.
        limit_ms = LOOK_AGAIN_MS + LEASE_MS + POLL_MS
        waited = await found_after_ms(stores, run_id, limit_ms)
        if a_lives == b_lives == SCRIPTS and record.phase is Phase.QUEUED:
            assert waited == 0, order
        for claimed in await all_held(stores):
            await stores.end(claimed)


async def all_held(stores: Stores) -> list[Any]:
    """Every open run, held by this test. Those that have lost two holders already wait a moment."""
    stores.wait(LEASE_MS + LOOK_AGAIN_MS)
    held = await stores.claim()
    stores.wait(LOSS_WAIT_MS)
    held += await stores.claim()
    page = await stores.runs.page("a", 100)
    assert {one.run.run_id for one in held} == {run.run_id for run in page.runs if not run.end_ms}
    return held


@pytest.mark.parametrize("old", [False, True], ids=["in use", "about to go"])
async def test_a_created_run_is_found(stores: Stores, old: bool) -> None:
    async def prepare() -> str:
        if old:
            await an_old_place(stores)
        else:
            await stores.hold()  # a reason to look again later: that must not hide the new one
        return new_id()

    await try_all(stores, prepare, lambda runs, run_id: runs.create(a_run(run_id=run_id)))


@pytest.mark.parametrize("old", [False, True], ids=["in use", "about to go"])
async def test_a_run_that_ends_its_wait_is_found(stores: Stores, old: bool) -> None:
    async def prepare() -> str:
        claimed = await stores.hold()
        await stores.append(claimed, b"w", phase=Phase.WAITING, waiting_step=1)
        if old:
            await an_old_place(stores)
        return claimed.run.run_id

    async def resume(runs: ValkeyRuns, run_id: str) -> None:
        index = runs._index
        latest = await index.before_ready("a", 2)
        await runs._run(
            "a", "resume", run_id, 1, b"yes", new_id(), "", *runs._growth_limits(), latest=latest
        )
        await index.after_ready("a", 2, run_id)

    await try_all(stores, prepare, resume)


async def test_a_run_that_was_given_back_is_found(stores: Stores) -> None:
    for phase in (Phase.QUEUED, Phase.PAUSED):
        for lives in (1, 2):
            claimed = await stores.hold()
            pause_ms = stores.now_ms + 2_000

            async def give_back(
                runs: ValkeyRuns, claimed: Any = claimed, phase: Any = phase, ready: int = pause_ms
            ) -> None:
                stores.runs, own = runs, stores.runs
                try:
                    await stores.append(claimed, b"x", phase=phase, ready_ms=ready)
                finally:
                    stores.runs = own

            actor = Actor(stores, lives, give_back)
            for _ in range(lives):
                await actor.step()
            await actor.die()
            run_id = claimed.run.run_id
            waited = await found_after_ms(stores, run_id, LOOK_AGAIN_MS + 2_000 + POLL_MS)
            if lives == 2:
                assert waited <= (2_500 if phase is Phase.PAUSED else 0)
            for one in await all_held(stores):
                await stores.end(one)


async def test_room_that_was_made_is_used(stores: Stores) -> None:
    held = await stores.hold(active_max=1)
    waiting = await stores.queue(active_max=1)
    assert not await stores.claim()
    await stores.end(held)
    assert [one.run.run_id for one in await stores.claim()] == [waiting.run_id]


async def test_a_script_that_comes_too_late_does_nothing(stores: Stores) -> None:
    """It could follow the removal of its place."""
    assert isinstance(stores.runs, ValkeyRuns)
    run = a_run()
    before_ready = stores.runs._index.before_ready

    async def stopped(tenant: str, priority: int) -> int:
        latest = await before_ready(tenant, priority)
        stores.wait(LATE_MS + 1)
        return latest

    stores.runs._index.before_ready = stopped  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError):
        await stores.runs.create(run)
    with pytest.raises(RunUnknownError):
        await stores.runs.get("a", run.run_id)


async def test_unused_places_go_and_used_ones_stay(stores: Stores) -> None:
    assert isinstance(stores.runs, ValkeyRuns)
    link = stores.runs._link
    paused = await stores.hold("a")
    far = stores.now_ms + 20 * UNUSED_MS
    await stores.append(paused, b"p", phase=Phase.PAUSED, ready_ms=far)
    await stores.end(await stores.hold("b"))
    for _ in range(2 * UNUSED_MS // LOOK_AGAIN_MS):
        stores.wait(LOOK_AGAIN_MS)
        assert not await stores.claim()
    due, written = valkey_run_index._KEYS
    assert await link.run(lambda client: client.zrange(due, 0, -1)) == [b"2:a"]
    assert await link.run(lambda client: client.hkeys(written)) == [b"2:a"]
    await stores.queue("b")
    assert len(await stores.claim()) == 1


async def test_places_that_were_lost_are_written_anew(stores: Stores) -> None:
    assert isinstance(stores.runs, ValkeyRuns)
    registry, link = MemoryRegistry(), stores.runs._link
    made = []
    for number in range(run_sweep.TENANTS_AT_ONCE + 3):
        await registry.put(Kind.TENANTS, f"t{number}", b"")
        made.append((await stores.queue(f"t{number}")).run_id)
    await link.run(lambda client: client.delete(*valkey_run_index._KEYS))
    assert not await stores.claim()
    await run_sweep.RunSweep(registry, stores.runs).once()
    found = await stores.claim() + await stores.claim()
    assert sorted(one.run.run_id for one in found) == sorted(made)


async def test_places_that_there_is_no_room_for_hide_no_others(stores: Stores) -> None:
    """Mutant run_places_passed_over_hide_others. More than a look takes at once wait for room in
    the later classes; a turn of a session came after all of them."""
    many = [(4, f"t{n}", stores.now_ms + n) for n in range(3 * PLACES_MAX)]
    stores.wait(len(many))
    assert isinstance(stores.runs, ValkeyRuns)
    await stores.runs._index.found(many)
    room = ClaimRoom(later_max=0)
    assert not (await stores.runs.claim("h", 8, LEASE_MS, room)).runs
    turn = await stores.queue("t1", priority=1)
    stores.wait(1)
    (claimed,) = (await stores.runs.claim("h", 8, LEASE_MS, room)).runs
    assert claimed.run.run_id == turn.run_id
    # Nor do those of tenants of which an asker takes no more.
    full = [f"t{n}" for n in range(2 * PLACES_MAX)]
    found = (await stores.runs._index.look(without=full)).places
    assert len(found) == PLACES_MAX and not {tenant for _, tenant in found} & {*full}


async def test_an_end_is_found_behind_more_places_than_a_look_takes(stores: Stores) -> None:
    """Mutant run_peeks_at_the_first_places_only. Nobody has room for what stands before it."""
    many = [(2, f"t{n}", stores.now_ms + n) for n in range(2 * PLACES_MAX + 1)]
    stores.wait(len(many))
    assert isinstance(stores.runs, ValkeyRuns)
    await stores.runs._index.found(many)
    cancelled = await stores.queue("z")
    await stores.runs.cancel("z", cancelled.run_id)
    looks = [
        (await stores.runs.claim("h", 0, LEASE_MS, ClaimRoom(endings_max=8))).runs for _ in range(6)
    ]
    assert [one.run.run_id for found in looks for one in found] == [cancelled.run_id]


async def test_nothing_ready_costs_one_round_trip(stores: Stores) -> None:
    assert isinstance(stores.runs, ValkeyRuns)
    held = await stores.hold()
    actor = Actor(stores, 1, lambda runs: runs.claim("h", 64, LEASE_MS))
    await actor.step()
    assert actor.task.done() and not actor.task.result().runs
    await stores.end(held)
