"""Runs at the public service: how one is admitted, and what its client may ask of it.

A run is checked, let through the gate, and stored before its client hears of it; from then on it is
an agent service's, and this scheduler only passes on what is stored. Its identifier follows from
tenant and request id, so that the same request, repeated for whatever reason and to whatever
scheduler, is the same run. A turn of a session is a run too, under the right to sessions: it asks
no gate and counts as no agent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from scheduler_svc.adapters import agent_path, run_request
from scheduler_svc.adapters.agent_link import AgentLink
from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.identity import Identity
from scheduler_svc.adapters.requests import check_page_token, check_uuid, page_size, request_id_of
from scheduler_svc.adapters.run_records import ENDED, listed, run_id_of, shown
from scheduler_svc.adapters.run_store import NewRun, RunStore
from scheduler_svc.adapters.run_watch import Response, RunWatches
from scheduler_svc.adapters.serving import Caller, Serving
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.domain.agent_gate import AgentMode, GateReason, Path, Verdict
from sluice.errors import SluiceError, failed_precondition, invalid
from sluice.scheduler.v1 import runs_pb2, scheduler_pb2_grpc

RESULT_BYTES_MAX: Final = 1 << 20
BLOB_PART_BYTES_MAX: Final = 1 << 20  # in one answer, of at most 4 MiB
BLOB_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
CANCEL_WAIT_S: Final = 2.0
CANCEL_LOOK_S: Final = 0.02

Context = grpc.aio.ServicerContext[Any, Any]

_DECISIONS: Final = frozenset(runs_pb2.ResumeDecision.values()) - {
    runs_pb2.RESUME_DECISION_UNSPECIFIED
}


@dataclass(frozen=True, slots=True)
class RunParts:
    """What runs need of the rest of a scheduler. ``store`` and ``watches`` are ``None`` without a
    state service; ``state_up``: whether it answers now. ``count_limit``: hears of errors, some
    of which say that a bound was hit."""

    serving: Serving
    identity: Identity
    catalog: Catalog
    gate: Gate
    agents: agent_path.AgentPath
    link: AgentLink
    store: RunStore | None
    watches: RunWatches | None
    state_up: Callable[[], bool]
    count_limit: Callable[[SluiceError], object]

    @property
    def available(self) -> bool:
        """Whether there is an agent path: a store, and somebody who works on what is stored."""
        return self.store is not None and self.link.available


class RunsApi(scheduler_pb2_grpc.SchedulerServiceServicer):
    """See the module's docstring."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts

    async def RunAgent(  # type: ignore[override]  # as PublicApi.Generate
        self, request: runs_pb2.RunAgentRequest, context: Context
    ) -> None:
        """See scheduler.proto."""
        # Known as its client knows it; x-request-id finds decision records, but makes no run.
        caller = self._parts.identity.caller(request, context)
        if not request.request_id:
            request.request_id = request_id_of("")
        admitted = await self._admitted(request, caller)
        if isinstance(admitted, Verdict):
            await self._answer(request, caller, context, admitted.reason)
            return
        self._parts.link.nudge(caller.tenant.name, admitted)
        await self._watch(
            context,
            runs_pb2.RunAgentResponse,
            caller.tenant,
            admitted,
            once=request.background,
        )

    async def _admitted(self, request: runs_pb2.RunAgentRequest, caller: Caller) -> str | Verdict:
        """The run that was stored, or what says that the request is answered directly. Raises typed
        refusals, which are counted and recorded."""
        verdict = None
        try:
            run_request.check(request, caller.tenant)
            if self._parts.watches is not None:
                self._parts.watches.check(caller.tenant.name, once=request.background)
            model = self._parts.catalog.resolve(request.model, caller.tenant)
            if run_request.is_turn(request):
                if not self._parts.available:
                    raise self._refusal(_NOT_AVAILABLE)
                return await self._create(request, caller, model, GateReason.NOT_ASKED)
            load = self._parts.gate.domain.load_of(model)
            verdict = self._parts.agents.judge(
                request, caller.tenant, load, available=self._available(request)
            )
            if verdict.path is not Path.AGENT and await self._was_admitted(request, caller.tenant):
                return run_id_of(caller.tenant.name, request.request_id)
            if verdict.path is Path.AGENT:
                try:
                    return await self._create(request, caller, model, verdict.reason)
                except SluiceError as error:
                    if error.reason != "TOO_MANY_RUNS":
                        raise
                    verdict = self._parts.agents.too_many(request, caller.tenant)
            self._parts.agents.count(verdict)
            if verdict.path is Path.REFUSED:
                raise self._refusal(verdict)
        except SluiceError as refusal:
            reason = "" if verdict is None else verdict.reason.value
            self._parts.serving.refused(caller, None, refusal, reason)
            raise
        return verdict

    def _refusal(self, verdict: Verdict) -> SluiceError:
        away = self._parts.store is not None and self._parts.link.seen
        return self._parts.agents.refusal(verdict, away=away)

    def _available(self, request: runs_pb2.RunAgentRequest) -> bool:
        """A state service that does not answer now is told as such, unless a direct answer does."""
        parts = self._parts
        asks = agent_path.mode_of(request) is not AgentMode.AUTO
        return parts.available and (asks or parts.state_up())

    async def _was_admitted(self, request: runs_pb2.RunAgentRequest, tenant: Tenant) -> bool:
        """Whether this very request was let through before, when the gate is closed now."""
        if self._parts.store is None or not tenant.agents:
            return False
        return await self._parts.store.was_created(tenant.name, request)

    async def _create(
        self,
        request: runs_pb2.RunAgentRequest,
        caller: Caller,
        model: str,
        reason: GateReason,
    ) -> str:
        assert self._parts.store is not None
        embedding = self._parts.catalog.default_embedding(caller.tenant)
        turn = run_request.is_turn(request)
        new = NewRun(
            tenant=caller.tenant.name,
            request_id=request.request_id.lower(),
            priority_class=caller.priority_class,
            models=(model, embedding) if embedding else (model,),
            gate_reason=reason.value,
            budget=self._parts.agents.budget(request.budget, None if turn else caller.tenant),
            session_id=request.session_id.lower(),
            runs_max=0 if turn else self._parts.agents.runs_max(caller.tenant),
        )
        context_tokens = self._parts.catalog.context_tokens(model)
        await self._parts.store.create_task(new, request, turn=turn, context_tokens=context_tokens)
        if not turn:
            self._parts.agents.count(Verdict(Path.AGENT, reason))
        return new.run_id

    async def _answer(
        self,
        request: runs_pb2.RunAgentRequest,
        caller: Caller,
        context: Context,
        reason: GateReason,
    ) -> None:
        """Answers a task by one direct call, as the events of a run that is stored nowhere."""
        try:
            direct = agent_path.direct_request(request)
            events = agent_path.DirectEvents(reason)
            await self._parts.serving.stream(direct, caller, context, events.of, reason.value)
        except SluiceError as error:
            raise agent_path.in_a_runs_words(error) from None

    async def _watch(
        self,
        context: Context,
        response: type[Response],
        tenant: Tenant,
        run_id: str,
        first: int = 1,
        *,
        once: bool = False,
    ) -> None:
        watches = self._parts.watches
        assert watches is not None
        try:
            await watches.forward(tenant.name, run_id, first, response, context.write, once=once)
        except SluiceError as error:
            self._parts.count_limit(error)
            raise

    async def WatchRun(  # type: ignore[override]  # as PublicApi.Generate
        self, request: runs_pb2.WatchRunRequest, context: Context
    ) -> None:
        """See scheduler.proto."""
        tenant = self._parts.identity.tenant(context)
        check_uuid(request.run_id, "run_id")
        self._store()
        await self._watch(
            context,
            runs_pb2.WatchRunResponse,
            tenant,
            request.run_id.lower(),
            request.from_sequence,
        )

    async def GetRun(
        self, request: runs_pb2.GetRunRequest, context: Context
    ) -> runs_pb2.GetRunResponse:
        """See scheduler.proto."""
        tenant = self._parts.identity.tenant(context)
        check_uuid(request.run_id, "run_id")
        stored = await self._store().get(tenant.name, request.run_id.lower())
        return runs_pb2.GetRunResponse(run=shown(stored))

    async def ListRuns(
        self, request: runs_pb2.ListRunsRequest, context: Context
    ) -> runs_pb2.ListRunsResponse:
        """See scheduler.proto."""
        tenant = self._parts.identity.tenant(context)
        size = page_size(request.page_size)
        check_page_token(request.page_token)
        if request.state not in runs_pb2.RunState.values():
            raise invalid("state", "is not a known state")
        if request.kind not in runs_pb2.RunKind.values():
            raise invalid("kind", "is not a known kind")
        runs, token = await self._store().list(tenant.name, size, request.page_token, request.state)
        found = [run for run in map(listed, runs) if request.kind in (0, run.kind)]
        return runs_pb2.ListRunsResponse(runs=found, next_page_token=token)

    async def CancelRun(
        self, request: runs_pb2.CancelRunRequest, context: Context
    ) -> runs_pb2.CancelRunResponse:
        """See scheduler.proto. Waits shortly for the agent to end the run."""
        tenant = self._parts.identity.tenant(context)
        check_uuid(request.run_id, "run_id")
        request_id = request_id_of(request.request_id)
        store, run_id = self._store(), request.run_id.lower()
        stored = await store.cancel(tenant.name, run_id, request_id)
        loop = asyncio.get_running_loop()
        end_s, pause_s = loop.time() + CANCEL_WAIT_S, CANCEL_LOOK_S
        while stored.phase not in ENDED and loop.time() < end_s:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, CANCEL_WAIT_S / 8)
            stored = await store.get(tenant.name, run_id)
        return runs_pb2.CancelRunResponse(run=shown(stored))

    async def ResumeRun(
        self, request: runs_pb2.ResumeRunRequest, context: Context
    ) -> runs_pb2.ResumeRunResponse:
        """See scheduler.proto."""
        tenant = self._parts.identity.tenant(context)
        check_uuid(request.run_id, "run_id")
        request_id = request_id_of(request.request_id)
        _check_decision(request)
        decision = runs_pb2.RunResumed(
            step=request.step, decision=request.decision, result_json=request.result_json
        )
        run_id = request.run_id.lower()
        try:
            stored = await self._store().resume(
                tenant.name, run_id, request.step, decision.SerializeToString(), request_id
            )
        except SluiceError as error:
            if error.reason != "NOT_WAITING":
                raise
            raise await self._not_waiting(tenant.name, run_id, request.step) from None
        self._parts.link.nudge(tenant.name, run_id)
        return runs_pb2.ResumeRunResponse(run=shown(stored))

    async def GetRunBlob(
        self, request: runs_pb2.GetRunBlobRequest, context: Context
    ) -> runs_pb2.GetRunBlobResponse:
        """See scheduler.proto."""
        tenant = self._parts.identity.tenant(context)
        check_uuid(request.run_id, "run_id")
        if not BLOB_NAME.fullmatch(request.blob):
            raise invalid("blob", "must be the name in an event `tool_call_ended`")
        if request.size_max > BLOB_PART_BYTES_MAX:
            raise invalid("size_max", f"at most {BLOB_PART_BYTES_MAX}")
        content, size = await self._store().blob(
            tenant.name,
            request.run_id.lower(),
            request.blob,
            request.offset,
            request.size_max or BLOB_PART_BYTES_MAX,
        )
        return runs_pb2.GetRunBlobResponse(content=content, size_bytes=size)

    async def _not_waiting(self, tenant: str, run_id: str, step: int) -> SluiceError:
        """What is told to a decision that nothing waits for: the run's state now."""
        run = shown(await self._store().get(tenant, run_id))
        state = runs_pb2.RunState.Name(run.state)
        text = f"the run does not wait: it is {state.removeprefix('RUN_STATE_').lower()}"
        if run.state == runs_pb2.RUN_STATE_WAITING:
            text = f"the run waits, but not at step {step}: its event `waiting` names the step"
        return failed_precondition("NOT_WAITING", text, metadata={"state": state})

    async def ListTools(
        self, request: runs_pb2.ListToolsRequest, context: Context
    ) -> runs_pb2.ListToolsResponse:
        """See scheduler.proto. Only what the tenant's runs may name."""
        tenant = self._parts.identity.tenant(context)
        tools = await self._parts.link.tools(tenant.name) if tenant.tools else []
        return runs_pb2.ListToolsResponse(tools=run_request.listed_tools(tools, tenant))

    def _store(self) -> RunStore:
        if self._parts.store is None:
            raise self._refusal(_NOT_AVAILABLE)
        return self._parts.store


_NOT_AVAILABLE: Final = Verdict(Path.REFUSED, GateReason.NOT_AVAILABLE)


def _check_decision(request: runs_pb2.ResumeRunRequest) -> None:
    if not request.step:
        raise invalid("step", "must be the step that waits, from the event `waiting`")
    if request.decision not in _DECISIONS:
        names = ", ".join(map(runs_pb2.ResumeDecision.Name, sorted(_DECISIONS)))
        raise invalid("decision", f"must be one of {names}")
    if len(request.result_json.encode()) > RESULT_BYTES_MAX // 2:
        raise invalid("result_json", f"at most {RESULT_BYTES_MAX // 2} bytes")
    supplies = request.decision == runs_pb2.RESUME_DECISION_SUPPLY_RESULT
    if supplies and not request.result_json:
        raise invalid("result_json", "is missing: SUPPLY_RESULT needs the result, as JSON")
    if supplies:
        run_request.parsed(request.result_json, "result_json", RESULT_BYTES_MAX // 2)
    elif request.result_json:
        raise invalid("result_json", "belongs to SUPPLY_RESULT")
