"""A tool that is one HTTP operation.

Arguments that the URL names go there; the others into the query (GET, DELETE) or the JSON body.
Holds one transport. Failure modes: those of exchange.py.
"""

from __future__ import annotations

from typing import Any, Final

from agent_svc.adapters.tools.exchange import Exchange
from agent_svc.adapters.tools.url_template import fill, with_query
from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ToolContext, ToolResult
from sluice.tool_rules import PLACEHOLDER

_IN_QUERY: Final = frozenset({"GET", "DELETE"})


class HttpTool:
    """See Tool."""

    def __init__(self, info: ToolInfo, method: str, url: str, exchange: Exchange) -> None:
        self._info = info
        self._method = method
        self._url = url
        self._in_url = frozenset(PLACEHOLDER.findall(url))
        self._exchange = exchange

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        rest = {name: value for name, value in arguments.items() if name not in self._in_url}
        url = fill(self._url, arguments)
        if self._method in _IN_QUERY:
            given = [(name, value) for name, value in rest.items() if value is not None]
            url = with_query(url, given)
            return await self._exchange.call(self._method, url, context)
        return await self._exchange.call(self._method, url, context, body=rest)
