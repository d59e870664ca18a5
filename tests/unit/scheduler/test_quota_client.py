"""The holder's side of quotas in virtual time, against the twin of the store.

Oracle: what callers see, when, and that everything held comes back. Mutants: see each test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_svc.adapters.quota_client import IDLE_S, QuotaClient
from scheduler_svc.domain.quota import QuotaAccount, QuotaTimes
from sluice.errors import SluiceError, unavailable
from sluice.quota.exchange import Answer, Exchange, Limits, QuotaUse
from state_svc.adapters.memory_quota import MemoryQuotaStore

Run = Callable[[Coroutine[Any, Any, Any]], Any]
T = "t"


class Wire:
    """A transport to a memory store that can be slow, mute or broken."""

    def __init__(self) -> None:
        self.store = MemoryQuotaStore()
        self.delay_s = 0.001
        self.lose_answers = 0
        self.broken = False
        self.calls = 0
        self.open = 0

    async def exchange(
        self, holder: str, parts: Sequence[tuple[str, Exchange]], timeout_s: float
    ) -> list[Answer | None]:
        self.calls += 1
        self.open += 1
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.delay_s)
                if self.broken:
                    raise unavailable("PEER_UNAVAILABLE", "gone")
                answers = await self.store.exchange(parts)
                if self.lose_answers:
                    self.lose_answers -= 1
                    await asyncio.sleep(3600)
                return [one if isinstance(one, Answer) else None for one in answers]
        finally:
            self.open -= 1

    async def use(self) -> QuotaUse:
        return await self.store.use(T)


@asynccontextmanager
async def client(
    wire: Wire, limits: Limits, *, fail_open: bool = False, name: str = "a:1"
) -> AsyncIterator[QuotaClient]:
    made = QuotaClient(name, wire, asyncio.get_running_loop().time, QuotaTimes())
    made.set_tenant(T, limits, fail_open=fail_open)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def test_a_tenant_without_limits_never_asks(run_virtual: Run) -> None:
    async def scenario() -> None:
        wire = Wire()
        async with client(wire, Limits()) as quota:
            made = quota.try_reserve(T, 10**9)
            assert made is not None and quota.may_start(made) == float("inf")
            quota.settle(made, 5)
            assert quota.try_reserve("nobody", 1) is not None
            await asyncio.sleep(5.0)
        assert wire.calls == 0

    run_virtual(scenario())


def test_a_reservation_is_settled_once_and_comes_back(run_virtual: Run) -> None:

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(tokens_per_min=100, requests_per_min=10, concurrent_requests=2)
        async with client(wire, limits) as quota:
            made = await quota.reserve(T, 80)
            assert 2.9 < quota.may_start(made) <= 3.0
            quota.started(made)
            for _ in range(3):
                quota.settle(made, 30)
            await asyncio.sleep(1.0)
            assert await wire.use() == QuotaUse(1, 30, 0, 30, 1)
            never_ran = await quota.reserve(T, 70)
            quota.release(never_ran)
            await asyncio.sleep(1.0)
            assert await wire.use() == QuotaUse(1, 30, 0, 30, 1)

    run_virtual(scenario())


def test_tenants_that_hold_nothing_cost_nothing(
    run_virtual: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: every account is looked at whenever something happens to one."""
    looks = 0
    due_at = QuotaAccount.due_at

    def counted(account: QuotaAccount) -> float | None:
        nonlocal looks
        looks += 1
        return due_at(account)

    async def scenario() -> None:
        nonlocal looks
        async with client(Wire(), Limits()) as quota:
            for number in range(300):
                quota.set_tenant(str(number), Limits(requests_per_min=9), fail_open=False)
                quota.release(await quota.reserve(str(number), 1))
            await asyncio.sleep(10.0)  # what was lent is given back
            assert len(quota.accounts) == 300
            monkeypatch.setattr(QuotaAccount, "due_at", counted)
            quota.release(await quota.reserve("7", 1))
            await asyncio.sleep(5.0)
            assert 0 < looks < 100

    run_virtual(scenario())


def test_who_is_cancelled_while_waiting_keeps_nothing(run_virtual: Run) -> None:
    """Mutant: neither account nor client releases a grant that nobody waits for."""

    async def scenario() -> None:
        wire = Wire()
        wire.delay_s = 0.1
        async with client(wire, Limits(concurrent_requests=1)) as quota:
            for _ in range(5):
                asking = asyncio.create_task(quota.reserve(T, 10))
                await asyncio.sleep(0.05)
                asking.cancel()
                await asyncio.sleep(0)
                assert asking.cancelled()
            await asyncio.sleep(1.0)
            assert (await wire.use()).slots == 0
            quota.release(await quota.reserve(T, 10))

    run_virtual(scenario())


