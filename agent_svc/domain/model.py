"""The values of a run: what is asked of it, its events and what they add up to.

Pure data. Times are Unix seconds, as the events carry them; tokens and costs as the scheduler
counted them. An event is durable: nothing that is decided here rests on anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from sluice.errors import Code

RunId = NewType("RunId", str)
CallId = NewType("CallId", str)


class Effect(Enum):
    """What a call of a tool changes, and so what may be done about one in doubt."""

    READ = "read"  # nothing: repeated at will
    IDEMPOTENT = "idempotent"  # something, but once per key: repeated with its key
    ONCE = "once"  # something: never repeated without a person's decision


class Choice(Enum):
    """Whether the model must call tools before it answers."""

    AUTO = "auto"
    REQUIRED = "required"  # at least one
    EACH = "each"  # each of the run's tools once, in their order


class Decision(Enum):
    """What a person decided for a step that waits."""

    RETRY = "retry"  # make the call (again)
    SKIP = "skip"
    SUPPLY_RESULT = "supply_result"
    CANCEL = "cancel"


class WaitReason(Enum):
    """What a run waits for a person for."""

    APPROVAL = "approval"
    IN_DOUBT = "in_doubt"


class End(Enum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. ``arguments_json``: a JSON object as text."""

    id: CallId
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation; ``role``: system, user, assistant or tool. A tool's message
    answers the call ``call_id``."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolInfo:
    """What the model and the rules know of a tool. ``parameters``: the JSON schema of its
    arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, object]
    effect: Effect = Effect.ONCE
    needs_approval: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a run; each ends it. ``steps_max`` counts model calls and tool calls together,
    which have one sequence of step numbers. Times without what was spent waiting for people."""

    steps_max: int
    tokens_max: int
    tool_calls_max: int
    wall_time_s: float
    cost_max: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: a reason of docs/ERRORS.md and a text that anybody may see."""

    code: Code
    reason: str
    message: str


# The events, one class each, in the order of runs.proto.


@dataclass(frozen=True, slots=True)
class Queued:
    """The run was stored."""

    gate_reason: str


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A model call ended. ``problem``: what was wrong with what it wrote, as it is told.
    ``messages_left_out``: the oldest messages that the context had no room for.
    ``cut_off``: at the limit of tokens."""

    step: int
    message: Message
    prompt_tokens: int
    completion_tokens: int
    cost: float
    request_id: str
    cached_tokens: int = 0
    problem: str = ""
    messages_left_out: int = 0
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is about to be made."""

    step: int
    call: ToolCall
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call ended, with a result or a failure."""

    step: int
    call_id: CallId
    result_json: str = ""
    truncated: bool = False
    failure: Failure | None = None
    blob: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """The run waits for a person."""

    step: int
    reason: WaitReason
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Resumed:
    """A person decided."""

    step: int
    decision: Decision
    result_json: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """The run waits for a time. ``message``: of the refusal, for people."""

    ready_s: float
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run that is not a task came further."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The run ended. ``truncated``: its answer was cut off at a limit of tokens."""

    end: End
    answer: str = ""
    failure: Failure | None = None
    agent_not_needed: bool = False
    truncated: bool = False


Kind = Queued | ModelStep | CallStarted | CallEnded | Waiting | Resumed | Paused | Progress | Ended


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run. ``sequence`` from 1; ``time_s``: when it was made."""

    sequence: int
    time_s: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Task:
    """What a run is asked. ``tools``: what it may call, as resolved when this is looked at; the
    names come from the spec. ``history``: the session's messages before this turn."""

    run_id: RunId
    messages: Sequence[Message]
    tools: Sequence[ToolInfo]
    choice: Choice
    budget: Budget
    create_s: float
    answer_schema: Mapping[str, object] | None = None
    turn: bool = False
    history: Sequence[Message] = field(default_factory=tuple)
