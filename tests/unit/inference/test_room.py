"""Room between streams and plain calls, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from inference_svc.adapters.room import PlainShare, RoomKeeper
from inference_svc.domain.credit import FAST_S, SLOW_S, Room
from sluice.clock import run_virtual
from sluice.errors import Code, SluiceError


@dataclass
class Stream:
    """A holder that holds what it is told."""

    room: Room = field(default_factory=lambda: Room(0, 0))
    bound: int = 0
    told: list[Room] = field(default_factory=list)

    def held(self) -> Room:
        return self.room

    def kv_tokens_bound(self) -> int:
        return self.bound

    def credit_changed(self, credit: Room) -> None:
        self.told.append(credit)


def test_a_change_that_was_put_off_comes_by_itself() -> None:
    async def body() -> None:
        keeper = RoomKeeper(Room(64, 6400))
        first, second = Stream(), Stream()
        number = keeper.join(first)
        keeper.join(second)
        assert first.told == [Room(64, 6400), Room(32, 3200)]
        assert second.told == [Room(32, 3200)]
        keeper.demand(number, Room(60, 3000))
        assert len(first.told) == 2
        await asyncio.sleep(FAST_S * 1.5)
        assert first.told[-1].sequences >= 60
        keeper.demand(number, Room(first.told[-1].sequences + 1, 3000))
        before = len(first.told)
        await asyncio.sleep(SLOW_S * 0.5)
        assert len(first.told) == before
        await asyncio.sleep(SLOW_S)
        assert len(first.told) == before + 1

    run_virtual(body())


def test_what_ends_makes_room_for_who_is_owed_some() -> None:
    async def body() -> None:
        keeper = RoomKeeper(Room(4, 0))
        first, second = Stream(), Stream()
        keeper.join(first)
        first.room = Room(4, 0)
        keeper.join(second)
        assert second.told == []
        first.room = Room(3, 0)
        keeper.released()
        assert second.told == [Room(1, 0)]
        first.room = Room(1, 0)
        keeper.released()
        assert second.told == [Room(1, 0), Room(2, 0)]

    run_virtual(body())


def test_a_prompt_fits_by_what_is_held_now_not_by_what_may_come() -> None:
    async def body() -> None:
        keeper = RoomKeeper(Room(8, 1000))
        first, second = Stream(), Stream()
        one, two = keeper.join(first), keeper.join(second)
        assert keeper.credit(one).kv_tokens == 500
        assert keeper.prompt_fits(one, 400)
        first.room, first.bound = Room(1, 300), 5000
        assert keeper.prompt_fits(one, 200)
        assert not keeper.prompt_fits(one, 201)  # beyond its credit
        assert keeper.prompt_fits(two, 700)  # it holds nothing: one prompt may be larger than that
        assert not keeper.prompt_fits(two, 701)  # but not larger than the engine
        first.room = Room(0, 0)
        assert keeper.prompt_fits(one, 1000)

    run_virtual(body())


def test_plain_calls_take_a_share_while_they_run() -> None:
    async def body() -> None:
        keeper = RoomKeeper(Room(16, 1000))
        stream = Stream()
        keeper.join(stream)
        share = PlainShare(keeper)
        share.enter()
        share.hold(100)
        assert stream.told[-1] == Room(15, 900)
        share.enter()
        with pytest.raises(SluiceError) as caught:
            share.enter()
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        with pytest.raises(SluiceError):
            share.hold(901)
        share.exit(100)
        share.exit(0)
        assert stream.told[-1] == Room(16, 1000)
        assert share.held() == Room(0, 0)
        stream.room = Room(16, 500)
        with pytest.raises(SluiceError):
            share.enter()
        assert stream.told[-1] == Room(16, 1000)

    run_virtual(body())


def test_another_capacity_reaches_everybody() -> None:
    async def body() -> None:
        keeper = RoomKeeper(Room(0, 0))
        stream = Stream()
        keeper.join(stream)
        assert stream.told == []
        keeper.resize(Room(8, 100))
        keeper.resize(Room(8, 100))
        assert stream.told == [Room(8, 100)]
        keeper.resize(Room(0, 0))
        assert stream.told == [Room(8, 100), Room(0, 0)]

    run_virtual(body())
