"""Declarations of tools: how they are written in TOML. What makes one wrong is in tool_rules.py.

A table holds the fields of `sluice.agent.v1.ToolDeclaration` under their own names, except that a
time is a number of seconds with `_s` at its name, the effect is `read`, `idempotent` or `once`, and
a schema may be a table (`parameters`) instead of JSON text (`parameters_json`). The kind is a
table:

    [[tool]]
    name = "order_status"
    description = "The state of an order, by its number."
    effect = "read"
    timeout_s = 10
    http = { method = "GET", url = "https://orders.example.org/v1/orders/{number}" }
    egress = { hosts = ["orders.example.org"] }

Pure. Used for `[[tool]]` in sluice.toml and for what operators register for a tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from sluice.agent.v1 import tools_pb2
from sluice.config import ConfigError
from sluice.errors import SluiceError
from sluice.tool_rules import check

_EFFECT: Final = "TOOL_EFFECT_"
_SECONDS: Final = "_s"
_SCHEMA: Final = "parameters"


def parse(table: Mapping[str, object], where: str) -> tools_pb2.ToolDeclaration:
    """The declaration in a table of the configuration. Raises ConfigError, which names the field
    below `where`."""
    tool = tools_pb2.ToolDeclaration()
    _fill(tool, table, where)
    try:
        check(tool, where, configured=True)
    except SluiceError as error:
        wrong = error.fields[0]
        raise ConfigError(wrong.field, wrong.description) from None
    return tool


def read_table(table: Mapping[str, object], where: str) -> tools_pb2.ToolDeclaration:
    """The same without judging it: that is for whom it is sent to. Raises ConfigError for a field
    that does not exist or has another type. `where` may be empty."""
    tool = tools_pb2.ToolDeclaration()
    _fill(tool, table, where)
    return tool


def _fill(message: Message, table: Mapping[str, object], where: str) -> None:
    for key, value in table.items():
        here = f"{where}.{key}" if where else key
        if key == _SCHEMA and isinstance(value, Mapping):
            key, value = f"{_SCHEMA}_json", json.dumps(value)
        known = message.DESCRIPTOR.fields_by_name
        name = key.removesuffix(_SECONDS) if key not in known and key.endswith(_SECONDS) else key
        field = known.get(name)
        is_time = field is not None and field.message_type is Duration.DESCRIPTOR
        if field is None or is_time == (name == key):
            raise ConfigError(here, "there is no such field")
        if is_time:
            getattr(message, name).FromNanoseconds(int(_number(value, here) * 1e9))
        else:
            _set(message, field, value, here)


def _set(message: Message, field: Any, value: object, where: str) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = _typed(value, Mapping, where, "a table of strings")
        for name, text in entries.items():
            getattr(message, field.name)[name] = _typed(text, str, f"{where}.{name}", "a string")
    elif field.message_type is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        _fill(part, _typed(value, Mapping, where, "a table"), where)
    elif field.enum_type is not None:
        word = _EFFECT + _typed(value, str, where, "a string").upper()
        number = field.enum_type.values_by_name.get(word)
        if number is None or not number.number:
            raise ConfigError(where, f"{value!r} must be one of read, idempotent, once")
        setattr(message, field.name, number.number)
    elif field.is_repeated:
        texts = _typed(value, list, where, "a list of strings")
        getattr(message, field.name).extend(_typed(one, str, where, "a string") for one in texts)
    else:
        _set_scalar(message, field, value, where)


def _set_scalar(message: Message, field: Any, value: object, where: str) -> None:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        setattr(message, field.name, _typed(value, str, where, "a string"))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        setattr(message, field.name, _typed(value, bool, where, "true or false"))
    else:
        number = _typed(value, int, where, "a whole number")
        try:
            setattr(message, field.name, number)
        except ValueError:
            raise ConfigError(where, f"{number} is out of range") from None


def _typed(value: object, kind: Any, where: str, words: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(where, f"{value!r} must be {words}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(where, f"{value!r} must be a number of seconds")
    return value
