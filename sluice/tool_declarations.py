"""Declarations of tools: how they are written in TOML, and what makes one wrong.

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
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from sluice.agent.v1 import tools_pb2
from sluice.config import ConfigError

NAME_PATTERN: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
COLLECTION_PATTERN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
JOINT: Final = "__"
"""Between the name of a server or document and that of one of its tools."""

DESCRIPTION_BYTES_MAX: Final = 4096
DOCUMENT_BYTES_MAX: Final = 1 << 20
SCHEMA_BYTES_MAX: Final = 64 << 10
OUTPUT_BYTES_MAX: Final = 64 << 20
TIMEOUT_MAX_S: Final = 3600.0
TOP_K_MAX: Final = 20
HOSTS_MAX: Final = 64
SQLITE: Final = "sqlite:///"
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")

_EFFECT: Final = "TOOL_EFFECT_"
_SECONDS: Final = "_s"
_SCHEMA: Final = "parameters"

Problem = tuple[str, str]
"""A field of the declaration, and what is wrong with it."""


def parse(table: Mapping[str, object], where: str) -> tools_pb2.ToolDeclaration:
    """The declaration in a table of the configuration. Raises ConfigError, which names the field
    below `where`."""
    tool = tools_pb2.ToolDeclaration()
    _fill(tool, table, where)
    for field, problem in problems(tool, configured=True):
        raise ConfigError(f"{where}.{field}", problem)
    return tool


def read_table(table: Mapping[str, object], where: str) -> tools_pb2.ToolDeclaration:
    """The same without judging it: that is for whom it is sent to. Raises ConfigError for a field
    that does not exist or has another type."""
    tool = tools_pb2.ToolDeclaration()
    _fill(tool, table, where)
    return tool


def problems(tool: tools_pb2.ToolDeclaration, *, configured: bool) -> Iterator[Problem]:
    """What is wrong with a declaration. Unless it is from the configuration it may reach nothing of
    the machine: no program, no database file, no private address."""
    if not NAME_PATTERN.fullmatch(tool.name) or JOINT in tool.name:
        yield "name", f"must be [a-zA-Z0-9_-], 1 to 64 characters, without {JOINT}"
    if not tool.description or len(tool.description.encode()) > DESCRIPTION_BYTES_MAX:
        yield "description", f"must have 1 to {DESCRIPTION_BYTES_MAX} bytes: the model reads it"
    if tool.effect not in tools_pb2.ToolEffect.values():
        yield "effect", "is not a known effect"
    if tool.HasField("timeout") and not 0 < _seconds(tool.timeout) <= TIMEOUT_MAX_S:
        yield "timeout", f"must be more than 0 and at most {TIMEOUT_MAX_S:.0f} s"
    if tool.output_bytes_max > OUTPUT_BYTES_MAX:
        yield "output_bytes_max", f"must be at most {OUTPUT_BYTES_MAX}"
    if tool.output_bytes_max and tool.preview_bytes > tool.output_bytes_max:
        yield "preview_bytes", "must not be more than output_bytes_max"
    if len(tool.egress.hosts) > HOSTS_MAX:
        yield "egress.hosts", f"has {len(tool.egress.hosts)} entries; at most {HOSTS_MAX}"
    if tool.egress.private_allowed and not configured:
        yield "egress.private_allowed", "may be set in the configuration only"
    kind = tool.WhichOneof("kind")
    if kind is None:
        yield "kind", "is not set: one of " + ", ".join(_kinds()) + " is needed"
    else:
        for field, problem in _of_kind(tool, configured):
            yield f"{kind}.{field}", problem


def _of_kind(tool: tools_pb2.ToolDeclaration, configured: bool) -> Iterator[Problem]:
    match tool.WhichOneof("kind"):
        case "http":
            yield from _http(tool.http)
        case "openapi":
            yield from _openapi(tool.openapi)
        case "sql":
            yield from _sql(tool.sql, configured)
        case "mcp":
            yield from _mcp(tool.mcp, configured)
        case "retrieval":
            yield from _retrieval(tool.retrieval)


def _http(http: tools_pb2.HttpTool) -> Iterator[Problem]:
    if http.method not in METHODS:
        yield "method", "must be one of " + ", ".join(METHODS)
    yield from _url(http.url, "url")
    if http.parameters_json:
        yield from _schema(http.parameters_json)


def _openapi(openapi: tools_pb2.OpenApiTool) -> Iterator[Problem]:
    if not 0 < len(openapi.document.encode()) <= DOCUMENT_BYTES_MAX:
        yield "document", f"must have 1 to {DOCUMENT_BYTES_MAX} bytes"
    if openapi.base_url:
        yield from _url(openapi.base_url, "base_url")


def _sql(sql: tools_pb2.SqlTool, configured: bool) -> Iterator[Problem]:
    if not configured:
        yield "url", "may be set in the configuration only"
    elif not sql.url.startswith(SQLITE) or sql.url == SQLITE:
        yield "url", f"must be {SQLITE}PATH"


def _mcp(mcp: tools_pb2.McpTool, configured: bool) -> Iterator[Problem]:
    if mcp.command and not configured:
        yield "command", "may be set in the configuration only"
    if bool(mcp.url) == bool(mcp.command):
        yield "url", "exactly one of url and command is needed"
    elif mcp.url:
        yield from _url(mcp.url, "url")


def _retrieval(retrieval: tools_pb2.RetrievalTool) -> Iterator[Problem]:
    if not COLLECTION_PATTERN.fullmatch(retrieval.collection):
        yield "collection", "must be [A-Za-z0-9_-], 1 to 64 characters"
    if retrieval.top_k > TOP_K_MAX:
        yield "top_k", f"must be at most {TOP_K_MAX}"


def _url(text: str, field: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and parts.username is None and (parts.port or 1) > 0
    except ValueError:  # a bracket that is not closed, a port that is no number
        good = False
    if not good:
        yield field, "must be http://HOST... or https://HOST... without a user"


def _schema(text: str) -> Iterator[Problem]:
    if len(text.encode()) > SCHEMA_BYTES_MAX:
        yield "parameters_json", f"has more than {SCHEMA_BYTES_MAX} bytes"
        return
    try:
        schema = json.loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        yield "parameters_json", 'must be a JSON schema with "type": "object"'


def _kinds() -> list[str]:
    return [one.name for one in tools_pb2.ToolDeclaration.DESCRIPTOR.oneofs_by_name["kind"].fields]


def _seconds(value: Duration) -> float:
    return value.seconds + value.nanos * 1e-9


def _fill(message: Message, table: Mapping[str, object], where: str) -> None:
    for key, value in table.items():
        here = f"{where}.{key}"
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
