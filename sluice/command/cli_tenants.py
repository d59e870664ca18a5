"""`sluice tenants`: who may call the mesh of this machine."""

from __future__ import annotations

import shlex
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import ConfigOption, output, print_table, run_paths
from sluice.command.tenants_file import CLASSES, Tenant, TenantsFile

NameArgument = Annotated[str, typer.Argument(help="The tenant: [a-z0-9-], 1 to 64 characters.")]

tenants_app: Final = typer.Typer(
    help="Who may call the mesh of this machine (tenants.toml of the runtime folder).",
    no_args_is_help=True,
)


@tenants_app.command("list")
def list_tenants(config: ConfigOption = None) -> None:
    """List the tenants."""
    file = TenantsFile(run_paths(config).runtime)
    table = Table(box=None, pad_edge=False)
    for column in ("tenant", "class", "ceiling", "models", "keys", "key file"):
        table.add_column(column, overflow="fold", no_wrap=column == "tenant")
    for one in file.tenants():
        key = file.key_path(one.name)
        table.add_row(
            Text(one.name),
            Text(one.default_class),
            Text(one.ceiling),
            Text(", ".join(one.models) or "all"),
            str(one.keys),
            Text(str(key) if key.is_file() else "-"),
        )
    print_table(table)


@tenants_app.command("add")
def add(
    name: NameArgument,
    default_class: Annotated[
        str,
        typer.Option(
            "--class",
            help=f"Class of requests that say none: {', '.join(CLASSES)}. Default: standard, or"
            " the ceiling where that is lower.",
        ),
    ] = "",
    ceiling: Annotated[str, typer.Option(help="Highest class that it may use.")] = "critical",
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model or alias that it may use; repeatable. Default: all."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Add a tenant with a key of its own. A mesh that runs knows it within seconds."""
    from sluice.command.up_screen import short_path, tool_path

    default_class = default_class or max("standard", ceiling, key=_rank)
    for value, option in ((default_class, "--class"), (ceiling, "--ceiling")):
        if value not in CLASSES:
            raise typer.BadParameter(
                f"{value!r} is not one of {', '.join(CLASSES)}", param_hint=option
            )
    file = TenantsFile(run_paths(config).runtime)
    key = file.add(Tenant(name, default_class, ceiling, tuple(model or ())))
    call = shlex.join([tool_path("sluice"), "generate", "--key-file", short_path(key), "Hello"])
    output().print(f"Tenant {name} is added; its key is in {short_path(key)}", soft_wrap=True)
    output().print(f"  {call}", soft_wrap=True)


@tenants_app.command("remove")
def remove(name: NameArgument, config: ConfigOption = None) -> None:
    """Remove a tenant, its keys and its key file."""
    TenantsFile(run_paths(config).runtime).remove(name)
    output().print(f"Tenant {name} is removed; its keys are refused within seconds.")


def _rank(name: str) -> int:
    return CLASSES.index(name) if name in CLASSES else -1
