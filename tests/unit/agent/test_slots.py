"""Who gets the slots of an agent service.

Goal: whatever one tenant or a later class holds, there is room for another tenant and for the first
classes, and what has only to be ended needs none. Oracle: the rules in agent_svc/domain/slots.py,
and when runs ended. In virtual time; no seed.

Seen to fail on the mutants agent_slots_of_one_tenant, agent_slots_not_kept,
agent_endings_need_a_slot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent_svc.adapters.worker import Limits
from agent_svc.domain.model import End, Message
from agent_svc.domain.slots import ENDINGS_MAX, Shares, room
from agent_svc.run_ports import Phase
from tests.unit.agent.test_worker import end, end_reason, virtual
from tests.unit.agent.world import WIDE, Run, World

SHARES = Shares(tenant=0.75, urgent=0.1)


@pytest.mark.parametrize(("tenants", "each"), [(1, 150), (2, 85), (3, 60), (10, 19)])
def test_tenants_that_want_everything_get_equal_shares_and_leave_room(
    tenants: int, each: int
) -> None:
    held: Counter[str] = Counter()
    names = [f"t{n}" for n in range(tenants)]
    while True:
        before = sum(held.values())
        for name in names:
            found = room(SHARES, 200, +held, 0, 1)
            held[name] += min(found.runs, found.tenants.get(name, found.tenant))
        if sum(held.values()) == before:
            break
    # One more or less, by who asked last.
    assert all(abs(count - each) <= 1 for count in held.values()), held
    found = room(SHARES, 200, held, 0, 16)
    assert found.is_limited
    assert (found.runs > 0, found.tenant > 0) == (True, True)


@pytest.mark.parametrize("slots", range(1, 9))
def test_a_tenant_without_a_run_gets_one_while_a_slot_is_free(slots: int) -> None:
    held = {"t": slots - 1} if slots > 1 else {}
    assert room(SHARES, slots, held, 0, 16).tenant == 1
    full = room(SHARES, slots, {"t": slots}, 0, 16)
    assert (full.runs, full.later, full.tenant, full.tenants) == (0, 0, 0, {"t": 0})
    assert full.is_limited and full.endings == ENDINGS_MAX


def test_the_last_slots_are_not_for_the_later_classes() -> None:
    assert room(SHARES, 200, {}, 0, 16).later == 180
    assert room(SHARES, 200, {"t": 100, "u": 79}, 0, 16).later == 1
    kept = room(SHARES, 200, {"t": 100, "u": 80}, 3, 16)
    assert (kept.later, kept.runs, kept.endings) == (0, 16, ENDINGS_MAX - 3)
    # A service with few slots keeps none: its later classes would never have their turn.
    assert room(SHARES, 4, {"t": 3}, 0, 16).later == 1


def test_a_share_of_all_is_no_share() -> None:
    assert room(Shares(1.0, 0.0), 10, {"t": 4}, 0, 16).tenants == {"t": 6}


def _crowded(world: World, *, slots: int = 4, priority: int = 2) -> list[Run]:
    """An agent service and a tenant whose slow turns want all its slots."""
    world.limits = Limits(runs_max=slots, shares=Shares(0.75, 0.25))
    world.script.replies = ["hello"]
    inner, slow = world.state.messages, asyncio.Event()

    async def messages(tenant: str, session_id: str) -> Sequence[Message]:
        if session_id:
            await slow.wait()
        return await inner(tenant, session_id)

    world.state.messages = messages  # type: ignore[method-assign]
    runs = []
    for n in range(slots):
        world.state.sessions[f"s{n}"] = []
        runs.append(world.run(f"a{n}", session=f"s{n}", tools=(), turn=True))
        runs[-1].priority = priority
    world.agent()
    return runs


def _another(world: World, tenant: str, *, priority: int = 2, wall_s: float = 600.0) -> Run:
    spec = world.state.runs["t", world.run("model", tools=(), turn=True).run_id].spec
    del world.state.runs["t", "model"]  # type: ignore[arg-type]
    assert spec is not None
    spec = replace(spec, budget=replace(WIDE, wall_time_s=wall_s))
    return world.state.create(f"run of {tenant}", spec, tenant=tenant, priority=priority)


@virtual
async def test_a_tenants_turns_leave_a_slot_for_another_tenant(world: World) -> None:
    crowd = _crowded(world)
    await asyncio.sleep(1)
    assert sum(run.phase is Phase.RUNNING for run in crowd) == 3
    other = _another(world, "other")
    took = await world.until(lambda: other.phase is Phase.SUCCEEDED)
    assert took < 1.0


@virtual
async def test_the_later_classes_leave_a_slot_for_the_first_ones(world: World) -> None:
    world.limits = Limits(runs_max=4, shares=Shares(0.75, 0.25))
    world.script.model_s = 1000.0
    world.script.replies = ["hello"]
    later = [_another(world, f"t{n}", priority=3 + n % 2) for n in range(4)]
    world.agent()
    await asyncio.sleep(2)
    assert sum(run.phase is Phase.RUNNING for run in later) == 3
    urgent = _another(world, "urgent")
    assert await world.until(lambda: urgent.phase is Phase.RUNNING) < 1.0


def _full(world: World) -> None:
    """An agent service without a free slot."""
    _crowded(world)
    world.script.model_s = 1000.0
    world.script.replies = ["hello"]
    _another(world, "last")


@virtual
async def test_a_queued_run_is_cancelled_though_no_slot_is_free(world: World) -> None:
    _full(world)
    await asyncio.sleep(1)
    waits = _another(world, "other")
    await asyncio.sleep(10)
    assert waits.phase is Phase.QUEUED
    world.state.cancel(waits)
    await world.until_ended(waits, limit_s=1.0)
    assert end(waits).end is End.CANCELLED


@virtual
async def test_a_queued_run_ends_with_its_wall_time_though_no_slot_is_free(world: World) -> None:
    _full(world)
    await asyncio.sleep(1)
    waits = _another(world, "other", wall_s=30.0)
    await world.until_ended(waits, limit_s=32.0)
    assert end_reason(waits) == "BUDGET_WALL_TIME"
