"""How often a model calls the right function with the right arguments: BFCL's simple questions.

``python -m bench.tool_calls [--folder FOLDER] [--sample N]``. Each question has one function; the
reply is right when it calls it and every argument is one of those that the answers file allows
(texts compared without case, spaces and punctuation; an argument may be missing where the answers
hold ""). The prompt, the schema and the reading are those of agent runs
(agent_svc/domain/tool_format.py); the model is the default mesh's, on vLLM.

Two ways are compared: structured output, and the model's own words in the Hermes format, with the
functions in the system message, because the default model's chat template renders no tools.
Needs the questions of the Berkeley Function-Calling Leaderboard (``BFCL_v4_simple_python.json`` and
``BFCL_v4_simple_python_answers.json``); a small sample lies in tests/data/bfcl_sample.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agent_svc.domain.model import Budget, Choice, Message, RunId, Task, ToolInfo
from agent_svc.domain.tool_format import Ask, Format, Options, ask, read
from bench.harness import ROOT, table, write_results
from sluice.json_schemas import check_schema

SAMPLE_FOLDER = ROOT / "tests" / "data" / "bfcl_sample"
MODEL = ROOT / ".sluice" / "models" / "smollm2-135m-instruct"
QUESTIONS, ANSWERS = "BFCL_v4_simple_python.json", "BFCL_v4_simple_python_answers.json"
MAX_TOKENS = 200
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its one function, and per argument the values that are right."""

    id: str
    text: str
    tool: ToolInfo
    arguments: Mapping[str, Sequence[Any]]


class Generate(Protocol):
    """Asks a model; text and how it ended."""

    def __call__(
        self,
        messages: Sequence[dict[str, object]],
        *,
        json_schema: str = "",
        tools: Sequence[dict[str, object]] = (),
        max_tokens: int,
        keep_special_tokens: bool = False,
    ) -> Awaitable[tuple[str, str]]: ...


def load(folder: Path) -> list[Question]:
    """The questions of a folder, in their order."""
    answers = {
        line["id"]: line["ground_truth"][0] for line in map(json.loads, _lines(folder / ANSWERS))
    }
    questions = []
    for line in map(json.loads, _lines(folder / QUESTIONS)):
        function = line["function"][0]
        (arguments,) = answers[line["id"]].values()
        name = re.sub(r"[^A-Za-z0-9_-]", "_", function["name"])
        parameters = schema_of(function["parameters"])
        assert check_schema(parameters) == "", line["id"]
        tool = ToolInfo(name, function["description"], parameters)
        questions.append(Question(line["id"], line["question"][0][0]["content"], tool, arguments))
    return questions


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def schema_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema from BFCL's form, which names types as Python does."""
    made: dict[str, Any] = {}
    for word, value in source.items():
        if word == "type":
            if value != "any":
                made["type"] = _TYPES.get(value, value)
        elif word == "properties":
            made["properties"] = {name: schema_of(part) for name, part in value.items()}
        elif word == "items":
            made["items"] = schema_of(value)
        elif word in ("description", "enum", "required", "default"):
            made[word] = value
    return made


# --- what is right ---


def is_right(arguments: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> bool:
    """Whether every argument is allowed and none is missing that may not be."""
    if not set(arguments) <= set(allowed):
        return False
    return all(
        any(_same(arguments[name], value) for value in values)
        if name in arguments
        else "" in values
        for name, values in allowed.items()
    )


def _same(value: Any, right: Any) -> bool:
    if isinstance(value, bool) or isinstance(right, bool):
        return value is right
    if isinstance(value, int | float) and isinstance(right, int | float):
        return abs(value - right) < 1e-9 * max(1.0, abs(right))
    if isinstance(value, str) and isinstance(right, str):
        return _plain(value) == _plain(right)
    if isinstance(value, list) and isinstance(right, list):
        return len(value) == len(right) and all(map(_same, value, right))
    if isinstance(value, dict) and isinstance(right, dict):
        # The answers give a list of right values for each field of an object.
        lists = {name: one if isinstance(one, list) else [one] for name, one in right.items()}
        return is_right(value, lists)
    return bool(value == right)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


# --- asking ---


def task_of(question: Question, choice: Choice) -> Task:
    """The run that a question is."""
    return Task(
        run_id=RunId(question.id),
        messages=(Message("user", question.text),),
        tools=(question.tool,),
        choice=choice,
        budget=Budget(8, 100_000, 8, 600.0, 1.0),
        create_s=0.0,
    )


def message_of(message: Message) -> dict[str, object]:
    """A message as chat templates take it."""
    return {"role": message.role, "content": message.content}


HERMES_SYSTEM = """You are an expert in composing functions. You are given a question and a set of \
possible functions. Call the function that answers the question. The functions:
<tools>{tools}</tools>
Reply with nothing but <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>"""


def with_tools_in_words(asked: Ask) -> Ask:
    """The same question with the functions in the system message."""
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in asked.tools
    ]
    system = HERMES_SYSTEM.format(tools=json.dumps(tools))
    return replace(asked, messages=(Message("system", system), *asked.messages))


