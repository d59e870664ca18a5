"""Makes the tools of a declaration, whatever its kind.

A source belongs to one declaration and, for a registered one, to one tenant. What it needs of the
machine (secrets, files, connections) is looked up when it is first used, so that a tool whose
database or secret is missing is unavailable and everything else works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent_svc.adapters.egress import Caps, EgressGuard, EgressTransport
from agent_svc.adapters.tools import calculator, clock, retrieval, sql
from agent_svc.adapters.tools.exchange import MEDIA_TYPES, Exchange
from agent_svc.adapters.tools.http import HttpTool
from agent_svc.adapters.tools.openapi import OpenApiOperation, info_of, read_document
from agent_svc.adapters.tools.secrets import Secrets
from agent_svc.adapters.tools.sqlite_database import SqliteDatabase
from agent_svc.domain.model import Effect, ToolInfo
from agent_svc.domain.openapi import OpenApiError, base_url, operations
from agent_svc.ports import ChunkSearch, Tool, ToolError, ToolSource
from sluice import tool_rules
from sluice.agent.v1 import tools_pb2
from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.egress_rules import EgressRules, PrivateRule
from sluice.errors import SluiceError
from sluice.json_schemas import check_schema

EFFECTS: Final = {
    tools_pb2.TOOL_EFFECT_READ: Effect.READ,
    tools_pb2.TOOL_EFFECT_IDEMPOTENT: Effect.IDEMPOTENT,
}
DESCRIBE_AGAIN_S: Final = 60.0  # how old the description of a database's tables may be
PROBLEM_CHARS_MAX: Final = 200  # of what is wrong with a document, whose words are in it
MAKE_S: Final = 5.0  # for a description or document to be read

# Makes the source of an MCP declaration; the second argument is the tenant, empty for configured.
McpSources = Callable[[ToolDeclaration, str], ToolSource]


class Sources:
    """Makes sources; one per process. ``root``: what relative paths count from.
    ``registered_private``: what registered tools may reach beside public addresses."""

    def __init__(
        self,
        guard: EgressGuard,
        search: ChunkSearch,
        *,
        environ: Mapping[str, str],
        root: Path,
        mcp: McpSources | None = None,
        registered_private: Sequence[PrivateRule] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        self._guard = guard
        self._search = search
        self._environ = environ
        self._root = root
        self._mcp = mcp
        self._registered_private = registered_private
        self._now = now

    def source(self, tool: ToolDeclaration, tenant: str = "") -> ToolSource:
        """The source of a declaration that was checked. ``tenant``: whose it is; empty: the
        configuration's."""
        info = info_from(tool)
        kind = tool.WhichOneof("kind")
        if kind == "calculator":
            return _Fixed(calculator.CalculatorTool(_with(info, calculator.PARAMETERS)))
        if kind == "clock":
            return _Fixed(clock.ClockTool(_with(info, clock.PARAMETERS), self._now))
        if kind == "retrieval":
            top_k = tool.retrieval.top_k or tool_rules.TOP_K
            described = _with(info, retrieval.PARAMETERS)
            return _Fixed(
                retrieval.RetrievalTool(described, self._search, tool.retrieval.collection, top_k)
            )
        if kind == "sql":
            path = self._root / tool.sql.url.removeprefix("sqlite:///")
            return _SqlSource(tool, info, SqliteDatabase(path))
        if kind == "http":
            return self._http(tool, info, tenant)
        if kind == "openapi":
            rules = self._rules(tool, tenant)
            exchange = self._exchange(tool, rules)
            return _OpenApiSource(tool, info, exchange, self._document(tool, tenant), rules)
        if kind == "mcp" and self._mcp is not None:
            return self._mcp(tool, tenant)
        return _Unavailable()

    def _rules(self, tool: ToolDeclaration, tenant: str) -> EgressRules:
        private = self._registered_private if tenant else ()
        return tool_rules.egress_rules(tool.egress, private=private)

    def _http(self, tool: ToolDeclaration, info: ToolInfo, tenant: str) -> ToolSource:
        parameters = tool_rules.parameters_of(tool.http.parameters_json, "parameters_json")
        exchange = self._exchange(tool, self._rules(tool, tenant))
        made = HttpTool(_with(info, parameters), tool.http.method, tool.http.url, exchange)
        return _HttpSource(made, exchange)

    def _exchange(self, tool: ToolDeclaration, rules: EgressRules) -> Exchange:
        kind = tool.http if tool.WhichOneof("kind") == "http" else tool.openapi
        limit_s = tool_rules.timeout_s(tool)
        caps = Caps(
            body_bytes_max=tool_rules.output_bytes_max(tool),
            total_s=limit_s,
            connect_s=min(5.0, limit_s),
            read_s=limit_s,
            media_types=MEDIA_TYPES,
        )
        repeatable = tool.effect in EFFECTS
        transport = self._guard.transport(rules, caps, reuse=repeatable)
        secrets = Secrets(kind.secret_headers, self._environ)
        return Exchange(transport, secrets, kind.idempotency_header)

    def _document(self, tool: ToolDeclaration, tenant: str) -> Callable[[], str]:
        """A registered declaration holds its document; a configured one names a file."""
        if tenant:
            return lambda: tool.openapi.document
        path = self._root / tool.openapi.document

        def read() -> str:
            with path.open("rb") as file:
                return file.read(tool_rules.DOCUMENT_BYTES_MAX + 1).decode()

        return read


