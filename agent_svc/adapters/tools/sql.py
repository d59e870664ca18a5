"""A database that a model may read and nothing more.

The tool knows a small port, `Database`; SQLite is the first behind it. What makes it read-only is
the database's own machinery, not a look at the text: see sqlite_database.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ToolContext, ToolResult

SQL_CHARS_MAX: Final = 8192

PARAMETERS = {
    "type": "object",
    "properties": {
        "sql": {
            "type": "string",
            "minLength": 1,
            "maxLength": SQL_CHARS_MAX,
            "description": "One SELECT statement.",
        }
    },
    "required": ["sql"],
    "additionalProperties": False,
}

Cell = None | int | float | str


@dataclass(frozen=True, slots=True)
class Table:
    """The answer to a query; ``cut``: whether rows or bytes beyond the limits were left out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    cut: bool


class Database(Protocol):
    """A database that is read."""

    async def describe(self) -> str:
        """Its tables and their columns, for the model; at most 3 KiB. Raises ToolError
        TOOL_UNAVAILABLE."""

    async def query(self, sql: str, rows_max: int, bytes_max: int) -> Table:
        """The rows of one statement that changes nothing; others are refused by the database.
        Raises ToolError. A cancel stops the database's work before it returns."""

    async def close(self) -> None:
        """Ends its threads and connections."""


class SqlTool:
    """See Tool."""

    def __init__(self, info: ToolInfo, database: Database, rows_max: int, bytes_max: int) -> None:
        self._info = info
        self._database = database
        self._rows_max = rows_max
        self._bytes_max = bytes_max

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        table = await self._database.query(
            str(arguments.get("sql", "")), self._rows_max, self._bytes_max
        )
        answer = {"columns": table.columns, "rows": table.rows, "cut": table.cut}
        return ToolResult(json.dumps(answer, ensure_ascii=False, separators=(",", ":")))
