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
        first = work.start("a", 1.0)
        await asyncio.sleep(0.1)
        left = [work.start("b", 1.0) for _ in range(2)]
        last = work.start("c", 1.0)
        await asyncio.sleep(0.1)
        left[0].cancel()
        await first
        left[1].cancel()  # at the very moment at which the room is given to it
        await last
        await asyncio.gather(*left, return_exceptions=True)
        assert [tenant for tenant, _ in work.began] == ["a", "c"]
        await work.start("b", 1.0)
        assert not work.rooms._waiting and not work.rooms._held

    run_virtual(scenario())
