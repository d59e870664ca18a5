"""`sluice alias` and `sluice drain`: where aliases point, which instances start nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    open_admin,
    output,
    print_table,
)

if TYPE_CHECKING:
    from sluice.scheduler.v1 import admin_pb2

# A weight stands last: names of models may hold "=" nowhere, but colons and slashes.
_TARGET: Final = re.compile(r"([^=]+)(?:=(\d{1,7}))?")

AliasArgument = Annotated[str, typer.Argument(help="The alias.")]

alias_app: Final = typer.Typer(
    help="Names that clients use for models, and the versions behind them.", no_args_is_help=True
)


@alias_app.command("list")
def list_aliases(config: ConfigOption = None, endpoint: EndpointOption = "") -> None:
    """List the aliases and where they point."""
    from sluice.scheduler.v1 import admin_pb2

    with open_admin(config, endpoint) as client:
        found = client.admin("ListAliases", admin_pb2.ListAliasesRequest())
    table = Table(box=None, pad_edge=False)
    for column in ("alias", "models and weights", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "alias")
    for one in found.aliases:
        where = f"version {one.version}" if one.version else "sluice.toml"
        table.add_row(Text(one.name), Text(_targets(one.targets)), Text(where))
    print_table(table)


@alias_app.command("set")
def set_alias(
    alias: AliasArgument,
    targets: Annotated[
        list[str],
        typer.Argument(help="MODEL or MODEL=WEIGHT, e.g. v1=9 v2=1: every tenth request to v2."),
    ],
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Point an alias at a model, or at several by weight."""
    from sluice.scheduler.v1 import admin_pb2

    request = admin_pb2.SetAliasRequest(alias=alias)
    for text in targets:
        found = _TARGET.fullmatch(text)
        if found is None:
            raise typer.BadParameter(f"{text!r} must be MODEL or MODEL=WEIGHT")
        request.targets.add(model=found[1], weight=int(found[2] or 1))
    with open_admin(config, endpoint) as client:
        client.admin("SetAlias", request)
    shown = _targets(request.targets)
    output().print(f"{alias} points at {shown}; schedulers follow within a second.", soft_wrap=True)


@alias_app.command("rollback")
def rollback(
    alias: AliasArgument, config: ConfigOption = None, endpoint: EndpointOption = ""
) -> None:
    """Take the last change of an alias back; again, the one before."""
    from sluice.scheduler.v1 import admin_pb2

    with open_admin(config, endpoint) as client:
        done = client.admin("RollbackAlias", admin_pb2.RollbackAliasRequest(alias=alias))
    output().print(f"{alias} points at {_targets(done.targets)} again.", soft_wrap=True)


@alias_app.command("remove")
def remove(
    alias: AliasArgument, config: ConfigOption = None, endpoint: EndpointOption = ""
) -> None:
    """Remove an alias and its history; one of sluice.toml points again where that says."""
    from sluice.scheduler.v1 import admin_pb2

    with open_admin(config, endpoint) as client:
        client.admin("DeleteAlias", admin_pb2.DeleteAliasRequest(alias=alias))
    output().print(f"{alias} is removed; schedulers follow within a second.", soft_wrap=True)


def drain(
    instance: Annotated[str, typer.Argument(help="The instance; `sluice status` lists them.")],
    undo: Annotated[bool, typer.Option("--undo", help="Take the drain back.")] = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Start nothing more on an instance: what runs there ends, or goes on elsewhere."""
    from sluice.scheduler.v1 import admin_pb2

    with open_admin(config, endpoint) as client:
        request = admin_pb2.DrainInstanceRequest(instance=instance, drain=not undo)
        after = client.admin("DrainInstance", request).instance
    output().print(
        f"{instance}: {after.state or 'not known'}, {after.running} running here.", soft_wrap=True
    )


def _targets(targets: Iterable[admin_pb2.AliasTarget]) -> str:
    return ", ".join(f"{one.model}={one.weight}" for one in targets)


def add_fleet(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(alias_app, name="alias")
    app.command()(drain)
