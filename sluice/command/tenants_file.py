"""Changes to the tenants file, for one machine: who may call the mesh, and their keys.

Owns the text of `<runtime>/tenants.toml` while it changes, and one key file for each tenant that
was added here. The scheduler reads the file again within seconds of a change, and keeps the last
good one, so a change replaces the file in one step and is parsed before. What else stands in it,
comments too, stays as it is. Blocking; one change at a time in a folder (a lock).

Failure modes: ConfigError names the file and what is wrong; then nothing has been changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sluice.command.first_files import KEY_BYTES, SECRET_MODE, api_key_path
from sluice.command.run_files import RunPaths, write_atomically
from sluice.command.supervisor import locked
from sluice.config import ConfigError

CLASSES: Final = ("critical", "interactive", "standard", "batch")
_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_HEADER: Final = re.compile(r"^[ \t]*\[", re.MULTILINE)
_TENANT_HEADER: Final = re.compile(r"^[ \t]*\[\[[ \t]*tenant[ \t]*\]\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tenant:
    """An entry of the file."""

    name: str
    default_class: str = "standard"
    ceiling: str = "critical"
    models: tuple[str, ...] = ()
    """Empty: all."""
    keys: int = 1
    """How many keys it has."""


class TenantsFile:
    """The tenants of one runtime folder."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self.path = runtime / "tenants.toml"

    def key_path(self, name: str) -> Path:
        """Where the key of a tenant that was added here is."""
        return self._runtime / f"api-key-{name}"

    def tenants(self) -> list[Tenant]:
        """All entries. Raises ConfigError."""
        return [_tenant(entry) for entry in _entries(self._parsed(self._text()))]

    def add(self, tenant: Tenant) -> Path:
        """Adds the tenant with a new key; returns the key's file. Raises ConfigError."""
        if not _NAME.fullmatch(tenant.name):
            raise ConfigError("name", f"{tenant.name!r} must be [a-z0-9-], 1 to 64 characters")
        if CLASSES.index(tenant.default_class) < CLASSES.index(tenant.ceiling):
            raise ConfigError(
                "class", f"{tenant.default_class} is above the ceiling, {tenant.ceiling}"
            )
        with self._changing():
            text = self._text()
            if any(one.name == tenant.name for one in self.tenants()):
                raise ConfigError(str(self.path), f"there is a tenant {tenant.name} already")
            key = f"sk-{tenant.name}-{secrets.token_urlsafe(KEY_BYTES)}"
            changed = f"{text.rstrip()}\n\n{_entry_text(tenant, _sha256(key))}"
            self._parsed(changed)
            path = self.key_path(tenant.name)
            # The key first: a tenant whose key nobody has would be of no use.
            write_atomically(path, f"{key}\n", SECRET_MODE)
            write_atomically(self.path, changed, SECRET_MODE)
        return path

    def remove(self, name: str) -> None:
        """Removes the tenant and its key file. Raises ConfigError."""
        with self._changing():
            text = self._text()
            entries = _entries(self._parsed(text))
            found = next((one for one in entries if one.get("name") == name), None)
            if found is None:
                known = ", ".join(str(one.get("name")) for one in entries)
                raise ConfigError(
                    str(self.path), f"there is no tenant {name!r}; there are: {known}"
                )
            if self._own_key_hash() in _strings(found.get("key_sha256")):
                raise ConfigError(
                    str(self.path), f"{name} has the key of `sluice` itself, {self._own_key.name}"
                )
            if len(entries) == 1:
                raise ConfigError(str(self.path), "the last tenant cannot be removed")
            changed = _without(text, entries.index(found))
            if _read(changed) != [one for one in entries if one is not found]:
                raise ConfigError(
                    str(self.path), f"its form is unusual: remove {name} with an editor"
                )
            write_atomically(self.path, changed, SECRET_MODE)
            self.key_path(name).unlink(missing_ok=True)

    @property
    def _own_key(self) -> Path:
        return api_key_path(self._runtime)

    def _own_key_hash(self) -> str:
        try:
            return _sha256(self._own_key.read_text(encoding="utf-8").strip())
        except OSError:
            return ""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with locked(RunPaths(self._runtime).run / "tenants.lock") as free:
            if not free:
                raise ConfigError(str(self.path), "another command is changing it; try again")
            yield

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(str(self.path), "is not there; `sluice up` makes it") from None
        except (OSError, UnicodeDecodeError):
            raise ConfigError(str(self.path), "cannot be read") from None

    def _parsed(self, text: str) -> Mapping[str, object]:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(str(self.path), f"is not TOML: {error}") from None


def _entries(document: Mapping[str, object]) -> list[Mapping[str, object]]:
    entries = document.get("tenant", [])
    return [one for one in entries if isinstance(one, Mapping)] if isinstance(entries, list) else []


def _tenant(entry: Mapping[str, object]) -> Tenant:
    return Tenant(
        name=str(entry.get("name", "")),
        default_class=str(entry.get("default_class", "standard")),
        ceiling=str(entry.get("ceiling", "critical")),
        models=tuple(_strings(entry.get("models"))),
        keys=len(_strings(entry.get("key_sha256"))),
    )


def _strings(value: object) -> Sequence[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _entry_text(tenant: Tenant, key_hash: str) -> str:
    return (
        "[[tenant]]\n"
        f'name = "{tenant.name}"\n'
        f'key_sha256 = ["{key_hash}"]\n'
        f'ceiling = "{tenant.ceiling}"\n'
        f'default_class = "{tenant.default_class}"\n'
        # JSON's strings are TOML's basic strings too.
        f"models = {json.dumps(list(tenant.models), ensure_ascii=False)}\n"
    )


def _read(text: str) -> list[Mapping[str, object]]:
    """The entries of a text that was cut; none when that damaged it."""
    try:
        return _entries(tomllib.loads(text))
    except tomllib.TOMLDecodeError:
        return []


def _without(text: str, index: int) -> str:
    """`text` without the entry of that number: from its header to the next one. What looks like a
    header in a string misleads it: the caller reads the result."""
    headers = [found.start() for found in _TENANT_HEADER.finditer(text)]
    if index >= len(headers):
        return text
    start = headers[index]
    after = _HEADER.search(text, text.index("]]", start))
    # Tables inside the entry, [tenant.x], go with it.
    while after is not None and re.match(r"[ \t]*\[+[ \t]*tenant[ \t]*\.", text[after.start() :]):
        after = _HEADER.search(text, after.end())
    rest = text[after.start() :] if after is not None else ""
    return f"{text[:start].rstrip()}\n\n{rest}".rstrip() + "\n"


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
