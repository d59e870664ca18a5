"""JSON and schemas from strangers: bounded, and told in fixed words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.json_schemas import (
    DEPTH_MAX,
    JSON_BYTES_MAX,
    SCHEMA_BYTES_MAX,
    VALUES_MAX,
    JsonError,
    check_schema,
    parse,
    parse_object,
    validate,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
# What one input may take at most, with room for a slow machine: bounded is what matters.
LIMIT_S = 2.0


@given(VALUES)
def test_what_is_json_is_read_as_the_standard_library_reads_it(value: Any) -> None:
    text = json.dumps(value)
    assert parse(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "is nested deeper than 32"),
        ('{"a":' * 40_000 + "1" + "}" * 40_000, "is nested deeper than 32"),
        ("[" + "1," * VALUES_MAX + "1]", "holds more than 10000 values"),
        ('"' + "a" * JSON_BYTES_MAX + '"', "is longer than 262144 bytes"),
        ('"' + "é" * (JSON_BYTES_MAX // 2) + '"', "is longer than 262144 bytes"),
        ("NaN", "holds a number that JSON does not have"),
        ('{"a": -Infinity}', "holds a number that JSON does not have"),
        ("1e999", "holds a number that is too large"),
        ("9" * 5000, "holds a number that is too large"),
        ('{"a": 1, "a": 2}', "names a property twice"),
        ('"\\ud800"', "holds half of a surrogate pair"),
        ('{"a": ', "is not JSON"),
        ("", "is not JSON"),
        ('"' + "\\" * 100_001, "is not JSON"),
    ],
)
def test_what_is_too_much_or_no_json_is_refused_in_fixed_words(text: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(JsonError) as caught:
        parse(text)
    assert str(caught.value) == told
    assert time.monotonic() - began < LIMIT_S


def test_brackets_inside_strings_are_no_depth() -> None:
    text = json.dumps(["[" * 1000, '{"' * 1000, "a,b" * 1000])
    assert parse(text) == json.loads(text)
    deepest = "[" * DEPTH_MAX + "]" * DEPTH_MAX
    assert parse(deepest) == json.loads(deepest)


def test_an_object_is_asked_for() -> None:
    assert parse_object('{"a": 1}') == {"a": 1}
    assert parse_object("[1]") is None
    assert parse_object("{") is None


GOOD: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://x.example/s",
        "definitions": {"n": {"type": "integer"}},
        "properties": {"n": {"$ref": "#/definitions/n"}},
    },
    {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
    {"type": ["string", "null"], "pattern": "^[a-z]+$"},
    {"type": "object", "additionalProperties": {"type": "number"}, "x-note": "passed over"},
]


@pytest.mark.parametrize("schema", GOOD, ids=range(len(GOOD)))
def test_schemas_that_can_be_applied_pass(schema: dict[str, Any]) -> None:
    assert check_schema(schema) == ""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "https://x.example/s"}, "has a reference to nothing in itself"),
        ({"$ref": "file:///etc/passwd"}, "has a reference to nothing in itself"),
        ({"$ref": "#/$defs/missing"}, "has a reference to nothing in itself"),
        ({"$ref": "#"}, "has a reference that leads back to itself"),
        ({"allOf": [{"not": {"$ref": "#"}}]}, "has a reference that leads back to itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}},
            "has a reference that leads back to itself",
        ),
        ({"properties": {"a": {"$id": "https://x.example/"}}}, "uses $id, which is not supported"),
        ({"patternProperties": {"(a+)+$": {}}}, "uses patternProperties, which is not supported"),
        ({"$dynamicRef": "#x"}, "uses $dynamicRef, which is not supported"),
        ({"type": "dict"}, "has a type that the standard does not allow"),
        ({"type": []}, "has a type that the standard does not allow"),
        ({"minimum": "1"}, "has a minimum that the standard does not allow"),
        ({"exclusiveMinimum": True}, "has a exclusiveMinimum that the standard does not allow"),
        ({"required": "a"}, "has a required that the standard does not allow"),
        ({"anyOf": []}, "has a anyOf that the standard does not allow"),
        ({"items": 7}, "has something else where a schema should be"),
        ({"pattern": "(?=a)b"}, "has a pattern that is not supported"),
        ({"pattern": r"(a)\1"}, "has a pattern that is not supported"),
        ({"pattern": "a{1000}{1000}"}, "has a pattern that is not supported"),
        ({"pattern": "a" * 300}, "has a pattern that is not supported"),
        ({"pattern": r"\pL{17}"}, "has a pattern that is not supported"),
        ({"allOf": [{"pattern": f"a{n}"} for n in range(17)]}, "has more than 16 patterns"),
        (nested(40), "is nested deeper than 32"),
        ({"description": "x" * SCHEMA_BYTES_MAX}, "is longer than 32768 bytes"),
        ({"const": float("nan")}, "is not JSON"),
        ({"const": object()}, "is not JSON"),
    ],
)
def test_schemas_that_cannot_are_refused_in_fixed_words(schema: dict[str, Any], told: str) -> None:
    began = time.monotonic()
    assert check_schema(schema) == told
    assert time.monotonic() - began < LIMIT_S


CALL = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"city": "Bonn", "days": 3, "unit": "C", "tags": ["a"], "code": "CGN"}, ""),
        ({}, 'it needs "city"'),
        ([], "it must be of type object"),
        ({"city": 7}, '"city" must be of type string'),
        ({"city": "Bonn", "days": 0}, '"days" must be at least 1'),
        ({"city": "Bonn", "days": 1.5}, '"days" must be of type integer'),
        ({"city": "Bonn", "unit": "K"}, '"unit" must be one of "C", "F"'),
        ({"city": "Bonn", "tags": ["a", 1]}, '"tags[1]" must be of type string'),
        ({"city": "Bonn", "tags": ["a", "a"]}, '"tags" does not follow uniqueItems'),
        ({"city": "Bonn", "code": "sk-secret"}, '"code" does not follow pattern'),
        ({"city": "Bonn", "sk-secret": 1}, "it has a property that is not declared"),
        ({"city": "B"}, '"city" must be in characters at least 2'),
        (
            {"days": 0, "unit": "K"},
            '"days" must be at least 1; "unit" must be one of "C", "F"; it needs "city"',
        ),
    ],
)
def test_wrong_values_are_told_by_what_the_schema_declares(value: Any, told: str) -> None:
    assert check_schema(CALL) == ""
    assert validate(CALL, value) == told


@given(st.text(alphabet="abcdef0123456789-_", min_size=12))
def test_nothing_of_a_value_is_in_what_is_told(secret: str) -> None:
    schema = {
        **CALL,
        "additionalProperties": {"type": "object", "properties": {"x": {"type": "null"}}},
    }
    for value in (
        {secret: secret},
        {"city": [secret]},
        {"unit": secret, secret: {"x": secret}},
        {"tags": [secret, secret], "code": secret},
        secret,
        [secret],
    ):
        told = validate(schema, value)
        assert told
        assert secret not in told


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[\w.-]+@\w+\.\w{2,8}$", "a.b-c_1@example.org", "a b@example.org"),
        (r"^\d{4}-\d\d$", "2026-11", "２０２６-１１"),
        (r"^[^\w]\W$", "-é", "-a"),
        (r"\\\\w", "\\\\w", "a"),
        (r"^\p{Lu}\S*$", "Émile", "émile"),
        ("b", "abc", "ac"),
    ],
)
def test_patterns_mean_what_the_standard_says(pattern: str, good: str, bad: str) -> None:
    schema = {"pattern": pattern}
    assert check_schema(schema) == ""
    assert validate(schema, good) == ""
    assert validate(schema, bad) == "it does not follow pattern"


def test_a_value_that_may_not_be_there_is_told_in_words() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "code": False}}
    assert check_schema(schema) == ""
    assert validate(schema, {"city": "Bonn", "code": 1}) == "it has a value where none may be"


def doubling(levels: int) -> dict[str, Any]:
    """Each level refers to the next one twice: 2^levels ways, and none fits."""
    defs: dict[str, Any] = {
        f"n{at}": {"anyOf": [{"$ref": f"#/$defs/n{at + 1}"}, {"$ref": f"#/$defs/n{at + 1}"}]}
        for at in range(levels)
    }
    return {"$ref": "#/$defs/n0", "$defs": {**defs, f"n{levels}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (doubling(28), 1),
        ({"$ref": "#"}, 1),
        ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, 1),
        ({"items": {"enum": list(range(3000))}}, ["x"] * 9000),
        ({"items": {"uniqueItems": True}, "uniqueItems": True}, [{"a": n} for n in range(4000)]),
        ({"multipleOf": 1e-300}, 10**250),
        ({"pattern": "(a+)+$"}, "a" * 50_000 + "b"),
        ({"pattern": "(a|aa)*(a|aa)*(a|aa)*c"}, "a" * 50_000),
    ],
)
def test_no_schema_and_value_take_for_ever(schema: dict[str, Any], value: Any) -> None:
    # One without an end is refused; were it applied, that would end all the same.
    assert check_schema(schema) in ("", "has a reference that leads back to itself")
    began = time.monotonic()
    assert isinstance(validate(schema, value), str)
    assert time.monotonic() - began < LIMIT_S


def test_too_much_work_is_a_problem_and_never_valid() -> None:
    assert validate(doubling(28), 1) == "it takes too much work to check"
    assert validate({"$ref": "#"}, 1) == "it takes too much work to check"


@given(VALUES)
def test_no_value_makes_it_raise(value: Any) -> None:
    assert isinstance(validate(CALL, value), str)


def test_a_reference_to_what_is_around_it_is_a_tree() -> None:
    tree = {"properties": {"n": {}, "parts": {"items": {"$ref": "#"}}}, "required": ["n"]}
    assert check_schema(tree) == ""
    assert validate(tree, {"n": 1, "parts": [{"n": 2, "parts": []}]}) == ""
    assert validate(tree, {"n": 1, "parts": [{}]}) == '"parts[0]" needs "n"'
