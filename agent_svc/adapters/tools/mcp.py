"""Tools of MCP servers, over streamable HTTP or from a child process.

A server's tools are named ``declaration__tool``. What may be done with a call in doubt follows from
the declaration's effect alone, never from what the server says of itself. The key against repeated
effects goes along in the call's ``_meta``. A call has one deadline, over waiting for its turn, for
a session and for the answer; when it passes, or the call is cancelled, the server is told.

Failure modes, all as ToolError: no session (nothing was done); an answer that says that the tool
failed; no answer, or none that can be read (what was done is not known). A server that is down
makes its own tools unavailable and touches no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import mcp_types as types
from mcp import MCPError
from mcp.client import ClientSession, Transport
from pydantic import TypeAdapter, ValidationError

from agent_svc.adapters.tools import mcp_http
from agent_svc.adapters.tools.mcp_connection import McpConnection, NotConnectedError
from agent_svc.adapters.tools.mcp_listing import Listed, check_listing
from agent_svc.adapters.tools.mcp_results import error_json, error_text, result_json
from agent_svc.adapters.tools.secrets import Secrets
from agent_svc.domain.model import Effect, ToolInfo
from agent_svc.ports import ToolContext, ToolError, ToolResult, ToolStatus
from sluice.agent.v1 import tools_pb2
from sluice.tool_rules import output_bytes_max, timeout_s

CALLS_MAX: Final = 16  # at once on one server; more wait their turn
MESSAGE_SLACK_BYTES: Final = 1 << 20  # of a message beyond its result; a listing fits in it
# How long a look at the tools waits for a session: where nothing is known yet a run would else
# begin without them, and later for as long as nobody minds. Calls have their own deadline.
FIRST_LOOK_S: Final = 20.0
LOOK_S: Final = 3.0
ROUNDS_MAX: Final = 4  # of one call, in which the server asks for more
KEY_META: Final = "sluice/idempotency-key"
TRACE_META: Final = "traceparent"

_EFFECTS: Final = {
    tools_pb2.TOOL_EFFECT_READ: Effect.READ,
    tools_pb2.TOOL_EFFECT_IDEMPOTENT: Effect.IDEMPOTENT,
}
Answer = types.CallToolResult | types.InputRequiredResult
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


class McpServer:
    """One declared server and its tools. ``transport`` makes the streams of a new session;
    what the server says of its ``secrets`` is hidden. ``closed`` hears of the end."""

    def __init__(
        self,
        declaration: tools_pb2.ToolDeclaration,
        transport: Callable[[], Transport],
        secrets: Secrets,
        closed: Callable[[McpServer], None],
    ) -> None:
        self.declaration = declaration
        self.secrets = secrets
        self._closed = closed
        self.effect = _EFFECTS.get(declaration.effect, Effect.ONCE)
        self.timeout_s = timeout_s(declaration)
        self.output_bytes_max = output_bytes_max(declaration)
        self.message_bytes_max = 2 * self.output_bytes_max + MESSAGE_SLACK_BYTES
        self.calls = 0  # in progress or waiting for their turn
        self.turns = asyncio.Semaphore(CALLS_MAX)
        self.connection = McpConnection(
            declaration.name, transport, self._list_changed, lambda: self.calls > 0
        )
        self._looked = False
        self._found: Sequence[Listed] = ()
        self._tools: Mapping[str, McpTool] = {}

    async def tools(self) -> Sequence[McpTool]:
        """What may be called, in the server's order, also while the server is away. Waits for a
        session, the first time longer; raises ToolError TOOL_UNAVAILABLE when it was never
        reached."""
        first = not self._looked
        self._looked = True
        if not await self._reached(FIRST_LOOK_S if first else LOOK_S) and not self._found:
            raise ToolError("TOOL_UNAVAILABLE", _DOWN, made=False)
        return list(self._tools.values())

    async def states(self) -> Sequence[ToolStatus]:
        """All that the server offers, and why what of it cannot be called; one line with the
        declaration's name when that is not known."""
        reached = await self._reached(LOOK_S)
        down = "" if reached else self.connection.problem
        if not self._found:
            declared = self.declaration
            info = ToolInfo(declared.name, declared.description, {}, self.effect)
            return [ToolStatus(info, down or "the server offers no tools")]
        return [ToolStatus(self.info(found), found.problem or down) for found in self._found]

    def info(self, listed: Listed) -> ToolInfo:
        """What is known of a tool of the listing."""
        return ToolInfo(
            name=listed.name,
            description=listed.description,
            parameters=listed.parameters,
            effect=self.effect,
            needs_approval=self.declaration.needs_approval,
        )

    async def close(self) -> None:
        """Ends the session; calls in progress end as lost."""
        await self.connection.close()
        self._closed(self)

    async def _reached(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self.connection.session()
        except (NotConnectedError, TimeoutError):
            return False
        return True

    async def _list_changed(self, tools: Sequence[types.Tool]) -> None:
        wanted = list(self.declaration.mcp.tools)
        self._found = await asyncio.to_thread(check_listing, self.declaration.name, tools, wanted)
        self._tools = {one.name: McpTool(self, one) for one in self._found if not one.problem}


class McpTool:
    """One tool of a server; a Tool of the ports."""

    def __init__(self, server: McpServer, listed: Listed) -> None:
        self._server = server
        self._remote = listed.remote
        self.info = server.info(listed)

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See the port."""
        self._server.calls += 1
        try:
            return self._result(await self._answer(arguments, context))
        finally:
            self._server.calls -= 1

    async def _answer(
        self, arguments: dict[str, Any], context: ToolContext
    ) -> types.CallToolResult:
        """The server's answer in time. Raises ToolError."""
        sent = False
        seconds = min(context.deadline_s, self._server.timeout_s)
        try:
            async with asyncio.timeout(seconds), self._server.turns:
                session = await self._server.connection.session()
                sent = True
                return await self._ask(session, arguments, context)
        except NotConnectedError:
            raise ToolError("TOOL_UNAVAILABLE", _DOWN, made=False) from None
        except TimeoutError:
            self._server.connection.suspect()
            raise ToolError("TOOL_TIMEOUT", "The tool took too long.", made=sent) from None
        except MCPError as error:
            self._server.connection.suspect()
            raise _error_of(error, self._server.secrets.hide(error.message)) from None
        except ValidationError:
            raise ToolError("TOOL_OUTPUT_INVALID", _UNREADABLE, made=True) from None

    async def _ask(
        self, session: ClientSession, arguments: dict[str, Any], context: ToolContext
    ) -> types.CallToolResult:
        """The end of the call, after what the server wants to know in between; it is told that
        nobody is there to ask."""
        meta: dict[str, Any] = {KEY_META: context.idempotency_key}
        if context.traceparent:
            meta[TRACE_META] = context.traceparent
        parameters = types.CallToolRequestParams(name=self._remote, arguments=arguments)
        parameters.meta = cast(types.RequestParamsMeta, meta)
        for _ in range(ROUNDS_MAX):
            answer = await self._send(session, parameters)
            if isinstance(answer, types.CallToolResult):
                return answer
            wanted = answer.input_requests or {}
            if not all(isinstance(one, types.ElicitRequest) for one in wanted.values()):
                break
            declined: types.InputResponses = {
                key: types.ElicitResult(action="decline") for key in wanted
            }
            parameters.input_responses = declined or None
            parameters.request_state = answer.request_state
        message = "The tool asks for what this client does not give."
        raise ToolError("TOOL_FAILED", message, made=False)

    async def _send(
        self, session: ClientSession, parameters: types.CallToolRequestParams
    ) -> Answer:
        """One round; once more where the server says that it did nothing with the first."""
        connection = self._server.connection
        try:
            return await self._send_once(session, parameters)
        except MCPError as error:
            if mcp_http.code_of(error) == mcp_http.SESSION_GONE:
                connection.broken(session)
                session = await connection.session()
            elif error.code == types.HEADER_MISMATCH:
                await connection.list_again(session)
            else:
                raise
        return await self._send_once(session, parameters)

    async def _send_once(
        self, session: ClientSession, parameters: types.CallToolRequestParams
    ) -> Answer:
        # Not session.call_tool: it would check the result against the server's own schema, and run
        # a stranger's regular expressions for it.
        return await session.send_request(
            types.CallToolRequest(params=parameters),
            _ANSWER,
            # The deadline of the call ends it before.
            request_read_timeout_seconds=self._server.timeout_s + 1.0,
        )

    def _result(self, answer: types.CallToolResult) -> ToolResult:
        if answer.is_error:
            said = error_json(self._server.secrets.hide(error_text(answer)))
            raise ToolError("TOOL_FAILED", "The tool failed.", made=False, content_json=said)
        content = self._server.secrets.hide(result_json(answer))
        if len(content.encode()) > self._server.output_bytes_max:
            message = "The tool's result is larger than allowed."
            raise ToolError("TOOL_OUTPUT_TOO_LARGE", message, made=True)
        return ToolResult(content)


_DOWN: Final = "The tool's server does not answer."
_UNREADABLE: Final = "The tool's answer cannot be read or is larger than allowed."
# Answers by which the server says that it did nothing.
_NOT_DONE: Final = (
    types.INVALID_PARAMS,
    types.INVALID_REQUEST,
    types.METHOD_NOT_FOUND,
    types.HEADER_MISMATCH,
    types.MISSING_REQUIRED_CLIENT_CAPABILITY,
    types.URL_ELICITATION_REQUIRED,
    mcp_http.REFUSED,
)


def _error_of(error: MCPError, said: str) -> ToolError:
    code = mcp_http.code_of(error)
    match code:
        case mcp_http.NOT_SENT | mcp_http.SESSION_GONE:
            return ToolError("TOOL_UNAVAILABLE", _DOWN, made=False)
        case mcp_http.LOST | types.CONNECTION_CLOSED:
            message = "The connection to the tool was lost before its answer."
            return ToolError("TOOL_LOST", message, made=True)
        case types.PARSE_ERROR:
            return ToolError("TOOL_OUTPUT_INVALID", _UNREADABLE, made=True)
        case mcp_http.NOT_ALLOWED:
            message = "The tool's address is not allowed."
            return ToolError("EGRESS_REFUSED", message, made=False)
    return ToolError(
        "TOOL_FAILED",
        "The tool's server refused the call.",
        made=code not in _NOT_DONE,
        content_json=error_json(said),
    )
