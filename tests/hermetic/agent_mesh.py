"""A mesh with agents, the tools of sluice.toml, and a model that answers as tests say.

The tools are the configuration's own, but their files are below the test's folder.
"""

from __future__ import annotations

import io
import os
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from sluice.command import cli
from tests.hermetic.local_mesh import ROOT
from tests.hermetic.mesh import Mesh, Shape, mesh

EXAMPLES = ROOT / "examples"

REPLIES: Mapping[str, Sequence[object]] = {
    # test_command_runs.py
    "Six times seven": [
        {"tool": "calculator", "arguments": {"expression": "6*7"}},
        {"answer": "It is 42."},
    ],
    "Open a ticket.": [
        {"tool": "desk__open_ticket", "arguments": {"title": "lamp", "text": "it is dark"}},
        {"answer": "It is open."},
    ],
    "Too much": [
        {"tool": "calculator", "arguments": {"expression": f"1+{number}"}} for number in range(9)
    ],
    "Good morning": ["Good morning to you.", "Good night."],
    # test_agent_examples.py
    "Answer the customer": [
        {"tool": "handbook", "arguments": {"query": "days to return an item"}},
        {"answer": "They have 30 days."},
    ],
    "Query the database": [
        {
            "tool": "sales",
            "arguments": {"sql": "SELECT product, SUM(amount) FROM orders GROUP BY product"},
        },
    ],
    "123 plus 45": [
        {"tool": "calculator", "arguments": {"expression": "123 + 45"}},
        {"answer": "It is 168."},
    ],
    "Is there a ticket with the word lamp": [
        {"tool": "tickets__find_tickets", "arguments": {"word": "lamp"}},
        {"answer": "There is one."},
    ],
    "Open a ticket: the lamp flickers": [
        {"tool": "desk__open_ticket", "arguments": {"title": "lamp", "text": "it flickers"}},
        {"answer": "It is open."},
    ],
}
"""What the model answers, turn by turn, to a prompt that holds a text."""
_TYPED: Mapping[str, object] = {
    "product: desk, SUM(amount): 620.0": {"sales": [{"product": "desk", "amount": 620.0}]}
}
"""The same for the analyst's answer, for which it shows the rows and no earlier turn."""


def configured_tools(folder: Path) -> list[dict[str, Any]]:
    """The [[tool]] tables of sluice.toml, with the files that they name moved into `folder`."""
    tools: list[dict[str, Any]] = tomllib.loads((ROOT / "sluice.toml").read_text())["tool"]
    for tool in tools:
        if "sql" in tool:
            tool["sql"]["url"] = f"sqlite:///{folder}/sales.db"
        if "mcp" in tool:
            tool["mcp"]["command"] = [
                str(folder / Path(word).name) if word.startswith(".sluice/") else word
                for word in tool["mcp"]["command"]
            ]
    return tools


def make_sales(folder: Path) -> None:
    """The sample database."""
    with closing(sqlite3.connect(folder / "sales.db")) as database:
        database.executescript((EXAMPLES / "sql_analyst" / "sales.sql").read_text())


@contextmanager
def agent_mesh(folder: Path, **more: Any) -> Iterator[Mesh]:
    """Ready; one agent service, a generating and an embedding model."""
    make_sales(folder)
    shape = Shape(
        instances={
            "sim-0": {"decode_step_ms": 2.0},
            "embed-0": {"generate": False, "embedding_dimensions": 32, "model": "sim-embed"},
        },
        agents=1,
        agent={"folder": str(ROOT)},
        tools=configured_tools(folder),
        **more,
    )
    with mesh(folder, shape) as running:
        # The servers of tools are started when they are first asked for.
        running.until(
            lambda: "desk__open_ticket" in sluice(running, "agent", "tools").stdout, "tools"
        )
        yield running


def answers(running: Mesh, replies: Mapping[str, Sequence[object]]) -> None:
    """Scripts the model: to a prompt that holds a marker it replies with these, turn by turn."""
    typed = [{"marker": marker, "replies": [said]} for marker, said in _TYPED.items()]
    rules = []
    for marker, said in replies.items():
        rules.append({"marker": marker, "replies": list(said)})
        last = said[-1]
        if isinstance(last, Mapping) and "answer" in last:
            rules[-1]["words"] = last["answer"]  # where only the answer is asked for
    running.faults(*typed, *rules, on=["sim-0"])


def environment(running: Mesh) -> dict[str, str]:
    """What examples and the command need to find the mesh."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": "/",
        "PYTHONPATH": str(ROOT),
        "SLUICE_KEY_FILE": str(running.runtime / "api-key"),
        "SLUICE_ENDPOINT": running.target,
        "SLUICE_API_KEY": running.api_key,
        "SLUICE_ADMIN_KEY": running.admin_key,
        "COLUMNS": "200",
    }


def sluice(running: Mesh, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """The command line against the mesh, in this process: an interpreter takes a second."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(running)),
        mock.patch("sys.stdin", io.StringIO(text)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        status = cli.run(list(arguments), os.environ)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
