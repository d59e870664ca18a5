"""What `sluice up` says when its question is refused."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sluice.command import question
from sluice.command.up_screen import UpScreen
from sluice.errors import Code, SluiceError


@pytest.mark.parametrize(("reason", "advised"), [("NO_INSTANCE", True), ("QUEUE_FULL", False)])
def test_a_drain_that_outlasted_a_restart_is_thought_of(
    reason: str, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SluiceError(Code.UNAVAILABLE, reason, "no")

    monkeypatch.setattr(question, "ask", refuse)
    said, errors = io.StringIO(), io.StringIO()
    screen = UpScreen(Console(file=said), Console(file=errors))
    topology: Any = SimpleNamespace(endpoint="127.0.0.1:1", simulated=False)
    assert not screen.ask(topology, "key")
    assert reason in errors.getvalue()
    assert ("`sluice drain INSTANCE --undo`" in said.getvalue()) is advised
