"""The mesh-only service: model calls of runs, under the credential that was signed at admission.

A step is a request like any other: the same checks, queue, placement, quota, accounting and
decision records, and its tenant pays. Who calls, its class and its models come from the credential;
its deadline is what is left to the run, or the call's own if that is sooner. A cancelled call stops
its engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc

from scheduler_svc.adapters import translate
from scheduler_svc.adapters.identity import remaining_s
from scheduler_svc.adapters.run_rights import RunRights
from scheduler_svc.adapters.serving import Caller, RunOf, Serving
from sluice.errors import SluiceError, deadline_exceeded
from sluice.run_credentials import CredentialSigner, CredentialVerifier
from sluice.scheduler.v1 import generate_pb2, mesh_pb2, mesh_pb2_grpc

FLUSH_MIN_S: Final = 0.03
"""An agent service passes text on every 40 ms; a message per token would cost both for nothing."""

Context = grpc.aio.ServicerContext[Any, Any]
Step = mesh_pb2.GenerateStepRequest | mesh_pb2.EmbedStepRequest


class MeshApi(mesh_pb2_grpc.SchedulerMeshServiceServicer):
    """See the module's docstring."""

    def __init__(
        self,
        serving: Serving,
        signer: CredentialSigner,
        verifier: CredentialVerifier,
        rights: RunRights,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: Unix time."""
        self._serving = serving
        self._signer = signer
        self._verifier = verifier
        self._rights = rights
        self._clock = clock

    async def GenerateStep(  # type: ignore[override]  # as PublicApi.Generate
        self, request: mesh_pb2.GenerateStepRequest, context: Context
    ) -> None:
        """See mesh.proto."""
        left_s = remaining_s(context)
        if request.HasField("remaining"):
            run_s = request.remaining.seconds + request.remaining.nanos / 1e9
            left_s = run_s if left_s is None else min(run_s, left_s)
        caller = await self._caller(request, left_s)
        await self._serving.stream(
            request.request, caller, context, _as_step, flush_min_s=FLUSH_MIN_S
        )

    async def EmbedStep(
        self, request: mesh_pb2.EmbedStepRequest, context: Context
    ) -> mesh_pb2.EmbedStepResponse:
        """See mesh.proto."""
        caller = await self._caller(request, remaining_s(context))
        return mesh_pb2.EmbedStepResponse(
            response=await self._serving.embed(request.request, caller)
        )

    async def RenewRunCredential(
        self, request: mesh_pb2.RenewRunCredentialRequest, context: Context
    ) -> mesh_pb2.RenewRunCredentialResponse:
        """See mesh.proto."""
        now = self._clock()
        old = self._verifier.verify_for_renewal(request.credential, now_unix_s=now)
        await self._rights.check_open(old.tenant, old.run_id)
        fresh = self._signer.renew(old, now_unix_s=now)
        return mesh_pb2.RenewRunCredentialResponse(credential=fresh)

    async def _caller(self, request: Step, left_s: float | None) -> Caller:
        try:
            run = self._verifier.verify(request.credential, now_unix_s=self._clock())
            tenant = await self._rights.tenant_of(run.tenant, run.run_id)
            identifier = translate.request_id(request.request.request_id, None)
            wanted = translate.priority_class(request.request.priority_class)
            own = translate.priority_class(run.priority_class)
            if left_s is not None and left_s <= 0:
                raise deadline_exceeded(message="No time is left to the run.")
        except SluiceError as refusal:
            self._serving.refused(None, None, refusal)
            raise
        # Never above the class that the run was admitted with, nor above the ceiling as it is now.
        asked = [one for one in (own, wanted) if one is not None]
        priority_class = tenant.class_for(max(asked, default=None))
        step = request.step if isinstance(request, mesh_pb2.GenerateStepRequest) else 0
        of_run = RunOf(run.run_id, step, tuple(run.models))
        return Caller(tenant, identifier, priority_class, left_s, of_run)


def _as_step(message: generate_pb2.GenerateResponse) -> Iterable[mesh_pb2.GenerateStepResponse]:
    return (mesh_pb2.GenerateStepResponse(response=message),)
