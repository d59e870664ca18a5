"""No tool that takes a URL reaches an internal address, whoever declares or calls it.

Goal: a tenant's declaration, its OpenAPI document or a model's arguments open nothing that is not
public. Method: every form of internal address as the URL of every kind of tool, with the egress
list that an attacker would write, names that resolve to loopback; then real calls. Oracle: the
canaries on loopback saw no connection, and each try ended with a typed refusal. Deterministic.

Mutants: egress_address_not_checked, template_argument_not_encoded, redirect_is_a_result,
once_reuses_connections, any_charset, operators_networks_stay_closed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from google.protobuf.json_format import ParseDict

from agent_svc.adapters.egress import EgressGuard
from agent_svc.adapters.toolbox import Tools
from agent_svc.adapters.tools.factory import Sources
from agent_svc.adapters.tools.mcp_servers import McpServers
from agent_svc.adapters.tools.run_tools import RunTools
from agent_svc.adapters.tools.runner import Runner
from agent_svc.ports import ChunkFound, ToolContext, ToolError
from sluice import tool_rules
from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.egress_rules import PrivateRule, parse_host, parse_private
from sluice.errors import SluiceError
from tests.fakes import FixedRights
from tests.security.http_server import Answer, HttpServer, canaries, endless, fixed, serving, silent
from tests.security.test_egress import NO_TLS, forms

CONTEXT = ToolContext("t", "run", "run:1", 5.0)
SECRET = "canary-5ecret-7731"


class Loopback:
    """Every name is loopback: the resolver of an attacker, or of a careless network."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1", "::1"]


class Store:
    def __init__(self, *tools: ToolDeclaration) -> None:
        self.tools = tools

    async def registered(self, tenant: str) -> Sequence[ToolDeclaration]:
        return self.tools

    async def search(self, *_: Any, **__: Any) -> Sequence[ChunkFound]:
        return []


def declaration(name: str = "x", **fields: Any) -> ToolDeclaration:
    base: dict[str, Any] = {"name": name, "description": "d", "effect": "TOOL_EFFECT_READ"}
    return ParseDict({**base, **fields}, ToolDeclaration())


@asynccontextmanager
async def box(
    configured: Sequence[ToolDeclaration] = (),
    registered: Sequence[ToolDeclaration] = (),
    private: Sequence[PrivateRule] = (),
    **runner: Any,
) -> AsyncIterator[Tools]:
    store = Store(*registered)
    guard = EgressGuard(Loopback(), NO_TLS)
    environ = {"TOOL_SECRET_API": f"Bearer {SECRET}"}
    servers = McpServers(guard, environ, Path(), private)
    sources = Sources(
        guard,
        store,
        environ=environ,
        root=Path(),
        mcp=servers.server,
        registered_private=private,
    )
    tools = Tools(configured, sources, Runner(**runner), store, private)
    try:
        yield tools
    finally:
        await tools.close()
        await servers.close()
        guard.close()


def hosts_of(url: str) -> list[str]:
    """What an attacker would put onto the egress list for this URL, in every form."""
    try:
        parts = urlsplit(url)
        name = parts.hostname or ""
        port = parts.port
    except ValueError:
        return ["api.example.org"]
    host = f"[{name}]" if ":" in name else name
    wanted = [host, f"{host}:{port}", "api.example.org", f"api.example.org:{port}"]
    return [one for one in wanted if _is_host(one)]


def _is_host(text: str) -> bool:
    try:
        parse_host(text)
    except ValueError:
        return False
    return True


def kinds(url: str) -> list[ToolDeclaration]:
    """The same URL in every place where one can stand."""
    egress = {"hosts": hosts_of(url)}
    document = {
        "openapi": "3.1.0",
        "servers": [{"url": url}],
        "paths": {"/": {"get": {"operationId": "get"}}},
    }
    text = json.dumps(document)
    return [
        declaration(http={"method": "GET", "url": url}, egress=egress),
        declaration(openapi={"document": text}, egress=egress),
        declaration(openapi={"document": text, "baseUrl": url}, egress=egress),
        declaration(mcp={"url": url}, egress=egress),
    ]


def _is_taken(one: ToolDeclaration) -> bool:
    try:
        tool_rules.check(one, configured=False)
    except SluiceError:
        return False
    return True


async def _refusals(tools: Tools) -> int:
    """How many tools the declaration gave; each refuses its call."""
    try:
        found = await tools.resolve("t", ["x"])
    except SluiceError:
        return 0
    for tool in found:
        with pytest.raises(ToolError) as failed:
            await tool.call({}, CONTEXT)
        assert failed.value.reason == "EGRESS_REFUSED"
    return len(found)


async def test_no_declaration_of_a_tenant_reaches_loopback() -> None:
    refused = called = 0
    async with canaries("127.0.0.1", "::1") as listeners:
        for listener in listeners:
            for url in forms(listener.port):
                for one in kinds(url):
                    refused += not _is_taken(one)
                    async with box(registered=[one]) as tools:  # as if it had been stored
                        called += await _refusals(tools)
        assert [listener.connections for listener in listeners] == [0, 0]
    # Both ways to be refused were taken: by the declaration, and at the connection.
    assert refused > 100
    assert called > 20


