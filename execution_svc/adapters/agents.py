"""The way to agent services: which answer, and what is passed on to them.

Looks at every configured one once a second, more often while none serves; the component ``agents``
is up while any serves, and health says so under the name of their service. A run is always offered
to the same agent first (rendezvous hashing), then to the next one. Concurrency: one event loop.
Failure modes: one that does not answer costs a call its own time limit and is not asked again
before it was seen.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice import logs
from sluice.agent.v1 import agent_pb2, agent_pb2_grpc, tools_pb2
from sluice.channels import open_channel
from sluice.errors import SluiceError, unavailable
from sluice.health import Component
from sluice.status import from_rpc_error

AGENT_SERVICE: Final = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
LOOK_INTERVAL_S: Final = 1.0
LOOK_SOON_S: Final = 0.25  # while none serves that might
LOOK_LIMIT_S: Final = 1.0
NUDGE_LIMIT_S: Final = 0.3
NUDGES_MAX: Final = 2
TOOLS_LIMIT_S: Final = 4.0
RETRY_S: Final = 1.0

log = logs.get(__name__)


@dataclass(slots=True)
class _Agent:
    target: str
    channel: grpc.aio.Channel
    stub: Any
    health: Any
    serves: bool = False


class Agents:
    """See the module's docstring."""

    def __init__(self, targets: Sequence[str], component: Component) -> None:
        self._component = component
        self._agents = []
        for target in targets:
            channel = open_channel(target)
            stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
            self._agents.append(_Agent(target, channel, stub, health_pb2_grpc.HealthStub(channel)))
        self._tell()

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.gather(*map(self._look, self._agents))
            self._tell()
            missing = self._agents and not any(agent.serves for agent in self._agents)
            await asyncio.sleep(LOOK_SOON_S if missing else LOOK_INTERVAL_S)

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(agent.channel.close() for agent in self._agents))

    async def nudge(self, tenant: str, run_id: str) -> bool:
        """Tells an agent service that a run is ready; whether one heard it."""
        request = agent_pb2.NudgeRunRequest(tenant=tenant, run_id=run_id)
        for agent in self._order(run_id)[:NUDGES_MAX]:
            try:
                await agent.stub.NudgeRun(request, timeout=NUDGE_LIMIT_S)
            except grpc.aio.AioRpcError as error:
                self._failed(agent, from_rpc_error(error))
            else:
                return True
        return False

    async def tools(self, tenant: str) -> Sequence[tools_pb2.ToolState]:
        """What an agent service says of the tools of a tenant. UNAVAILABLE when none answers."""
        request = agent_pb2.ListToolsRequest(tenant=tenant)
        for agent in self._order(tenant):
            try:
                answer = await agent.stub.ListTools(request, timeout=TOOLS_LIMIT_S)
            except grpc.aio.AioRpcError as error:
                self._failed(agent, from_rpc_error(error))
            else:
                return tuple(answer.tools)
        raise unavailable("AGENT_UNREACHABLE", "No agent service answers now.", RETRY_S)

    async def _look(self, agent: _Agent) -> None:
        request = health_pb2.HealthCheckRequest(service=AGENT_SERVICE)
        try:
            answer = await agent.health.Check(request, timeout=LOOK_LIMIT_S)
            agent.serves = answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError:
            agent.serves = False

    def _failed(self, agent: _Agent, error: SluiceError) -> None:
        log.warning("an agent service did not answer", target=agent.target, reason=error.reason)
        agent.serves = False
        self._tell()

    def _tell(self) -> None:
        if any(agent.serves for agent in self._agents):
            self._component.up()
        elif self._agents:
            self._component.down("no agent service serves")
        else:
            self._component.down("none is configured")

    def _order(self, name: str) -> list[_Agent]:
        def weight(agent: _Agent) -> bytes:
            return hashlib.blake2b(f"{agent.target}|{name}".encode(), digest_size=8).digest()

        return sorted((agent for agent in self._agents if agent.serves), key=weight)
