"""The events of a run as lines for people. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from google.rpc import status_pb2

from sluice.command.failures import one_line
from sluice.common.v1 import input_pb2, result_pb2
from sluice.errors import Code
from sluice.scheduler.v1 import runs_pb2
from sluice.status import from_status

SHOWN_MAX: Final = 240
"""Characters of an argument or a result."""
_DECISIONS: Final = {
    runs_pb2.RESUME_DECISION_RETRY: "approved",
    runs_pb2.RESUME_DECISION_SKIP: "skipped",
    runs_pb2.RESUME_DECISION_SUPPLY_RESULT: "result supplied",
    runs_pb2.RESUME_DECISION_CANCEL: "cancelled",
}

_Limit = Literal["steps_max", "tokens_max", "tool_calls_max", "wall_time_max", "cost_max"]


def lines(event: runs_pb2.RunEvent) -> Iterator[str]:
    """What an event says; live text says nothing here."""
    match event.WhichOneof("kind"):
        case "queued":
            if event.run_id:
                yield f"run {event.run_id}"
            else:
                yield f"answered directly ({event.queued.gate_reason}): no run is stored"
        case "model_step":
            yield from _model_step(event.model_step)
        case "tool_call_started":
            started = event.tool_call_started
            yield f"step {started.step}: {_call(started.call)}"
        case "tool_call_ended":
            yield f"step {event.tool_call_ended.step}: {_result(event.tool_call_ended)}"
        case "waiting":
            waiting = event.waiting
            yield f"step {waiting.step}: waits for a person: {_call(waiting.call)}{_why(waiting)}"
        case "resumed":
            word = _DECISIONS.get(event.resumed.decision, "in a way that is not known here")
            yield f"step {event.resumed.step}: decided: {word}"
        case "paused":
            yield _paused(event.paused)
        case "progress":
            progress = event.progress
            total = f" of {progress.total}" if progress.total else ""
            yield f"{progress.phase}: {progress.done}{total}"
        case "ended":
            yield from _ended(event.ended)


class Pauses:
    """Pauses in a row for the same reason, to be told as one."""

    def __init__(self) -> None:
        self.count = 0
        self._last = runs_pb2.RunPaused()

    def add(self, event: runs_pb2.RunEvent) -> bool:
        """Takes the next event; whether it is the same pause again."""
        if not event.HasField("paused"):
            if not event.HasField("partial_text"):
                self.count = 0
            return False
        again = self.count > 0 and event.paused.reason == self._last.reason
        self.count = self.count + 1 if again else 1
        self._last = event.paused
        return again

    @property
    def line(self) -> str:
        """The last pause, and how many there were."""
        times = f", {self.count} times in a row" if self.count > 1 else ""
        return _paused(self._last, times)


def folded(events: Iterable[runs_pb2.RunEvent]) -> Iterator[str]:
    """The lines of events that are all there; pauses in a row for the same reason are one."""
    pauses, line = Pauses(), ""
    for event in events:
        again = pauses.add(event)
        if line and not again:
            yield line
        line = pauses.line if event.HasField("paused") else ""
        if not line:
            yield from lines(event)
    if line:
        yield line


class Tokens:
    """What a run's events say of its tokens."""

    def __init__(self) -> None:
        self._last = 0  # written by the last model call
        self._used = 0
        self._most = 0  # 0: not known

    def add(self, event: runs_pb2.RunEvent) -> None:
        """Takes the next event."""
        if event.HasField("queued"):
            self._most = event.queued.budget.tokens_max
        elif event.HasField("model_step"):
            usage = event.model_step.usage
            self._last = usage.completion_tokens
            self._used += usage.prompt_tokens + usage.completion_tokens

    @property
    def note(self) -> str:
        """For an answer that was cut off: where, and what permits more."""
        if not self._last:  # by an event that was not shown
            return "[cut off at a limit of tokens; --max-tokens permits more]"
        over = self._most and self._most - self._used < self._last
        option = "--budget-tokens" if over else "--max-tokens"
        return f"[stopped after {self._last} tokens; {option} permits more]"


