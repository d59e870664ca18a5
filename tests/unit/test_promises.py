"""docs/PROMISES.md names only tests that exist, and every row is whole.

Seen to fail on mutants: a test renamed in the page; a row without a test; a target of make that is
not there (test_docs.py, which also checks the files).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "PROMISES.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
COLUMNS = 5


def rows() -> list[list[str]]:
    """The cells of every row that is not a table's head."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "promise"]


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_every_promise_says_how_it_is_kept_shown_and_run() -> None:
    found = rows()
    assert len(found) > 30
    for row in found:
        assert len(row) == COLUMNS, row
        assert all(row), row
        assert TEST.search(row[2]), row
        assert re.fullmatch(r"`make [a-z-]+( TEST_ARGS=\S+)?`", row[4]), row


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in TEST.findall(PAGE.read_text())
        if not (ROOT / path).is_file() or (name and name not in names_in(path))
    ]
    assert missing == []


def test_every_command_runs_a_file_that_exists() -> None:
    for path in re.findall(r"TEST_ARGS=([^`\s]+)", PAGE.read_text()):
        assert (ROOT / path).is_file(), path
