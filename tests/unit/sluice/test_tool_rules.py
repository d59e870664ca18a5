"""What a declaration of a tool must be, and what only the configuration may declare.

Mutants: registered_tool_may_open_private_addresses, secret_variables_are_any,
url_at_a_private_address.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.egress_rules import parse_private
from sluice.errors import Code, SluiceError
from sluice.tool_rules import (
    check,
    output_bytes_max,
    parameters_of,
    preview_bytes,
    timeout_s,
)

SCHEMA = json.dumps(
    {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
)
HTTP: dict[str, Any] = {
    "method": "GET",
    "url": "https://api.example.org/v1/{id}?x={id}",
    "parametersJson": SCHEMA,
    "secretHeaders": {"Authorization": "TOOL_SECRET_API"},
    "idempotencyHeader": "Idempotency-Key",
}
EGRESS: dict[str, Any] = {"hosts": ["api.example.org"]}


def tool(**fields: Any) -> ToolDeclaration:
    base = {"name": "t", "description": "d", "effect": "TOOL_EFFECT_READ"}
    return ParseDict({**base, **fields}, ToolDeclaration())


def refused(one: ToolDeclaration, configured: bool = False) -> SluiceError:
    with pytest.raises(SluiceError) as error:
        check(one, "tool[3]", configured=configured)
    assert error.value.code is Code.INVALID_ARGUMENT
    return error.value


@pytest.mark.parametrize(
    "one",
    [
        tool(http=HTTP, egress=EGRESS),
        tool(openapi={"document": "{}", "baseUrl": "https://api.example.org"}, egress=EGRESS),
        tool(mcp={"url": "https://api.example.org/mcp"}, egress=EGRESS),
        tool(retrieval={"collection": "a"}),
        tool(calculator={}),
        tool(clock={}),
    ],
)
def test_what_is_right_is_taken_registered_and_configured(one: ToolDeclaration) -> None:
    check(one, configured=False)
    check(one, configured=True)


@pytest.mark.parametrize(
    ("one", "field"),
    [
        (tool(sql={"url": "sqlite:///a.db"}), "sql.url"),
        (tool(mcp={"command": ["a", "b"]}), "mcp.command"),
        (
            tool(http=HTTP, egress={**EGRESS, "privateAllowed": ["10.0.0.0/8"]}),
            "egress.private_allowed",
        ),
        (tool(clock={}, egress={"privateAllowed": ["127.0.0.1:80"]}), "egress.private_allowed"),
    ],
)
def test_what_belongs_to_the_machine_is_for_the_configuration_only(
    one: ToolDeclaration, field: str
) -> None:
    check(one, configured=True)
    error = refused(one)
    assert error.reason == "TOOL_FIELD_NOT_ALLOWED"
    assert [violation.field for violation in error.fields] == [f"tool[3].{field}"]


PRIVATE_HOSTS = (
    *("127.0.0.1", "127.8.8.8", "10.0.0.5", "192.168.1.1", "172.16.0.9", "100.64.0.1"),
    *("169.254.1.1", "169.254.169.254", "0.0.0.0", "[::1]", "[fd00::1]", "[fe80::1]"),
    *("localhost", "LOCALHOST", "db.localhost", "[::ffff:127.0.0.1]"),
)


def at(host: str, **more: Any) -> list[tuple[ToolDeclaration, str]]:
    """A tool of each kind that has a URL, at this host, and the URL's field."""
    place = f"{host}:8443"
    egress = {"hosts": [place], **more}
    url = f"https://{place}/x"
    return [
        (tool(http={"method": "GET", "url": url}, egress=egress), "http.url"),
        (tool(openapi={"document": "{}", "baseUrl": url}, egress=egress), "openapi.base_url"),
        (tool(mcp={"url": url}, egress=egress), "mcp.url"),
    ]


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
@pytest.mark.parametrize("configured", [False, True])
def test_a_url_at_a_private_address_is_refused_where_nothing_opens_it(
    host: str, configured: bool
) -> None:
    """Before any call: at the registration, and at the start of the agent service."""
    for one, field in at(host):
        error = refused(one, configured)
        assert [violation.field for violation in error.fields] == [f"tool[3].{field}"]
        assert "only tools of sluice.toml may reach private addresses" in error.message


@pytest.mark.parametrize(
    ("host", "allowed"),
    [("10.0.0.5", "10.0.0.0/24"), ("[fd00::1]", "fd00::/64"), ("localhost", "localhost:8443")],
)
def test_what_the_configuration_or_the_operator_opens_is_taken(host: str, allowed: str) -> None:
    for one, _ in at(host, privateAllowed=[allowed]):
        check(one, configured=True)
    for one, _ in at(host):
        check(one, configured=False, private=[parse_private(allowed)])
        refused(one)


