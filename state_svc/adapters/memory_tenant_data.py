"""The twin of ``valkey_tenant_data.py`` over the stores in memory, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from state_svc.adapters.memory_stores import MemoryUsage

HOUR_S = 3600


class MemoryTenantData:
    """A :class:`state_svc.deletion_ports.TenantData`. ``forget``: take all of one tenant away."""

    def __init__(
        self, forget: Sequence[Callable[[str], None]], usage: MemoryUsage | None = None
    ) -> None:
        self._forget, self._usage = forget, usage
        self.fences: dict[str, tuple[int, bool]] = {}  # number, whether closed

    async def close(self, tenant: str, number: int) -> bool:
        """See :class:`state_svc.deletion_ports.TenantData`."""
        known, closed = self.fences.get(tenant, (0, True))
        if known > number or (known == number and not closed):
            return False
        self.fences[tenant] = (number, True)
        return True

    async def purge(self, tenant: str, number: int) -> bool:
        """See :class:`state_svc.deletion_ports.TenantData`."""
        if self.fences.get(tenant) != (number, True):
            return False
        for forget in self._forget:
            forget(tenant)
        return True

    async def open(self, tenant: str, number: int) -> None:
        """See :class:`state_svc.deletion_ports.TenantData`."""
        known = self.fences.get(tenant, (0, True))
        if known[0] > number or known == (number, False):
            return
        self.fences[tenant] = (number, False)
        if self._usage is not None:
            now = asyncio.get_running_loop().time()
            self._usage.since[tenant] = int(now // HOUR_S) + 1
