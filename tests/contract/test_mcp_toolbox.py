"""MCP servers among the tools of a process. Mutant: mcp_session_of_all_tenants."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent_svc.ports import ToolError
from agent_svc.tool_parts import ToolParts
from sluice.channels import open_channel
from sluice.config import ConfigError
from sluice.errors import SluiceError
from sluice.telemetry import Telemetry
from tests.contract.mcp_rig import SCRIPT, context, logged

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

DESK = """
[[tool]]
name = "desk"
description = "A tool."
effect = "read"
mcp = {{ command = ["python", "-I", "-S", "{script}", "{log}"], tools = ["remember"] }}
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


async def test_what_a_server_remembers_of_one_tenant_no_other_hears(tmp_path: Path) -> None:
    """Goal: a server that keeps notes in its process keeps them apart. Method: two tenants, and one
    that was deleted and made again, each with calls. Oracle: each hears its own notes only;
    there is a process for each."""
    path = tmp_path / "sluice.toml"
    path.write_text(DESK.format(script=SCRIPT, log=tmp_path / "log"))
    versions = {"a": 1, "b": 2}
    channel = open_channel("127.0.0.1:1")
    parts = ToolParts(
        path, channel, Telemetry.off(), os.environ, versions=lambda tenant: versions.get(tenant, 0)
    )

    async def notes(tenant: str, note: int) -> list[int]:
        (tool,) = await parts.box.resolve(tenant, ["desk"])
        result = await tool.call({"note": note}, replace(context(), tenant=tenant))
        return [one["note"] for one in json.loads(json.loads(result.content_json))]

    try:
        assert [await notes("a", 1), await notes("b", 2)] == [[1], [2]]
        assert [await notes("a", 3), await notes("b", 4)] == [[1, 3], [2, 4]]
        versions["a"] = 3
        assert [await notes("a", 5), await notes("b", 6)] == [[5], [2, 4, 6]]
        (tool,) = await parts.box.resolve("a", ["desk"])
        with pytest.raises(ToolError) as refused:
            await tool.call({"note": 7}, replace(context(), tenant="b"))
        assert refused.value.reason == "TOOL_NOT_GRANTED"
    finally:
        await parts.close()
        await channel.close()
    heard = logged(tmp_path / "log")
    assert len([one for one in heard if "pids" in one]) == 3
    assert len([one for one in heard if one.get("method") == "tools/call"]) == 6


async def test_a_wrong_declaration_of_a_server_names_its_field(tmp_path: Path) -> None:
    path = tmp_path / "sluice.toml"
    path.write_text(
        '[[tool]]\nname = "a"\ndescription = "b"\nmcp = { url = "http://x.example.org/mcp" }\n'
    )
    channel = open_channel("127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"tool\[0\]\.mcp\.url"):
        ToolParts(path, channel, Telemetry.off(), os.environ)
    await channel.close()
