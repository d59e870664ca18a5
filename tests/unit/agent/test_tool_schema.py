"""The schema of a reply: what tools declare, reduced to what compiles fast."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from agent_svc.domain.model import ToolInfo
from agent_svc.domain.tool_schema import SCHEMA_BYTES_MAX, plain_schema, reply_schema

ANSWER = {"type": "string"}


def schema_of(*parameters: dict[str, Any], calls_max: int = 1) -> dict[str, Any]:
    tools = [ToolInfo(f"t{at}", "", one) for at, one in enumerate(parameters)]
    made = json.loads(reply_schema(tools, answer=ANSWER, calls_max=calls_max))
    Draft202012Validator.check_schema(made)
    assert isinstance(made, dict)
    return made


def takes(schema: dict[str, Any], arguments: object, tool: str = "t0") -> bool:
    value = {"tool": tool, "arguments": arguments}
    return bool(Draft202012Validator(schema).is_valid(value))


def test_one_kind_of_reply_is_no_alternative() -> None:
    made = json.loads(reply_schema([], answer=ANSWER, calls_max=4))
    assert made == {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
        "additionalProperties": False,
    }


def test_references_of_a_tool_go_on_pointing_into_it() -> None:
    node = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        },
        "required": ["name"],
    }
    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "$defs": {"node": node},
    }
    for calls_max in (1, 4):
        made = schema_of({"type": "object"}, tree, calls_max=calls_max)
        good = {"root": {"name": "a", "children": [{"name": "b"}]}}
        assert takes(made, good, "t1")
        assert not takes(made, {"root": {"name": "a", "children": [{"nam": "b"}]}}, "t1")


def test_what_compilers_do_not_take_is_left_to_the_check_afterwards() -> None:
    made = schema_of(
        {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "(a|b){100}", "format": "email"},
                "n": {"type": "number", "multipleOf": 0.1},
                "list": {"type": "array", "uniqueItems": True, "contains": {"const": 1}},
                "any": {"not": {"type": "null"}},
                "long": {"type": "string", "maxLength": 20, "minLength": 5},
            },
            "dependentRequired": {"n": ["code"]},
        }
    )
    text = json.dumps(made)
    for word in (
        "pattern",
        "format",
        "multipleOf",
        "uniqueItems",
        "contains",
        "not",
        "maxLength",
        "minLength",
        "dependent",
    ):
        assert f'"{word}' not in text
    assert takes(made, {"n": 0.05, "code": "x"})


def test_alternatives_types_constants_and_small_bounds_stay() -> None:
    made = schema_of(
        {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F"], "description": "words"},
                "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
                "either": {"oneOf": [{"type": "string"}, {"type": "boolean"}]},
                "one": {"allOf": [{"type": "integer"}]},
                "map": {"type": "object", "additionalProperties": {"type": "integer"}},
                "free": {"type": "object"},
                "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            },
        }
    )
    assert "description" not in json.dumps(made)
    good: dict[str, Any] = {
        "unit": "C",
        "n": None,
        "either": True,
        "one": 1,
        "map": {"a": 1},
        "free": {"x": []},
        "list": ["a"],
    }
    assert takes(made, good)
    for name, bad in (
        ("unit", "K"),
        ("n", 4),
        ("either", 1),
        ("one", "x"),
        ("map", {"a": "b"}),
        ("list", ["a"] * 3),
    ):
        assert not takes(made, {**good, name: bad}), name


def test_a_schema_that_is_odd_or_deep_becomes_an_open_one() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"x": deep}}
    assert takes(schema_of(deep), {})
    for odd in (
        {"$ref": "#/nowhere"},
        {"$ref": "https://x.example/"},
        {"properties": 7},
        {"type": "dict"},
    ):
        made = schema_of(odd)
        assert takes(made, {})


def test_large_schemas_are_left_free_until_all_fit() -> None:
    large = {
        "type": "object",
        "properties": {f"p{at}" * 20: {"type": "string"} for at in range(200)},
    }
    small = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    made = schema_of(*[large] * 10, small)
    assert len(json.dumps(made, separators=(",", ":"))) <= SCHEMA_BYTES_MAX
    assert takes(made, {"anything": 1}, "t0")
    assert not takes(made, {"anything": 1}, "t10")


def test_a_whole_reply_of_a_schema() -> None:
    made = json.loads(plain_schema({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}))
    validator = Draft202012Validator(made)
    assert validator.is_valid(3)
    assert not validator.is_valid("3")
