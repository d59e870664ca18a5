"""Runs at the public service: over gRPC, with a scripted state service and agent path behind it.

Goal: a run is stored before its client hears of it and is the same run however often it is asked
for; what is refused is refused by type and stores nothing; a watch tells every durable event once,
in order, whatever goes away meanwhile; another tenant's run is like an unknown one. Oracle: the
protos' own words and what the state service was asked.

Seen to fail on the mutants run_budget_not_capped, tool_of_another, watch_begins_again,
watch_gives_up_at_once, run_is_everybodys, scheduler_watch_bytes_not_counted and
run_refused_under_another_name.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from scheduler_svc.domain.agent_gate import FleetLoad
from scheduler_svc.domain.run_budget import SomeLimits
from scheduler_svc.domain.slow_watchers import FREE, PACE_S
from sluice.agent.v1 import tools_pb2
from sluice.common.v1 import policy_pb2
from sluice.errors import Code
from sluice.grants import PUBLIC_FOLDER
from sluice.run_credentials import CredentialVerifier
from sluice.scheduler.v1 import runs_pb2, spec_pb2
from sluice.state.v1 import runs_pb2 as stored_pb2
from sluice.state.v1 import values_pb2, values_pb2_grpc
from sluice.status import from_rpc_error
from tests.contract.fake_state import FakeRun
from tests.contract.scheduler_rig import Rig, away, read_all, scheduler_rig, until

RUN = runs_pb2.RunAgentRequest
AUTO = runs_pb2.AGENT_MODE_AUTO
EVENT = runs_pb2.RunEvent
SUCCEEDED = stored_pb2.RUN_PHASE_SUCCEEDED


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with scheduler_rig(tmp_path) as made:
        yield made


def fresh() -> str:
    return str(uuid.uuid4())


def task(**fields: Any) -> runs_pb2.RunAgentRequest:
    """A run's request."""
    if "messages" not in fields:
        fields.setdefault("task", "do it")
    fields.setdefault("request_id", fresh())
    return RUN(**fields)


async def stored(rig: Rig, **fields: Any) -> FakeRun:
    """A run that was submitted."""
    before = len(rig.runs.runs)
    await rig.events("RunAgent", task(background=True, **fields))
    assert len(rig.runs.runs) == before + 1
    return list(rig.runs.runs.values())[-1]


def event(**kind: Any) -> bytes:
    """An event as an agent writes it."""
    return EVENT(**kind).SerializeToString()


def step(number: int) -> bytes:
    return event(model_step=runs_pb2.ModelStep(step=number))


ENDED = event(ended=runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED, answer="done"))


def kinds(events: list[Any]) -> list[str]:
    return [one.WhichOneof("kind") for one in events]


# Admission.


async def test_a_run_is_stored_with_all_that_an_agent_needs(rig: Rig, tmp_path: Path) -> None:
    request = task(
        tools=["search"],
        model="alias",
        priority_class=policy_pb2.PRIORITY_CLASS_BATCH,
        background=True,
    )
    (queued,) = await rig.events("RunAgent", request)
    run = rig.runs.only()
    assert (queued.sequence, queued.queued.gate_reason) == (1, "ALLOWED")
    assert queued.queued.budget == spec_pb2.RunSpec.FromString(run.stored.spec).budget
    assert queued.queued.budget.HasField("steps_max")
    assert queued.run_id == run.stored.run_id == run.create.run_id
    assert rig.link.nudged == [("a", queued.run_id)]
    spec = spec_pb2.RunSpec.FromString(run.stored.spec)
    request.model = "m"
    assert spec.task.request == request
    assert (spec.task.turn, spec.task.context_tokens) == (False, 4096)
    assert (run.create.priority, run.create.active_max, run.create.open_max) == (4, 3, 3)
    verifier = CredentialVerifier(tmp_path / PUBLIC_FOLDER)
    content = verifier.verify(spec.credential, now_unix_s=time.time())
    assert (content.run_id, content.tenant) == (queued.run_id, "a")
    assert (list(content.models), content.priority_class) == (["m", "e"], 4)


