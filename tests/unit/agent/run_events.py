"""Histories for tests: a task, and a book that turns words into events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agent_svc.domain.history import History
from agent_svc.domain.model import (
    Budget,
    CallEnded,
    CallId,
    CallStarted,
    Choice,
    Effect,
    Event,
    Failure,
    Kind,
    Message,
    ModelStep,
    Queued,
    RunId,
    Task,
    ToolCall,
    ToolInfo,
)
from sluice.errors import Code

RUN = RunId("0b0e7c3e-9d53-4b8e-8a86-1f4f4a3c0f10")
BEGIN_S = 1_000_000.0

READ = ToolInfo("find", "Finds.", {"type": "object"}, Effect.READ)
PUT = ToolInfo("put", "Puts.", {"type": "object"}, Effect.IDEMPOTENT)
PAY = ToolInfo("pay", "Pays.", {"type": "object"}, Effect.ONCE)
ASK = ToolInfo("ask", "Needs a yes.", {"type": "object"}, Effect.READ, needs_approval=True)
TOOLS = (READ, PUT, PAY, ASK)

WIDE = Budget(steps_max=50, tokens_max=10_000, tool_calls_max=20, wall_time_s=600.0, cost_max=5.0)


def task(**fields: Any) -> Task:
    """A task with every tool."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "messages": (Message("user", "Do it."),),
        "tools": TOOLS,
        "choice": Choice.AUTO,
        "budget": WIDE,
        "create_s": BEGIN_S,
    }
    return Task(**{**values, **fields})


def call(name: str, number: int = 0, arguments: str = "{}") -> ToolCall:
    """A call; its id follows from name and number."""
    return ToolCall(CallId(f"{name}-{number}"), name, arguments)


FAILED = Failure(Code.UNAVAILABLE, "TOOL_UNAVAILABLE", "The tool does not answer.")


@dataclass
class Book:
    """Events of one run, a second apart."""

    history: History = field(default_factory=History)
    now_s: float = BEGIN_S

    def __post_init__(self) -> None:
        self.add(Queued("ALLOWED"))

    def add(self, *kinds: Kind, after_s: float = 1.0) -> Book:
        """Adds events."""
        for kind in kinds:
            self.now_s += after_s
            self.history.add(Event(self.history.last_sequence + 1, self.now_s, kind))
        return self

    def wrote(self, *calls: ToolCall, text: str = "", problem: str = "", tokens: int = 30) -> Book:
        """The model wrote calls, an answer or what has a problem."""
        return self.add(
            ModelStep(
                step=self.history.steps + 1,
                message=Message("assistant", text, tool_calls=calls),
                prompt_tokens=tokens - 10,
                completion_tokens=10,
                cost=0.5,
                request_id="r",
                problem=problem,
            )
        )

    def began(self, *calls: ToolCall) -> Book:
        """These calls of the last step began."""
        return self.add(
            *(CallStarted(self.step_of(one), one, f"{RUN}:{self.step_of(one)}") for one in calls)
        )

    def ended(self, one: ToolCall, result: str = "1", failure: Failure | None = None) -> Book:
        """A call of the last step ended."""
        return self.add(CallEnded(self.step_of(one), one.id, result, failure=failure))

    def did(self, *calls: ToolCall, result: str = "1") -> Book:
        """The model wrote these calls, and they were made."""
        self.wrote(*calls).began(*calls)
        for one in calls:
            self.ended(one, result)
        return self

    def step_of(self, one: ToolCall) -> int:
        """The step number of a call of the last step."""
        return next(state.step for state in self.history.calls if state.call.id == one.id)
