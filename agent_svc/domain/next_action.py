"""What a task or a turn does next: a pure function of what is asked and its events.

A run that was taken over goes on as if nothing had happened, since nothing but the events counts.
The order of the rules is their rank: what a person wants (cancel, decision) comes first, then the
wall time, then calls that are open, then the answer, then the budgets, then the next model call.

A call is open from the model step that asks for it until its end. One that has begun and not ended
is in doubt: it may have had its effect. It is made again where that is harmless (READ) or its key
makes it so (IDEMPOTENT); for ONCE a person decides. So the caller must have stored that a call
begins before it makes it, and must not ask for the next action while it makes calls itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_svc.domain.ending import (
    Bounds,
    Finish,
    Pause,
    Rules,
    cancelled,
    failed,
    out_of_time,
    succeeded,
    used_up,
)
from agent_svc.domain.history import CallState, History, idempotency_key, request_id
from agent_svc.domain.model import (
    CallEnded,
    CallStarted,
    Decision,
    Effect,
    Failure,
    Kind,
    Resumed,
    Task,
    ToolCall,
    ToolInfo,
    Waiting,
    WaitReason,
)
from sluice.errors import Code, failed_precondition

DECISIONS = 3
"""Number of these rules: a run that was begun under another number may go another way now."""


@dataclass(frozen=True, slots=True)
class CallModel:
    """Let the model write. ``tokens_left``: of the budget, for the prompt and what is written.
    ``deadline_s``: seconds left to the run."""

    step: int
    tokens_left: int
    deadline_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call to make. ``begun``: that it begins is stored already."""

    step: int
    call: ToolCall
    idempotency_key: str
    begun: bool

    @property
    def started(self) -> CallStarted:
        """The event that says that it begins."""
        return CallStarted(self.step, self.call, self.idempotency_key)


