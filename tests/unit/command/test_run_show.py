"""The events of a run on a terminal and for pipes, and the exit status that its end gives."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from sluice.command import run_show
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import runs_pb2
from sluice.status import to_status

RUN = "6f0c9f3e-0000-4000-8000-000000000001"
CLIENT: Any = None


def event(sequence: int, **kind: Any) -> runs_pb2.RunEvent:
    return runs_pb2.RunEvent(sequence=sequence, run_id=RUN, **kind)


def paused(sequence: int) -> runs_pb2.RunEvent:
    said = event(sequence, paused=runs_pb2.RunPaused(reason="NO_INSTANCE"))
    said.paused.ready_time.seconds = 10 * sequence
    return said


QUEUED = event(1, queued=runs_pb2.RunQueued(gate_reason="OPEN"))
STEP = event(5, tool_call_ended=runs_pb2.ToolCallEnded(step=2, result_json="42"))
DONE = event(6, ended=runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED, answer="42"))


def shown(events: Sequence[runs_pb2.RunEvent], **more: Any) -> int:
    return run_show.show(CLIENT, iter(events), as_json=False, **more)


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        (Code.RESOURCE_EXHAUSTED, "BUDGET_STEPS", 1),
        (Code.DEADLINE_EXCEEDED, "BUDGET_WALL_TIME", 6),
        (Code.FAILED_PRECONDITION, "REPEATED_CALLS", 1),
        (Code.FAILED_PRECONDITION, "WRONG_CALLS", 1),
        (Code.RESOURCE_EXHAUSTED, "RUN_TOO_LONG", 1),
        (Code.NOT_FOUND, "MODEL_UNKNOWN", 4),
        (Code.UNAVAILABLE, "TOOL_UNAVAILABLE", 5),
    ],
)
def test_a_limit_of_the_run_is_neither_a_refusal_nor_a_busy_mesh(
    code: Code, reason: str, status: int
) -> None:
    ended = runs_pb2.RunEnded(
        state=runs_pb2.RUN_STATE_FAILED, status=to_status(SluiceError(code, reason, "No."))
    )
    assert shown([QUEUED, event(2, ended=ended)]) == status


def test_a_pipe_gets_two_lines_of_many_pauses(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown([QUEUED, paused(2), paused(3), paused(4), STEP, DONE]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"run {RUN}",
        "paused until 00:00:20 UTC (NO_INSTANCE)",
        "paused until 00:00:40 UTC (NO_INSTANCE), 3 times in a row",
        "step 2: -> 42",
    ]


def test_a_terminal_gets_the_last_pause_over_the_one_before() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=100)
    teller = run_show.Teller(console, live=True)
    for one in (paused(2), paused(3), paused(4), STEP):
        teller.tell(one)
    lines = written.getvalue().split("\n")
    assert lines[0] == "paused until 00:00:20 UTC (NO_INSTANCE)"
    assert lines[1].split("\r")[1:] == [
        "paused until 00:00:30 UTC (NO_INSTANCE), 2 times in a row",
        "paused until 00:00:40 UTC (NO_INSTANCE), 3 times in a row",
    ]
    assert lines[2:] == ["step 2: -> 42", ""]


@pytest.mark.parametrize(("terminal", "told"), [(True, []), (False, [f"run {RUN}"])])
def test_a_run_in_the_background_is_named_once_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    told: list[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert shown([QUEUED], once=True) == 0
    said = capsys.readouterr()
    assert said.out == f"{RUN}\n"
    assert said.err.splitlines() == told