async def test_an_operator_opens_exactly_what_is_named_to_registered_tools() -> None:
    """`mesh.registered_private_allowed`: an on-premises server is reached, its neighbour is not."""
    async with serving({"/": fixed()}) as server, canaries("127.0.0.1") as (canary,):
        named = f"api.example.org:{server.port}"  # resolves to loopback, as every name here
        for place, opened in (
            (f"127.0.0.1:{server.port}", f"127.0.0.1:{server.port}"),
            (f"127.0.0.1:{server.port}", "127.0.0.0/30"),
            (named, "127.0.0.1/32"),
        ):
            rules = [parse_private(opened), parse_private("::1/128")]
            one = declaration(
                http={"method": "GET", "url": f"http://{place}/"}, egress={"hosts": [place]}
            )
            async with box(registered=[one], private=rules) as tools:
                (tool,) = await tools.resolve("t", ["x"])
                before = len(server.asked)
                await tool.call({}, CONTEXT)
                assert len(server.asked) == before + 1
        only = [parse_private(f"127.0.0.1:{server.port}")]
        for url in forms(canary.port):
            for one in kinds(url):
                async with box(registered=[one], private=only) as tools:
                    await _refusals(tools)
        assert canary.connections == 0


@asynccontextmanager
async def allowed(
    answers: dict[str, Answer], url: str = "/", **http: Any
) -> AsyncIterator[tuple[Tools, HttpServer]]:
    """A configured tool that may reach one server on loopback."""
    async with serving(answers) as server:
        place = f"api.example.org:{server.port}"
        fields = {"method": "GET", "url": f"http://{place}{url}", **http}
        one = declaration(
            http=fields,
            egress={"hosts": [place], "privateAllowed": ["127.0.0.1/32", "::1/128"]},
            outputBytesMax=100_000,
            timeout="2s",
        )
        async with box([one]) as tools:
            yield tools, server


async def fail(tools: Tools, arguments: dict[str, Any] | None = None) -> ToolError:
    (tool,) = await tools.resolve("t", ["x"])
    with pytest.raises(ToolError) as failed:
        await tool.call(arguments or {}, CONTEXT)
    return failed.value


IDS = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "q": {"type": "string"}},
    "required": ["id"],
}


async def test_no_argument_of_a_model_changes_host_path_or_headers() -> None:
    async with canaries("127.0.0.1") as (canary,):
        parameters = {"parametersJson": json.dumps(IDS)}
        async with allowed({}, "/v1/items/{id}/x", **parameters) as (tools, server):
            (tool,) = await tools.resolve("t", ["x"])
            for text in (
                f"@127.0.0.1:{canary.port}/",
                f"//127.0.0.1:{canary.port}/",
                f"http://127.0.0.1:{canary.port}/",
                "../../admin",
                "..%2f..%2fadmin",
                "a?admin=1#",
                "a\r\nHost: evil.org\r\nX: ",
                "a HTTP/1.1\r\n\r\nGET /admin",
                "\\\\evil.org\\x",
                "%0d%0aHost:%20evil.org",
            ):
                before = len(server.asked)
                await tool.call({"id": text, "q": text}, CONTEXT)
                (asked,) = server.asked[before:]
                path, _, query = asked.target.partition("?")
                assert path.startswith("/v1/items/") and path.endswith("/x")
                assert path.count("/") == 4 and query.startswith("q=") and "&" not in query
                assert asked.headers["host"] == f"api.example.org:{server.port}"
            for text in ("..", ".", "", " "):
                assert (await fail(tools, {"id": text})).reason == "TOOL_REFUSED"
        assert canary.connections == 0


async def test_a_redirect_to_an_internal_address_is_a_failure_and_not_followed() -> None:
    async with canaries("127.0.0.1") as (canary,):
        for status in ("301 Moved", "302 Found", "303 See Other", "307 T", "308 P"):
            location = f"http://127.0.0.1:{canary.port}/{SECRET}"
            async with allowed({"/": fixed(b"", status, location=location)}) as (tools, server):
                error = await fail(tools)
                assert (error.reason, error.made) == ("TOOL_FAILED", False)
                assert len(server.asked) == 1
        assert canary.connections == 0


async def test_bodies_are_cut_by_size_time_type_and_encoding() -> None:
    cases: list[tuple[Answer, str]] = [
        (endless(b"x" * 65536, 1 << 30), "TOOL_OUTPUT_TOO_LARGE"),
        (endless(b"x", 1000, pause_s=0.2), "TOOL_TIMEOUT"),
        (silent, "TOOL_TIMEOUT"),
        (fixed(b"\x89PNG", media_type="image/png"), "TOOL_OUTPUT_INVALID"),
        (fixed(b"{}", media_type="application/octet-stream"), "TOOL_OUTPUT_INVALID"),
        (fixed(b"x", content_encoding="br"), "TOOL_OUTPUT_INVALID"),
    ]
    begin = time.monotonic()

    async def case(answer: Answer, reason: str) -> None:
        async with allowed({"/": answer}) as (tools, _):
            assert (await fail(tools)).reason == reason

    await asyncio.gather(*(case(*one) for one in cases))
    assert time.monotonic() - begin < 10.0