async def test_the_deployments_limits_fill_in_and_cap(rig: Rig) -> None:
    """Mutant run_budget_not_capped."""
    asked = runs_pb2.RunBudget(steps_max=9, tokens_max=5000, cost_max=9.0)
    asked.wall_time_max.FromSeconds(90)
    run = await stored(rig, budget=asked)
    budget = spec_pb2.RunSpec.FromString(run.stored.spec).budget
    assert (budget.steps_max, budget.tokens_max, budget.tool_calls_max) == (9, 1000, 10)
    assert (budget.wall_time_max.seconds, budget.cost_max) == (90, 5.0)
    assert run.create.wall_time.seconds == 91  # with slack, to be ended without a slot
    shown = (await rig.ask("GetRun", runs_pb2.GetRunRequest(run_id=run.stored.run_id))).run
    assert shown.budget == budget


async def test_a_tenants_limits_lie_between_those_asked_for_and_the_deployments(rig: Rig) -> None:
    """Mutant tenant_run_limits_ignored."""
    mine = SomeLimits(steps_max=4, tokens_max=10**9, tool_calls_max=0, cost_max=0.5)
    rig.names.change("a", run_limits=mine)
    run = await stored(rig, budget=runs_pb2.RunBudget(steps_max=9, cost_max=0.25))
    budget = spec_pb2.RunSpec.FromString(run.stored.spec).budget
    assert (budget.steps_max, budget.tokens_max, budget.tool_calls_max) == (4, 1000, 0)
    assert budget.cost_max == 0.25
    # A turn of a session is no agent's run.
    turn = await stored(rig, session_id=fresh())
    assert spec_pb2.RunSpec.FromString(turn.stored.spec).budget.steps_max > 4


async def test_the_same_request_is_the_same_run(rig: Rig) -> None:
    request = task(background=True)
    (first,) = await rig.events("RunAgent", request)
    (again,) = await rig.events("RunAgent", request)
    (theirs,) = await rig.events("RunAgent", request, "b")
    assert first.run_id == again.run_id != theirs.run_id
    assert len(rig.runs.runs) == 2


async def test_without_a_request_id_every_call_is_a_run_of_its_own(rig: Rig) -> None:
    made = [
        (await rig.events("RunAgent", task(request_id="", background=True)))[0].run_id
        for _ in range(2)
    ]
    assert made[0] != made[1]
    specs = [spec_pb2.RunSpec.FromString(run.stored.spec) for run in rig.runs.runs.values()]
    assert len({spec.task.request.request_id for spec in specs} - {""}) == 2


async def test_a_refusal_is_recorded_under_the_name_that_its_client_gave_it(rig: Rig) -> None:
    """Mutant run_refused_under_another_name. A header is no request id of a run: a proxy may have
    made it."""
    rig.headers = (("x-request-id", "mine"),)
    request = task(request_id="", tools=["nobodys"])
    await rig.refused("RunAgent", request)
    assert rig.answers.refused_ids == ["mine"]
    request = task(request_id="", background=True)
    names = [(await rig.events("RunAgent", request))[0].run_id for _ in range(2)]
    assert names[0] != names[1]


async def test_a_request_id_is_not_used_for_something_else(rig: Rig) -> None:
    """Mutant request_id_for_anything: it would watch the earlier run without a word."""
    request = task(background=True)
    (first,) = await rig.events("RunAgent", request)
    same = task(request_id=request.request_id.upper(), background=True, mode=AUTO, model="alias")
    assert (await rig.events("RunAgent", same))[0].run_id == first.run_id
    other = task(request_id=request.request_id, task="something else")
    for load in (0.0, 9.0):  # through the gate, and when it is closed
        rig.load = FleetLoad(0.0, load)
        error = await rig.refused("RunAgent", other)
        assert [one.field for one in error.fields] == ["request_id"]
    assert len(rig.runs.runs) == 1


async def test_nor_when_its_run_has_ended_and_made_room_for_others(rig: Rig) -> None:
    """Mutant digest_not_compared: what it asked for is known by a digest only by then."""
    request = task(background=True)
    (first,) = await rig.events("RunAgent", request)
    run = rig.runs.only()
    rig.runs.append(run, b"", phase=stored_pb2.RUN_PHASE_SUCCEEDED)
    assert len(run.stored.request_digest) == 32
    run.stored.spec = b""
    same = task(request_id=request.request_id.upper(), background=True, mode=AUTO, model="alias")
    assert (await rig.events("RunAgent", same))[0].run_id == first.run_id
    other = task(request_id=request.request_id, task="something else")
    for load in (0.0, 9.0):
        rig.load = FleetLoad(0.0, load)
        error = await rig.refused("RunAgent", other)
        assert [one.field for one in error.fields] == ["request_id"]
    run.stored.request_digest = b""  # an earlier release stored it
    rig.load = FleetLoad(0.0, 0.0)
    assert (await rig.events("RunAgent", same))[0].run_id == first.run_id


