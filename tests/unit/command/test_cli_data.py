"""Small parts of `sluice docs`, `sluice sessions` and `sluice agent`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sluice.command import (
    agent_options,
    cli_agent,
    cli_agent_look,
    cli_docs,
    cli_sessions,
    doc_files,
    run_show,
    run_watch,
)
from sluice.common.v1 import input_pb2, sampling_pb2
from sluice.scheduler.v1 import data_pb2, runs_pb2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.md", "a.TXT", "deep/c.html", "deep/d.htm", "picture.png", ".git/x.md"):
        (tmp_path / name).write_text("text")
    return tmp_path


def test_a_folder_gives_its_texts_by_their_path_and_suffix(folder: Path) -> None:
    found = list(doc_files.find_files([folder]))
    assert [(one.document_id, one.media_type) for one in found] == [
        ("a.TXT", "text/plain"),
        ("b.md", "text/markdown"),
        ("deep/c.html", "text/html"),
        ("deep/d.htm", "text/html"),
    ]


def test_what_is_passed_over_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(doc_files.find_files([folder]))
    said = capsys.readouterr().err
    assert "picture.png is passed over" in said.replace("\n", " ")
    assert ".git" not in said


def test_a_file_is_named_as_it_is(folder: Path) -> None:
    (found,) = doc_files.find_files([folder / "deep" / "c.html"])
    assert found.document_id == "c.html"


@pytest.mark.parametrize(("name", "words"), [("picture.png", "suffixes"), ("none", "there is no")])
def test_a_file_that_was_named_and_cannot_be_added_is_refused(
    folder: Path, name: str, words: str
) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        list(doc_files.find_files([folder / name]))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\x89PNG\xff", r"picture\.txt is not UTF-8 text"),
        (b"x" * (doc_files.BYTES_MAX + 1), "at most"),
    ],
    ids=["empty", "binary", "large"],
)
def test_what_cannot_be_stored_is_said_without_asking(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    file = tmp_path / "picture.txt"
    file.write_bytes(content)
    with pytest.raises(doc_files.UnfitFileError, match=problem):
        doc_files.content_of(doc_files.Found(file, "picture.txt", "text/plain"))


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.md")).write_text("text")
    with pytest.raises(typer.BadParameter, match=r"'a\\udcff\.md' is not UTF-8"):
        list(doc_files.find_files([tmp_path]))


def test_two_files_of_one_name_are_refused(folder: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"b\.md and .*b\.md would both be 'b\.md'"):
        list(doc_files.find_files([folder / "b.md", folder]))


class SlowMesh:
    """A client that stores one document at once, and others when it is closed."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._closed = threading.Event()

    def __enter__(self) -> SlowMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def call(self, method: str, request: Any) -> Any:
        assert method == "PutDocument"
        self.asked.append(request.document_id)
        if len(self.asked) > 1:
            self._closed.wait(0.5)
        return data_pb2.PutDocumentResponse(run_id="r")


