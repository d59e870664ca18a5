"""sluice.agent.v1.AgentService: nudges and the list of tools. Stateless; one event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc.aio

from agent_svc.ports import ToolBox
from sluice.agent.v1 import agent_pb2, agent_pb2_grpc, tools_pb2


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """``nudge`` says that a run is ready."""

    def __init__(self, nudge: Callable[[], None], tools: ToolBox) -> None:
        self._nudge = nudge
        self._tools = tools

    async def NudgeRun(
        self, request: agent_pb2.NudgeRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> agent_pb2.NudgeRunResponse:
        self._nudge()
        return agent_pb2.NudgeRunResponse()

    async def ListTools(
        self, request: agent_pb2.ListToolsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> agent_pb2.ListToolsResponse:
        states = await self._tools.states(request.tenant)
        return agent_pb2.ListToolsResponse(
            tools=[
                tools_pb2.ToolState(
                    name=state.info.name,
                    description=state.info.description,
                    parameters_json=json.dumps(state.info.parameters),
                    available=not state.problem,
                    problem=state.problem,
                )
                for state in states
            ]
        )
