"""The bench of tool calls counts what is right, shown with scripted replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_svc.domain.tool_format import Format
from bench.tool_calls import (
    SAMPLE_FOLDER,
    WAYS,
    Question,
    Way,
    figures_of,
    is_right,
    load,
    measure,
)

QUESTIONS = load(SAMPLE_FOLDER)
BY_TEXT = {question.text: question for question in QUESTIONS}
STRUCTURED = next(way for way in WAYS if way.name == "structured")


def first_allowed(question: Question) -> dict[str, Any]:
    """Arguments that the answers file allows."""
    needed = question.tool.parameters["required"]
    assert isinstance(needed, list)
    return {
        name: next(value for value in values if value != "")
        for name, values in question.arguments.items()
        if name in needed or "" not in values
    }


class Scripted:
    """A model that replies as told."""

    def __init__(self, reply: Callable[[Question], str]) -> None:
        self._reply = reply
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, messages: Sequence[dict[str, object]], **more: Any) -> tuple[str, str]:
        self.asked.append({"messages": messages, **more})
        task = str(messages[-1]["content"])
        return self._reply(BY_TEXT[task]), "stop"


def structured(question: Question) -> str:
    return json.dumps({"tool": question.tool.name, "arguments": first_allowed(question)})


def hermes(question: Question) -> str:
    call = {"name": question.tool.name, "arguments": first_allowed(question)}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_a_model_that_calls_rightly_scores_all(way: Way) -> None:
    model = Scripted(structured if way.format is Format.STRUCTURED else hermes)
    score = await measure(model, QUESTIONS, way)
    assert (score.questions, score.called, score.right, score.wrong) == (20, 20, 20, 0)
    assert figures_of({"x": score})["bfcl_x_accuracy"] == 1.0
    name = QUESTIONS[0].tool.name
    seen = model.asked[0]["json_schema"] or json.dumps(model.asked[0]["messages"])
    assert name in seen


async def test_wrong_values_wrong_calls_and_answers_are_told_apart() -> None:
    def reply(question: Question) -> str:
        kinds = (
            json.dumps({"tool": question.tool.name, "arguments": {}}),
            '{"tool": "another", "arguments": {}}',
            '{"answer": "25"}',
            structured(question),
        )
        return kinds[QUESTIONS.index(question) % len(kinds)]

    score = await measure(Scripted(reply), QUESTIONS, WAYS[1])
    assert (score.right, score.called, score.wrong, score.answered) == (5, 5, 10, 5)
    early = await measure(Scripted(reply), QUESTIONS, STRUCTURED)
    assert (early.right, early.wrong, early.answered) == (5, 15, 0)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"base": 10, "height": 5}, True),
        ({"base": 10.0, "height": 5, "unit": "Units"}, True),
        ({"base": 10, "height": 5, "unit": "cm"}, False),
        ({"base": 10}, False),
        ({"base": "10", "height": 5}, False),
        ({"base": 10, "height": 5, "more": 1}, False),
        ({"base": True, "height": 5}, False),
    ],
)
def test_right_is_what_the_answers_allow(arguments: dict[str, Any], right: bool) -> None:
    allowed: dict[str, list[Any]] = {"base": [10], "height": [5], "unit": ["units", ""]}
    assert is_right(arguments, allowed) is right


def test_texts_lists_and_objects_are_compared_as_values() -> None:
    allowed: dict[str, list[Any]] = {
        "place": ["New York, NY"],
        "list": [[1, 2]],
        "map": [{"a": [1], "b": ["x", ""]}],
    }
    assert is_right({"place": "new york ny", "list": [1, 2], "map": {"a": 1}}, allowed)
    assert not is_right({"place": "new york ny", "list": [2, 1], "map": {"a": 1}}, allowed)
    assert not is_right({"place": "new york ny", "list": [1, 2], "map": {"a": 2}}, allowed)