async def test_a_closed_gate_does_not_hide_the_run_that_was_let_through(rig: Rig) -> None:
    request = task(background=True)
    (first,) = await rig.events("RunAgent", request)
    rig.load = FleetLoad(1.0, 9.0)
    (again,) = await rig.events("RunAgent", request)
    assert again.run_id == first.run_id
    error = await rig.refused("RunAgent", task())
    assert (error.reason, error.metadata["gate_reason"]) == ("AGENT_REFUSED", "SATURATED")
    assert len(rig.runs.runs) == 1


async def test_a_tenant_has_at_most_so_many_open_runs(rig: Rig) -> None:
    rig.names.change("a", concurrent_runs=2)
    runs = [await stored(rig) for _ in range(2)]
    error = await rig.refused("RunAgent", task())
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "AGENT_REFUSED")
    assert error.metadata["gate_reason"] == "TOO_MANY_RUNS"
    assert (error.quotas[0].metric, error.quotas[0].limit) == ("concurrent_runs", 2)
    assert error.retry_after_s is not None
    assert rig.answers.refusals[-1][1] == "TOO_MANY_RUNS"
    answered = await rig.events("RunAgent", task(mode=AUTO))
    assert answered[0].queued.gate_reason == "TOO_MANY_RUNS"
    rig.runs.append(runs[0], ENDED, phase=SUCCEEDED)
    await stored(rig)
    # What waits for a person holds nobody up.
    rig.runs.append(
        runs[1], event(waiting=runs_pb2.RunWaiting(step=1)), phase=stored_pb2.RUN_PHASE_WAITING
    )
    await stored(rig)


async def test_a_tenant_that_may_have_no_runs_has_none(rig: Rig) -> None:
    error = await rig.refused("RunAgent", task(), "none")
    assert error.metadata["gate_reason"] == "TOO_MANY_RUNS"
    assert not rig.runs.runs


async def test_without_a_right_or_an_agent_service_nothing_is_stored(rig: Rig) -> None:
    error = await rig.refused("RunAgent", task(), "plain")
    assert (error.code, error.metadata["gate_reason"]) == (Code.PERMISSION_DENIED, "NOT_ALLOWED")
    rig.link.available = False
    error = await rig.refused("RunAgent", task())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "AGENT_SERVICE_MISSING")
    error = await rig.refused("RunAgent", task(session_id=fresh()), "plain")
    assert error.reason == "AGENT_SERVICE_MISSING"
    rig.link.seen = True
    error = await rig.refused("RunAgent", task())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "AGENT_UNREACHABLE")
    assert error.retry_after_s is not None, "it was there before"
    assert not rig.runs.runs
    for tenant in ("plain", "a"):
        events = await rig.events("RunAgent", task(mode=AUTO), tenant)
        assert kinds(events) == ["queued", "partial_text", "model_step", "ended"]
        assert not events[0].run_id
    assert not rig.runs.runs


async def test_a_state_service_that_is_away_is_told_or_answered_directly(rig: Rig) -> None:
    rig.runs.away, rig.state_up = True, False
    error = await rig.refused("RunAgent", task())
    assert error.code is Code.UNAVAILABLE
    events = await rig.events("RunAgent", task(mode=AUTO))
    assert events[-1].ended.answer == "direct"
    for fields in ({"background": True}, {"tools": ["search"], "tool_choice": 3}):
        error = await rig.refused("RunAgent", task(mode=AUTO, **fields))
        assert error.code is Code.UNAVAILABLE, "a direct answer would not do"


async def test_a_turn_of_a_session_asks_no_gate_and_is_not_counted(rig: Rig) -> None:
    rig.load = FleetLoad(1.0, 9.0)
    session = fresh()
    request = task(session_id=session, background=True)
    (queued,) = await rig.events("RunAgent", request, "plain")
    assert queued.queued.gate_reason == "NOT_ASKED"
    run = rig.runs.only()
    assert run.create.session_id == session
    assert (run.create.open_max, run.create.active_max) == (0, 0)
    assert spec_pb2.RunSpec.FromString(run.stored.spec).task.turn
    error = await rig.refused("RunAgent", task(session_id=session), "none")
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "SESSIONS_NOT_ALLOWED")
    # With tools it is an agent's run, which needs both rights and the gate.
    error = await rig.refused("RunAgent", task(session_id=session, tools=["search"]))
    assert error.metadata["gate_reason"] == "SATURATED"


