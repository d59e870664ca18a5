"""The public service: what a client's call becomes, and what it hears.

One handler per call. A handler identifies the tenant and hands the request to what serves it.
Methods that no part has are answered by the generated base class as UNIMPLEMENTED; the error
interceptor adds the typed reason.
"""

from __future__ import annotations

import time
from typing import Any, Final

import grpc

from scheduler_svc.adapters import agent_path
from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.identity import Identity
from scheduler_svc.adapters.serving import Caller, Serving
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.domain.agent_gate import Path, Verdict
from sluice.errors import SluiceError, invalid
from sluice.ids import is_request_id
from sluice.scheduler.v1 import generate_pb2, records_pb2, runs_pb2, scheduler_pb2_grpc
from sluice.timestamps import unix_seconds

USAGE_DEFAULT_S: Final = 86_400.0
USAGE_MAX_S: Final = 31 * 86_400.0

Context = grpc.aio.ServicerContext[Any, Any]


class PublicApi(scheduler_pb2_grpc.SchedulerServiceServicer):
    """See the module's docstring."""

    def __init__(
        self,
        serving: Serving,
        identity: Identity,
        catalog: Catalog,
        gate: Gate,
        usage: UsageLog,
        decisions: Decisions,
        agents: agent_path.AgentPath,
    ) -> None:
        self._serving = serving
        self._identity = identity
        self._catalog = catalog
        self._gate = gate
        self._usage = usage
        self._decisions = decisions
        self._agents = agents

    # Not an async generator, as the stub's type would have it: a client's cancel must be raised
    # here, at the write, and not wait for a suspended generator to be collected.
    async def Generate(  # type: ignore[override]
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> None:
        """See scheduler.proto."""
        caller = self._identity.caller(request, context)
        await self._serving.stream(request, caller, context, lambda message: (message,))

    async def RunAgent(  # type: ignore[override]  # as Generate
        self, request: runs_pb2.RunAgentRequest, context: Context
    ) -> None:
        """See scheduler.proto. Answered directly, where the request allows that: there is no agent
        service yet."""
        caller = self._identity.caller(request, context)
        verdict = self._agent_verdict(request, caller)
        try:
            direct = agent_path.direct_request(request)
            events = agent_path.DirectEvents(verdict.reason)
            await self._serving.stream(direct, caller, context, events.of, verdict.reason.value)
        except SluiceError as error:
            raise agent_path.in_a_runs_words(error) from None

    def _agent_verdict(self, request: runs_pb2.RunAgentRequest, caller: Caller) -> Verdict:
        """Checks a run and asks the gate; raises a typed refusal."""
        gate_reason = ""
        try:
            agent_path.check(request, caller.tenant)
            model = self._catalog.resolve(request.model, caller.tenant)
            load = self._gate.domain.load_of(model)
            verdict = self._agents.judge(request, caller.tenant, load)
            if verdict.path is Path.REFUSED:
                gate_reason = verdict.reason.value
                raise self._agents.refusal(verdict)
        except SluiceError as refusal:
            self._serving.refused(caller, None, refusal, gate_reason)
            raise
        return verdict

    async def GenerateText(
        self, request: generate_pb2.GenerateTextRequest, context: Context
    ) -> generate_pb2.GenerateTextResponse:
        """See scheduler.proto."""
        return await self._serving.text(request, self._identity.caller(request, context))

    async def Embed(
        self, request: generate_pb2.EmbedRequest, context: Context
    ) -> generate_pb2.EmbedResponse:
        """See scheduler.proto."""
        return await self._serving.embed(request, self._identity.caller(request, context))

    async def ListModels(
        self, request: generate_pb2.ListModelsRequest, context: Context
    ) -> generate_pb2.ListModelsResponse:
        """See scheduler.proto."""
        tenant = self._identity.tenant(context)
        return generate_pb2.ListModelsResponse(models=self._catalog.list(tenant))

    async def GetUsage(
        self, request: records_pb2.GetUsageRequest, context: Context
    ) -> records_pb2.GetUsageResponse:
        """See scheduler.proto. What ended within the last second or so may be missing."""
        tenant = self._identity.tenant(context)
        end_s = time.time()
        if request.HasField("end_time"):
            end_s = unix_seconds(request.end_time, "end_time")
        begin_s = end_s - USAGE_DEFAULT_S
        if request.HasField("begin_time"):
            begin_s = unix_seconds(request.begin_time, "begin_time")
        if not 0 <= end_s - begin_s <= USAGE_MAX_S:
            raise invalid("end_time", "must be 0 to 31 days after begin_time")
        records = await self._usage.query(tenant.name, begin_s, end_s)
        return records_pb2.GetUsageResponse(records=records)

    async def GetDecision(
        self, request: records_pb2.GetDecisionRequest, context: Context
    ) -> records_pb2.GetDecisionResponse:
        """See scheduler.proto. One that has just ended on another scheduler may be missing."""
        tenant = self._identity.tenant(context)
        if not is_request_id(request.request_id):
            raise invalid("request_id", "must be 1 to 128 visible ASCII characters")
        decision = await self._decisions.log.get(tenant.name, request.request_id)
        return records_pb2.GetDecisionResponse(decision=decision)
