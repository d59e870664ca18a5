"""Runs in the state service: what is written when one is admitted, and what is asked of it.

Stateless. Every call is bounded in time and can be repeated with the same ids. Raises SluiceError:
the state service's refusals pass through, one that does not answer is STATE_UNREACHABLE.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from google.protobuf.message import DecodeError

from scheduler_svc.adapters import run_request
from scheduler_svc.adapters.run_records import run_id_of
from scheduler_svc.adapters.state_calls import answered, time_limit_s
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.domain.run_budget import RunLimits
from sluice.common.v1 import policy_pb2
from sluice.errors import SluiceError, invalid
from sluice.run_credentials import CredentialSigner
from sluice.scheduler.v1 import mesh_pb2, runs_pb2, spec_pb2
from sluice.state.v1 import runs_pb2 as stored_pb2
from sluice.state.v1 import runs_pb2_grpc, values_pb2, values_pb2_grpc
from sluice.telemetry import current_traceparent

WALL_SLACK_S: Final = 1
"""After its wall time, by its agent's clock, a run that nobody holds is ended without a slot."""

CLASSES: Final = {
    PriorityClass.CRITICAL: policy_pb2.PRIORITY_CLASS_CRITICAL,
    PriorityClass.INTERACTIVE: policy_pb2.PRIORITY_CLASS_INTERACTIVE,
    PriorityClass.STANDARD: policy_pb2.PRIORITY_CLASS_STANDARD,
    PriorityClass.BATCH: policy_pb2.PRIORITY_CLASS_BATCH,
}


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that is admitted. ``models``: what its steps may call, the one that it writes with
    first. ``runs_max``: most open runs of its tenant, and as many active; 0: it is not counted."""

    tenant: str
    request_id: str
    priority_class: PriorityClass
    models: tuple[str, ...]
    gate_reason: str
    budget: RunLimits
    session_id: str = ""
    runs_max: int = 0

    @property
    def run_id(self) -> str:
        """Its identifier."""
        return run_id_of(self.tenant, self.request_id)


class RunStore:
    """See the module's docstring."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        signer: CredentialSigner,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: Unix time."""
        self._stub: Any = runs_pb2_grpc.RunServiceStub(channel)
        self._blobs: Any = values_pb2_grpc.BlobServiceStub(channel)
        self._signer = signer
        self._clock = clock

    async def create_task(
        self, new: NewRun, request: runs_pb2.RunAgentRequest, *, turn: bool, context_tokens: int
    ) -> stored_pb2.StoredRun:
        """Stores a task; again: answers with what is stored. ABORTED with SESSION_BUSY,
        RESOURCE_EXHAUSTED with TOO_MANY_RUNS, NOT_FOUND for its session."""
        task = spec_pb2.AgentTask(request=request, turn=turn, context_tokens=context_tokens)
        task.request.model = new.models[0]
        task.request.session_id = new.session_id
        return await self._create(new, spec_pb2.RunSpec(task=task))

    async def was_created(self, tenant: str, request: runs_pb2.RunAgentRequest) -> bool:
        """Whether this very request made a run, which is there; also when nobody can say.
        INVALID_ARGUMENT when its id made another one."""
        try:
            stored = await self.get(tenant, run_id_of(tenant, request.request_id))
        except SluiceError:
            return False
        task = spec_pb2.AgentTask(request=request)
        _check_same(stored, spec_pb2.RunSpec(task=task))
        return True

    async def create_ingest(self, new: NewRun, ingest: spec_pb2.IngestTask) -> stored_pb2.StoredRun:
        """Stores the ingest of a document; again: answers with what is stored."""
        return await self._create(new, spec_pb2.RunSpec(ingest=ingest))

    async def get(self, tenant: str, run_id: str) -> stored_pb2.StoredRun:
        """A run. NOT_FOUND."""
        request = stored_pb2.GetRunRequest(tenant=tenant, run_id=run_id)
        found = await answered(self._stub.GetRun(request, timeout=time_limit_s()))
        run: stored_pb2.StoredRun = found.run
        return run

    async def list(
        self, tenant: str, size: int, token: str, state: runs_pb2.RunState.ValueType
    ) -> tuple[list[stored_pb2.StoredRun], str]:
        """A page of runs, newest first, and the token of the next one."""
        request = stored_pb2.ListRunsRequest(tenant=tenant, page_size=size, page_token=token)
        request.phase = state  # type: ignore[assignment]  # the numbers are the same
        found = await answered(self._stub.ListRuns(request, timeout=time_limit_s()))
        return list(found.runs), found.next_page_token

    async def cancel(self, tenant: str, run_id: str, request_id: str) -> stored_pb2.StoredRun:
        """Marks a run as cancelled. NOT_FOUND."""
        request = stored_pb2.CancelRunRequest(tenant=tenant, run_id=run_id, request_id=request_id)
        done = await answered(self._stub.CancelRun(request, timeout=time_limit_s()))
        run: stored_pb2.StoredRun = done.run
        return run

    async def resume(
        self, tenant: str, run_id: str, step: int, decision: bytes, request_id: str
    ) -> stored_pb2.StoredRun:
        """Stores a decision. NOT_FOUND, FAILED_PRECONDITION with NOT_WAITING."""
        request = stored_pb2.ResumeRunRequest(
            tenant=tenant, run_id=run_id, step=step, decision=decision, request_id=request_id
        )
        done = await answered(self._stub.ResumeRun(request, timeout=time_limit_s()))
        run: stored_pb2.StoredRun = done.run
        return run

    async def blob(
        self, tenant: str, run_id: str, name: str, offset: int, size_max: int
    ) -> tuple[bytes, int]:
        """A part of a large result of a run, and the bytes of the whole. NOT_FOUND for the run,
        whatever is stored under its name, or for the result."""
        await self.get(tenant, run_id)
        request = values_pb2.GetBlobRequest(
            tenant=tenant, owner=run_id, name=name, offset=offset, size_max=size_max
        )
        part = await answered(
            self._blobs.GetBlob(request, timeout=time_limit_s()), {"name": "blob"}
        )
        return part.content, part.size_bytes

    async def _create(self, new: NewRun, spec: spec_pb2.RunSpec) -> stored_pb2.StoredRun:
        budget = run_request.shown(new.budget)
        spec.credential.CopyFrom(self._credential(new))
        spec.budget.CopyFrom(budget)
        spec.traceparent = current_traceparent()
        queued = runs_pb2.RunEvent(
            sequence=1,
            run_id=new.run_id,
            queued=runs_pb2.RunQueued(gate_reason=new.gate_reason, budget=budget),
        )
        queued.time.FromNanoseconds(int(self._clock() * 1e9))
        summary = runs_pb2.Run(model=new.models[0], budget=budget, kind=_kind(spec))
        request = stored_pb2.CreateRunRequest(
            tenant=new.tenant,
            run_id=new.run_id,
            request_id=new.request_id,
            spec=spec.SerializeToString(),
            summary=summary.SerializeToString(),
            events=[queued.SerializeToString()],
            priority=CLASSES[new.priority_class],
            active_max=new.runs_max,
            session_id=new.session_id,
            open_max=new.runs_max,
            request_digest=_digest(spec),
        )
        request.wall_time.FromSeconds(math.ceil(new.budget.wall_time_s) + WALL_SLACK_S)
        done = await answered(self._stub.CreateRun(request, timeout=time_limit_s()))
        run: stored_pb2.StoredRun = done.run
        if done.repeated_request:
            _check_same(await self.get(new.tenant, run.run_id), spec)
        return run

    def _credential(self, new: NewRun) -> mesh_pb2.SignedRunCredential:
        return self._signer.sign(
            run_id=new.run_id,
            tenant=new.tenant,
            priority_class=CLASSES[new.priority_class],
            models=new.models,
            now_unix_s=self._clock(),
        )


