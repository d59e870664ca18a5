"""SQLite, read-only by construction.

The file is opened with mode=ro, so that the connection cannot write whatever it is told; an
authorizer permits reading tables and listed functions and nothing else: no ATTACH, PRAGMA,
temporary table, transaction or extension; SQLite's own limits bound a value, a statement and its
program, and no second database can be attached. Beside a database in WAL mode SQLite keeps its
-wal and -shm files, also for those who only read.

Each query has a connection and a thread of its own, `THREADS` at a time per database. The progress
handler ends a query that was cancelled within `STEPS` instructions, and a cancel returns only when
the thread is done with it; the runner's timeout is such a cancel. Sorting spills to SQLite's own
temporary files, 8 MiB of pages are held in memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar

from agent_svc.adapters.tools.sql import SQL_CHARS_MAX, Cell, Table
from agent_svc.ports import ToolError
from sluice import logs

T = TypeVar("T")

_log = logs.get(__name__)

THREADS: Final = 4
STEPS: Final = 10_000  # instructions between looks at the cancel: under a millisecond
VALUE_BYTES_MAX: Final = 1 << 20  # of one text or blob that a query makes or reads
PAGES_KIB: Final = 8192
DESCRIPTION_BYTES_MAX: Final = 3072
COLUMNS_MAX: Final = 200  # of a result

_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: VALUE_BYTES_MAX,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: SQL_CHARS_MAX * 4,
    sqlite3.SQLITE_LIMIT_COLUMN: COLUMNS_MAX,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 256,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_FUNCTIONS: Final = frozenset(
    [
        "abs",
        "avg",
        "ceil",
        "ceiling",
        "char",
        "coalesce",
        "concat",
        "concat_ws",
        "count",
        "cume_dist",
        "date",
        "datetime",
        "dense_rank",
        "exp",
        "first_value",
        "floor",
        "format",
        "glob",
        "group_concat",
        "hex",
        "ifnull",
        "iif",
        "instr",
        "julianday",
        "json",
        "json_array",
        "json_array_length",
        "json_extract",
        "json_group_array",
        "json_group_object",
        "json_object",
        "json_type",
        "json_valid",
        "lag",
        "last_value",
        "lead",
        "length",
        "like",
        "likely",
        "ln",
        "log",
        "log10",
        "log2",
        "lower",
        "ltrim",
        "max",
        "min",
        "mod",
        "nth_value",
        "ntile",
        "nullif",
        "percent_rank",
        "pi",
        "pow",
        "power",
        "printf",
        "quote",
        "rank",
        "replace",
        "round",
        "row_number",
        "rtrim",
        "sign",
        "sqrt",
        "strftime",
        "string_agg",
        "substr",
        "substring",
        "sum",
        "time",
        "timediff",
        "total",
        "trim",
        "trunc",
        "typeof",
        "unicode",
        "unixepoch",
        "unlikely",
        "upper",
        "->",
        "->>",
        "sqrt",
        "sin",
        "cos",
        "tan",
        "radians",
        "degrees",
    ]
)


def _authorize(
    action: int, _: str | None, second: str | None, database: str | None, __: str | None
) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_READ:
        # A virtual table such as pragma_table_info or a file reader is none of the file's own.
        return sqlite3.SQLITE_OK if database in ("main", None, "") else sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


class SqliteDatabase:
    """See Database. ``path``: of the file, absolute."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = False  # that it cannot be read
        self._threads = ThreadPoolExecutor(THREADS, "sqlite-tool")
        self._lock = threading.Lock()
        self.running = 0  # queries in threads

    async def describe(self) -> str:
        """See Database."""
        return await self._in_thread(_described)

    async def query(self, sql: str, rows_max: int, bytes_max: int) -> Table:
        """See Database."""

        def work(connection: sqlite3.Connection) -> Table:
            return _rows(connection, sql, rows_max, bytes_max)

        return await self._in_thread(work)

    async def close(self) -> None:
        """See Database."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        cancelled = threading.Event()
        thread = self._threads.submit(self._with_connection, work, cancelled)
        future = asyncio.wrap_future(thread)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            cancelled.set()
            if not thread.cancel():
                await asyncio.wait([future])  # at most STEPS instructions and a read from disk
                if not future.cancelled():
                    future.exception()  # taken: nobody else will
            raise

    def _with_connection(
        self, work: Callable[[sqlite3.Connection], T], cancelled: threading.Event
    ) -> T:
        with self._lock:
            self.running += 1
        try:
            with closing(self._open(cancelled)) as connection:
                self._told = False
                return work(connection)
        except sqlite3.Error as error:
            self._tell(error)
            raise _failure(error, cancelled.is_set()) from None
        except (sqlite3.Warning, ValueError, OverflowError, MemoryError):
            # Several statements, a NUL, half of a surrogate pair, a number out of range.
            message = "The database does not take the statement."
            raise ToolError("TOOL_REFUSED", message, made=False) from None
        finally:
            with self._lock:
                self.running -= 1

    def _tell(self, error: sqlite3.Error) -> None:
        """Says which file cannot be read, once until it can: operators only may know its path."""
        code = _code(error)
        if _unreadable(code) and not self._told:
            self._told = True
            _log.warning("a database cannot be read", file=str(self._path), error=code)

    def _open(self, cancelled: threading.Event) -> sqlite3.Connection:
        uri = self._path.absolute().as_uri() + "?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None)
        try:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            connection.execute(f"PRAGMA cache_size=-{PAGES_KIB}")
            connection.execute("PRAGMA query_only=ON")
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()  # is it one?
            for limit, value in _LIMITS.items():
                connection.setlimit(limit, value)
            connection.set_progress_handler(cancelled.is_set, STEPS)
            connection.set_authorizer(_authorize)
        except BaseException:
            connection.close()
            raise
        return connection


class _FullError(Exception):
    """A row has more text than the answer may have; it is not made whole."""


def _rows(connection: sqlite3.Connection, sql: str, rows_max: int, bytes_max: int) -> Table:
    room = bytes_max  # of the texts as they are; as JSON they take no less

    def text_of(raw: bytes) -> str:
        nonlocal room
        room -= len(raw)
        if room < 0:
            raise _FullError
        return raw.decode("utf-8", "replace")

    connection.text_factory = text_of
    cursor = connection.execute(sql)
    if cursor.description is None:
        raise ToolError("TOOL_REFUSED", "The statement gives no rows.", made=False)
    columns = [str(column[0]) for column in cursor.description]
    rows: list[list[Cell]] = []
    left = bytes_max - len(json.dumps(columns)) - 64
    with suppress(_FullError):
        for row in cursor:
            cells = [_cell(value) for value in row]
            left -= len(json.dumps(cells, ensure_ascii=False).encode()) + 1
            if len(rows) >= rows_max or left < 0:
                break
            rows.append(cells)
        else:
            return Table(columns, rows, cut=False)
    return Table(columns, rows, cut=True)


def _cell(value: object) -> Cell:
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    assert value is None or isinstance(value, int | float | str)
    return value


def _described(connection: sqlite3.Connection) -> str:
    connection.set_authorizer(None)  # no text of a model is in what follows
    tables: dict[str, list[str]] = {}
    for name, column, kind in connection.execute(
        "SELECT m.name, c.name, c.type FROM sqlite_master AS m, pragma_table_info(m.name) AS c"
        " WHERE m.type IN ('table', 'view') AND m.name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        " ORDER BY m.name, c.cid LIMIT 1000"
    ):
        tables.setdefault(name, []).append(f"{column} {kind}".rstrip())
    text = "\n".join(f"{name}({', '.join(columns)})" for name, columns in tables.items())
    return text.encode()[:DESCRIPTION_BYTES_MAX].decode(errors="ignore")


def _interrupted() -> ToolError:
    return ToolError("TOOL_TIMEOUT", "The query was stopped.", made=False)


def _code(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "") or ""


def _unreadable(code: str) -> bool:
    return code in ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_PERM") or code.startswith(
        ("SQLITE_IOERR", "SQLITE_CANTOPEN")
    )


def _failure(error: sqlite3.Error, cancelled: bool) -> ToolError:
    """Fixed texts, but for what SQLite says of the statement itself: without it no model mends
    one. That goes to the model only."""
    if cancelled:
        return _interrupted()
    code = _code(error)
    if _unreadable(code):
        return ToolError("TOOL_UNAVAILABLE", "The database cannot be read.", made=False)
    if code.startswith("SQLITE_BUSY"):
        return ToolError("TOOL_UNAVAILABLE", "The database is busy.", made=False)
    said = json.dumps({"error": str(error)[:500]}, ensure_ascii=False)
    if code in ("SQLITE_AUTH", "SQLITE_READONLY"):
        return ToolError("TOOL_REFUSED", "Only reading is allowed.", made=False, content_json=said)
    return ToolError(
        "TOOL_REFUSED", "The database refused the statement.", made=False, content_json=said
    )