def test_a_lost_answer_strands_nothing(run_virtual: Run) -> None:
    """Mutant: a new exchange instead of the same again."""

    async def scenario() -> None:
        wire = Wire()
        wire.lose_answers = 1
        async with client(wire, Limits(concurrent_requests=1)) as quota:
            with pytest.raises(SluiceError) as refused:
                await quota.reserve(T, 10)
            assert refused.value.reason == "QUOTA_UNREACHABLE"
            await asyncio.sleep(1.0)
            made = await quota.reserve(T, 10)
            quota.settle(made, 10)
            await asyncio.sleep(1.0)
            use = await wire.use()
            assert (use.requests, use.tokens, use.slots) == (1, 10, 0)

    run_virtual(scenario())


@pytest.mark.parametrize("fail_open", [True, False])
def test_an_outage_costs_the_first_a_bounded_wait_and_the_others_none(
    run_virtual: Run, fail_open: bool
) -> None:
    """Mutant: every request waits for its own timeout."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        wire = Wire()
        wire.delay_s = 3600.0
        async with client(wire, Limits(requests_per_min=5), fail_open=fail_open) as quota:
            waits = []
            for _ in range(50):
                began = loop.time()
                if fail_open:
                    made = await quota.reserve(T, 1)
                    assert not made.counted and quota.may_start(made) == float("inf")
                    quota.settle(made, 10**6)
                else:
                    with pytest.raises(SluiceError) as refused:
                        await quota.reserve(T, 1)
                    assert refused.value.reason == "QUOTA_UNREACHABLE"
                    assert refused.value.metadata["charged"] == "false"
                waits.append(loop.time() - began)
                await asyncio.sleep(0.01)
            assert waits[0] == pytest.approx(0.25) and max(waits[1:]) == 0.0
            assert wire.open <= 1
            wire.delay_s = 0.001
            await asyncio.sleep(1.0)
            made = await quota.reserve(T, 1)
            assert made.counted
            # What went on uncounted, and what was asked in vain, is not charged.
            assert (await wire.use()).requests == 1

    run_virtual(scenario())


def test_busy_tenants_reserve_without_asking_and_idle_ones_give_everything_back(
    run_virtual: Run,
) -> None:
    """Mutants: every exchange takes one; an idle lease is
    kept."""

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(requests_per_min=30_000, tokens_per_min=10**6)
        async with client(wire, limits) as quota:
            local = 0
            for number in range(2000):
                made = quota.try_reserve(T, 10)
                if number > 1000:
                    local += made is not None
                if made is None:
                    made = await quota.reserve(T, 10)
                quota.settle(made, 10)
                await asyncio.sleep(0.005)
            assert local > 980
            assert wire.calls < 500
            await asyncio.sleep(2.0)
            use = await wire.use()
            assert (use.requests, use.tokens, use.slots) == (2000, 20_000, 0)
            assert quota.accounts[0].idle
            await asyncio.sleep(2 * IDLE_S)
            assert not quota.accounts

    run_virtual(scenario())


def test_a_change_of_limits_takes_effect_at_once(run_virtual: Run) -> None:
    async def scenario() -> None:
        wire = Wire()
        async with client(wire, Limits(requests_per_min=1)) as quota:
            await quota.reserve(T, 1)
            with pytest.raises(SluiceError):
                await quota.reserve(T, 1)
            quota.set_tenant(T, Limits(requests_per_min=2), fail_open=False)
            await quota.reserve(T, 1)

    run_virtual(scenario())


def test_a_lapsed_registration_is_told_and_what_runs_is_taken_over(run_virtual: Run) -> None:
    """Mutant: what runs is not reported to the new registration."""

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(concurrent_requests=2)
        async with client(wire, limits) as first:
            runs, waits = await first.reserve(T, 10), await first.reserve(T, 10)
            first.started(runs)
            wire.broken = True
            await asyncio.sleep(4.0)
            assert first.may_start(waits) <= 0
            other = QuotaClient("b:1", wire, asyncio.get_running_loop().time)
            wire.broken = False
            other.set_tenant(T, limits, fail_open=False)
            task = asyncio.create_task(other.run())
            await asyncio.gather(*(other.reserve(T, 10) for _ in range(2)))
            await asyncio.sleep(2.0)
            assert first.accounts[0].counts.lapsed == 1
            assert first.may_start(waits) <= 0
            assert (await wire.use()).slots == 3  # two of the other, and the one that runs
            first.release(waits)
            first.settle(runs, 25)
            await asyncio.sleep(1.0)
            use = await wire.use()
            assert (use.slots, use.tokens) == (2, 20 + 25)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run_virtual(scenario())


def test_what_was_reported_as_used_is_not_refunded_when_the_holder_dies(run_virtual: Run) -> None:
    """Mutant: progress is not reported."""

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(concurrent_requests=1)
        async with client(wire, limits, name="dies:1") as first:
            made = await first.reserve(T, 100)
            first.started(made)
            first.progressed(made, 40)
            await asyncio.sleep(0.5)
        await asyncio.sleep(4.0)
        async with client(wire, limits, name="lives:1") as second:
            await second.reserve(T, 1)
            assert (await wire.use()).tokens == 41

    run_virtual(scenario())


def test_a_scheduler_that_ends_in_order_leaves_nothing_behind(run_virtual: Run) -> None:
    """Mutant: leases are kept until their end."""

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(requests_per_min=30_000, concurrent_requests=1000)
        async with client(wire, limits) as quota:
            for _ in range(200):
                made = await quota.reserve(T, 10)
                await asyncio.sleep(0.005)
                quota.settle(made, 10)
            assert (await wire.use()).slots > 0
            began = asyncio.get_running_loop().time()
            assert await quota.drain(1.0)
            assert asyncio.get_running_loop().time() - began < 0.2
            use = await wire.use()
            assert (use.requests, use.slots) == (200, 0)

    run_virtual(scenario())


def test_a_slot_given_back_through_another_scheduler_is_waited_for_once(run_virtual: Run) -> None:
    """One after the other is never two at once, although another scheduler's word about the first
    one's end may come after the second. Mutant: the first no for a slot is final."""

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(concurrent_requests=1)
        async with (
            client(wire, limits, name="a:1") as one,
            client(wire, limits, name="b:1") as other,
        ):
            made = await one.reserve(T, 1)
            asked = asyncio.create_task(other.reserve(T, 1))
            await asyncio.sleep(0.02)
            one.settle(made, 1)
            second = await asked
            began = asyncio.get_running_loop().time()
            with pytest.raises(SluiceError) as refused:
                await one.reserve(T, 1)
            waited_s = asyncio.get_running_loop().time() - began
            assert refused.value.reason == "QUOTA_EXCEEDED"
            assert 0.1 <= waited_s < 0.2
            other.settle(second, 1)

    run_virtual(scenario())


