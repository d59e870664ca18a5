"""``TenantService``: tenants and keys over the registry. A tenant is checked whole before it is
stored, so that a bad change is refused and the last good one stays."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from sluice.common.v1 import policy_pb2
from sluice.errors import invalid, not_found
from sluice.fault_points import fault_point
from sluice.quota.exchange import AMOUNT_MAX
from sluice.run_budgets import check_run_budget
from sluice.state.v1 import tenants_pb2, tenants_pb2_grpc
from sluice.timestamps import unix_seconds
from state_svc.adapters import stored
from state_svc.adapters.registry_watch import Change, RegistryWatch
from state_svc.adapters.store_errors import store_errors
from state_svc.adapters.tenant_purge import TenantPurge
from state_svc.domain.names import RESERVED, check_model, check_tenant
from state_svc.ports import (
    Kind,
    NameTakenError,
    ParentMissingError,
    Record,
    RegistryStore,
    TenantBeingDeletedError,
    VersionConflictError,
)

NAMES_MAX: Final = 256
LABEL_CHARS_MAX: Final = 128
SEEDS_MAX: Final = 4096
PART_BYTES: Final = 256 << 10  # a scheduler reads one in a few milliseconds
SHA256_BYTES: Final = 32
_KEY_ID: Final = re.compile(r"[a-z0-9-]{1,64}")


class TenantServicer(tenants_pb2_grpc.TenantServiceServicer):
    """See the proto. ``purge`` deletes what belonged to deleted tenants; without it their names
    stay marked."""

    def __init__(
        self, store: RegistryStore, watch: RegistryWatch, purge: TenantPurge | None = None
    ) -> None:
        self._store, self._watch, self._purge = store, watch, purge

    async def PutTenant(
        self, request: tenants_pb2.PutTenantRequest, context: Any
    ) -> tenants_pb2.PutTenantResponse:
        """Creates or changes a tenant."""
        tenant = _checked(request.tenant, "tenant")
        expected = request.expected_version if request.HasField("expected_version") else None
        with store_errors():
            version = await self._store.put(
                Kind.TENANTS, tenant.name, tenant.SerializeToString(), expected=expected
            )
            await self._created(tenant.name)
        self._watch.poke()
        tenant.version = version
        return tenants_pb2.PutTenantResponse(tenant=tenant)

    async def DeleteTenant(
        self, request: tenants_pb2.DeleteTenantRequest, context: Any
    ) -> tenants_pb2.DeleteTenantResponse:
        """Deletes a tenant and its keys; what else belongs to it soon after."""
        name = check_tenant(request.tenant, "tenant")
        expected = request.expected_version if request.HasField("expected_version") else None
        with store_errors():
            if not await self._store.delete(Kind.TENANTS, name, expected=expected):
                raise not_found("TENANT_UNKNOWN", "There is no such tenant.")
        fault_point("tenants.after_delete")
        self._watch.poke()
        if self._purge is not None:
            self._purge.poke()
        return tenants_pb2.DeleteTenantResponse()

    async def _created(self, name: str) -> None:
        """Opens the fences of a name that was in use before. *Crash before:* the purge does."""
        fault_point("tenants.after_create")
        if self._purge is not None:
            await self._purge.created(name)

    async def PutKey(
        self, request: tenants_pb2.PutKeyRequest, context: Any
    ) -> tenants_pb2.PutKeyResponse:
        """Adds a key."""
        _check_key(request.key, "key")
        with store_errors():
            await self._put_key(request.key)
        self._watch.poke()
        return tenants_pb2.PutKeyResponse()

    async def _put_key(self, key: tenants_pb2.TenantKey) -> None:
        await self._store.put(
            Kind.KEYS,
            f"{key.tenant}/{key.key_id}",
            key.SerializeToString(),
            unique=(f"id:{key.key_id}", f"sha256:{key.sha256.hex()}"),
        )

    async def SeedTenants(
        self, request: tenants_pb2.SeedTenantsRequest, context: Any
    ) -> tenants_pb2.SeedTenantsResponse:
        """Creates what was never seeded before. A crash between a record and its mark is harmless:
        the record is there already the next time."""
        if len(request.tenants) > SEEDS_MAX or len(request.keys) > SEEDS_MAX:
            raise invalid("tenants", f"at most {SEEDS_MAX} tenants and as many keys")
        tenants = [_checked(one, f"tenants[{n}]") for n, one in enumerate(request.tenants)]
        for number, key in enumerate(request.keys):
            _check_key(key, f"keys[{number}]")
        created = 0
        later = set()  # names that are not free yet: seeded the next time
        with store_errors():
            seeded = (await self._store.read(Kind.SEEDS)).records
            for tenant in tenants:
                if (mark := f"tenant/{tenant.name}") in seeded:
                    continue
                try:
                    value = tenant.SerializeToString()
                    await self._store.put(Kind.TENANTS, tenant.name, value, expected=0)
                    await self._created(tenant.name)
                    created += 1
                except VersionConflictError:  # it was made by other means
                    pass
                except TenantBeingDeletedError:
                    later.add(tenant.name)
                    continue
                await self._store.put(Kind.SEEDS, mark, b"")
            for key in request.keys:
                if (mark := f"key/{key.sha256.hex()}") in seeded or key.tenant in later:
                    continue
                with suppress(NameTakenError, ParentMissingError):
                    await self._put_key(key)
                    created += 1
                await self._store.put(Kind.SEEDS, mark, b"")
        self._watch.poke()
        return tenants_pb2.SeedTenantsResponse(created=created)

    async def DeleteKey(
        self, request: tenants_pb2.DeleteKeyRequest, context: Any
    ) -> tenants_pb2.DeleteKeyResponse:
        """Deletes a key."""
        if not _KEY_ID.fullmatch(request.key_id):
            raise invalid("key_id", f"must match {_KEY_ID.pattern}")
        with store_errors():
            name = await self._store.find(Kind.KEYS, f"id:{request.key_id}")
            if name is None or not await self._store.delete(Kind.KEYS, name):
                raise not_found("KEY_UNKNOWN", "There is no such key.")
        self._watch.poke()
        return tenants_pb2.DeleteKeyResponse()

    async def ListTenants(
        self, request: tenants_pb2.ListTenantsRequest, context: Any
    ) -> tenants_pb2.ListTenantsResponse:
        """Lists tenants and keys."""
        with store_errors():
            tenants = await self._store.read(Kind.TENANTS)
            keys = await self._store.read(Kind.KEYS)
        return tenants_pb2.ListTenantsResponse(
            tenants=_tenants(tenants.records[name] for name in sorted(tenants.records)),
            keys=_keys(keys.records[name] for name in sorted(keys.records)),
        )

    async def WatchTenants(
        self, request: tenants_pb2.WatchTenantsRequest, context: Any
    ) -> AsyncIterator[tenants_pb2.WatchTenantsResponse]:
        """Streams everything, then changes."""
        async for change in self._watch.follow((Kind.TENANTS, Kind.KEYS)):
            for part in _parts(change):
                yield part


def _check_key(key: tenants_pb2.TenantKey, where: str) -> None:
    check_tenant(key.tenant, f"{where}.tenant")
    if not _KEY_ID.fullmatch(key.key_id):
        raise invalid(f"{where}.key_id", f"must match {_KEY_ID.pattern}")
    if len(key.sha256) != SHA256_BYTES:
        raise invalid(f"{where}.sha256", f"must be {SHA256_BYTES} bytes")
    if len(key.label) > LABEL_CHARS_MAX:
        raise invalid(f"{where}.label", f"at most {LABEL_CHARS_MAX} characters")
    unix_seconds(key.create_time, f"{where}.create_time")
    unix_seconds(key.expire_time, f"{where}.expire_time")


def _checked(given: tenants_pb2.Tenant, where: str) -> tenants_pb2.Tenant:
    if check_tenant(given.name, f"{where}.name") in RESERVED:
        raise invalid(f"{where}.name", "is reserved")
    tenant = tenants_pb2.Tenant()
    tenant.CopyFrom(given)
    tenant.ClearField("version")
    classes = policy_pb2.PriorityClass.values()
    if tenant.ceiling not in classes or not tenant.ceiling:
        raise invalid(f"{where}.ceiling", "must be a priority class")
    if tenant.default_class not in classes:
        raise invalid(f"{where}.default_class", "must be a priority class")
    if not tenant.default_class:
        tenant.default_class = max(policy_pb2.PRIORITY_CLASS_STANDARD, tenant.ceiling)
    if tenant.default_class < tenant.ceiling:
        raise invalid(f"{where}.default_class", "must not be above the ceiling")
    for field, names in (("models", tenant.models), ("tools", tenant.tools)):
        if len(names) > NAMES_MAX:
            raise invalid(f"{where}.{field}", f"at most {NAMES_MAX}")
        for name in names:
            check_model(name, f"{where}.{field}")
    if max(tenant.limits.tokens_per_min, tenant.limits.tokens_per_day) > AMOUNT_MAX:
        raise invalid(f"{where}.limits", f"at most {AMOUNT_MAX} tokens")
    check_run_budget(tenant.run_budget, f"{where}.run_budget")
    return tenant


def _parts(change: Change) -> Iterator[tenants_pb2.WatchTenantsResponse]:
    """The change in messages of about ``PART_BYTES`` at most."""
    part = tenants_pb2.WatchTenantsResponse(
        snapshot=change.snapshot,
        deleted_tenants=change.deleted[Kind.TENANTS],
        deleted_keys=[name.partition("/")[2] for name in change.deleted[Kind.KEYS]],
    )
    size = 0
    for kind in (Kind.TENANTS, Kind.KEYS):
        for record in change.put[kind].values():
            if size > PART_BYTES:
                part.more = True
                yield part
                part, size = tenants_pb2.WatchTenantsResponse(snapshot=change.snapshot), 0
            if kind is Kind.TENANTS:
                part.tenants.extend(_tenants([record]))
            else:
                part.keys.extend(_keys([record]))
            size += len(record.value)
    yield part


def _tenants(records: Iterable[Record]) -> list[tenants_pb2.Tenant]:
    found = []
    for record in records:
        if (tenant := stored.read(tenants_pb2.Tenant, record)) is not None:
            tenant.version = record.version
            found.append(tenant)
    return found


def _keys(records: Iterable[Record]) -> list[tenants_pb2.TenantKey]:
    read = (stored.read(tenants_pb2.TenantKey, record) for record in records)
    return [key for key in read if key is not None]
