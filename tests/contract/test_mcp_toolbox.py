"""MCP servers among the tools of a process."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from agent_svc.tool_parts import ToolParts
from sluice.channels import open_channel
from sluice.config import ConfigError
from sluice.errors import SluiceError
from sluice.telemetry import Telemetry
from tests.contract.mcp_rig import SCRIPT, context

TABLES = """
[[tool]]
name = "clock"
description = "A tool."
clock = {{}}

[[tool]]
name = "desk"
description = "A tool."
effect = "read"
mcp = {{ command = ["python", "{script}", "{log}"], tools = ["echo", "absent"] }}

[[tool]]
name = "hung"
description = "A tool."
mcp = {{ url = "http://127.0.0.1:{port}/mcp" }}
egress = {{ hosts = ["127.0.0.1:{port}"], private_allowed = ["127.0.0.1:{port}"] }}
"""


async def test_a_server_that_hangs_holds_up_no_other_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: one server that accepts and never answers costs a look at the tools a few seconds and
    makes itself unavailable alone. Method: the tools of a process, with a clock, a sound server and
    one that hangs. Oracle: what is listed and why, what can be called, and the time."""
    monkeypatch.setattr("agent_svc.adapters.tools.mcp.FIRST_LOOK_S", 4.0)
    monkeypatch.setattr("agent_svc.adapters.tools.mcp.LOOK_S", 1.0)
    writers: list[asyncio.StreamWriter] = []
    hung = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    path = tmp_path / "sluice.toml"
    path.write_text(TABLES.format(script=SCRIPT, log=tmp_path / "log", port=port))
    channel = open_channel("127.0.0.1:1")
    parts = ToolParts(path, channel, Telemetry.off(), os.environ)
    try:
        for limit_s in (8.0, 5.0):  # the first look waits for the server's whole chance
            begun = time.monotonic()
            with pytest.raises(SluiceError) as caught:
                await parts.box.resolve("", ["clock", "hung"])
            assert caught.value.reason == "TOOL_UNAVAILABLE"
            assert time.monotonic() - begun < limit_s
        begun = time.monotonic()
        tools = await parts.box.resolve("", ["clock", "desk__echo"])
        assert [tool.info.name for tool in tools] == ["clock", "desk__echo"]
        assert time.monotonic() - begun < 5.0
        result = await tools[1].call({"a": 1}, context())
        assert json.loads(json.loads(result.content_json))["arguments"] == {"a": 1}
    finally:
        hung.close()
        await parts.close()
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        await channel.close()


async def test_a_wrong_declaration_of_a_server_names_its_field(tmp_path: Path) -> None:
    path = tmp_path / "sluice.toml"
    path.write_text(
        '[[tool]]\nname = "a"\ndescription = "b"\nmcp = { url = "http://x.example.org/mcp" }\n'
    )
    channel = open_channel("127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"tool\[0\]\.mcp\.url"):
        ToolParts(path, channel, Telemetry.off(), os.environ)
    await channel.close()