async def test_what_a_server_says_of_failing_is_a_result_or_a_doubt() -> None:
    for status, reason, made in (
        ("500 Oops", "TOOL_LOST", True),
        ("502 Bad Gateway", "TOOL_LOST", True),
        ("503 Busy", "TOOL_UNAVAILABLE", False),
        ("504 Late", "TOOL_LOST", True),
    ):
        async with allowed({"/": fixed(b"boom", status)}) as (tools, _):
            error = await fail(tools)
            assert (error.reason, error.made) == (reason, made)
    async with allowed({"/": fixed(b'{"error": "no such order"}', "404 Not Found")}) as (tools, _):
        (tool,) = await tools.resolve("t", ["x"])
        result = await tool.call({}, CONTEXT)
        assert json.loads(result.content_json) == {
            "status": 404,
            "body": {"error": "no such order"},
        }


async def test_keys_secrets_and_traces_go_along_and_secrets_do_not_come_back() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    echo = fixed(json.dumps({"you sent": f"Bearer {SECRET}", "token": SECRET}).encode())
    http: dict[str, Any] = {
        "method": "POST",
        "secretHeaders": {"Authorization": "TOOL_SECRET_API"},
        "idempotencyHeader": "Idempotency-Key",
        "parametersJson": json.dumps(IDS),
    }
    async with allowed({"/": echo}, **http) as (tools, server):
        runs = RunTools("t", "run", ["x"], tools, FixedRights(["x"]))
        context = ToolContext("t", "run", "run:7", 5.0, traceparent=trace)
        result = await runs.call("x", '{"id": "ä", "q": "1"}', context)
        (asked,) = server.asked
        assert asked.headers["authorization"] == f"Bearer {SECRET}"
        assert asked.headers["idempotency-key"] == "run:7"
        assert asked.headers["traceparent"] == trace
        assert json.loads(asked.body) == {"id": "ä", "q": "1"}
        assert SECRET not in result.content_json and "[secret]" in result.content_json


async def test_what_must_happen_once_has_a_connection_of_its_own_for_each_call() -> None:
    """One that its server closes between two calls would leave the second in doubt."""
    for effect, connections in (("TOOL_EFFECT_READ", 1), ("TOOL_EFFECT_ONCE", 3)):
        async with serving({"/": fixed()}) as server:
            place = f"127.0.0.1:{server.port}"
            one = declaration(
                effect=effect,
                http={"method": "GET", "url": f"http://{place}/"},
                egress={"hosts": [place], "privateAllowed": [place]},
            )
            async with box([one]) as tools:
                (tool,) = await tools.resolve("t", ["x"])
                for _ in range(3):
                    await tool.call({}, CONTEXT)
            assert (len(server.asked), server.connections) == (3, connections)


async def test_numbers_that_are_none_and_broken_json_are_told_as_text() -> None:
    for body, told in (
        (b'{"a": NaN, "b": -Infinity}', {"a": "NaN", "b": "-Infinity"}),
        (b"{", "{"),
    ):
        async with allowed({"/": fixed(body)}) as (tools, _):
            (tool,) = await tools.resolve("t", ["x"])
            assert json.loads((await tool.call({}, CONTEXT)).content_json)["body"] == told


async def test_an_argument_that_is_null_is_left_out_of_the_query() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    async with allowed({"/": fixed()}, parametersJson=json.dumps(schema)) as (tools, server):
        (tool,) = await tools.resolve("t", ["x"])
        await tool.call({"a": None, "b": [1, "x&y"]}, CONTEXT)
        assert server.asked[0].target == "/?b=1&b=x%26y"
        assert (await fail(tools, {"a": {"no": "scalar"}})).reason == "TOOL_REFUSED"


async def test_a_charset_of_a_server_is_a_charset_or_none() -> None:
    """Some that Python knows are none, and decoding one takes a square of the size."""
    for charset, body, told in (
        ("iso-8859-1", b"caf\xe9", "caf\xe9"),
        ("UTF-8", "caf\xe9".encode(), "caf\xe9"),
        ("hex", b"6161", "6161"),
        ("zlib", b"abc", "abc"),
        ("nonsense", b"abc", "abc"),
        ("punycode", b"a-" + b"b" * 90_000, "a-" + "b" * 90_000),
        ("idna", b"xn--" + b"b" * 90_000, "xn--" + "b" * 90_000),
    ):
        answer = fixed(body, media_type=f"text/plain; charset={charset}")
        async with allowed({"/": answer}) as (tools, _):
            (tool,) = await tools.resolve("t", ["x"])
            begin = time.process_time()
            result = await tool.call({}, CONTEXT)
            assert time.process_time() - begin < 1.0
        if len(body) < 1000:
            assert json.loads(result.content_json) == {"status": 200, "body": told}
        else:
            assert result.size_bytes == len(told) + len('{"status":200,"body":""}')
