"""How runs end or are put off: by a person, by a budget, by a failure. Pure.

For every kind of run; what is special to a kind is in :class:`Bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_svc.domain.history import History
from agent_svc.domain.model import (
    Budget,
    CallEnded,
    End,
    Ended,
    Failure,
    Kind,
    Paused,
    Resumed,
)
from sluice.errors import Code, SluiceError

PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 30.0
PAUSE_TEXT_CHARS_MAX = 300  # of the refusal, in the event: it is kept with the run
_DOUBLINGS_MAX = 10
TOOL_TRIES_MAX = 10
"""Pauses in a row for a tool that is declared and cannot be had: about two minutes."""


@dataclass(frozen=True, slots=True)
class Rules:
    """``wrong_calls_max``: replies of the model in a row that could not be used. ``repeats_max``:
    how often the same call is made with the same result. ``failures_max``: pauses in a row for the
    same fault of the mesh or an engine, which may be this run's own."""

    wrong_calls_max: int = 3
    repeats_max: int = 3
    failures_max: int = 5


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a run, whatever it does. ``create_s``: when it was made. ``counted``: whether it
    may be one for which a direct call would have done; turns of sessions and ingests are not."""

    budget: Budget
    create_s: float
    counted: bool = False

    def left_s(self, history: History, now_s: float) -> float:
        """Seconds left of the wall time; 0 or less when it is used up."""
        return self.budget.wall_time_s - history.spent_s(self.create_s, now_s)


@dataclass(frozen=True, slots=True)
class Pause:
    """Give the run back until a time. ``paused``: the event; None: it is there."""

    ready_s: float
    paused: Paused | None


@dataclass(frozen=True, slots=True)
class Finish:
    """The run ends. ``events``: ends of calls that are open, then the run's."""

    events: tuple[Kind, ...]


def succeeded(bounds: Bounds, history: History, answer: str, *, truncated: bool = False) -> Finish:
    """The end of a run that has its answer."""
    end = _ended(bounds, history, End.SUCCEEDED, answer=answer)
    return Finish((replace(end, truncated=truncated),))


def failed(bounds: Bounds, history: History, error: SluiceError) -> Finish:
    """The end of a run that cannot go on."""
    failure = Failure(error.code, error.reason, error.message)
    ends = _closed(history, "The run ended before the call did; it may have had its effect.")
    return Finish((*ends, _ended(bounds, history, End.FAILED, failure=failure)))


def cancelled(bounds: Bounds, history: History, decision: Resumed | None = None) -> Finish:
    """The end of a run that somebody wants to end; by ``decision``, if that is how they said it."""
    said = () if decision is None else (decision,)
    ends = _closed(history, "The run was cancelled; the call may have had its effect.")
    return Finish((*said, *ends, _ended(bounds, history, End.CANCELLED, failure=_CANCELLED)))


def run_too_long() -> SluiceError:
    """A run has more events than an agent service keeps."""
    return SluiceError(
        Code.RESOURCE_EXHAUSTED, "RUN_TOO_LONG", "The run's events exceed their limit."
    )


def time_is_up() -> SluiceError:
    """As :func:`out_of_time`, of a run whose history is not read."""
    return SluiceError(
        Code.DEADLINE_EXCEEDED, "BUDGET_WALL_TIME", "The run's limit of time is used up."
    )


def unread(error: SluiceError | None = None) -> Ended:
    """The end of a run whose history is not read: by its failure, or cancelled."""
    if error is None:
        return Ended(End.CANCELLED, failure=_CANCELLED)
    return Ended(End.FAILED, failure=Failure(error.code, error.reason, error.message))


def used_up(
    bounds: Bounds, history: History, reason: str, what: str, now_s: float, how: str = "used up"
) -> Finish:
    """The end of a run that used a budget up, with what was done so far."""
    budget = bounds.budget
    spent_s = history.spent_s(bounds.create_s, now_s)
    text = (
        f"The run's limit of {what} is {how}. Done so far: {history.model_calls} model calls,"
        f" {history.tool_calls} tool calls, {history.tokens} of {budget.tokens_max} tokens,"
        f" {spent_s:.1f} of {budget.wall_time_s:.1f} s, cost {history.cost:.6g}."
    )
    code = Code.DEADLINE_EXCEEDED if reason == "BUDGET_WALL_TIME" else Code.RESOURCE_EXHAUSTED
    return failed(bounds, history, SluiceError(code, reason, text))