async def test_tools_are_those_of_the_tenants_list_or_of_a_server_in_it(rig: Rig) -> None:
    """Mutant tool_of_another: the name's beginning is enough."""
    run = await stored(rig, tools=["search", "crm__find", "desk__a__b"])
    assert list(spec_pb2.RunSpec.FromString(run.stored.spec).task.request.tools) == [
        "search",
        "crm__find",
        "desk__a__b",
    ]
    for tool in ("other", "crm_find", "crmx__find", "__find", "find__crm", "Search"):
        error = await rig.refused("RunAgent", task(tools=["search", tool]))
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "TOOL_NOT_ALLOWED")
        assert [one.field for one in error.fields] == ["tools[1]"]
        assert error.message.startswith(f"tools[1]: {tool!r} is not in this tenant's list")
        assert error.metadata["tool"] == tool


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"request_id": "no"}, "request_id"),
    ({"task": ""}, "task"),
    ({"task": "x", "messages": [{"role": "user", "content": "x"}]}, "task"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
    ({"task": "x" * (1 << 20)}, "task"),
    ({"mode": 9}, "mode"),
    ({"tool_choice": 9}, "tool_choice"),
    ({"tool_choice": 2}, "tool_choice"),
    ({"tools": ["search", "search"]}, "tools[1]"),
    ({"tools": [""]}, "tools[0]"),
    ({"tools": [f"t{n}" for n in range(129)]}, "tools"),
    ({"sampling": {"temperature": 9.0}}, "sampling.temperature"),
    ({"sampling": {"n": 2}}, "sampling.n"),
    ({"sampling": {"structured_output": {"json_object": True}}}, "sampling.structured_output"),
    ({"answer_schema_json": "[]"}, "answer_schema_json"),
    ({"answer_schema_json": '{"type": 7}'}, "answer_schema_json"),
    ({"answer_schema_json": '{"$ref": "#"}'}, "answer_schema_json"),
    ({"budget": {"steps_max": 0}}, "budget.steps_max"),
    ({"budget": {"tokens_max": 0}}, "budget.tokens_max"),
    ({"budget": {"cost_max": 0.0}}, "budget.cost_max"),
    ({"budget": {"cost_max": float("nan")}}, "budget.cost_max"),
    ({"budget": {"wall_time_max": {"seconds": 0}}}, "budget.wall_time_max"),
    ({"budget": {"wall_time_max": {"seconds": -5}}}, "budget.wall_time_max"),
    ({"budget": {"wall_time_max": {"seconds": 2, "nanos": -5}}}, "budget.wall_time_max"),
    (
        {"budget": {"wall_time_max": {"seconds": -1, "nanos": 1_500_000_000}}},
        "budget.wall_time_max",
    ),
    ({"session_id": "no"}, "session_id"),
    ({"priority_class": 9}, "priority_class"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG, ids=[str(n) for n in range(len(WRONG))])
async def test_a_wrong_field_is_named_and_nothing_is_stored(
    rig: Rig, fields: dict[str, Any], field: str
) -> None:
    error = await rig.refused("RunAgent", task(**fields))
    assert error.code is Code.INVALID_ARGUMENT
    assert [one.field for one in error.fields] == [field]
    assert not rig.runs.calls


# Watching.


async def watched(rig: Rig, run: FakeRun, first: int = 0) -> Any:
    request = runs_pb2.WatchRunRequest(run_id=run.stored.run_id, from_sequence=first)
    return rig.ask("WatchRun", request)


async def test_a_run_is_watched_to_its_end(rig: Rig) -> None:
    call = rig.ask("RunAgent", task())
    assert (await call.read()).event.HasField("queued")
    run = rig.runs.only()
    rig.runs.text(run, 1, "some ")
    assert (await call.read()).event.partial_text.text == "some "
    rig.runs.append(run, step(1))
    rig.runs.append(run, ENDED, phase=SUCCEEDED)
    rest = await read_all(call)
    assert kinds(rest) == ["model_step", "ended"]
    assert [one.sequence for one in rest] == [2, 3]
    assert {one.run_id for one in rest} == {run.stored.run_id}
    await until(lambda: not rig.watches.open, "the watch is forgotten")


async def test_a_watch_replays_from_any_sequence_number_and_follows(rig: Rig) -> None:
    run = await stored(rig)
    rig.runs.append(run, step(1), step(2))
    rig.runs.text(run, 3, "so ")
    rig.runs.text(run, 3, "far")
    call = await watched(rig, run, 3)
    assert (await call.read()).event.sequence == 3
    rig.runs.text(run, 3, " on")
    rig.runs.append(run, ENDED, phase=SUCCEEDED)
    rest = await read_all(call)
    assert (rest[-1].sequence, kinds(rest)[-1]) == (4, "ended")
    for first, sequences in ((0, [1, 2, 3, 4]), (1, [1, 2, 3, 4]), (4, [4]), (9, [])):
        call = await watched(rig, run, first)
        durable = [one.sequence for one in await read_all(call)]
        assert durable == sequences


async def test_a_newcomer_gets_the_text_so_far(rig: Rig) -> None:
    run = await stored(rig)
    rig.runs.text(run, 1, "so ")
    rig.runs.text(run, 1, "far")
    call = await watched(rig, run, 2)
    text = (await call.read()).event.partial_text
    assert (text.step, text.text, text.replaces) == (1, "so far", True)
    call.cancel()
    await until(lambda: rig.runs.watches == 0, "the state service's watch is over")


async def test_a_watch_survives_the_state_service(rig: Rig) -> None:
    """Mutants watch_begins_again, watch_gives_up_at_once."""
    run = await stored(rig)
    call = await watched(rig, run)
    assert (await call.read()).event.sequence == 1
    with away(rig.runs):
        await until(lambda: rig.runs.calls.count("WatchRun") >= 3, "it asks again")
        rig.runs.append(run, step(1))
    assert (await call.read()).event.sequence == 2
    rig.runs.cut_watches()  # in order
    rig.runs.append(run, ENDED, phase=SUCCEEDED)
    rest = await read_all(call)
    assert [one.sequence for one in rest] == [3]


async def test_a_watch_ends_at_its_deadline_and_says_how_far_it_came(rig: Rig) -> None:
    run = await stored(rig)
    request = runs_pb2.WatchRunRequest(run_id=run.stored.run_id)
    error = await rig.refused("WatchRun", request, timeout=0.6)
    assert error.code is Code.DEADLINE_EXCEEDED
    await until(lambda: not rig.watches.open, "the watch is forgotten")
    assert run.stored.phase == stored_pb2.RUN_PHASE_QUEUED, "the run goes on"


async def test_watches_are_bounded_for_a_tenant(rig: Rig) -> None:
    run = await stored(rig)
    calls = [await watched(rig, run) for _ in range(2)]
    for call in calls:
        await call.read()
    request = runs_pb2.WatchRunRequest(run_id=run.stored.run_id)
    for method, asked in (("WatchRun", request), ("RunAgent", task())):
        error = await rig.refused(method, asked)
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
    assert len(rig.runs.runs) == 1, "nothing is stored that could not be watched"
    assert "TOO_MANY_STREAMS" in rig.limits
    calls[0].cancel()
    await until(lambda: rig.watches.open == 1, "one is over")
    await (await watched(rig, run)).read()


async def test_a_client_that_does_not_read_ends_its_watch_alone(tmp_path: Path) -> None:
    async with scheduler_rig(tmp_path, write_limit_s=1.0) as rig:
        run = await stored(rig)
        slow, other = await watched(rig, run), await watched(rig, run)
        big = event(model_step=runs_pb2.ModelStep(problem="x" * 1_000_000))
        rig.runs.append(run, *[big] * 12)
        seen = 0
        while seen < 13:
            await other.read()
            seen += 1
        await until(lambda: rig.watches.open == 1, "the slow one is ended")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(slow)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        other.cancel()


async def test_a_watch_without_room_waits_for_it_and_misses_nothing(tmp_path: Path) -> None:
    # A quarter of it is the tenant's: one large event at a time.
    async with scheduler_rig(tmp_path, write_limit_s=1.0, watch_bytes_max=4 << 20) as rig:
        run = await stored(rig)
        slow = await watched(rig, run)
        big = event(model_step=runs_pb2.ModelStep(problem="x" * 600_000))
        rig.runs.append(run, *[big] * 12, ENDED, phase=SUCCEEDED)
        await until(lambda: rig.watches.held("a") > 0, "what is not read is counted")
        await asyncio.sleep(0.2)
        other = await watched(rig, run)
        seen = await read_all(other)
        assert [one.sequence for one in seen] == list(range(1, 15))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(slow)
        assert from_rpc_error(caught.value).reason == "SLOW_CONSUMER"
        assert not rig.watches.held("a")


async def test_who_was_ended_for_slowness_comes_back_at_a_bounded_rate(tmp_path: Path) -> None:
    async with scheduler_rig(tmp_path) as rig:
        run = await stored(rig)
        for _ in range(FREE + 2):
            rig.watches.slow.ended("a", asyncio.get_running_loop().time())
        first = await watched(rig, run)
        await first.read()
        refusal = await rig.refused("WatchRun", runs_pb2.WatchRunRequest(run_id=run.stored.run_id))
        assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        assert refusal.retry_after_s is not None and 0 < refusal.retry_after_s <= PACE_S
        await asyncio.sleep(refusal.retry_after_s)
        second = await watched(rig, run)
        await second.read()
        for call in (first, second):
            call.cancel()


async def test_a_scheduler_that_goes_down_ends_watches_by_type(rig: Rig) -> None:
    run = await stored(rig)
    call = await watched(rig, run)
    await call.read()
    rig.watches.close()
    error = await rig.refused("RunAgent", task())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
    await rig.watches.drain(0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(rig.runs.runs) == 1


# What else may be asked of a run.


async def test_a_run_is_shown_as_the_state_service_knows_it(rig: Rig) -> None:
    run = await stored(rig, model="alias")
    summary = runs_pb2.Run(
        steps=2, answer="é" * 2000, run_id="wrong", state=runs_pb2.RUN_STATE_FAILED
    )
    rig.runs.append(run, ENDED, phase=SUCCEEDED, summary=summary.SerializeToString())
    shown = (await rig.ask("GetRun", runs_pb2.GetRunRequest(run_id=run.stored.run_id))).run
    assert (shown.run_id, shown.state) == (run.stored.run_id, runs_pb2.RUN_STATE_SUCCEEDED)
    assert (shown.steps, shown.last_sequence, len(shown.answer)) == (2, 2, 2000)
    assert shown.create_time.seconds and shown.end_time.seconds
    listed = (await rig.ask("ListRuns", runs_pb2.ListRunsRequest())).runs[0]
    assert listed.answer == "é" * 512


async def test_runs_say_their_kind_and_are_listed_by_it(rig: Rig) -> None:
    rig.names.change("a", concurrent_runs=100)
    await stored(rig)
    await stored(rig)
    page = runs_pb2.ListRunsRequest(kind=runs_pb2.RUN_KIND_TASK)
    assert len((await rig.ask("ListRuns", page)).runs) == 2
    for kind in (runs_pb2.RUN_KIND_TURN, runs_pb2.RUN_KIND_INGEST):
        assert not (await rig.ask("ListRuns", runs_pb2.ListRunsRequest(kind=kind))).runs


async def test_runs_are_listed_in_pages_newest_first(rig: Rig) -> None:
    rig.names.change("a", concurrent_runs=100)
    made = [(await stored(rig)).stored.run_id for _ in range(5)]
    seen, token = [], ""
    while True:
        request = runs_pb2.ListRunsRequest(page_size=2, page_token=token)
        page = await rig.ask("ListRuns", request)
        seen += [run.run_id for run in page.runs]
        if not (token := page.next_page_token):
            break
    assert seen == made[::-1]
    waiting = runs_pb2.ListRunsRequest(state=runs_pb2.RUN_STATE_WAITING)
    assert not (await rig.ask("ListRuns", waiting)).runs
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"page_size": 101}, "page_size"),
        ({"state": 99}, "state"),
        ({"kind": 99}, "kind"),
    ]
    for fields, field in wrong:
        error = await rig.refused("ListRuns", runs_pb2.ListRunsRequest(**fields))
        assert [one.field for one in error.fields] == [field]


