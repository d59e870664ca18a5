"""Declarations of tools: how a table becomes one, and what is refused by which field."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from sluice.agent.v1 import tools_pb2
from sluice.config import ConfigError
from sluice.errors import SluiceError
from sluice.tool_declarations import parse
from sluice.tool_rules import check

HTTP = """
name = "order_status"
description = "The state of an order."
effect = "idempotent"
timeout_s = 2.5
output_bytes_max = 1000
preview_bytes = 100
needs_approval = true
[http]
method = "POST"
url = "https://orders.example.org/v1/orders/{number}"
parameters.type = "object"
parameters.properties.number.type = "integer"
parameters.required = ["number"]
secret_headers = { authorization = "TOOL_SECRET_ORDERS" }
idempotency_header = "idempotency-key"
[egress]
hosts = ["orders.example.org"]
private_allowed = ["127.0.0.1:9000"]
"""


ALLOWED = {"egress": {"hosts": ["a.example"]}}
GET = {"method": "GET", "url": "https://a.example"}


def parsed(text: str) -> tools_pb2.ToolDeclaration:
    return parse(tomllib.loads(text), "tool[0]")


def made(**fields: Any) -> tools_pb2.ToolDeclaration:
    """A calculator but for what is given."""
    fields = {"name": "t", "description": "d", "calculator": {}, **fields}
    if fields.keys() & {"http", "openapi", "sql", "mcp", "retrieval"}:
        del fields["calculator"]
    return parse(fields, "tool[0]")


def test_a_table_becomes_the_declaration_that_it_says() -> None:
    tool = parsed(HTTP)
    assert (tool.name, tool.effect) == ("order_status", tools_pb2.TOOL_EFFECT_IDEMPOTENT)
    assert tool.timeout.ToMilliseconds() == 2500
    assert (tool.output_bytes_max, tool.preview_bytes, tool.needs_approval) == (1000, 100, True)
    assert json.loads(tool.http.parameters_json)["properties"] == {"number": {"type": "integer"}}
    assert dict(tool.http.secret_headers) == {"authorization": "TOOL_SECRET_ORDERS"}
    assert list(tool.egress.private_allowed) == ["127.0.0.1:9000"]


def test_a_kind_without_settings_is_an_empty_table() -> None:
    assert made().WhichOneof("kind") == "calculator"
    assert made().effect == tools_pb2.TOOL_EFFECT_UNSPECIFIED


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"name": "has space"}, "name"),
        ({"name": "a__b"}, "name"),
        ({"name": 3}, "name"),
        ({"description": ""}, "description"),
        ({"description": "x" * 4097}, "description"),
        ({"effect": "sometimes"}, "effect"),
        ({"effect": "unspecified"}, "effect"),
        ({"timeout_s": 0}, "timeout"),
        ({"timeout_s": 3601}, "timeout"),
        ({"timeout_s": "2s"}, "timeout_s"),
        ({"timeout": "2s"}, "timeout"),
        ({"output_bytes_max": (4 << 20) + 1}, "output_bytes_max"),
        ({"output_bytes_max": -1}, "output_bytes_max"),
        ({"output_bytes_max": True}, "output_bytes_max"),
        ({"output_bytes_max": 10, "preview_bytes": 11}, "preview_bytes"),
        ({"needs_approval": "yes"}, "needs_approval"),
        ({"colour": "red"}, "colour"),
        ({"calculator": {"digits": 3}}, "calculator.digits"),
        ({"http": {"method": "get", "url": "https://a.example"}}, "http.method"),
        ({"http": {"method": "GET", "url": "ftp://a.example"}}, "http.url"),
        ({"http": {"method": "GET", "url": "https://user:x@a.example"}}, "http.url"),
        ({"http": {"method": "GET", "url": "https://[::1"}}, "http.url"),
        (
            {**ALLOWED, "http": {**GET, "parameters_json": "[]"}},
            "http.parameters_json",
        ),
        ({"http": {"secret_headers": {"a": 1}}}, "http.secret_headers.a"),
        ({"openapi": {}}, "openapi.document"),
        ({"sql": {"url": "postgres://x"}}, "sql.url"),
        ({"mcp": {}}, "mcp.url"),
        ({"mcp": {"url": "https://a.example", "command": ["x"]}}, "mcp.url"),
        ({"mcp": {"command": "x"}}, "mcp.command"),
        ({"retrieval": {"collection": "a b"}}, "retrieval.collection"),
        ({"retrieval": {"collection": "a", "top_k": 21}}, "retrieval.top_k"),
        ({"egress": {"hosts": ["a"] * 65}}, "egress.hosts"),
        ({"egress": ["a"]}, "egress"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**fields)
    assert refused.value.where == f"tool[0].{where}"


def test_a_tool_of_no_kind_is_refused_and_the_kinds_are_named() -> None:
    with pytest.raises(ConfigError, match="http, openapi, sql, mcp, retrieval, calculator, clock"):
        parse({"name": "a", "description": "d"}, "tool[0]")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"sql": {"url": "sqlite:///a.db"}}, "sql.url"),
        ({"mcp": {"command": ["server"]}}, "mcp.command"),
        ({"egress": {"private_allowed": ["10.0.0.0/8"]}}, "egress.private_allowed"),
    ],
)
def test_what_reaches_this_machine_is_for_the_configuration_only(
    fields: dict[str, Any], where: str
) -> None:
    tool = made(**fields)
    with pytest.raises(SluiceError) as refused:
        check(tool, "tool", configured=False)
    assert refused.value.reason == "TOOL_FIELD_NOT_ALLOWED"
    assert [one.field for one in refused.value.fields] == [f"tool.{where}"]
