"""Tools of MCP servers that run as child processes, against one that is scripted."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_svc.adapters.tools.mcp import McpServer
from agent_svc.adapters.tools.mcp_connection import LISTING_GAP_S
from agent_svc.domain.model import Effect
from agent_svc.ports import ToolError
from sluice.agent.v1 import tools_pb2
from tests.contract.mcp_rig import TIMES_OUT_S, ask, context, logged, one, opened, stdio

PATIENCE_S = 15.0


def calls(log: Path) -> list[dict[str, Any]]:
    return [message for message in logged(log) if message.get("method") == "tools/call"]


def connected(*servers: McpServer) -> list[bool]:
    return [server.connection.connected for server in servers]


async def failure(awaited: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await awaited
    return caught.value


async def test_a_servers_tools_are_offered_under_the_declarations_name(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        tools = {tool.info.name: tool.info for tool in await server.tools()}
        assert tools["desk__echo"].description == "Does echo."
        assert tools["desk__echo"].parameters == {"type": "object", "properties": {}}
        assert all(tool.effect is Effect.ONCE for tool in tools.values())
        assert [state.info for state in await server.states()] == list(tools.values())
        assert not any(state.problem for state in await server.states())


async def test_the_effect_and_the_choice_of_tools_are_the_declarations(tmp_path: Path) -> None:
    declared = stdio(
        tmp_path / "log",
        effect=tools_pb2.TOOL_EFFECT_IDEMPOTENT,
        needs_approval=True,
        mcp={"tools": ["echo"]},
    )
    async with opened() as servers:
        (tool,) = await servers.server(declared).tools()
        assert tool.info.effect is Effect.IDEMPOTENT
        assert tool.info.needs_approval


async def test_a_call_carries_its_arguments_and_its_key(tmp_path: Path) -> None:
    async with opened() as servers:
        said = json.loads(await ask(servers.server(stdio(tmp_path / "log")), "echo", a=1))
    assert said["arguments"] == {"a": 1}
    assert said["meta"]["sluice/idempotency-key"] == "run:1:1"


async def test_results_are_text_structure_or_names_of_what_is_not_shown(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        assert await ask(server, "structured") == {"a": [1, 2]}
        shown = await ask(server, "blocks")
        assert shown["content"][0] == "look:"
        assert [block["type"] for block in shown["content"][1:]] == [
            "image",
            "resource_link",
            "resource",
        ]
        assert await ask(server, "junk") == "after the junk"


async def test_a_tool_that_fails_says_why_to_the_model(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        error = await failure(ask(server, "error"))
        assert (error.reason, error.made) == ("TOOL_FAILED", False)
        assert json.loads(error.content_json) == "no such ticket: 7"
        assert "7" not in error.message
        error = await failure(ask(server, "rpc_error"))
        assert (error.reason, error.made) == ("TOOL_FAILED", False)
        assert json.loads(error.content_json) == "title is missing"


async def test_results_have_a_limit(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log", output_bytes_max=1000))
        assert len(await ask(server, "huge", bytes=998)) == 998  # and two quotes
        error = await failure(ask(server, "huge", bytes=999))
        assert (error.reason, error.made) == ("TOOL_OUTPUT_TOO_LARGE", True)


async def test_a_call_ends_at_its_deadline_and_the_server_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened() as servers:
        server = servers.server(stdio(log))
        await one(server, "sleep")
        begun = time.monotonic()
        error = await failure(ask(server, "sleep", deadline_s=0.3))
        assert time.monotonic() - begun < 1.5
        assert (error.reason, error.made) == ("TOOL_TIMEOUT", True)
        assert await ask(server, "echo")  # the session lives on
    (cancel,) = [m for m in logged(log) if m.get("method") == "notifications/cancelled"]
    assert cancel["params"]["requestId"] == calls(log)[0]["id"]


async def test_a_cancelled_call_ends_at_once_and_the_server_is_told(tmp_path: Path) -> None:
    """Goal: CancelRun reaches the tool. Method: a call that never ends, cancelled. Oracle: it ends
    within a second, and the server heard the protocol's cancellation of this request."""
    log = tmp_path / "log"
    async with opened() as servers:
        server = servers.server(stdio(log))
        call = asyncio.create_task((await one(server, "sleep")).call({}, context()))
        while not calls(log):
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - begun < 1.0
        assert await ask(server, "echo")
    (cancel,) = [m for m in logged(log) if m.get("method") == "notifications/cancelled"]
    assert cancel["params"]["requestId"] == calls(log)[0]["id"]


