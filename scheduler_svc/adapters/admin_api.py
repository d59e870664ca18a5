"""The administration service, under an admin key: the state of queue and fleet, and what operators
may change.

Tenants, keys, aliases and tools are the state service's: a change is checked and stored there, and
comes back to every scheduler through its watch, within a second; for tools agent services ask.
Without a state service those methods are FAILED_PRECONDITION, and a drain is of this scheduler
alone and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc

from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.fleet_watch import SILENCE_LIMIT_S, FleetWatch
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.lane import set_duration
from scheduler_svc.adapters.state_admin import StateAdmin
from scheduler_svc.adapters.state_calls import not_configured
from scheduler_svc.adapters.tenants import Tenants
from scheduler_svc.domain.model import InstanceName
from scheduler_svc.domain.snapshot import InstanceStatus, Snapshot
from sluice import tool_rules
from sluice.common.v1 import policy_pb2
from sluice.egress_rules import PrivateRule
from sluice.errors import failed_precondition, invalid, not_found
from sluice.scheduler.v1 import admin_pb2, admin_pb2_grpc

INTERVAL_DEFAULT_S: Final = 1.0
INTERVAL_MIN_S: Final = 0.1
INTERVAL_MAX_S: Final = 60.0

Context = grpc.aio.ServicerContext[Any, Any]


class AdminApi(admin_pb2_grpc.SchedulerAdminServiceServicer):
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        gate: Gate,
        fleet: FleetWatch,
        tenants: Tenants,
        catalog: Catalog,
        state: StateAdmin | None,
        registered_private: Sequence[PrivateRule] = (),
    ) -> None:
        self._name = name
        self._gate = gate
        self._fleet = fleet
        self._tenants = tenants
        self._catalog = catalog
        self._state = state
        self._registered_private = registered_private

    async def WatchStatus(  # type: ignore[override]  # as PublicApi.Generate
        self, request: admin_pb2.WatchStatusRequest, context: Context
    ) -> None:
        """See admin.proto."""
        self._check(context)
        interval_s = INTERVAL_DEFAULT_S
        if request.HasField("interval"):
            interval_s = request.interval.seconds + request.interval.nanos / 1e9
            if not INTERVAL_MIN_S <= interval_s <= INTERVAL_MAX_S:
                raise invalid("interval", f"must be {INTERVAL_MIN_S} to {INTERVAL_MAX_S} s")
        while True:
            await context.write(self.status())
            await asyncio.sleep(interval_s)

    async def PutTenant(
        self, request: admin_pb2.PutTenantRequest, context: Context
    ) -> admin_pb2.PutTenantResponse:
        """See admin.proto."""
        return await self._stored(context).put_tenant(request)

    async def ListTenants(
        self, request: admin_pb2.ListTenantsRequest, context: Context
    ) -> admin_pb2.ListTenantsResponse:
        """See admin.proto."""
        return await self._stored(context).list_tenants()

    async def DeleteTenant(
        self, request: admin_pb2.DeleteTenantRequest, context: Context
    ) -> admin_pb2.DeleteTenantResponse:
        """See admin.proto."""
        await self._stored(context).delete_tenant(request.tenant)
        return admin_pb2.DeleteTenantResponse()

    async def CreateKey(
        self, request: admin_pb2.CreateKeyRequest, context: Context
    ) -> admin_pb2.CreateKeyResponse:
        """See admin.proto."""
        return await self._stored(context).create_key(request)

    async def RevokeKey(
        self, request: admin_pb2.RevokeKeyRequest, context: Context
    ) -> admin_pb2.RevokeKeyResponse:
        """See admin.proto."""
        await self._stored(context).revoke_key(request.key_id)
        return admin_pb2.RevokeKeyResponse()

    async def SetAlias(
        self, request: admin_pb2.SetAliasRequest, context: Context
    ) -> admin_pb2.SetAliasResponse:
        """See admin.proto."""
        state = self._stored(context)
        catalog = self._catalog
        if catalog.serves(request.alias) and catalog.aliases.get(request.alias) is None:
            # It would take the requests for the model itself, and nothing could take that back.
            raise invalid("alias", "a model has this name")
        works: set[tuple[bool, bool]] = set()
        for number, target in enumerate(request.targets):
            work = catalog.work_of(target.model)
            if work is None and self._fleet.knows_all:
                raise invalid(f"targets[{number}].model", "no instance serves it")
            works |= {work} if work is not None else set()
            if len(works) > 1:  # a share of the requests would be refused
                raise invalid(
                    f"targets[{number}].model", "does other work (generate, embed) than the others"
                )
        configured = self._catalog.aliases.configured(request.alias)
        model = configured.targets[0].model if configured is not None else None
        return await state.set_alias(request, model)

    async def RollbackAlias(
        self, request: admin_pb2.RollbackAliasRequest, context: Context
    ) -> admin_pb2.RollbackAliasResponse:
        """See admin.proto."""
        state = self._stored(context)
        if self._catalog.aliases.configured(request.alias) is not None:
            raise failed_precondition(
                "NOTHING_EARLIER", "the alias is as the configuration has it: it was never changed"
            )
        return await state.rollback_alias(request.alias)

    async def DeleteAlias(
        self, request: admin_pb2.DeleteAliasRequest, context: Context
    ) -> admin_pb2.DeleteAliasResponse:
        """See admin.proto."""
        state = self._stored(context)
        if self._catalog.aliases.configured(request.alias) is not None:
            raise failed_precondition(
                "ALIAS_CONFIGURED",
                "the alias is in the configuration only: take it out there (aliases)",
            )
        await state.delete_alias(request.alias)
        return admin_pb2.DeleteAliasResponse()

    async def ListAliases(
        self, request: admin_pb2.ListAliasesRequest, context: Context
    ) -> admin_pb2.ListAliasesResponse:
        """See admin.proto."""
        self._check(context)
        response = admin_pb2.ListAliasesResponse()
        for name, alias in sorted(self._catalog.aliases.all().items()):
            entry = response.aliases.add(name=name, version=alias.version)
            for target in alias.targets:
                entry.targets.add(model=target.model, weight=target.weight)
        return response

    async def DrainInstance(
        self, request: admin_pb2.DrainInstanceRequest, context: Context
    ) -> admin_pb2.DrainInstanceResponse:
        """See admin.proto."""
        self._check(context)
        known = {entry.name: entry for entry in self.status().instances}
        if request.instance not in known and request.drain:
            raise not_found(
                "INSTANCE_UNKNOWN",
                f"no such instance; there are: {', '.join(sorted(known)) or 'none'}",
                metadata={"instance": request.instance},
            )
        if self._state is not None:
            await self._state.set_drain(request.instance, drained=request.drain)
        await self._gate.lanes.drain_instance(InstanceName(request.instance), drained=request.drain)
        after = {entry.name: entry for entry in self.status().instances}
        return admin_pb2.DrainInstanceResponse(instance=after.get(request.instance))

    async def PutTool(
        self, request: admin_pb2.PutToolRequest, context: Context
    ) -> admin_pb2.PutToolResponse:
        """See admin.proto."""
        state = self._stored(context)
        # What belongs to the machine (files, programs, private addresses) is its configuration's.
        tool_rules.check(request.tool, "tool", configured=False, private=self._registered_private)
        return await state.put_tool(request)

    async def DeleteTool(
        self, request: admin_pb2.DeleteToolRequest, context: Context
    ) -> admin_pb2.DeleteToolResponse:
        """See admin.proto."""
        await self._stored(context).delete_tool(request.tenant, request.name)
        return admin_pb2.DeleteToolResponse()

    async def ListTenantTools(
        self, request: admin_pb2.ListTenantToolsRequest, context: Context
    ) -> admin_pb2.ListTenantToolsResponse:
        """See admin.proto."""
        return await self._stored(context).list_tools(request.tenant)

    def _check(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self._tenants.check_admin(str(metadata.get("authorization", "")))

    def _stored(self, context: Context) -> StateAdmin:
        self._check(context)
        if self._state is None:
            raise not_configured()
        return self._state

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
            address=self._gate.lanes.addresses.get(name, ""),
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
        elif status.gpu_fault:
            entry.reason = "a GPU reports errors; restart the service once it is well"
        load = self._fleet.reports.get(name)
        age_s = now - self._fleet.reported_at_s.get(name, now)
        set_duration(entry.report_age, max(0.0, age_s))
        if load is not None and age_s < SILENCE_LIMIT_S:
            entry.load.CopyFrom(load.engine)
            entry.gpus.extend(load.gpus)


def state_of(status: InstanceStatus) -> str:
    """``serving``, ``draining``, ``excluded``, ``starting`` or ``down``."""
    if not status.reachable:
        return "down"
    if not status.serving:
        return "starting"
    if status.gpu_fault:
        return "excluded"
    return "draining" if status.draining else "serving"