async def test_cancelling_waits_for_the_end(rig: Rig) -> None:
    run = await stored(rig)
    request = runs_pb2.CancelRunRequest(run_id=run.stored.run_id)
    asking = asyncio.ensure_future(rig.ask("CancelRun", request))
    await until(lambda: run.stored.cancelled, "the mark is set")
    ended = event(ended=runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_CANCELLED))
    rig.runs.append(run, ended, phase=stored_pb2.RUN_PHASE_CANCELLED)
    assert (await asking).run.state == runs_pb2.RUN_STATE_CANCELLED
    # Again, and for one that has ended otherwise: nothing changes.
    assert (await rig.ask("CancelRun", request)).run.state == runs_pb2.RUN_STATE_CANCELLED


async def test_cancelling_does_not_wait_for_ever(rig: Rig) -> None:
    run = await stored(rig)
    begin = time.monotonic()
    request = runs_pb2.CancelRunRequest(run_id=run.stored.run_id, request_id=fresh())
    answer = await rig.ask("CancelRun", request)
    assert answer.run.state == runs_pb2.RUN_STATE_QUEUED
    assert time.monotonic() - begin < 4.0


async def test_a_decision_is_stored_and_an_agent_told(rig: Rig) -> None:
    run = await stored(rig)
    run.stored.phase = stored_pb2.RUN_PHASE_WAITING
    request = runs_pb2.ResumeRunRequest(
        run_id=run.stored.run_id,
        step=4,
        decision=runs_pb2.RESUME_DECISION_SUPPLY_RESULT,
        result_json='{"ok": true}',
        request_id=fresh(),
    )
    rig.link.nudged.clear()
    answer = await rig.ask("ResumeRun", request)
    assert answer.run.state == runs_pb2.RUN_STATE_QUEUED
    told = runs_pb2.RunResumed.FromString(run.stored.decision)
    assert (told.step, told.decision, told.result_json) == (4, request.decision, '{"ok": true}')
    assert rig.link.nudged == [("a", run.stored.run_id)]
    error = await rig.refused("ResumeRun", request)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NOT_WAITING")
    assert error.message == "the run does not wait: it is queued"
    assert error.metadata["state"] == "RUN_STATE_QUEUED"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"step": 0}, "step"),
        ({"decision": 0}, "decision"),
        ({"decision": 9}, "decision"),
        ({"result_json": "{}"}, "result_json"),
        ({"decision": 3, "result_json": "{"}, "result_json"),
        ({"decision": 3, "result_json": "NaN"}, "result_json"),
        ({"decision": 3, "result_json": "[1e999]"}, "result_json"),
        ({"decision": 3, "result_json": '"\\ud800"'}, "result_json"),
        ({"decision": 3}, "result_json"),
        ({"decision": 3, "result_json": '"' + "x" * (1 << 20) + '"'}, "result_json"),
        ({"request_id": "no"}, "request_id"),
        ({"run_id": "no"}, "run_id"),
    ],
)
async def test_a_wrong_decision_is_named(rig: Rig, fields: dict[str, Any], field: str) -> None:
    values: dict[str, Any] = {"run_id": fresh(), "step": 1, "decision": 1} | fields
    error = await rig.refused("ResumeRun", runs_pb2.ResumeRunRequest(**values))
    assert [one.field for one in error.fields] == [field]
    assert not rig.runs.calls