async def test_what_a_server_asks_of_its_client_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened() as servers:
        refused = await ask(servers.server(stdio(log)), "ask")
    assert json.loads(refused) == [True, True, True]
    (initialize,) = [m for m in logged(log) if m.get("method") == "initialize"]
    assert set(initialize["params"]["capabilities"]) & {"sampling", "elicitation", "roots"} == set()


async def test_a_changed_listing_is_read_again(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        await ask(server, "change")
        async with asyncio.timeout(LISTING_GAP_S + 5.0):
            while "desk__later" not in {tool.info.name for tool in await server.tools()}:
                await asyncio.sleep(0.05)


async def test_calls_beyond_the_limit_wait_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_svc.adapters.tools.mcp.CALLS_MAX", 2)
    log = tmp_path / "log"
    async with opened() as servers:
        server = servers.server(stdio(log))
        tool = await one(server, "sleep")
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(tool.call({}, context())) for _ in range(3)]
            while len(calls(log)) < 2:
                await asyncio.sleep(0.01)
            error = await failure(ask(server, "echo", deadline_s=0.2))
            assert (error.reason, error.made) == ("TOOL_TIMEOUT", False)
            assert len(calls(log)) == 2
            for call in waiting:
                call.cancel()


async def test_a_server_that_dies_loses_its_calls_and_comes_back(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        error = await failure(ask(server, "crash"))
        assert (error.reason, error.made) == ("TOOL_LOST", True)
        assert await ask(server, "echo")


async def test_a_server_that_cannot_start_is_unavailable_and_nothing_else(tmp_path: Path) -> None:
    broken = tools_pb2.ToolDeclaration(
        name="broken", mcp=tools_pb2.McpTool(command=["/nonexistent/server"])
    )
    async with opened() as servers:
        begun = time.monotonic()
        error = await failure(servers.server(broken).tools())
        assert (error.reason, error.made) == ("TOOL_UNAVAILABLE", False)
        (state,) = await servers.server(broken).states()
        assert time.monotonic() - begun < 5.0
        assert state.info.name == "broken"
        assert state.problem == "its command cannot be started"
        assert await ask(servers.server(stdio(tmp_path / "log")), "echo")


async def test_of_a_server_that_starts_is_said_that_it_is_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listing asks it too, and does not wait for as long as a run's first look."""
    monkeypatch.setattr("agent_svc.adapters.tools.mcp.LOOK_S", 0.2)
    slow = tools_pb2.ToolDeclaration(name="slow", mcp=tools_pb2.McpTool(command=["sleep", "60"]))
    async with opened() as servers:
        (state,) = await servers.server(slow).states()
        assert state.problem == "the server has not answered yet; a run waits for it"


async def test_an_answer_that_breaks_the_protocol_is_a_failed_call(tmp_path: Path) -> None:
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        error = await failure(ask(server, "invalid"))
        assert (error.reason, error.made) == ("TOOL_OUTPUT_INVALID", True)
        assert await ask(server, "echo")


async def test_closing_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    """Goal: no orphan. Method: a server and its child that ignore SIGTERM and the end of input.
    Oracle: both are gone when closing returns, within its bound."""
    log = tmp_path / "log"
    async with opened() as servers:
        assert await ask(servers.server(stdio(log, "stubborn")), "echo")
        pids = logged(log)[0]["pids"]
        assert len(pids) == 2
        begun = time.monotonic()
    assert time.monotonic() - begun < 8.0
    assert not [pid for pid in pids if psutil.pid_exists(pid) and _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_session_too_many_is_refused_until_an_idle_one_has_made_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: sessions are bounded, and who needs one gets it before long. Method: a bound of two
    programs and three that are wanted. Oracle: while both were just used the third is refused as
    unavailable and nothing else happens; then the one that was not used for longest makes room."""
    monkeypatch.setattr("agent_svc.adapters.tools.mcp_servers.PROGRAMS_MAX", 2)
    async with opened() as servers:
        first, second, third = (servers.server(stdio(tmp_path / f"log{n}")) for n in range(3))
        await ask(first, "echo")
        await ask(second, "echo")
        with pytest.raises(ToolError) as caught:
            await third.tools()
        assert (caught.value.reason, caught.value.made) == ("TOOL_UNAVAILABLE", False)
        assert third.connection.problem == "Too many tool servers are in use."
        assert connected(first, second) == [True, True]
        await ask(first, "echo")
        monkeypatch.setattr("agent_svc.adapters.tools.mcp_servers.SPARED_S", 0.0)
        async with asyncio.timeout(TIMES_OUT_S):
            while connected(third) == [False]:
                with suppress(ToolError):
                    await third.tools()
        assert connected(first, second) == [True, False]
        await ask(third, "echo")
