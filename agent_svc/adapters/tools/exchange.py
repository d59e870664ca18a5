"""One HTTP exchange of a tool: what its outcomes mean for the one who called it.

A request goes straight to the guarded transport: no client in between, and so no cookies, no
redirects and nothing of the environment. An answer of 2xx or 4xx is a result: the model can do
something about a refusal. A redirect is a failure; so is 5xx, after which nobody knows what was
done, unless it says that nothing was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpx2

from agent_svc.adapters.egress import (
    Cap,
    EgressRefusedError,
    EgressTransport,
    ResponseRefusedError,
)
from agent_svc.adapters.tools.secrets import Secrets
from agent_svc.ports import ToolContext, ToolError, ToolResult
from sluice.context import is_traceparent

MEDIA_TYPES: Final = ("application/json", "application/problem+json", "application/xml", "text/*")
# Others are no charsets (hex, zlib) or take time beyond measure (punycode): read as UTF-8.
_CHARSETS: Final = frozenset(
    {"utf-8", "us-ascii", "iso-8859-1", "iso-8859-15", "windows-1252", "utf-16", "shift_jis", "gbk"}
)
_OFF_LOOP_BYTES: Final = 64 << 10  # a larger body is parsed in a thread: about 1 ms for this one


@dataclass(frozen=True, slots=True)
class Exchange:
    """How a declaration's operations are called. ``idempotency_header``: empty for none."""

    transport: EgressTransport
    secrets: Secrets
    idempotency_header: str = ""

    async def call(
        self,
        method: str,
        url: str,
        context: ToolContext,
        *,
        headers: Mapping[str, str] | None = None,
        body: object = None,
    ) -> ToolResult:
        """Makes one request. ``body``: sent as JSON; None: none. Raises ToolError."""
        secret = self.secrets.headers()
        told = {"Accept": "application/json, text/*;q=0.8", "User-Agent": "sluice"}
        own: dict[str, str] = {}
        if self.idempotency_header:
            own[self.idempotency_header] = context.idempotency_key
        if is_traceparent(context.traceparent):
            own["traceparent"] = context.traceparent
        content = None
        if body is not None:
            own["Content-Type"] = "application/json"
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        try:
            sent = httpx2.Headers(told)
            sent.update(headers or {})
            # Whatever the case of a name: no argument stands beside these.
            sent.update({**own, **secret})
            request = httpx2.Request(method, url, headers=sent, content=content)
        except (httpx2.InvalidURL, ValueError, TypeError):
            raise ToolError(
                "TOOL_REFUSED", "The arguments do not make a valid request.", made=False
            ) from None
        return await self._send(request)

    async def _send(self, request: httpx2.Request) -> ToolResult:
        try:
            response = await self.transport.handle_async_request(request)
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
        except httpx2.TransportError as error:
            raise failure_of(error) from None
        if response.status_code >= 500:
            raise _server_failure(response.status_code)
        if 300 <= response.status_code < 400:
            raise ToolError(
                "TOOL_FAILED", "The tool's server redirects; that is not followed.", made=False
            )
        if len(raw) > _OFF_LOOP_BYTES:
            return await asyncio.to_thread(self._result, response, raw)
        return self._result(response, raw)

    def _result(self, response: httpx2.Response, raw: bytes) -> ToolResult:
        charset = (response.charset_encoding or "utf-8").lower()
        text = raw.decode(charset if charset in _CHARSETS else "utf-8", "replace")
        text = self.secrets.hide(text)
        body: object = text
        if "json" in response.headers.get("content-type", ""):
            try:
                body = json.loads(text, parse_constant=str)  # NaN is no JSON
                if "\\" in text:  # what was spelt with escapes is plain only now
                    body = self._hidden(body)
            except (ValueError, RecursionError):
                body = text
        answer = {"status": response.status_code, "body": body}
        return ToolResult(json.dumps(answer, ensure_ascii=False, separators=(",", ":")))

    def _hidden(self, body: object) -> object:
        """The body; as a text without the secrets if one is in it."""
        shown = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        hidden = self.secrets.hide(shown)
        return body if hidden == shown else hidden


def _server_failure(status: int) -> ToolError:
    """A gateway may say 504 of a request that was served: only what says that it was not is taken
    for not made."""
    if status in (501, 503):
        return ToolError("TOOL_UNAVAILABLE", "The tool's server does not serve now.", made=False)
    return ToolError("TOOL_LOST", "The tool's server failed.", made=True)


def failure_of(error: httpx2.TransportError) -> ToolError:
    """What a failed exchange means. ``made``: whether the request may have had its effect and
    nobody said so."""
    if isinstance(error, EgressRefusedError):
        return ToolError("EGRESS_REFUSED", "The tool may not connect there.", made=False)
    if isinstance(error, ResponseRefusedError):
        if error.cap is Cap.TIME:
            return ToolError("TOOL_TIMEOUT", "The tool took too long.", made=True)
        if error.cap is Cap.SIZE:
            return ToolError(
                "TOOL_OUTPUT_TOO_LARGE", "The call was made; its result is too large.", made=False
            )
        return ToolError(
            "TOOL_OUTPUT_INVALID", "The call was made; its result cannot be read.", made=False
        )
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return ToolError("TOOL_UNAVAILABLE", "The tool's server is not reached.", made=False)
    if isinstance(error, httpx2.TimeoutException):
        return ToolError("TOOL_TIMEOUT", "The tool took too long.", made=True)
    if isinstance(error, httpx2.LocalProtocolError | httpx2.UnsupportedProtocol):
        return ToolError("TOOL_REFUSED", "The arguments do not make a valid request.", made=False)
    return ToolError("TOOL_LOST", "The connection to the tool was lost.", made=True)
