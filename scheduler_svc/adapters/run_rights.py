"""What the run of a credential is now: the state service's word, and the tenant's rights."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from scheduler_svc.adapters.run_records import ENDED
from scheduler_svc.adapters.state_calls import (
    RETRY_AFTER_S,
    answered,
    not_configured,
    time_limit_s,
)
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.tenants import Tenants
from sluice.errors import (
    Code,
    SluiceError,
    failed_precondition,
    permission_denied,
    unavailable,
)
from sluice.scheduler.v1 import spec_pb2
from sluice.state.v1 import runs_pb2, runs_pb2_grpc


class RunRights:
    """See the module's docstring. ``channel`` ``None``: no state service."""

    def __init__(self, channel: grpc.aio.Channel | None, tenants: Tenants) -> None:
        self._stub: Any = None if channel is None else runs_pb2_grpc.RunServiceStub(channel)
        self._tenants = tenants

    async def check_open(self, tenant_name: str, run_id: str) -> None:
        """Raises unless the run goes on and its tenant may still have such runs: NOT_FOUND,
        FAILED_PRECONDITION with RUN_ENDED, PERMISSION_DENIED with RUN_NOT_PERMITTED; UNAVAILABLE
        while the state service does not answer."""
        if self._stub is None:
            raise not_configured()
        tenant = await self.tenant_of(tenant_name, run_id)
        run = await self._run(tenant_name, run_id)
        if run.phase in ENDED:
            raise failed_precondition("RUN_ENDED", "the run has ended")
        _check_rights(run.spec, tenant)

    async def tenant_of(self, tenant_name: str, run_id: str) -> Tenant:
        """The tenant of a run. Raises PERMISSION_DENIED with RUN_NOT_PERMITTED when it is gone;
        UNAVAILABLE when it is not known here yet, or the state service does not answer.

        This scheduler's table may be behind: another one made the tenant a moment ago, or what
        follows the state service is slow or away. Whether the run is there decides, however long
        that takes: nobody reads a run of a tenant from the moment on at which that is deleted."""
        tenant = self._tenants.named(tenant_name)
        if tenant is not None:
            return tenant
        if self._stub is not None and await self._is_there(tenant_name, run_id):
            raise unavailable(
                "STATE_UNREACHABLE", "the tenant of the run is not known here yet", RETRY_AFTER_S
            )
        raise _not_permitted("the tenant of the run is gone")

    async def _is_there(self, tenant_name: str, run_id: str) -> bool:
        try:
            await self._run(tenant_name, run_id)
        except SluiceError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return False
        return True

    async def _run(self, tenant_name: str, run_id: str) -> runs_pb2.StoredRun:
        request = runs_pb2.GetRunRequest(tenant=tenant_name, run_id=run_id)
        found = await answered(self._stub.GetRun(request, timeout=time_limit_s()))
        run: runs_pb2.StoredRun = found.run
        return run


def _check_rights(serialized: bytes, tenant: Tenant) -> None:
    try:
        spec = spec_pb2.RunSpec.FromString(serialized)
    except DecodeError:
        raise _not_permitted("the run's specification cannot be read") from None
    if spec.WhichOneof("kind") != "task":
        return
    request = spec.task.request
    if not spec.task.turn and not tenant.agents:
        raise _not_permitted("this tenant may not use the agent path any more")
    if request.session_id and not tenant.sessions:
        raise _not_permitted("this tenant may not keep sessions any more")


def _not_permitted(message: str) -> SluiceError:
    return permission_denied("RUN_NOT_PERMITTED", message)
