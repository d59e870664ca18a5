"""A task of several steps for a real model: search, calculator, answer, through structured output.

The tools are stand-ins with fixed results; the prompts, schemas, reading and folding of events are
those of agent runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agent_svc.domain.model import (
    Budget,
    CallEnded,
    Choice,
    Event,
    Message,
    ModelStep,
    RunId,
    Task,
    ToolInfo,
)
from agent_svc.domain.tool_format import Ask, Options, ask, read

FOUND = '{"results": [{"title": "Price list", "text": "A red lamp costs 7 euros."}]}'
STEPS_MAX = 6


def tool(name: str, description: str, argument: str, meaning: str) -> ToolInfo:
    """A tool of one text argument."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
        "additionalProperties": False,
    }
    return ToolInfo(name, description, parameters)


TASK = Task(
    run_id=RunId("several-steps"),
    messages=(Message("user", "What do 12 red lamps cost together?"),),
    tools=(
        tool("search", "Searches the documents.", "query", "Words to look for."),
        tool("calculator", "Works out an arithmetic expression.", "expression", "The expression."),
    ),
    choice=Choice.EACH,
    budget=Budget(10, 10_000, 10, 600.0, 1.0),
    create_s=0.0,
)


@dataclass
class Done:
    """What a run of the task came to."""

    calls: list[str] = field(default_factory=list)
    arguments: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    answer: str = ""


async def run_task(generate: Callable[[Ask], Awaitable[tuple[str, str]]]) -> Done:
    """Runs the task to its answer; ``generate`` gives the text and how it ended."""
    done, events = Done(), list[Event]()
    for step in range(1, STEPS_MAX + 1):
        asked = ask(TASK, events, Options())
        reply = read(*await generate(asked), asked, step)
        model_step = ModelStep(step, reply.message, 0, 0, 0.0, f"q{step}", problem=reply.problem)
        events.append(Event(len(events) + 1, 0.0, model_step))
        if reply.problem:
            done.problems.append(reply.problem)
        elif not reply.message.tool_calls:
            done.answer = reply.message.content
            break
        for call in reply.message.tool_calls:
            arguments = json.loads(call.arguments_json)
            done.calls.append(call.name)
            done.arguments.append(arguments)
            result = FOUND if call.name == "search" else _worked_out(arguments["expression"])
            events.append(Event(len(events) + 1, 0.0, CallEnded(step, call.id, result)))
    return done


def _worked_out(expression: str) -> str:
    """The result of a product or sum of two whole numbers, all that this task needs."""
    match = re.fullmatch(r"(\d+) ?([*+]) ?(\d+)", expression.strip())
    if match is None:
        return '{"error": "not an expression"}'
    left, right = int(match.group(1)), int(match.group(3))
    return json.dumps({"result": left * right if match.group(2) == "*" else left + right})
