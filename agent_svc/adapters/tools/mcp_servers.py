"""How MCP servers are reached, and what they share in a process.

A declaration has a session of its own for each tenant: see ``toolbox.py``. One that was not used
for a quarter of an hour is closed and opened again by the next use, so that what is open is what is
in use. Where no more may be open, a new one is refused for now, and the one that was not used for
longest is closed if it was not used for ``SPARED_S``: the next attempt finds its place.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from math import isinf
from pathlib import Path
from typing import Final

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from agent_svc.adapters.egress import Caps, EgressGuard
from agent_svc.adapters.tools.mcp import McpServer
from agent_svc.adapters.tools.mcp_http import READ_S, McpHttpTransport
from agent_svc.adapters.tools.mcp_stdio import child_environment, stdio_transport
from agent_svc.adapters.tools.secrets import Secrets
from agent_svc.ports import ToolError
from sluice.agent.v1 import tools_pb2
from sluice.egress_rules import EgressRules, PrivateRule
from sluice.process_guard import ProcessGuard
from sluice.tool_rules import egress_rules

SESSIONS_MAX: Final = 128  # open at once; one takes about 200 KB here
PROGRAMS_MAX: Final = 64  # of them with child processes, each of tens of MB
SPARED_S: Final = 30.0  # a session that was used since is not closed for another one
OWN_PYTHON: Final = "python"  # as a program: the interpreter that runs this
# A stream of a server's notifications, which goes on for as long as the session.
STREAM_S: Final = 86_400.0
STREAM_BYTES_MAX: Final = 1 << 40


class McpServers:
    """``environ``: this process's environment, for secrets and for what a child inherits.
    ``root``: the folder in which programs start. ``registered_private``: what registered servers
    may be at beside public addresses."""

    def __init__(
        self,
        guard: EgressGuard,
        environ: Mapping[str, str],
        root: Path,
        registered_private: Sequence[PrivateRule] = (),
    ) -> None:
        self._guard = guard
        self._root = root
        self._environ = environ
        self._registered_private = registered_private
        self._servers: set[McpServer] = set()
        self._open: set[McpServer] = set()
        self._process_guard: ProcessGuard | None = None
        self._guarding_lock = asyncio.Lock()

    def server(self, declaration: tools_pb2.ToolDeclaration, tenant: str = "") -> McpServer:
        """The server of a declaration, not yet connected; ``tenant``: whose it is, empty for one
        of the configuration."""
        if tenant and declaration.mcp.command:
            message = "Only the configuration may start programs."
            raise ToolError("TOOL_UNAVAILABLE", message, made=False)
        rules = egress_rules(declaration.egress, private=self._registered_private if tenant else ())
        secrets = Secrets(declaration.mcp.secret_headers, self._environ)

        def way() -> AbstractAsyncContextManager[TransportStreams]:
            command = bool(declaration.mcp.command)
            return self._stdio(server) if command else self._http(server, rules)

        server = McpServer(declaration, way, secrets, self._servers.discard)
        self._servers.add(server)
        return server

    async def close(self) -> None:
        """Ends all sessions and child processes; a few seconds at most."""
        await asyncio.gather(*(server.close() for server in list(self._servers)))
        if self._process_guard is not None:
            await asyncio.to_thread(self._process_guard.close)

    @contextmanager
    def _counted(self, server: McpServer) -> Iterator[None]:
        programs = [one for one in self._open if one.declaration.mcp.command]
        if server.declaration.mcp.command and len(programs) >= PROGRAMS_MAX:
            raise _full(programs)
        if len(self._open) >= SESSIONS_MAX:
            raise _full(self._open)
        self._open.add(server)
        try:
            yield
        finally:
            self._open.discard(server)

    @asynccontextmanager
    async def _http(self, server: McpServer, rules: EgressRules) -> AsyncIterator[TransportStreams]:
        headers = server.secrets.headers()
        caps = Caps(body_bytes_max=STREAM_BYTES_MAX, total_s=STREAM_S, read_s=READ_S)
        url, most = server.declaration.mcp.url, server.message_bytes_max
        with self._counted(server):
            transport = McpHttpTransport(self._guard.transport(rules, caps), most)
            async with (
                httpx2.AsyncClient(
                    transport=transport, headers=headers, follow_redirects=False, trust_env=False
                ) as client,
                streamable_http_client(url, http_client=client, max_sse_event_size=most) as streams,
            ):
                yield streams

    @asynccontextmanager
    async def _stdio(self, server: McpServer) -> AsyncIterator[TransportStreams]:
        declared = server.secrets.headers()
        program, *words = server.declaration.mcp.command
        with self._counted(server):
            async with stdio_transport(
                [sys.executable if program == OWN_PYTHON else program, *words],
                child_environment(self._environ, declared),
                name=server.declaration.name,
                folder=self._root,
                line_bytes_max=server.message_bytes_max,
                guard=await self._guarding(),
                ended=server.connection.gone,
            ) as streams:
                yield streams

    async def _guarding(self) -> ProcessGuard:
        async with self._guarding_lock:
            if self._process_guard is None:
                self._process_guard = await asyncio.to_thread(ProcessGuard)
            return self._process_guard


def _full(servers: Collection[McpServer]) -> ToolError:
    """The refusal of one more session beside these, one of which may be closed for it."""
    spare = [one for one in servers if not one.calls and one.connection.unused_s > SPARED_S]
    if spare and not any(isinf(one.connection.unused_s) for one in spare):
        max(spare, key=lambda one: one.connection.unused_s).connection.rest()
    return ToolError("TOOL_UNAVAILABLE", "Too many tool servers are in use.", made=False)
