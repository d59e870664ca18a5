"""The tools that a tenant is given: the list, and whether they are there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from sluice.command.cli_support import config_file, warn_line
from sluice.command.tenant_limits import NONE
from sluice.config import ConfigError

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer

    from sluice.command.client import MeshClient

JOINT: Final = "__"  # between the name of a declaration and that of one of its tools


def set_names(field: RepeatedScalarFieldContainer[str], names: list[str] | None) -> None:
    """A list as it was given; `none` empties it."""
    if names is not None:
        del field[:]
        field.extend(name for name in names if name != NONE)


def set_tools(
    field: RepeatedScalarFieldContainer[str],
    given: list[str] | None,
    added: Sequence[str],
    removed: Sequence[str],
) -> None:
    """The list of tools: as given, or what there was with some more and without others. Raises
    BadParameter."""
    if given is not None and (added or removed):
        raise typer.BadParameter(
            "--tool gives the whole list, --add-tool and --remove-tool change it: not both"
        )
    for name in removed:
        if name not in field:
            known = ", ".join(field) or "none"
            raise typer.BadParameter(
                f"{name!r} is not in the list; there are: {known}", param_hint="--remove-tool"
            )
    set_names(field, given)
    names = dict.fromkeys([*field, *added])
    set_names(field, [name for name in names if name not in removed])


def warn_of_unknown(
    client: MeshClient, config: Path | None, tenant: str, names: Sequence[str]
) -> None:
    """Says which tools nobody declares: a tenant may be given one before it is there."""
    from sluice.scheduler.v1 import admin_pb2

    wanted = [name for name in names if name != NONE]
    configured = _configured_tools(config) if wanted else None
    if configured is None:
        return
    request = admin_pb2.ListTenantToolsRequest(tenant=tenant)
    known = configured | {one.name for one in client.admin("ListTenantTools", request).tools}
    for name in wanted:
        if name.partition(JOINT)[0] not in known:
            warn_line(
                f"there is no tool {name!r}: neither the configuration nor `sluice tools add`"
                f" declares it for {tenant}{_nearest(name, known)}"
            )


def _nearest(name: str, known: set[str]) -> str:
    """The tool that was meant, perhaps; empty when none looks like it."""
    near = difflib.get_close_matches(name.partition(JOINT)[0], sorted(known), n=1)
    return f"; the nearest is {near[0]!r}" if near else ""


def _configured_tools(config: Path | None) -> set[str] | None:
    """The names of the [[tool]] tables; None where there is no configuration to be read."""
    try:
        tables = config_file(config).document.get("tool", [])
    except ConfigError:
        return None
    found = tables if isinstance(tables, list) else []
    return {str(one.get("name", "")) for one in found if isinstance(one, Mapping)}
