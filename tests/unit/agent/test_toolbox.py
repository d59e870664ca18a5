"""Which tools a tenant has: those of the configuration and its own, checked again at use.

Mutants: toolbox_trusts_the_store, toolbox_tools_of_all_tenants, run_tools_any_arguments,
runs_without_their_tools, run_without_an_unknown_tool, run_before_its_grants,
run_after_its_grants, mcp_session_outlives_its_tenant, registered_session_outlives_its_tenant.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpcore2
import pytest
from google.protobuf.json_format import ParseDict

from agent_svc.adapters.egress import EgressGuard
from agent_svc.adapters.toolbox import KEPT_S, STALE_S, TENANTS_MAX, Tools
from agent_svc.adapters.tools.calculator import CalculatorTool
from agent_svc.adapters.tools.factory import Sources
from agent_svc.adapters.tools.run_tools import RunTools
from agent_svc.adapters.tools.runner import Runner
from agent_svc.domain.model import Effect, ToolInfo
from agent_svc.ports import ChunkFound, Tool, ToolContext, ToolError, ToolSource, ToolStatus
from agent_svc.tool_parts import declared
from sluice.agent.v1.tools_pb2 import TOOL_EFFECT_ONCE, ToolDeclaration
from sluice.config import ConfigError
from sluice.errors import Code, SluiceError, unavailable
from tests.fakes import FixedRights

Virtual = Callable[[Coroutine[Any, Any, Any]], Any]


def tool(name: str, **fields: Any) -> ToolDeclaration:
    base: dict[str, Any] = {"name": name, "description": "d", "effect": "TOOL_EFFECT_READ"}
    if len(fields.keys() - {"egress"}) == 0:
        fields["calculator"] = {}
    return ParseDict({**base, **fields}, ToolDeclaration())


class Store:
    """Declarations by tenant; counts how often it was read."""

    def __init__(self, **tools: list[ToolDeclaration]) -> None:
        self.tools = tools
        self.reads = 0
        self.down = False

    async def registered(self, tenant: str) -> Sequence[ToolDeclaration]:
        self.reads += 1
        if self.down:
            raise unavailable("STORE_UNAVAILABLE", "The store does not answer.")
        return self.tools.get(tenant, [])

    async def search(self, *_: Any, **__: Any) -> Sequence[ChunkFound]:
        return []


def box(
    configured: Sequence[ToolDeclaration] = (),
    store: Store | None = None,
    root: Path = Path(),
    *,
    servers: Servers | None = None,
    versions: Mapping[str, int] | None = None,
) -> Tools:
    store = store or Store()
    mcp = servers.source if servers else None
    sources = Sources(EgressGuard(), store, environ={}, root=root, mcp=mcp, now=lambda: 0.0)
    known = versions or {}
    return Tools(configured, sources, Runner(), store, versions=lambda tenant: known.get(tenant, 0))


async def names(of: Tools, tenant: str, *wanted: str) -> list[str]:
    return [one.info.name for one in await of.resolve(tenant, wanted)]


async def problem(of: Tools, tenant: str, name: str) -> str:
    """Why a tool that is declared cannot be had."""
    with pytest.raises(SluiceError) as failed:
        await of.resolve(tenant, [name])
    assert (failed.value.code, failed.value.reason) == (Code.UNAVAILABLE, "TOOL_UNAVAILABLE")
    assert failed.value.message.startswith(f"Tool {name}: ")
    return failed.value.message


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading those of the system takes 20 ms for each guard."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(httpcore2, "default_ssl_context", lambda: context)


async def test_tools_are_those_named_in_their_order() -> None:
    tools = box([tool("a"), tool("b")], Store(t=[tool("own")]))
    assert await names(tools, "t", "own", "b", "nobody", "a", "b") == ["own", "b", "a"]
    assert await names(tools, "t") == []
    assert await names(tools, "u", "own", "a") == ["a"]


async def test_the_configuration_hides_a_registered_tool_of_its_name() -> None:
    tools = box([tool("a")], Store(t=[tool("a", clock={})]))
    (found,) = await tools.resolve("t", ["a"])
    assert "expression" in str(found.info.parameters)


def test_a_registered_tool_comes_and_goes_within_seconds(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        store = Store(t=[tool("own")])
        tools = box([tool("a")], store)
        for _ in range(10):
            assert await names(tools, "t", "own") == ["own"]
        assert store.reads == 1
        assert await names(tools, "t", "a") == ["a"]
        store.tools["t"] = [tool("other")]
        await asyncio.sleep(KEPT_S)
        assert await names(tools, "t", "own", "other") == ["other"]
        assert store.reads == 2

    run_virtual(scenario())


def test_while_the_store_is_away_what_was_read_holds_for_a_while(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        store = Store(t=[tool("own")])
        tools = box([tool("a")], store)
        assert await names(tools, "t", "own") == ["own"]
        store.down = True
        await asyncio.sleep(STALE_S - 1.0)
        assert await names(tools, "t", "own") == ["own"]
        await asyncio.sleep(2.0)
        with pytest.raises(SluiceError):
            await tools.resolve("t", ["own"])
        assert await names(tools, "t", "a") == ["a"]  # needs no store

    run_virtual(scenario())


async def test_what_the_store_holds_grants_nothing_by_itself(tmp_path: Path) -> None:
    """Declarations that registration refuses, as if they had got into the store all the same."""
    bad = [
        tool("files", sql={"url": "sqlite:///x.db"}),
        tool("programs", mcp={"command": ["sh"]}),
        tool(
            "inside",
            http={"method": "GET", "url": "http://127.0.0.1:1/"},
            egress={"hosts": ["127.0.0.1:1"], "privateAllowed": ["127.0.0.1:1"]},
        ),
        tool(
            "environment",
            http={
                "method": "GET",
                "url": "https://a.org/",
                "secretHeaders": {"X": "SLUICE_STATE_DURABLE_URL"},
            },
            egress={"hosts": ["a.org"]},
        ),
    ]
    tools = box([], Store(t=bad), tmp_path)
    for one in bad:
        await problem(tools, "t", one.name)
    states = {one.info.name: one.problem for one in await tools.states("t")}
    assert set(states) == {one.name for one in bad}
    assert "egress.private_allowed" in states["inside"]
    assert all(states.values())


async def test_a_registered_tool_answers_its_tenant_only() -> None:
    tools = box([], Store(t=[tool("own")], u=[]))
    (own,) = await tools.resolve("t", ["own"])
    assert await names(tools, "u", "own") == []
    await own.call({"expression": "1"}, ToolContext("t", "r", "k", 1.0))
    with pytest.raises(ToolError) as refused:
        await own.call({"expression": "1"}, ToolContext("u", "r", "k", 1.0))
    assert refused.value.reason == "TOOL_NOT_GRANTED"


class Remembering:
    """A source that is asked for its tools and closed."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.asked = 0
        self.closed = False

    async def tools(self) -> Sequence[Tool]:
        assert not self.closed
        self.asked += 1
        return [CalculatorTool(ToolInfo("s__go", "d", {}, Effect.READ))]

    async def states(self) -> Sequence[ToolStatus]:
        assert not self.closed
        return []

    async def close(self) -> None:
        self.closed = True


