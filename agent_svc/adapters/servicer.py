"""sluice.agent.v1.AgentService. Stateless; one event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from sluice.agent.v1 import agent_pb2, agent_pb2_grpc


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """``nudge`` says that a run is ready."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self._nudge = nudge

    async def NudgeRun(
        self, request: agent_pb2.NudgeRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> agent_pb2.NudgeRunResponse:
        self._nudge()
        return agent_pb2.NudgeRunResponse()

    async def ListTools(
        self, request: agent_pb2.ListToolsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> agent_pb2.ListToolsResponse:
        return agent_pb2.ListToolsResponse()
