"""When a session with a tool server is opened, kept and closed; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from agent_svc.adapters.tools.mcp_connection import (
    DELAY_MAX_S,
    IDLE_S,
    REFRESH_S,
    McpConnection,
    NotConnectedError,
)
from sluice.clock import run_virtual

LISTED = types.Tool(name="go", input_schema={"type": "object"})


class Server:
    """A server in memory that answers the handshake and listings, unless it is ``down`` or
    ``deaf``. ``opened``: sessions begun; ``listings``: how often it was asked."""

    def __init__(self) -> None:
        self.down = False
        self.deaf = False
        self.busy = False
        self.opened: list[float] = []
        self.closed = 0
        self.listings = 0
        self.connection = McpConnection("s", self.transport, self.listed, lambda: self.busy)

    async def listed(self, tools: Sequence[types.Tool]) -> None:
        assert [tool.name for tool in tools] == ["go"]

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[TransportStreams]:
        self.opened.append(asyncio.get_running_loop().time())
        if self.down:
            raise ConnectionRefusedError
        to_client, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](8)
        outbound, from_client = anyio.create_memory_object_stream[SessionMessage](8)

        async def answer() -> None:
            async for item in from_client:
                message = item.message
                if not isinstance(message, types.JSONRPCRequest) or self.deaf:
                    continue
                reply = types.JSONRPCResponse(
                    jsonrpc="2.0", id=message.id, result=self.result(message.method)
                )
                await to_client.send(SessionMessage(reply))

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer)
                yield inbound, outbound
                tasks.cancel_scope.cancel()
        finally:
            self.closed += 1
            for stream in (to_client, inbound, outbound, from_client):
                stream.close()

    def result(self, method: str) -> dict[str, Any]:
        if method == "tools/list":
            self.listings += 1
            return {"tools": [LISTED.model_dump(by_alias=True, mode="json", exclude_none=True)]}
        info = {"name": "s", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": info}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


def test_sessions_are_shared_by_all_who_ask() -> None:
    async def scenario() -> None:
        server = Server()
        first, second = await asyncio.gather(
            server.connection.session(), server.connection.session()
        )
        assert first is second is await server.connection.session()
        assert (len(server.opened), server.listings) == (1, 1)
        await server.connection.close()
        assert server.closed == 1
        with pytest.raises(NotConnectedError):
            await server.connection.session()

    run(scenario())


def test_a_server_that_is_down_is_tried_with_growing_delays_and_at_once_when_asked_for() -> None:
    async def scenario() -> None:
        server = Server()
        server.down = True
        with pytest.raises(NotConnectedError):
            await server.connection.session()
        await asyncio.sleep(300.0)
        gaps = [b - a for a, b in zip(server.opened, server.opened[1:], strict=False)]
        assert max(gaps) <= DELAY_MAX_S
        assert gaps[-1] >= DELAY_MAX_S / 2 > gaps[0]
        assert len(server.opened) < 30
        server.down = False
        begun = asyncio.get_running_loop().time()
        await server.connection.session()
        assert asyncio.get_running_loop().time() - begun <= 1.0
        await server.connection.close()

    run(scenario())


def test_a_server_that_stops_answering_gets_a_new_session_but_not_during_calls() -> None:
    async def scenario() -> None:
        server = Server()
        session = await server.connection.session()
        server.deaf = server.busy = True
        server.connection.suspect()
        await asyncio.sleep(REFRESH_S)
        assert await server.connection.session() is session
        server.busy = False
        await asyncio.sleep(15.0)
        assert not server.connection.connected
        server.deaf = False
        assert await server.connection.session() is not session
        await server.connection.close()

    run(scenario())


def test_an_unused_session_is_closed_and_the_next_use_opens_another() -> None:
    async def scenario() -> None:
        server = Server()
        await server.connection.session()
        await asyncio.sleep(IDLE_S)
        assert server.connection.connected
        await asyncio.sleep(REFRESH_S + 1.0)
        assert (server.connection.connected, server.closed) == (False, 1)
        opened = len(server.opened)
        await asyncio.sleep(10 * IDLE_S)
        assert len(server.opened) == opened
        await server.connection.session()
        assert len(server.opened) == opened + 1
        await server.connection.close()

    run(scenario())


def test_a_server_that_ends_again_and_again_is_not_opened_in_a_loop() -> None:
    async def scenario() -> None:
        server = Server()
        end = asyncio.get_running_loop().time() + 60.0
        while asyncio.get_running_loop().time() < end:
            await server.connection.session()
            server.connection.gone()
            await asyncio.sleep(0.01)
        assert len(server.opened) < 70  # once a second at most, for those who ask
        await server.connection.close()

    run(scenario())


def test_a_server_that_stays_away_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server = Server()
        server.down = True
        with pytest.raises(NotConnectedError):
            await server.connection.session()
        await asyncio.sleep(300.0)
        assert len(server.opened) > 5
        await server.connection.close()

    run(scenario())
    assert len([line for line in caplog.records if "no session" in line.message]) == 1
