"""A bounded number of rooms for work at once, shared out fairly among tenants.

A tenant has at most ``tenant_max`` of them, so that what one tenant does in all of its own never
makes others wait for a room while there is another; beyond that tenants are served in turn, each in
its own order. A room is handed over to who waits before anybody new may take it. For one event
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairRooms:
    """See the module's docstring. ``tenant_max``: at most ``rooms``."""

    def __init__(self, rooms: int, tenant_max: int) -> None:
        self._free = rooms
        self._tenant_max = tenant_max
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # tenants in their turn

    @asynccontextmanager
    async def room(self, tenant: str) -> AsyncIterator[None]:
        """A room for the time of the block; waits for it without a bound."""
        await self._enter(tenant)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _enter(self, tenant: str) -> None:
        # Those who wait while a room is free are tenants that have all of theirs.
        if self._may(tenant) and tenant not in self._waiting:
            self._take(tenant)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._leave(tenant)  # it had come already
            else:
                self._forget(tenant, granted)
            raise

    def _may(self, tenant: str) -> bool:
        return self._free > 0 and self._held[tenant] < self._tenant_max

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _leave(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives the room that has become free to the next one who may have it."""
        for name, queue in list(self._waiting.items()):
            while queue and queue[0].cancelled():
                queue.popleft()
            if not queue:
                del self._waiting[name]
            elif self._may(name):
                self._take(name)
                queue.popleft().set_result(None)
                del self._waiting[name]
                if queue:
                    self._waiting[name] = queue  # behind all others
                return

    def _forget(self, tenant: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and granted in queue:
            queue.remove(granted)
            self._pass_on()  # who came behind it may have waited for it alone
