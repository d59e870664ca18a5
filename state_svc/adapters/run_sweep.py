"""Writes the hint of where runs are ready anew, from what each tenant holds, now and then.

Nothing needs it while the hint is kept: see ``valkey_run_index.py``. It is for a hint that was lost
and runs that were not. Bounded: :data:`TENANTS_AT_ONCE` tenants a :data:`PAUSE_S`, all of them
again after :data:`EVERY_S`. A store that is away is asked again then.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Protocol

from state_svc.ports import Kind, RegistryStore, StoreUnavailableError

EVERY_S: Final = 30.0
PAUSE_S: Final = 0.2
TENANTS_AT_ONCE: Final = 50


class Places(Protocol):
    """What can write places anew."""

    async def place(self, tenants: list[str]) -> None:
        """Of these tenants. Raises StoreUnavailableError."""


class RunSweep:
    """See the module's text."""

    def __init__(self, registry: RegistryStore, places: Places) -> None:
        self._registry, self._places = registry, places

    async def run(self) -> None:
        """Goes on until cancelled."""
        while True:
            with suppress(StoreUnavailableError):
                await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> None:
        """All tenants that are known. Raises StoreUnavailableError."""
        tenants = sorted((await self._registry.read(Kind.TENANTS)).records)
        for begin in range(0, len(tenants), TENANTS_AT_ONCE):
            await self._places.place(tenants[begin : begin + TENANTS_AT_ONCE])
            await asyncio.sleep(PAUSE_S)
