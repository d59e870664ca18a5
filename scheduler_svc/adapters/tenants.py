"""Who calls: tenants by the hash of a key.

The table comes from the tenants file until the state service has told it; from then on only what
that says counts, and while it is away the last table stays. Admin keys always come from the file,
which is read again when it changes; a bad one is refused with a log line and the last good one
stays. A look-up is one hash and two dictionary accesses, synchronous. One event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from scheduler_svc.adapters.tenant import Key, Tenant
from scheduler_svc.adapters.tenants_file import TenantsFileError, TenantTable, parse
from sluice import logs
from sluice.errors import SluiceError, permission_denied, unauthenticated, unavailable
from sluice.quota.exchange import Limits

POLL_INTERVAL_S: Final = 2.0
KEY_BYTES_MAX: Final = 512
RETRY_AFTER_S: Final = 1.0

log = logs.get(__name__)


class OnTenant(Protocol):
    """Told of a tenant that is new or changed."""

    def __call__(self, tenant: str, limits: Limits, *, fail_open: bool) -> None: ...


class Tenants:
    """The table now. ``wall`` is the clock by which keys expire, in Unix seconds. ``awaits_state``:
    a state service will tell; until it has, a key that is not known may be one of its own."""

    def __init__(
        self, path: Path, wall: Callable[[], float] = time.time, *, awaits_state: bool = False
    ) -> None:
        self.reloads = 0
        self.reloads_failed = 0
        self.seed_changed = asyncio.Event()
        """Set whenever the file, or what was made from it, is to be brought to the state service
        again."""
        self._path = path
        self._wall = wall
        self._stamp = self._stat()
        self._seed = parse(path.read_text())
        self._told = False
        self._awaits_state = awaits_state
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, Key] = {}
        self._hashes: dict[str, str] = {}
        self._on_tenant: OnTenant | None = None
        self._on_removed: Callable[[str], None] | None = None
        self._take_seed()

    # Who calls.

    def tenant(self, authorization: str | None) -> Tenant:
        """Who calls, from the ``authorization`` header. Raises UNAUTHENTICATED, or UNAVAILABLE for
        an unknown key before the state service has told its own."""
        key = self._keys.get(_key_hash(authorization))
        tenant = None if key is None else self._tenants.get(key.tenant)
        if key is None or tenant is None:
            if self._awaits_state and not self._told:
                raise unavailable(
                    "STATE_UNREACHABLE",
                    "the state service has not told its keys yet, and this is none of the file's",
                    RETRY_AFTER_S,
                )
            raise _wrong_key()
        if key.expires_s <= self._wall():
            raise unauthenticated("KEY_EXPIRED", "the key has expired")
        return tenant

    def check_admin(self, authorization: str | None) -> None:
        """Raises unless the caller holds an admin key: UNAUTHENTICATED, or PERMISSION_DENIED for a
        tenant's key."""
        key_hash = _key_hash(authorization)
        if key_hash in self._seed.admin_key_hashes:
            return
        if key_hash in self._keys:
            raise permission_denied("ADMIN_ONLY", "this needs an admin key")
        raise _wrong_key()

    # What the state service says.

    @property
    def seed(self) -> TenantTable:
        """The file as last read."""
        return self._seed

    def named(self, name: str) -> Tenant | None:
        """The tenant of that name."""
        return self._tenants.get(name)

    def listen(self, on_tenant: OnTenant, on_removed: Callable[[str], None]) -> None:
        """Tells of every tenant there is, and from now on of every change."""
        self._on_tenant, self._on_removed = on_tenant, on_removed
        for tenant in self._tenants.values():
            on_tenant(tenant.name, tenant.limits, fail_open=tenant.quota_fail_open)

    def replace(self, tenants: Iterable[Tenant], keys: Iterable[Key]) -> None:
        """Everything that the state service knows."""
        self._told = True
        self._replace(tenants, keys)

    def change(
        self,
        tenants: Iterable[Tenant] = (),
        keys: Iterable[Key] = (),
        removed: Iterable[str] = (),
        removed_keys: Iterable[str] = (),
    ) -> None:
        """What changed there. A key that moves is removed by its id before it is put."""
        for key_id in removed_keys:
            self._forget_key(key_id)
        for name in removed:
            self._remove(name)
        for tenant in tenants:
            self._put(tenant)
        for key in keys:
            self._put_key(key)
        if not self._tenants:
            # Its store was lost: what the file has is to be there again.
            self.seed_changed.set()

    def _replace(self, tenants: Iterable[Tenant], keys: Iterable[Key]) -> None:
        new = {tenant.name: tenant for tenant in tenants}
        for name in self._tenants.keys() - new.keys():
            self._remove(name)
        for tenant in new.values():
            self._put(tenant)
        self._keys.clear()
        self._hashes.clear()
        for key in keys:
            self._put_key(key)

    def _put(self, tenant: Tenant) -> None:
        if self._tenants.get(tenant.name) == tenant:
            return
        self._tenants[tenant.name] = tenant
        if self._on_tenant is not None:
            self._on_tenant(tenant.name, tenant.limits, fail_open=tenant.quota_fail_open)

    def _remove(self, name: str) -> None:
        if self._tenants.pop(name, None) is not None and self._on_removed is not None:
            self._on_removed(name)

    def _put_key(self, key: Key) -> None:
        self._forget_key(key.key_id)
        self._keys[key.key_hash] = key
        self._hashes[key.key_id] = key.key_hash

    def _forget_key(self, key_id: str) -> None:
        key_hash = self._hashes.pop(key_id, None)
        if key_hash is not None and self._keys[key_hash].key_id == key_id:
            del self._keys[key_hash]

    # The file.

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
            self._seed = parse(self._path.read_text())
        except (OSError, UnicodeDecodeError, TenantsFileError) as error:
            self.reloads_failed += 1
            log.error("tenants file refused; the last good one stays", problem=str(error))
            return
        self.reloads += 1
        log.info("tenants file read again")
        self.seed_changed.set()
        if not self._told:
            self._take_seed()

    def _take_seed(self) -> None:
        keys = self._seed.keys.items()
        self._replace(
            self._seed.tenants.values(),
            [Key(seed_key_id(key_hash), tenant, key_hash) for key_hash, tenant in keys],
        )

    def _stat(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size


def seed_key_id(key_hash: str) -> str:
    """The identifier of a key that the file brings, by its hash in hex."""
    return f"file-{key_hash[:24]}"


def _key_hash(authorization: str | None) -> str:
    if not authorization:
        raise unauthenticated("KEY_MISSING", "send a key as `authorization: Bearer KEY`")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key or len(key) > KEY_BYTES_MAX:
        raise unauthenticated("KEY_MALFORMED", "send a key as `authorization: Bearer KEY`")
    return hashlib.sha256(key.strip().encode()).hexdigest()


def _wrong_key() -> SluiceError:
    return unauthenticated("KEY_UNKNOWN", "the key is not known")
