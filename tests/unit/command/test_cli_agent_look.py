"""What `sluice agent show` tells of a run, and what `sluice agent cancel` says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from sluice.command import cli_agent_decide, cli_agent_look, run_watch
from sluice.common.v1 import input_pb2, result_pb2
from sluice.scheduler.v1 import runs_pb2

RUN = "6f0c9f3e-0000-4000-8000-000000000001"
CALL = input_pb2.ToolCall(id="c1", name="desk", arguments_json="{}")
QUEUED = runs_pb2.RunEvent(sequence=1, run_id=RUN, queued=runs_pb2.RunQueued(gate_reason="OPEN"))
STEP = runs_pb2.RunEvent(
    sequence=2,
    model_step=runs_pb2.ModelStep(step=1, usage=result_pb2.Usage(completion_tokens=2)),
)
WAITS = runs_pb2.RunEvent(
    sequence=3,
    waiting=runs_pb2.RunWaiting(step=2, reason=runs_pb2.WAIT_REASON_APPROVAL, call=CALL),
)
CUT = runs_pb2.RunEvent(
    sequence=3,
    ended=runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED, answer="Good", truncated=True),
)


class Mesh:
    """A client of one run, which may end between two calls."""

    def __init__(self, *states: Any) -> None:
        self.states = list(states)
        self.called: list[str] = []

    def call(self, method: str, request: Any) -> Any:
        self.called.append(method)
        state = self.states.pop(0)
        run = runs_pb2.Run(run_id=RUN, state=state, answer="Good" if state == SUCCEEDED else "")
        if state in (SUCCEEDED, runs_pb2.RUN_STATE_FAILED, runs_pb2.RUN_STATE_CANCELLED):
            run.end_time.seconds = 1
        return runs_pb2.GetRunResponse(run=run)


RUNNING, SUCCEEDED = runs_pb2.RUN_STATE_RUNNING, runs_pb2.RUN_STATE_SUCCEEDED
CANCELLED, WAITING = runs_pb2.RUN_STATE_CANCELLED, runs_pb2.RUN_STATE_WAITING


def shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: Any,
    events: list[runs_pb2.RunEvent],
    *,
    as_json: bool = False,
) -> str:
    monkeypatch.setattr(cli_agent_look, "open_client", lambda *_: nullcontext(Mesh(state)))
    monkeypatch.setattr(run_watch, "so_far", lambda *_: iter(events))
    cli_agent_look.show(RUN, as_json)
    return capsys.readouterr().out


def test_a_run_that_waits_says_how_to_decide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(monkeypatch, capsys, WAITING, [QUEUED, STEP, WAITS]).splitlines()
    for line, word in zip(said[-4:], ("approve", "skip", "supply", "cancel"), strict=True):
        assert f" agent {word} {RUN}" in line
    assert "--step 2" in said[-4]


def test_a_run_whose_decision_no_agent_has_taken_yet_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(monkeypatch, capsys, runs_pb2.RUN_STATE_QUEUED, [QUEUED, STEP, WAITS])
    assert said.splitlines()[-1].startswith("queued;")
    told = shown(
        monkeypatch, capsys, runs_pb2.RUN_STATE_QUEUED, [QUEUED, STEP, WAITS], as_json=True
    )
    assert json.loads(told)["waiting"] is None


def test_an_answer_that_was_cut_off_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(monkeypatch, capsys, SUCCEEDED, [QUEUED, STEP, CUT]).splitlines()
    assert said[-2:] == ["Good", "[stopped after 2 tokens; --max-tokens permits more]"]


def test_json_has_the_events_the_call_that_waits_and_whether_it_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [QUEUED, STEP, WAITS]
    waits = json.loads(shown(monkeypatch, capsys, WAITING, events, as_json=True))
    assert (waits["state"], waits["truncated"]) == ("RUN_STATE_WAITING", False)
    assert (waits["waiting"]["step"], waits["waiting"]["call"]["name"]) == (2, "desk")
    assert [one["sequence"] for one in waits["events"]] == ["1", "2", "3"]
    cut = json.loads(shown(monkeypatch, capsys, SUCCEEDED, [QUEUED, STEP, CUT], as_json=True))
    assert (cut["truncated"], cut["waiting"]) == (True, None)


@pytest.mark.parametrize(
    ("states", "called", "said"),
    [
        (
            [RUNNING, RUNNING],
            ["GetRun", "CancelRun"],
            "running; it ends as soon as an agent takes note",
        ),
        ([RUNNING, CANCELLED], ["GetRun", "CancelRun"], "cancelled"),
        ([SUCCEEDED], ["GetRun"], "succeeded; nothing was cancelled"),
        ([CANCELLED], ["GetRun"], "cancelled; nothing was cancelled"),
        ([RUNNING, SUCCEEDED], ["GetRun", "CancelRun"], "succeeded; nothing was cancelled"),
    ],
)
def test_a_run_that_had_ended_is_not_called_cancelled_now(
    states: list[Any], called: list[str], said: str
) -> None:
    mesh: Any = Mesh(*states)
    had = " had ended before" if "nothing" in said else ""
    assert cli_agent_decide._cancel(mesh, RUN) == f"run {RUN}{had}: {said}"
    assert mesh.called == called
