"""A small JSON document that is valid against a JSON schema.

Pure. Understands types, enum, const, properties, required, items, prefixItems, bounds of numbers,
lengths and counts, pattern, anyOf, oneOf of distinct types, allOf by merging, and local ``$ref``.
Near the top the state chooses among alternatives: a reply that may be a call or an answer is one or
the other.
A keyword that could make the document invalid and is not understood is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import cast

from inference_svc.adapters.simulated.forms import DEPTH_MAX, FormError, Picker, bounded
from inference_svc.adapters.simulated.regex import WORD, regex_text

ITEMS_MAX = 1_000
PARTS_MAX = 2_000
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
Json = object
Schema = Mapping[str, Json]

# Keywords that a document made here cannot violate: annotations, and limits that smallness meets.
_HARMLESS_WORDS = (
    "$schema $id $defs definitions $comment title description default examples deprecated readOnly "
    "writeOnly additionalProperties unevaluatedProperties maxProperties maxItems format "
    "contentEncoding contentMediaType additionalItems unevaluatedItems x-guidance"
)
_HARMLESS = frozenset(_HARMLESS_WORDS.split())
_UNDERSTOOD_WORDS = (
    "type enum const properties required items prefixItems minimum maximum exclusiveMinimum "
    "exclusiveMaximum multipleOf minLength maxLength minItems pattern anyOf oneOf allOf $ref "
    "uniqueItems minProperties"
)
_UNDERSTOOD = frozenset(_UNDERSTOOD_WORDS.split())
_PROPERTY_WORDS = {"properties", "required"}
_FORMATS = {
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "date-time": "2026-01-01T00:00:00Z",
    "email": "a@example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "https://example.com/",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}


def schema_text(schema_json: str, picker: Picker) -> str:
    """The text of a valid document; FormError when the schema is wrong or not understood."""
    try:
        schema = json.loads(schema_json)
    except (ValueError, RecursionError):
        raise FormError("is not JSON") from None
    if not isinstance(schema, dict):
        raise FormError("is not a JSON object")
    try:
        document = _Maker(schema, picker).value(schema, 0)
    except (OverflowError, RecursionError):
        raise FormError("holds a number or a nesting beyond what is supported") from None
    return bounded(json.dumps(document, ensure_ascii=False))


def _whole(schema: Schema, key: str, default: int) -> int:
    value = schema.get(key, default)
    if type(value) is not int or value < 0:
        raise FormError(f"{key} is not a whole number")
    return value


def _number(schema: Schema, key: str, default: float) -> float:
    value = schema.get(key, default)
    if type(value) not in (int, float):
        raise FormError(f"{key} is not a number")
    return cast(float, value)


def _list(schema: Schema, key: str) -> list[Json]:
    value = schema.get(key, [])
    if not isinstance(value, list) or (key in schema and key != "required" and not value):
        raise FormError(f"{key} is not a list of at least one")
    return value


class _Maker:
    def __init__(self, root: Schema, picker: Picker) -> None:
        self._root = root
        self._picker = picker
        self._parts = 0

    def value(self, schema: Json, depth: int) -> Json:
        """A valid value for a schema; objects and arrays below it as small as allowed."""
        self._count(depth)
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise FormError("has a part that no value is valid against")
        schema = self._merged(schema, depth)
        for key in schema:
            if key not in _UNDERSTOOD and key not in _HARMLESS:
                raise FormError("uses a keyword that the simulated engine does not support")
        for key in ("anyOf", "oneOf"):
            if key in schema:
                if key == "oneOf" and not _exclusive(_list(schema, key)):
                    raise FormError("has a oneOf of branches that are not told apart by type")
                rest = {name: part for name, part in schema.items() if name != key}
                branches = [_joined(rest, part) for part in _list(schema, key)]
                return self._one_of(self._ordered(branches, depth), depth)
        if "const" in schema or "enum" in schema:
            return self._listed(schema)
        return self._typed(schema, depth)

    def _count(self, depth: int) -> None:
        """Bounds the work: values made, and schemas joined on the way."""
        self._parts += 1
        if depth > DEPTH_MAX or self._parts > PARTS_MAX:
            raise FormError(f"asks for more than {PARTS_MAX} parts or {DEPTH_MAX} levels")

    def _listed(self, schema: Schema) -> Json:
        """One of the values that a schema lists."""
        if (_UNDERSTOOD & set(schema)) - {"type", "const", "enum"}:
            raise FormError("limits listed values, which the simulated engine does not support")
        values = _list(schema, "enum") if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if len(kinds) > len(TYPES):
                raise FormError("has more types than JSON has")
            values = [value for value in values if any(kind in kinds for kind in _type_of(value))]
        if not values:
            raise FormError("lists no value of its type")
        return values[self._picker.pick(len(values))]

    def _merged(self, schema: Schema, depth: int) -> Schema:
        """A schema with its references followed and its allOf joined in."""
        while True:
            self._count(depth)
            if "$ref" in schema:
                rest = {key: part for key, part in schema.items() if key != "$ref"}
                schema = _joined(self._resolved(schema["$ref"]), rest)
            elif "allOf" in schema:
                parts = _list(schema, "allOf")
                schema = {key: part for key, part in schema.items() if key != "allOf"}
                for part in parts:
                    schema = _joined(schema, self._merged(_object(part), depth + 1))
            else:
                return schema

    def _resolved(self, reference: Json) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise FormError("has a reference to another document")
        node: Json = self._root
        for step in reference.lstrip("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, dict) or step not in node:
                raise FormError("has a reference to nothing")
            node = node[step]
        return _object(node)

    def _ordered(self, branches: list[Schema], depth: int) -> list[Schema]:
        """The order in which branches are tried: near the top from one that is chosen, deeper ones
        as written, so that what refers to itself ends."""
        first = 0 if depth > 1 else self._picker.pick(len(branches))
        return [*branches[first:], *branches[:first]]

    def _one_of(self, branches: list[Schema], depth: int) -> Json:
        """The first branch that a value can be made for."""
        error: FormError | None = None
        for branch in branches:
            try:
                return self.value(branch, depth + 1)
            except FormError as caught:
                error = error or caught
        raise error or FormError("has no branch")

    def _typed(self, schema: Schema, depth: int) -> Json:
        kind = schema.get("type", _implied_type(schema))
        if isinstance(kind, list) and kind:
            kind = kind[0]
        if kind not in TYPES:
            raise FormError("has a type that JSON does not have")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return _smallest_number(schema, whole=kind == "integer")
        return None if kind == "null" else bool(self._picker.pick(2))

    def _object(self, schema: Schema, depth: int) -> Json:
        properties = _object(schema.get("properties", {}))
        required = [name for name in _list(schema, "required") if isinstance(name, str)]
        if len(required) < len(_list(schema, "required")):
            raise FormError("requires a property whose name is not a string")
        named = set(required)
        wanted = [name for name in properties if name in named]
        wanted += [name for name in required if name not in properties]
        missing = max(_whole(schema, "minProperties", 0) - len(wanted), 0)
        spare = [name for name in properties if name not in named][:missing]
        wanted += spare
        if len(spare) < missing:
            raise FormError("asks for more properties than it names")
        if schema.get("additionalProperties") is False and set(wanted) - set(properties):
            raise FormError("requires a property that it forbids")
        others = schema.get("additionalProperties", True)
        return {name: self.value(properties.get(name, others), depth + 1) for name in wanted}

    def _array(self, schema: Schema, depth: int) -> Json:
        least = _whole(schema, "minItems", 0)
        if least > ITEMS_MAX or least > _whole(schema, "maxItems", ITEMS_MAX):
            raise FormError(f"asks for more than {ITEMS_MAX} items, or for more than it allows")
        first = _list(schema, "prefixItems") if "prefixItems" in schema else []
        rest = schema.get("items", True)
        parts = [first[index] if index < len(first) else rest for index in range(least)]
        values = [self.value(part, depth + 1) for part in parts]
        if schema.get("uniqueItems") and len({json.dumps(value) for value in values}) < least:
            raise FormError("asks for different items, which the simulated engine does not support")
        return values

    def _string(self, schema: Schema) -> str:
        least, most = _whole(schema, "minLength", 0), _whole(schema, "maxLength", 10**9)
        if least > most:
            raise FormError("has a minLength above its maxLength")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise FormError("has a pattern that is not a string")
            text = regex_text(schema["pattern"], self._picker)
        elif "format" in schema:
            text = _FORMATS.get(str(schema["format"]), "a")
        else:
            count = min(max(least, 5), most)
            if count > ITEMS_MAX:
                raise FormError(f"asks for a string of more than {ITEMS_MAX} characters")
            return "".join(WORD[self._picker.pick(26)] for _ in range(count))
        if not least <= len(text) <= most:
            raise FormError("has a pattern whose shortest text has another length")
        return text


def _object(value: Json) -> Schema:
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise FormError("has something else where an object should be")
    return value


def _joined(one: Schema, other: Json) -> Schema:
    """Both schemas in one: properties and required are joined; other keywords must not clash."""
    joined = dict(one)
    other = _object(other)
    closed = False in (one.get("additionalProperties"), other.get("additionalProperties"))
    if closed and _PROPERTY_WORDS & set(one) and _PROPERTY_WORDS & set(other):
        raise FormError("joins properties to a closed object, which is not supported")
    for key, part in other.items():
        mine = joined.get(key)
        if key in ("properties", "$defs") and isinstance(mine, dict) and isinstance(part, dict):
            joined[key] = {**mine, **part}
        elif key == "required" and isinstance(mine, list) and isinstance(part, list):
            joined[key] = [*mine, *(name for name in part if name not in mine)]
        elif key in joined and mine != part and key not in _HARMLESS:
            raise FormError("has keywords that clash where schemas are joined")
        else:
            joined[key] = part
    return joined


def _type_of(value: Json) -> set[str]:
    """The names of the JSON types that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]}


