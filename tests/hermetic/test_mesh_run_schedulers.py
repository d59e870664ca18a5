"""Runs where several schedulers stand side by side.

Goal: a run belongs to none of them: one that dies costs its watchers a reconnect to another and the
run nothing; the limit of open runs holds over all of them, exactly. Method: two schedulers, one
agent service, one scheduler killed. Oracle: the events, and what the state service stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from sluice.common.v1 import sampling_pb2
from sluice.scheduler.v1 import runs_pb2
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, sim

KEY = "a-tenant-with-three-runs"
LIMIT = 3
TENANT = f"""
[[tenant]]
name = "three"
key_sha256 = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
agents = true
concurrent_runs = {LIMIT}
"""
TOOLS = ({"name": "calculator", "description": "Sums.", "effect": "read", "calculator": {}},)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(
        schedulers=2,
        scheduler={"agent_utilisation_max": 1.0, "agent_wait_max_s": 3600.0},
        agents=1,
        tools=TOOLS,
        tenants=TENANT,
    )
    with mesh(tmp_path_factory.mktemp("two"), shape) as made:
        yield made


def task(words: str, **fields: Any) -> runs_pb2.RunAgentRequest:
    return runs_pb2.RunAgentRequest(task=words, request_id=str(uuid.uuid4()), **fields)


async def read_into(seen: list[Any], call: Any) -> None:
    """Reads events until the call fails."""
    while True:
        seen.append((await call.read()).event)


async def test_the_limit_of_open_runs_holds_over_all_schedulers(running: Mesh) -> None:
    slow = sim("write", pace_ms=50)
    sampling = sampling_pb2.SamplingParams(max_tokens=2000)

    async def ask(client: MeshClient) -> str:
        call = client.stub.RunAgent(
            task(slow, background=True, sampling=sampling), metadata=client.metadata, timeout=20
        )
        try:
            (queued,) = [message.event async for message in call]
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).metadata["gate_reason"]
        return queued.run_id

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(client_of(running, running[name].address, KEY))
            for name in running.schedulers
        ]
        told = await asyncio.gather(*(ask(client) for client in clients for _ in range(6)))
        refused = Counter(one for one in told if one == "TOO_MANY_RUNS")
        runs = [one for one in told if one != "TOO_MANY_RUNS"]
        assert (len(set(runs)), refused["TOO_MANY_RUNS"]) == (LIMIT, 12 - LIMIT)
        for number, run_id in enumerate(runs):
            other = clients[number % 2]
            await other.stub.CancelRun(
                runs_pb2.CancelRunRequest(run_id=run_id), metadata=other.metadata, timeout=20
            )
        assert await ask(clients[0]) not in ("", "TOO_MANY_RUNS"), "ended ones make room"


async def test_a_scheduler_that_dies_costs_a_run_nothing(running: Mesh) -> None:
    sums = [{"tool": "calculator", "arguments": {"expression": f"6*{n}"}} for n in (5, 6, 7)]
    words = sim("What is 6 * 7?", replies=[*sums, {"answer": "42"}], pace_ms=40)
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(client_of(running, running[name].address))
            for name in running.schedulers
        ]
        call: Any = one.stub.RunAgent(
            task(words, tools=["calculator"]), metadata=one.metadata, timeout=60
        )
        seen = [(await call.read()).event]
        running["scheduler-0"].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_into(seen, call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        watch = runs_pb2.WatchRunRequest(run_id=seen[0].run_id, from_sequence=seen[-1].sequence + 1)
        more = two.stub.WatchRun(watch, metadata=two.metadata, timeout=60)
        seen += [message.event async for message in more]
    durable = [one.sequence for one in seen if not one.HasField("partial_text")]
    assert durable == list(range(1, len(durable) + 1))
    assert seen[-1].ended.answer == "42"
    calls = [one for one in seen if one.HasField("tool_call_started")]
    assert len(calls) == 3, "none was made again"
