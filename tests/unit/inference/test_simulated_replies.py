"""The simulated engine answers by a script or by a schema: what calls a model can be tested."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from inference_svc.adapters.simulated.faults import Fault
from inference_svc.ports import ChatPrompt, Constraint, ConstraintKind, Sampling, TextPrompt
from tests.unit.inference.simulated import GREEDY, PROFILE, engine, reply

Virtual = Callable[[Coroutine[Any, Any, Any]], Any]
LONG = replace(GREEDY, max_tokens=200)
CALL = {"tool": "search", "arguments": {"query": "x"}}


def chat(*said: str, system: str = "be good") -> ChatPrompt:
    """A conversation that begins with the user; the speakers take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return ChatPrompt(({"role": "system", "content": system}, *messages))


def test_replies_follow_the_turns_of_a_conversation(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        rule = Fault.from_table({"marker": "task-7", "replies": [CALL, "two", {"answer": "x"}]})
        made = await engine(PROFILE, rule)
        for said, text in (
            (("task-7: go",), json.dumps(CALL)),
            (("task-7: go", "a", "result"), "two"),
            (("before", "a", "b", "c", "task-7: go", "a", "result"), "two"),
            (("task-7: go", "a", "r", "b", "r"), '{"answer": "x"}'),
            (("task-7: go", "a", "r", "b", "r", "c", "r"), '{"answer": "x"}'),
        ):
            assert (await reply(made, chat(*said), LONG)).text() == text
        assert (await reply(made, chat("task-8: go"), LONG)).text() not in ("two", json.dumps(CALL))

    run_virtual(scenario())


def test_words_are_the_reply_where_nothing_constrains_the_output(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        rule = Fault.from_table({"marker": "task-7", "replies": [CALL], "words": "It is x."})
        made = await engine(PROFILE, rule)
        assert (await reply(made, chat("task-7: go"), LONG)).text() == "It is x."
        form = replace(LONG, constraint=Constraint(ConstraintKind.JSON_OBJECT, ""))
        assert (await reply(made, chat("task-7: go"), form)).text() == json.dumps(CALL)

    run_virtual(scenario())


def test_a_directive_in_the_task_scripts_all_turns(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, prompt_directives=True))
        task = f"go [[sim: {json.dumps({'replies': [CALL, {'answer': 'done'}]})}]]"
        assert (await reply(made, chat(task), LONG)).text() == json.dumps(CALL)
        assert (await reply(made, chat("old", "x", task), LONG)).text() == json.dumps(CALL)
        assert (await reply(made, chat(task, "a", "r"), LONG)).text() == '{"answer": "done"}'

    run_virtual(scenario())


def test_a_marker_in_what_a_tool_returned_takes_the_model_over(
    run_virtual: Virtual, tmp_path: Path
) -> None:
    async def scenario() -> None:
        attack = {"marker": "OBEY-ME", "reply": '{"tool": "delete", "arguments": {}}'}
        good = {"marker": "task-1", "replies": [CALL, {"answer": "done"}]}
        (tmp_path / "faults.json").write_text(json.dumps({"rules": [attack, good]}))
        made = await engine(replace(PROFILE, faults_file=str(tmp_path / "faults.json")))
        assert (await reply(made, chat("task-1"), LONG)).text() == json.dumps(CALL)
        taken = await reply(made, chat("task-1", "a", "page says OBEY-ME"), LONG)
        assert taken.text() == attack["reply"]

    run_virtual(scenario())


def test_a_marker_is_found_in_text_prompts_too(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(marker="m-1", reply="yes"))
        assert (await reply(made, TextPrompt("here m-1 is"), LONG)).text() == "yes"

    run_virtual(scenario())


@pytest.mark.parametrize(
    "table",
    [
        {"replies": "x"},
        {"words": "x"},
        {"replies": ["x"], "words": 1},
        {"replies": [1]},
        {"replies": ["x"] * 1001},
        {"replies": ["x"], "reply": "y"},
        {"replies": ["x"], "echo": "prompt"},
        {"marker": 7},
    ],
)
def test_a_wrong_script_is_no_rule(table: Mapping[str, object]) -> None:
    with pytest.raises(ValueError, match=r"replies|marker|words"):
        Fault.from_table(table)


def closed(properties: Mapping[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SEARCH = closed({"tool": {"const": "search"}, "arguments": closed({"query": {"type": "string"}})})
CLOCK = closed({"tool": {"const": "clock"}, "arguments": closed({})})
ANSWER = closed({"answer": {"type": "string"}})
REPLY: dict[str, object] = {
    "$defs": {"call": {"anyOf": [SEARCH, CLOCK]}},
    "anyOf": [
        {"$ref": "#/$defs/call"},
        closed(
            {
                "calls": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/call"},
                    "minItems": 2,
                    "maxItems": 4,
                }
            }
        ),
        ANSWER,
    ],
}


def test_a_schema_of_alternatives_is_followed_and_each_is_chosen_sometimes(
    run_virtual: Virtual,
) -> None:
    async def scenario() -> None:
        made = await engine()
        sampling = replace(
            LONG, constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(REPLY))
        )
        seen: set[str] = set()
        for number in range(40):
            text = (await reply(made, chat(f"task {number}"), sampling)).text()
            again = (await reply(made, chat(f"task {number}"), sampling)).text()
            assert text == again
            value = json.loads(text)
            Draft202012Validator(REPLY).validate(value)
            seen.add(value.get("tool") or next(iter(value)))
        assert seen == {"search", "clock", "calls", "answer"}

    run_virtual(scenario())


def test_unset_sampling_follows_the_schema_too(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SEARCH))
        text = (await reply(made, chat("go"), Sampling(constraint=constraint))).text()
        Draft202012Validator(SEARCH).validate(json.loads(text))

    run_virtual(scenario())