def _exclusive(branches: list[Json]) -> bool:
    """Whether no value is valid against two of the branches, told by their types or constants."""
    marks: list[str] = []
    for branch in branches:
        if not isinstance(branch, dict):
            return False
        if "const" in branch:
            marks.append(json.dumps(branch["const"], sort_keys=True))
        elif isinstance(branch.get("type"), str):
            marks.append(branch["type"].replace("integer", "number"))
        else:
            return False
    return len(set(marks)) == len(marks) and (
        all("const" in branch for branch in branches)  # type: ignore[operator]
        or not any("const" in branch for branch in branches)  # type: ignore[operator]
    )


def _implied_type(schema: Schema) -> str:
    if "items" in schema or "prefixItems" in schema or "minItems" in schema:
        return "array"
    if "pattern" in schema or "minLength" in schema or "maxLength" in schema:
        return "string"
    if "minimum" in schema or "maximum" in schema or "multipleOf" in schema:
        return "number"
    return "object"


def _smallest_number(schema: Schema, *, whole: bool) -> float:
    """The number nearest to zero inside the bounds."""
    low = _number(schema, "minimum", -math.inf)
    high = _number(schema, "maximum", math.inf)
    step = _number(schema, "multipleOf", 1 if whole else 0)
    if step <= 0:
        step = 1 if whole else 0.5
    above = _number(schema, "exclusiveMinimum", -math.inf)
    below = _number(schema, "exclusiveMaximum", math.inf)
    if whole and step != int(step):
        raise FormError("has a multipleOf that the simulated engine does not support")
    bound = max(low, above) if max(low, above) > 0 else min(0, high, below)
    for rounding in (math.floor, math.ceil):
        for more in (-1, 0, 1):
            value = (rounding(bound / step) + more) * step if math.isfinite(bound) else 0
            if low <= value <= high and above < value < below:
                return int(value) if whole else value
    middle = (max(low, above) + min(high, below)) / 2
    if (
        not whole
        and "multipleOf" not in schema
        and low <= middle <= high
        and above < middle < below
    ):
        return middle
    raise FormError("has bounds that no number is within")