def info_from(tool: ToolDeclaration) -> ToolInfo:
    """What a declaration says for itself, without parameters."""
    return ToolInfo(
        name=tool.name,
        description=tool.description,
        parameters={},
        effect=EFFECTS.get(tool.effect, Effect.ONCE),
        needs_approval=tool.needs_approval,
    )


def _with(info: ToolInfo, parameters: Mapping[str, object]) -> ToolInfo:
    return replace(info, parameters=parameters)


def _unavailable(text: str = "The tool cannot be called now.") -> ToolError:
    return ToolError("TOOL_UNAVAILABLE", text, made=False)


class _Fixed:
    """One tool that needs nothing."""

    def __init__(self, tool: Tool) -> None:
        self._tools = (tool,)

    async def tools(self) -> Sequence[Tool]:
        """See ToolSource."""
        return self._tools

    async def close(self) -> None:
        """See ToolSource."""


class _Unavailable:
    """A kind that this process does not serve."""

    async def tools(self) -> Sequence[Tool]:
        """See ToolSource."""
        raise _unavailable("This kind of tool is not served.")

    async def close(self) -> None:
        """See ToolSource."""


class _HttpSource:
    def __init__(self, tool: Tool, exchange: Exchange) -> None:
        self._tool = tool
        self._exchange = exchange

    async def tools(self) -> Sequence[Tool]:
        """See ToolSource."""
        self._exchange.secrets.headers()  # raises where one is not set
        return (self._tool,)

    async def close(self) -> None:
        """See ToolSource."""
        await _closed(self._exchange.transport)


class _Made:
    """Tools that are made once, by whoever asks first; a failure is tried again."""

    def __init__(self, make: Callable[[], Awaitable[Sequence[Tool]]], kept_s: float) -> None:
        self._make = make
        self._kept_s = kept_s
        self._lock = asyncio.Lock()
        self._tools: Sequence[Tool] = ()
        self._until = 0.0

    async def tools(self) -> Sequence[Tool]:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if not self._tools or loop.time() >= self._until:
                try:
                    async with asyncio.timeout(MAKE_S):
                        self._tools = await self._make()
                except TimeoutError:
                    raise _unavailable("The tool does not say in time what it is.") from None
                self._until = loop.time() + self._kept_s
        return self._tools


class _SqlSource:
    """A database whose description shows its tables."""

    def __init__(self, tool: ToolDeclaration, info: ToolInfo, database: sql.Database) -> None:
        self._declared = tool
        self._info = info
        self._database = database
        self._made = _Made(self._make, DESCRIBE_AGAIN_S)

    async def tools(self) -> Sequence[Tool]:
        """See ToolSource."""
        return await self._made.tools()

    async def _make(self) -> Sequence[Tool]:
        tables = await self._database.describe()
        text = f"{self._info.description}\nTables:\n{tables}"
        info = replace(self._info, description=text, parameters=sql.PARAMETERS)
        rows = self._declared.sql.rows_max or tool_rules.ROWS
        most = tool_rules.output_bytes_max(self._declared)
        return (sql.SqlTool(info, self._database, rows, most),)

    async def close(self) -> None:
        """See ToolSource."""
        await self._database.close()


class _OpenApiSource:
    """The operations of a document, read in a thread when they are first asked for."""

    def __init__(
        self,
        tool: ToolDeclaration,
        info: ToolInfo,
        exchange: Exchange,
        read: Callable[[], str],
        rules: EgressRules,
    ) -> None:
        self._declared = tool
        self._info = info
        self._exchange = exchange
        self._read = read
        self._rules = rules
        self._made = _Made(self._make, float("inf"))

    async def tools(self) -> Sequence[Tool]:
        """See ToolSource."""
        self._exchange.secrets.headers()
        return await self._made.tools()

    async def _make(self) -> Sequence[Tool]:
        try:
            return await asyncio.to_thread(self._parsed)
        except OpenApiError as error:
            raise _unavailable(f"The OpenAPI document: {str(error)[:PROBLEM_CHARS_MAX]}") from None
        except (OSError, UnicodeDecodeError):
            raise _unavailable("The OpenAPI document cannot be read.") from None
        except SluiceError as error:
            raise _unavailable(f"The OpenAPI document: {error.message}") from None

    def _parsed(self) -> Sequence[Tool]:
        tool, openapi = self._declared, self._declared.openapi
        document = read_document(self._read())
        base = openapi.base_url or base_url(document)
        tool_rules.check_url(base, "servers[0].url", self._rules)
        tools: list[Tool] = []
        for one in operations(document, list(openapi.operations)):
            if problem := check_schema(one.schema):
                if openapi.operations:
                    raise OpenApiError(f"the schema of {one.id} {problem}")
                continue
            info = info_of(tool.name, one, self._info.effect, self._info.needs_approval)
            if any(info.name == other.info.name for other in tools):
                raise OpenApiError(f"two operations have the name {info.name}")
            tools.append(OpenApiOperation(info, one, base, self._exchange))
        return tools

    async def close(self) -> None:
        """See ToolSource."""
        await _closed(self._exchange.transport)


async def _closed(transport: EgressTransport) -> None:
    await transport.aclose()
