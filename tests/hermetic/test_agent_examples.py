"""The examples with agents, and the README's commands about them, run as they are written.

Goal: what a newcomer copies works. Method: each script of examples/ that starts runs, and each line
of the README's section, against a mesh of real processes whose model answers by script; only
addresses, keys and the place of the sample database differ. Oracle: output and exit status.

Seen to fail on mutants: support_agent.py with another collection; a wrong option in the README.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hermetic.agent_mesh import EXAMPLES, environment, sluice
from tests.hermetic.local_mesh import ROOT
from tests.hermetic.mesh import Mesh

LIMIT_S = 90.0
SECTION = "## Agents, documents, conversations"
WAITS = 7


def run(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def script(mesh: Mesh, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(EXAMPLES / path), *arguments], environment(mesh))


def test_a_support_agent_answers_from_a_folder(shared_agent_mesh: Mesh) -> None:
    done = script(shared_agent_mesh, "support_agent/support_agent.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(": succeeded")] == [
        f"{name}: succeeded"
        for name in ("accounts.txt", "returns.md", "shipping.md", "warranty.html")
    ]
    assert lines[4].startswith('handbook {"query": "days to return an item"}')
    assert lines[5].startswith("-> ") and "30 days" in done.stdout.split("-> ")[1]
    assert lines[-1] == "They have 30 days."


def test_an_analyst_queries_the_sample_database(shared_agent_mesh: Mesh) -> None:
    done = script(shared_agent_mesh, "sql_analyst/sql_analyst.py")
    assert done.returncode == 0, done.stderr
    assert 'sales {"sql": "SELECT product, SUM(amount)' in done.stdout
    assert "desk" in done.stdout and "620" in done.stdout
    assert done.stdout.splitlines()[-1] == "desk: 620.00"


def test_the_sample_database_is_made_again_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        path = tmp_path / "deep" / "sales.db"
        command = [sys.executable, str(EXAMPLES / "sql_analyst" / "make_database.py"), str(path)]
        done = run(command, {})
        assert done.returncode == 0, done.stderr
        assert path.is_file()


@pytest.mark.parametrize("path", ["support_agent/support_agent.py", "sql_analyst/sql_analyst.py"])
def test_an_example_under_a_wrong_key_says_so(
    shared_agent_mesh: Mesh, tmp_path: Path, path: str
) -> None:
    key = tmp_path / "key"
    key.write_text("wrong\n")
    environ = environment(shared_agent_mesh) | {"SLUICE_KEY_FILE": str(key)}
    done = run([sys.executable, str(EXAMPLES / path)], environ)
    assert done.returncode == 1
    assert "UNAUTHENTICATED" in done.stderr and "Traceback" not in done.stderr


def commands() -> list[str]:
    """The lines of the code blocks of the README's section."""
    text = (ROOT / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def test_the_readmes_commands_about_agents_work_as_they_are_typed(
    shared_agent_mesh: Mesh, tmp_path: Path
) -> None:
    typed = commands()
    assert len(typed) >= 10
    own = {
        ".venv/bin/sluice": f"{sys.executable} -m sluice.command.cli",
        ".venv/bin/python": sys.executable,
    }
    for line in typed:
        tool, _, rest = line.partition(" ")
        there = f"{own.get(tool, tool)} {rest}".replace("localhost:8080", shared_agent_mesh.target)
        if line.endswith("make_database.py"):
            there += f" {tmp_path}/sales.db"
        environ = environment(shared_agent_mesh) | {"KEY": shared_agent_mesh.api_key}
        done = run(["bash", "-euo", "pipefail", "-c", there], environ)
        wanted = WAITS if "--tool desk" in line else 0
        assert done.returncode == wanted, f"{line}\n{done.stdout}{done.stderr}"
        if tool == "curl":
            assert json.loads(done.stdout.splitlines()[-1])["event"]["ended"]["answer"]


def test_a_ticket_is_opened_when_a_person_agrees(shared_agent_mesh: Mesh) -> None:
    ask = ("agent", "run", "Open a ticket: the lamp flickers.", "--tool", "desk")
    done = sluice(shared_agent_mesh, *ask)
    run_id = done.stderr.split()[1]
    assert sluice(shared_agent_mesh, "agent", "approve", run_id).returncode == 0
    after = sluice(shared_agent_mesh, "agent", "watch", run_id)
    assert (after.returncode, after.stdout) == (0, "It is open.\n"), after.stderr
    find = ("agent", "run", "Is there a ticket with the word lamp?", "--tool", "tickets")
    found = sluice(shared_agent_mesh, *find)
    assert "flickers" in found.stderr, found.stderr


@pytest.mark.parametrize("name", ["runs_curl.sh", "runs_grpcurl.sh"])
def test_runs_conversations_and_documents_from_a_shell(shared_agent_mesh: Mesh, name: str) -> None:
    environ = environment(shared_agent_mesh)
    environ["PATH"] += f":{os.environ['PATH']}"
    done = run([str(EXAMPLES / name)], environ)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("It is 168.", "It is open.", "Good morning to you.", "A kettle boils water."):
        assert said in done.stdout, said
    assert "RUN_STATE_FAILED" not in done.stdout


@pytest.mark.parametrize("name", ["runs_curl.sh", "runs_grpcurl.sh"])
def test_a_shell_example_under_a_wrong_key_says_so_and_fails(
    shared_agent_mesh: Mesh, tmp_path: Path, name: str
) -> None:
    (tmp_path / "key").write_text("wrong\n")
    environ = environment(shared_agent_mesh) | {"SLUICE_KEY_FILE": str(tmp_path / "key")}
    environ["PATH"] += f":{os.environ['PATH']}"
    done = run([str(EXAMPLES / name)], environ)
    assert done.returncode != 0
    assert "KEY_UNKNOWN" in done.stdout + done.stderr
