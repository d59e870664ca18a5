"""Tools of runs through the whole mesh, as processes.

Goal: what the parts promise holds when they are put together. Method: a mesh with an agent service
whose configured tools call a server of this test; the model is scripted. Oracle: what the server
was asked, the events of the run, the stored blob. No seed.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict

from sluice.agent.v1 import tools_pb2
from sluice.channels import ending, open_channel
from sluice.scheduler.v1 import admin_pb2, runs_pb2
from sluice.state.v1 import values_pb2
from sluice.state.v1.values_pb2_grpc import BlobServiceStub
from sluice.status import from_rpc_error, from_status
from tests.hermetic.admin_client import AdminClient, refused
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually
from tests.security.http_server import HttpServer, fixed, serving, silent

LARGE = json.dumps({"rows": ["x" * 100] * 500}).encode()
SECRET = "canary-secret-of-a-tool"
NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "string"}},
    "required": ["number"],
    "additionalProperties": False,
}


class Outside:
    """The server that tools call, on a thread of its own for as long as the tests run."""

    def __init__(self) -> None:
        self.server: HttpServer
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        answers = {
            "/orders/A-7": fixed(b'{"state": "sent"}'),
            "/large/1": fixed(LARGE),
            "/slow/1": silent,
        }
        async with serving(answers) as self.server:
            self._ready.set()
            await self._end.wait()

    def __enter__(self) -> Outside:
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


def tools(place: str, folder: Path) -> list[dict[str, Any]]:
    def http(name: str, effect: str = "read", **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "description": f"Does {name}.",
            "effect": effect,
            "http": {
                "method": "GET" if effect == "read" else "POST",
                "url": f"http://{place}/{name}/{{number}}",
                "parameters": NUMBER,
                "secret_headers": {"authorization": "TOOL_SECRET_ORDERS"},
                "idempotency_header": "idempotency-key",
            },
            "egress": {"hosts": [place], "private_allowed": [place]},
            **more,
        }

    return [
        http("orders"),
        http("large", preview_bytes=500),
        http("slow", "idempotent", timeout_s=60),
        {
            "name": "sales",
            "description": "Sales.",
            "effect": "read",
            "sql": {"url": f"sqlite:///{folder}/sales.db"},
        },
        {
            "name": "gone",
            "description": "No database.",
            "effect": "read",
            "sql": {"url": f"sqlite:///{folder}/gone.db"},
        },
        {"name": "calculator", "description": "Sums.", "effect": "read", "calculator": {}},
    ]


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with Outside() as one:
        yield one


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, outside: Outside) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("tools")
    with closing(sqlite3.connect(folder / "sales.db")) as database:
        database.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (41), (1);")
    place = f"127.0.0.1:{outside.server.port}"
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TOOL_SECRET_ORDERS", f"Bearer {SECRET}")
        shape = Shape(
            agents=1, tools=tools(place, folder), instances={"sim-0": {"decode_step_ms": 1.0}}
        )
        yield stack.enter_context(mesh(folder, shape))


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as one:
        yield one


async def run(
    running: Mesh, client: MeshClient, granted: list[str], *replies: object, **fields: Any
) -> list[runs_pb2.RunEvent]:
    """The events of a run whose model writes these replies. ``fields``: of the request."""
    marker = f"task-{uuid.uuid4().hex}"
    await asyncio.to_thread(running.faults, {"marker": marker, "replies": list(replies)})
    asked = runs_pb2.RunAgentRequest(
        task=marker, tools=granted, request_id=str(uuid.uuid4()), **fields
    )
    for _ in range(50):  # a scheduler looks for agent services once a second
        call = client.stub.RunAgent(asked, timeout=30.0, metadata=client.metadata)
        try:
            with ending(call):
                return [message.event async for message in call if message.event.sequence]
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason != "AGENT_SERVICE_MISSING":
                raise
        await asyncio.sleep(0.1)
    raise AssertionError("no agent service was found")


def ends(events: list[runs_pb2.RunEvent]) -> list[runs_pb2.ToolCallEnded]:
    return [one.tool_call_ended for one in events if one.HasField("tool_call_ended")]


def wanted(tool: str, **arguments: object) -> dict[str, object]:
    return {"tool": tool, "arguments": arguments}


async def test_a_run_calls_http_sql_and_arithmetic_and_its_key_goes_along(
    running: Mesh, client: MeshClient, outside: Outside
) -> None:
    events = await run(
        running,
        client,
        ["orders", "sales", "calculator"],
        wanted("orders", number="A-7"),
        wanted("sales", sql="SELECT sum(a) AS total FROM t"),
        wanted("calculator", expression="6 * 7"),
        {"answer": "done"},
    )
    http, sql, sums = (json.loads(one.result_json) for one in ends(events))
    assert http == {"status": 200, "body": {"state": "sent"}}
    assert sql == {"columns": ["total"], "rows": [[42]], "cut": False}
    assert sums == {"result": 42}
    asked = next(one for one in outside.server.asked if one.target == "/orders/A-7")
    started = next(one for one in events if one.HasField("tool_call_started"))
    assert asked.headers["idempotency-key"] == started.tool_call_started.idempotency_key
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    assert events[-1].ended.answer == "done"
    assert SECRET not in str(events)
    assert SECRET not in "".join(process.text() for process in running.processes.values())


async def test_a_long_result_is_a_preview_and_a_blob_that_holds_all_of_it(
    running: Mesh, client: MeshClient
) -> None:
    events = await run(running, client, ["large"], wanted("large", number="1"), {"answer": "done"})
    (end,) = ends(events)
    assert end.truncated and end.size_bytes > 50_000
    assert len(end.result_json.encode()) <= 500
    state = open_channel(running["state-0"].address)
    try:
        await state.channel_ready()
        stored = await BlobServiceStub(state).GetBlob(
            values_pb2.GetBlobRequest(tenant="dev", owner=events[0].run_id, name=end.blob),
            timeout=5.0,
        )
    finally:
        await state.close()
    assert stored.size_bytes == end.size_bytes
    assert json.loads(stored.content) == {"status": 200, "body": json.loads(LARGE)}
    assert stored.content.decode().startswith(json.loads(end.result_json))


async def test_what_was_not_granted_is_not_called_and_the_model_is_told(
    running: Mesh, client: MeshClient, outside: Outside
) -> None:
    before = len(outside.server.asked)
    events = await run(
        running,
        client,
        ["calculator"],
        wanted("orders", number="A-7"),
        wanted("calculator", expression="1 + 1"),
        {"answer": "done"},
    )
    assert len(outside.server.asked) == before
    assert [json.loads(one.result_json) for one in ends(events)] == [{"result": 2}]
    assert any(one.model_step.problem for one in events if one.HasField("model_step"))


async def test_a_cancelled_run_ends_its_call_within_a_second(
    running: Mesh, client: MeshClient, outside: Outside
) -> None:
    def open_calls() -> int:
        return sum(one.target.startswith("/slow") for one in outside.server.asked)

    before = open_calls()
    task = asyncio.create_task(
        run(running, client, ["slow"], wanted("slow", number="1"), {"answer": "done"})
    )
    await eventually(lambda: open_calls() > before, "the tool was called")
    key = next(one for one in outside.server.asked if one.target.startswith("/slow"))
    run_id = key.headers["idempotency-key"].partition(":")[0]
    begin = time.monotonic()
    await client.stub.CancelRun(
        runs_pb2.CancelRunRequest(run_id=run_id, request_id=str(uuid.uuid4())),
        timeout=5.0,
        metadata=client.metadata,
    )
    events = await task
    assert time.monotonic() - begin < 3.0
    assert events[-1].ended.state == runs_pb2.RUN_STATE_CANCELLED
    await eventually(lambda: outside.server.left == 1, "the connection was closed", 2.0)


async def test_tools_are_listed_with_what_keeps_them_from_being_called(
    running: Mesh, client: MeshClient
) -> None:
    listed = await client.stub.ListTools(
        runs_pb2.ListToolsRequest(), timeout=5.0, metadata=client.metadata
    )
    found = {tool.name: tool for tool in listed.tools}
    assert found["sales"].available and "t(a)" in found["sales"].description
    assert (found["gone"].available, found["gone"].problem) == (
        False,
        "The database cannot be read.",
    )
    assert json.loads(found["calculator"].parameters_json)["required"] == ["expression"]


def registered(name: str, **fields: Any) -> tools_pb2.ToolDeclaration:
    base: dict[str, Any] = {"name": name, "description": "d", "effect": "TOOL_EFFECT_READ"}
    return ParseDict({**base, **fields}, tools_pb2.ToolDeclaration())


@asynccontextmanager
async def tenant(running: Mesh, name: str, *granted: str) -> AsyncIterator[MeshClient]:
    """A client of a new tenant with these tools."""
    admin = AdminClient(running)
    try:
        await admin.tenant(name, agents=True, tools=granted)
        key = (await admin.key(name)).key
    finally:
        await admin.close()
    async with client_of(running, key=key) as client:
        yield client


async def put(running: Mesh, tenant: str, tool: tools_pb2.ToolDeclaration) -> None:
    admin = AdminClient(running)
    try:
        await admin.call("PutTool", admin_pb2.PutToolRequest(tenant=tenant, tool=tool))
    finally:
        await admin.close()


ONLY = "TOOL_FIELD_NOT_ALLOWED"


async def test_a_registered_tool_is_its_tenants_and_reaches_nothing_of_the_machine(
    running: Mesh, outside: Outside
) -> None:
    """Refused at the registration by its field."""
    place = f"127.0.0.1:{outside.server.port}"
    inside = {"method": "GET", "url": f"http://{place}/orders/A-7"}
    before = len(outside.server.asked)
    async with (
        tenant(running, "shop", "sums") as shop,
        tenant(running, "other", "sums") as other,
    ):
        for tool, field, reason in (
            (registered("a", sql={"url": "sqlite:///sales.db"}), "tool.sql.url", ONLY),
            (registered("a", mcp={"command": ["sh"]}), "tool.mcp.command", ONLY),
            (
                registered("a", http=inside, egress={"hosts": [place], "privateAllowed": [place]}),
                "tool.egress.private_allowed",
                ONLY,
            ),
            (
                registered("a", http=inside, egress={"hosts": [place]}),
                "tool.http.url",
                "INVALID_FIELD",
            ),
        ):
            error = await refused(put(running, "shop", tool))
            assert error.reason == reason
            assert [one.field for one in error.fields] == [field]
        await put(running, "shop", registered("sums", calculator={}))
        replies = [wanted("sums", expression="40 + 2"), {"answer": "done"}]
        events = await run(running, shop, ["sums"], *replies)
        (first,) = ends(events)
        assert json.loads(first.result_json) == {"result": 42}
        assert len(outside.server.asked) == before
        # The same name in another tenant's list stands for nothing: the model is not asked.
        replies = [wanted("sums", expression="1"), "no tools"]
        budget = runs_pb2.RunBudget(wall_time_max=Duration(seconds=3))
        events = await run(running, other, ["sums"], *replies, budget=budget)
        kinds = [one.WhichOneof("kind") for one in events]
        assert not {"model_step", "tool_call_started"} & set(kinds)
        paused = [one.paused.reason for one in events if one.HasField("paused")]
        assert set(paused) == {"TOOL_UNAVAILABLE"}
        assert from_status(events[-1].ended.status).reason == "BUDGET_WALL_TIME"
