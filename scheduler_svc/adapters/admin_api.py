"""The administration service: the state of queue and fleet, under an admin key.

Tenants, keys, aliases and drains come with the state service; until then the generated base class
answers them as UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from scheduler_svc.adapters.fleet_watch import SILENCE_LIMIT_S, FleetWatch
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.lane import set_duration
from scheduler_svc.adapters.tenants import TenantsFile
from scheduler_svc.domain.model import InstanceName
from scheduler_svc.domain.snapshot import InstanceStatus, Snapshot
from sluice.common.v1 import policy_pb2
from sluice.errors import invalid
from sluice.scheduler.v1 import admin_pb2, admin_pb2_grpc

INTERVAL_DEFAULT_S: Final = 1.0
INTERVAL_MIN_S: Final = 0.1
INTERVAL_MAX_S: Final = 60.0

Context = grpc.aio.ServicerContext[Any, Any]


class AdminApi(admin_pb2_grpc.SchedulerAdminServiceServicer):
    """See the module's docstring."""

    def __init__(self, name: str, gate: Gate, fleet: FleetWatch, tenants: TenantsFile) -> None:
        self._name = name
        self._gate = gate
        self._fleet = fleet
        self._tenants = tenants

    async def WatchStatus(  # type: ignore[override]  # as PublicApi.Generate
        self, request: admin_pb2.WatchStatusRequest, context: Context
    ) -> None:
        """See admin.proto."""
        metadata = dict(context.invocation_metadata() or ())
        self._tenants.check_admin(str(metadata.get("authorization", "")))
        interval_s = INTERVAL_DEFAULT_S
        if request.HasField("interval"):
            interval_s = request.interval.seconds + request.interval.nanos / 1e9
            if not INTERVAL_MIN_S <= interval_s <= INTERVAL_MAX_S:
                raise invalid("interval", f"must be {INTERVAL_MIN_S} to {INTERVAL_MAX_S} s")
        while True:
            await context.write(self.status())
            await asyncio.sleep(interval_s)

    def status(self) -> admin_pb2.WatchStatusResponse:
        """The state now."""
        snapshot = self._gate.domain.snapshot()
        response = admin_pb2.WatchStatusResponse(
            scheduler=self._name,
            open_streams=self._gate.flush.open_streams,
            draining=snapshot.draining,
        )
        self._add_classes(response, snapshot)
        now = asyncio.get_running_loop().time()
        for name, status in sorted(snapshot.instances.items()):
            self._add_instance(response, name, status, now)
        return response

    def _add_classes(self, response: admin_pb2.WatchStatusResponse, snapshot: Snapshot) -> None:
        now = asyncio.get_running_loop().time()
        for priority_class, waiting in snapshot.waiting.items():
            entry = response.classes.add(waiting=waiting)
            entry.priority_class = policy_pb2.PriorityClass.Value(
                f"PRIORITY_CLASS_{priority_class.name}"
            )
            lives = [
                live
                for live in self._gate.lives.values()
                if live.ticket.priority_class is priority_class and not live.over
            ]
            entry.running = sum(1 for live in lives if live.accepted is not None)
            queued = [live.ticket.arrival_s for live in lives if not live.dispatch_s]
            if queued:
                set_duration(entry.oldest, max(0.0, now - min(queued)))

    def _add_instance(
        self,
        response: admin_pb2.WatchStatusResponse,
        name: InstanceName,
        status: InstanceStatus,
        now: float,
    ) -> None:
        entry = response.instances.add(
            name=name,
            address=self._gate.addresses.get(name, ""),
            model=status.model,
            state=state_of(status),
            running=status.running,
            kv_tokens=status.kv_tokens,
            credit_sequences=status.credit_sequences or 0,
            credit_kv_tokens=status.credit_kv_tokens or 0,
            simulated=status.simulated,
            breaker=status.breaker,
        )
        if not status.reachable:
            entry.reason = "the load watch does not answer"
        load = self._fleet.reports.get(name)
        age_s = now - self._fleet.reported_at_s.get(name, now)
        set_duration(entry.report_age, max(0.0, age_s))
        if load is not None and age_s < SILENCE_LIMIT_S:
            entry.load.CopyFrom(load.engine)
            entry.gpus.extend(load.gpus)


def state_of(status: InstanceStatus) -> str:
    """``serving``, ``draining``, ``starting`` or ``down``."""
    if not status.reachable:
        return "down"
    if not status.serving:
        return "starting"
    return "draining" if status.draining else "serving"
