"""JSON and JSON schemas from strangers: parsed, checked and applied within bounds.

Pure and synchronous. Models write JSON, tenants and tool servers write schemas; neither may cost
more than some 50 ms or end in anything but a fixed text. JSON is bounded in bytes, depth and values
before it is built. Schemas are Draft 2020-12, bounded in size, without references to elsewhere, and
applied under a budget of work, because references and alternatives can multiply. Patterns are
matched by an engine whose time grows linearly with the text (Rust's ``regex``): Python's own can
take for ever.

The texts name properties and values that a schema declares, never what was written: they can be
shown to models and stored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from pydantic_core import SchemaError, SchemaValidator, core_schema
from pydantic_core import ValidationError as MismatchError
from referencing import Registry

JSON_BYTES_MAX: Final = 256 * 1024
DEPTH_MAX: Final = 32
VALUES_MAX: Final = 10_000
DIGITS_MAX: Final = 300  # of a whole number: beyond, it is no float any more
SCHEMA_BYTES_MAX: Final = 32 * 1024
SCHEMA_VALUES_MAX: Final = 4_000
PATTERNS_MAX: Final = 16
PATTERN_BYTES_MAX: Final = 256
REPEATS_MAX: Final = 300  # of counted repetitions, multiplied
UNICODE_CLASSES_MAX: Final = 16  # likewise of Unicode properties: each takes 0.3 ms to compile
WORK_MAX: Final = 5_000  # keywords applied and values looked at; some 10 µs each
PROBLEMS_MAX: Final = 3  # told at once
LISTED_CHARS_MAX: Final = 200  # of the values that a text lists

Json = Any  # a JSON value: None, bool, int, float, str, list, dict


class JsonError(ValueError):
    """A text that is not taken as JSON; the message is fixed."""


_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]|,', re.DOTALL)


def parse(text: str, *, bytes_max: int = JSON_BYTES_MAX) -> Json:
    """The JSON value of a text. Raises JsonError: not JSON (NaN, infinities and repeated property
    names included), too long, too deep, too many values."""
    if len(text) > bytes_max or len(text.encode("utf-8", "surrogatepass")) > bytes_max:
        raise JsonError(f"is longer than {bytes_max} bytes")
    depth = values = 0
    for match in _TOKENS.finditer(text):
        mark = text[match.start()]
        if mark in "[{":
            depth += 1
            values += 1
            if depth > DEPTH_MAX:
                raise JsonError(f"is nested deeper than {DEPTH_MAX}")
        elif mark in "]}":
            depth -= 1
        elif mark == ",":
            values += 1
    if values > VALUES_MAX:
        raise JsonError(f"holds more than {VALUES_MAX} values")
    try:
        value: Json = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
            object_pairs_hook=_unique,
        )
        if "\\u" in text or not text.isascii():
            json.dumps(value, ensure_ascii=False).encode()
    except JsonError:
        raise
    except UnicodeEncodeError:
        raise JsonError("holds half of a surrogate pair") from None
    except (ValueError, RecursionError):
        raise JsonError("is not JSON") from None
    return value


def parse_object(text: str, *, bytes_max: int = JSON_BYTES_MAX) -> dict[str, Json] | None:
    """The JSON object of a text, or None when it is none."""
    try:
        value = parse(text, bytes_max=bytes_max)
    except JsonError:
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(_: str) -> float:
    raise JsonError("holds a number that JSON does not have")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError("holds a number that is too large")
    return value


def _parse_int(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise JsonError("holds a number that is too large")
    return int(text)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise JsonError("names a property twice")
    return made


# --- schemas ---

_TYPES: Final = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_Shape = Callable[[Json], bool]


def _is_whole(value: Json) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Json) -> bool:
    return type(value) in (int, float)


def _is_text(value: Json) -> bool:
    return isinstance(value, str)


def _is_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Json) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


# The keywords that are applied, by the shape of their values. What is not here is passed over, as
# the standard says of unknown words.
_PLAIN: Final[Mapping[str, _Shape]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "const": lambda _: True,
    "required": _is_names,
    "dependentRequired": lambda value: (
        isinstance(value, dict) and all(_is_names(names) for names in value.values())
    ),
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": _is_number,
    "exclusiveMaximum": _is_number,
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "minLength": _is_whole,
    "maxLength": _is_whole,
    "minItems": _is_whole,
    "maxItems": _is_whole,
    "minContains": _is_whole,
    "maxContains": _is_whole,
    "minProperties": _is_whole,
    "maxProperties": _is_whole,
    "uniqueItems": lambda value: isinstance(value, bool),
    "pattern": _is_text,
    "$ref": _is_text,
}
_ONE: Final = (
    "items",
    "additionalProperties",
    "not",
    "contains",
    "propertyNames",
    "if",
    "then",
    "else",
)
_LIST: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED: Final = ("properties", "$defs", "definitions", "dependentSchemas")
_REFUSED: Final = (
    "patternProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
    "$dynamicAnchor",
)


def check_schema(schema: Mapping[str, Json]) -> str:
    """What is wrong with a schema, or "" when it can be applied: a fixed text that ends a sentence
    beginning with the schema's name. Some ms at most."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        parse(text, bytes_max=SCHEMA_BYTES_MAX)
    except JsonError as error:
        return str(error)
    except (TypeError, ValueError, RecursionError):
        return "is not JSON"
    check = _Check(schema)
    try:
        check.schema(schema)
        check.circles()
    except _SchemaError as error:
        return str(error)
    return ""


