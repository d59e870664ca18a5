"""Events for those who watch runs, read in small pages, once for all who are at the same place.

A watch reads as fast as its client does, and there may be thousands of them, so their reads are
bounded in number, all together and for each tenant: whatever they do, most connections to the store
are left to other calls, and what waits for a read is served by tenants in turn. Pages that have a
successor never change; the last ones read are kept, :data:`KEPT_BYTES` in all.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from sluice.fair_rooms import FairRooms
from state_svc.domain.run_values import EventPage
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

    async def page(self, tenant: str, run_id: str, first: int) -> EventPage:
        """As :meth:`state_svc.run_ports.RunStore.read`: a page that holds every event that was
        stored before this was called, as far as it reaches."""
        place = (tenant, run_id, first)
        if (known := self._pages.get(place)) is not None:
            self._pages.move_to_end(place)
            return known
        reading = self._asked.get(place)
        if reading is None:
            reading = asyncio.create_task(self._read(place))
            reading.add_done_callback(_heard)
            self._asked[place] = reading
        return await asyncio.shield(reading)  # who goes away does not end it for others

    async def _read(self, place: _Place) -> EventPage:
        tenant, run_id, first = place
        async with self._rooms.room(tenant):
            # Who comes from now on may know of events that this reading does not see.
            del self._asked[place]
            page = await self._store.read(tenant, run_id, first, PAGE_BYTES)
        if page.more:
            self._keep(place, page)
        return page

    def _keep(self, place: _Place, page: EventPage) -> None:
        if place not in self._pages:
            self._pages[place] = page
            self._kept_bytes += page.size
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._pages.popitem(last=False)
            self._kept_bytes -= oldest.size


def _heard(reading: asyncio.Task[EventPage]) -> None:
    """All who waited may be gone: an error that nobody hears is no fault."""
    if not reading.cancelled():
        reading.exception()
