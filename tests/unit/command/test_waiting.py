"""A person who waits for the first piece of an answer is told so; a pipe is not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from sluice.command import cli_calls
from sluice.scheduler.v1 import generate_pb2

LIMIT_S = 10.0


class Said:
    """Stands for standard error."""

    def __init__(self) -> None:
        self.at_all = threading.Event()

    def print(self, *_: object, **__: object) -> None:
        self.at_all.set()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    said = Said()
    monkeypatch.setattr(cli_calls, "errors", lambda: said)
    monkeypatch.setattr(cli_calls, "PATIENCE_S", 0.0)
    return said


def after(event: threading.Event, wait_s: float) -> Iterator[generate_pb2.GenerateResponse]:
    event.wait(wait_s)
    yield generate_pb2.GenerateResponse()


def test_a_person_is_told_what_is_waited_for(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert len(list(cli_calls._announced(after(said.at_all, LIMIT_S)))) == 1
    assert said.at_all.is_set()


def test_a_pipe_is_told_nothing(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert len(list(cli_calls._announced(after(said.at_all, 0.1)))) == 1
    assert not said.at_all.is_set()


def test_an_answer_that_has_begun_is_not_waited_for(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(cli_calls, "PATIENCE_S", LIMIT_S)
    messages = cli_calls._announced(iter([generate_pb2.GenerateResponse()] * 2))
    next(messages)
    waiting = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    assert all(one.finished.is_set() for one in waiting)
    assert len(list(messages)) == 1