async def test_what_a_decision_lacks_is_told(rig: Rig) -> None:
    base: dict[str, Any] = {"run_id": fresh(), "step": 1}
    error = await rig.refused("ResumeRun", runs_pb2.ResumeRunRequest(**base))
    assert error.fields[0].description == (
        "must be one of RESUME_DECISION_RETRY, RESUME_DECISION_SKIP,"
        " RESUME_DECISION_SUPPLY_RESULT, RESUME_DECISION_CANCEL"
    )
    base["decision"] = runs_pb2.RESUME_DECISION_SUPPLY_RESULT
    error = await rig.refused("ResumeRun", runs_pb2.ResumeRunRequest(**base))
    assert error.fields[0].description.startswith("is missing: ")


async def test_another_tenants_run_is_like_an_unknown_one(rig: Rig) -> None:
    """Mutant run_is_everybodys."""
    run = await stored(rig)
    asks: dict[str, Any] = {
        "GetRun": runs_pb2.GetRunRequest,
        "WatchRun": runs_pb2.WatchRunRequest,
        "CancelRun": runs_pb2.CancelRunRequest,
        "ResumeRun": partial(
            runs_pb2.ResumeRunRequest, step=1, decision=runs_pb2.RESUME_DECISION_RETRY
        ),
        "GetRunBlob": partial(runs_pb2.GetRunBlobRequest, blob="b"),
    }
    for method, kind in asks.items():
        told = []
        for run_id in (run.stored.run_id, fresh()):
            error = await rig.refused(method, kind(run_id=run_id), "b")
            told.append((error.code, error.reason, error.message, error.metadata))
        assert told[0] == told[1]
        assert told[0][:2] == (Code.NOT_FOUND, "RUN_UNKNOWN")
        error = await rig.refused(method, kind(run_id=fresh()), "nobody")
        assert error.code is Code.UNAUTHENTICATED
    assert not (await rig.ask("ListRuns", runs_pb2.ListRunsRequest(), "b")).runs
    assert not run.stored.cancelled