@pytest.mark.parametrize("host", ["169.254.169.254", "[::ffff:10.0.0.5]", "10.0.1.5", "127.0.0.1"])
def test_an_operators_networks_open_nothing_else(host: str) -> None:
    opened = [parse_private("10.0.0.0/24"), parse_private("crm.internal:8443")]
    opened.append(parse_private("169.254.0.0/16"))
    for one, _ in at(host):
        with pytest.raises(SluiceError):
            check(one, configured=False, private=opened)


def http(**fields: Any) -> ToolDeclaration:
    return tool(http={**HTTP, **fields}, egress=EGRESS)


@pytest.mark.parametrize(
    ("one", "field"),
    [
        (tool(), ""),
        (tool(name="a__b", clock={}), ".name"),
        (tool(name="", clock={}), ".name"),
        (tool(name="a b", clock={}), ".name"),
        (tool(description="", clock={}), ".description"),
        (tool(timeout="3601s", clock={}), ".timeout"),
        (tool(timeout="0s", clock={}), ".timeout"),
        (tool(outputBytesMax=5 << 20, clock={}), ".output_bytes_max"),
        (tool(outputBytesMax=9, previewBytes=10, clock={}), ".preview_bytes"),
        (tool(previewBytes=1 << 20, clock={}), ".preview_bytes"),
        (tool(http=HTTP), ".http.url"),
        (tool(http=HTTP, egress={"hosts": ["a.org", "http://b"]}), ".egress.hosts[1]"),
        (http(url="https://{id}.example.org/"), ".http.url"),
        (http(url="https://api.example.org:8443/"), ".http.url"),
        (http(url="https://api.example.org@evil.org/{id}"), ".http.url"),
        (http(url="https://api.example.org/{other}"), ".http.url"),
        (http(url="https://api.example.org/{id}}"), ".http.url"),
        (http(url="https://api.example.org/{id}#x"), ".http.url"),
        (http(url="https://api.example.org/ {id}"), ".http.url"),
        (http(url="file:///etc/passwd"), ".http.url"),
        (http(method="TRACE"), ".http.method"),
        (http(parametersJson="{"), ".http.parameters_json"),
        (http(parametersJson='{"type": "string"}'), ".http.parameters_json"),
        (http(parametersJson="[" * 5000), ".http.parameters_json"),
        (http(secretHeaders={"A": "PATH"}), ".http.secret_headers"),
        (http(secretHeaders={"A": "SLUICE_STATE_DURABLE_URL"}), ".http.secret_headers"),
        (http(secretHeaders={"A": "TOOL_SECRET_"}), ".http.secret_headers"),
        (http(secretHeaders={"Host": "TOOL_SECRET_A"}), ".http.secret_headers"),
        (http(secretHeaders={"a\r\nb": "TOOL_SECRET_A"}), ".http.secret_headers"),
        (http(idempotencyHeader="Content-Length"), ".http.idempotency_header"),
        (tool(sql={"url": "sqlite:///a?mode=rw"}), ".sql.url"),
        (tool(openapi={"document": ""}), ".openapi.document"),
        (tool(openapi={"document": "x" * ((1 << 20) + 1)}), ".openapi.document"),
        (tool(mcp={}), ".mcp.url"),
        (tool(mcp={"url": "https://evil.org"}, egress=EGRESS), ".mcp.url"),
        (tool(retrieval={"collection": "../a"}), ".retrieval.collection"),
        (tool(retrieval={"collection": "a", "topK": 21}), ".retrieval.top_k"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(one: ToolDeclaration, field: str) -> None:
    configured = one.WhichOneof("kind") == "sql"
    error = refused(one, configured)
    assert [violation.field for violation in error.fields] == [f"tool[3]{field}"]


def test_limits_that_are_not_set_have_their_defaults() -> None:
    one = tool(clock={})
    assert (timeout_s(one), output_bytes_max(one), preview_bytes(one)) == (30.0, 1 << 20, 8192)
    small = tool(clock={}, outputBytesMax=100, timeout="2.5s")
    assert (timeout_s(small), output_bytes_max(small), preview_bytes(small)) == (2.5, 100, 100)


def test_a_tool_without_parameters_takes_none() -> None:
    assert parameters_of("", "f")["additionalProperties"] is False
