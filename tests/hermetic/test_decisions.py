"""Why a request waited, landed where it did, or was refused: asked through the edge.

Goal: who was refused, failed or moved finds out why, over gRPC, HTTP and the command, and nobody
finds out about others. Method: one mesh with two instances of one sequence each; requests that are
refused, moved by a scripted fault, or ordinary. Oracle: the records. Seen to fail on the mutants
decision_of_another_tenant and ordinary_requests_are_kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from sluice.common.v1 import policy_pb2
from sluice.errors import Code
from sluice.scheduler.v1 import records_pb2, scheduler_pb2_grpc
from tests.hermetic.local_mesh import ROOT
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, fresh_id
from tests.hermetic.test_mesh_errors import from_http, refused

OTHER_KEY = "other-tenants-key"
OTHER = f"""
[[tenant]]
name = "other"
key_sha256 = ["{hashlib.sha256(OTHER_KEY.encode()).hexdigest()}"]
"""
SHAPE = Shape(
    instances={"sim-0": {}, "sim-1": {}},
    scheduler={"decision_sample_ratio": 0.0},
    tenants=OTHER,
)
CANARY = "canary-of-the-prompt"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh(tmp_path_factory.mktemp("decisions"), SHAPE) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made


async def decision(client: MeshClient, request_id: str) -> records_pb2.DecisionRecord:
    request = records_pb2.GetDecisionRequest(request_id=request_id)
    response = await client.stub.GetDecision(request, metadata=client.mesh.metadata, timeout=5)
    record: records_pb2.DecisionRecord = response.decision
    return record


async def test_a_request_that_went_elsewhere_is_told_over_grpc_and_http(
    client: MeshClient, running: Mesh
) -> None:
    request_id = fresh_id("moved")
    running.faults({"request_id": request_id, "fail_after": 0, "times": 1}, on=["sim-0"])
    running.faults({"request_id": request_id, "fail_after": 0, "times": 0}, on=["sim-1"])
    for _ in range(2):  # one of two instances has the fault
        await client.generate(CANARY, request_id=request_id, sampling={"max_tokens": 3})
        record = await decision_or_none(client, request_id)
        if record is not None:
            break
    assert record is not None
    assert record.outcome == policy_pb2.OUTCOME_FINISHED
    first, second = record.attempts
    assert (first.end, first.cause) == ("lost", "engine_error")
    assert (second.end, second.tokens) == ("ended", 3)
    assert {first.instance, second.instance} == {"sim-0", "sim-1"}
    assert second.filtered["excluded"] == 1
    assert record.usage.completion_tokens == 3
    response = await client.http.post("/v1/decision", json={"request_id": request_id})
    assert response.status_code == 200
    told = response.json()["decision"]
    assert told["attempts"][1]["instance"] == second.instance
    assert CANARY not in response.text


async def decision_or_none(
    client: MeshClient, request_id: str
) -> records_pb2.DecisionRecord | None:
    response = await client.http.post("/v1/decision", json={"request_id": request_id})
    return None if response.status_code == 404 else await decision(client, request_id)


async def test_a_refused_request_is_told_and_an_ordinary_one_is_not_kept(
    client: MeshClient,
) -> None:
    ordinary, wrong = fresh_id("ordinary"), fresh_id("wrong")
    await client.generate(request_id=ordinary, sampling={"max_tokens": 1})
    await client.generate(request_id=wrong, sampling={"temperature": 9.0})
    record = await decision(client, wrong)
    assert (record.outcome, record.reason) == (policy_pb2.OUTCOME_INVALID, "INVALID_FIELD")
    assert not record.attempts
    call = client.stub.GetDecision(
        records_pb2.GetDecisionRequest(request_id=ordinary), metadata=client.mesh.metadata
    )
    assert (await refused(call)).reason == "DECISION_UNKNOWN"


async def test_another_tenants_request_is_as_unknown_as_none(client: MeshClient) -> None:
    request_id = fresh_id("mine")
    await client.generate(request_id=request_id, sampling={"temperature": 9.0})
    assert (await decision(client, request_id)).tenant == "dev"
    theirs: dict[str, Any] = {"authorization": f"Bearer {OTHER_KEY}"}
    errors = []
    for asked in (request_id, fresh_id("none")):
        call = client.stub.GetDecision(
            records_pb2.GetDecisionRequest(request_id=asked), metadata=tuple(theirs.items())
        )
        errors.append(await refused(call))
        answer = await client.http.post("/v1/decision", json={"request_id": asked}, headers=theirs)
        errors.append(from_http(answer))
    assert {(e.code, e.reason, e.message) for e in errors} == {
        (Code.NOT_FOUND, "DECISION_UNKNOWN", errors[0].message)
    }


async def test_the_command_tells_the_story_under_the_tenants_key(
    client: MeshClient, running: Mesh, tmp_path: Path
) -> None:
    wrong = fresh_id("story")
    await client.generate(request_id=wrong, sampling={"temperature": 9.0})
    key = tmp_path / "key"
    key.write_text(running.api_key)
    command = [sys.executable, "-m", "sluice.command.cli", "explain"]
    options = ["--endpoint", running.target, "--key-file", str(key)]

    async def told(*arguments: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, *options, stdout=PIPE, stderr=STDOUT, cwd=ROOT
        )
        text, _ = await process.communicate()
        return process.returncode, text.decode()

    status, text = await told(wrong)
    assert (status, "It ended: invalid (INVALID_FIELD)." in text) == (0, True), text
    status, text = await told(wrong, "--json")
    assert (status, json.loads(text)["reason"]) == (0, "INVALID_FIELD")
    status, text = await told("never-seen")
    assert (status, "DECISION_UNKNOWN" in text or "no decision record" in text) == (4, True), text


async def test_any_scheduler_knows_of_a_request_also_when_the_one_that_decided_is_gone(
    tmp_path: Path,
) -> None:
    """Records go to the state service; a ring is lost with its process."""
    with mesh(tmp_path, Shape(schedulers=2, state={})) as made:
        ids = [fresh_id("kept") for _ in range(8)]
        async with client_of(made) as asking:
            for request_id in ids:
                await asking.generate(request_id=request_id, sampling={"temperature": 9.0})
        tellers = {}
        for name in made.schedulers:
            channel = grpc.aio.insecure_channel(made[name].address)
            tellers[name] = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def known(name: str) -> dict[str, str]:
            """Request -> the scheduler that decided, as this one tells it."""
            found = {}
            for request_id in ids:
                request = records_pb2.GetDecisionRequest(request_id=request_id)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await tellers[name].GetDecision(
                        request, metadata=made.metadata, timeout=5
                    )
                    found[request_id] = answer.decision.scheduler
            return found

        first, second = made.schedulers
        for _ in range(100):
            if len(decided := await known(second)) == len(ids):
                break
            await asyncio.sleep(0.05)
        assert set(decided.values()) == {first, second}, "both had requests"
        made[first].kill()
        assert await known(second) == decided
