"""A bounded amount of something (work at once, bytes in flight), shared out fairly among tenants.

A tenant has at most ``tenant_max`` of it, so that what one tenant does with all of its share never
makes others wait while there is more; beyond that tenants are served in turn, each in its own
order, and what becomes free goes to who waits before anybody new may take it. With
``first_always`` a tenant that has nothing is never made to wait, also beyond the total: then the
bound is the total and one piece for each tenant, and a piece may be larger than a share. For one
event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairRooms:
    """See the module's docstring."""

    def __init__(self, total: int, tenant_max: int, *, first_always: bool = False) -> None:
        self._free = total
        self._tenant_max = tenant_max
        self._first_always = first_always
        self._held: Counter[str] = Counter()
        # Tenants in their turn; what each waits for, and who is told.
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def room(self, tenant: str, size: int = 1) -> AsyncIterator[None]:
        """Room for the time of the block; waits for it without a bound."""
        await self.enter(tenant, size)
        try:
            yield
        finally:
            self.leave(tenant, size)

    def held(self, tenant: str) -> int:
        """What a tenant has now."""
        return self._held[tenant]

    def enter_now(self, tenant: str, size: int = 1) -> bool:
        """Takes room if there is some, and the tenant does not wait for more already. There is
        always room for nothing."""
        if not size:
            return True
        if tenant in self._waiting or not self._fits(tenant, size):
            return False
        self._take(tenant, size)
        return True

    async def enter(self, tenant: str, size: int = 1) -> None:
        """Takes room, and waits for it."""
        if self.enter_now(tenant, size):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((size, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.leave(tenant, size)  # it had come already
            else:
                self._pass_on()  # who came behind it may have waited for it alone
            raise

    def leave(self, tenant: str, size: int = 1) -> None:
        """Gives room back."""
        if not size:
            return
        self._free += size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
        if self._waiting:
            self._pass_on()

    def _fits(self, tenant: str, size: int) -> bool:
        held = self._held[tenant]
        if self._first_always and not held:
            return True
        return size <= self._free and held + size <= self._tenant_max

    def _take(self, tenant: str, size: int) -> None:
        self._free -= size
        self._held[tenant] += size

    def _pass_on(self) -> None:
        """Gives what is free to those who wait and may have it, one piece a tenant and turn."""
        passed = True
        while passed:
            passed = False
            for tenant, queue in list(self._waiting.items()):
                while queue and queue[0][1].done():  # it went away
                    queue.popleft()
                if not queue:
                    del self._waiting[tenant]
                elif self._fits(tenant, queue[0][0]):
                    size, granted = queue.popleft()
                    self._take(tenant, size)
                    granted.set_result(None)
                    passed = True
                    del self._waiting[tenant]
                    if queue:
                        self._waiting[tenant] = queue  # behind all others
