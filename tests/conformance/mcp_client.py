"""The client that MCP's conformance scenarios run: our MCP tools against the server of a scenario.

``python -m tests.conformance.mcp_client URL``: lists the server's tools and calls each of them, as
a run would, with arguments that are made from its schema or given by the scenario.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agent_svc.adapters.egress import EgressGuard
from agent_svc.adapters.tools.mcp_servers import McpServers
from agent_svc.ports import ToolContext, ToolError
from sluice.agent.v1 import tools_pb2

SCENARIO = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
CONTEXT = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
CALL_S = 10.0
ECHO = "json_schema_echo"  # is told the schema of the first tool as it was read
EXAMPLES: Mapping[str, Any] = {
    "string": "text",
    "integer": 3,
    "number": 5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def declaration(url: str) -> tools_pb2.ToolDeclaration:
    """The scenario's server, which may be reached although it is on this machine."""
    target = urlsplit(url).netloc
    egress = tools_pb2.Egress(hosts=[target], private_allowed=[target])
    return tools_pb2.ToolDeclaration(name="server", mcp=tools_pb2.McpTool(url=url), egress=egress)


def arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each property of a schema."""
    properties: Mapping[str, Mapping[str, Any]] = parameters.get("properties", {})
    return {name: EXAMPLES.get(str(one.get("type")), "text") for name, one in properties.items()}


def planned(name: str) -> list[dict[str, Any]]:
    """The arguments of the calls that the scenario asks for, by the tool's own name."""
    return [one.get("arguments", {}) for one in CONTEXT.get("toolCalls", []) if one["name"] == name]


async def main(url: str) -> None:
    """One session with the server."""
    guard = EgressGuard()
    servers = McpServers(guard, os.environ, Path())
    try:
        tools = await servers.server(declaration(url)).tools()
        schemas = [dict(tool.info.parameters) for tool in tools]
        for tool in tools:
            name = tool.info.name.removeprefix("server__")
            if name == ECHO:
                given_ones = [{"schema": schemas[0]}]
            else:
                given_ones = planned(name) or [arguments(tool.info.parameters)]
            for number, given in enumerate(given_ones):
                context = ToolContext("conformance", "run", f"run:{name}:{number}", CALL_S)
                try:
                    print(name, (await tool.call(given, context)).content_json)
                except ToolError as error:
                    print(name, error.reason, error.content_json)
    finally:
        await servers.close()
        guard.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))
