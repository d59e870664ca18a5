"""What a run's events add up to: what is open, what was used, how it stands.

A fold: :meth:`History.add` takes one event after the other, from the first. Nothing in here comes
from anywhere else, so an agent that takes a run over knows what its predecessor knew. For one
owner; not shared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agent_svc.domain.model import (
    CallEnded,
    CallStarted,
    Decision,
    Ended,
    Event,
    ModelStep,
    Paused,
    Progress,
    Resumed,
    RunId,
    ToolCall,
    Waiting,
)


@dataclass(slots=True)
class CallState:
    """A call that the model asked for in its last step. ``decision``: what a person decided since
    the call was last begun, if anything."""

    step: int
    call: ToolCall
    started: bool = False
    ended: bool = False
    decision: Resumed | None = None


class History:
    """See the module's docstring. Attributes are for reading."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps = 0  # the highest step number given; a call has its number once it is asked for
        self.model_calls = 0
        self.tool_calls_asked = 0
        self.tool_calls = 0  # begun at least once
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.cost = 0.0
        self.wrong_in_row = 0  # replies that could not be used
        self.waited_s = 0.0
        self.waiting: Waiting | None = None
        self.paused: Paused | None = None  # the last event, if it is one
        self.pauses: list[str] = []  # reasons of pauses since the last step or call that ended
        self.last_step: ModelStep | None = None
        self.calls: list[CallState] = []  # of the last model step, in its order
        self.progress: Progress | None = None
        self.ended: Ended | None = None
        self._waiting_since_s = 0.0
        self._results: Counter[tuple[str, str, str]] = Counter()
        self._decided: dict[tuple[str, str], Resumed] = {}

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last event; 0 without events."""
        return len(self.events)

    @property
    def last_s(self) -> float:
        """When the last event was made."""
        return self.events[-1].time_s if self.events else 0.0

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of all model calls."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def steps_done(self) -> int:
        """Model calls and tool calls that were made."""
        return self.model_calls + self.tool_calls

    @property
    def open_calls(self) -> list[CallState]:
        """Calls that were asked for and have not ended, in their order."""
        return [call for call in self.calls if not call.ended]

    @property
    def answered(self) -> bool:
        """Whether the last model call gave the answer."""
        last = self.last_step
        return last is not None and not last.problem and not last.message.tool_calls

    def spent_s(self, create_s: float, now_s: float) -> float:
        """Seconds since the run was made, without those that it waited for people."""
        waiting_s = now_s - self._waiting_since_s if self.waiting is not None else 0.0
        return now_s - create_s - self.waited_s - max(0.0, waiting_s)

    def repeats(self, call: ToolCall) -> int:
        """How often this very call has given the result that it gave most often."""
        asked = call.name, canonical(call.arguments_json)
        return max((n for (*was, _), n in self._results.items() if tuple(was) == asked), default=0)

    def decided(self, call: ToolCall) -> Resumed | None:
        """What a person last decided, for this very call, instead of making it."""
        return self._decided.get((call.name, canonical(call.arguments_json)))

    def add(self, event: Event) -> None:
        """Takes the next event. Its sequence number follows the last one's."""
        assert event.sequence == self.last_sequence + 1, "an event is missing"
        assert self.ended is None, "an event after the end"
        self.events.append(event)
        self.paused = None
        match event.kind:
            case ModelStep() as step:
                self._add_step(step)
            case CallStarted(step=number):
                self._add_start(number)
            case CallEnded() as end:
                self._add_end(end)
            case Waiting() as waiting:
                self.waiting = waiting
                self._waiting_since_s = event.time_s
            case Resumed() as resumed:
                self._add_decision(resumed, event.time_s)
            case Paused() as paused:
                self.paused = paused
                self.pauses.append(paused.reason)
            case Progress() as progress:
                self.progress = progress
                self.pauses.clear()
            case Ended() as ended:
                self.ended = ended
            case _:  # Queued: nothing follows from it
                pass

    def _add_step(self, step: ModelStep) -> None:
        self.model_calls += 1
        self.prompt_tokens += step.prompt_tokens
        self.cached_tokens += step.cached_tokens
        self.completion_tokens += step.completion_tokens
        self.cost += step.cost
        self.pauses.clear()
        self.last_step = step
        self.steps = step.step
        self.wrong_in_row = self.wrong_in_row + 1 if step.problem else 0
        calls = () if step.problem else step.message.tool_calls
        self.calls = [CallState(step.step + at, call) for at, call in enumerate(calls, 1)]
        self.steps += len(calls)
        self.tool_calls_asked += len(calls)

    def _add_start(self, step: int) -> None:
        state = self._call(step)
        if not state.started:
            self.tool_calls += 1
        state.started = True
        state.decision = None

    def _add_end(self, end: CallEnded) -> None:
        state = self._call(end.step)
        state.ended = True
        self.pauses.clear()
        result = end.result_json if end.failure is None else end.failure.reason
        call = state.call
        self._results[call.name, canonical(call.arguments_json), result] += 1

    def _add_decision(self, resumed: Resumed, time_s: float) -> None:
        self.waited_s += max(0.0, time_s - self._waiting_since_s)
        self.waiting = None
        if resumed.decision is Decision.CANCEL:
            return
        state = self._call(resumed.step)
        state.decision = resumed
        identity = state.call.name, canonical(state.call.arguments_json)
        if resumed.decision is Decision.RETRY:
            self._decided.pop(identity, None)
        else:
            self._decided[identity] = resumed

    def _call(self, step: int) -> CallState:
        for call in self.calls:
            if call.step == step:
                return call
        raise AssertionError(f"step {step} is no open call")


def fold(events: Iterable[Event]) -> History:
    """The history of these events."""
    history = History()
    for event in events:
        history.add(event)
    return history


def canonical(arguments_json: str) -> str:
    """The same text for arguments that are the same; text that is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments_json), sort_keys=True, separators=(",", ":"))
    except ValueError:
        return arguments_json


def idempotency_key(run_id: RunId, step: int) -> str:
    """The key of a tool call: the same however often the call is made again."""
    return f"{run_id}:{step}"


def request_id(run_id: RunId, step: int) -> str:
    """The identifier of a model call, the same when a lost one is made again."""
    return f"{run_id}.{step}"
