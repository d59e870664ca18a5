"""Rooms are shared out among tenants in turn; virtual time.

Oracle: who is in a room when, by the rule of the docstring. Seen to fail on the mutant
rooms_first_come_first_served.
"""

from __future__ import annotations

import asyncio

from sluice.clock import run_virtual
from sluice.fair_rooms import FairRooms


class Work:
    """Pieces of work of tenants, and when each began and ended."""

    def __init__(self, rooms: FairRooms) -> None:
        self.rooms = rooms
        self.began: list[tuple[str, float]] = []
        self.inside = 0
        self.most = 0

    def start(self, tenant: str, for_s: float) -> asyncio.Task[None]:
        async def work() -> None:
            async with self.rooms.room(tenant):
                self.began.append((tenant, asyncio.get_running_loop().time()))
                self.inside += 1
                self.most = max(self.most, self.inside)
                try:
                    await asyncio.sleep(for_s)
                finally:
                    self.inside -= 1

        return asyncio.ensure_future(work())


def test_a_tenant_with_much_work_leaves_a_room_to_others() -> None:
    async def scenario() -> None:
        work = Work(FairRooms(2, 1))
        tasks = [work.start("flood", 10.0) for _ in range(6)]
        await asyncio.sleep(1.0)
        began_s = asyncio.get_running_loop().time()
        tasks.append(work.start("other", 1.0))
        await tasks[-1]
        assert asyncio.get_running_loop().time() - began_s == 1.0
        await asyncio.gather(*tasks)
        assert work.most == 2

    run_virtual(scenario())


def test_tenants_that_wait_are_served_in_turn() -> None:
    async def scenario() -> None:
        work = Work(FairRooms(1, 1))
        tasks = [work.start("a", 1.0) for _ in range(3)]
        await asyncio.sleep(0.1)
        tasks += [work.start(tenant, 1.0) for tenant in ("b", "c", "b")]
        await asyncio.gather(*tasks)
        assert [tenant for tenant, _ in work.began] == ["a", "a", "b", "c", "a", "b"]

    run_virtual(scenario())


def test_who_goes_away_while_waiting_takes_no_room() -> None:
    async def scenario() -> None:
        work = Work(FairRooms(1, 1))
        await work.rooms.enter("a")
        left = [work.start("b", 1.0) for _ in range(2)]
        last = work.start("c", 1.0)
        await asyncio.sleep(0.1)
        left[0].cancel()
        work.rooms.leave("a")
        left[1].cancel()  # the room was given to it in this very step
        await last
        await asyncio.gather(*left, return_exceptions=True)
        assert [tenant for tenant, _ in work.began] == ["c"]
        await work.start("b", 1.0)
        assert not work.rooms._waiting and not work.rooms._held

    run_virtual(scenario())


def test_sizes_count_and_a_tenant_without_any_never_waits() -> None:
    async def scenario() -> None:
        rooms = FairRooms(10, 6, first_always=True)
        assert rooms.enter_now("a", 6) and rooms.enter_now("b", 4)
        assert not rooms.enter_now("a") and not rooms.enter_now("b")
        assert rooms.enter_now("c", 20)  # alone beyond every bound, once
        assert not rooms.enter_now("c")
        order: list[str] = []

        async def wait(name: str, tenant: str, size: int) -> None:
            await rooms.enter(tenant, size)
            order.append(name)

        tasks = [asyncio.ensure_future(wait(*one)) for one in (("b1", "b", 2), ("b2", "b", 1))]
        await asyncio.sleep(0.1)
        rooms.leave("c", 20)
        assert not rooms.held("c")
        rooms.leave("a", 6)
        await asyncio.sleep(0.1)
        assert order == ["b1"] and rooms.held("b") == 6
        rooms.leave("b", 4)
        await asyncio.gather(*tasks)
        assert order == ["b1", "b2"] and rooms.held("b") == 3

    run_virtual(scenario())
