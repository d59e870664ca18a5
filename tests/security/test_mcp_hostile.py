"""MCP servers that mean harm, and what a killed service leaves behind.

Goal: a server costs bounded memory and time, learns no secret that was not declared for it, and
touches no other server. Method: real child processes and raw HTTP servers that misbehave. Oracle:
the typed failure, the sizes, what they were sent, and a second server that works on.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import psutil
import pytest
from mcp.shared.message import SessionMessage

from agent_svc.adapters.tools import mcp_http, mcp_stdio
from agent_svc.ports import ToolError
from sluice.agent.v1 import tools_pb2
from tests.contract.mcp_rig import ask, http, logged, one, opened, stdio

SECONDS_MAX = 20.0
GUARDED = """
import asyncio, sys
from pathlib import Path
from tests.contract.mcp_rig import ask, logged, opened, stdio
async def main():
    log = Path(sys.argv[1])
    async with opened() as servers:
        await ask(servers.server(stdio(log, "stubborn")), "echo")
        print(*logged(log)[0]["pids"], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_killed_service_leaves_no_tool_server_behind(tmp_path: Path) -> None:
    """Seen to fail with the guard not told of the child."""
    command = [sys.executable, "-c", GUARDED, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        watched = [psutil.Process(int(word)) for word in service.stdout.readline().split()]
        assert len(watched) == 2
        service.kill()
    _, alive = psutil.wait_procs(watched, timeout=SECONDS_MAX)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_child_gets_the_secrets_that_are_declared_for_it_and_no_other(
    tmp_path: Path,
) -> None:
    """Seen to fail with the whole environment passed on."""
    log = tmp_path / "log"
    declared = stdio(log, mcp={"secret_headers": {"DESK_KEY": "TOOL_SECRET_DESK"}})
    async with opened() as servers:
        assert await ask(servers.server(declared), "echo")
    environment = logged(log)[0]["environment"]
    assert environment["DESK_KEY"] == "canary-of-the-desk"
    assert "canary-of-the-service" not in json.dumps(environment)
    assert not [name for name in environment if name.startswith("SLUICE_")]


async def test_what_a_server_writes_to_standard_error_is_counted_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "agent_svc")
    async with opened() as servers:
        server = servers.server(stdio(tmp_path / "log"))
        assert await ask(server, "whisper", secret="canary-of-the-server") == "whispered"
        assert await ask(server, "junk") == "after the junk"
    shown = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "a tool server wrote to its standard error" in shown
    assert "canary-of-the-server" not in shown
    assert "I am a banner" not in shown


async def test_a_line_without_an_end_costs_its_bound_and_the_session(tmp_path: Path) -> None:
    """Seen to fail with the bound on a line removed."""
    log = tmp_path / "log"
    async with opened() as servers:
        server = servers.server(stdio(log, output_bytes_max=1000))
        before = psutil.Process().memory_info().rss
        with pytest.raises(ToolError) as caught:
            await ask(server, "long_line", bytes=200 << 20)
        assert caught.value.reason == "TOOL_LOST"
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert await ask(server, "echo")


async def test_lines_that_are_no_messages_hold_up_nobody() -> None:
    """Goal: a server that prints without end takes its turns as all others. Method: its output has
    many lines already; another task counts its turns. Oracle: about one a line, not one for all.
    Seen to fail when such a line is passed over at once."""
    lines = 1000
    output = asyncio.StreamReader()
    output.feed_data(b"x\n" * lines)
    output.feed_eof()
    to_session, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    ended = asyncio.Event()
    process = cast(asyncio.subprocess.Process, SimpleNamespace(stdout=output))
    reading = asyncio.create_task(mcp_stdio._read(process, to_session, "desk", ended.set))
    turns = 0
    while not ended.is_set():
        turns += 1
        await asyncio.sleep(0)
    await reading
    inbound.close()
    assert turns >= lines


async def test_a_tenants_registered_tool_starts_no_program(tmp_path: Path) -> None:
    """Seen to fail with the check of the tenant removed."""
    async with opened() as servers:
        with pytest.raises(ToolError) as caught:
            servers.server(stdio(tmp_path / "log"), "acme")
        assert caught.value.reason == "TOOL_UNAVAILABLE"
        assert not (tmp_path / "log").exists()


Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_http(handler: Handler) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that reads one request a connection and lets ``handler`` answer it."""
    heard: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = await reader.readexactly(length)
            heard.append(head + body)
            await handler(body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/mcp", heard
    finally:
        server.close()


def reply(body: bytes, media_type: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


def result(request: bytes, value: object) -> bytes:
    number = json.loads(request)["id"]
    return reply(json.dumps({"jsonrpc": "2.0", "id": number, "result": value}).encode())


async def legacy(body: bytes, writer: asyncio.StreamWriter) -> bool:
    """Answers as a sound server until a tool is called; whether it did."""
    message = json.loads(body) if body else {}
    method = message.get("method", "")
    if method == "initialize":
        info = {"name": "raw", "version": "1"}
        answer = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": info}
        writer.write(result(body, answer))
    elif method == "tools/list":
        tool = {"name": "go", "inputSchema": {"type": "object"}}
        writer.write(result(body, {"tools": [tool]}))
    elif method == "server/discover":
        writer.write(reply(b"", status="404 Not Found"))
    elif method.startswith("notifications/"):
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
    else:
        return False
    await writer.drain()
    return True


async def _endless(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        while True:
            writer.write(b" " * (1 << 20))
            await writer.drain()


async def _endless_event(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
        while True:
            writer.write(b"z" * (1 << 20))
            await writer.drain()


async def _bomb(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        answer = reply(gzip.compress(b" " * (200 << 20), 9))
        writer.write(answer.replace(b"\r\n", b"\r\ncontent-encoding: gzip\r\n", 1))
        await writer.drain()


async def _cut(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        writer.write(reply(b'{"jsonrpc":"2.0"')[:-4])
        await writer.drain()


async def _redirect(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        answer = reply(b"", status="307 Temporary Redirect")
        head = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:9/\r\n"
        writer.write(answer.replace(b"HTTP/1.1 307 Temporary Redirect\r\n", head))
        await writer.drain()


async def _unavailable(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        writer.write(reply(b"no", "text/plain", "502 Bad Gateway"))
        await writer.drain()


async def _forbidden(body: bytes, writer: asyncio.StreamWriter) -> None:
    if not await legacy(body, writer):
        writer.write(reply(b"no", "text/plain", "403 Forbidden"))
        await writer.drain()


def _answers(answer: bytes) -> Handler:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        if not await legacy(body, writer):
            writer.write(answer)
            await writer.drain()

    return handler


@pytest.mark.parametrize(
    ("handler", "reason", "made"),
    [
        (_endless, "TOOL_OUTPUT_INVALID", True),
        (_endless_event, "TOOL_LOST", True),
        (_bomb, "TOOL_OUTPUT_INVALID", True),
        (_cut, "TOOL_OUTPUT_INVALID", True),
        (_redirect, "TOOL_FAILED", False),
        (_unavailable, "TOOL_LOST", True),
        (_forbidden, "TOOL_FAILED", False),
        (_answers(reply(b"", status="202 Accepted")), "TOOL_LOST", True),
        (_answers(reply(b"<p>done</p>", "text/html")), "TOOL_LOST", True),
        (_answers(reply(b"", status="303 See Other\r\nlocation: /mcp")), "TOOL_LOST", True),
        (
            _answers(reply(b"", status="302 Found\r\nlocation: http://127.0.0.1:9/")),
            "TOOL_LOST",
            True,
        ),
    ],
)
async def test_an_http_answer_that_misbehaves_is_one_failed_call(
    handler: Handler, reason: str, made: bool
) -> None:
    """Seen to fail with the bound on a body removed."""
    async with raw_http(handler) as (url, _), opened() as servers:
        server = servers.server(http(url, output_bytes_max=1000))
        session = await server.connection.session()
        before = psutil.Process().memory_info().rss
        with pytest.raises(ToolError) as caught:
            await ask(server, "go")
        assert (caught.value.reason, caught.value.made) == (reason, made)
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert await server.connection.session() is session


@pytest.mark.parametrize(
    "code",
    [
        mcp_http.NOT_SENT,
        mcp_http.LOST,
        mcp_http.REFUSED,
        mcp_http.SESSION_GONE,
        mcp_http.NOT_ALLOWED,
    ],
)
async def test_a_servers_error_is_not_taken_for_one_of_this_side(code: int) -> None:
    """Goal: what a server did is not done again because its error has the number of one by which
    this side says that nothing was done. Seen to fail with errors told by their code alone."""
    calls = 0

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        if await legacy(body, writer):
            return
        calls += 1
        error = {"code": code, "message": "done, then failed", "data": {"status": 503}}
        answer = {"jsonrpc": "2.0", "id": json.loads(body)["id"], "error": error}
        writer.write(reply(json.dumps(answer).encode()))
        await writer.drain()

    async with raw_http(handler) as (url, _), opened() as servers:
        server = servers.server(http(url))
        with pytest.raises(ToolError) as caught:
            await ask(server, "go")
        assert (caught.value.reason, caught.value.made, calls) == ("TOOL_FAILED", True, 1)


async def test_one_failed_request_costs_no_other_call() -> None:
    """Goal: calls of one session fail alone. Method: two calls at once, one of whose connections
    the server resets. Oracle: the other has its result. Seen to fail without the layer that
    answers failures."""
    second = asyncio.Event()

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        if await legacy(body, writer):
            return
        if json.loads(body)["params"]["arguments"].get("die"):
            await second.wait()
            writer.transport.abort()
            return
        second.set()
        await asyncio.sleep(0.3)
        writer.write(result(body, {"content": [{"type": "text", "text": "done"}]}))
        await writer.drain()

    async with raw_http(handler) as (url, _), opened() as servers:
        server = servers.server(http(url))
        await one(server, "go")
        done = asyncio.create_task(ask(server, "go"))
        with pytest.raises(ToolError) as caught:
            await ask(server, "go", die=True)
        assert caught.value.reason == "TOOL_LOST"
        assert await done == "done"


async def test_addresses_that_the_declaration_does_not_allow_are_not_reached() -> None:
    """Seen to fail with a client past the egress guard."""

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        await legacy(body, writer)

    async with raw_http(handler) as (url, heard), opened() as servers:
        allowed = http(url).egress
        for egress in (
            tools_pb2.Egress(),
            tools_pb2.Egress(hosts=allowed.hosts),
            tools_pb2.Egress(hosts=["example.org"], private_allowed=allowed.private_allowed),
        ):
            declared = http(url)
            declared.egress.CopyFrom(egress)
            (state,) = await servers.server(declared, "acme").states()
            assert state.problem == "its address is not allowed"
        assert heard == []


async def test_secret_headers_reach_the_server_and_never_the_model_or_its_errors() -> None:
    """Seen to fail with results passed on as they come."""

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        if not await legacy(body, writer):
            echo = {"content": [{"type": "text", "text": "your key is canary-of-the-desk"}]}
            failed = json.loads(body)["params"]["arguments"].get("fail", False)
            writer.write(result(body, echo | {"isError": failed}))
            await writer.drain()

    headers = {"x-api-key": "TOOL_SECRET_DESK"}
    async with raw_http(handler) as (url, heard), opened() as servers:
        server = servers.server(http(url, mcp={"secret_headers": headers}))
        assert "canary" not in json.dumps(await ask(server, "go"))
        with pytest.raises(ToolError) as caught:
            await ask(server, "go", fail=True)
        assert "canary" not in caught.value.content_json + caught.value.message
        assert heard
        assert all(b"x-api-key: canary-of-the-desk" in one for one in heard)


async def test_a_secret_that_is_not_set_makes_the_server_unavailable(tmp_path: Path) -> None:
    declared = stdio(tmp_path / "log", mcp={"secret_headers": {"A": "TOOL_SECRET_ABSENT"}})
    async with opened() as servers:
        begun = time.monotonic()
        (state,) = await servers.server(declared).states()
        assert state.problem == "A secret of the tool is not set."
        assert time.monotonic() - begun < 5.0
        assert not (tmp_path / "log").exists()
