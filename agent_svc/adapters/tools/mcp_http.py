"""Streamable HTTP below the MCP library: one failed request costs that request and no other.

The library ends a whole session, with every call in it, when one of its HTTP requests fails. So
failures are answered here with a response that carries a JSON-RPC error, by whose code the caller
sees whether the request can have reached the server. Also here: bounds that the library does not
have, on bodies, on the wait for answers that nobody needs, and on how often a stream is reopened.

Below lies the egress guard's transport, which decides where connections go.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Final

import httpx2
import mcp_types as types
from mcp import MCPError

from agent_svc.adapters.egress import EgressRefusedError

NOT_SENT: Final = -32091  # the request cannot have reached the server
LOST: Final = -32092  # it may have, and there is no answer
REFUSED: Final = -32093  # the server refused it by an HTTP status
SESSION_GONE: Final = -32094  # the server does not know the session any more; nothing was done
NOT_ALLOWED: Final = -32095  # the egress guard refused the connection
_OWN: Final = (NOT_SENT, LOST, REFUSED, SESSION_GONE, NOT_ALLOWED)
# Goes with the errors that are made here, and to nobody else: a server may use their codes too.
_MARK: Final = secrets.token_hex(16)

CONNECT_S: Final = 5.0
READ_S: Final = 3660.0  # more than a call may take; the call's own deadline bounds it
WRITE_S: Final = 30.0
SIDE_READ_S: Final = 3.0  # notifications, answers and farewells: the next message waits behind them
REOPEN_S: Final = 0.25  # least time between two openings of the stream for notifications

_ANSWERS = ("application/json", "text/event-stream")
_BEFORE_SENDING = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.UnsupportedProtocol,
    httpx2.LocalProtocolError,
    httpx2.InvalidURL,
)


def code_of(error: MCPError) -> int:
    """An error's code; of a server's error that has one of the codes above, that of a fault within
    the server, which says nothing of what was done."""
    if error.code in _OWN and error.data != _MARK:
        return types.INTERNAL_ERROR
    return error.code


class McpHttpTransport(httpx2.AsyncBaseTransport):
    """Requests of one MCP session over ``inner``. ``body_bytes_max``: of an answer that is not a
    stream; events of streams are bounded by the library."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, body_bytes_max: int) -> None:
        self._inner = inner
        self._body_bytes_max = body_bytes_max
        self._opened_at = -REOPEN_S

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        read_s = READ_S if request.method == "GET" or _method(request) else SIDE_READ_S
        request.extensions["timeout"] = httpx2.Timeout(
            read=read_s, connect=CONNECT_S, write=WRITE_S, pool=CONNECT_S
        ).as_dict()
        if request.method == "GET":
            await self._space_openings()
        try:
            response = await self._inner.handle_async_request(request)
        except EgressRefusedError:
            return _answer(request, 503, NOT_ALLOWED)
        except _BEFORE_SENDING:
            return _answer(request, 503, NOT_SENT)
        except httpx2.TransportError:
            return _answer(request, 504, LOST)
        return await self._checked(request, response)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _space_openings(self) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = max(0.0, self._opened_at + REOPEN_S - now)
        self._opened_at = now + wait_s
        await asyncio.sleep(wait_s)

    async def _checked(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            code = SESSION_GONE
        elif response.status_code >= 400 and media_type != "application/json":
            code = LOST if response.status_code >= 500 else REFUSED
        elif _method(request) == "tools/call" and not _may_answer(response, media_type):
            code = LOST  # the library would say that the request was invalid
        else:
            if media_type != "text/event-stream":
                assert isinstance(response.stream, httpx2.AsyncByteStream)
                response.stream = _Capped(response.stream, self._body_bytes_max)
            return response
        await response.aclose()
        return _answer(request, response.status_code, code)


class _Capped(httpx2.AsyncByteStream):
    """A body that ends with the one error that the library takes for an unreadable answer, when it
    is longer than allowed or its connection is lost."""

    def __init__(self, inner: httpx2.AsyncByteStream, bytes_max: int) -> None:
        self._inner = inner
        self._bytes_max = bytes_max

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if size > self._bytes_max:
                    raise httpx2.StreamError("the body is longer than allowed")
                yield chunk
        except httpx2.TransportError:
            raise httpx2.StreamError("the connection was lost") from None

    async def aclose(self) -> None:
        await self._inner.aclose()


def _method(request: httpx2.Request) -> str:
    """The method of the JSON-RPC request in the body, which has an answer; empty: there is none."""
    if request.method != "POST":
        return ""
    message = json.loads(request.content)
    return message.get("method", "") if isinstance(message, dict) and "id" in message else ""


def _may_answer(response: httpx2.Response, media_type: str) -> bool:
    """Whether the response holds an answer or says that the request has to be made elsewhere: not
    one that takes the request and answers nothing, nor a redirect after it was done."""
    if response.status_code < 300:
        return response.status_code != 202 and media_type in _ANSWERS
    return response.status_code in (307, 308) or response.status_code >= 400


def _answer(request: httpx2.Request, status: int, code: int) -> httpx2.Response:
    """A response in the server's place; the library sets the request's id."""
    error = {"code": code, "message": f"HTTP request failed, status {status}", "data": _MARK}
    body = {"jsonrpc": "2.0", "id": None, "error": error}
    return httpx2.Response(max(status, 400), json=body, request=request)