def test_an_interrupted_add_begins_no_further_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant docs_add_not_interrupted."""
    for number in range(24):
        (tmp_path / f"{number}.md").write_text("text")
    mesh = SlowMesh()

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_docs, "open_client", lambda *_: mesh)
    monkeypatch.setattr(cli_docs, "output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli_docs.add("c", [tmp_path], wait=False)
    assert len(mesh.asked) <= 2 * cli_docs.AT_ONCE


def test_labels_are_name_and_value() -> None:
    assert cli_docs.labels_of(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    assert cli_docs.labels_of(None) == {}
    with pytest.raises(typer.BadParameter, match="name=value"):
        cli_docs.labels_of(["plain"])


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["chat", "--session"], ["chat", "--session", "new"]),
        (["chat", "--session", "--model", "m"], ["chat", "--session", "new", "--model", "m"]),
        (["chat", "--session", "s-1"], ["chat", "--session", "s-1"]),
        (["chat"], ["chat"]),
        (["agent", "run", "x", "--session", "-"], ["agent", "run", "x", "--session", "-"]),
        ([], []),
    ],
)
def test_a_session_without_a_name_is_a_new_one(typed: list[str], read: list[str]) -> None:
    assert cli_sessions.with_session_value(typed) == read


class Store:
    """A client of a session of 5 messages, told two at a time."""

    def call(self, method: str, request: Any) -> Any:
        assert method == "GetSession"
        begin = request.from_message
        messages = [
            input_pb2.ChatMessage(role="user", content=str(number))
            for number in range(begin, min(begin + 2, 5))
        ]
        return data_pb2.GetSessionResponse(
            session=data_pb2.Session(message_count=5), messages=messages
        )


def test_a_history_is_read_to_its_end() -> None:
    client: Any = Store()
    assert [one.content for one in cli_sessions.history(client, "s")] == list("01234")


def test_a_turn_waits_for_one_whose_answer_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client: Any = Store()
    chat = cli_sessions.SessionChat(client, "", sampling_pb2.SamplingParams(), "Be kind.", 9.0)
    chat.go_on("s")
    assert "--system is for a new session" in capsys.readouterr().err
    happened: list[str] = []

    def start(_: Any, request: Any, limit_s: float) -> Iterator[runs_pb2.RunEvent]:
        happened.append(request.task)
        yield runs_pb2.RunEvent(sequence=1, run_id=f"run of {request.task}")
        if request.task == "long":
            raise KeyboardInterrupt
        ended = runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED, answer="done")
        yield runs_pb2.RunEvent(sequence=2, run_id="r", ended=ended)

    def watch(_: Any, run_id: str, first: int, limit_s: float) -> Iterator[runs_pb2.RunEvent]:
        happened.append(f"waited for {run_id}")
        return iter(())

    monkeypatch.setattr(run_watch, "start", start)
    monkeypatch.setattr(run_watch, "watch", watch)
    assert [chat.turn(words) for words in ("long", "next", "last")] == [False, True, True]
    assert happened == ["long", "waited for run of long", "next", "last"]
    said = capsys.readouterr()
    assert (said.out.strip(), "the next turn waits" in said.err) == ("done\ndone", True)


def test_a_budget_is_what_was_given() -> None:
    request = runs_pb2.RunAgentRequest()
    agent_options.set_budget(request, None, None, None, "", None)
    assert not request.HasField("budget")
    agent_options.set_budget(request, 3, 100, 0, "2m", 0.5)
    budget = request.budget
    assert (budget.steps_max, budget.tokens_max, budget.tool_calls_max) == (3, 100, 0)
    assert (budget.wall_time_max.seconds, budget.cost_max) == (120, 0.5)


def test_words_of_choices_and_states_are_the_protos_own() -> None:
    for number, word in enumerate(cli_agent.CHOICES, start=1):
        assert agent_options.number(runs_pb2.ToolChoice, "TOOL_CHOICE", word, (word,), "") == number
    for number, word in enumerate(cli_agent_look.STATES, start=1):
        assert agent_options.number(runs_pb2.RunState, "RUN_STATE", word, (word,), "") == number
    with pytest.raises(typer.BadParameter, match="auto, required, each"):
        agent_options.number(
            runs_pb2.ToolChoice, "TOOL_CHOICE", "always", cli_agent.CHOICES, "--choice"
        )


class Mesh:
    """A client of a run with a large result, in parts of 4 bytes, and of 5 documents to delete."""

    left = 5

    def call(self, method: str, request: Any) -> Any:
        if method == "GetRunBlob":
            content = b'"0123456789"'
            part = content[request.offset : request.offset + 4]
            return runs_pb2.GetRunBlobResponse(content=part, size_bytes=len(content))
        assert method == "DeleteCollection"
        gone = min(2, self.left)
        self.left -= gone
        token = "on" if gone == 2 else ""
        return data_pb2.DeleteCollectionResponse(deleted=gone, next_page_token=token)


def test_a_large_result_is_put_together() -> None:
    client: Any = Mesh()
    assert cli_agent_look._blob(client, "r", "b") == b'"0123456789"'


def test_a_collection_is_deleted_to_its_end() -> None:
    client: Any = Mesh()
    assert cli_docs._delete_all(client, "c") == 5
    assert client.left == 0


def test_a_run_whose_events_were_given_up_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ended = runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED, answer="42", truncated=True)
    last = runs_pb2.RunEvent(sequence=9, run_id="r", ended=ended)
    client: Any = None
    assert run_show.show(client, iter([last]), as_json=False) == 0
    said = capsys.readouterr()
    assert said.out == "42\n"
    assert said.err.splitlines() == [
        "events 1 to 8 of this ended run were given up to make room",
        "[cut off at a limit of tokens; --max-tokens permits more]",
    ]
    assert run_show.show(client, iter([last]), as_json=True, first=9) == 0
    assert "given up" not in capsys.readouterr().err


def test_who_interrupts_a_start_hears_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> runs_pb2.RunEvent:
        raise KeyboardInterrupt

    client: Any = None
    events = (interrupt() for _ in range(1))
    asked = runs_pb2.RunBudget()
    assert run_show.show(client, events, as_json=False, asked=asked) == 130
    assert capsys.readouterr().err.endswith("agent list shows whether it began\n")


def test_a_result_that_was_given_up_is_not_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    last = runs_pb2.RunEvent(sequence=9, run_id="r", ended=runs_pb2.RunEnded())
    monkeypatch.setattr(run_watch, "so_far", lambda *_: iter([last]))
    client: Any = None
    with pytest.raises(typer.BadParameter, match="given up"):
        cli_agent_look._ended_call(client, "r", 2)
