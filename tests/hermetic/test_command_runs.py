"""`sluice agent`, `docs`, `sessions`, `chat --session`, `tools` against a mesh of real processes.

Goal: a person can start, follow, find, decide and end runs, keep documents and conversations, and
register tools, from the shell; output is readable or JSON, and the exit status says what became of
it. Method: one mesh, in which the model's replies are scripted; commands run as processes.
Oracle: exit status and output. No seed: nothing is random.

Seen to fail on mutants: `run_show._end` returning 0 always, `cli_agent_decide._waiting_step`
returning 1, `SessionChat._turn` printing the answer a second time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hermetic.agent_mesh import environment, sluice
from tests.hermetic.edge_harness import wait_until
from tests.hermetic.mesh import Mesh


@pytest.fixture
def running(shared_agent_mesh: Mesh) -> Mesh:
    return shared_agent_mesh


def test_a_run_tells_its_steps_and_prints_its_answer(running: Mesh) -> None:
    done = sluice(running, "agent", "run", "Six times seven?", "--tool", "calculator")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "It is 42.\n"
    assert 'calculator {"expression": "6*7"}' in done.stderr
    assert '-> {"result": 42}' in done.stderr
    assert "step 1: model call," in done.stderr
    run_id = done.stderr.split()[1]
    watched = sluice(running, "agent", "watch", run_id)
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, done.stdout, done.stderr)
    listed = sluice(running, "agent", "list")
    assert run_id in listed.stdout and "succeeded" in listed.stdout
    shown = sluice(running, "agent", "show", run_id)
    assert "succeeded; " in shown.stdout and "It is 42." in shown.stdout
    as_json = json.loads(sluice(running, "agent", "show", run_id, "--json").stdout)
    assert (as_json["state"], as_json["tool_calls"]) == ("RUN_STATE_SUCCEEDED", 1)
    assert (as_json["truncated"], as_json["waiting"]) == (False, None)
    assert as_json["events"][-1]["ended"]["answer"] == "It is 42."
    late = sluice(running, "agent", "cancel", run_id)
    assert (late.returncode, "nothing was cancelled" in late.stdout) == (0, True), late.stderr
    result = sluice(running, "agent", "result", run_id, "2")
    assert (result.returncode, "42" in result.stdout) == (0, True), result.stderr
    none = sluice(running, "agent", "result", run_id, "1")
    assert (none.returncode, "no tool call" in none.stderr) == (2, True), none.stderr


def test_events_are_json_one_a_line(running: Mesh) -> None:
    done = sluice(running, "agent", "run", "Six times seven?", "--tool", "calculator", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert "queued" in events[0] and events[-1]["ended"]["answer"] == "It is 42."


def test_a_run_in_the_background_is_found_again(running: Mesh) -> None:
    task = ("agent", "run", "-", "--tool", "calculator", "--background")
    done = sluice(running, *task, text="Six times seven?")
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.strip()
    assert sluice(running, "agent", "watch", run_id).stdout == "It is 42.\n"


def test_a_call_that_needs_approval_waits_and_goes_on_when_it_is_decided(running: Mesh) -> None:
    done = sluice(running, "agent", "run", "Open a ticket.", "--tool", "desk")
    assert done.returncode == 7, done.stderr
    run_id = done.stderr.split()[1]
    assert "needs approval" in done.stderr
    assert f"sluice agent approve {run_id} --step" in done.stderr
    assert f"sluice agent supply {run_id} RESULT_AS_JSON --step" in done.stderr
    assert "waiting" in sluice(running, "agent", "list", "--state", "waiting").stdout
    shown = sluice(running, "agent", "show", run_id)
    assert f"sluice agent approve {run_id} --step" in shown.stdout
    as_json = json.loads(sluice(running, "agent", "show", run_id, "--json").stdout)
    assert as_json["waiting"]["call"]["name"] == "desk__open_ticket"
    assert sluice(running, "agent", "approve", run_id).returncode == 0
    after = sluice(running, "agent", "watch", run_id, "--from", "4")
    assert (after.returncode, after.stdout) == (0, "It is open.\n"), after.stderr
    assert "decided: approved" in after.stderr
    for words in (("approve",), ("skip", "--step", "2"), ("supply", "{}")):
        again = sluice(running, "agent", words[0], run_id, *words[1:])
        assert again.returncode == 4, again.stderr
        assert "NOT_WAITING: the run does not wait: it is succeeded" in again.stderr


def test_a_result_can_be_supplied_and_a_call_skipped(running: Mesh) -> None:
    for decide in (("supply", '{"number": 9}'), ("skip",)):
        done = sluice(running, "agent", "run", "Open a ticket.", "--tool", "desk")
        run_id = done.stderr.split()[1]
        word, *rest = decide
        assert sluice(running, "agent", word, run_id, *rest).returncode == 0
        after = sluice(running, "agent", "watch", run_id, "--from", "4")
        assert (after.returncode, after.stdout) == (0, "It is open.\n"), after.stderr
    wrong = sluice(running, "agent", "supply", run_id, "no JSON")
    assert wrong.returncode == 2


def test_a_run_that_waits_can_be_cancelled(running: Mesh) -> None:
    done = sluice(running, "agent", "run", "Open a ticket.", "--tool", "desk")
    run_id = done.stderr.split()[1]
    assert sluice(running, "agent", "cancel", run_id).returncode == 0
    after = sluice(running, "agent", "watch", run_id, "--from", "4")
    assert after.returncode == 1
    assert after.stderr.count("cancelled") == 1


def test_a_budget_that_is_used_up_is_no_busy_mesh_and_what_was_lowered_is_said(
    running: Mesh,
) -> None:
    task = ("agent", "run", "Too much", "--tool", "calculator")
    done = sluice(running, *task, "--budget-steps", "3", "--budget-calls", "1000000")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("BUDGET_STEPS") == 1
    assert "--budget-calls: lowered from 1000000 to 100, the most allowed here" in done.stderr
    assert "--budget-steps: lowered" not in done.stderr


def test_a_tenants_runs_have_its_limits(running: Mesh) -> None:
    made = sluice(running, "tenants", "set", "dev", "--run-budget", "steps=2")
    assert made.returncode == 0, made.stderr
    assert "steps=2" in sluice(running, "tenants", "list").stdout
    task = ("agent", "run", "Too much", "--tool", "calculator", "--budget-steps", "3")

    def is_lowered() -> bool:  # schedulers follow within a second
        done = sluice(running, *task)
        return "--budget-steps: lowered from 3 to 2" in done.stderr

    wait_until(is_lowered, 10.0)
    wrong = sluice(running, "tenants", "set", "dev", "--run-budget", "steps=many")
    assert wrong.returncode == 2
    assert "--run-budget" in wrong.stderr
    assert sluice(running, "tenants", "set", "dev", "--run-budget", "steps=none").returncode == 0
    wait_until(lambda: not is_lowered(), 10.0)


def test_an_answer_that_was_cut_off_is_said_to_be(running: Mesh) -> None:
    done = sluice(running, "agent", "run", "Good morning", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "[stopped after 2 tokens; --max-tokens permits more]" in done.stderr
    assert "tokens, cut off" in done.stderr
    chat = sluice(running, "chat", "--session", "--max-tokens", "2", text="Good morning\n")
    assert "[stopped after 2 tokens; --max-tokens permits more]" in chat.stderr
    whole = sluice(running, "agent", "run", "Good morning")
    assert "stopped" not in whole.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("run", "x", "--tool", "nothing"), 4, "TOOL_NOT_ALLOWED"),
        (("run", "x", "--choice", "always"), 2, "auto, required, each"),
        (("run", "x", "--budget-time", "soon"), 2, "--budget-time"),
        (("watch", "6f0c9f3e-0000-4000-8000-000000000001"), 4, "NOT_FOUND"),
        (("cancel", "6f0c9f3e-0000-4000-8000-000000000001"), 4, "NOT_FOUND"),
        (("list", "--state", "lost"), 2, "queued, running"),
        (("list", "--kind", "lost"), 2, "task, turn, ingest"),
        (("run", "x", "--tool", "nothing"), 4, "'nothing' is not in this tenant's list"),
        (("run", "x", "--tool", "nothing"), 4, "`sluice agent tools` lists those that are"),
    ],
)
def test_a_refusal_is_a_line_and_a_status(
    running: Mesh, arguments: tuple[str, ...], status: int, word: str
) -> None:
    done = sluice(running, "agent", *arguments)
    assert done.returncode == status, done.stderr
    assert done.stderr.count(word) == 1
    assert "Traceback" not in done.stderr


def test_the_tools_of_a_key_are_listed(running: Mesh) -> None:
    done = sluice(running, "agent", "tools")
    assert done.returncode == 0, done.stderr
    for name in ("calculator", "clock", "handbook", "sales", "tickets__find_tickets"):
        (line,) = [one for one in done.stdout.splitlines() if one.startswith(f"{name} ")]
        assert " yes " in line, line


def test_documents_are_added_found_and_deleted(running: Mesh, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.md").write_text("# Kettles\n\nA kettle boils water.\n")
    (tmp_path / "deep" / "two.txt").write_text("A zebra has stripes.\n")
    added = sluice(running, "docs", "add", "things", str(tmp_path), "--label", "kind=test")
    assert added.returncode == 0, added.stderr
    assert "one.md: 1 chunk\n" in added.stdout
    assert added.stdout.splitlines()[-1] == "2 added, 0 failed"
    listed = sluice(running, "docs", "list", "things")
    assert "deep/two.txt" in listed.stdout and "kind=test" in listed.stdout
    found = sluice(running, "docs", "search", "things", "stripes of a zebra", "--top-k", "1")
    assert found.returncode == 0, found.stderr
    assert "deep/two.txt" in found.stdout and "A zebra has stripes." in found.stdout
    assert re.search(r"\(cosine -?\d\.\d{3}, words [1-9]?\d\.\d\d\)", found.stdout)
    (hit,) = json.loads(
        sluice(running, "docs", "search", "things", "zebra", "--top-k", "1", "--json").stdout
    )
    assert hit["document_id"] == "deep/two.txt"
    assert hit["term_score"] > 0 and -1 <= hit["vector_score"] <= 1
    nonsense = sluice(running, "docs", "search", "things", "xyzzy qwrtplm zorbifrax")
    assert (nonsense.stdout, nonsense.stderr) == ("", "nothing was found\n")
    assert sluice(running, "docs", "rm", "things", "deep/two.txt").returncode == 0
    assert "two.txt" not in sluice(running, "docs", "search", "things", "zebra").stdout
    assert sluice(running, "docs", "rm", "things", "deep/two.txt").returncode == 4
    whole = sluice(running, "docs", "get", "things", "one.md")
    assert whole.stdout == "# Kettles\n\nA kettle boils water.\n", whole.stderr
    there = sluice(running, "docs", "collections")
    assert ["things", "1"] in [line.split()[:2] for line in there.stdout.splitlines()]
    assert sluice(running, "docs", "rm", "things").returncode == 2
    assert "1 document is deleted" in sluice(running, "docs", "rm", "things", "--all").stdout
    for gone in (("rm", "things", "--all"), ("list", "things"), ("search", "things", "kettle")):
        done = sluice(running, "docs", *gone)
        assert (done.returncode, "There is no such collection" in done.stderr) == (4, True)


def test_a_conversation_is_kept_and_continued(running: Mesh) -> None:
    first = sluice(running, "chat", "--session", text="Good morning\n")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "Good morning to you.\n"
    session = first.stderr.split()[1]
    second = sluice(running, "chat", "--session", session, text="And good night\n")
    assert second.stdout == "Good night.\n", second.stderr
    assert "user: Good morning" in second.stderr
    assert "assistant: Good morning to you." in second.stderr
    shown = sluice(running, "sessions", "show", session)
    assert [line.split(":")[0] for line in shown.stdout.splitlines()] == ["user", "assistant"] * 2
    assert session in sluice(running, "sessions", "list").stdout
    assert sluice(running, "sessions", "rm", session).returncode == 0
    assert "NOT_FOUND" in sluice(running, "sessions", "show", session).stderr


def test_a_tool_is_registered_for_a_tenant_and_deleted(running: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "look.toml"
    file.write_text(
        'name = "look"\ndescription = "Looks things up."\neffect = "read"\n'
        'retrieval = { collection = "things" }\n'
    )
    added = sluice(running, "tools", "add", "dev", str(file))
    assert added.returncode == 0, added.stderr
    assert "sluice tenants set dev --add-tool look\n" in added.stdout
    listed = sluice(running, "tools", "list", "dev").stdout
    assert "look" in listed and "retrieval" in listed and "no" in listed
    ghost = sluice(running, "tools", "list", "ghost")
    assert (ghost.returncode, "TENANT_UNKNOWN" in ghost.stderr) == (4, True)
    file.write_text('name = "look"\ncolour = "red"\n')
    wrong = sluice(running, "tools", "add", "dev", str(file))
    assert f"{file}: colour: there is no such field" in wrong.stderr
    file.write_text('[[tool]]\nname = "look"\ndescription = "x"\neffect = "read"\nclock = {}\n')
    assert sluice(running, "tools", "add", "dev", str(file)).returncode == 0
    file.write_text('[[tool]]\nname = "look"\n[[tool]]\nname = "two"\n')
    assert "one [[tool]]" in sluice(running, "tools", "add", "dev", str(file)).stderr
    file.write_text(
        'name = "look"\ndescription = "x"\neffect = "read"\nsql = { url = "sqlite:///x.db" }\n'
    )
    refused = sluice(running, "tools", "add", "dev", str(file))
    assert refused.returncode == 4, refused.stderr
    assert sluice(running, "tools", "rm", "dev", "look").returncode == 0
    assert sluice(running, "tools", "rm", "dev", "look").returncode == 4


def test_runs_are_listed_by_their_kind(running: Mesh, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("A kettle boils water.\n")
    assert sluice(running, "agent", "run", "Six times seven?", "--tool", "calculator").stdout
    assert sluice(running, "chat", "--session", text="Good morning\n").returncode == 0
    assert sluice(running, "docs", "add", "kinds", str(tmp_path)).returncode == 0
    for kind in ("task", "turn", "ingest"):
        done = sluice(running, "agent", "list", "--kind", kind, "--limit", "1", "--json")
        (found,) = json.loads(done.stdout)
        assert found["kind"] == f"RUN_KIND_{kind.upper()}"
        shown = json.loads(sluice(running, "agent", "show", found["run_id"], "--json").stdout)
        assert (shown["kind"], shown["state"]) == (found["kind"], "RUN_STATE_SUCCEEDED")


def test_explain_of_a_run_says_where_to_look(running: Mesh) -> None:
    done = sluice(running, "agent", "run", "Six times seven?", "--tool", "calculator")
    run_id = done.stderr.split()[1]
    told = sluice(running, "explain", run_id)
    assert told.returncode == 4
    assert f"sluice agent show {run_id}" in told.stderr


def test_a_tool_that_nobody_declares_is_allowed_with_a_warning(running: Mesh) -> None:
    added = sluice(running, "tenants", "add", "shop", "--agents", "--tool", "calculator")
    assert (added.returncode, added.stderr) == (0, "")
    done = sluice(running, "tenants", "set", "shop", "--add-tool", "nobody", "--add-tool", "clock")
    assert done.returncode == 0
    assert "there is no tool 'nobody'" in done.stderr and "clock" not in done.stderr
    assert "calculator, nobody, clock" in sluice(running, "tenants", "list").stdout
    done = sluice(running, "tenants", "set", "shop", "--remove-tool", "nobody")
    assert (done.returncode, done.stderr) == (0, "")
    assert "calculator, clock" in sluice(running, "tenants", "list").stdout
    assert sluice(running, "tenants", "remove", "shop").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("config",),
        ("models",),
        ("agent", "list"),
        ("agent", "list", "--json"),
        ("agent", "run", "Six times seven?", "--tool", "calculator", "--json"),
        ("generate", "Hello"),
    ],
)
def test_a_command_whose_reader_has_left_ends_quietly(
    running: Mesh, arguments: tuple[str, ...]
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sluice.command.cli", *arguments],
            env=environment(running),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert done.returncode == 141, done.stderr
    assert "Error" not in done.stderr and "unexpected" not in done.stderr