@dataclass(frozen=True, slots=True)
class CallTools:
    """Make these calls side by side. ``deadline_s``: seconds left to the run."""

    calls: tuple[PlannedCall, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """Add these events and ask again. They may be stored together with what follows."""

    events: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class AskPerson:
    """Give the run back until a person decides. ``waiting``: the event; None: it is there."""

    step: int
    waiting: Waiting | None


Action = CallModel | CallTools | Record | AskPerson | Pause | Finish


def next_action(
    task: Task,
    history: History,
    now_s: float,
    *,
    is_cancelled: bool = False,
    decision: Resumed | None = None,
    rules: Rules | None = None,
) -> Action:
    """The next action. ``now_s``: Unix time. ``is_cancelled``: somebody wants the run to end.
    ``decision``: what a person decided, not yet among the events."""
    assert history.ended is None, "the run has ended"
    bounds = bounds_of(task)
    if is_cancelled:
        return cancelled(bounds, history)
    if (waiting := history.waiting) is not None:
        if decision is None or decision.step != waiting.step:
            return AskPerson(waiting.step, None)
        if decision.decision is Decision.CANCEL:
            return cancelled(bounds, history, decision)
        return Record((decision,))
    if bounds.left_s(history, now_s) <= 0:
        return out_of_time(bounds, history, now_s)
    if history.paused is not None and history.paused.ready_s > now_s:
        return Pause(history.paused.ready_s, None)
    decide = _open_calls if history.open_calls else _after_calls
    return decide(task, bounds, history, now_s, rules or Rules())


def bounds_of(task: Task) -> Bounds:
    """What ends this task whatever it does."""
    return Bounds(task.budget, task.create_s, counted=not task.turn)


def _after_calls(
    task: Task, bounds: Bounds, history: History, now_s: float, rules: Rules
) -> Action:
    last, budget = history.last_step, bounds.budget
    if last is not None and history.answered:
        return succeeded(bounds, history, last.message.content, truncated=last.cut_off)
    if last is not None and history.wrong_in_row >= rules.wrong_calls_max:
        text = f"The model wrote what cannot be used {history.wrong_in_row} times in a row."
        return failed(bounds, history, failed_precondition("WRONG_CALLS", text))
    if history.steps >= budget.steps_max:
        return used_up(bounds, history, "BUDGET_STEPS", "steps", now_s)
    if history.tokens >= budget.tokens_max:
        return used_up(bounds, history, "BUDGET_TOKENS", "tokens", now_s)
    if _cost_is_over(bounds, history):
        return used_up(bounds, history, "BUDGET_COST", "cost", now_s)
    step = history.steps + 1
    return CallModel(
        step=step,
        tokens_left=budget.tokens_max - history.tokens,
        deadline_s=bounds.left_s(history, now_s),
        request_id=request_id(task.run_id, step),
    )


def _cost_is_over(bounds: Bounds, history: History) -> bool:
    return history.cost > 0 and history.cost >= bounds.budget.cost_max


def _open_calls(task: Task, bounds: Bounds, history: History, now_s: float, rules: Rules) -> Action:
    # None is begun when the model could not be told of its result; one that has begun goes on.
    if not any(state.started for state in history.open_calls):
        if history.tokens >= bounds.budget.tokens_max:
            return used_up(bounds, history, "BUDGET_TOKENS", "tokens", now_s)
        if _cost_is_over(bounds, history):
            return used_up(bounds, history, "BUDGET_COST", "cost", now_s)
    # What was asked for fits the budget as a whole, or none of it is made.
    if history.steps > bounds.budget.steps_max:
        return used_up(bounds, history, "BUDGET_STEPS", "steps", now_s)
    if history.tool_calls_asked > bounds.budget.tool_calls_max:
        return used_up(bounds, history, "BUDGET_TOOL_CALLS", "tool calls", now_s)
    tools = {tool.name: tool for tool in task.tools}
    decided: list[Kind] = []
    ready: list[PlannedCall] = []
    questions: list[Waiting] = []
    for state in history.open_calls:
        times = history.repeats(state.call)
        if not state.started and times >= rules.repeats_max:
            text = f"The model asked again for a call that gave the same result {times} times."
            return failed(bounds, history, failed_precondition("REPEATED_CALLS", text))
        match _judge(task, history, state, tools.get(state.call.name)):
            case CallEnded() as end:
                decided.append(end)
            case Waiting() as question:
                questions.append(question)
            case PlannedCall() as planned:
                ready.append(planned)
    if decided:
        return Record(tuple(decided))
    if ready:
        return CallTools(tuple(ready), bounds.left_s(history, now_s))
    return AskPerson(questions[0].step, questions[0])


def _judge(
    task: Task, history: History, state: CallState, tool: ToolInfo | None
) -> CallEnded | Waiting | PlannedCall:
    """What becomes of an open call: it ends without being made, a person is asked, or it is
    made."""
    step, call, decision = state.step, state.call, state.decision
    if decision is None and not state.started:
        decision = history.decided(call)  # nobody is asked about the same call again
    if decision is not None and decision.decision is Decision.SKIP:
        return CallEnded(step, call.id, failure=_SKIPPED)
    if decision is not None and decision.decision is Decision.SUPPLY_RESULT:
        return CallEnded(step, call.id, decision.result_json)
    in_doubt = state.started and decision is None
    # A tool that is no longer declared says nothing of its effect.
    if in_doubt and (tool is None or tool.effect is Effect.ONCE):
        return Waiting(step, WaitReason.IN_DOUBT, call)
    if tool is None:
        return CallEnded(step, call.id, failure=_UNKNOWN)
    if tool.needs_approval and decision is None and not state.started:
        return Waiting(step, WaitReason.APPROVAL, call)
    return PlannedCall(step, call, idempotency_key(task.run_id, step), begun=in_doubt)


_SKIPPED = Failure(Code.CANCELLED, "CALL_SKIPPED", "A person decided to go on without this call.")
_UNKNOWN = Failure(Code.NOT_FOUND, "TOOL_UNKNOWN", "There is no such tool for this run any more.")
