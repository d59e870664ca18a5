"""The way to agent services, which execution services know.

Asks every execution replica once a second (sooner at first, while none is there) whether it reaches
an agent service (its health says so under that service's name), and passes nudges on: hints, never
waited for, dropped beyond a bound. An agent service counts as there for a while after it was last
seen: runs are stored and wait, so that its restart is no reason to refuse one. One event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice import logs
from sluice.agent.v1 import agent_pb2, tools_pb2
from sluice.errors import SluiceError, unavailable
from sluice.execution.v1 import execution_pb2, execution_pb2_grpc
from sluice.status import from_rpc_error

AGENT_SERVICE: Final = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
LOOK_INTERVAL_S: Final = 1.0
LOOK_SOON_S: Final = 0.25  # while none is there; less often the longer that is so
LOOK_LATE_S: Final = 2.0
LOOK_SHARE: Final = 0.05
LOOK_LIMIT_S: Final = 2.0
GRACE_S: Final = 15.0
NUDGE_LIMIT_S: Final = 1.0
NUDGES_MAX: Final = 256
TOOLS_LIMIT_S: Final = 5.0
RETRY_AFTER_S: Final = 1.0

log = logs.get(__name__)


class AgentLink:
    """See the module's docstring. ``channels``: by execution target; ``usable``: whether a target's
    stream is connected."""

    def __init__(
        self, channels: Mapping[str, grpc.aio.Channel], usable: Callable[[str], bool]
    ) -> None:
        self.nudges_dropped = 0
        self._targets = tuple(channels)
        self._execution: dict[str, Any] = {}
        self._health: dict[str, Any] = {}
        for target, channel in channels.items():
            self._execution[target] = execution_pb2_grpc.ExecutionServiceStub(channel)
            self._health[target] = health_pb2_grpc.HealthStub(channel)
        self._usable = usable
        self._seen_s = float("-inf")
        self._nudges: set[asyncio.Task[None]] = set()
        self._work = asyncio.TaskGroup()
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    @property
    def seen(self) -> bool:
        """Whether an agent service was ever there."""
        return self._seen_s > float("-inf")

    @property
    def available(self) -> bool:
        """Whether an agent service was there lately."""
        return self._loop.time() - self._seen_s < GRACE_S

    async def run(self) -> None:
        """Looks, and carries nudges, until cancelled."""
        async with self._work:
            while True:
                await asyncio.gather(*map(self._look, self._targets))
                await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        if self.available:
            return LOOK_INTERVAL_S
        gone_s = self._loop.time() - max(self._seen_s, self._began_s)
        return min(max(LOOK_SOON_S, LOOK_SHARE * gone_s), LOOK_LATE_S)

    async def _look(self, target: str) -> None:
        request = health_pb2.HealthCheckRequest(service=AGENT_SERVICE)
        try:
            answer = await self._health[target].Check(request, timeout=LOOK_LIMIT_S)
        except grpc.aio.AioRpcError:
            return
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            self._seen_s = self._loop.time()

    def nudge(self, tenant: str, run_id: str) -> None:
        """Tells an agent service that a run is ready, in the background."""
        targets = self._order(run_id)
        if not targets:
            return
        if len(self._nudges) >= NUDGES_MAX:
            self.nudges_dropped += 1
            return
        request = execution_pb2.StartRunRequest(tenant=tenant, run_id=run_id)
        task = self._work.create_task(self._nudge(targets[0], request))
        self._nudges.add(task)
        task.add_done_callback(self._nudges.discard)

    async def _nudge(self, target: str, request: execution_pb2.StartRunRequest) -> None:
        try:
            await self._execution[target].StartRun(request, timeout=NUDGE_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            log.debug("nudge lost", target=target, reason=from_rpc_error(error).reason)

    async def tools(self, tenant: str) -> list[tools_pb2.ToolState]:
        """The tools of a tenant, as an agent service knows them. Raises UNAVAILABLE."""
        for target in self._order(tenant):
            request = execution_pb2.ListToolsRequest(tenant=tenant)
            try:
                answer = await self._execution[target].ListTools(request, timeout=TOOLS_LIMIT_S)
            except grpc.aio.AioRpcError as error:
                refused = from_rpc_error(error)
                log.debug("no tools from here", target=target, reason=refused.reason)
                continue
            return list(answer.tools)
        raise no_agent()

    def _order(self, name: str) -> list[str]:
        """Connected targets, for a name always in the same order."""
        usable = filter(self._usable, self._targets)
        return sorted(
            usable, key=lambda target: hashlib.blake2b(f"{target}|{name}".encode()).digest()
        )


def no_agent() -> SluiceError:
    """No agent service can be reached."""
    return unavailable("AGENT_UNREACHABLE", "no agent service can be reached now", RETRY_AFTER_S)
