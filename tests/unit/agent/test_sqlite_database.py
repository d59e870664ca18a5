"""A model reads the database and can do nothing else to it, to its machine or to its time.

Mutants: sqlite_no_authorizer, sqlite_opened_for_writing, sqlite_cancel_does_not_stop,
sqlite_row_made_whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_svc.adapters.tools.sql import PARAMETERS, SqlTool
from agent_svc.adapters.tools.sqlite_database import SqliteDatabase
from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ToolContext, ToolError

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "sales data.db"
    connection = sqlite3.connect(file)
    connection.executescript(
        """
        PRAGMA synchronous = OFF;
        PRAGMA journal_mode = OFF;
        CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount REAL, note BLOB);
        CREATE VIEW large AS SELECT * FROM orders WHERE amount > 500;
        CREATE TABLE secrets_of_others (x);
        """
    )
    rows = [(number, f"customer {number % 7}", number * 1.5, b"ab") for number in range(1000)]
    connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return file


@pytest.fixture
async def database(path: Path) -> AsyncIterator[SqliteDatabase]:
    one = SqliteDatabase(path)
    yield one
    await one.close()


async def test_rows_are_read(database: SqliteDatabase) -> None:
    table = await database.query(
        "SELECT customer, round(sum(amount), 1) AS total FROM orders"
        " WHERE note = x'6162' GROUP BY customer ORDER BY total DESC LIMIT 2",
        10,
        10_000,
    )
    assert list(table.columns) == ["customer", "total"]
    assert [row[0] for row in table.rows] == ["customer 5", "customer 4"]
    assert not table.cut
    large = await database.query("SELECT printf('%.*c', 100000000, 'x')", 10, 10_000)
    assert len(str(large.rows)) < 100  # SQLite's own limit on values
    odd = await database.query("SELECT note, NULL, 9e999, 1 FROM orders LIMIT 1", 10, 10_000)
    assert odd.rows == [["[2 bytes]", None, "inf", 1]]


async def test_joins_windows_json_and_time_functions_work(database: SqliteDatabase) -> None:
    for sql in (
        "SELECT a.id, b.id FROM orders a JOIN orders b ON a.id = b.id + 1 LIMIT 3",
        "SELECT id, row_number() OVER (PARTITION BY customer ORDER BY amount) FROM orders LIMIT 3",
        "SELECT json_extract('{\"a\": 1}', '$.a'), date('2020-01-01', '+1 day')",
        "WITH t AS (SELECT * FROM large) SELECT count(*), upper(max(customer)) FROM t",
        "SELECT customer FROM orders WHERE customer LIKE '%3' UNION SELECT 'x' ORDER BY 1",
        "EXPLAIN QUERY PLAN SELECT * FROM orders",
        "SELECT * FROM sqlite_master",
        "VALUES (1), (2)",
    ):
        assert (await database.query(sql, 5, 10_000)).rows, sql


async def test_rows_and_bytes_are_bounded_and_the_answer_says_so(database: SqliteDatabase) -> None:
    table = await database.query("SELECT id FROM orders", 7, 10_000)
    assert (len(table.rows), table.cut) == (7, True)
    table = await database.query("SELECT id FROM orders LIMIT 7", 7, 10_000)
    assert (len(table.rows), table.cut) == (7, False)
    table = await database.query("SELECT customer FROM orders", 10_000, 400)
    assert 5 < len(table.rows) < 40 and table.cut
    answer = {"columns": table.columns, "rows": table.rows, "cut": True}
    assert len(json.dumps(answer)) <= 600


async def test_a_row_with_more_text_than_the_answer_may_have_is_not_made(
    database: SqliteDatabase,
) -> None:
    wide = "SELECT 1, " + ", ".join(["printf('%1000000s', 'x')"] * 100)
    tracemalloc.start()
    table = await database.query(wide, 10, 10_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (table.rows, table.cut) == ([], True)
    assert peak < 16 << 20  # of 100 MB of text


WRITES = (
    *("INSERT INTO orders VALUES (5000, 'x', 1, NULL)", "UPDATE orders SET amount = 0"),
    *("DELETE FROM orders", "DROP TABLE orders", "CREATE TABLE t (x)", "CREATE TEMP TABLE t (x)"),
    *("ALTER TABLE orders RENAME TO o", "CREATE INDEX i ON orders (id)", "REINDEX", "ANALYZE"),
    *("VACUUM", "VACUUM INTO '{folder}/copy.db'", "ATTACH '{folder}/other.db' AS other"),
    *("ATTACH ':memory:' AS m", "DETACH main", "BEGIN IMMEDIATE", "BEGIN", "SAVEPOINT a"),
    *("COMMIT", "PRAGMA query_only = OFF", "PRAGMA writable_schema = ON", "PRAGMA user_version"),
    *("PRAGMA journal_mode = DELETE", "PRAGMA database_list", "SELECT load_extension('x')"),
    *("SELECT * FROM pragma_database_list", "SELECT readfile('/etc/passwd')"),
    *("SELECT writefile('{folder}/w', 'x')", "SELECT fts3_tokenizer('simple')", "SELECT edit(1)"),
    *("SELECT randomblob(1000000000)", "SELECT zeroblob(1000000000)", "SELECT sqlite_version()"),
    *("SELECT sqlite_compileoption_get(1)", "CREATE VIRTUAL TABLE v USING fts5(x)", "", "-- x"),
    *("SELECT 1; DELETE FROM orders", "SELEC 1"),
    *(
        "REPLACE INTO orders (id) VALUES (1)",
        "SELECT ? ",
        "WITH t AS (SELECT 1) DELETE FROM orders",
    ),
    *("SELECT 1\x00", "SELECT '\ud800'", "SELECT 1; SELECT 2", "SELECT " + "(" * 500 + "1"),
    *("SELECT hex(zeroblob(999999999))", "EXPLAIN DELETE FROM orders", "CREATE TRIGGER t"),
    *("INSERT INTO orders SELECT * FROM orders RETURNING id", "SELECT * FROM nowhere.orders"),
)


def contents(folder: Path) -> dict[str, str]:
    files = [file for file in folder.iterdir() if file.is_file()]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("sql", WRITES)
async def test_nothing_but_reading_is_done(database: SqliteDatabase, path: Path, sql: str) -> None:
    before = contents(path.parent)
    with pytest.raises(ToolError) as refused:
        await database.query(sql.replace("{folder}", str(path.parent)), 10, 10_000)
    assert (refused.value.reason, refused.value.made) == ("TOOL_REFUSED", False)
    assert str(path.parent) not in refused.value.message
    assert contents(path.parent) == before


async def test_what_the_database_says_of_a_wrong_statement_is_for_the_model(
    database: SqliteDatabase,
) -> None:
    with pytest.raises(ToolError) as refused:
        await database.query("SELECT canary_column FROM orders", 10, 10_000)
    assert "canary_column" in refused.value.content_json
    assert "canary" not in f"{refused.value} {refused.value.message}"


async def test_a_cancel_stops_the_query_and_returns_when_it_has_stopped(
    database: SqliteDatabase,
) -> None:
    for _ in range(3):
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await database.query(ENDLESS, 10, 10_000)
        assert database.running == 0
        assert time.monotonic() - begin < 5.0  # without a stop: for ever


async def test_queries_beyond_the_threads_wait_and_can_be_cancelled(
    database: SqliteDatabase,
) -> None:
    tasks = [asyncio.create_task(database.query(ENDLESS, 1, 1000)) for _ in range(10)]
    await asyncio.sleep(0.1)
    for task in reversed(tasks):
        task.cancel()
    begin = time.monotonic()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - begin < 5.0  # without a stop: for ever
    assert database.running == 0
    assert {type(one) for one in done} == {asyncio.CancelledError}
    assert (await database.query("SELECT 1", 1, 1000)).rows == [[1]]


async def test_the_loop_goes_on_while_a_query_runs(database: SqliteDatabase) -> None:
    task = asyncio.create_task(database.query(ENDLESS, 1, 1000))
    async with asyncio.timeout(5.0):
        for _ in range(20):
            await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_description_shows_tables_and_columns(database: SqliteDatabase) -> None:
    text = await database.describe()
    assert "orders(id INTEGER, customer TEXT, amount REAL, note BLOB)" in text
    assert "large(" in text
    assert len(text.encode()) <= 3072


@pytest.mark.parametrize("content", [None, b"", b"this is no database at all" * 100])
async def test_a_file_that_is_no_database_makes_the_tool_unavailable(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "x.db"
    if content is not None:
        file.write_bytes(content)
    database = SqliteDatabase(file)
    if content == b"":  # an empty file is an empty database
        assert await database.describe() == ""
        return
    with pytest.raises(ToolError) as failed:
        await database.query("SELECT 1", 1, 1000)
    assert failed.value.reason == "TOOL_UNAVAILABLE"
    assert file.exists() == (content is not None)  # none is made
    await database.close()


async def test_the_tool_answers_in_json_and_leaves_no_thread(path: Path) -> None:
    database = SqliteDatabase(path)
    tool = SqlTool(ToolInfo("s", "d", PARAMETERS), database, 2, 10_000)
    context = ToolContext("a", "r", "k", 5.0)
    result = await tool.call({"sql": "SELECT id, customer FROM orders ORDER BY id"}, context)
    assert json.loads(result.content_json) == {
        "columns": ["id", "customer"],
        "rows": [[0, "customer 0"], [1, "customer 1"]],
        "cut": True,
    }
    await database.close()
    end = time.monotonic() + 5.0
    while any("sqlite-tool" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_texts_that_are_no_utf8_are_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "latin.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t AS SELECT CAST(x'fc6265' AS TEXT) AS word")
    connection.commit()
    connection.close()
    database = SqliteDatabase(path)
    assert (await database.query("SELECT word FROM t", 10, 1000)).rows == [["\ufffdbe"]]
    await database.close()


async def test_the_log_alone_names_a_file_that_cannot_be_read_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator finds the file; a tenant learns no path of the machine."""
    file = tmp_path / "gone.db"
    one = SqliteDatabase(file)
    said = []
    for _ in range(2):
        with pytest.raises(ToolError) as refused:
            await one.describe()
        said.append(refused.value.message)
    sqlite3.connect(file).close()
    await one.describe()
    file.unlink()
    with pytest.raises(ToolError):
        await one.describe()
    await one.close()
    assert said == ["The database cannot be read."] * 2
    told = [record.__dict__ for record in caplog.records if "cannot be read" in record.message]
    assert len(told) == 2, "again when it was there in between"
    assert str(file) in str(told[0])
