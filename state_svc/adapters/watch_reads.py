"""Events for those who watch runs, read in small pages, once for all who are at the same place.

A watch reads as fast as its client does, and there may be thousands of them, so their reads are
bounded in number, all together and for each tenant: whatever they do, most connections to the store
are left to other calls, and what waits for a read is served by tenants in turn. Pages that have a
successor never change; the last ones read are kept, :data:`KEPT_BYTES` in all, and are shown to who
follows the very run: one of the same name may be another's by now (a tenant's name is given again,
a run's follows from its request id), so the store is asked once by who does not know.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from sluice.fair_rooms import FairRooms
from state_svc.domain.run_values import SEQUENCE_MAX, EventPage
from state_svc.run_ports import RunStore

PAGE_BYTES: Final = 256 << 10
KEPT_BYTES: Final = 8 << 20
READS_MAX: Final = 8  # of 32 connections, unless set
TENANT_READS_MAX: Final = 2

_Place = tuple[str, str, int]


class WatchReads:
    """See the module's docstring."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._rooms = FairRooms(READS_MAX, TENANT_READS_MAX)
        self._asked: dict[_Place, asyncio.Task[EventPage]] = {}  # not begun yet
        self._pages: OrderedDict[_Place, EventPage] = OrderedDict()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the pages that are kept."""
        return self._kept_bytes

    async def page(
        self, tenant: str, run_id: str, first: int, create_ms: int | None = None
    ) -> EventPage:
        """As :meth:`state_svc.run_ports.RunStore.read`: a page that holds every event that was
        stored before this was called, as far as it reaches. ``create_ms``: of the run, as an
        earlier page said."""
        place = (tenant, run_id, first)
        if (known := self._pages.get(place)) is not None:
            if create_ms is None:
                create_ms = await self._created(tenant, run_id)
            if known.create_ms == create_ms:
                return self._used(place, known)
        reading = self._asked.get(place)
        if reading is None:
            reading = asyncio.create_task(self._read(place))
            reading.add_done_callback(_heard)
            self._asked[place] = reading
        return await asyncio.shield(reading)  # who goes away does not end it for others

    async def _created(self, tenant: str, run_id: str) -> int:
        async with self._rooms.room(tenant):
            return (await self._store.read(tenant, run_id, SEQUENCE_MAX, 1)).create_ms

    async def _read(self, place: _Place) -> EventPage:
        tenant, run_id, first = place
        async with self._rooms.room(tenant):
            # Who comes from now on may know of events that this reading does not see.
            del self._asked[place]
            page = await self._store.read(tenant, run_id, first, PAGE_BYTES)
        if page.more:
            self._keep(place, page)
        return page

    def _used(self, place: _Place, page: EventPage) -> EventPage:
        if place in self._pages:  # not gone meanwhile
            self._pages.move_to_end(place)
        return page

    def _keep(self, place: _Place, page: EventPage) -> None:
        before = self._pages.pop(place, None)
        self._kept_bytes += page.size - (before.size if before is not None else 0)
        self._pages[place] = page
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._pages.popitem(last=False)
            self._kept_bytes -= oldest.size


def _heard(reading: asyncio.Task[EventPage]) -> None:
    """All who waited may be gone: an error that nobody hears is no fault."""
    if not reading.cancelled():
        reading.exception()