def _kind(spec: spec_pb2.RunSpec) -> runs_pb2.RunKind.ValueType:
    if spec.WhichOneof("kind") == "ingest":
        return runs_pb2.RUN_KIND_INGEST
    return runs_pb2.RUN_KIND_TURN if spec.task.turn else runs_pb2.RUN_KIND_TASK


def _check_same(stored: stored_pb2.StoredRun, spec: spec_pb2.RunSpec) -> None:
    """Raises INVALID_ARGUMENT when a request id that was used asks for something else now."""
    # Of a run that has ended and made room for others the digest is what is left. The spec is read
    # by this release's rules, where the digest was made by those of the one that stored it.
    earlier = stored.request_digest
    if stored.spec:
        with suppress(DecodeError):
            earlier = _digest(spec_pb2.RunSpec.FromString(stored.spec))
    if earlier and earlier != _digest(spec):
        raise invalid("request_id", "was used for another request")


def _digest(spec: spec_pb2.RunSpec) -> bytes:
    """32 bytes that stay with the run for as long as its request id is known."""
    kind, asked = _asked(spec)
    return hashlib.sha256(kind.encode() + b"\0" + asked).digest()


def _asked(spec: spec_pb2.RunSpec) -> tuple[str, bytes]:
    """What a run is to do, without what may differ between two tries of one request."""
    if spec.WhichOneof("kind") == "ingest":
        place = f"{spec.ingest.collection}/{spec.ingest.document_id}"
        return "ingest", place.encode()
    request = runs_pb2.RunAgentRequest()
    request.CopyFrom(spec.task.request)
    request.request_id = request.request_id.lower()
    request.session_id = request.session_id.lower()
    for name in ("model", "mode", "background"):  # an alias may point elsewhere by now
        request.ClearField(name)
    return "task", request.SerializeToString(deterministic=True)
