"""Agent services at work in virtual time: over the twin of the state service and a scripted model.

Goal: a run goes its way whatever happens to who works on it. Oracle: its events, the effects of its
tools by idempotency key, and when things happened. No seed: every schedule is stated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import wraps

import pytest

from agent_svc.domain.model import (
    CallEnded,
    CallStarted,
    Choice,
    Decision,
    Ended,
    Message,
    ModelStep,
    Paused,
    Progress,
    Resumed,
    ToolInfo,
    Waiting,
)
from agent_svc.domain.slots import SHARES, Room, Shares, room
from agent_svc.ports import ToolError
from agent_svc.run_ports import (
    Claims,
    DocumentContent,
    IngestSpec,
    LeaseKey,
    Phase,
    Spec,
    StoredEvents,
    UnreadableError,
)
from sluice.clock import run_virtual
from sluice.errors import Code, SluiceError, exhausted, unavailable
from tests.unit.agent.world import TOOLS, WIDE, Run, ScriptedTools, World, answer, calls


def virtual(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """The test in virtual time, with a world of its own that ends with it."""

    @wraps(test)
    def run() -> None:
        async def scenario() -> None:
            world = World()
            try:
                await test(world)
            finally:
                await world.close()

        run_virtual(scenario())

    del run.__wrapped__  # pytest would see its argument
    return run


def names(run: Run) -> list[str]:
    """The kinds of a run's events."""
    return [type(kind).__name__ for kind in run.kinds]


def end(run: Run) -> Ended:
    """How a run ended."""
    kind = run.kinds[-1]
    assert isinstance(kind, Ended), names(run)
    return kind


def end_reason(run: Run) -> str:
    failure = end(run).failure
    assert failure is not None
    return failure.reason


TWO_STEPS = [calls(("find", {"n": 1}), ("put", {"n": 2})), answer("done")]


# --- The straight way ---------------------------------------------------------------------------


