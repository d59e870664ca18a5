"""The agent path at the edge: who asks for it without the right, or without a service, is told so
or answered directly, and the reason is recorded.

Goal: agents are off by default; a refusal is typed; AUTO gives an answer as events of a run.
Method: one mesh; a tenant with the right and tools, and one without. Oracle: statuses, the events,
and the decision records. Seen to fail on the mutant agents_for_everybody.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import records_pb2, runs_pb2
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, sim

KEY = "a-tenant-with-agents"
SHAPE = Shape(
    tenants=f"""
[[tenant]]
name = "agents"
key_sha256 = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
agents = true
"""
)
MAY = (("authorization", f"Bearer {KEY}"),)
AUTO = runs_pb2.AGENT_MODE_AUTO
RUN = runs_pb2.RunAgentRequest


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh(tmp_path_factory.mktemp("agents"), SHAPE) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made


async def events(client: MeshClient, request: Any, metadata: Any = MAY) -> list[Any]:
    call = client.stub.RunAgent(request, metadata=metadata, timeout=10)
    return [message.event async for message in call]


async def refusal(client: MeshClient, request: Any, metadata: Any = MAY) -> SluiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events(client, request, metadata)
    return from_rpc_error(caught.value)


async def recorded(client: MeshClient, request_id: str, metadata: Any = MAY) -> Any:
    request = records_pb2.GetDecisionRequest(request_id=request_id)
    return (await client.stub.GetDecision(request, metadata=metadata, timeout=5)).decision


def fresh() -> str:
    return str(uuid.uuid4())


async def test_without_the_right_it_is_refused_and_recorded(client: MeshClient) -> None:
    request_id = fresh()
    error = await refusal(client, RUN(task="x", request_id=request_id), client.mesh.metadata)
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "AGENT_REFUSED")
    assert error.metadata["gate_reason"] == "NOT_ALLOWED"
    record = await recorded(client, request_id, client.mesh.metadata)
    assert (record.reason, record.gate_reason) == ("AGENT_REFUSED", "NOT_ALLOWED")


async def test_without_a_service_it_is_refused_by_type(client: MeshClient) -> None:
    for fields in ({}, {"mode": AUTO, "background": True}, {"mode": AUTO, "session_id": fresh()}):
        error = await refusal(client, RUN(task="x", request_id=fresh(), **fields))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "AGENT_SERVICE_MISSING")


@pytest.mark.parametrize("may", [True, False])
async def test_auto_is_answered_directly_as_the_events_of_a_run(
    client: MeshClient, may: bool
) -> None:
    metadata = MAY if may else client.mesh.metadata
    reason = "NOT_AVAILABLE" if may else "NOT_ALLOWED"
    request_id = fresh()
    request = RUN(task=sim("hello", reply="some words"), request_id=request_id, mode=AUTO)
    seen = await events(client, request, metadata)
    kinds = [event.WhichOneof("kind") for event in seen]
    assert kinds[0] == "queued"
    assert set(kinds[1:-2]) == {"partial_text"}
    assert kinds[-2:] == ["model_step", "ended"]
    assert seen[0].queued.gate_reason == reason
    assert "".join(event.partial_text.text for event in seen) == seen[-1].ended.answer
    step = seen[-2].model_step
    assert (step.step, step.message.role, step.request_id) == (1, "assistant", request_id)
    assert step.usage.completion_tokens > 0
    assert seen[-1].ended.state == runs_pb2.RUN_STATE_SUCCEEDED
    durable = [e.sequence for e in seen if e.WhichOneof("kind") != "partial_text"]
    assert durable == [1, 2, 3]
    assert (await recorded(client, request_id, metadata)).gate_reason == reason


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"task": "x", "request_id": "no-uuid"}, Code.INVALID_ARGUMENT, "request_id"),
        ({"request_id": fresh()}, Code.INVALID_ARGUMENT, "task"),
        ({"task": "x", "mode": 7, "request_id": fresh()}, Code.INVALID_ARGUMENT, "mode"),
        ({"task": "x", "tools": ["t"], "request_id": fresh()}, Code.PERMISSION_DENIED, "tools[0]"),
        ({"task": "y" * 100_000, "request_id": fresh()}, Code.INVALID_ARGUMENT, "task"),
        (
            {"task": "x", "sampling": {"temperature": 9.0}, "request_id": fresh()},
            Code.INVALID_ARGUMENT,
            "sampling.temperature",
        ),
    ],
)
async def test_a_wrong_run_is_named(
    client: MeshClient, fields: dict[str, Any], code: Code, field: str
) -> None:
    error = await refusal(client, RUN(**({"mode": AUTO} | fields)))
    assert error.code is code
    assert [one.field for one in error.fields] == ([field] if field else [])
    assert "prompt" not in error.message
