"""`sluice tenants`: who may call the mesh, with which rights, limits and keys.

Every change goes to the scheduler's administration service under the admin key and is stored by the
state service; schedulers follow within a second.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    open_admin,
    output,
    print_table,
    run_paths,
    span_s,
)
from sluice.command.tenant_limits import (
    LIMITS,
    LimitOption,
    RunBudgetOption,
    RunsOption,
    limit_word,
    run_budget_words,
    set_limits,
    set_run_budget,
)
from sluice.command.tenant_tools import set_names, set_tools, warn_of_unknown
from sluice.config import ConfigError
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.scheduler.v1 import admin_pb2

CLASSES: Final = ("critical", "interactive", "standard", "batch")
NAMES_SHOWN: Final = 10
_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
# Of a key that came with the tenants file; its own part is the start of the key's hash.
_FILE_KEY: Final = "file-"
_FILE_KEY_CHARS: Final = 24

NameArgument = Annotated[str, typer.Argument(help="The tenant: [a-z0-9-], 1 to 64 characters.")]
ClassOption = Annotated[
    str,
    typer.Option(
        "--class",
        help=f"Class of requests that say none: {', '.join(CLASSES)}. Default for a new tenant:"
        " standard, or the ceiling where that is lower.",
    ),
]
CeilingOption = Annotated[
    str,
    typer.Option(
        help="Highest class that it may use. Default for a new tenant: critical.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(help="A model or alias that it may use; repeatable. `none`: all, the default."),
]
ToolOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A tool that its agents may use; repeatable. What is given is the whole list."
        " `none`: none, the default.",
        show_default=False,
    ),
]
AddToolOption = Annotated[
    list[str] | None,
    typer.Option(help="A tool that is added to the list; repeatable.", show_default=False),
]
RemoveToolOption = Annotated[
    list[str] | None,
    typer.Option(help="A tool that is taken out of the list; repeatable.", show_default=False),
]
AgentsOption = Annotated[
    bool | None, typer.Option("--agents/--no-agents", help="May use agents. Default: no.")
]
SessionsOption = Annotated[
    bool | None, typer.Option("--sessions/--no-sessions", help="May keep sessions. Default: yes.")
]
FailOpenOption = Annotated[
    bool | None,
    typer.Option(
        "--fail-open/--fail-closed",
        help="Whether requests go on, uncounted, while quotas are unreachable. Default: closed.",
    ),
]

tenants_app: Final = typer.Typer(
    help="Who may call the mesh: tenants, their rights, limits and keys.", no_args_is_help=True
)


@tenants_app.command("list")
def list_tenants(config: ConfigOption = None, endpoint: EndpointOption = "") -> None:
    """List the tenants."""
    with open_admin(config, endpoint) as client:
        found = _listed(client)
    table = Table(box=None, pad_edge=False)
    for column in (
        *("tenant", "class", "ceiling", "models", "requests/min", "tokens/min", "at once"),
        *("tokens/day", "runs at once", "run budget", "rights", "tools", "keys"),
    ):
        table.add_column(column, overflow="fold", no_wrap=column == "tenant")
    for one in found.tenants:
        table.add_row(
            Text(one.name),
            Text(_class_name(one.default_class)),
            Text(_class_name(one.ceiling)),
            Text(", ".join(one.models) or "all"),
            *(limit_word(one.quota, field) for field in LIMITS),
            Text(run_budget_words(one.run_budget) or "-"),
            Text(", ".join(_rights(one)) or "-"),
            Text(", ".join(one.tools) or "-"),
            str(sum(key.tenant == one.name for key in found.keys)),
        )
    print_table(table)


@tenants_app.command("add")
def add(
    name: NameArgument,
    default_class: ClassOption = "",
    ceiling: CeilingOption = "critical",
    model: ModelOption = None,
    requests_per_min: LimitOption = "",
    tokens_per_min: LimitOption = "",
    concurrent: LimitOption = "",
    tokens_per_day: LimitOption = "",
    agents: AgentsOption = None,
    tool: ToolOption = None,
    concurrent_runs: RunsOption = "",
    run_budget: RunBudgetOption = None,
    sessions: SessionsOption = None,
    fail_open: FailOpenOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Add a tenant with a key of its own, which is written to a file of the runtime folder."""
    from sluice.command.up_screen import short_path, tool_path
    from sluice.scheduler.v1 import admin_pb2

    if not _NAME.fullmatch(name):
        raise ConfigError("name", f"{name!r} must be [a-z0-9-], 1 to 64 characters")
    tenant = admin_pb2.Tenant(name=name, sessions=True)
    limits = (requests_per_min, tokens_per_min, concurrent, tokens_per_day, concurrent_runs)
    _set(tenant, default_class, ceiling, model)
    set_limits(tenant, *limits)
    _set_rights(tenant, agents, sessions, fail_open)
    set_names(tenant.tools, tool)
    set_run_budget(tenant.run_budget, run_budget or ())
    path = _key_path(config, name)
    with open_admin(config, endpoint) as client:
        _create(client, tenant)
        made = client.admin("CreateKey", admin_pb2.CreateKeyRequest(tenant=name))
        warn_of_unknown(client, config, name, tool or ())
    _write_key(path, made.key)
    call = shlex.join([tool_path("sluice"), "generate", "--key-file", short_path(path), "Hello"])
    output().print(f"Tenant {name} is added; its key is in {short_path(path)}", soft_wrap=True)
    output().print(f"  {call}", soft_wrap=True)


