"""`sluice tools`: the tools that operators register for a tenant, beside those of sluice.toml.

A registered tool can be called by a tenant's runs once it is in the tenant's list of tools too.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    JsonOption,
    open_admin,
    output,
    own_command,
    print_json,
    print_table,
)
from sluice.config import ConfigError
from sluice.errors import not_found

if TYPE_CHECKING:
    from sluice.agent.v1 import tools_pb2

TenantArgument = Annotated[str, typer.Argument(help="The tenant.")]

tools_app: Final = typer.Typer(
    help="Tools that are registered for a tenant; `sluice agent tools` lists what a key may use.",
    no_args_is_help=True,
)


@tools_app.command("list")
def list_tools(
    tenant: TenantArgument,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """List what is registered for a tenant, and whether its list of tools has it."""
    from sluice.scheduler.v1 import admin_pb2

    with open_admin(config, endpoint) as client:
        request = admin_pb2.ListTenantToolsRequest(tenant=tenant)
        found = client.admin("ListTenantTools", request).tools
        known = client.admin("ListTenants", admin_pb2.ListTenantsRequest()).tenants
    if all(one.name != tenant for one in known):
        raise not_found("TENANT_UNKNOWN", "There is no such tenant.")
    if as_json:
        print_json(found)
        return
    allowed = {name for one in known if one.name == tenant for name in one.tools}
    table = Table(box=None, pad_edge=False)
    for column in ("tool", "kind", "effect", "approval", "allowed", "does"):
        table.add_column(column, overflow="fold", no_wrap=column == "tool")
    for one in found:
        table.add_row(
            Text(one.name),
            one.WhichOneof("kind") or "-",
            _effect(one.effect),
            "yes" if one.needs_approval else "no",
            "yes" if one.name in allowed else "no",
            Text(one.description),
        )
    print_table(table)


@tools_app.command("add")
def add(
    tenant: TenantArgument,
    file: Annotated[
        Path,
        typer.Argument(
            help="The declaration as TOML or JSON: what stands in a [[tool]] table, with that"
            " header or without."
        ),
    ],
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Register a tool for a tenant, or change it."""
    from sluice.scheduler.v1 import admin_pb2

    tool = _declaration(file)
    with open_admin(config, endpoint) as client:
        client.admin("PutTool", admin_pb2.PutToolRequest(tenant=tenant, tool=tool))
        known = client.admin("ListTenants", admin_pb2.ListTenantsRequest()).tenants
    output().print(f"{tool.name} is registered.", soft_wrap=True)
    tools = next((list(one.tools) for one in known if one.name == tenant), [])
    if tool.name not in tools:
        allow = own_command("tenants", "set", tenant, "--add-tool", tool.name)
        output().print(f"To let its runs use it:\n  {allow}", soft_wrap=True)


@tools_app.command("rm")
def remove(
    tenant: TenantArgument,
    name: Annotated[str, typer.Argument(help="The tool.")],
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Delete a tool of a tenant."""
    from sluice.scheduler.v1 import admin_pb2

    with open_admin(config, endpoint) as client:
        client.admin("DeleteTool", admin_pb2.DeleteToolRequest(tenant=tenant, name=name))
    output().print(f"{name} is deleted.", soft_wrap=True)


def _declaration(path: Path) -> tools_pb2.ToolDeclaration:
    from sluice.tool_declarations import read_table

    table = _table(path)
    given = table.get("tool")
    if table.keys() == {"tool"} and isinstance(given, list):  # as it stands in sluice.toml
        if len(given) != 1 or not isinstance(given[0], dict):
            raise ConfigError(str(path), "must hold one [[tool]]: a file registers one tool")
        table = given[0]
    try:
        return read_table(table, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.where}", error.problem) from None


def _table(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(path), str(error)) from None
    if not isinstance(table, dict):
        raise ConfigError(str(path), "must be a table")
    return table


def _effect(number: int) -> str:
    from sluice.agent.v1 import tools_pb2

    word = tools_pb2.ToolEffect.Name(number)  # type: ignore[arg-type]
    word = word.removeprefix("TOOL_EFFECT_").lower()
    return "once" if word == "unspecified" else word