def given_up(event: runs_pb2.RunEvent, first: int) -> str:
    """What to say before the first event that came, when number ``first`` (0 and 1: the first) was
    asked for: whether those before it are kept no more. Empty: they are all there."""
    first = max(first, 1)
    if event.sequence <= first:
        return ""
    return f"events {first} to {event.sequence - 1} of this ended run were given up to make room"


def lowered(asked: runs_pb2.RunBudget, granted: runs_pb2.RunBudget) -> Iterator[str]:
    """A line for each limit that is less than what was asked for. ``granted`` empty: none is
    known."""
    for name, option in _LIMITS.items():
        if not (asked.HasField(name) and granted.HasField(name)):
            continue
        wanted, given = _amount(asked, name), _amount(granted, name)
        if given < wanted:
            yield f"{option}: lowered from {wanted:.15g} to {given:.15g}, the most allowed here"


_LIMITS: Final[dict[_Limit, str]] = {
    "steps_max": "--budget-steps",
    "tokens_max": "--budget-tokens",
    "tool_calls_max": "--budget-calls",
    "wall_time_max": "--budget-time (s)",
    "cost_max": "--budget-cost",
}


def _amount(budget: runs_pb2.RunBudget, name: _Limit) -> float:
    if name == "wall_time_max":
        return budget.wall_time_max.seconds + budget.wall_time_max.nanos / 1e9
    return float(getattr(budget, name))


def state_name(state: int) -> str:
    """The word of a RunState."""
    return runs_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower()  # type: ignore[arg-type]


def kind_name(kind: int) -> str:
    """The word of a RunKind; a dash where none was said."""
    word = runs_pb2.RunKind.Name(kind).removeprefix("RUN_KIND_").lower()  # type: ignore[arg-type]
    return word if kind else "-"


def short(text: str, most: int = SHOWN_MAX) -> str:
    """`text` on one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def failure(status: status_pb2.Status) -> str:
    """A status as one line."""
    if status.details:
        return one_line(from_status(status))
    return f"{Code(status.code).name}: {status.message}"


def _model_step(step: runs_pb2.ModelStep) -> Iterator[str]:
    tokens = f"{step.usage.prompt_tokens} + {step.usage.completion_tokens} tokens"
    cut = ", cut off" if step.finish_reason == result_pb2.FINISH_REASON_LENGTH else ""
    yield f"step {step.step}: model call, {tokens}{cut}"
    if step.problem:
        yield f"step {step.step}: told the model: {short(step.problem)}"


def _call(call: input_pb2.ToolCall) -> str:
    return f"{call.name} {short(call.arguments_json)}"


def _result(ended: runs_pb2.ToolCallEnded) -> str:
    if ended.HasField("status"):
        said = _said(ended.result_json)
        return f"failed: {failure(ended.status).rstrip('.')}{f': {said}' if said else ''}"
    more = "; `sluice agent result` prints them" if ended.blob else ""
    whole = f" ({ended.size_bytes} bytes in all{more})" if ended.truncated else ""
    return f"-> {short(ended.result_json)}{whole}"


def _said(result_json: str) -> str:
    """What a tool that failed said itself, if it did: mostly an object with the one text."""
    try:
        document = json.loads(result_json)
    except (ValueError, RecursionError):
        return short(result_json)
    alone = document.get("error") if isinstance(document, dict) and len(document) == 1 else None
    return short(alone if isinstance(alone, str) else result_json)


def _paused(paused: runs_pb2.RunPaused, times: str = "") -> str:
    when = time.strftime("%H:%M:%S", time.gmtime(paused.ready_time.seconds))
    why = f": {short(paused.message)}" if paused.message else ""
    return f"paused until {when} UTC ({paused.reason}){times}{why}"


def _why(waiting: runs_pb2.RunWaiting) -> str:
    if waiting.reason == runs_pb2.WAIT_REASON_IN_DOUBT:
        return " may or may not have been made already"
    return " needs approval"


def _ended(ended: runs_pb2.RunEnded) -> Iterator[str]:
    if ended.state == runs_pb2.RUN_STATE_SUCCEEDED:
        return
    word = state_name(ended.state)
    yield f"{word}: {failure(ended.status)}" if ended.status.code else word
