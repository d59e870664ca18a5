"""A model that never comes to an end, as its tenant sees it.

Goal: loops, floods and calls of what is not there end a run by its limits, with the typed outcome
and at its tenant's cost. Method: real processes; the simulated engine plays the model by a script.
Oracle: the last event's state and reason, the counts of the run and the tenant's usage. Seed: none.

Seen to fail on mutants: calls that are not counted; wrong calls that go on; an output limit that is
not looked at (of the tools).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from sluice.common.v1 import input_pb2
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import data_pb2, records_pb2, runs_pb2
from sluice.status import from_rpc_error, from_status
from tests.hermetic.mesh import Mesh
from tests.hermetic.mesh_client import MeshClient, client_of, sim
from tests.security.conftest import DESK_BYTES, OTHER_KEY, SESSION_MESSAGES, SMALL_KEY, SMALL_RUNS
from tests.security.test_tenant_isolation import LIMIT_S, call, fresh, session

ROUNDS = 40


@pytest_asyncio.fixture
async def tenant(agent_mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(agent_mesh, key=OTHER_KEY) as client:
        yield client


def calculate(number: int) -> dict[str, Any]:
    return {"tool": "calculator", "arguments": {"expression": f"{number} + 1"}}


async def run(
    client: MeshClient, replies: Sequence[Any], tools: Sequence[str], **fields: Any
) -> list[runs_pb2.RunEvent]:
    """A run to its end; its events."""
    request = runs_pb2.RunAgentRequest(
        task=sim("Count.", replies=list(replies)), tools=tools, request_id=fresh(), **fields
    )
    return [answer.event for answer in await call(client, "RunAgent", request)]


async def used(client: MeshClient) -> int:
    """Tokens that the tenant was charged for."""
    (usage,) = await call(client, "GetUsage", records_pb2.GetUsageRequest())
    return sum(record.prompt_tokens + record.completion_tokens for record in usage.records)


def reason(ended: runs_pb2.RunEnded) -> str:
    return from_status(ended.status).reason


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"tool_calls_max": 5}, "BUDGET_TOOL_CALLS"),
        ({"steps_max": 6}, "BUDGET_STEPS"),
        ({"tokens_max": 4000}, "BUDGET_TOKENS"),
    ],
)
async def test_an_endless_loop_ends_at_its_budget_and_its_tenant_pays(
    tenant: MeshClient, budget: dict[str, Any], expected: str
) -> None:
    before = await used(tenant)
    loop = [calculate(number) for number in range(ROUNDS)]
    events = await run(tenant, loop, ["calculator"], budget=runs_pb2.RunBudget(**budget))
    ended = events[-1].ended
    assert (ended.state, reason(ended)) == (runs_pb2.RUN_STATE_FAILED, expected)
    request = runs_pb2.GetRunRequest(run_id=events[-1].run_id)
    ((kept,),) = (await call(tenant, "GetRun", request),)
    assert kept.run.tool_calls <= budget.get("tool_calls_max", ROUNDS)
    assert kept.run.steps <= budget.get("steps_max", 2 * ROUNDS)
    tokens = kept.run.usage.prompt_tokens + kept.run.usage.completion_tokens
    assert tokens > 0
    end = time.monotonic() + LIMIT_S
    while await used(tenant) - before < tokens:  # usage is written in batches
        assert time.monotonic() < end, "the run's tokens were not charged"


@pytest.mark.parametrize("mode", [runs_pb2.AGENT_MODE_REQUIRED, runs_pb2.AGENT_MODE_AUTO])
@pytest.mark.parametrize("limit", [40, 100, 160])
async def test_what_a_prompt_really_takes_counts_and_no_call_exceeds_the_limit(
    tenant: MeshClient, mode: runs_pb2.AgentMode.ValueType, limit: int
) -> None:
    # Characters of four bytes, which the simulated tokenizer and most others cut up.
    request = runs_pb2.RunAgentRequest(task="🫠" * 26, request_id=fresh(), mode=mode)
    request.budget.tokens_max = limit
    refused: SluiceError | None = None
    events: list[runs_pb2.RunEvent] = []
    try:
        events = [answer.event for answer in await call(tenant, "RunAgent", request)]
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)  # answered directly: no run, no events
    if refused is not None:
        assert (mode, refused.reason) == (runs_pb2.AGENT_MODE_AUTO, "BUDGET_TOKENS")
        return
    steps = [event.model_step.usage for event in events if event.HasField("model_step")]
    assert sum(usage.prompt_tokens + usage.completion_tokens for usage in steps) <= limit
    ended = events[-1].ended
    assert ended.truncated or reason(ended) == "BUDGET_TOKENS"


async def test_a_run_that_takes_its_time_ends_with_it(tenant: MeshClient) -> None:
    budget = runs_pb2.RunBudget()
    budget.wall_time_max.FromMilliseconds(1500)
    begun = time.monotonic()
    task = sim("Wait.", hang_after=0)
    request = runs_pb2.RunAgentRequest(
        task=task, tools=["calculator"], request_id=fresh(), budget=budget
    )
    events = await call(tenant, "RunAgent", request)
    assert reason(events[-1].event.ended) == "BUDGET_WALL_TIME"
    assert time.monotonic() - begun < 10.0


async def test_the_same_call_again_and_again_ends_the_run(tenant: MeshClient) -> None:
    beside = [{"calls": [calculate(1), calculate(2 + number)]} for number in range(ROUNDS)]
    events = await run(tenant, beside, ["calculator"])
    assert reason(events[-1].ended) == "REPEATED_CALLS"
    # Alone, only an answer is left after the second; what is no answer ends the run, too.
    events = await run(tenant, [calculate(1)] * ROUNDS, ["calculator"])
    assert reason(events[-1].ended) == "WRONG_CALLS"
    assert len([event for event in events if event.HasField("tool_call_started")]) == 2


@pytest.mark.parametrize("name", ["RunAgent", "sluice__run", "ask", "nobody__x", "calculator__x"])
async def test_what_was_not_granted_is_never_called_and_ends_the_run(
    tenant: MeshClient, name: str
) -> None:
    """A model that would start runs of its own, or call what its tenant has and the run has not."""
    wrong = [{"tool": name, "arguments": {"task": str(number)}} for number in range(ROUNDS)]
    events = await run(tenant, wrong, ["calculator"])
    assert reason(events[-1].ended) == "WRONG_CALLS"
    assert not [event for event in events if event.HasField("tool_call_started")]
    (runs,) = await call(tenant, "ListRuns", runs_pb2.ListRunsRequest(page_size=1))
    assert runs.runs[0].run_id == events[-1].run_id


async def test_an_output_of_any_size_ends_at_the_tools_limit(tenant: MeshClient) -> None:
    """Too large: the call has failed. Large: the model gets the beginning, the rest is a blob."""
    replies = [
        {"tool": "desk__huge", "arguments": {"bytes": 3 * DESK_BYTES}},
        {"tool": "desk__huge", "arguments": {"bytes": 40_000}},
        {"answer": "done"},
    ]
    events = await run(tenant, replies, ["desk"])
    ends = [event.tool_call_ended for event in events if event.HasField("tool_call_ended")]
    assert from_status(ends[0].status).reason == "TOOL_OUTPUT_TOO_LARGE"
    assert ends[1].truncated
    assert ends[1].size_bytes == 40_002
    assert len(ends[1].result_json) <= 8 << 10
    assert events[-1].ended.answer == "done"
    assert max(event.ByteSize() for event in events) < 64 << 10


async def test_a_server_of_tools_that_is_down_touches_no_run_that_does_not_use_it(
    tenant: MeshClient,
) -> None:
    events = await run(tenant, [calculate(1), {"answer": "done"}], ["calculator"])
    assert events[-1].ended.answer == "done"
    (listed,) = await call(tenant, "ListTools", runs_pb2.ListToolsRequest())
    states = {tool.name: tool for tool in listed.tools}
    assert states["calculator"].available
    assert not states["nobody"].available
    assert states["nobody"].problem


async def test_one_run_more_than_a_tenant_may_have_is_refused(agent_mesh: Mesh) -> None:
    """At the limit every run is taken; one more is refused with its reason, and taken once one of
    the others has ended."""
    async with client_of(agent_mesh, key=SMALL_KEY) as client:

        async def begin() -> str:
            task = sim("Wait.", hang_after=0)
            request = runs_pb2.RunAgentRequest(
                task=task, tools=["calculator"], request_id=fresh(), background=True
            )
            (first, *_) = await call(client, "RunAgent", request)
            return str(first.event.run_id)

        runs = [await begin() for _ in range(SMALL_RUNS)]
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await begin()
            refused = from_rpc_error(caught.value)
            assert (refused.code, refused.metadata.get("gate_reason", refused.reason)) == (
                Code.RESOURCE_EXHAUSTED,
                "TOO_MANY_RUNS",
            )
        for run_id in runs:
            cancel = runs_pb2.CancelRunRequest(run_id=run_id, request_id=fresh())
            await call(client, "CancelRun", cancel)
        again = await begin()
        await call(client, "CancelRun", runs_pb2.CancelRunRequest(run_id=again, request_id=fresh()))


async def test_one_message_more_than_a_session_holds_is_refused(tenant: MeshClient) -> None:
    session_id = await session(tenant, fresh())
    message = input_pb2.ChatMessage(role="user", content="more")
    for count in itertools.count(2):
        request = data_pb2.AppendSessionRequest(
            session_id=session_id, messages=[message], request_id=fresh()
        )
        try:
            (kept,) = await call(tenant, "AppendSession", request)
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            break
        assert kept.session.message_count == count <= SESSION_MESSAGES
    assert count == SESSION_MESSAGES + 1
    assert refused.reason == "SESSION_FULL"
    (whole,) = await call(tenant, "GetSession", data_pb2.GetSessionRequest(session_id=session_id))
    assert len(whole.messages) == SESSION_MESSAGES
