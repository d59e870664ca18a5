"""Refusals under load: cheap, honest about when to ask again, and the same over gRPC and HTTP.

Goal: a flood of requests that cannot be served costs the scheduler little and takes no place from
others, and who is refused is told when to come back. Method: one mesh with an engine of one
sequence that is kept busy; floods of refusals of each kind straight at the scheduler, whose own CPU
time is read. Oracle: CPU per refusal below 0.7 of that of the cheapest served request, engine and
queue unchanged; delays within their bounds and not all the same. Seed: none, counts only.

Seen to fail on the mutant delays_all_the_same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from scheduler_svc.domain.limits import SchedulerLimits
from sluice.common.v1 import policy_pb2, sampling_pb2
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually
from tests.hermetic.test_mesh_errors import from_http

LIMITS = SchedulerLimits()
SHAPE = Shape(
    instances={
        "sim-0": {"sequences_max": 1, "decode_step_ms": 20.0},
        "quick-0": {"model": "quick", "decode_step_ms": 1.0},
    },
    scheduler={"default_model": "sim", "write_cost_us": 1.0},
)
FLOOD = 300
MOST = 0.7
"""Of what the cheapest served request costs; seen: 0.4, and 0.5 with a prompt of 100 kB."""
SERVED: dict[str, Any] = {"model": "quick", "prompt": "x", "sampling": {"max_tokens": 1}}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no such model": ("MODEL_UNKNOWN", {"prompt": "x", "model": "nope"}),
    "out of range": ("INVALID_FIELD", {"prompt": "x", "sampling": {"temperature": 9.0}}),
    "no input": ("INVALID_FIELD", {}),
    "a long prompt out of range": (
        "INVALID_FIELD",
        {"prompt": "x" * 100_000, "sampling": {"temperature": 9.0}},
    ),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh(tmp_path_factory.mktemp("refusals"), SHAPE) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made


def cpu_s(running: Mesh) -> float:
    """CPU time of the scheduler so far."""
    times = psutil.Process(running["scheduler-0"].pid).cpu_times()
    return float(times.user + times.system)


async def flood(running: Mesh, fields: dict[str, Any], count: int) -> list[SluiceError | None]:
    """So many calls straight at the scheduler, sixteen at a time."""
    channel = grpc.aio.insecure_channel(running["scheduler-0"].address)
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    request = generate_pb2.GenerateTextRequest(**fields)
    gate = asyncio.Semaphore(16)

    async def ask() -> SluiceError | None:
        async with gate:
            try:
                await stub.GenerateText(request, metadata=running.metadata, timeout=30)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
            return None

    try:
        return await asyncio.gather(*(ask() for _ in range(count)))
    finally:
        await channel.close()


async def cost_us(running: Mesh, fields: dict[str, Any], reason: str | None) -> float:
    """CPU of the scheduler per call; the background's share is in it."""
    await flood(running, fields, 32)
    before = cpu_s(running)
    answers = await flood(running, fields, FLOOD)
    spent = cpu_s(running) - before
    assert {answer and answer.reason for answer in answers} == {reason}
    return spent / FLOOD * 1e6


async def test_a_refusal_costs_less_than_the_cheapest_request(
    client: MeshClient, running: Mesh
) -> None:
    served = await cost_us(running, SERVED, None)
    for name, (reason, fields) in REFUSED.items():
        refused = await cost_us(running, fields, reason)
        print(f"{name}: {refused:.0f} us; served: {served:.0f} us")
        assert refused < MOST * served, name
    assert not running.waiting()
    assert not running.in_engine("sim-0")


async def test_who_is_refused_under_load_is_told_when_to_ask_again(
    client: MeshClient, running: Mesh
) -> None:
    """Higher classes have work for longer than a first token may take: HOPELESS, on both ways."""
    metadata, stub = running.metadata, client.stub
    batch = policy_pb2.PRIORITY_CLASS_BATCH
    for _ in range(3):  # the service time is learnt
        await client.text(sampling={"max_tokens": 10})
    long = generate_pb2.GenerateRequest(
        prompt="x", sampling=sampling_pb2.SamplingParams(max_tokens=60)
    )
    waiting = [stub.Generate(long, metadata=metadata, timeout=60) for _ in range(40)]
    readers = [asyncio.ensure_future(call.read()) for call in waiting]
    await eventually(lambda: running.waiting() >= 35, "the queue is long")
    body = {
        "prompt": "x",
        "priority_class": "PRIORITY_CLASS_BATCH",
        "first_token_limit": "0.5s",
        "sampling": {"max_tokens": 1},
    }
    request = generate_pb2.GenerateTextRequest(
        prompt="x", priority_class=batch, sampling=sampling_pb2.SamplingParams(max_tokens=1)
    )
    request.first_token_limit.FromMilliseconds(500)
    delays = []
    for _ in range(8):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateText(request, metadata=metadata, timeout=10)
        told = from_rpc_error(caught.value)
        response = await client.http.post("/chat", json=body)
        for error in (told, from_http(response)):
            assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "HOPELESS")
            assert error.metadata["scope"] == "class"
            assert error.metadata["charged"] == "false"
            assert error.retry_after_s is not None
            delays.append(error.retry_after_s)
        assert int(response.headers["retry-after"]) >= delays[-1], "whole seconds, rounded up"
    jitter = LIMITS.retry_after_jitter
    least, most = LIMITS.retry_after_min_s, LIMITS.retry_after_max_s
    assert all(least * (1 - jitter) <= delay <= most * (1 + jitter) for delay in delays)
    assert len({round(delay, 3) for delay in delays}) > 8, "they do not come back together"
    for call, reader in zip(waiting, readers, strict=True):
        call.cancel()
        await asyncio.wait([reader])
    await asyncio.to_thread(running.until_idle)


async def test_names_that_clients_make_up_are_no_labels(client: MeshClient, running: Mesh) -> None:
    """However many models and paths are asked for, the edge's statistics stay as many."""

    async def statistics() -> int:
        url = f"http://127.0.0.1:{running.envoy.admin_port}/stats"
        return len((await client.http.get(url)).text.splitlines())

    await client.http.post("/chat", json={"prompt": "x", "model": "made-up"})
    await client.http.get("/made-up")
    before = await statistics()
    for number in range(300):
        await client.http.post("/chat", json={"prompt": "x", "model": f"made-up-{number}"})
        await client.http.get(f"/made-up/{number}")
    assert await statistics() <= before + 2
