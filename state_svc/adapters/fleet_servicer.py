"""``FleetService``: which instances are to be drained. A mark is a record without a value."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sluice.state.v1 import fleet_pb2, fleet_pb2_grpc
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.store_errors import store_errors
from state_svc.domain.names import check_model
from state_svc.ports import Kind, RegistryStore


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """See the proto."""

    def __init__(self, store: RegistryStore, watch: RegistryWatch) -> None:
        self._store, self._watch = store, watch

    async def SetDrain(
        self, request: fleet_pb2.SetDrainRequest, context: Any
    ) -> fleet_pb2.SetDrainResponse:
        """Marks an instance, or takes that back."""
        check_model(request.instance, "instance")
        with store_errors():
            if request.drained:
                await self._store.put(Kind.DRAINS, request.instance, b"")
            else:
                await self._store.delete(Kind.DRAINS, request.instance)
        self._watch.poke()
        return fleet_pb2.SetDrainResponse()

    async def WatchDrains(
        self, request: fleet_pb2.WatchDrainsRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchDrainsResponse]:
        """Streams everything, then changes."""
        async for change in self._watch.follow((Kind.DRAINS,)):
            yield fleet_pb2.WatchDrainsResponse(
                snapshot=change.snapshot,
                drained=change.put[Kind.DRAINS],
                undrained=change.deleted[Kind.DRAINS],
            )
