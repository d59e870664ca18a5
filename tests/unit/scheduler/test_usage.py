"""Usage, prices and engine seconds.

Goal: every request that ended is told to the state service exactly once, whatever fails in between,
and engine seconds add up to the time in which an engine had work. Method: a service in memory that
loses answers; random histories. Oracle: plain sums. Mutants: see each test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.adapters.quota_keeper import Consumption
from scheduler_svc.adapters.usage_log import SUMS_MAX, UsageLog
from scheduler_svc.domain.engine_time import EngineTime
from scheduler_svc.domain.model import Outcome, Ticket
from scheduler_svc.domain.prices import Prices
from scheduler_svc.main import Parts
from sluice.state.v1 import usage_pb2

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Ledger:
    """A usage service that adds each batch once and can lose answers."""

    def __init__(self) -> None:
        self.lose = 0
        self.refuse = False
        self.seen: set[str] = set()
        self.requests = 0
        self.tokens = 0
        self.calls = 0

    async def AppendUsage(self, request: usage_pb2.AppendUsageRequest, timeout: float) -> None:
        self.calls += 1
        await asyncio.sleep(0.01)
        if self.refuse:
            raise _error(grpc.StatusCode.INVALID_ARGUMENT)
        if request.batch_id not in self.seen:
            self.seen.add(request.batch_id)
            for record in request.records:
                self.requests += sum(record.requests.values())
                self.tokens += record.completion_tokens
        if self.lose:
            self.lose -= 1
            raise _error(grpc.StatusCode.UNAVAILABLE)


def _error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, empty, details="scripted")


def _ticket(tenant: str = "a", model: str = "m") -> Ticket:
    return cast("Ticket", SimpleNamespace(tenant=tenant, model=model))


USED = Consumption(3, 0, 5, True)


def test_what_was_lost_on_the_way_is_told_again_and_added_once(run_virtual: Run) -> None:
    """Mutants: a failed batch is dropped; it is sent under a new id."""

    async def scenario() -> None:
        ledger = Ledger()
        usage = UsageLog("s:1", ledger, clock=lambda: 7200.0)
        running = asyncio.create_task(usage.run())
        ledger.lose = 3
        for number in range(100):
            usage.ended(_ticket(f"t{number % 3}"), Outcome.FINISHED, USED, 0.5, 0.1)
            await asyncio.sleep(0.1)
        running.cancel()
        assert await usage.drain(3.0)
        assert (ledger.requests, ledger.tokens, usage.waiting) == (100, 500, 0)

    run_virtual(scenario())


def test_the_end_of_the_process_tells_what_ended_last(run_virtual: Run) -> None:
    """Mutant: it does not."""

    async def scenario() -> None:
        ledger = Ledger()
        usage = UsageLog("s:1", ledger)
        usage.ended(_ticket(), Outcome.FINISHED, USED)
        other = SimpleNamespace(drain=AsyncMock(), close=AsyncMock())
        parts = SimpleNamespace(
            quota=other, usage=usage, decisions=other, state_channel=other, watches=None
        )
        await Parts.close(cast("Parts", parts))
        assert ledger.requests == 1
        other.close.assert_awaited_once()

    run_virtual(scenario())


def test_the_end_of_the_process_does_not_wait_for_ever(run_virtual: Run) -> None:
    async def scenario() -> None:
        ledger = Ledger()
        ledger.lose = 10**6
        usage = UsageLog("s:1", ledger)
        usage.ended(_ticket(), Outcome.FINISHED, USED)
        began = asyncio.get_running_loop().time()
        assert not await usage.drain(3.0)
        assert asyncio.get_running_loop().time() - began < 3.1

    run_virtual(scenario())


def test_what_the_service_will_never_take_is_dropped_and_counted(run_virtual: Run) -> None:
    """Mutant: it is sent for ever, and nothing of its tenant after it."""

    async def scenario() -> None:
        ledger = Ledger()
        ledger.refuse = True
        usage = UsageLog("s:1", ledger)
        usage.ended(_ticket(), Outcome.FINISHED, USED)
        await usage.send()
        assert (usage.lost, usage.waiting) == (1, 0)
        ledger.refuse = False
        usage.ended(_ticket(), Outcome.FINISHED, USED)
        assert await usage.drain(1.0)
        assert ledger.requests == 1

    run_virtual(scenario())


async def test_sums_are_bounded() -> None:
    """Mutant: no bound."""
    usage = UsageLog("s:1", Ledger())
    for number in range(SUMS_MAX + 5):
        usage.ended(_ticket(model=str(number)), Outcome.FINISHED, USED)
    assert (usage.waiting, usage.lost) == (SUMS_MAX, 5)


async def test_without_a_state_service_nothing_is_kept() -> None:
    usage = UsageLog("s:1", None)
    usage.ended(_ticket(), Outcome.FINISHED, USED)
    assert usage.waiting == 0


@given(st.lists(st.tuples(st.sampled_from("be"), st.integers(0, 40)), max_size=60))
def test_engine_seconds_add_up_to_the_time_with_work(steps: list[tuple[str, int]]) -> None:
    """Mutant: each request is given the whole time."""
    time = EngineTime()
    now, busy_s, given_s = 0.0, 0.0, 0.0
    marks: list[float] = []
    for step, wait in [*steps, *[("e", 3)] * len(steps)]:
        busy_s += wait if marks else 0.0
        now += wait
        if step == "b":
            marks.append(time.begin(4, now))
        elif marks:
            given_s += time.end(4, marks.pop(0), now)
        assert time.running(4) == len(marks)
    assert given_s == pytest.approx(busy_s)


def test_engine_seconds_are_shared_with_the_requests_of_other_schedulers() -> None:
    time = EngineTime()
    mark = time.begin(0, 10.0)
    time.report(0, 4, 11.0)
    assert time.so_far(0, mark, 15.0) == pytest.approx(1.0 + 4.0 / 4)
    assert time.end(0, mark, 15.0) == pytest.approx(2.0)


def test_prices() -> None:
    prices = Prices(["org/m=1.5:6", "free=0:0"])
    assert prices.cost("org/m", 2_000_000, 500_000) == pytest.approx(6.0)
    assert prices.cost("other", 10, 10) == 0.0


@pytest.mark.parametrize("bad", ["m", "m=", "m=1", "m=1:x", "=1:2", "m=-1:2", "m=nan:1", "m=1:1e9"])
def test_a_bad_price_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        Prices([bad])


def test_two_prices_of_one_model_are_refused() -> None:
    with pytest.raises(ValueError, match="two prices"):
        Prices(["m=1:1", "m=2:2"])
