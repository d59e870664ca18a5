"""The schemas of replies on the real grammar compiler: fast, and meaning what they say."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import pytest

from agent_svc.domain.model import ToolInfo
from agent_svc.domain.tool_schema import reply_schema
from tests.contract.vllm_support import CHAT_MODEL, MARKS, MODELS

pytestmark = [mark for mark in MARKS if mark.name != "asyncio"]
# An instance refuses what takes longer than 5 s (constraint_s_max of inference_svc).
COMPILE_S = 3.0
NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[a-z]+$"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["name"],
}
TREE = ToolInfo(
    "tree",
    "",
    {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "$defs": {"node": NODE},
    },
)
MIXED = ToolInfo(
    "mixed",
    "",
    {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F", 3, None]},
            "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
            "either": {"oneOf": [{"type": "string"}, {"type": "boolean"}]},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}},
            "free": {"type": "object"},
            "any": {},
            "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "fixed": {"const": {"a": [1]}},
        },
    },
)


@cache
def tokenizer() -> Any:
    """xgrammar's view of the default model's tokenizer, and its end token."""
    import xgrammar
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(MODELS / CHAT_MODEL))
    return xgrammar.TokenizerInfo.from_huggingface(loaded), loaded.eos_token_id


def compiled(*tools: ToolInfo, calls_max: int = 4) -> Any:
    """The grammar, compiled as the engine does it."""
    import xgrammar

    info, _ = tokenizer()
    schema = reply_schema(tools, answer={"type": "string"}, calls_max=calls_max)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    began = time.process_time()
    grammar = compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
    assert time.process_time() - began < COMPILE_S
    return grammar


def takes(grammar: Any, value: object) -> bool:
    """Whether the grammar lets a model write the value and end."""
    import xgrammar

    _, end = tokenizer()
    matcher = xgrammar.GrammarMatcher(grammar)
    text = json.dumps(value, separators=(",", ":"))
    return bool(
        matcher.accept_string(text) and (matcher.is_terminated() or matcher.accept_token(end))
    )


@pytest.mark.parametrize("calls_max", [1, 4])
def test_replies_that_are_meant_can_be_written_and_no_others(calls_max: int) -> None:
    grammar = compiled(TREE, MIXED, calls_max=calls_max)
    tree = {"tool": "tree", "arguments": {"root": {"name": "a", "children": [{"name": "b"}]}}}
    mixed = {"tool": "mixed", "arguments": {}}
    assert takes(grammar, tree)
    assert takes(grammar, mixed)
    assert takes(grammar, {"answer": 'a "word"\n'})
    assert takes(grammar, {"calls": [tree, mixed]}) is (calls_max > 1)
    assert not takes(grammar, {"calls": [tree]})
    assert not takes(grammar, {"tool": "other", "arguments": {}})
    assert not takes(grammar, {"tool": "tree", "arguments": {"root": {"nam": "a"}}})
    assert not takes(grammar, {**mixed, "answer": "x"})


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"unit": 3, "n": None, "either": True, "map": {"z": 1}}, True),
        (
            {"free": {"q": {"deep": [1]}}, "any": [{"x": 1}], "list": ["a"], "fixed": {"a": [1]}},
            True,
        ),
        ({"unit": "K"}, False),
        ({"n": 4}, False),
        ({"either": 1}, False),
        ({"map": {"z": "x"}}, False),
        ({"list": ["a", "b", "c"]}, False),
        ({"fixed": {"a": [2]}}, False),
        ({"more": 1}, False),
    ],
)
def test_arguments_are_held_to_what_is_declared(arguments: object, taken: bool) -> None:
    assert takes(compiled(MIXED), {"tool": "mixed", "arguments": arguments}) is taken


def test_many_tools_compile_in_time() -> None:
    properties = {f"p{at}": {"type": "string", "maxLength": 200} for at in range(8)}
    parameters = {"type": "object", "properties": properties, "required": ["p0"]}
    grammar = compiled(*(ToolInfo(f"tool{at}", "", parameters) for at in range(40)))
    assert takes(grammar, {"tool": "tool39", "arguments": {"p0": "x"}})