def test_a_slot_is_told_to_be_free_at_once_where_slots_are_scarce(run_virtual: Run) -> None:
    """Else with the other settlements, to save exchanges. Mutant: it waits with them."""

    async def scenario() -> None:
        wire = Wire()
        for limit, slots in ((2, 0), (100, 1)):
            limits = Limits(concurrent_requests=limit)
            async with client(wire, limits, name=f"a:{limit}") as quota:
                made = await quota.reserve(T, 1)
                await asyncio.sleep(0.2)
                quota.settle(made, 1)
                await asyncio.sleep(0.01)
                assert (await wire.use()).slots == slots
                await asyncio.sleep(1.0)
                assert (await wire.use()).slots == 0

    run_virtual(scenario())


def test_a_tenant_far_over_its_limit_costs_few_exchanges(run_virtual: Run) -> None:
    """Room that comes back here is seen at once. Mutants: every request asks; a release is not
    seen."""

    async def scenario() -> None:
        wire = Wire()
        limits = Limits(requests_per_min=3)
        async with client(wire, limits) as quota:
            held = [await quota.reserve(T, 1) for _ in range(3)]
            for one in held[1:]:
                quota.settle(one, 1)
            await asyncio.sleep(1.0)
            before = wire.calls
            for _ in range(200):
                with pytest.raises(SluiceError) as refused:
                    await quota.reserve(T, 1)
                assert refused.value.reason == "QUOTA_EXCEEDED"
                assert 57 < (refused.value.retry_after_s or 0) < 66.3
                (quota_of,) = refused.value.quotas
                assert quota_of.subject == f"tenant:{T}"
                assert (quota_of.metric, quota_of.limit) == ("requests_per_min", 3)
                await asyncio.sleep(0.005)
            assert wire.calls - before <= 15
            quota.release(held[0])
            assert (await quota.reserve(T, 1)).counted

    run_virtual(scenario())
