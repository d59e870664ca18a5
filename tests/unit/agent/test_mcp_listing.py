"""What of a stranger's listing a model gets to see."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import Tool, ToolAnnotations

from agent_svc.adapters.tools.mcp_listing import (
    DESCRIPTION_BYTES_MAX,
    NAME_CHARS_MAX,
    TOOLS_MAX,
    check_listing,
)
from sluice.json_schemas import DEPTH_MAX, SCHEMA_BYTES_MAX

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


def tool(name: str = "find", schema: dict[str, Any] | None = None, description: str = "") -> Tool:
    return Tool(name=name, description=description, input_schema=schema or OBJECT)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels - 1):
        schema = {"type": "object", "not": schema}
    return schema


def problem_of(one: Tool) -> str:
    return check_listing("desk", [one], [])[0].problem


def test_a_tool_has_its_declarations_name_before_its_own() -> None:
    found = check_listing("desk", [tool("find", description="Finds.")], [])
    assert [(one.name, one.remote, one.description) for one in found] == [
        ("desk__find", "find", "Finds.")
    ]
    assert found[0].parameters == OBJECT
    assert not found[0].problem


def test_only_the_tools_that_the_declaration_wants_are_offered() -> None:
    found = check_listing("desk", [tool("a"), tool("b")], ["b", "c"])
    assert [(one.name, one.problem) for one in found] == [
        ("desk__b", ""),
        ("desk__c", "the server does not offer it"),
    ]


def test_names_fit_models_and_stay_unique() -> None:
    found = check_listing("desk", [tool("a.b"), tool("a/b"), tool("x" * NAME_CHARS_MAX)], [])
    assert [one.name for one in found][:2] == ["desk__a_b", "desk__a_b"]
    assert [bool(one.problem) for one in found] == [False, True, True]
    assert found[0].remote == "a.b"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array"}, "not one of an object"),
        ({"properties": {}}, "not one of an object"),
        ({"type": "object", "properties": 3}, "the standard does not allow"),
        ({"type": "object", "required": "a"}, "the standard does not allow"),
        ({"type": "object", "not": {"$ref": "https://example.org/s"}}, "a reference to nothing"),
        ({"type": "object", "not": {"$ref": "file:///etc/passwd"}}, "a reference to nothing"),
        ({"type": "object", "description": "x" * SCHEMA_BYTES_MAX}, "longer"),
        (nested(DEPTH_MAX + 1), "deeper"),
    ],
)
def test_a_schema_that_cannot_be_used_leaves_its_tool_out(
    schema: dict[str, Any], said: str
) -> None:
    found = check_listing("desk", [tool("bad", schema), tool("good")], [])
    assert said in found[0].problem
    assert found[0].parameters == {}
    assert not found[1].problem


def test_bounds_hold_exactly() -> None:
    assert not problem_of(tool(schema=nested(DEPTH_MAX)))
    assert not problem_of(tool(description="x" * DESCRIPTION_BYTES_MAX))
    assert problem_of(tool(description="x" * (DESCRIPTION_BYTES_MAX + 1)))
    many = [tool(f"t{number}") for number in range(TOOLS_MAX + 5)]
    found = check_listing("desk", many, [])
    assert [bool(one.problem) for one in found] == [False] * TOOLS_MAX + [True]
    assert not [one for one in check_listing("desk", many[:TOOLS_MAX], []) if one.problem]


def test_regular_expressions_that_could_take_for_ever_are_taken_out_and_others_stay() -> None:
    evil = {"type": "string", "pattern": "^(?=a)(a+)+$"}
    schema = {
        "type": "object",
        "properties": {"pattern": evil, "list": {"type": "array", "items": {"anyOf": [evil]}}},
        "patternProperties": {"(?!a)": {}},
        "$defs": {"patternProperties": evil},
        "default": {"pattern": "kept: this is data"},
    }
    assert check_listing("desk", [tool(schema=schema)], [])[0].parameters == {
        "type": "object",
        "properties": {
            "pattern": {"type": "string"},
            "list": {"type": "array", "items": {"anyOf": [{"type": "string"}]}},
        },
        "$defs": {"patternProperties": {"type": "string"}},
        "default": {"pattern": "kept: this is data"},
    }
    kept = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]+$"}}}
    assert check_listing("desk", [tool(schema=kept)], [])[0].parameters == kept


def test_what_a_server_says_of_its_tools_effects_is_not_taken_over() -> None:
    boastful = tool()
    boastful.annotations = ToolAnnotations(read_only_hint=True, idempotent_hint=True)
    assert check_listing("desk", [boastful], []) == check_listing("desk", [tool()], [])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "$ref", "pattern", "items", "enum", "not", "a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["properties", "$ref", "not", "allOf"]), _json), st.text())
def test_no_schema_and_no_name_breaks_the_check(schema: dict[str, Any], name: str) -> None:
    found = check_listing("desk", [tool(name, {"type": "object"} | schema)], [])
    assert len(found) == 1
    assert len(found[0].name) <= NAME_CHARS_MAX
