"""The events of a run as lines for people."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import status_pb2

from sluice.command.run_story import Tokens, folded, given_up, lines, lowered, short, state_name
from sluice.common.v1 import input_pb2, result_pb2
from sluice.scheduler.v1 import runs_pb2

CALL = input_pb2.ToolCall(id="c1", name="calculator", arguments_json='{"expression":\n"6*7"}')
DOUBT = runs_pb2.WAIT_REASON_IN_DOUBT
APPROVAL = runs_pb2.WAIT_REASON_APPROVAL


def told(**kind: Any) -> list[str]:
    return list(lines(runs_pb2.RunEvent(sequence=1, run_id="r-1", **kind)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"queued": runs_pb2.RunQueued(gate_reason="OPEN")}, ["run r-1"]),
        (
            {
                "model_step": runs_pb2.ModelStep(
                    step=2,
                    usage=result_pb2.Usage(prompt_tokens=10, completion_tokens=5),
                    problem="no such tool",
                )
            },
            ["step 2: model call, 10 + 5 tokens", "step 2: told the model: no such tool"],
        ),
        (
            {"tool_call_started": runs_pb2.ToolCallStarted(step=2, call=CALL)},
            ['step 2: calculator {"expression": "6*7"}'],
        ),
        (
            {"tool_call_ended": runs_pb2.ToolCallEnded(step=2, result_json="42")},
            ["step 2: -> 42"],
        ),
        (
            {
                "tool_call_ended": runs_pb2.ToolCallEnded(
                    step=2, result_json="[1", truncated=True, size_bytes=9000
                )
            },
            ["step 2: -> [1 (9000 bytes in all)"],
        ),
        (
            {
                "tool_call_ended": runs_pb2.ToolCallEnded(
                    step=2, result_json="[1", truncated=True, size_bytes=9000, blob="b"
                )
            },
            ["step 2: -> [1 (9000 bytes in all; `sluice agent result` prints them)"],
        ),
        (
            {"waiting": runs_pb2.RunWaiting(step=3, reason=DOUBT, call=CALL)},
            [
                (
                    'step 3: waits for a person: calculator {"expression": "6*7"} may or may not'
                    " have been made already"
                )
            ],
        ),
        (
            {"waiting": runs_pb2.RunWaiting(step=3, reason=APPROVAL, call=CALL)},
            ['step 3: waits for a person: calculator {"expression": "6*7"} needs approval'],
        ),
        (
            {
                "resumed": runs_pb2.RunResumed(
                    step=3, decision=runs_pb2.RESUME_DECISION_SUPPLY_RESULT
                )
            },
            ["step 3: decided: result supplied"],
        ),
        (
            {"progress": runs_pb2.RunProgress(phase="embed", done=2, total=9)},
            ["embed: 2 of 9"],
        ),
        ({"partial_text": runs_pb2.PartialText(step=1, text="hello")}, []),
        (
            {"ended": runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED, answer="42")},
            [],
        ),
        ({"ended": runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_CANCELLED)}, ["cancelled"]),
    ],
)
def test_each_event_says_what_happened(kind: dict[str, Any], said: list[str]) -> None:
    assert told(**kind) == said


def test_a_tool_that_failed_says_why() -> None:
    status = status_pb2.Status(code=14, message="it is away")
    (line,) = told(tool_call_ended=runs_pb2.ToolCallEnded(step=1, status=status))
    assert line == "step 1: failed: UNAVAILABLE: it is away"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ('{"error": "no such column: product.id"}', "no such column: product.id"),
        ('{"error": "none", "at": 3}', '{"error": "none", "at": 3}'),
        ('"it broke"', '"it broke"'),
        ('{"error": "cut', '{"error": "cut'),
    ],
)
def test_what_a_tool_that_failed_said_itself_is_shown(result: str, said: str) -> None:
    status = status_pb2.Status(code=9, message="The database refused the statement.")
    ended = runs_pb2.ToolCallEnded(step=1, status=status, result_json=result)
    (line,) = told(tool_call_ended=ended)
    assert line == (
        f"step 1: failed: FAILED_PRECONDITION: The database refused the statement: {said}"
    )


def paused(until_s: int, reason: str = "NO_INSTANCE", message: str = "") -> runs_pb2.RunEvent:
    event = runs_pb2.RunEvent(paused=runs_pb2.RunPaused(reason=reason, message=message))
    event.paused.ready_time.seconds = until_s
    return event


def test_pauses_in_a_row_for_one_reason_are_one_line() -> None:
    step = runs_pb2.RunEvent(tool_call_ended=runs_pb2.ToolCallEnded(step=2, result_json="42"))
    events = [paused(0), paused(10), paused(20), paused(30, "QUEUE_FULL"), step, paused(40)]
    assert list(folded(events)) == [
        "paused until 00:00:20 UTC (NO_INSTANCE), 3 times in a row",
        "paused until 00:00:30 UTC (QUEUE_FULL)",
        "step 2: -> 42",
        "paused until 00:00:40 UTC (NO_INSTANCE)",
    ]


def test_a_pause_says_what_is_waited_for() -> None:
    said = "Tool sales: The database cannot be read"
    events = [paused(0, "TOOL_UNAVAILABLE", said), paused(10, "TOOL_UNAVAILABLE", said)]
    (line,) = folded(events)
    assert line == f"paused until 00:00:10 UTC (TOOL_UNAVAILABLE), 2 times in a row: {said}"
    assert told(paused=events[0].paused) == [
        f"paused until 00:00:00 UTC (TOOL_UNAVAILABLE): {said}"
    ]


def test_an_answer_without_a_run_says_so() -> None:
    queued = runs_pb2.RunQueued(gate_reason="BUSY")
    (line,) = lines(runs_pb2.RunEvent(sequence=1, queued=queued))
    assert line == "answered directly (BUSY): no run is stored"


def test_long_texts_are_cut_and_on_one_line() -> None:
    assert short("a\n b\tc") == "a b c"
    assert short("x" * 500, 20) == "x" * 16 + " ..."


def test_every_state_has_its_word() -> None:
    assert state_name(runs_pb2.RUN_STATE_WAITING) == "waiting"


def test_a_cut_answer_says_which_limit_permits_more() -> None:
    usage = result_pb2.Usage(prompt_tokens=50, completion_tokens=30)
    step = runs_pb2.ModelStep(step=1, usage=usage, finish_reason=result_pb2.FINISH_REASON_LENGTH)
    assert told(model_step=step) == ["step 1: model call, 50 + 30 tokens, cut off"]
    for most, option in ((0, "--max-tokens"), (500, "--max-tokens"), (90, "--budget-tokens")):
        tokens = Tokens()
        queued = runs_pb2.RunQueued(budget=runs_pb2.RunBudget(tokens_max=most))
        tokens.add(runs_pb2.RunEvent(queued=queued))
        tokens.add(runs_pb2.RunEvent(model_step=step))
        assert tokens.note == f"[stopped after 30 tokens; {option} permits more]"


def test_a_cut_answer_whose_steps_were_not_shown_names_no_number() -> None:
    tokens = Tokens()
    tokens.add(runs_pb2.RunEvent(sequence=9, ended=runs_pb2.RunEnded(truncated=True)))
    assert tokens.note == "[cut off at a limit of tokens; --max-tokens permits more]"


def test_events_that_were_given_up_are_said() -> None:
    assert given_up(runs_pb2.RunEvent(sequence=1), 1) == ""
    assert given_up(runs_pb2.RunEvent(sequence=4), 4) == ""
    assert given_up(runs_pb2.RunEvent(sequence=4), 0) == given_up(runs_pb2.RunEvent(sequence=4), 1)
    assert given_up(runs_pb2.RunEvent(sequence=9), 3) == (
        "events 3 to 8 of this ended run were given up to make room"
    )
    partial = runs_pb2.RunEvent(sequence=9, partial_text=runs_pb2.PartialText(text="x"))
    assert given_up(partial, 10) == ""


def test_limits_that_were_lowered_are_said_and_no_others() -> None:
    asked = runs_pb2.RunBudget(steps_max=100, tokens_max=100, cost_max=2.5)
    asked.wall_time_max.seconds = 7200
    granted = runs_pb2.RunBudget(steps_max=50, tokens_max=100, tool_calls_max=100, cost_max=1.0)
    granted.wall_time_max.seconds = 3600
    assert list(lowered(asked, granted)) == [
        "--budget-steps: lowered from 100 to 50, the most allowed here",
        "--budget-time (s): lowered from 7200 to 3600, the most allowed here",
        "--budget-cost: lowered from 2.5 to 1, the most allowed here",
    ]
    assert list(lowered(asked, runs_pb2.RunBudget())) == []
    assert list(lowered(runs_pb2.RunBudget(), granted)) == []
