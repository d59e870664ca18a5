"""The way from a scheduler to agent services over an execution service.

Goal: a hint is passed to an agent that serves, or lost without harm; who asks hears whether there
is one. Method: real servers on loopback, agent services scripted. Oracle: what the agents heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import grpc.aio
import pytest

from execution_svc.adapters import agents as agents_module
from execution_svc.adapters.agents import AGENT_SERVICE, Agents
from execution_svc.adapters.counts import Counts
from execution_svc.adapters.servicer import ExecutionServicer
from scheduler_svc.adapters.agent_link import AgentLink
from sluice.agent.v1 import agent_pb2, agent_pb2_grpc, tools_pb2
from sluice.channels import open_channel
from sluice.errors import Code, SluiceError
from sluice.execution.v1 import execution_pb2, execution_pb2_grpc
from sluice.server import Health, MeshServer
from sluice.status import from_rpc_error
from sluice.telemetry import Telemetry


class Agent(agent_pb2_grpc.AgentServiceServicer):
    """An agent service that keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.silent = False
        self.server = MeshServer("agent", ["127.0.0.1:0"], Health())

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.ports[0]}"

    async def NudgeRun(self, request: agent_pb2.NudgeRunRequest, context: Any) -> Any:
        if self.silent:
            await asyncio.sleep(30)
        self.heard.append((request.tenant, request.run_id))
        return agent_pb2.NudgeRunResponse()

    async def ListTools(self, request: agent_pb2.ListToolsRequest, context: Any) -> Any:
        tools = [tools_pb2.ToolState(name=f"of-{request.tenant}")]
        return agent_pb2.ListToolsResponse(tools=tools)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an agent that answers, also on a machine that stands still for a while."""
    monkeypatch.setattr(agents_module, "NUDGE_LIMIT_S", 1.0)


@asynccontextmanager
async def agent() -> AsyncIterator[Agent]:
    made = Agent()
    agent_pb2_grpc.add_AgentServiceServicer_to_server(made, made.server.grpc)
    made.server.add_service(AGENT_SERVICE)
    await made.server.start()
    try:
        yield made
    finally:
        await made.server.stop(0)


@asynccontextmanager
async def execution(*targets: str) -> AsyncIterator[grpc.aio.Channel]:
    """An execution service that knows these agents, as ``main`` puts it together."""
    health = Health()
    agents = Agents(targets, health.component("agents", optional=True))
    server = MeshServer("execution", ["127.0.0.1:0"], health)
    servicer = ExecutionServicer(cast("Any", None), Telemetry.off(), Counts(), agents)
    execution_pb2_grpc.add_ExecutionServiceServicer_to_server(servicer, server.grpc)
    health.add_service(AGENT_SERVICE, needs=health.component("agents"))
    await server.start()
    looking = asyncio.create_task(agents.run())
    await until(lambda: all(each.serves for each in agents._agents))
    async with open_channel(f"127.0.0.1:{server.ports[0]}") as channel:
        await channel.channel_ready()
        yield channel
    looking.cancel()
    await agents.close()
    await server.stop(0)


@asynccontextmanager
async def link_to(channel: grpc.aio.Channel) -> AsyncIterator[AgentLink]:
    """A scheduler's way."""
    link = AgentLink({"execution": channel}, lambda target: True)
    running = asyncio.create_task(link.run())
    yield link
    running.cancel()


async def until(condition: Callable[[], Any], limit_s: float = 5.0) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while not condition():
        assert loop.time() < end_s
        await asyncio.sleep(0.01)


async def started(channel: grpc.aio.Channel, run_id: str = "r") -> execution_pb2.StartRunResponse:
    stub: Any = execution_pb2_grpc.ExecutionServiceStub(channel)
    request = execution_pb2.StartRunRequest(tenant="t", run_id=run_id)
    answer: execution_pb2.StartRunResponse = await stub.StartRun(request, timeout=5)
    return answer


async def test_a_nudge_reaches_one_agent_and_the_same_run_the_same() -> None:
    async with (
        agent() as one,
        agent() as two,
        execution(one.target, two.target) as channel,
        link_to(channel) as link,
    ):
        await until(lambda: link.available)
        for number in range(20):
            link.nudge("t", f"run-{number}")
            link.nudge("t", f"run-{number}")
        await until(lambda: len(one.heard) + len(two.heard) == 40)
        assert set(one.heard).isdisjoint(two.heard)
        assert one.heard and two.heard
        tools = await link.tools("t")
        assert [tool.name for tool in tools] == ["of-t"]


async def test_a_nudge_reaches_another_agent_when_the_first_is_gone() -> None:
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent()) for _ in range(2)]
        channel = await stack.enter_async_context(execution(*(each.target for each in agents)))
        link = await stack.enter_async_context(link_to(channel))
        await until(lambda: link.available)
        agents[0].silent = True
        for number in range(4):
            assert (await started(channel, f"run-{number}")).nudged
        assert len(agents[1].heard) == 4
        await agents[1].server.stop(0)
        answer = await started(channel)
        assert not answer.nudged
        assert answer.poll_delay.seconds == 1


async def test_without_agents_nothing_is_nudged_and_health_says_so() -> None:
    async with execution() as channel, link_to(channel) as link:
        answer = await started(channel)
        assert (answer.nudged, answer.poll_delay.seconds) == (False, 1)
        link.nudge("t", "r")
        await asyncio.sleep(0.1)
        assert not link.available
        with pytest.raises(SluiceError) as told:
            await link.tools("t")
        assert (told.value.code, told.value.reason) == (Code.UNAVAILABLE, "AGENT_UNREACHABLE")


@pytest.mark.parametrize(
    ("fields", "field"), [({"run_id": "r"}, "tenant"), ({"tenant": "t"}, "run_id")]
)
async def test_a_wrong_nudge_is_named(fields: dict[str, str], field: str) -> None:
    async with execution() as channel:
        stub: Any = execution_pb2_grpc.ExecutionServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StartRun(execution_pb2.StartRunRequest(**fields), timeout=5)
        error = from_rpc_error(caught.value)
        assert [one.field for one in error.fields] == [field]
