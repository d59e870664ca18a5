"""Runs, sessions and documents through the whole mesh: Envoy, scheduler, execution, an agent
service, the state service, Valkey.

Goal: what the public service promises of runs holds with everything real but the model: events in
order and again from any number, the same over HTTP; cancels reach engines; people decide; sessions
remember; documents are found; a restart of the state service costs a watch nothing. Method: models
answer by script. Oracle: the events, the stored runs, the engine's own counts.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import json_format

from sluice.agent.v1 import tools_pb2
from sluice.common.v1 import input_pb2, sampling_pb2
from sluice.errors import Code
from sluice.scheduler.v1 import admin_pb2, data_pb2, records_pb2, runs_pb2
from sluice.status import from_rpc_error
from tests.hermetic.admin_client import AdminClient, refused
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually, sim

TOOLS = (
    {"name": "calculator", "description": "Works sums out.", "effect": "read", "calculator": {}},
    {
        "name": "clock",
        "description": "Tells the time.",
        "effect": "read",
        "needs_approval": True,
        "clock": {},
    },
)
SUM = {"tool": "calculator", "arguments": {"expression": "6*7"}}
TIME = {"tool": "clock", "arguments": {}}
DONE = {"answer": "It is 42."}
RUN = runs_pb2.RunAgentRequest


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(
        instances={
            "sim-0": {"decode_step_ms": 2.0, "context_tokens": 8192},
            "embed-0": {"generate": False, "embedding_dimensions": 8, "model": "sim-embed"},
        },
        scheduler={
            "default_model": "sim",
            "agent_utilisation_max": 1.0,
            "decision_sample_ratio": 1.0,
        },
        agents=1,
        tools=TOOLS,
    )
    with mesh(tmp_path_factory.mktemp("runs"), shape) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made


def fresh() -> str:
    return str(uuid.uuid4())


async def ask(client: MeshClient, method: str, request: Any) -> Any:
    """A unary call."""
    return await getattr(client.stub, method)(request, metadata=client.metadata, timeout=20)


async def events(client: MeshClient, method: str, request: Any) -> list[Any]:
    """All events of a call that streams them."""
    call = getattr(client.stub, method)(request, metadata=client.metadata, timeout=40)
    return [message.event async for message in call]


def kinds(seen: list[Any]) -> list[str]:
    """Kinds of the durable events."""
    return [one.WhichOneof("kind") for one in seen if not one.HasField("partial_text")]


async def submitted(client: MeshClient, task: str, **fields: Any) -> str:
    """A run that was left to itself."""
    request = RUN(task=task, request_id=fresh(), background=True, **fields)
    (queued,) = await events(client, "RunAgent", request)
    run_id: str = queued.run_id
    return run_id


async def until_state(
    client: MeshClient, run_id: str, state: runs_pb2.RunState.ValueType
) -> runs_pb2.Run:
    """Waits for a run to be so."""
    for _ in range(400):
        run: runs_pb2.Run = (await ask(client, "GetRun", runs_pb2.GetRunRequest(run_id=run_id))).run
        if run.state == state:
            return run
        await asyncio.sleep(0.05)
    raise AssertionError(f"it is {runs_pb2.RunState.Name(run.state)}")


async def test_a_run_calls_its_tool_and_answers(running: Mesh, client: MeshClient) -> None:
    request = RUN(
        task=sim("What is 6 * 7?", replies=[SUM, DONE]), tools=["calculator"], request_id=fresh()
    )
    seen = await events(client, "RunAgent", request)
    assert kinds(seen) == [
        "queued",
        "model_step",
        "tool_call_started",
        "tool_call_ended",
        "model_step",
        "ended",
    ]
    durable = [one for one in seen if not one.HasField("partial_text")]
    assert [one.sequence for one in durable] == list(range(1, 7))
    assert "42" in durable[3].tool_call_ended.result_json
    assert durable[-1].ended.answer == "It is 42."
    run_id = durable[0].run_id
    run = await until_state(client, run_id, runs_pb2.RUN_STATE_SUCCEEDED)
    assert (run.last_sequence, run.tool_calls, run.answer) == (6, 1, "It is 42.")
    # Again, from the beginning and from the middle; and the same request is the same run.
    watch = runs_pb2.WatchRunRequest(run_id=run_id)
    assert await events(client, "WatchRun", watch) == durable
    watch.from_sequence = 4
    assert await events(client, "WatchRun", watch) == durable[3:]
    assert await events(client, "RunAgent", request) == durable
    # Its model calls are the tenant's requests.
    step = durable[1].model_step
    decision = records_pb2.GetDecisionRequest(request_id=step.request_id)
    record = (await ask(client, "GetDecision", decision)).decision
    assert (record.tenant, record.model) == ("dev", "sim")
    listed = await ask(client, "ListRuns", runs_pb2.ListRunsRequest(page_size=1))
    assert listed.runs[0].run_id == run_id


async def test_the_same_over_http_one_event_a_line(client: MeshClient) -> None:
    body = {
        "task": sim("What is 6 * 7?", replies=[SUM, DONE]),
        "tools": ["calculator"],
        "request_id": fresh(),
    }
    async with client.http.stream("POST", "/v1/runs", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [json.loads(line)["event"] async for line in answer.aiter_lines()]
    assert lines[-1]["ended"]["answer"] == "It is 42."
    run_id = lines[0]["run_id"]
    run = (await client.http.get(f"/v1/runs/{run_id}")).json()["run"]
    assert (run["state"], run["last_sequence"]) == ("RUN_STATE_SUCCEEDED", "6")
    again = (await client.http.get(f"/v1/runs/{run_id}/events?from_sequence=6")).text
    assert [json.loads(line)["event"]["sequence"] for line in again.splitlines()] == ["6"]
    missing = await client.http.get(f"/v1/runs/{fresh()}")
    assert missing.status_code == 404
    assert missing.json()["details"][0]["reason"] == "RUN_UNKNOWN"
    page = (await client.http.get("/v1/runs?page_size=1")).json()
    assert len(page["runs"]) == 1 and page["next_page_token"]


@pytest.mark.parametrize(
    ("body", "status", "reason", "field"),
    [
        ({"task": "x", "request_id": "no"}, 400, "INVALID_FIELD", "request_id"),
        ({"task": "x", "budget": {"steps_max": 0}}, 400, "INVALID_FIELD", "budget.steps_max"),
        ({"task": "x", "tools": ["other"]}, 403, "TOOL_NOT_ALLOWED", "tools[0]"),
        ({"task": "x", "model": "other"}, 404, "MODEL_UNKNOWN", "model"),
        ({"task": "x", "session_id": fresh()}, 404, "SESSION_UNKNOWN", ""),
    ],
)
async def test_a_run_is_refused_alike_over_grpc_and_http(
    client: MeshClient, body: dict[str, Any], status: int, reason: str, field: str
) -> None:
    answer = await client.http.post("/v1/runs", json=body)
    told = answer.json()
    assert (answer.status_code, told["details"][0]["reason"]) == (status, reason)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(client, "RunAgent", json_format.ParseDict(body, RUN()))
    error = from_rpc_error(caught.value)
    assert (error.code.value, error.reason, error.message) == (
        told["code"],
        reason,
        told["message"],
    )
    fields = [one["field"] for each in told["details"] for one in each.get("field_violations", ())]
    assert fields == [one.field for one in error.fields] == ([field] if field else [])


async def test_a_cancelled_run_stops_its_engine(running: Mesh, client: MeshClient) -> None:
    run_id = await submitted(client, sim("write", pace_ms=50), sampling={"max_tokens": 2000})
    await eventually(lambda: running.in_engine("sim-0") == 1, "the model writes")
    took = asyncio.get_running_loop().time()
    answer = await ask(client, "CancelRun", runs_pb2.CancelRunRequest(run_id=run_id))
    assert answer.run.state == runs_pb2.RUN_STATE_CANCELLED
    assert asyncio.get_running_loop().time() - took < 1.5
    await eventually(lambda: running.in_engine("sim-0") == 0, "the engine is idle", 1.0)
    seen = await events(client, "WatchRun", runs_pb2.WatchRunRequest(run_id=run_id))
    assert seen[-1].ended.state == runs_pb2.RUN_STATE_CANCELLED


async def test_a_person_agrees_to_a_call(client: MeshClient) -> None:
    run_id = await submitted(client, sim("time?", replies=[TIME, DONE]), tools=["clock"])
    await until_state(client, run_id, runs_pb2.RUN_STATE_WAITING)
    call: Any = client.stub.WatchRun(
        runs_pb2.WatchRunRequest(run_id=run_id), metadata=client.metadata, timeout=20
    )
    step = 0
    while not step:
        step = (await call.read()).event.waiting.step
    wrong = runs_pb2.ResumeRunRequest(
        run_id=run_id, step=step + 5, decision=runs_pb2.RESUME_DECISION_RETRY
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(client, "ResumeRun", wrong)
    assert from_rpc_error(caught.value).reason == "NOT_WAITING"
    wrong.step = step
    await ask(client, "ResumeRun", wrong)
    rest = []
    while (message := await call.read()) is not grpc.aio.EOF:
        rest.append(message.event)
    assert "resumed" in kinds(rest)
    assert rest[-1].ended.answer == "It is 42."


async def test_a_session_remembers_its_turns(client: MeshClient) -> None:
    created = await ask(client, "CreateSession", data_pb2.CreateSessionRequest(request_id=fresh()))
    session_id = created.session.session_id
    for number, words in enumerate(("first words", "second words"), 1):
        request = RUN(
            task=sim(f"turn {number}", reply=words), session_id=session_id, request_id=fresh()
        )
        seen = await events(client, "RunAgent", request)
        assert seen[0].queued.gate_reason == "NOT_ASKED"
        assert seen[-1].ended.answer == words
    found = await ask(client, "GetSession", data_pb2.GetSessionRequest(session_id=session_id))
    assert [one.role for one in found.messages] == ["user", "assistant"] * 2
    assert found.messages[3].content == "second words"
    # A turn that is under way has the session to itself.
    busy = RUN(
        task=sim("slow", pace_ms=50),
        session_id=session_id,
        request_id=fresh(),
        background=True,
        sampling=sampling_pb2.SamplingParams(max_tokens=2000),
    )
    (queued,) = await events(client, "RunAgent", busy)
    append = data_pb2.AppendSessionRequest(
        session_id=session_id,
        messages=[input_pb2.ChatMessage(role="user", content="x")],
        request_id=fresh(),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(client, "AppendSession", append)
    assert from_rpc_error(caught.value).reason == "SESSION_BUSY"
    await ask(client, "CancelRun", runs_pb2.CancelRunRequest(run_id=queued.run_id))
    after = await ask(client, "AppendSession", append)
    assert after.session.message_count == 5


async def test_a_document_is_found_and_deleted_is_gone(client: MeshClient) -> None:
    content = b"# Returns\n\nA parcel may be returned within 30 days.\n\n# Shipping\n\nBy boat.\n"
    put = await ask(
        client,
        "PutDocument",
        data_pb2.PutDocumentRequest(
            collection="manual",
            document_id="shop/returns.md",
            content=content,
            media_type="text/markdown",
            request_id=fresh(),
        ),
    )
    seen = await events(client, "WatchRun", runs_pb2.WatchRunRequest(run_id=put.run_id))
    assert seen[-1].ended.state == runs_pb2.RUN_STATE_SUCCEEDED, seen[-1]
    get = data_pb2.GetDocumentRequest(collection="manual", document_id="shop/returns.md")
    assert (await ask(client, "GetDocument", get)).document.ready
    search = data_pb2.SearchDocumentsRequest(collection="manual", query="parcel returned days")
    hits = (await ask(client, "SearchDocuments", search)).hits
    assert hits[0].document_id == "shop/returns.md"
    assert content[hits[0].begin_byte : hits[0].end_byte]
    over_http = await client.http.post("/v1/collections/manual/search", json={"query": "parcel"})
    assert over_http.json()["hits"]
    await client.http.delete("/v1/collections/manual/documents/shop/returns.md")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(client, "SearchDocuments", search)
    assert from_rpc_error(caught.value).reason == "COLLECTION_UNKNOWN"


async def test_a_restart_of_the_state_service_costs_a_watch_nothing(
    running: Mesh, client: MeshClient
) -> None:
    sums = [{"tool": "calculator", "arguments": {"expression": f"6*{n}"}} for n in (5, 6, 7)]
    task = sim("What is 6 * 7?", replies=[*sums, DONE], pace_ms=100)
    call: Any = client.stub.RunAgent(
        RUN(task=task, tools=["calculator"], request_id=fresh()),
        metadata=client.metadata,
        timeout=60,
    )
    seen = [(await call.read()).event]
    running["state-0"].kill()
    await asyncio.sleep(0.3)
    running["state-0"].start()
    while (message := await call.read()) is not grpc.aio.EOF:
        seen.append(message.event)
    durable = [one.sequence for one in seen if not one.HasField("partial_text")]
    assert durable == list(range(1, len(durable) + 1))
    assert seen[-1].ended.answer == "It is 42.", seen[-1]
    running.until(lambda: running.serving("state-0"), "the state service is back")


async def test_operators_register_tools_for_a_tenant(running: Mesh, client: MeshClient) -> None:
    admin = AdminClient(running)
    tool = tools_pb2.ToolDeclaration(
        name="orders", description="Looks orders up.", effect=tools_pb2.TOOL_EFFECT_READ
    )
    tool.http.method, tool.http.url = "GET", "https://orders.example.org/{id}"
    tool.http.parameters_json = (
        '{"type":"object","properties":{"id":{"type":"string"}},"required":["id"]}'
    )
    tool.egress.hosts.append("orders.example.org")
    put = admin_pb2.PutToolRequest(tenant="dev", tool=tool)
    first = (await admin.call("PutTool", put)).version
    assert (await admin.call("PutTool", put)).version > first
    listed = await admin.call("ListTenantTools", admin_pb2.ListTenantToolsRequest(tenant="dev"))
    assert [one.name for one in listed.tools] == ["orders"]
    shown = await ask(client, "ListTools", runs_pb2.ListToolsRequest())
    assert {one.name for one in shown.tools} >= {"calculator", "clock"}
    assert "orders" not in {one.name for one in shown.tools}, "not in the tenant's list"
    put.tool.sql.url = "sqlite:///etc/passwd"
    error = await refused(admin.call("PutTool", put))
    assert error.code is Code.INVALID_ARGUMENT
    assert error.fields[0].field.startswith("tool.sql")
    delete = admin_pb2.DeleteToolRequest(tenant="dev", name="orders")
    await admin.call("DeleteTool", delete)
    error = await refused(admin.call("DeleteTool", delete))
    assert (error.code, error.reason) == (Code.NOT_FOUND, "TOOL_UNKNOWN")
    await admin.close()