class Servers:
    """MCP sources in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[Remembering] = []

    def source(self, _: ToolDeclaration, tenant: str) -> ToolSource:
        self.made.append(Remembering(tenant))
        return self.made[-1]

    @property
    def open(self) -> list[int]:
        return [number for number, one in enumerate(self.made) if not one.closed]


URL = {"mcp": {"url": "https://a.org/mcp"}, "egress": {"hosts": ["a.org"]}}
COMMAND = {"mcp": {"command": ["x"]}}


@pytest.mark.parametrize("how", [URL, COMMAND])
def test_a_configured_server_has_a_session_for_each_tenant_that_uses_it(
    run_virtual: Virtual, how: dict[str, Any]
) -> None:
    async def scenario() -> None:
        servers, versions = Servers(), {"t": 1, "u": 2}
        tools = box([tool("s", **how)], servers=servers, versions=versions)
        keeping = asyncio.create_task(tools.run())
        await tools.states("t")
        for tenant in "tutu":
            assert await names(tools, tenant, "s") == ["s__go"]
        # The first one, of no tenant, only lists.
        assert [one.asked for one in servers.made] == [0, 2, 2]
        del versions["t"]
        await asyncio.sleep(30.0 + 3 * KEPT_S)  # what a call may take
        assert servers.open == [0, 2]
        versions["t"] = 3
        assert await names(tools, "t", "s") == ["s__go"]
        versions["u"] = 4
        await tools.resolve("u", ["s"])
        assert [one.asked for one in servers.made] == [0, 2, 2, 1, 1]
        for number in range(TENANTS_MAX):
            await tools.resolve(f"t{number}", ["s"])
        await asyncio.sleep(30.0 + 3 * KEPT_S)
        assert len(servers.open) == TENANTS_MAX + 1
        keeping.cancel()
        await tools.close()
        assert servers.open == []

    run_virtual(scenario())


def test_a_registered_server_does_not_outlive_its_tenant(run_virtual: Virtual) -> None:
    """The tenant that is made again registers the same declaration."""

    async def scenario() -> None:
        servers, versions, store = Servers(), {"t": 1}, Store(t=[tool("s", **URL)])
        tools = box([], store, servers=servers, versions=versions)
        keeping = asyncio.create_task(tools.run())
        await tools.resolve("t", ["s"])
        await asyncio.sleep(2 * KEPT_S)
        await tools.resolve("t", ["s"])
        assert [one.asked for one in servers.made] == [2]
        versions["t"] = 2
        await tools.resolve("t", ["s"])
        assert [one.asked for one in servers.made] == [2, 1]
        await asyncio.sleep(30.0 + 3 * KEPT_S)
        assert servers.open == [1]
        keeping.cancel()
        await tools.close()

    run_virtual(scenario())


def test_the_tenants_in_memory_are_bounded(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        tools = box([], Store())
        for number in range(TENANTS_MAX + 50):
            await tools.resolve(f"t{number}", ["x"])
        assert len(tools._tenants) == TENANTS_MAX

    run_virtual(scenario())


async def test_a_database_shows_its_tables_and_one_that_is_missing_its_problem(
    tmp_path: Path,
) -> None:
    sqlite3.connect(tmp_path / "a.db").execute(
        "CREATE TABLE orders (id INTEGER)"
    ).connection.close()
    tools = box(
        [
            tool("sales", sql={"url": "sqlite:///a.db"}),
            tool("gone", sql={"url": "sqlite:///gone.db"}),
        ],
        root=tmp_path,
    )
    states = {one.info.name: one for one in await tools.states("t")}
    assert "orders(id INTEGER)" in states["sales"].info.description
    assert states["sales"].problem == ""
    assert states["gone"].problem == "The database cannot be read."
    assert await names(tools, "t", "sales") == ["sales"]
    assert "cannot be read" in await problem(tools, "t", "gone")
    sqlite3.connect(tmp_path / "gone.db").close()
    assert await names(tools, "t", "sales", "gone") == ["sales", "gone"]
    await tools.close()


OPENAPI = {
    "openapi": "3.1.0",
    "servers": [{"url": "https://api.example.org/v1"}],
    "paths": {
        "/pets": {
            "get": {"operationId": "listPets"},
            "post": {"operationId": "addPet", "requestBody": {"content": {"application/json": {}}}},
        }
    },
}


async def test_a_document_gives_a_tool_for_each_operation(tmp_path: Path) -> None:
    (tmp_path / "pets.json").write_text(json.dumps(OPENAPI))
    allowed = {"hosts": ["api.example.org"]}
    wanted = ["listPets", "addPet"]
    configured = [
        tool("pets", openapi={"document": "pets.json", "operations": wanted}, egress=allowed),
        tool("read", openapi={"document": "pets.json"}, egress=allowed),
        tool("elsewhere", openapi={"document": "pets.json"}, egress={"hosts": ["b.org"]}),
        tool("gone", openapi={"document": "gone.json"}, egress=allowed),
    ]
    configured[0].effect = TOOL_EFFECT_ONCE
    own = tool("own", openapi={"document": json.dumps(OPENAPI)}, egress=allowed)
    path = tool("path", openapi={"document": "pets.json"}, egress=allowed)
    tools = box(configured, Store(t=[own, path]), tmp_path)
    assert await names(tools, "t", "pets") == ["pets__listPets", "pets__addPet"]
    assert await names(tools, "t", "pets__addPet") == ["pets__addPet"]
    assert await names(tools, "t", "read", "own") == ["read__listPets", "own__listPets"]
    for name in ("elsewhere", "gone", "path"):
        assert "The OpenAPI document" in await problem(tools, "t", name)
    found = await tools.resolve("t", ["pets"])
    assert [one.info.effect for one in found] == [Effect.READ, Effect.ONCE]
    problems = {one.info.name: one.problem for one in await tools.states("t")}
    assert "egress.hosts" in problems["elsewhere"]
    assert problems["gone"] == "The OpenAPI document cannot be read."
    await tools.close()


async def test_a_tool_without_its_secret_is_unavailable_and_says_so() -> None:
    http = {
        "method": "GET",
        "url": "https://a.org/",
        "secretHeaders": {"Authorization": "TOOL_SECRET_A"},
    }
    tools = box([tool("a", http=http, egress={"hosts": ["a.org"]}), tool("b")])
    assert await names(tools, "t", "b") == ["b"]
    assert "secret" in await problem(tools, "t", "a")
    assert [(one.info.name, one.problem) for one in await tools.states("t")] == [
        ("a", "A secret of the tool is not set."),
        ("b", ""),
    ]
    await tools.close()


def test_the_configuration_names_table_and_field_of_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "sluice.toml"
    good = '[[tool]]\nname = "a"\ndescription = "d"\nclock = {}\n'
    file.write_text(good)
    assert [one.name for one in declared(file)] == ["a"]
    assert declared(None) == ()
    for text, where in (
        (good + '[[tool]]\nname = "b"\ndescription = "d"\nhttp.url = 3\n', "tool[1].http.url"),
        (good + "[[tool]]\n", "tool[1].name"),
        ("tool = 3", "tool"),
        ("tool = [3]", "tool[0]"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            declared(file)
        assert refused.value.where == where
    with pytest.raises(SluiceError, match=r"tool\[1\]\.name"):
        box([tool("a"), tool("a")])


async def test_arguments_are_checked_against_the_schema_at_the_moment_of_the_call() -> None:
    tools = box([tool("a")])
    run = RunTools("t", "r", ["a"], tools, FixedRights(["a"]))
    context = ToolContext("t", "r", "k", 1.0)
    assert (await run.call("a", '{"expression": "1"}', context)).content_json == '{"result": 1}'
    for text in ("{}", '{"expression": 1}', '{"expression": "1", "more": 2}', "[]", "{", "NaN"):
        with pytest.raises(ToolError) as refused:
            await run.call("a", text, context)
        assert (refused.value.reason, refused.value.made) == ("TOOL_REFUSED", False)
        assert "rguments of a" in refused.value.content_json


async def test_a_call_of_a_tool_that_went_away_was_not_made(tmp_path: Path) -> None:
    tools = box([tool("gone", sql={"url": "sqlite:///gone.db"})], root=tmp_path)
    with pytest.raises(ToolError) as failed:
        await RunTools("t", "r", ["gone"], tools, FixedRights(["gone"])).call(
            "gone", '{"sql": "SELECT 1"}', ToolContext("t", "r", "k", 1.0)
        )
    assert (failed.value.reason, failed.value.made) == ("TOOL_UNAVAILABLE", False)
    await tools.close()


async def test_what_a_tenant_may_no_longer_use_is_neither_shown_nor_called() -> None:
    rights = FixedRights(["a", "b"])
    run = RunTools("t", "r", ["a", "b"], box([tool("a"), tool("b")]), rights)
    context = ToolContext("t", "r", "k", 1.0)
    assert [info.name for info in await run.infos()] == ["a", "b"]
    rights.names = ["b", "c"]
    assert [info.name for info in await run.infos(begun=True)] == ["b"]
    with pytest.raises(ToolError) as refused:
        await run.call("a", '{"expression": "1"}', context)
    assert (refused.value.reason, refused.value.made) == ("TOOL_NOT_GRANTED", False)
    assert (await run.call("b", '{"expression": "1"}', context)).content_json == '{"result": 1}'


async def no_tools(run: RunTools, *, begun: bool = False) -> str:
    """Why a run cannot go on with its tools."""
    with pytest.raises(SluiceError) as waits:
        await run.infos(begun=begun)
    assert (waits.value.code, waits.value.reason) == (Code.UNAVAILABLE, "TOOL_UNAVAILABLE")
    return waits.value.message


@pytest.mark.parametrize("begun", [False, True])
async def test_a_name_that_gives_no_tool_holds_the_run_up(tmp_path: Path, begun: bool) -> None:
    """Also one whose declaration is known: neither an answer without it nor with the others."""
    (tmp_path / "pets.json").write_text(json.dumps(OPENAPI))
    pets = tool("pets", openapi={"document": "pets.json"}, egress={"hosts": ["api.example.org"]})
    store = Store()
    tools = box([tool("a"), pets], store, tmp_path)
    for names, gone in (
        (["a__x"], "a__x"),
        (["a", "a__x"], "a__x"),
        (["pets__nothing"], "pets__nothing"),
        (["a", "pets", "nobody"], "nobody"),
    ):
        run = RunTools("t", "r", names, tools, FixedRights(["a", "pets", "nobody"]))
        assert await no_tools(run, begun=begun) == f"Tool {gone}: There is no such tool."
    run = RunTools("t", "r", ["pets", "a"], tools, FixedRights(["a", "pets__listPets"]))
    assert [info.name for info in await run.infos(begun=begun)] == ["pets__listPets", "a"]
    await tools.close()


async def test_a_run_begins_when_all_its_grants_are_known_here() -> None:
    """What the scheduler allowed the agent service hears a moment later."""
    rights = FixedRights([])
    run = RunTools("t", "r", ["a", "b"], box([tool("a"), tool("b")]), rights)
    for listed, missing in (([], "a"), (["a"], "b"), (["b", "c"], "a")):
        rights.names = listed
        assert await no_tools(run) == f"Tool {missing}: The tenant's list does not hold it."
    rights.names = ["a", "b"]
    assert [info.name for info in await run.infos()] == ["a", "b"]


async def test_a_run_all_of_whose_tools_were_taken_away_does_not_go_on_without() -> None:
    rights = FixedRights(["a", "b"])
    run = RunTools("t", "r", ["a", "b"], box([tool("a"), tool("b")]), rights)
    assert len(await run.infos(begun=True)) == 2
    rights.names = ["c"]
    assert "list does not hold it" in await no_tools(run, begun=True)


async def test_while_a_tenants_list_is_not_known_nothing_is_called() -> None:
    run = RunTools("t", "r", ["a"], box([tool("a")]), FixedRights(None))
    with pytest.raises(SluiceError) as waits:
        await run.infos()
    assert waits.value.reason == "STATE_UNREACHABLE"
    with pytest.raises(ToolError, match="may not call"):
        await run.call("a", '{"expression": "1"}', ToolContext("t", "r", "k", 1.0))
    assert await RunTools("t", "r", [], box([]), FixedRights(None)).infos() == []