def out_of_time(bounds: Bounds, history: History, now_s: float) -> Finish:
    """The end of a run whose wall time is used up."""
    return used_up(bounds, history, "BUDGET_WALL_TIME", "time", now_s)


def overdue(bounds: Bounds, history: History, now_s: float) -> Ended:
    """The same as an event alone, where the store takes no more than that."""
    end = out_of_time(bounds, history, now_s).events[-1]
    assert isinstance(end, Ended)
    return end


def next_is_too_large(bounds: Bounds, history: History, now_s: float) -> Finish:
    """The end of a run whose next model call does not fit what is left of its tokens."""
    how = "too small for the next model call"
    return used_up(bounds, history, "BUDGET_TOKENS", "tokens", now_s, how)


def after_refusal(
    bounds: Bounds,
    history: History,
    error: SluiceError,
    now_s: float,
    *,
    tries: int = 0,
    spread: float = 0.5,
    rules: Rules | None = None,
) -> Pause | Finish:
    """What follows from a step that could not be made: another try later, or the end. ``tries``:
    tries of the same step that failed before and are not among the events. ``spread``: 0 to 1,
    drawn by the caller, so that runs that were refused together do not come back together."""
    rules = rules or Rules()
    if error.code in _FINAL or error.reason in _FINAL_REASONS:
        return failed(bounds, history, error)
    same = 0
    for reason in reversed(history.pauses):
        if reason != error.reason:
            break
        same += 1
    if error.code in _FAULTS and same + 1 >= rules.failures_max:
        return failed(bounds, history, error)
    no_tool = error.reason == "TOOL_UNAVAILABLE"
    if no_tool and same + 1 >= TOOL_TRIES_MAX:
        return failed(bounds, history, error)
    delay_s = error.retry_after_s
    if delay_s is None or no_tool:
        doubled = min(len(history.pauses) + tries, _DOUBLINGS_MAX)
        delay_s = min(PAUSE_MIN_S * 2.0**doubled, PAUSE_MAX_S) * (0.75 + spread / 2)
    # Not beyond the run's wall time, which then ends it with its own reason.
    ready_s = round(now_s + max(0.0, min(delay_s, bounds.left_s(history, now_s))), 6)
    text = error.message[:PAUSE_TEXT_CHARS_MAX]
    return Pause(ready_s, Paused(ready_s, error.reason, text))


def _closed(history: History, text: str) -> list[Kind]:
    """The ends of calls that have begun."""
    failure = Failure(Code.CANCELLED, "CALL_ABANDONED", text)
    return [
        CallEnded(state.step, state.call.id, failure=failure)
        for state in history.open_calls
        if state.started
    ]


def _ended(
    bounds: Bounds, history: History, end: End, *, answer: str = "", failure: Failure | None = None
) -> Ended:
    needless = bounds.counted and history.model_calls <= 1 and not history.tool_calls
    return Ended(end, answer, failure, agent_not_needed=needless)


_CANCELLED = Failure(Code.CANCELLED, "RUN_CANCELLED", "The run was cancelled.")

# Asking again gives the same answer.
_FINAL = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.NOT_FOUND,
        Code.ALREADY_EXISTS,
        Code.PERMISSION_DENIED,
        Code.FAILED_PRECONDITION,
        Code.OUT_OF_RANGE,
        Code.UNIMPLEMENTED,
        Code.UNAUTHENTICATED,
    }
)
_FINAL_REASONS = frozenset({"QUOTA_TOO_SMALL", "GENERATION_REPLACED"})
# A fault of the mesh or an engine, which this run's own input may cause again and again.
_FAULTS = frozenset({Code.INTERNAL, Code.UNKNOWN, Code.DATA_LOSS})