async def test_a_large_result_is_read_in_parts_by_the_tenant_of_its_run(rig: Rig) -> None:
    run = await stored(rig)
    blobs: Any = values_pb2_grpc.BlobServiceStub(rig.state)
    name, content = f"{run.stored.run_id}:2:1", bytes(range(256)) * 5000
    for owner in (run.stored.run_id, fresh()):  # the second one is of no run
        await blobs.PutBlob(
            values_pb2.PutBlobRequest(tenant="a", owner=owner, name=name, content=content)
        )
    request = runs_pb2.GetRunBlobRequest(run_id=run.stored.run_id.upper(), blob=name)
    first = await rig.ask("GetRunBlob", request)
    assert (len(first.content), first.size_bytes) == (1 << 20, len(content))
    request.offset = 1 << 20
    rest = await rig.ask("GetRunBlob", request)
    assert first.content + rest.content == content
    request.offset = 2**64 - 1
    assert (await rig.ask("GetRunBlob", request)).content == b""
    request.offset, request.size_max = 254, 4
    assert (await rig.ask("GetRunBlob", request)).content == b"\xfe\xff\x00\x01"
    for wrong, told in (
        ({"run_id": owner}, "RUN_UNKNOWN"),
        ({"blob": "another"}, "BLOB_UNKNOWN"),
    ):
        given: Any = {"run_id": run.stored.run_id, "blob": name, **wrong}
        unknown = runs_pb2.GetRunBlobRequest(**given)
        assert (await rig.refused("GetRunBlob", unknown)).reason == told
    for field, value in (("run_id", "x"), ("blob", "a/b"), ("blob", ""), ("size_max", 2 << 20)):
        bad: Any = {"run_id": run.stored.run_id, "blob": name, field: value}
        error = await rig.refused("GetRunBlob", runs_pb2.GetRunBlobRequest(**bad))
        assert [one.field for one in error.fields] == [field]


