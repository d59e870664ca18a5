"""The event loop's lateness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sluice.clock import VirtualTimeLoop
from sluice.loop_lag import PERIOD_S, LoopLag


def test_a_reading_is_the_longest_lateness_since_the_last(
    run_virtual: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        lag = LoopLag()
        lag.start()
        await asyncio.sleep(1.0)
        assert lag.read() == pytest.approx(0.0, abs=1e-6)
        for blocked_s in (2.0, 0.5):
            await asyncio.sleep(0.05)
            loop.stall(blocked_s)
            await asyncio.sleep(0.5)
        assert 2.0 - PERIOD_S <= lag.read() <= 2.0
        assert lag.read() == 0.0
        lag.stop()

    run_virtual(scenario())