@tenants_app.command("set")
def change(
    name: NameArgument,
    default_class: ClassOption = "",
    ceiling: CeilingOption = "",
    model: ModelOption = None,
    requests_per_min: LimitOption = "",
    tokens_per_min: LimitOption = "",
    concurrent: LimitOption = "",
    tokens_per_day: LimitOption = "",
    agents: AgentsOption = None,
    tool: ToolOption = None,
    add_tool: AddToolOption = None,
    remove_tool: RemoveToolOption = None,
    concurrent_runs: RunsOption = "",
    run_budget: RunBudgetOption = None,
    sessions: SessionsOption = None,
    fail_open: FailOpenOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Change a tenant: what is given, and nothing else. Options that repeat give a whole list;
    --add-tool and --remove-tool change it."""
    from sluice.scheduler.v1 import admin_pb2

    limits = (requests_per_min, tokens_per_min, concurrent, tokens_per_day, concurrent_runs)
    others = (model, agents, tool, add_tool, remove_tool, run_budget, sessions, fail_open)
    if not any((default_class, ceiling, *limits)) and all(one is None for one in others):
        raise typer.BadParameter("no option says what to change; --help lists them")
    with open_admin(config, endpoint) as client:
        tenant = _named(_listed(client), name)
        _set(tenant, default_class, ceiling, model)
        set_limits(tenant, *limits)
        _set_rights(tenant, agents, sessions, fail_open)
        set_tools(tenant.tools, tool, add_tool or (), remove_tool or ())
        set_run_budget(tenant.run_budget, run_budget or ())
        request = admin_pb2.PutTenantRequest(tenant=tenant, expected_version=tenant.version)
        client.admin("PutTenant", request)
        warn_of_unknown(client, config, name, [*(tool or ()), *(add_tool or ())])
    output().print(f"Tenant {name} is changed; schedulers follow within a second.", soft_wrap=True)


@tenants_app.command("remove")
def remove(name: NameArgument, config: ConfigOption = None, endpoint: EndpointOption = "") -> None:
    """Remove a tenant, its keys, its key file and all that it stored."""
    from sluice.scheduler.v1 import admin_pb2

    own = _own_key_id(config)
    with open_admin(config, endpoint) as client:
        found = _listed(client)
        _named(found, name)
        if any(key.tenant == name and key.key_id == own for key in found.keys):
            raise ConfigError("name", f"{name} has the key of `sluice` itself, api-key")
        client.admin("DeleteTenant", admin_pb2.DeleteTenantRequest(tenant=name))
    _key_path(config, name).unlink(missing_ok=True)
    output().print(
        f"Tenant {name} is removed; its keys are refused within a second.", soft_wrap=True
    )
    output().print(
        "Its documents, runs, sessions, values, results, tools and decision records are deleted"
        " now; its usage stays in the ledger. The name can be used again in about 10 s.",
        soft_wrap=True,
    )


@tenants_app.command("keys")
def keys(
    name: Annotated[str, typer.Argument(help="A tenant. Default: all.")] = "",
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """List keys: identifiers, never a key."""
    with open_admin(config, endpoint) as client:
        found = _listed(client)
    if name:
        _named(found, name)
    table = Table(box=None, pad_edge=False)
    for column in ("key", "tenant", "label", "made", "expires"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    for one in found.keys:
        if name in ("", one.tenant):
            table.add_row(
                Text(one.key_id),
                Text(one.tenant),
                Text(one.label or "-"),
                _day(one, "create_time", "-"),
                _day(one, "expire_time", "never"),
            )
    print_table(table)


@tenants_app.command("key-add")
def key_add(
    name: NameArgument,
    label: Annotated[str, typer.Option(help="For people, at most 128 characters.")] = "",
    expires: Annotated[
        str, typer.Option(help="How long it is valid, e.g. 12h or 90d. Default: for ever.")
    ] = "",
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Make a further key and print it, this once. To rotate: add one, hand it out, revoke the old
    one."""
    from sluice.scheduler.v1 import admin_pb2

    request = admin_pb2.CreateKeyRequest(tenant=name, label=label)
    if expires:
        request.expire_time.seconds = int(time.time()) + span_s(expires, "--expires")
    with open_admin(config, endpoint) as client:
        made = client.admin("CreateKey", request)
    output().print(f"{made.key_id}  {made.key}", soft_wrap=True)


@tenants_app.command("key-revoke")
def key_revoke(
    key_id: Annotated[str, typer.Argument(help="The key's identifier; `keys` lists them.")],
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
) -> None:
    """Make a key void."""
    from sluice.scheduler.v1 import admin_pb2

    if key_id == _own_key_id(config):
        raise ConfigError("key_id", f"{key_id} is the key of `sluice` itself, api-key")
    with open_admin(config, endpoint) as client:
        client.admin("RevokeKey", admin_pb2.RevokeKeyRequest(key_id=key_id))
    output().print(f"Key {key_id} is void within a second.", soft_wrap=True)


def _listed(client: MeshClient) -> admin_pb2.ListTenantsResponse:
    from sluice.scheduler.v1 import admin_pb2

    found: admin_pb2.ListTenantsResponse = client.admin(
        "ListTenants", admin_pb2.ListTenantsRequest()
    )
    return found


def _named(found: admin_pb2.ListTenantsResponse, name: str) -> admin_pb2.Tenant:
    for tenant in found.tenants:
        if tenant.name == name:
            return tenant
    names = [tenant.name for tenant in found.tenants]
    known = ", ".join(names[:NAMES_SHOWN]) or "none"
    if len(names) > NAMES_SHOWN:
        known += f" and {len(names) - NAMES_SHOWN} more"
    raise ConfigError("name", f"there is no tenant {name!r}; there are: {known}")


def _create(client: MeshClient, tenant: admin_pb2.Tenant) -> None:
    from sluice.scheduler.v1 import admin_pb2

    try:
        client.admin("PutTenant", admin_pb2.PutTenantRequest(tenant=tenant, expected_version=0))
    except SluiceError as error:
        if error.reason != "VERSION_CONFLICT":
            raise
        known = f"there is a tenant {tenant.name!r} already; `sluice tenants set` changes it"
        raise ConfigError("name", known) from None


def _set(
    tenant: admin_pb2.Tenant, default_class: str, ceiling: str, models: list[str] | None
) -> None:
    from sluice.common.v1 import policy_pb2

    for value, option, field in (
        (ceiling, "--ceiling", "ceiling"),
        (default_class, "--class", "default_class"),
    ):
        if value and value not in CLASSES:
            raise typer.BadParameter(
                f"{value!r} is not one of {', '.join(CLASSES)}", param_hint=option
            )
        if value:
            number = policy_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{value.upper()}")
            setattr(tenant, field, number)
    if ceiling and not default_class and 0 < tenant.default_class < tenant.ceiling:
        tenant.default_class = tenant.ceiling  # a lower ceiling takes the default with it
    set_names(tenant.models, models)


def _set_rights(
    tenant: admin_pb2.Tenant, agents: bool | None, sessions: bool | None, fail_open: bool | None
) -> None:
    for field, value in (
        ("agents", agents),
        ("sessions", sessions),
        ("quota_fail_open", fail_open),
    ):
        if value is not None:
            setattr(tenant, field, value)


def _rights(tenant: admin_pb2.Tenant) -> list[str]:
    rights = {
        "agents": tenant.agents,
        "sessions": tenant.sessions,
        "fail-open": tenant.quota_fail_open,
    }
    return [name for name, given in rights.items() if given]


def _class_name(number: int) -> str:
    return CLASSES[number - 1] if 1 <= number <= len(CLASSES) else "?"


def _day(key: Any, field: str, unset: str) -> str:
    if not key.HasField(field):
        return unset
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(getattr(key, field).seconds)) + " UTC"


def _key_path(config: Path | None, name: str) -> Path:
    return run_paths(config).runtime / f"api-key-{name}"


def _write_key(path: Path, key: str) -> None:
    from sluice.command.first_files import SECRET_MODE
    from sluice.command.run_files import write_atomically

    write_atomically(path, f"{key}\n", SECRET_MODE)


def _own_key_id(config: Path | None) -> str:
    """The identifier of the key that this command itself uses; empty when there is none."""
    from sluice.command.first_files import api_key_path

    try:
        key = api_key_path(run_paths(config).runtime).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return _FILE_KEY + hashlib.sha256(key.encode()).hexdigest()[:_FILE_KEY_CHARS]