async def test_only_tools_that_the_tenants_runs_may_name_are_listed(rig: Rig) -> None:
    names = ("search", "crm__find", "other", "crm_x")
    rig.link.known = [tools_pb2.ToolState(name=name, available=True) for name in names]
    answer = await rig.ask("ListTools", runs_pb2.ListToolsRequest())
    assert [tool.name for tool in answer.tools if tool.available] == ["crm__find", "search"]
    rig.link.available = False
    error = await rig.refused("ListTools", runs_pb2.ListToolsRequest())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "AGENT_UNREACHABLE")
    assert not (await rig.ask("ListTools", runs_pb2.ListToolsRequest(), "b")).tools


async def test_a_name_of_the_tenants_list_that_gives_no_tool_is_listed_with_the_reason(
    rig: Rig,
) -> None:
    """Seen to fail with only the tools that exist listed."""
    undeclared = "nothing of that name is declared"
    for known, told in (
        ([], {"crm": undeclared, "desk": undeclared, "search__web": undeclared}),
        (
            [("other", ""), ("search", "down"), ("desk__mail", ""), ("crm", "")],
            {"crm": "", "desk__mail": "", "search__web": "down"},
        ),
        (
            [("crm__find", "down"), ("desk", "down"), ("search__news", "")],
            {
                "crm__find": "down",
                "desk": "down",
                "search__web": "nothing of that name is offered there",
            },
        ),
    ):
        rig.link.known = [
            tools_pb2.ToolState(name=name, available=not problem, problem=problem)
            for name, problem in known
        ]
        answer = await rig.ask("ListTools", runs_pb2.ListToolsRequest(), "tools")
        assert [tool.name for tool in answer.tools] == sorted(told)
        assert {tool.name: tool.problem for tool in answer.tools} == told
        assert all(tool.available == (not tool.problem) for tool in answer.tools)