class _SchemaError(Exception):
    pass


class _Check:
    """One walk over a schema: each part once, references by their target's existence only."""

    def __init__(self, root: Mapping[str, Json]) -> None:
        self._root = root
        self._parts = 0
        self._patterns = 0
        self._seen: list[Mapping[str, Json]] = []

    def schema(self, schema: Json) -> None:
        self._parts += 1
        if self._parts > SCHEMA_VALUES_MAX:
            raise _SchemaError(f"has more than {SCHEMA_VALUES_MAX} parts")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise _SchemaError("has something else where a schema should be")
        self._seen.append(schema)
        for word, value in schema.items():
            self._keyword(schema, word, value)

    def _keyword(self, schema: Mapping[str, Json], word: str, value: Json) -> None:
        if word in _REFUSED or (word == "$id" and schema is not self._root):
            raise _SchemaError(f"uses {word}, which is not supported")
        shape = _PLAIN.get(word)
        if shape is not None and not shape(value):
            raise _SchemaError(f"has a {word} that the standard does not allow")
        if word == "pattern":
            self._patterns += 1
            if self._patterns > PATTERNS_MAX:
                raise _SchemaError(f"has more than {PATTERNS_MAX} patterns")
            if _pattern(value) is None:
                raise _SchemaError("has a pattern that is not supported")
        elif word == "$ref" and _target(self._root, value) is None:
            raise _SchemaError("has a reference to nothing in itself")
        elif word in _ONE:
            self.schema(value)
        elif word in _LIST:
            if not isinstance(value, list) or not value:
                raise _SchemaError(f"has a {word} that the standard does not allow")
            for part in value:
                self.schema(part)
        elif word in _NAMED:
            if not isinstance(value, Mapping):
                raise _SchemaError(f"has a {word} that the standard does not allow")
            for part in value.values():
                self.schema(part)

    def circles(self) -> None:
        """Refuses a part that applies itself to the very same value, which no value ends. One that
        applies itself to what is inside a value is a tree, and fine."""
        done: set[int] = set()
        for part in self._seen:
            stack = [(part, iter(self._same_value(part)))]
            path = {id(part)}
            while stack:
                last, others = stack[-1]
                other = next(others, None)
                if other is None:
                    stack.pop()
                    path.discard(id(last))
                    done.add(id(last))
                elif id(other) in path:
                    raise _SchemaError("has a reference that leads back to itself")
                elif id(other) not in done:
                    path.add(id(other))
                    stack.append((other, iter(self._same_value(other))))

    def _same_value(self, schema: Mapping[str, Json]) -> list[Mapping[str, Json]]:
        """The parts that a schema applies to the value that it is applied to itself."""
        found: list[Json] = [schema.get(word) for word in ("not", "if", "then", "else")]
        # What a reference points to need not have been walked over.
        for word in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(word)
            found += parts if isinstance(parts, list) else ()
        named = schema.get("dependentSchemas")
        found += named.values() if isinstance(named, Mapping) else ()
        if isinstance(reference := schema.get("$ref"), str):
            found.append(_target(self._root, reference))
        return [part for part in found if isinstance(part, Mapping)]


