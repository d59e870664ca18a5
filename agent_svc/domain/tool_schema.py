"""The JSON schema that a model's reply has to follow in structured output.

Pure. A reply is one object: a call ``{"tool": NAME, "arguments": {...}}``, several at once as
``{"calls": [...]}``, or the end ``{"answer": ...}``. What a tool declares is reduced to the
keywords that grammar compilers take and compile fast: types, properties, items, constants,
alternatives, references, small bounds. The rest is checked after the reply, by
``sluice.json_schemas``: a pattern can take a compiler minutes, the length of a string many seconds
(inference_svc/README.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from agent_svc.domain.model import ToolInfo

Schema = Mapping[str, object]

# Half of what the mesh takes as a schema; beyond it the largest tools' arguments are left free.
SCHEMA_BYTES_MAX: Final = 32 * 1024
DEPTH_MAX: Final = 32
ITEMS_MAX: Final = 64  # a count above is not written into the grammar
NUMBER_ABS_MAX: Final = 10**9  # likewise of an integer's bounds
VALUE_TOKENS: Final = 16  # of a short text
ANYTHING: Final[Schema] = {"type": "object", "additionalProperties": True}


def reply_schema(tools: Sequence[ToolInfo], *, answer: Schema | None, calls_max: int) -> str:
    """The schema, as JSON. ``tools``: those that may be called now; ``answer``: the schema of the
    final answer, None while none is allowed; one of both is there."""
    assert tools or answer is not None
    shapes = [_Shaper(tool.parameters, f"#/$defs/a{at}") for at, tool in enumerate(tools)]
    arguments = [shaper.root() for shaper in shapes]
    while True:
        text = _joined(tools, arguments, answer, calls_max)
        sizes = [len(_dumped(part)) for part in arguments]
        if len(text) <= SCHEMA_BYTES_MAX or max(sizes, default=0) <= len(_dumped(ANYTHING)):
            return text
        arguments[sizes.index(max(sizes))] = ANYTHING


def _joined(
    tools: Sequence[ToolInfo],
    arguments: Sequence[Schema],
    answer: Schema | None,
    calls_max: int,
) -> str:
    defs: dict[str, object] = {}
    calls: list[Schema] = []
    for at, (tool, part) in enumerate(zip(tools, arguments, strict=True)):
        if '"$ref"' in _dumped(part):
            defs[f"a{at}"] = part
            part = {"$ref": f"#/$defs/a{at}"}
        calls.append(_closed({"tool": {"const": tool.name}, "arguments": part}))
    kinds = list(calls)
    if calls_max > 1 and calls:
        defs["call"] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        reference = {"$ref": "#/$defs/call"}
        several = {"type": "array", "items": reference, "minItems": 2, "maxItems": calls_max}
        kinds = [reference, _closed({"calls": several})]
    if answer is not None:
        shaped = _Shaper(answer, "#/$defs/answer").root()
        if '"$ref"' in _dumped(shaped):
            defs["answer"] = shaped
            shaped = {"$ref": "#/$defs/answer"}
        kinds.append(_closed({"answer": shaped}))
    root: dict[str, object] = {"$defs": defs} if defs else {}
    root.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
    return _dumped(root)


def plain_schema(schema: Schema) -> str:
    """A schema of a whole reply, reduced as those of tools are."""
    return _dumped(_Shaper(schema, "#").root())


def tokens_of(schema: Schema) -> int:
    """Tokens that JSON of a schema takes, about, where each of its texts is a short one: names of
    properties, the lengths and counts that it asks for at least."""
    return _tokens(schema, 0)


def _tokens(schema: object, depth: int) -> int:
    if not isinstance(schema, Mapping) or depth > DEPTH_MAX:
        return VALUE_TOKENS
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        return sum(
            2 + len(str(name)) // 3 + _tokens(part, depth + 1) for name, part in properties.items()
        )
    least = schema.get("minLength", 0)
    if type(least) is int and schema.get("type") == "string":
        return max(VALUE_TOKENS, least // 3)
    least = schema.get("minItems", 1)
    if schema.get("type") == "array" and type(least) is int:
        return max(1, least) * _tokens(schema.get("items"), depth + 1)
    return VALUE_TOKENS


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _closed(properties: Mapping[str, object]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class _Shaper:
    """Reduces one schema; ``where`` is the pointer at which the result will stand."""

    def __init__(self, schema: Schema, where: str) -> None:
        self._schema = schema
        self._where = where

    def root(self) -> Schema:
        """The reduced schema; an open object when its references cannot be kept."""
        shaped = self._shape(self._schema, 0)
        return shaped if self._resolves(shaped, shaped) else ANYTHING

    def _shape(self, schema: object, depth: int) -> dict[str, object]:
        if not isinstance(schema, Mapping) or depth > DEPTH_MAX:
            return {}
        shaped: dict[str, object] = {}
        for word in ("$defs", "definitions"):
            if isinstance(named := schema.get(word), Mapping):
                shaped[word] = {key: self._shape(part, depth + 1) for key, part in named.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return {**shaped, "$ref": self._where + reference[1:]}
        for word in ("const", "enum"):
            if word in schema:
                return {**shaped, word: schema[word]}
        if "properties" not in schema:
            for word in ("anyOf", "oneOf"):
                branches = schema.get(word)
                if isinstance(branches, list) and branches:
                    return {**shaped, "anyOf": [self._shape(one, depth + 1) for one in branches]}
            parts = schema.get("allOf")
            if isinstance(parts, list) and len(parts) == 1:
                return {**shaped, **self._shape(parts[0], depth + 1)}
        return {**shaped, **self._typed(schema, depth)}

    def _typed(self, schema: Schema, depth: int) -> dict[str, object]:
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            if len(kind) == 1:
                return self._typed({**schema, "type": kind[0]}, depth)
            branches = [self._typed({**schema, "type": one}, depth) for one in kind]
            return {"anyOf": branches}
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = self._shape(schema.get("items", {}), depth + 1)
            return {"type": "array", "items": items, **_counts(schema)}
        if kind == "integer":
            return {"type": "integer", **_bounds(schema)}
        return {"type": kind} if kind in ("string", "number", "boolean", "null") else {}

    def _object(self, schema: Schema, depth: int) -> dict[str, object]:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            others = schema.get("additionalProperties", not isinstance(properties, Mapping))
            more = self._shape(others, depth + 1) if isinstance(others, Mapping) else bool(others)
            return {"type": "object", "additionalProperties": more}
        required = schema.get("required")
        wanted = required if isinstance(required, list) else []
        return {
            "type": "object",
            "properties": {name: self._shape(part, depth + 1) for name, part in properties.items()},
            "required": [name for name in properties if name in wanted],
            "additionalProperties": False,
        }

    def _resolves(self, node: object, root: Schema) -> bool:
        """Whether each reference below a node has its target in the reduced schema."""
        if isinstance(node, list):
            return all(self._resolves(part, root) for part in node)
        if not isinstance(node, Mapping):
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and not self._found(reference, root):
            return False
        return all(self._resolves(part, root) for part in node.values())

    def _found(self, reference: str, root: object) -> bool:
        if not reference.startswith(self._where):
            return False
        node = root
        for step in reference.removeprefix(self._where).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or step not in node:
                return False
            node = node[step]
        return isinstance(node, Mapping)


def _counts(schema: Schema) -> dict[str, object]:
    kept: dict[str, object] = {}
    for word in ("minItems", "maxItems"):
        value = schema.get(word)
        if type(value) is int and 0 <= value <= ITEMS_MAX:
            kept[word] = value
    return kept


def _bounds(schema: Schema) -> dict[str, object]:
    kept: dict[str, object] = {}
    for word in ("minimum", "maximum"):
        value = schema.get(word)
        if type(value) is int and abs(value) <= NUMBER_ABS_MAX:
            kept[word] = value
    return kept
