"""Runs that are to end while something stands in the way: a full store, an append that is cut.

Goal: a cancel, a wall time and a drain end a run or hand it over at once, whatever the store
refuses, and what is told of the run says why. Oracle: its events, its summary, and when. In virtual
time; no seed.

Seen to fail on the mutants agent_full_sessions_asked_for_ever, agent_full_store_asked_for_ever,
agent_cut_append_forgotten, agent_end_without_its_reason, agent_call_told_and_not_made.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from agent_svc.domain.model import End
from agent_svc.ports import ToolError
from agent_svc.run_ports import Append, LeaseKey, Phase
from sluice.errors import Code, SluiceError, exhausted
from tests.unit.agent.test_worker import end, end_reason, names, virtual
from tests.unit.agent.world import WIDE, Run, World, answer, calls

MINUTE = replace(WIDE, wall_time_s=60.0)


@virtual
async def test_a_turn_for_which_the_tenants_sessions_have_no_room_fails_with_that(
    world: World,
) -> None:
    world.script.replies = ["hello"]
    world.state.sessions["s"] = []
    world.state.session_refusal = exhausted("SESSIONS_FULL", "Full.", 10.0)
    run = world.run(session="s", tools=(), turn=True, budget=MINUTE)
    world.agent()
    await world.until_ended(run, limit_s=5.0)
    assert (run.phase, end_reason(run)) == (Phase.FAILED, "SESSIONS_FULL")
    assert world.state.sessions["s"] == []
    assert run.summary is not None and run.summary.failure is not None
    assert (run.summary.failure.reason, run.summary.answer) == ("SESSIONS_FULL", "")


def _stuck(world: World) -> Run:
    """A run whose first step the full store does not take."""
    world.script.replies = [calls(("find", {"n": 1})), answer("done")]
    world.state.full = True
    run = world.run(budget=MINUTE)
    world.agent()
    return run


@virtual
async def test_a_full_store_is_waited_out(world: World) -> None:
    run = _stuck(world)
    await asyncio.sleep(20)
    assert names(run) == ["Queued"]
    world.state.full = False
    await world.until_ended(run)
    assert (end(run).answer, run.claims) == ("done", 1)


@virtual
async def test_a_run_that_waits_for_a_full_store_can_be_cancelled(world: World) -> None:
    run = _stuck(world)
    await asyncio.sleep(20)
    world.state.cancel(run)
    await world.until_ended(run, limit_s=2.0)
    assert (run.phase, end_reason(run)) == (Phase.CANCELLED, "RUN_CANCELLED")
    # The call was not made, and nothing says that it began: that would leave it in doubt.
    assert names(run) == ["Queued", "ModelStep", "Ended"]
    assert world.script.effects == {}


@virtual
async def test_a_run_that_waits_for_a_full_store_ends_with_its_wall_time(world: World) -> None:
    run = _stuck(world)
    await world.until_ended(run, limit_s=62.0)
    assert (run.phase, end_reason(run)) == (Phase.FAILED, "BUDGET_WALL_TIME")
    assert run.summary is not None and run.summary.failure is not None
    assert run.summary.failure.reason == "BUDGET_WALL_TIME"


@virtual
async def test_what_is_told_of_a_run_says_why_its_store_refused_it(world: World) -> None:
    world.script.replies = [calls(("find", {"n": 1})), answer("x")]
    world.state.refuse = SluiceError(Code.FAILED_PRECONDITION, "RUN_FULL", "Full.")
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "RUN_FULL"
    assert names(run) == ["Queued", "ModelStep", "Ended"] and world.script.effects == {}
    assert run.summary is not None and run.summary.failure == end(run).failure


def _late_answers(world: World) -> Run:
    """A run of which the end of a call is stored while another goes on; the answers of the store
    come late, so that a cancel can fall between what happened and its answer."""
    world.script.replies = [calls(("find", {"n": 1}), ("put", {"n": 2})), answer("x")]
    world.script.tool_s = 10.0
    world.script.errors["find"] = [ToolError("TOOL_FAILED", "x", made=False)]
    state, inner = world.state, world.state.append

    async def late(lease: LeaseKey, append: Append) -> int:
        size = await inner(lease, append)
        await asyncio.sleep(0.05)
        return size

    state.append = late  # type: ignore[method-assign]
    run = world.run()
    world.agent()
    return run


@virtual
async def test_a_cancel_that_cuts_an_append_costs_no_lease(world: World) -> None:
    run = _late_answers(world)
    await world.until(lambda: "CallEnded" in names(run))
    world.state.cancel(run)
    await world.until_ended(run, limit_s=1.0)
    assert (end(run).end, run.claims) == (End.CANCELLED, 1)
    assert names(run).count("CallEnded") == 2


@virtual
async def test_a_drain_that_cuts_an_append_costs_no_lease(world: World) -> None:
    run = _late_answers(world)
    await world.until(lambda: "CallEnded" in names(run))
    await world.agents[0].worker.drain(0.0)
    assert (run.phase, run.claims) == (Phase.QUEUED, 1)
    world.agent()
    await world.until_ended(run)
    assert (end(run).answer, run.claims) == ("x", 2)