@virtual
async def test_a_run_calls_the_model_and_its_tools_and_ends(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert names(run) == [
        "Queued",
        "ModelStep",
        "CallStarted",
        "CallStarted",
        "CallEnded",
        "CallEnded",
        "ModelStep",
        "Ended",
    ]
    assert (end(run).answer, run.phase) == ("done", Phase.SUCCEEDED)
    assert world.script.effects == {"r1:2": 1, "r1:3": 1}
    assert run.summary is not None
    assert (run.summary.steps, run.summary.tool_calls, run.summary.answer) == (4, 2, "done")
    assert world.state.needless == set()


@virtual
async def test_a_step_costs_one_append_and_a_call_under_way_none(world: World) -> None:
    world.script.replies = [calls(("find", {"n": 1})), calls(("find", {"n": 2})), answer("done")]
    run = world.run()
    world.agent()
    await world.until_ended(run)
    # Each model step leaves with the beginning of its calls, each result alone, the last step with
    # the end.
    assert world.state.calls["append"] == 5


@virtual
async def test_model_calls_and_tool_calls_carry_the_trace_of_the_run(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    traced = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    run = world.run(traceparent=traced)
    world.agent()
    await world.until_ended(run)
    assert world.script.traceparents == [traced] * 4


@virtual
async def test_parallel_calls_run_side_by_side_and_each_end_is_stored_at_once(
    world: World,
) -> None:
    world.script.replies = list(TWO_STEPS)
    world.script.errors = {"find": [ToolError("TOOL_FAILED", "No.", made=False)]}
    world.script.tool_s = 10.0
    run = world.run()
    world.agent()
    took = await world.until(lambda: "CallEnded" in names(run))
    assert took < 6.0  # find fails half way; put goes on
    assert names(run).count("CallEnded") == 1
    took = await world.until(lambda: names(run).count("CallEnded") == 2)
    assert took < 6.0


@virtual
async def test_a_run_that_was_not_needed_is_counted_once(world: World) -> None:
    run = world.run(tools=())
    world.script.replies = ["forty-two"]
    world.agent()
    await world.until_ended(run)
    assert end(run).agent_not_needed
    assert world.state.needless == {run.run_id}
    agent = world.agents[0]
    assert list(agent.counts.needless_readings()) == [(1, {"tenant": "t"})]
    # Nothing but the task was asked: a direct call would have cost the same.
    assert list(agent.counts.extra_cost_readings()) == [(0.0, {"tenant": "t"})]


@virtual
async def test_a_run_that_was_not_needed_is_counted_when_the_count_is_answered(
    world: World,
) -> None:
    """Mutant agent_not_needed_told_but_once."""
    run = world.run(tools=())
    world.state.refused_calls.add("usage")
    world.agent()
    await world.until(lambda: world.state.calls["usage"] == 2)
    assert "Ended" not in names(run)
    world.state.refused_calls.clear()
    await world.until_ended(run)
    assert world.state.needless == {run.run_id}


@virtual
async def test_a_run_with_tools_that_needed_none_says_what_their_offer_cost(world: World) -> None:
    run = world.run()
    world.script.replies = [answer("forty-two")]
    agent = world.agent()
    await world.until_ended(run)
    assert end(run).agent_not_needed
    ((extra, _),) = agent.counts.extra_cost_readings()
    assert 0.0 < extra < 0.25


@virtual
async def test_two_hundred_runs_are_worked_off_at_once(world: World) -> None:
    world.limits = replace(world.limits, shares=Shares(1.0, 0.0))
    world.script.replies = list(TWO_STEPS)
    world.script.model_s = 5.0
    runs = [world.run(f"r{number}") for number in range(300)]
    agent = world.agent()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, agent.worker.active)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await world.until_ended(*runs)
    watching.cancel()
    assert most == 200
    assert all(count == 1 for count in world.script.effects.values())
    assert agent.worker.active == 0
    # Leases of two hundred runs are one call.
    assert world.state.calls["renew"] <= 25


@virtual
async def test_tool_choice_each_goes_through_the_tools_in_their_order(world: World) -> None:
    world.script.replies = [
        calls(("put", {"n": 1})),
        answer("too early"),
        calls(("find", {"n": 1})),
        answer("done"),
    ]
    run = world.run(tools=("put", "find"), choice=Choice.EACH)
    world.agent()
    await world.until_ended(run)
    assert [kind.call.name for kind in run.kinds if isinstance(kind, CallStarted)] == [
        "put",
        "find",
    ]
    assert end(run).answer == "done"


# --- What goes wrong with calls -----------------------------------------------------------------


@virtual
async def test_wrong_calls_are_told_to_the_model_three_times(world: World) -> None:
    world.script.replies = ['{"calls": [{"tool": "find", "arguments": {"n": "x"}}]}']
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "WRONG_CALLS"
    assert names(run).count("ModelStep") == 3
    assert world.script.effects == {}
    told = world.script.prompts[1].messages[-1].content
    step = run.kinds[1]
    assert isinstance(step, ModelStep)
    assert step.problem in told


@virtual
async def test_a_call_that_nobody_answered_is_made_again_with_its_key(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    lost = ToolError("TOOL_LOST", "Lost.", made=True)
    world.script.errors = {"put": [lost, lost]}
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert world.script.effects == {"r1:2": 1, "r1:3": 3}
    assert end(run).answer == "done"


@virtual
async def test_a_failed_call_is_told_to_the_model(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    world.script.errors = {
        "put": [ToolError("TOOL_FAILED", "No.", made=False, content_json='"full"')]
    }
    run = world.run()
    world.agent()
    await world.until_ended(run)
    ends = [kind for kind in run.kinds if isinstance(kind, CallEnded)]
    assert [(kind.result_json, kind.failure is None) for kind in ends] == [
        ('"full"', False),
        ('{"got": {"n": 1}}', True),
    ]
    assert end(run).answer == "done"


@virtual
async def test_a_once_call_that_nobody_answered_waits_for_a_person_and_holds_nothing(
    world: World,
) -> None:
    world.script.replies = [calls(("pay", {"n": 1})), answer("done")]
    world.script.errors = {"pay": [ToolError("TOOL_TIMEOUT", "Late.", made=True)]}
    run = world.run()
    agent = world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    assert isinstance(run.kinds[-1], Waiting)
    await world.until(lambda: not agent.worker.active, 1.0)
    await asyncio.sleep(900)
    assert run.claims == 1
    world.state.resume(run, Resumed(2, Decision.SUPPLY_RESULT, '"paid"'))
    took = await world.until(lambda: run.phase is Phase.SUCCEEDED)
    assert took < 1.0
    assert world.script.effects == {"r1:2": 1}


@virtual
async def test_an_approval_lets_the_call_be_made(world: World) -> None:
    world.script.replies = [calls(("sign", {"n": 1})), answer("done")]
    run = world.run()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    assert world.script.effects == {}
    world.state.resume(run, Resumed(2, Decision.RETRY))
    await world.until_ended(run)
    assert world.script.effects == {"r1:2": 1}


@virtual
async def test_only_a_call_that_needed_an_approval_says_that_it_has_it(world: World) -> None:
    """So a tool that needs one since the call was planned is not called. Mutant:
    every_call_is_approved."""
    world.script.replies = [calls(("find", {"n": 1}), ("sign", {"n": 1})), answer("done")]
    run = world.run()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    world.state.resume(run, Resumed(3, Decision.RETRY))
    await world.until_ended(run)
    assert world.script.approved == {"find": False, "sign": True}


# --- Refused steps ------------------------------------------------------------------------------


@virtual
async def test_a_refused_step_gives_the_run_back_until_its_time(world: World) -> None:
    world.script.replies = [exhausted("QUEUE_FULL", "Busy.", 30.0), "done"]
    run = world.run(tools=())
    agent = world.agent()
    await world.until(lambda: run.phase is Phase.PAUSED)
    await world.until(lambda: not agent.worker.active, 1.0)
    took = await world.until(lambda: run.phase is Phase.SUCCEEDED)
    assert 29.0 < took < 32.0
    paused = run.kinds[1]
    assert isinstance(paused, Paused)
    assert paused.reason == "QUEUE_FULL"


@virtual
async def test_a_short_wait_keeps_the_lease_and_leaves_no_event(world: World) -> None:
    busy = exhausted("QUEUE_FULL", "Busy.", 0.3)
    world.script.replies = [busy]
    run = world.run(tools=())
    world.agent()
    await world.until(lambda: world.script.model_calls["r1.1"] == 2)
    world.script.replies = ["done"]
    await world.until_ended(run)
    assert run.claims == 1
    assert names(run) == ["Queued", "ModelStep", "Ended"]


@virtual
async def test_a_mesh_that_stays_away_ends_the_run_with_its_wall_time(world: World) -> None:
    world.script.replies = [unavailable("NO_INSTANCE", "None.")]
    run = world.run(tools=(), budget=replace(WIDE, wall_time_s=120.0))
    begin = world.clock()
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "BUDGET_WALL_TIME"
    assert world.clock() - begin == pytest.approx(120.0, abs=2.0)
    assert run.claims < 15


@virtual
async def test_a_prompt_that_is_too_long_is_asked_with_less_of_the_history(world: World) -> None:
    long = SluiceError(Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", "Long.")
    world.state.sessions["s"] = [
        Message(role, f"{number} " + "word " * 60)
        for number in range(20)
        for role in ("user", "assistant")
    ]
    run = world.run(tools=(), turn=True, session="s", context_tokens=4000)
    tries = 0
    whole: list[str | SluiceError] = [long, long, "short"]

    async def refuse() -> None:
        nonlocal tries
        while run.phase is not Phase.SUCCEEDED:
            tries = world.script.model_calls["r1.1"]
            world.script.replies = [whole[min(tries, 2)]]
            await asyncio.sleep(0.0005)

    watching = asyncio.create_task(refuse())
    world.agent()
    await world.until_ended(run)
    await watching
    lengths = [len(prompt.messages) for prompt in world.script.prompts]
    assert lengths == sorted(lengths, reverse=True)
    assert len(lengths) == 3
    step = run.kinds[1]
    assert isinstance(step, ModelStep)
    assert step.messages_left_out > 20
    assert world.script.prompts[-1].messages[-1].content == "Do it."


class Absent(ScriptedTools):
    """Tools that are declared and cannot be had until a time."""

    def __init__(self, world: World, until: float) -> None:
        super().__init__(world.script, tuple(TOOLS))
        self._clock, self._until = world.clock, until

    async def infos(self, *, begun: bool = False) -> Sequence[ToolInfo]:
        if self._clock() < self._until:
            raise unavailable("TOOL_UNAVAILABLE", "The tool cannot be had now.", 1.0)
        return await super().infos()


@virtual
async def test_a_run_waits_for_a_tool_that_cannot_be_had_yet(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    absent = Absent(world, world.clock() + 20)
    world.tools = lambda *_: absent
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert names(run)[1] == "Paused"
    (step,) = (event for event in run.events if isinstance(event.kind, ModelStep))
    assert step.time_s - run.create_s > 20


@virtual
async def test_a_decision_outlasts_the_absence_of_its_tool(world: World) -> None:
    world.script.replies = [calls(("sign", {"n": 1})), answer("done")]
    run = world.run()
    first = world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    await first.worker.drain(5.0)
    await first.crash()
    absent = Absent(world, world.clock() + 10)
    world.tools = lambda *_: absent
    world.state.resume(run, Resumed(2, Decision.RETRY))
    world.agent()
    await world.until_ended(run)
    assert world.script.effects == {"r1:2": 1}
    assert end(run).answer == "done"


@virtual
async def test_a_decision_is_taken_though_its_tool_never_comes_back(world: World) -> None:
    """While it waits for people a run uses no time, so nothing else would ever end it."""
    world.script.replies = [calls(("sign", {"n": 1})), answer("done")]
    run = world.run()
    first = world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    await first.worker.drain(5.0)
    await first.crash()
    absent = Absent(world, float("inf"))
    world.tools = lambda *_: absent
    world.state.resume(run, Resumed(2, Decision.RETRY))
    world.agent()
    await world.until_ended(run)
    assert "Resumed" in names(run)
    assert end_reason(run) == "TOOL_UNAVAILABLE"
    assert world.script.effects == {}


@virtual
async def test_a_run_whose_tool_never_comes_says_so_and_can_be_cancelled(world: World) -> None:
    absent = Absent(world, float("inf"))
    world.tools = lambda *_: absent
    never, short, ended = (
        world.run("r1"),
        world.run("r2", budget=replace(WIDE, wall_time_s=10.0)),
        world.run("r3"),
    )
    world.agent()
    await asyncio.sleep(5)
    world.state.cancel(ended)
    assert await world.until(lambda: ended.phase is Phase.CANCELLED) < 1.0
    await world.until_ended(never, short)
    assert end_reason(short) == "BUDGET_WALL_TIME"
    assert end_reason(never) == "TOOL_UNAVAILABLE"
    assert 60 < never.events[-1].time_s - never.create_s < 180


@virtual
async def test_a_run_that_has_its_answer_needs_its_tools_no_more(world: World) -> None:
    """Grants are looked at as those of a run that has begun; the answer ends it all the same."""
    world.script.replies = [calls(("find", {"n": 1})), answer("done")]
    seen: list[bool] = []

    class Leaving(ScriptedTools):
        async def infos(self, *, begun: bool = False) -> Sequence[ToolInfo]:
            seen.append(begun)
            if len(world.script.prompts) == 2:
                raise unavailable("TOOL_UNAVAILABLE", "The tool cannot be had now.", 1.0)
            return await super().infos()

    world.tools = lambda *_: Leaving(world.script, tuple(TOOLS))
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert "Paused" not in names(run)
    assert (seen[0], set(seen[1:])) == (False, {True})


# --- Cancels ------------------------------------------------------------------------------------


async def check_a_cancel_ends_it_at_once(world: World) -> None:
    """Cancels a run in the middle of what takes long in this world."""
    run = world.run()
    world.agent()
    await asyncio.sleep(5)
    world.state.cancel(run)
    assert await world.until(lambda: run.phase is Phase.CANCELLED) < 0.2
    assert end_reason(run) == "RUN_CANCELLED"


@virtual
async def test_a_cancel_ends_the_model_call_within_a_second(world: World) -> None:
    world.script.model_s = 60.0
    await check_a_cancel_ends_it_at_once(world)


@virtual
async def test_a_cancel_ends_the_tool_call_and_says_that_it_was_abandoned(world: World) -> None:
    world.script.replies = [calls(("pay", {"n": 1}))]
    world.script.tool_s = 60.0
    run = world.run()
    world.agent()
    await world.until(lambda: "CallStarted" in names(run))
    await asyncio.sleep(5)
    world.state.cancel(run)
    assert await world.until(lambda: run.phase is Phase.CANCELLED) < 0.2
    closed = run.kinds[-2]
    assert isinstance(closed, CallEnded)
    assert closed.failure is not None
    assert closed.failure.reason == "CALL_ABANDONED"
    assert world.script.ended == {}


@virtual
async def test_a_cancel_whose_order_is_lost_is_found_at_the_next_renewal(world: World) -> None:
    world.script.model_s = 60.0
    world.state.orders_down = True
    run = world.run()
    world.agent()
    await asyncio.sleep(5)
    world.state.cancel(run)
    assert await world.until(lambda: run.phase is Phase.CANCELLED) < 1.6


class Slow(ScriptedTools):
    """Tools that take a minute to be listed, as those of a server that starts, once ``slow``."""

    slow = True

    async def infos(self, *, begun: bool = False) -> Sequence[ToolInfo]:
        if self.slow:
            await asyncio.sleep(60)
        return await super().infos()


@virtual
async def test_a_cancel_does_not_wait_for_tools_to_be_listed(world: World) -> None:
    world.tools = lambda *_: Slow(world.script, tuple(TOOLS))
    await check_a_cancel_ends_it_at_once(world)


@virtual
async def test_a_run_is_handed_over_though_its_tools_are_not_listed_in_time(world: World) -> None:
    """With the calls that it asked for still open: no tool is unknown because nobody looked."""
    world.script.replies = [calls(("find", {"n": 1})), answer("done")]
    tools = Slow(world.script, tuple(TOOLS))
    tools.slow = False
    world.tools = lambda *_: tools

    run = world.run()
    first = world.agent()
    await world.until(lambda: len(world.script.prompts) == 1)
    tools.slow = True
    await asyncio.sleep(5)
    await first.worker.drain(4.0)
    assert run.phase is Phase.QUEUED
    assert names(run) == ["Queued", "ModelStep"]
    tools.slow = False
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert world.script.effects == {"r1:2": 1}


@virtual
async def test_a_cancel_that_comes_while_its_run_is_claimed_is_not_missed(world: World) -> None:
    state, inner = world.state, world.state.claim

    async def late(holder: str, room: Room, lease_s: float) -> Claims:
        claims = await inner(holder, room, lease_s)
        await asyncio.sleep(0.05 if claims.runs else 0.0)
        return claims

    state.claim = late  # type: ignore[method-assign]
    world.script.model_s = 60.0
    run = world.run()
    world.agent()
    await world.until(lambda: run.phase is Phase.RUNNING)
    state.cancel(run)
    assert await world.until(lambda: run.phase is Phase.CANCELLED) < 0.2


@virtual
async def test_a_run_that_waits_is_cancelled_too(world: World) -> None:
    world.script.replies = [calls(("sign", {"n": 1}))]
    run = world.run()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    world.state.cancel(run)
    assert await world.until(lambda: run.phase is Phase.CANCELLED) < 1.0
    assert world.script.effects == {}


# --- Death, take-over and hand-over -------------------------------------------------------------


@virtual
async def test_a_dead_agents_run_is_taken_over_and_its_finished_calls_are_not_made_again(
    world: World,
) -> None:
    world.script.replies = [*TWO_STEPS[:1], calls(("find", {"n": 3})), answer("done")]
    world.script.tool_s = 4.0
    run = world.run()
    first = world.agent()
    await world.until(lambda: names(run).count("CallStarted") == 3)
    await asyncio.sleep(3)  # the third call has had its effect and not ended
    await first.crash()
    world.agent()
    took = await world.until(lambda: run.claims == 2)
    assert took < 5.6  # the lease, and a poll
    await world.until_ended(run)
    assert world.script.effects == {"r1:2": 1, "r1:3": 1, "r1:5": 2}
    assert end(run).answer == "done"


@virtual
async def test_a_once_call_in_doubt_after_a_death_is_never_made_again_by_itself(
    world: World,
) -> None:
    world.script.replies = [calls(("pay", {"n": 1})), answer("done")]
    world.script.tool_s = 4.0
    run = world.run()
    first = world.agent()
    await world.until(lambda: world.script.effects["r1:2"] == 1)
    await first.crash()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    await asyncio.sleep(900)
    assert world.script.effects["r1:2"] == 1
    world.state.resume(run, Resumed(2, Decision.SKIP))
    await world.until_ended(run)
    assert world.script.effects["r1:2"] == 1
    assert end(run).answer == "done"


@virtual
async def test_an_agent_that_hands_over_ends_its_step_first(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    world.script.tool_s = 4.0
    run = world.run()
    first = world.agent()
    await world.until(lambda: "CallStarted" in names(run))
    second = world.agent()
    begin = world.clock()
    await first.worker.drain(20.0)
    assert world.clock() - begin < 5.0
    assert first.worker.active == 0
    await world.until_ended(run, limit_s=3.0)
    assert second.worker.ends.total() == 1
    assert world.script.effects == {"r1:2": 1, "r1:3": 1}


@virtual
async def test_what_is_claimed_while_the_agent_ends_is_handed_over(world: World) -> None:
    first = world.agent()
    await asyncio.sleep(1)
    run = world.run()
    await asyncio.sleep(0.0005)  # the claim is under way
    await first.worker.drain(20.0)
    await first.crash()
    assert run.phase is Phase.QUEUED
    world.agent()
    await world.until_ended(run, limit_s=3.0)


@virtual
async def test_a_step_that_outlasts_the_grace_is_cut_and_the_run_given_back_at_once(
    world: World,
) -> None:
    world.script.model_s = 60.0
    run = world.run()
    first = world.agent()
    await asyncio.sleep(5)
    world.agent()
    begin = world.clock()
    await first.worker.drain(10.0)
    assert world.clock() - begin == pytest.approx(8.0, abs=0.5)
    assert await world.until(lambda: run.claims == 2) < 1.0
    await world.until_ended(run)


@virtual
async def test_an_agent_that_stood_still_does_nothing_more_for_a_run_that_was_taken_over(
    world: World,
) -> None:
    world.script.replies = [calls(("put", {"n": 1})), calls(("put", {"n": 2})), answer("done")]
    world.script.tool_s = 2.0
    run = world.run()
    zombie = world.agent()
    await world.until(lambda: world.script.effects["r1:2"] == 1)
    # It stands still: nobody renews, and its tasks go on only later.
    held = next(iter(zombie.worker._held.values()))
    run.due = world.clock() - 1
    claims = await world.state.claim("agent-9", room(SHARES, 1, {}, 0, 1), 60.0)
    assert len(claims.runs) == 1
    await asyncio.sleep(10)
    assert held.lost
    assert zombie.worker.active == 0
    assert zombie.worker.leases_lost == 1
    # Its call ended; it could not store that, and made no other one.
    assert names(run)[-1] == "CallStarted"
    assert world.script.effects == {"r1:2": 1}


@virtual
async def test_no_effect_begins_while_the_lease_may_have_lapsed(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    world.script.model_s = 10.0
    run = world.run()
    world.agent()
    await asyncio.sleep(3.5)
    # Neither renewals nor claims are answered; appends are, since nobody else has the run.
    world.state.refused_calls = {"renew", "claim"}
    await asyncio.sleep(20)
    assert names(run)[-2:] == ["CallStarted", "CallStarted"]
    assert world.script.effects == {}
    world.state.refused_calls = set()
    run.due = world.clock() + 60  # the renewal comes before anybody's claim
    await world.until_ended(run)
    assert run.claims == 1
    assert set(world.script.effects.values()) == {1}


# --- The state service goes away ----------------------------------------------------------------


@virtual
async def test_a_state_service_that_is_away_for_a_while_loses_nothing(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    world.script.tool_s = 3.0
    run = world.run()
    world.agent()
    await world.until(lambda: world.script.effects["r1:2"] == 1)
    world.state.down = True
    await asyncio.sleep(20)
    world.state.down = False
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert names(run).count("CallEnded") == 2
    assert all(count <= 2 for count in world.script.effects.values())


@virtual
async def test_an_append_whose_answer_is_lost_is_not_made_twice(world: World) -> None:
    world.script.replies = list(TWO_STEPS)
    run = world.run()
    world.state.lost_replies = 5
    world.agent()
    await world.until_ended(run)
    assert names(run).count("ModelStep") == 2
    assert world.script.effects == {"r1:2": 1, "r1:3": 1}


@virtual
async def test_what_the_store_refuses_for_good_ends_the_run_and_frees_its_session(
    world: World,
) -> None:
    world.state.sessions["s"] = []
    run = world.run(tools=(), turn=True, session="s")
    world.state.refuse = SluiceError(Code.FAILED_PRECONDITION, "SESSION_FULL", "Full.")
    world.agent()
    await world.until_ended(run)
    assert names(run) == ["Queued", "ModelStep", "Ended"]
    assert end_reason(run) == "SESSION_FULL"
    assert world.state.sessions["s"] == []


# --- Sessions, text, budgets --------------------------------------------------------------------


@virtual
async def test_a_turn_reads_its_session_and_appends_both_messages(world: World) -> None:
    world.state.sessions["s"] = [Message("system", "Be brief."), Message("user", "Hi")]
    world.script.replies = ["Hello again."]
    run = world.run(tools=(), turn=True, session="s")
    world.agent()
    await world.until_ended(run)
    asked = [message.content for message in world.script.prompts[0].messages]
    assert asked[0] == "Be brief."
    assert asked[-1] == "Do it."
    assert world.state.sessions["s"][2:] == [
        Message("user", "Do it."),
        Message("assistant", "Hello again."),
    ]
    assert not end(run).agent_not_needed


@virtual
async def test_a_task_with_tools_may_have_a_session_too(world: World) -> None:
    world.state.sessions["s"] = [Message("user", "Hi"), Message("assistant", "Ho")]
    world.script.replies = list(TWO_STEPS)
    run = world.run(session="s")
    world.agent()
    await world.until_ended(run)
    assert "Ho" in " ".join(message.content for message in world.script.prompts[0].messages)
    assert [message.content for message in world.state.sessions["s"][2:]] == ["Do it.", "done"]


@virtual
async def test_a_turn_that_fails_leaves_its_session_as_it_was(world: World) -> None:
    world.state.sessions["s"] = []
    world.script.replies = [SluiceError(Code.NOT_FOUND, "MODEL_UNKNOWN", "No.")]
    run = world.run(tools=(), turn=True, session="s")
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "MODEL_UNKNOWN"
    assert world.state.sessions["s"] == []


@virtual
async def test_text_reaches_those_who_watch_in_few_messages_and_whole(world: World) -> None:
    text = "word " * 100
    world.script.replies = [text]
    world.script.model_s = 2.0
    run = world.run(tools=())
    world.agent()
    await world.until_ended(run)
    sent = world.state.texts[run.run_id]
    assert sent[0][2]
    assert not any(replaces for _, _, replaces in sent[1:])
    assert text.startswith("".join(part for _, part, _ in sent))
    assert 10 < len(sent) <= 50


@virtual
async def test_the_wall_time_cuts_a_call_under_way(world: World) -> None:
    world.script.replies = [calls(("find", {"n": 1}))]
    world.script.tool_s = 600.0
    run = world.run(budget=replace(WIDE, wall_time_s=30.0))
    begin = world.clock()
    world.agent()
    await world.until_ended(run)
    assert world.clock() - begin == pytest.approx(30.0, abs=0.5)
    assert end_reason(run) == "BUDGET_WALL_TIME"


@virtual
async def test_an_endless_loop_of_calls_ends_at_the_budget(world: World) -> None:
    world.script.replies = [calls(("find", {"n": number})) for number in range(100)]
    run = world.run(budget=replace(WIDE, tool_calls_max=7))
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "BUDGET_TOOL_CALLS"
    assert world.script.effects.total() == 7


@virtual
async def test_a_call_may_write_what_the_budget_leaves_beside_its_prompt(world: World) -> None:
    run = world.run(tools=(), budget=replace(WIDE, tokens_max=50))
    world.script.replies = ["Done."]
    world.agent()
    await world.until_ended(run)
    # 22 bytes with what a template adds: 8 tokens at most.
    assert world.script.most_tokens == [42]
    assert not end(run).truncated


@virtual
async def test_a_run_ends_before_a_call_that_its_budget_does_not_hold(world: World) -> None:
    run = world.run(budget=replace(WIDE, tokens_max=100))
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "BUDGET_TOKENS"
    assert world.script.prompts == []
    failure = end(run).failure
    assert failure is not None
    assert "too small for the next model call" in failure.message


@virtual
async def test_each_call_is_told_what_is_left_of_the_tokens(world: World) -> None:
    run = world.run()
    world.script.replies = [*TWO_STEPS]
    world.script.prompt_tokens = 300
    world.agent()
    await world.until_ended(run)
    most = WIDE.tokens_max
    assert world.script.total_tokens[:2] == [most, most - 310]


@virtual
async def test_a_call_whose_prompt_the_engine_finds_too_long_ends_the_run(world: World) -> None:
    refused = SluiceError(Code.INVALID_ARGUMENT, "TOTAL_TOKENS", "x")
    world.script.replies = [TWO_STEPS[0], refused]
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "BUDGET_TOKENS"
    failure = end(run).failure
    assert failure is not None and "too small for the next model call" in failure.message
    assert len(world.script.prompts) == 2


@virtual
async def test_no_tool_is_called_once_the_tokens_are_used_up(world: World) -> None:
    world.script.replies = [*TWO_STEPS]
    world.script.prompt_tokens = 100_000
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end_reason(run) == "BUDGET_TOKENS"
    assert world.script.effects == {}
    assert "CallStarted" not in names(run)


@virtual
async def test_an_answer_that_was_cut_off_says_so(world: World) -> None:
    world.script.replies = ["It is ol"]
    world.script.cut_calls = 1
    run = world.run(tools=())
    world.agent()
    await world.until_ended(run)
    step = run.kinds[1]
    assert isinstance(step, ModelStep)
    assert step.cut_off
    assert (end(run).answer, end(run).truncated) == ("It is ol", True)


@virtual
async def test_after_a_reply_that_ran_on_the_model_is_asked_for_less_and_otherwise(
    world: World,
) -> None:
    ran_on = '{"tool": "find", "arguments": {"n": 1' + "0" * 400
    world.script.replies = [ran_on, ran_on, calls(("find", {"n": 1})), answer("done")]
    world.script.cut_calls = 2
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert world.script.most_tokens == [512, 256, 128, 512]
    assert [prompt.otherwise for prompt in world.script.prompts] == [False, True, True, False]
    first, *others = world.script.prompts[:3]
    assert all(prompt.messages == first.messages for prompt in others)
    assert not end(run).truncated


@virtual
async def test_a_reply_that_has_to_be_a_call_is_held_shorter_and_once_longer(
    world: World,
) -> None:
    ran_on = '{"tool": "find", "arguments": {"n": 1' + "0" * 400
    world.script.replies = [ran_on, ran_on, calls(("find", {"n": 1})), answer("done")]
    world.script.cut_calls = 2
    run = world.run(choice=Choice.REQUIRED)
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert world.script.most_tokens == [256, 512, 256, 512]


@virtual
async def test_an_answer_that_only_repeats_the_task_is_asked_for_once_more(world: World) -> None:
    world.script.replies = [calls(("find", {"n": 1})), answer("Do it."), answer("done")]
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "done"
    assert [prompt.otherwise for prompt in world.script.prompts] == [False, False, True]
    assert world.script.prompts[2].messages == world.script.prompts[1].messages


@virtual
async def test_after_the_same_call_twice_the_run_has_to_answer(world: World) -> None:
    one = calls(("find", {"n": 1}))
    world.script.replies = [one, one, "It is found."]
    run = world.run()
    world.agent()
    await world.until_ended(run)
    assert end(run).answer == "It is found."
    assert [bool(prompt.json_schema) for prompt in world.script.prompts] == [True, True, False]


# --- Ingest -------------------------------------------------------------------------------------

INGEST = IngestSpec("notes", "d", 1, "embedder")


def ingest(world: World, words: int) -> Run:
    """Stores a document of so many chunks and the run that ingests it."""
    content = " ".join(f"word{number}" for number in range(words)).encode()
    world.state.documents["t", "notes", "d"] = DocumentContent(content, "text/plain", 1)
    return world.state.create("r1", Spec(INGEST, WIDE, b""))


@virtual
async def test_an_ingest_stores_every_chunk_and_says_how_far_it_is(world: World) -> None:
    run = ingest(world, 10)
    world.agent()
    await world.until_ended(run)
    assert [kind for kind in run.kinds if isinstance(kind, Progress)] == [
        Progress("store", 4, 10),
        Progress("store", 8, 10),
        Progress("store", 10, 10),
    ]
    assert world.state.complete
    assert world.state.chunks[9].vector == b"word"
    assert run.phase is Phase.SUCCEEDED
    assert not end(run).agent_not_needed


@virtual
async def test_a_chunk_that_is_too_long_gets_the_vector_of_its_beginning(world: World) -> None:
    run = ingest(world, 6)
    world.script.embed_chars_max = 20
    document = world.state.documents["t", "notes", "d"]
    long = document.content + b" " + b"x" * 70
    world.state.documents["t", "notes", "d"] = replace(document, content=long)
    world.agent()
    await world.until_ended(run)
    assert run.phase is Phase.SUCCEEDED
    assert world.state.chunks[6].text == "x" * 70
    assert world.script.embeds == 7


@virtual
async def test_an_empty_document_is_complete_without_chunks(world: World) -> None:
    run = ingest(world, 0)
    world.agent()
    await world.until_ended(run)
    assert world.state.complete
    assert world.script.embeds == 0


@virtual
async def test_an_ingest_goes_on_after_a_death_where_it_was(world: World) -> None:
    world.script.model_s = 1.0
    run = ingest(world, 40)
    first = world.agent()
    await world.until(lambda: len(run.events) == 6)
    await first.crash()
    world.agent()
    await world.until_ended(run)
    assert run.claims == 2
    assert world.script.embeds <= 44  # at most one batch twice
    assert sorted(world.state.chunks) == list(range(40))


@virtual
async def test_an_ingest_of_a_document_that_was_replaced_ends(world: World) -> None:
    run = ingest(world, 40)
    world.agent()
    await world.until(lambda: len(run.events) == 3)
    world.state.documents["t", "notes", "d"] = DocumentContent(b"new", "text/plain", 2)
    await world.until_ended(run)
    assert end_reason(run) == "GENERATION_REPLACED"


@virtual
async def test_an_ingest_can_be_cancelled_and_handed_over_between_batches(world: World) -> None:
    world.script.model_s = 1.0
    run = ingest(world, 40)
    first = world.agent()
    await world.until(lambda: len(run.events) == 3)
    second = world.agent()
    await first.worker.drain(20.0)
    await world.until(lambda: run.claims == 2, 1.0)
    assert second.worker.active == 1
    world.state.cancel(run)
    assert await world.until(lambda: run.phase is Phase.CANCELLED) < 0.2
    assert not world.state.complete
    # What was stored of it counts no more.
    await world.until(lambda: not world.state.chunks, 0.1)


@virtual
async def test_a_run_of_a_version_not_understood_is_left_for_a_newer_agent(world: World) -> None:
    run = world.state.create("r1", None)
    agent = world.agent()
    await world.until(lambda: run.phase is Phase.PAUSED)
    assert names(run) == ["Queued"]
    assert agent.worker.active == 0
    world.state.cancel(run)
    await world.until_ended(run, limit_s=1.0)
    assert end_reason(run) == "RUN_CANCELLED"


@virtual
async def test_a_run_that_is_never_understood_ends_with_its_wall_time(world: World) -> None:
    world.script.replies = [exhausted("QUEUE_FULL", "x", 20.0)]
    run = world.run(budget=replace(WIDE, wall_time_s=90.0))
    world.agent()
    await world.until(lambda: run.phase is Phase.PAUSED)

    async def read(lease: LeaseKey, bytes_max: int) -> StoredEvents:
        raise UnreadableError

    world.state.read = read  # type: ignore[method-assign]
    await world.until_ended(run)
    assert end_reason(run) == "BUDGET_WALL_TIME"
    assert 90 < run.events[-1].time_s - run.create_s < 160
