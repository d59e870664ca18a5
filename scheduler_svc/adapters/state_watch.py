"""Keeps tenants, aliases and drains as the state service has them.

Three watches, each its own task: everything first, then changes; one that ends is opened again with
a growing, jittered pause. What was told stays while the service is away, so that it is needed to
change things and not to serve. Before the first table of tenants the tenants file is brought to the
service, and again whenever it changes.

A record that this release cannot read (a newer one wrote it) is refused with a log line; what was
known of that tenant stays.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import grpc.aio

from scheduler_svc.adapters.alias_table import AliasTable
from scheduler_svc.adapters.run_request import some_limits
from scheduler_svc.adapters.tenant import NEVER, Key, Tenant
from scheduler_svc.adapters.tenants import Tenants, seed_key_id
from scheduler_svc.domain.aliases import Alias, Target
from scheduler_svc.domain.model import InstanceName, PriorityClass
from sluice import logs
from sluice.channels import ending
from sluice.common.v1 import policy_pb2
from sluice.errors import Code, SluiceError
from sluice.health import Component
from sluice.quota.exchange import Limits
from sluice.state.v1 import (
    aliases_pb2,
    aliases_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)
from sluice.status import from_rpc_error
from sluice.timestamps import unix_seconds

PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 1.0  # the service is found again within this and a connection attempt
CALL_TIMEOUT_S: Final = 5.0
AWAY: Final = "the state service does not answer; what it last said stays"

log = logs.get(__name__)


class OnDrain(Protocol):
    """Told of an instance that operators drain, or no longer."""

    def __call__(self, name: InstanceName, *, drained: bool) -> object: ...


class StateWatch:
    """See the module's docstring. ``drain`` is told of every mark once, ``component`` how the
    service is."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        tenants: Tenants,
        aliases: AliasTable,
        drain: OnDrain,
        component: Component,
    ) -> None:
        self._fleet_stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)
        self._drain = drain
        self._drained: set[str] = set()
        self._tenant_stub: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        self._alias_stub: Any = aliases_pb2_grpc.AliasServiceStub(channel)
        self._tenants = tenants
        self._aliases = aliases
        self._component = component
        self._component.down("not reached yet")
        self._seeded = asyncio.Event()
        # Of a snapshot that is still coming.
        self._parts: tuple[list[Tenant], list[Key]] = ([], [])

    async def run(self) -> None:
        """Follows until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._seed())
            group.create_task(self._follow_tenants())
            group.create_task(
                _follow(
                    lambda: self._alias_stub.WatchAliases(aliases_pb2.WatchAliasesRequest()),
                    self._aliases_changed,
                )
            )
            group.create_task(
                _follow(
                    lambda: self._fleet_stub.WatchDrains(fleet_pb2.WatchDrainsRequest()),
                    self._drains_changed,
                )
            )

    async def _follow_tenants(self) -> None:
        await self._seeded.wait()
        await _follow(
            lambda: self._tenant_stub.WatchTenants(tenants_pb2.WatchTenantsRequest()),
            self._tenants_changed,
            self._tenants_away,
        )

    def _tenants_away(self) -> None:
        self._parts = ([], [])
        self._component.down(AWAY)

    async def _seed(self) -> None:
        pause_s = PAUSE_MIN_S
        while True:
            self._tenants.seed_changed.clear()
            try:
                await self._tenant_stub.SeedTenants(self._seeds(), timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error)
                if typed.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2 * pause_s, PAUSE_MAX_S)
                    continue
                log.error("tenants file refused by the state service", problem=str(typed))
            pause_s = PAUSE_MIN_S
            self._seeded.set()
            await self._tenants.seed_changed.wait()

    def _seeds(self) -> tenants_pb2.SeedTenantsRequest:
        table = self._tenants.seed
        return tenants_pb2.SeedTenantsRequest(
            tenants=[tenant_message(tenant) for tenant in table.tenants.values()],
            keys=[
                tenants_pb2.TenantKey(
                    key_id=seed_key_id(key_hash),
                    tenant=tenant,
                    sha256=bytes.fromhex(key_hash),
                    label="from the tenants file",
                )
                for key_hash, tenant in table.keys.items()
            ],
        )

    def _tenants_changed(self, change: tenants_pb2.WatchTenantsResponse) -> None:
        tenants = list(self._read(change.tenants))
        keys = list(self._read_keys(change.keys))
        if not change.snapshot:
            # What is gone comes with the first part: nobody loses rights later than others.
            self._tenants.change(tenants, keys, change.deleted_tenants, change.deleted_keys)
            return
        self._parts[0].extend(tenants)
        self._parts[1].extend(keys)
        if change.more:
            return
        self._tenants.replace(*self._parts)
        self._parts = ([], [])
        self._component.up()

    def _read(self, messages: Iterable[tenants_pb2.Tenant]) -> Iterable[Tenant]:
        for message in messages:
            try:
                yield read_tenant(message)
            except ValueError as error:
                self._tenants.reloads_failed += 1
                log.error("tenant refused; the last good stays", problem=str(error))
                if (known := self._tenants.named(message.name)) is not None:
                    yield known

    def _read_keys(self, messages: Iterable[tenants_pb2.TenantKey]) -> Iterable[Key]:
        for message in messages:
            try:
                yield read_key(message)
            except SluiceError as error:
                self._tenants.reloads_failed += 1
                log.error("key refused", key_id=message.key_id, problem=str(error))

    def _aliases_changed(self, change: aliases_pb2.WatchAliasesResponse) -> None:
        self._aliases.change(
            [read_alias(alias) for alias in change.aliases],
            change.deleted_aliases,
            snapshot=change.snapshot,
        )

    def _drains_changed(self, change: fleet_pb2.WatchDrainsResponse) -> None:
        marked = set(change.drained)
        gone = self._drained - marked if change.snapshot else set(change.undrained)
        for instance in gone & self._drained:
            self._drain(InstanceName(instance), drained=False)
        for instance in marked - self._drained:
            self._drain(InstanceName(instance), drained=True)
        self._drained = (self._drained - gone) | marked


async def _follow(
    start: Callable[[], Any],
    apply: Callable[[Any], None],
    away: Callable[[], None] | None = None,
) -> None:
    """Hands every message of a watch to ``apply``, until cancelled."""
    pause_s = PAUSE_MIN_S
    while True:
        call = start()
        with ending(call):
            try:
                async for change in call:
                    apply(change)
                    pause_s = PAUSE_MIN_S
            except grpc.aio.AioRpcError as error:
                log.debug("watch of the state service ended", problem=str(from_rpc_error(error)))
        if away is not None:
            away()
        # Ended by a drain or a loss, which look the same from here.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def read_tenant(message: tenants_pb2.Tenant) -> Tenant:
    """The tenant in a message. ValueError names the field that this release cannot read."""
    limits = message.limits
    return Tenant(
        name=message.name,
        ceiling=_class(message.ceiling, message.name, "ceiling"),
        default_class=_class(message.default_class, message.name, "default_class"),
        models=frozenset(message.models),
        agents=message.agents,
        sessions=message.sessions,
        limits=Limits(
            requests_per_min=_optional(limits, "requests_per_min"),
            tokens_per_min=_optional(limits, "tokens_per_min"),
            concurrent_requests=_optional(limits, "concurrent_requests"),
            tokens_per_day=_optional(limits, "tokens_per_day"),
        ),
        quota_fail_open=message.quota_fail_open,
        concurrent_runs=_optional(message, "concurrent_runs"),
        tools=frozenset(message.tools),
        run_limits=some_limits(message.run_budget),
    )


def tenant_message(tenant: Tenant) -> tenants_pb2.Tenant:
    """The message of a tenant of the file, which has no limits."""
    return tenants_pb2.Tenant(
        name=tenant.name,
        ceiling=_CLASSES[tenant.ceiling],
        default_class=_CLASSES[tenant.default_class],
        models=sorted(tenant.models),
        agents=tenant.agents,
        sessions=tenant.sessions,
        tools=sorted(tenant.tools),
        concurrent_runs=tenant.concurrent_runs,
    )


def read_key(message: tenants_pb2.TenantKey) -> Key:
    """The key in a message. INVALID_ARGUMENT: its time is none."""
    expires_s = unix_seconds(message.expire_time, "expire_time")
    return Key(
        message.key_id,
        message.tenant,
        message.sha256.hex(),
        expires_s if message.HasField("expire_time") else NEVER,
    )


def read_alias(message: aliases_pb2.Alias) -> Alias:
    """The alias in a message; its history stays where it is stored."""
    targets = tuple(Target(target.model, target.weight) for target in message.targets)
    return Alias(message.name, targets, message.version)


_CLASSES: Final = {
    PriorityClass.CRITICAL: policy_pb2.PRIORITY_CLASS_CRITICAL,
    PriorityClass.INTERACTIVE: policy_pb2.PRIORITY_CLASS_INTERACTIVE,
    PriorityClass.STANDARD: policy_pb2.PRIORITY_CLASS_STANDARD,
    PriorityClass.BATCH: policy_pb2.PRIORITY_CLASS_BATCH,
}
_BY_NUMBER: Final = {int(number): one for one, number in _CLASSES.items()}


def _class(number: int, tenant: str, field: str) -> PriorityClass:
    known = _BY_NUMBER.get(number)
    if known is None:
        raise ValueError(f"{tenant}.{field}: class {number} is not known to this release")
    return known


def _optional(message: Any, field: str) -> int | None:
    return int(getattr(message, field)) if message.HasField(field) else None
