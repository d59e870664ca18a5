"""The tools that each tenant's runs may use now, as the state service says.

A run carries the names that its tenant had when it was admitted; what was taken away since is seen
here within a second, at the next call. One watch: everything first, then changes; one that ends is
opened again with a growing, jittered pause. What was last said stays while the service is away:
then no run can go on either, since nothing can be stored.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from sluice import logs
from sluice.channels import ending
from sluice.state.v1 import tenants_pb2, tenants_pb2_grpc
from sluice.status import from_rpc_error

PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 1.0

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _Tenant:
    version: int
    tools: frozenset[str]


_NOBODY: Final = _Tenant(0, frozenset())


class TenantRights:
    """See the module's docstring. One per process; memory: the names of every tenant's tools."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        self._known: dict[str, _Tenant] | None = None
        self._coming: dict[str, _Tenant] = {}  # of a snapshot that is not whole yet

    def tools(self, tenant: str) -> Collection[str] | None:
        """Names of tools and of what they belong to; none for a tenant that is gone or may not use
        agents. ``None``: nothing was said yet."""
        return None if self._known is None else self._known.get(tenant, _NOBODY).tools

    def version(self, tenant: str) -> int:
        """Of the tenant's record: grows with every change, also over a deletion. 0: there is no
        such tenant, or nothing was said yet."""
        return 0 if self._known is None else self._known.get(tenant, _NOBODY).version

    async def run(self) -> None:
        """Follows until cancelled."""
        pause_s = PAUSE_MIN_S
        while True:
            self._coming = {}
            call = self._stub.WatchTenants(tenants_pb2.WatchTenantsRequest())
            with ending(call):
                try:
                    async for change in call:
                        self._changed(change)
                        pause_s = PAUSE_MIN_S
                except grpc.aio.AioRpcError as error:
                    log.debug("watch of tenants ended", problem=str(from_rpc_error(error)))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _changed(self, change: tenants_pb2.WatchTenantsResponse) -> None:
        told = {
            tenant.name: _Tenant(
                tenant.version, frozenset(tenant.tools) if tenant.agents else frozenset()
            )
            for tenant in change.tenants
        }
        if change.snapshot:
            self._coming |= told
            if not change.more:
                self._known, self._coming = self._coming, {}
            return
        known = self._known if self._known is not None else {}
        known |= told
        for name in change.deleted_tenants:
            known.pop(name, None)
        self._known = known
