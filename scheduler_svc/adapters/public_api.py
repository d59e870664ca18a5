"""Generation, models and records at the public service.

One handler per call. A handler identifies the tenant and hands the request to what serves it.
"""

from __future__ import annotations

import time
from typing import Any, Final

import grpc

from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.identity import Identity
from scheduler_svc.adapters.serving import Serving
from scheduler_svc.adapters.usage_log import UsageLog
from sluice.errors import invalid
from sluice.ids import is_request_id
from sluice.scheduler.v1 import generate_pb2, records_pb2, scheduler_pb2_grpc
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
        usage: UsageLog,
        decisions: Decisions,
    ) -> None:
        self._serving = serving
        self._identity = identity
        self._catalog = catalog
        self._usage = usage
        self._decisions = decisions

    # Not an async generator, as the stub's type would have it: a client's cancel must be raised
    # here, at the write, and not wait for a suspended generator to be collected.
    async def Generate(  # type: ignore[override]
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> None:
        """See scheduler.proto."""
        caller = self._identity.caller(request, context)
        await self._serving.stream(request, caller, context, lambda message: (message,))

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
