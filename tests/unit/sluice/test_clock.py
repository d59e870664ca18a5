"""Virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from sluice.clock import START_S, NothingLeftError, VirtualTimeLoop, run_virtual


def test_hours_pass_in_no_time_and_timers_fire_at_their_own_instant() -> None:
    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        for delay in (3600.0, 0.1, 7.3, 86_400.0 * 3):
            loop.call_later(delay, lambda: fired.append(loop.time()))
        await asyncio.sleep(86_400.0 * 4)
        return fired

    began = time.monotonic()
    assert run_virtual(scenario()) == [
        START_S + delay for delay in (0.1, 7.3, 3600.0, 86_400.0 * 3)
    ]
    assert time.monotonic() - began < 5.0


def test_timeouts_work_in_virtual_time() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == START_S + 30.0


def test_a_loop_that_would_wait_for_ever_says_so() -> None:
    with pytest.raises(NothingLeftError):
        run_virtual(asyncio.Event().wait())


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(1000.0, pytest.fail, "time passed")
        await asyncio.to_thread(time.sleep, 0.01)
        return loop.time()

    assert run_virtual(scenario()) == START_S


def test_a_stall_makes_timers_late() -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        task = asyncio.create_task(asyncio.sleep(1.0))
        await asyncio.sleep(0)
        loop.stall(10.0)
        await task
        return loop.time()

    assert run_virtual(scenario()) == START_S + 10.0


def test_the_same_scenario_runs_the_same_way_twice() -> None:
    async def scenario() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        trace: list[tuple[float, int]] = []

        async def work(n: int) -> None:
            for step in range(5):
                await asyncio.sleep((n * 7 + step * 3) % 5 / 10)
                trace.append((loop.time(), n))

        async with asyncio.TaskGroup() as group:
            for n in range(20):
                group.create_task(work(n))
        return trace

    assert run_virtual(scenario()) == run_virtual(scenario())


def test_a_timer_that_is_a_hair_ahead_does_not_come_early(virtual_loop: VirtualTimeLoop) -> None:
    """Mutant seen to fail: a fixed resolution of a nanosecond."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            due_at = loop.time() + 1e-12
            come = asyncio.Event()
            loop.call_at(due_at, come.set)
            loop.call_soon(int)  # with something to do the loop does not jump
            await come.wait()
            assert loop.time() >= due_at
            await asyncio.sleep(3_000.0)

    virtual_loop.run_until_complete(main())
