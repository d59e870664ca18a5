"""The messages that a model reads: the task, what was done so far, and how to reply.

Pure, and a function of the whole history: the same history gives the same messages, and a longer
one mostly the same beginning, which engines keep in their caches.

What does not fit ``prompt_bytes`` is left out by this rule, in this order, until it fits:

1. A tool's result is always shown as its first ``result_bytes``.
2. Results before the last step: their first quarter of that.
3. Messages before the task (a session's, or of the conversation sent): the oldest turns first.
4. Steps before the last one: the oldest first, in groups of ``STEPS_GROUP``, so that the beginning
   stays the same for some steps; a line says how many are left out.
5. The results of the last step: equal shares of what is left, at least ``RESULT_BYTES_MIN`` each.

System messages, the task itself and the last step's calls always stay: if they alone are too long,
the mesh refuses the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agent_svc.domain.history import canonical
from agent_svc.domain.model import (
    CallEnded,
    CallId,
    Decision,
    Event,
    Message,
    ModelStep,
    Resumed,
    ToolCall,
    ToolInfo,
    Waiting,
)

STEPS_GROUP: Final = 4
RESULT_BYTES_MIN: Final = 64
MESSAGE_BYTES: Final = 16  # what a template adds to a message, about
WRONG_REPLY_BYTES_MAX: Final = 400  # of a reply that was wrong, shown back to the model
DESCRIPTION_CHARS_MAX: Final = 300
EMPTY: Final = "(nothing)"  # for a message without words
SYSTEM_ROLES: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Result:
    """How a call ended, as the model is told. ``text``: JSON, or a sentence."""

    call: ToolCall
    text: str
    size_bytes: int


# Problems that are recorded and not told. A small model goes on with what it reads last, so what
# ran on once is shown neither as it was nor with a complaint: the same is asked again, and sampled
# otherwise.
CUT_OFF: Final = "The reply was cut off at the limit of tokens."
NO_ANSWER: Final = "The reply is no answer in words."
REPEATS: Final = "The answer only repeats what was asked."
NOT_TOLD: Final = frozenset({CUT_OFF, NO_ANSWER, REPEATS})


@dataclass(slots=True)
class Step:
    """A model call of the past and what came of it. ``cut_off``: at the limit of tokens."""

    message: Message
    problem: str = ""
    cut_off: bool = False
    results: list[Result] = field(default_factory=list)

    @property
    def is_told(self) -> bool:
        """Whether later prompts hold it."""
        return not self.problem or not (self.cut_off or self.problem in NOT_TOLD)


def is_repeat(steps: Sequence[Step]) -> bool:
    """Whether the last step that could be used asked for nothing but calls that had been made, and
    they gave the same results."""
    used = [step for step in steps if not step.problem]
    if not used or not used[-1].results:
        return False
    known = {_identity(result) for step in used[:-1] for result in step.results}
    return all(_identity(result) in known for result in used[-1].results)


def _identity(result: Result) -> tuple[str, str, str]:
    return result.call.name, canonical(result.call.arguments_json), result.text


def steps_of(events: Sequence[Event]) -> list[Step]:
    """The model calls of a run with the results of their calls, in order. A call that ended twice
    counts as it ended last; what a person decided counts as the result of the call that waited."""
    steps: list[Step] = []
    ended: dict[CallId, Result] = {}
    calls: dict[CallId, ToolCall] = {}
    waiting: ToolCall | None = None
    for event in events:
        kind = event.kind
        if isinstance(kind, ModelStep):
            steps.append(Step(kind.message, kind.problem, kind.cut_off))
            calls.update({call.id: call for call in kind.message.tool_calls})
        elif isinstance(kind, CallEnded) and kind.call_id in calls:
            ended[kind.call_id] = _result(calls[kind.call_id], kind)
        elif isinstance(kind, Waiting):
            waiting = kind.call
        elif isinstance(kind, Resumed) and waiting is not None:
            if kind.decision is Decision.SKIP:
                ended[waiting.id] = _said(waiting, "The call was not made: a person declined it.")
            elif kind.decision is Decision.SUPPLY_RESULT:
                ended[waiting.id] = _said(waiting, kind.result_json)
            waiting = None
    for step in steps:
        step.results = [ended[call.id] for call in step.message.tool_calls if call.id in ended]
    return steps


def _said(call: ToolCall, text: str) -> Result:
    return Result(call, text, len(text.encode()))


def _result(call: ToolCall, ended: CallEnded) -> Result:
    if ended.failure is not None:
        text = f"The call failed: {ended.failure.message} {ended.result_json}"
        return _said(call, text.rstrip())
    size = max(ended.size_bytes, len(ended.result_json.encode()))
    return Result(call, ended.result_json, size)


def cut(text: str, most: int, size: int = 0) -> str:
    """The text, or its first ``most`` bytes and a note of how long it is. ``size``: bytes of the
    whole, when the text is already a part of it."""
    data = text.encode()
    size = max(size, len(data))
    if size <= most:
        return text
    return f"{data[:most].decode(errors='ignore')}... ({size} bytes in all)"


def beginning(text: str, most: int) -> str:
    """The text, or its first ``most`` bytes: of what a model wrote in vain, without a note that it
    could copy."""
    data = text.encode()
    return text if len(data) <= most else f"{data[:most].decode(errors='ignore')}..."


# --- tools in words ---


def tools_text(tools: Sequence[ToolInfo], most: int) -> str:
    """What the tools are, a line each, with as much detail as fits ``most`` bytes; names and
    parameters always."""
    for lines in (_detailed, _short, _signature):
        text = "\n".join(lines(tool) for tool in tools)
        if len(text.encode()) <= most:
            return text
    return text


def _properties(tool: ToolInfo) -> list[tuple[str, Mapping[str, object], bool]]:
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    if not isinstance(properties, Mapping):
        return []
    wanted = required if isinstance(required, list) else []
    return [
        (str(name), part if isinstance(part, Mapping) else {}, name in wanted)
        for name, part in properties.items()
    ]


def _signature(tool: ToolInfo) -> str:
    parts = (
        f"{name}{'' if needed else '?'}: {_kind(part)}" for name, part, needed in _properties(tool)
    )
    return f"- {tool.name}({', '.join(parts)})"


def _short(tool: ToolInfo) -> str:
    return f"{_signature(tool)}: {_line(tool.description)}"


def _detailed(tool: ToolInfo) -> str:
    lines = [_short(tool)]
    for name, part, _ in _properties(tool):
        description = part.get("description")
        if isinstance(description, str) and description:
            lines.append(f"    {name}: {_line(description)}")
    return "\n".join(lines)


def _line(text: str) -> str:
    line = " ".join(text[: 4 * DESCRIPTION_CHARS_MAX].split())
    return line if len(line) <= DESCRIPTION_CHARS_MAX else line[:DESCRIPTION_CHARS_MAX] + "..."


def _kind(part: Mapping[str, object]) -> str:
    values = part.get("enum")
    if isinstance(values, list) and len(values) <= 8:
        return "|".join(json.dumps(value, ensure_ascii=False) for value in values)
    kind = part.get("type", "any")
    if kind == "array":
        items = part.get("items")
        return f"{_kind(items) if isinstance(items, Mapping) else 'any'}[]"
    return "|".join(map(str, kind)) if isinstance(kind, list) else str(kind)


# --- what was done so far ---

Told = Callable[[Step, Callable[[Result], str]], tuple[Message, ...]]


def told_in_words(step: Step, shown: Callable[[Result], str]) -> tuple[Message, ...]:
    """A step for structured output: what the model wrote, then one user message. Templates need
    not know tools for it."""
    wrote = [
        {"tool": call.name, "arguments": json.loads(call.arguments_json)}
        for call in step.message.tool_calls
    ]
    if step.problem or not wrote:
        text = _wrong_reply(step)
    else:
        value: object = wrote[0] if len(wrote) == 1 else {"calls": wrote}
        text = json.dumps(value, ensure_ascii=False)
    lines = [f"Result of {result.call.name}: {shown(result)}" for result in step.results]
    if step.problem:
        lines.append(step.problem)
    answer = (Message("user", "\n".join(lines)),) if lines else ()
    return (Message("assistant", text), *answer)


def _wrong_reply(step: Step) -> str:
    """What the model wrote in vain, or the beginning of it."""
    return step.message.content or EMPTY


def in_words(message: Message) -> Message:
    """A message that a client sent, for structured output: tools in it become words."""
    if message.role == "tool":
        return Message("user", f"Result of {message.name or 'a tool'}: {message.content}")
    if message.tool_calls and not message.content:
        names = ", ".join(call.name for call in message.tool_calls)
        return Message("assistant", f"(called {names})")
    return message


def told_natively(step: Step, shown: Callable[[Result], str]) -> tuple[Message, ...]:
    """A step as the model's own template renders it: calls, then a tool's message for each."""
    if step.problem or not step.message.tool_calls:
        text = _wrong_reply(step)
        told = (Message("user", step.problem),) if step.problem else ()
        return (Message("assistant", text), *told)
    results = (
        Message("tool", shown(result) or EMPTY, result.call.name, call_id=result.call.id)
        for result in step.results
    )
    return (step.message, *results)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of the whole prompt and of one result; a token is about three bytes."""

    prompt_bytes: int
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and how many older ones there was no room for."""

    messages: list[Message]
    left_out: int

    @property
    def size_bytes(self) -> int:
        """As ``size_of``."""
        return size_of(self.messages)


def size_of(messages: Sequence[Message]) -> int:
    """Bytes of messages, with what a template adds."""
    return sum(
        MESSAGE_BYTES
        + len(message.content.encode())
        + sum(len(call.name) + len(call.arguments_json.encode()) for call in message.tool_calls)
        for message in messages
    )


def conversation(
    before: Sequence[Message],
    task: Sequence[Message],
    steps: Sequence[Step],
    told: Told,
    limits: Limits,
    reserved: int = 0,
) -> Conversation:
    """The messages after the system's, cut to the limits by the rule above. ``before``: what may be
    left out; ``task``: what may not; ``reserved``: bytes that are used elsewhere."""
    most = limits.prompt_bytes - reserved
    turns = _turns(before)

    def written(turn: int, step: int, early: int, late: int) -> Conversation:
        messages = [message for one in turns[turn:] for message in one]
        messages += task
        if step and messages:
            messages = [*messages[:-1], _with_line(messages[-1], f"({step} steps left out.)")]
        for at, one in enumerate(steps[step:], start=step):
            messages += told(one, _first(late if at == len(steps) - 1 else early))
        left_out = sum(map(len, turns[:turn])) + sum(len(told(one, _NONE)) for one in steps[:step])
        return Conversation(messages, left_out)

    early = late = limits.result_bytes
    made = written(0, 0, early, late)
    if made.size_bytes <= most:
        return made
    early = max(RESULT_BYTES_MIN, early // 4)
    # Each part is measured once: a session may have 10,000 messages.
    size = written(0, 0, early, late).size_bytes
    turn = 0
    while size > most and turn < len(turns):
        size -= size_of(turns[turn])
        turn += 1
    if size <= most:
        return written(turn, 0, early, late)
    dropped = 0
    while dropped < len(steps) - 1:
        group = steps[dropped : min(dropped + STEPS_GROUP, len(steps) - 1)]
        size -= sum(size_of(told(one, _first(early))) for one in group)
        dropped += len(group)
        if size > most:
            continue
        made = written(len(turns), dropped, early, late)  # with the line that says so
        if made.size_bytes <= most:
            return made
    results = len(steps[-1].results) if steps else 0
    if results:
        rest = most - written(len(turns), dropped, early, 0).size_bytes
        late = max(RESULT_BYTES_MIN, min(late, rest // results))
        made = written(len(turns), dropped, early, late)
    return made


def _first(bytes_max: int) -> Callable[[Result], str]:
    """Shows so many bytes of a result."""
    return lambda result: cut(result.text, bytes_max, result.size_bytes)


_NONE = _first(0)


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages in turns: each begins with a user's."""
    turns: list[list[Message]] = []
    for message in messages:
        if not turns or message.role == "user":
            turns.append([])
        turns[-1].append(message)
    return turns


def _with_line(message: Message, line: str) -> Message:
    if message.role != "user":
        return message
    return replace(message, content=f"{message.content}\n{line}")
