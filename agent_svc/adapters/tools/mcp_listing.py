"""What an MCP server offers, checked before a model may see it.

A listing comes from a stranger: counts, sizes and depths are bounded, and what does not fit is left
out with the reason, never cut into something else. Only regular expressions that cannot be matched
in bounded time are taken out of a schema: the server checks its arguments itself. Annotations
(readOnlyHint and the like) are hints of the server about itself and are not looked at.

Pure functions; some milliseconds for a large listing, so callers run them in a thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mcp_types import Tool

from sluice.json_schemas import check_schema

TOOLS_MAX: Final = 128
NAME_CHARS_MAX: Final = 64
DESCRIPTION_BYTES_MAX: Final = 4096

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_EXPRESSIONS = ("pattern", "patternProperties")
# Keywords whose value maps names to schemas, so that its keys are no keywords.
_NAMED = ("properties", "$defs", "definitions", "dependentSchemas")
# Keywords whose value is data, not a schema.
_DATA = ("const", "default", "enum", "examples")


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool of a server. ``name``: for models, ``declaration__tool``; ``remote``: for the server.
    ``problem``: why it is left out; empty when it is not."""

    name: str
    remote: str
    description: str
    parameters: Mapping[str, Any]
    problem: str = ""


def check_listing(declaration: str, tools: Sequence[Tool], wanted: Sequence[str]) -> list[Listed]:
    """The server's tools in its order. ``wanted``: names as the server knows them; empty: all."""
    offered = [tool for tool in tools if not wanted or tool.name in wanted]
    found = [_check(declaration, tool) for tool in offered[:TOOLS_MAX]]
    missing = sorted(set(wanted) - {tool.name for tool in tools})
    found += [_left_out(declaration, name, "the server does not offer it") for name in missing]
    if len(offered) > TOOLS_MAX:
        problem = f"the server offers more than {TOOLS_MAX} tools"
        found.append(_left_out(declaration, offered[TOOLS_MAX].name, problem))
    seen: set[str] = set()
    result = []
    for one in found:
        if one.name in seen:
            one = _left_out(declaration, one.remote, "another tool has this name")
        seen.add(one.name)
        result.append(one)
    return result


def model_name(declaration: str, remote: str) -> str:
    """The name for models; characters that models may not use in names become ``_``."""
    return f"{declaration}__{_NOT_IN_NAMES.sub('_', remote)}"


def _left_out(declaration: str, remote: str, problem: str) -> Listed:
    name = model_name(declaration, remote)[:NAME_CHARS_MAX]
    return Listed(name, remote, "", {}, problem)


def _check(declaration: str, tool: Tool) -> Listed:
    name = model_name(declaration, tool.name)
    if not tool.name or len(name) > NAME_CHARS_MAX:
        problem = f"its name is empty or longer than {NAME_CHARS_MAX} characters"
        return _left_out(declaration, tool.name, problem)
    description = tool.description or tool.title or ""
    if len(description.encode()) > DESCRIPTION_BYTES_MAX:
        problem = f"its description is longer than {DESCRIPTION_BYTES_MAX} bytes"
        return _left_out(declaration, tool.name, problem)
    schema = tool.input_schema
    problem = _schema_problem(schema)
    if problem:
        schema = _without_expressions(schema)
        problem = _schema_problem(schema)
    if problem:
        return _left_out(declaration, tool.name, f"its schema {problem}")
    return Listed(name, tool.name, description, schema)


def _schema_problem(schema: Mapping[str, Any]) -> str:
    if problem := check_schema(schema):
        return problem
    return "" if schema.get("type") == "object" else "is not one of an object"


def _without_expressions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_expressions(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _EXPRESSIONS:
            continue
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: _without_expressions(inner) for name, inner in value.items()}
        else:
            kept[key] = value if key in _DATA else _without_expressions(value)
    return kept
