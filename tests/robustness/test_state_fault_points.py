"""A crash of the state service at every named fault point.

Goal: whatever change to a run its state service dies in, the run goes on once it is back, its
events are whole, it ends once, and each call of its tools was made once. Method: the state service
as a real process over Valkey, killed when it first passes the point; clients repeat
what was not answered with the same ids; the agent service runs in this process with a scripted
model and tools. Oracle: the stored events and the tools' effects by key. Seed: none. Every point of
the state service is passed, or its test fails.

Seen to fail on mutants: agent_append_not_repeated.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc.aio
import pytest

from sluice import fault_points
from sluice.channels import ChannelLimits, open_channel
from sluice.scheduler.v1 import runs_pb2 as public_pb2
from sluice.state.v1 import documents_pb2_grpc, runs_pb2, runs_pb2_grpc, sessions_pb2_grpc
from tests.contract.agent_rig import TENANT, Rig
from tests.contract.test_agent_state import ENDED, agent, kinds
from tests.robustness.state_process import StateProcess
from tests.unit.agent.world import Script, answer, calls
from tests.valkey import ValkeyProcess, valkey

POINTS = sorted(name for name in fault_points.POINTS if name.startswith("state."))
# The first append is the first claim's of the first run; the third follows a tool call.
CASES = [*POINTS, "state.after_append:3"]
LEASE_S = 40.0
# A claim whose answer was lost, because the machine stood still for as long as the store may take,
# ends with its lease only.
ANSWER_S = LEASE_S + 20.0


@pytest.fixture(scope="module")
def store() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


class Service:
    """The state service, which dies once and is started again."""

    def __init__(self, store: ValkeyProcess) -> None:
        self.process = StateProcess(store.url, timeout_s=2.0)
        self.deaths = 0

    async def keep(self) -> None:
        """Starts it again whenever it has ended."""
        while True:
            await asyncio.sleep(0.05)
            if self.process.status is not None:
                assert self.process.status == fault_points.EXIT_STATUS
                self.deaths += 1
                self.process.start()


async def repeated(call: Callable[[], Awaitable[Any]]) -> Any:
    """Calls until there is an answer, with the same request."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.05)


async def reached(rig: Rig, run_id: str, *phases: int) -> runs_pb2.StoredRun:
    """Waits until a run is in one of these phases, however often the service is away."""
    run: runs_pb2.StoredRun = await repeated(lambda: rig.until(run_id, *phases, limit_s=ANSWER_S))
    return run


async def play(rig: Rig, script: Script) -> None:
    """Two runs: one is approved and ends, one is cancelled."""
    spec = rig.spec(tools=["put", "sign"])
    one, two = str(uuid.uuid4()), str(uuid.uuid4())
    decision = public_pb2.RunResumed(step=3, decision=public_pb2.RESUME_DECISION_RETRY)
    resume = runs_pb2.ResumeRunRequest(
        tenant=TENANT,
        run_id=one,
        step=3,
        decision=decision.SerializeToString(),
        request_id=str(uuid.uuid4()),
    )
    cancel = runs_pb2.CancelRunRequest(tenant=TENANT, run_id=two, request_id=str(uuid.uuid4()))
    for run_id in (one, two):
        request = rig.creation(run_id, spec)
        await repeated(lambda request=request: rig.runs.CreateRun(request))  # type: ignore[misc]
    for run_id in (one, two):
        await reached(rig, run_id, runs_pb2.RUN_PHASE_WAITING)
    for run_id, call, phase in (
        # One after the other: a service that dies in the cancel would often take the answer to the
        # claim of the resumed run with it.
        (one, lambda: rig.runs.ResumeRun(resume), runs_pb2.RUN_PHASE_SUCCEEDED),
        (two, lambda: rig.runs.CancelRun(cancel), runs_pb2.RUN_PHASE_CANCELLED),
    ):
        await repeated(call)
        run = await reached(rig, run_id, *ENDED)
        assert run.phase == phase
        events = await rig.events(run_id)
        assert kinds(events).count("ended") == 1
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert kinds(events).count("queued") == 1
    assert kinds(await rig.events(one)) == [
        "queued",
        "model_step",
        "tool_call_started",
        "tool_call_ended",
        "waiting",
        "resumed",
        "tool_call_started",
        "tool_call_ended",
        "model_step",
        "ended",
    ]
    assert script.effects == {f"{one}:2": 1, f"{one}:3": 1, f"{two}:2": 1}
    # The agent service lives: it repeats what it stores, and nothing else.
    assert script.model_calls == {f"{one}.1": 1, f"{one}.4": 1, f"{two}.1": 1}


@pytest.mark.parametrize("point", CASES)
async def test_every_run_ends_once_wherever_its_state_service_dies(
    point: str, store: ValkeyProcess
) -> None:
    service = Service(store)
    service.process.start(point)
    channel = open_channel(service.process.address, limits=ChannelLimits(reconnect_max_s=0.1))
    rig = Rig(
        channel,
        runs_pb2_grpc.RunServiceStub(channel),
        sessions_pb2_grpc.SessionServiceStub(channel),
        documents_pb2_grpc.DocumentServiceStub(channel),
    )
    script = Script(
        [calls(("put", {"n": 1}), ("sign", {"n": 2})), answer("done")], model_s=0.02, tool_s=0.02
    )
    keeping = asyncio.create_task(service.keep())
    try:
        # A claim that nobody heard of ends with its lease; the others outlast the service's return.
        lease_s = 2.0 if point == "state.after_claim" else LEASE_S
        async with agent(rig, script, lease_s=lease_s, renew_s=0.5):
            await play(rig, script)
        assert service.deaths == 1, f"{point} is never passed"
    finally:
        keeping.cancel()
        await channel.close()
        service.process.kill()
