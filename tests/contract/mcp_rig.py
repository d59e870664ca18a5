"""MCP servers for tests, reached as the agent service reaches them."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_svc.adapters.egress import EgressGuard
from agent_svc.adapters.tools.mcp import McpServer, McpTool
from agent_svc.adapters.tools.mcp_servers import McpServers
from agent_svc.ports import ToolContext
from sluice.agent.v1 import tools_pb2

SCRIPT = Path(__file__).with_name("mcp_scripted.py")
ENVIRON = {
    "PATH": "/usr/bin:/bin",
    "SLUICE_GRANT_KEY": "canary-of-the-service",
    "TOOL_SECRET_DESK": "canary-of-the-desk",
}
# What finds and runs a test's server is here too, so that they need no more.
TIMES_OUT_S = 20.0


def context(key: str = "run:1:1", deadline_s: float = TIMES_OUT_S) -> ToolContext:
    return ToolContext(
        tenant="dev", run_id="run", idempotency_key=key, deadline_s=deadline_s, traceparent=""
    )


def stdio(log: Path, *flags: str, **more: Any) -> tools_pb2.ToolDeclaration:
    """The scripted server as a declaration named ``desk``."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(log), *flags]
    return tools_pb2.ToolDeclaration(
        name="desk", mcp=tools_pb2.McpTool(command=command, **more.pop("mcp", {})), **more
    )


def http(url: str, **more: Any) -> tools_pb2.ToolDeclaration:
    """A server on this machine as a declaration named ``desk``."""
    port = url.split(":")[2].partition("/")[0]
    egress = tools_pb2.Egress(hosts=[f"127.0.0.1:{port}"], private_allowed=[f"127.0.0.1:{port}"])
    return tools_pb2.ToolDeclaration(
        name="desk", mcp=tools_pb2.McpTool(url=url, **more.pop("mcp", {})), egress=egress, **more
    )


@asynccontextmanager
async def opened(environ: Mapping[str, str] = ENVIRON) -> AsyncIterator[McpServers]:
    """The servers of a process, closed at the end."""
    guard = EgressGuard()
    servers = McpServers(guard, environ, SCRIPT.parents[2])
    try:
        yield servers
    finally:
        await servers.close()
        guard.close()


async def one(server: McpServer, name: str) -> McpTool:
    """The tool of this name."""
    return {tool.info.name: tool for tool in await server.tools()}[f"desk__{name}"]


async def ask(
    server: McpServer, name: str, deadline_s: float = TIMES_OUT_S, **arguments: Any
) -> Any:
    """The result of a call."""
    tool = await one(server, name)
    return json.loads((await tool.call(arguments, context(deadline_s=deadline_s))).content_json)


def logged(log: Path) -> list[dict[str, Any]]:
    """What the scripted server heard."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