@dataclass(frozen=True, slots=True)
class Way:
    """How the model is asked."""

    name: str
    format: Format
    choice: Choice


WAYS = (
    Way("structured", Format.STRUCTURED, Choice.REQUIRED),
    Way("structured_auto", Format.STRUCTURED, Choice.AUTO),
    Way("hermes", Format.HERMES, Choice.REQUIRED),
)


@dataclass(slots=True)
class Score:
    """Counts of one way. ``called``: calls that fit the function's schema; ``wrong``: replies that
    were none; ``answered``: answers instead of a call."""

    questions: int = 0
    called: int = 0
    right: int = 0
    wrong: int = 0
    answered: int = 0
    seconds: float = 0.0


async def measure(generate: Generate, questions: Sequence[Question], way: Way) -> Score:
    """Asks every question once."""
    score = Score(len(questions))
    began = time.monotonic()
    for kind in await asyncio.gather(*(_one(generate, one, way) for one in questions)):
        score.called += kind in ("right", "called")
        score.right += kind == "right"
        score.wrong += kind == "wrong"
        score.answered += kind == "answered"
    score.seconds = time.monotonic() - began
    return score


async def _one(generate: Generate, question: Question, way: Way) -> str:
    options = Options(format=way.format, parallel_calls_max=1)
    asked = ask(task_of(question, way.choice), [], options)
    if way.format is not Format.STRUCTURED:
        asked = with_tools_in_words(asked)
    text, finish = await generate(
        [message_of(message) for message in asked.messages],
        json_schema=asked.json_schema,
        max_tokens=MAX_TOKENS,
        keep_special_tokens=asked.keep_special_tokens,
    )
    reply = read(text, finish, asked, 1)
    if reply.problem:
        return "wrong"
    if not reply.message.tool_calls:
        return "answered"
    arguments = json.loads(reply.message.tool_calls[0].arguments_json)
    return "right" if is_right(arguments, question.arguments) else "called"


def figures_of(scores: Mapping[str, Score]) -> dict[str, float]:
    """Shares, by way."""
    figures: dict[str, float] = {}
    for name, score in scores.items():
        figures[f"bfcl_{name}_accuracy"] = score.right / score.questions
        figures[f"bfcl_{name}_valid_calls"] = score.called / score.questions
        figures[f"bfcl_{name}_questions"] = float(score.questions)
    return figures


async def run(folder: Path, sample: int, model: Path) -> dict[str, Score]:
    """Every way over an evenly spread sample (0: all), on one engine."""
    from bench.engine_calls import running

    questions = load(folder)
    if sample and sample < len(questions):
        questions = [questions[at * len(questions) // sample] for at in range(sample)]
    async with running(model) as generate:
        return {way.name: await measure(generate, questions, way) for way in WAYS}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=SAMPLE_FOLDER)
    parser.add_argument("--sample", type=int, default=0, help="questions; 0: all")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    scores = asyncio.run(run(arguments.folder, arguments.sample, arguments.model.resolve()))
    rows = [["way", "questions", "valid calls", "right", "no call", "answered", "s"]]
    for name, one in scores.items():
        counts = (one.questions, one.called, one.right, one.wrong, one.answered)
        rows.append([name, *map(str, counts), f"{one.seconds:.0f}"])
    print(table(rows))
    figures = figures_of(scores)
    print(f"written: {write_results('bench-tools', figures).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
