"""Tenants and their keys, from a TOML file.

The file holds SHA-256 hashes of keys, never keys. It is read again when it changes; a bad file is
refused with a log line and the last good one stays. A look-up is one hash and one dictionary
access.

    admin_key_sha256 = ["<64 hex digits>"]

    [[tenant]]
    name = "dev"
    key_sha256 = ["<64 hex digits>"]
    ceiling = "critical"         # highest class it may use
    default_class = "standard"   # class of requests that say none
    models = []                  # models it may use; empty: all
    agents = false
    sessions = true
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scheduler_svc.domain.model import PriorityClass
from sluice import logs
from sluice.errors import SluiceError, permission_denied, unauthenticated

POLL_INTERVAL_S: Final = 2.0
KEY_BYTES_MAX: Final = 512
_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = frozenset(
    ("name", "key_sha256", "ceiling", "default_class", "models", "agents", "sessions")
)

log = logs.get(__name__)


class TenantsFileError(ValueError):
    """The file is wrong; the text names the entry and the field."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's rights."""

    name: str
    ceiling: PriorityClass = PriorityClass.CRITICAL
    default_class: PriorityClass = PriorityClass.STANDARD
    models: frozenset[str] = frozenset()
    agents: bool = False
    sessions: bool = True

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use a model."""
        return not self.models or model in self.models

    def class_for(self, wanted: PriorityClass | None) -> PriorityClass:
        """The class of a request: what it wants, lowered to the ceiling."""
        return max(self.default_class if wanted is None else wanted, self.ceiling)


@dataclass(frozen=True, slots=True)
class TenantTable:
    """One reading of the file."""

    by_key_hash: Mapping[str, Tenant]
    admin_key_hashes: frozenset[str]


def parse(text: str) -> TenantTable:
    """Reads a tenants file; raises :class:`TenantsFileError`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TenantsFileError(f"not TOML: {error}") from error
    if unknown := document.keys() - {"tenant", "admin_key_sha256"}:
        raise TenantsFileError(f"{min(unknown)}: unknown field")
    by_key_hash: dict[str, Tenant] = {}
    names: set[str] = set()
    entries = document.get("tenant", [])
    if not isinstance(entries, list):
        raise TenantsFileError("tenant: must be an array of tables: [[tenant]]")
    for number, entry in enumerate(entries):
        where = f"tenant[{number}]"
        tenant = _tenant(entry, where)
        if tenant.name in names:
            raise TenantsFileError(f"{where}.name: {tenant.name} occurs twice")
        names.add(tenant.name)
        for key_hash in _hashes(entry.get("key_sha256", []), f"{where}.key_sha256"):
            if key_hash in by_key_hash:
                raise TenantsFileError(f"{where}.key_sha256: a key belongs to two tenants")
            by_key_hash[key_hash] = tenant
    if not names:
        # A file that an editor has just emptied must not lock everybody out.
        raise TenantsFileError("tenant: at least one [[tenant]] is needed")
    admin = _hashes(document.get("admin_key_sha256", []), "admin_key_sha256")
    return TenantTable(by_key_hash, frozenset(admin))


def _tenant(entry: object, where: str) -> Tenant:
    if not isinstance(entry, dict):
        raise TenantsFileError(f"{where}: not a table")
    if unknown := entry.keys() - _FIELDS:
        raise TenantsFileError(f"{where}.{min(unknown)}: unknown field")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TenantsFileError(f"{where}.name: must match {_NAME.pattern}")
    models = entry.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise TenantsFileError(f"{where}.models: must be a list of names")
    for right in ("agents", "sessions"):
        if not isinstance(entry.get(right, False), bool):
            raise TenantsFileError(f"{where}.{right}: must be true or false")
    return Tenant(
        name=name,
        ceiling=_class(entry.get("ceiling", "critical"), f"{where}.ceiling"),
        default_class=_class(entry.get("default_class", "standard"), f"{where}.default_class"),
        models=frozenset(models),
        agents=entry.get("agents", False),
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


class TenantsFile:
    """The current table, kept fresh."""

    def __init__(self, path: Path) -> None:
        self.reloads = 0
        self.reloads_failed = 0
        self._path = path
        self._stamp = self._stat()
        self._table = parse(path.read_text())

    def tenant(self, authorization: str | None) -> Tenant:
        """Who calls, from the ``authorization`` header. Raises UNAUTHENTICATED."""
        tenant = self._table.by_key_hash.get(_key_hash(authorization))
        if tenant is None:
            raise _wrong_key()
        return tenant

    def check_admin(self, authorization: str | None) -> None:
        """Raises unless the caller holds an admin key: UNAUTHENTICATED, or PERMISSION_DENIED for a
        tenant's key."""
        key_hash = _key_hash(authorization)
        if key_hash in self._table.admin_key_hashes:
            return
        if key_hash in self._table.by_key_hash:
            raise permission_denied("ADMIN_ONLY", "this needs an admin key")
        raise _wrong_key()

    async def watch(self) -> None:
        """Reads the file again when it changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the file again if it changed; keeps the last good one when it is bad."""
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._table = parse(self._path.read_text())
            self.reloads += 1
            log.info("tenants file read again")
        except (OSError, UnicodeDecodeError, TenantsFileError) as error:
            self.reloads_failed += 1
            log.error("tenants file refused; the last good one stays", problem=str(error))

    def _stat(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size


def _key_hash(authorization: str | None) -> str:
    if not authorization:
        raise unauthenticated("KEY_MISSING", "send a key as `authorization: Bearer KEY`")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key or len(key) > KEY_BYTES_MAX:
        raise unauthenticated("KEY_MALFORMED", "send a key as `authorization: Bearer KEY`")
    return hashlib.sha256(key.strip().encode()).hexdigest()


def _wrong_key() -> SluiceError:
    return unauthenticated("KEY_UNKNOWN", "the key is not known")