def _target(root: Mapping[str, Json], reference: str) -> Json | None:
    """What a reference inside a schema points to, or None."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    node: Json = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdecimal() and int(step[:9]) < len(node):
            node = node[int(step[:9])]
        else:
            return None
    return node if isinstance(node, Mapping | bool) else None


_COUNTS = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# As the standard's regular expressions mean them: ASCII. Of all of Unicode they compile 100 times
# more slowly. A class may stand in a class here.
_CLASSES: Final[Mapping[str, str]] = {
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "d": "[0-9]",
    "D": "[^0-9]",
}


@lru_cache(maxsize=1024)
def _pattern(pattern: str) -> SchemaValidator | None:
    """A matcher, or None: too long, too large when compiled, or with look-around or references
    back, which cannot be matched in linear time. Some ms."""
    if len(pattern.encode("utf-8", "replace")) > PATTERN_BYTES_MAX:
        return None
    repeats = 1
    for least, most in _COUNTS.findall(pattern):
        repeats *= max(int(least[:6]), int(most[:6] or 0), 1)
    escapes = _ESCAPED.findall(pattern)
    unicode_classes = escapes.count("p") + escapes.count("P")
    if repeats > REPEATS_MAX or unicode_classes * repeats > UNICODE_CLASSES_MAX:
        return None
    plain = _ESCAPED.sub(lambda match: _CLASSES.get(match.group(1), match.group()), pattern)
    try:
        return SchemaValidator(core_schema.str_schema(pattern=plain, regex_engine="rust-regex"))
    except SchemaError:
        return None


# --- values ---

_left: ContextVar[list[int]] = ContextVar("left")


class _TooMuchWork(Exception):  # noqa: N818  # never leaves this module
    pass


def _spend(work: int) -> None:
    left = _left.get()
    left[0] -= work
    if left[0] < 0:
        raise _TooMuchWork


_Rule = Callable[[Any, Any, Any, Any], Any]


def _counted(rule: _Rule) -> _Rule:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _spend(1 + (len(value) if isinstance(value, list | dict) else 0))
        yield from rule(validator, value, instance, schema) or ()

    return counted


def _apply_pattern(_: Any, value: str, instance: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str):
        _spend(len(instance) // 64)
        matcher = _pattern(value)
        try:
            if matcher is not None:
                matcher.validate_python(instance)
        except MismatchError:
            yield ValidationError("does not match")


def _apply_unique(_: Any, value: bool, instance: Any, __: Any) -> Iterator[ValidationError]:
    if value and isinstance(instance, list):
        _spend(len(instance))
        if len({json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
            yield ValidationError("is not unique")


_Validator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {
        **{word: _counted(rule) for word, rule in Draft202012Validator.VALIDATORS.items()},
        "pattern": _counted(_apply_pattern),
        "uniqueItems": _counted(_apply_unique),
    },
)
# References to elsewhere are refused before; with an empty registry nothing could be fetched.
_NOTHING: Final = Registry()


def validate(schema: Mapping[str, Json], value: Json) -> str:
    """What is wrong with a value, or "" when it is valid. The schema passed ``check_schema``, the
    value ``parse``. The text names what the schema declares and nothing of the value."""
    plain = {word: part for word, part in schema.items() if word not in ("$schema", "$id")}
    token = _left.set([WORK_MAX])
    try:
        errors = list(islice(_Validator(plain, registry=_NOTHING).iter_errors(value), PROBLEMS_MAX))
    except (_TooMuchWork, RecursionError):
        return "it takes too much work to check"
    except (ArithmeticError, ValueError, TypeError):  # numbers at the end of what a float holds
        return "it cannot be checked"
    finally:
        _left.reset(token)
    declared = _declared(plain)
    return "; ".join(dict.fromkeys(_told(error, declared) for error in errors))


def _declared(schema: Json) -> set[str]:
    """The names of all properties that a schema declares."""
    names: set[str] = set()
    parts: list[Json] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            properties = part.get("properties")
            if isinstance(properties, Mapping):
                names.update(properties)
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return names


def _told(error: ValidationError, declared: set[str]) -> str:
    path = ""
    for step in error.absolute_path:
        known = isinstance(step, int) or step in declared
        path += f"[{step}]" if isinstance(step, int) else f".{step if known else '?'}"
    where = f'"{path.lstrip(".")}"' if path else "it"
    word = str(error.validator)
    rule: Json = error.validator_value
    instance: Json = error.instance
    if word == "required":
        missing = [name for name in rule if name not in instance]
        return f'{where} needs "{missing[0]}"' if missing else f"{where} misses a property"
    if word == "type":
        return f"{where} must be of type {' or '.join(_texts(rule))}"
    if word in ("enum", "const"):
        values = rule if word == "enum" else [rule]
        return f"{where} must be one of {_listed(values)}"
    if word in _BOUNDS and _is_number(rule):
        return f"{where} must be {_BOUNDS[word]} {rule}"
    if word == "additionalProperties":
        return f"{where} has a property that is not declared"
    if error.schema is False:  # jsonschema gives no path for it
        return f"{where} has a value where none may be"
    return f"{where} does not follow {word}"


_BOUNDS: Final[Mapping[str, str]] = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
    "minLength": "in characters at least",
    "maxLength": "in characters at most",
    "minItems": "in items at least",
    "maxItems": "in items at most",
}


def _texts(value: Json) -> Sequence[str]:
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _listed(values: Sequence[Json]) -> str:
    text = ", ".join(json.dumps(value, ensure_ascii=False) for value in values)
    return text if len(text) <= LISTED_CHARS_MAX else text[:LISTED_CHARS_MAX] + "..."
