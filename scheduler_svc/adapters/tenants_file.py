"""The tenants file: who may call where there is no state service, and what seeds one.

The file holds SHA-256 hashes of keys, never keys. The state service, where there is one, is told of
every tenant and key that it never had from here; what was changed or deleted there stays so. Admin
keys are only here. Pure.

    admin_key_sha256 = ["<64 hex digits>"]

    [[tenant]]
    name = "dev"
    key_sha256 = ["<64 hex digits>"]
    ceiling = "critical"         # highest class it may use
    default_class = "standard"   # class of requests that say none
    models = []                  # models and aliases it may use; empty: all
    agents = false
    tools = []                   # tools that its agents may use
    concurrent_runs = 4          # open agent runs; absent: scheduler.agent_runs_max
    sessions = true
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.domain.model import PriorityClass

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
RUNS_MAX: Final = (1 << 32) - 1
_FIELDS: Final = frozenset(
    (
        *("name", "key_sha256", "ceiling", "default_class", "models"),
        *("agents", "tools", "concurrent_runs", "sessions"),
    )
)


class TenantsFileError(ValueError):
    """The file is wrong; the text names the entry and the field."""


@dataclass(frozen=True, slots=True)
class TenantTable:
    """One reading of the file. ``keys``: hash of a key, in hex, to the name of its tenant."""

    tenants: Mapping[str, Tenant]
    keys: Mapping[str, str]
    admin_key_hashes: frozenset[str]


def parse(text: str) -> TenantTable:
    """Reads a tenants file; raises :class:`TenantsFileError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TenantsFileError(f"not TOML: {error}") from error
    if unknown := document.keys() - {"tenant", "admin_key_sha256"}:
        raise TenantsFileError(f"{min(unknown)}: unknown field")
    keys: dict[str, str] = {}
    tenants: dict[str, Tenant] = {}
    entries = document.get("tenant", [])
    if not isinstance(entries, list):
        raise TenantsFileError("tenant: must be an array of tables: [[tenant]]")
    for number, entry in enumerate(entries):
        where = f"tenant[{number}]"
        tenant = _tenant(entry, where)
        if tenant.name in tenants:
            raise TenantsFileError(f"{where}.name: {tenant.name} occurs twice")
        tenants[tenant.name] = tenant
        for key_hash in _hashes(entry.get("key_sha256", []), f"{where}.key_sha256"):
            if key_hash in keys:
                raise TenantsFileError(f"{where}.key_sha256: a key belongs to two tenants")
            keys[key_hash] = tenant.name
    if not tenants:
        # A file that an editor has just emptied must not lock everybody out.
        raise TenantsFileError("tenant: at least one [[tenant]] is needed")
    admin = _hashes(document.get("admin_key_sha256", []), "admin_key_sha256")
    return TenantTable(tenants, keys, frozenset(admin))


def _tenant(entry: object, where: str) -> Tenant:
    if not isinstance(entry, dict):
        raise TenantsFileError(f"{where}: not a table")
    if unknown := entry.keys() - _FIELDS:
        raise TenantsFileError(f"{where}.{min(unknown)}: unknown field")
    own = entry.get("name")
    if not isinstance(own, str) or not _NAME.fullmatch(own):
        raise TenantsFileError(f"{where}.name: must match {_NAME.pattern}")
    for field in ("models", "tools"):
        names = entry.get(field, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TenantsFileError(f"{where}.{field}: must be a list of names")
    runs = entry.get("concurrent_runs")
    if runs is not None and (type(runs) is not int or not 0 <= runs <= RUNS_MAX):
        raise TenantsFileError(f"{where}.concurrent_runs: must be a number of 0 to {RUNS_MAX}")
    for right in ("agents", "sessions"):
        if not isinstance(entry.get(right, False), bool):
            raise TenantsFileError(f"{where}.{right}: must be true or false")
    ceiling = _class(entry.get("ceiling", "critical"), f"{where}.ceiling")
    default = _class(entry.get("default_class", "standard"), f"{where}.default_class")
    return Tenant(
        name=own,
        ceiling=ceiling,
        default_class=max(default, ceiling),
        models=frozenset(entry.get("models", [])),
        agents=entry.get("agents", False),
        tools=frozenset(entry.get("tools", [])),
        concurrent_runs=runs,
        sessions=entry.get("sessions", True),
    )


def _class(value: object, where: str) -> PriorityClass:
    if not isinstance(value, str) or value.upper() not in PriorityClass.__members__:
        names = ", ".join(name.lower() for name in PriorityClass.__members__)
        raise TenantsFileError(f"{where}: must be one of {names}")
    return PriorityClass[value.upper()]


def _hashes(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(
        isinstance(item, str) and _HASH.fullmatch(item) for item in value
    ):
        raise TenantsFileError(f"{where}: must be a list of 64 lower-case hex digits each")
    return value
