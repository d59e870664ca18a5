"""``ToolService``: declarations of tools that tenants registered, over the registry. What a
declaration may say is checked by who calls; here its name and its size are."""

from __future__ import annotations

from typing import Any, Final

from sluice.agent.v1 import tools_pb2 as agent_tools_pb2
from sluice.errors import invalid, not_found
from sluice.state.v1 import tools_pb2, tools_pb2_grpc
from state_svc.adapters import stored
from state_svc.adapters.store_errors import store_errors
from state_svc.domain.names import check_tenant, check_tool
from state_svc.ports import Kind, RegistryStore

TOOL_BYTES_MAX: Final = (1 << 20) + (64 << 10)  # an OpenAPI document of 1 MiB and the rest


class ToolServicer(tools_pb2_grpc.ToolServiceServicer):
    """See the proto."""

    def __init__(self, store: RegistryStore) -> None:
        self._store = store

    async def PutTool(
        self, request: tools_pb2.PutToolRequest, context: Any
    ) -> tools_pb2.PutToolResponse:
        """Creates or changes a tool."""
        check_tenant(request.tenant, "tenant")
        check_tool(request.tool.name, "tool.name")
        value = request.tool.SerializeToString()
        if len(value) > TOOL_BYTES_MAX:
            raise invalid("tool", f"at most {TOOL_BYTES_MAX} bytes")
        with store_errors():
            version = await self._store.put(
                Kind.TOOLS, f"{request.tenant}/{request.tool.name}", value
            )
        return tools_pb2.PutToolResponse(version=version)

    async def DeleteTool(
        self, request: tools_pb2.DeleteToolRequest, context: Any
    ) -> tools_pb2.DeleteToolResponse:
        """Deletes a tool."""
        check_tenant(request.tenant, "tenant")
        check_tool(request.name, "name")
        with store_errors():
            if not await self._store.delete(Kind.TOOLS, f"{request.tenant}/{request.name}"):
                raise not_found("TOOL_UNKNOWN", "There is no such tool.")
        return tools_pb2.DeleteToolResponse()

    async def ListTools(
        self, request: tools_pb2.ListToolsRequest, context: Any
    ) -> tools_pb2.ListToolsResponse:
        """Lists a tenant's tools."""
        check_tenant(request.tenant, "tenant")
        with store_errors():
            records = await self._store.children(Kind.TOOLS, request.tenant)
        read = (
            stored.read(agent_tools_pb2.ToolDeclaration, record)
            for _, record in sorted(records.items())
        )
        return tools_pb2.ListToolsResponse(tools=[tool for tool in read if tool is not None])
