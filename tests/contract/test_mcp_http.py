"""Tools of MCP servers over streamable HTTP: the example server, by the official library."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_svc.adapters.tools.mcp import McpServer
from agent_svc.ports import ToolError
from sluice.agent.v1 import tools_pb2
from tests.contract.mcp_rig import ask, context, free_port, http, one, opened

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mcp_tickets.py"
START_S = 20.0


@contextmanager
def serving(file: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The example server as a process of its own."""
    command = [sys.executable, str(EXAMPLE), "--file", str(file), "--http", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_servers_tools_are_found_called_and_fail_over_http(tmp_path: Path) -> None:
    """Goal: the whole way over HTTP, a server that comes late and one that is killed included.
    Method: the example server, started after the first call for it, killed and started again.
    Oracle: the results, one ticket per key, and the typed failures while it is away."""
    port, file = free_port(), tmp_path / "tickets.json"
    async with opened() as servers:
        server = servers.server(http(f"http://127.0.0.1:{port}/mcp"))
        with pytest.raises(ToolError) as caught:
            await server.tools()
        assert (caught.value.reason, caught.value.made) == ("TOOL_UNAVAILABLE", False)
        with serving(file, port):
            async with asyncio.timeout(START_S):
                while [state.problem for state in await server.states()] != ["", ""]:
                    await asyncio.sleep(0.1)
            assert server.connection.connected
            tool = await one(server, "open_ticket")
            for key, number in (("a", 1), ("a", 1), ("b", 2)):
                result = await tool.call({"title": "Printer", "text": "on fire"}, context(key))
                assert json.loads(result.content_json) == {"id": number}
            found = await ask(server, "find_tickets", word="PRINTER")
            assert [ticket["id"] for ticket in found["result"]] == [1, 2]
            with pytest.raises(ToolError) as caught:
                await ask(server, "open_ticket", title=" ", text="")
            assert (caught.value.reason, caught.value.made) == ("TOOL_FAILED", False)
            assert "needs a title" in caught.value.content_json
            with pytest.raises(ToolError) as caught:
                await ask(server, "find_tickets", wrong=1)
            assert caught.value.reason == "TOOL_FAILED"
        begun = time.monotonic()
        with pytest.raises(ToolError) as caught:
            await ask(server, "find_tickets", word="x")
        # Lost, when the call went out on a connection of which nobody knew that it is dead.
        assert caught.value.reason in ("TOOL_UNAVAILABLE", "TOOL_LOST")
        assert time.monotonic() - begun < 5.0
        with serving(file, port):
            assert len((await _until_there(server, "fire"))["result"]) == 2


async def _until_there(server: McpServer, word: str) -> Any:
    """Asks again and again, as long as nothing but the server's absence keeps it from answering."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await ask(server, "find_tickets", word=word)
            except ToolError as error:
                # Lost, when the dead session was given up while the call was in it.
                if error.reason not in ("TOOL_UNAVAILABLE", "TOOL_LOST"):
                    raise
                await asyncio.sleep(0.1)


async def test_the_example_serves_over_standard_input_and_output_too(tmp_path: Path) -> None:
    command = ["python", str(EXAMPLE), "--file", str(tmp_path / "tickets.json")]
    desk = tools_pb2.ToolDeclaration(name="desk", mcp=tools_pb2.McpTool(command=command))
    async with opened() as servers:
        server = servers.server(desk)
        opened_one = await ask(server, "open_ticket", title="A", text="b")
        assert opened_one == {"id": 1}
        assert (await ask(server, "find_tickets", word="a"))["result"][0]["title"] == "A"
