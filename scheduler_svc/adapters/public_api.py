"""The public service: what a client's call becomes, and what it hears.

One handler per call. A handler identifies the tenant, checks the request, admits it to the gate
and then writes what the live request has gathered, one message per flush, until the request is
over. Methods of later layers (runs, sessions, documents, records) are answered by the generated
base class as UNIMPLEMENTED; the error interceptor adds the typed reason.

Concurrency: handlers share the event loop with the owner task; each holds only its own request.
A client that goes away cancels its handler, whose ``finally`` frees everything.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, cast

import grpc

from scheduler_svc.adapters import agent_path, translate
from scheduler_svc.adapters.answers import deltas_due, finished, started, whole_answer
from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.input_hash import embedding_hash
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.metrics import SchedulerMetrics
from scheduler_svc.adapters.quota_keeper import NOTHING_USED, consumption
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.tenants import Tenants
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.config import ClassTimes
from scheduler_svc.domain.agent_gate import Path, Verdict
from scheduler_svc.domain.model import (
    InstanceName,
    Outcome,
    PriorityClass,
    Refusal,
    Ticket,
    TicketId,
    WorkKind,
)
from scheduler_svc.domain.prices import Prices
from scheduler_svc.domain.quota import Reservation
from sluice import context, logs
from sluice.errors import Code, SluiceError, invalid, unavailable
from sluice.execution.v1 import execution_pb2, execution_pb2_grpc
from sluice.ids import is_request_id
from sluice.inference.v1 import inference_pb2
from sluice.scheduler.v1 import generate_pb2, records_pb2, runs_pb2, scheduler_pb2_grpc
from sluice.status import from_rpc_error
from sluice.telemetry import current_tracestate
from sluice.timestamps import unix_seconds

_OUTCOMES: Final = {
    Code.INVALID_ARGUMENT: Outcome.INVALID,
    Code.NOT_FOUND: Outcome.INVALID,
    Code.FAILED_PRECONDITION: Outcome.INVALID,
    Code.UNAUTHENTICATED: Outcome.UNAUTHENTICATED,
    Code.PERMISSION_DENIED: Outcome.FORBIDDEN,
    Code.RESOURCE_EXHAUSTED: Outcome.QUEUE_FULL,
    Code.UNAVAILABLE: Outcome.NO_INSTANCE,
    Code.DEADLINE_EXCEEDED: Outcome.DEADLINE_EXCEEDED,
}

DEADLINE_ROUNDING: Final = 0.01
"""gRPC writes a deadline with two or three digits, rounded up by at most this share."""

DEADLINE_LATENCY_S: Final = 0.05
"""The client's clock started this much before the server's, at most."""

USAGE_DEFAULT_S: Final = 86_400.0
USAGE_MAX_S: Final = 31 * 86_400.0

MESH_FAULTS: Final = frozenset(
    (
        Outcome.INSTANCE_FAILED,
        Outcome.FIRST_TOKEN_TIMEOUT,
        Outcome.INTER_TOKEN_TIMEOUT,
        Outcome.SLOW_CONSUMER,
        Outcome.NO_INSTANCE,
        Outcome.POISON,
        Outcome.INTERNAL,
    )
)
"""Ends that an operator looks into; refusals and cancels are in metrics only."""

log = logs.get(__name__)

EmbedStub: TypeAlias = "execution_pb2_grpc.ExecutionServiceAsyncStub"
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls and under which identifier."""

    tenant: Tenant
    request_id: str
    priority_class: PriorityClass


class PublicApi(scheduler_pb2_grpc.SchedulerServiceServicer):
    """See the module's docstring."""

    def __init__(
        self,
        gate: Gate,
        catalog: Catalog,
        tenants: Tenants,
        times: ClassTimes,
        metrics: SchedulerMetrics,
        embed_stub: Callable[[InstanceName], EmbedStub | None],
        usage: UsageLog,
        prices: Prices,
        decisions: Decisions,
        agents: agent_path.AgentPath,
    ) -> None:
        self._gate = gate
        self._catalog = catalog
        self._tenants = tenants
        self._times = times
        self._metrics = metrics
        self._embed_stub = embed_stub
        self._usage = usage
        self._prices = prices
        self._decisions = decisions
        self._agents = agents
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    # Not an async generator, as the stub's type would have it: a client's cancel must be raised
    # here, at the write, and not wait for a suspended generator to be collected.
    async def Generate(  # type: ignore[override]
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> None:
        """See scheduler.proto."""
        live, field = await self._generation(request, context, whole=False)
        async with self._served(live, field):
            await self._stream(live, context, lambda message: (message,))

    async def RunAgent(  # type: ignore[override]  # as Generate
        self, request: runs_pb2.RunAgentRequest, context: Context
    ) -> None:
        """See scheduler.proto. Answered directly, where the request allows that: there is no agent
        service yet."""
        verdict = self._agent_verdict(request, context)
        try:
            direct = agent_path.direct_request(request)
            live, field = await self._generation(
                direct, context, whole=False, gate_reason=verdict.reason.value
            )
            async with self._served(live, field):
                await self._stream(live, context, agent_path.DirectEvents(verdict.reason).of)
        except SluiceError as error:
            raise agent_path.in_a_runs_words(error) from None

    def _agent_verdict(self, request: runs_pb2.RunAgentRequest, context: Context) -> Verdict:
        """Checks a run and asks the gate; raises a typed refusal."""
        caller, gate_reason = None, ""
        try:
            caller = self._caller(request, context)
            agent_path.check(request, caller.tenant)
            model = self._catalog.resolve(request.model, caller.tenant)
            load = self._gate.domain.load_of(model)
            verdict = self._agents.judge(request, caller.tenant, load)
            if verdict.path is Path.REFUSED:
                gate_reason = verdict.reason.value
                raise self._agents.refusal(verdict)
        except SluiceError as refusal:
            self._refused(caller, None, refusal, gate_reason)
            raise
        return verdict

    async def _stream(
        self,
        live: LiveRequest,
        context: Context,
        told: Callable[[generate_pb2.GenerateResponse], Iterable[Any]],
    ) -> None:
        """Writes what gathers until the request is over. ``told``: what a message is written as."""
        over = False
        while not over:
            await live.ready()
            # Looked at once per round: what arrives during a write is of the next round.
            over = live.over
            if live.outcome is Outcome.SLOW_CONSUMER:
                break
            now = self._loop.time()
            messages = [started(live)] if live.started_due else []
            live.started_due = False
            if deltas := deltas_due(live):
                messages += deltas
                live.flushed(now)
            if live.ended is not None:
                messages.append(finished(live, now, self._cost(live)))
            for message in messages:
                live.sequence += 1
                message.sequence = live.sequence
                for written in told(message):
                    live.write_began_s = self._loop.time()
                    await context.write(written)
                    live.write_began_s = 0.0
            self._metrics.messages += len(messages)

    async def GenerateText(
        self, request: generate_pb2.GenerateTextRequest, context: Context
    ) -> generate_pb2.GenerateTextResponse:
        """See scheduler.proto."""
        live, field = await self._generation(request, context, whole=True)
        async with self._served(live, field):
            await live.finished()
        return whole_answer(live, self._loop.time(), self._cost(live))

    async def Embed(
        self, request: generate_pb2.EmbedRequest, context: Context
    ) -> generate_pb2.EmbedResponse:
        """See scheduler.proto."""
        live = await self._embedding(request, context)
        async with self._served(live, "texts"):
            response = await self._embed(live, request)
        answer = response.response
        return generate_pb2.EmbedResponse(
            embeddings=[
                generate_pb2.Embedding(values=embedding.values) for embedding in answer.embeddings
            ],
            usage=answer.usage,
            model=live.ticket.model,
            instance=response.instance,
            request_id=live.ticket.request_id,
            simulated=answer.simulated,
            cost=self._cost(live),
        )

    async def ListModels(
        self, request: generate_pb2.ListModelsRequest, context: Context
    ) -> generate_pb2.ListModelsResponse:
        """See scheduler.proto."""
        tenant = self._tenants.tenant(_header(context, "authorization"))
        return generate_pb2.ListModelsResponse(models=self._catalog.list(tenant))

    async def GetUsage(
        self, request: records_pb2.GetUsageRequest, context: Context
    ) -> records_pb2.GetUsageResponse:
        """See scheduler.proto. What ended within the last second or so may be missing."""
        tenant = self._tenants.tenant(_header(context, "authorization"))
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
        tenant = self._tenants.tenant(_header(context, "authorization"))
        if not is_request_id(request.request_id):
            raise invalid("request_id", "must be 1 to 128 visible ASCII characters")
        decision = await self._decisions.log.get(tenant.name, request.request_id)
        return records_pb2.GetDecisionResponse(decision=decision)

    # Admission.

    def _caller(
        self,
        request: translate.GenerateMessage | generate_pb2.EmbedRequest | runs_pb2.RunAgentRequest,
        context: Context,
    ) -> Caller:
        tenant = self._tenants.tenant(_header(context, "authorization"))
        identifier = translate.request_id(request.request_id, _header(context, "x-request-id"))
        wanted = translate.priority_class(request.priority_class)
        return Caller(tenant, identifier, tenant.class_for(wanted))

    async def _generation(
        self,
        request: translate.GenerateMessage,
        context: Context,
        *,
        whole: bool,
        gate_reason: str = "",
    ) -> tuple[LiveRequest, str]:
        """Checks a request, reserves its quota and makes its live form; raises a typed refusal.
        Cheapest check first, and nothing is copied or hashed for a request before all of them: a
        refusal costs little."""
        caller, ticket = None, None
        try:
            caller = self._caller(request, context)
            source = translate.check_input(request)
            model = self._catalog.resolve(request.model, caller.tenant)
            output = translate.check_sampling(request.sampling)
            domain = self._gate.domain
            ticket = self._ticket(caller, model, source.size_bytes, context)
            ticket.gate_reason = gate_reason
            tokens = source.tokens or domain.expected_prompt_tokens(model, source.size_bytes)
            ticket.prompt_tokens = domain.readable_tokens(model, tokens)
            ticket.output_tokens = output.count * domain.expected_output_tokens(
                caller.tenant.name, model, output.tokens_max
            )
            ticket.continuable = translate.obstacle_of(request.sampling) is None
            if request.HasField("first_token_limit"):
                limit = request.first_token_limit
                asked_s = limit.seconds + limit.nanos / 1e9
                if asked_s <= 0:
                    raise invalid("first_token_limit", "must be more than 0")
                ticket.first_token_limit_s = ticket.arrival_s + asked_s
            self._gate.check(ticket)
        except SluiceError as refusal:
            self._refused(caller, ticket, refusal)
            raise
        held = await self._reserve(ticket)
        with self._releasing(held):
            work = translate.work_for(
                request, caller.tenant.name, caller.request_id, model, source, output
            )
            live = LiveRequest(
                ticket,
                work,
                self._gate.flush,
                loop=self._loop,
                whole=whole,
                want_token_ids=request.return_token_ids,
                inter_token_limit_s=self._times.inter_token_limit_s,
            )
        live.quota = held
        return live, source.field

    async def _embedding(self, request: generate_pb2.EmbedRequest, context: Context) -> LiveRequest:
        caller, ticket = None, None
        try:
            caller = self._caller(request, context)
            size_bytes = translate.check_embed(request)
            model = self._catalog.resolve(request.model, caller.tenant, embeds=True)
            ticket = self._ticket(caller, model, size_bytes, context, kind=WorkKind.EMBED)
            ticket.first_token_limit_s = ticket.deadline_s
            ticket.prompt_tokens = self._gate.domain.expected_prompt_tokens(model, size_bytes)
            self._gate.check(ticket)
        except SluiceError as refusal:
            self._refused(caller, ticket, refusal)
            raise
        held = await self._reserve(ticket)
        with self._releasing(held):
            ticket.input_hash = partial(embedding_hash, ticket.tenant, model, request.texts)
            work = inference_pb2.Work(request_id=caller.request_id, model=model)
            live = LiveRequest(ticket, work, self._gate.flush, loop=self._loop, unary=True)
        live.quota = held
        return live

    def _ticket(
        self,
        caller: Caller,
        model: str,
        size_bytes: int,
        context: Context,
        kind: WorkKind = WorkKind.GENERATE,
    ) -> Ticket:
        now = self._loop.time()
        remaining_s = cast("float | None", context.time_remaining())  # None: no deadline was set
        if remaining_s is None:
            remaining_s = self._times.deadline_s(caller.priority_class)
        deadline_s = now + min(remaining_s, self._times.deadline_max_s)
        return Ticket(
            id=TicketId(next(self._ids)),
            request_id=caller.request_id,
            tenant=caller.tenant.name,
            model=model,
            priority_class=caller.priority_class,
            arrival_s=now,
            deadline_s=deadline_s,
            first_token_limit_s=now + self._times.first_token_limit_s(caller.priority_class),
            prompt_tokens=0,
            output_tokens=0,
            size_bytes=size_bytes,
            kind=kind,
            sampled=self._decisions.sample(),
        )

    def _refused(
        self,
        caller: Caller | None,
        ticket: Ticket | None,
        refusal: SluiceError,
        gate_reason: str = "",
    ) -> None:
        """Counts and records a refusal; ``caller`` and ``ticket``: if it came so far."""
        outcome = outcome_of(refusal)
        self._metrics.refused(outcome, refusal, ticket)
        if ticket is not None:
            self._decisions.refused(ticket, outcome, refusal, self._loop.time())
            self._usage.ended(ticket, outcome, NOTHING_USED)
        elif caller is not None:
            self._decisions.wrong(
                caller.tenant.name,
                caller.request_id,
                caller.priority_class,
                outcome,
                refusal,
                gate_reason,
            )

    async def _reserve(self, ticket: Ticket) -> Reservation:
        """Holds the tenant to its quotas, before anything is queued. It waits only where the state
        service has to be asked. A refusal charges nothing."""
        quota = self._gate.quota
        try:
            held = quota.try_reserve(ticket)
            if held is None:
                held = await quota.reserve(ticket)
                with self._releasing(held):
                    self._gate.check(ticket)  # as it is now, after the wait
        except SluiceError as refusal:
            self._refused(None, ticket, refusal)
            raise
        except asyncio.CancelledError:
            outcome = left_as(ticket, self._loop.time())
            self._metrics.left(ticket, outcome)
            self._usage.ended(ticket, outcome, NOTHING_USED)
            raise
        return held

    @contextmanager
    def _releasing(self, held: Reservation) -> Iterator[None]:
        """Gives quota back that nobody holds yet when the block fails."""
        try:
            yield
        except BaseException:
            self._gate.quota.release(held)
            raise

    # Serving.

    @asynccontextmanager
    async def _served(self, live: LiveRequest, field: str) -> AsyncIterator[None]:
        """Admits a live request for as long as its handler serves it, and records its end."""
        ticket = live.ticket
        span = self._metrics.request_span(ticket)
        live.traceparent = span.traceparent
        live.tracestate = current_tracestate()
        task = asyncio.current_task()
        assert task is not None
        live.abandon = task.cancel
        outcome = Outcome.CANCELLED
        try:
            self._gate.admit(live)
            yield
            if live.error is not None:
                if live.first_token_s and live.sequence:
                    # What a client needs to see that it has all that there was.
                    sequence = {"last_sequence": str(live.sequence)}
                    live.error.metadata = {**live.error.metadata, **sequence}
                raise translate.public_error(live.error, field)
            outcome = Outcome.FINISHED
        except SluiceError as error:
            outcome = live.outcome or Outcome.INTERNAL
            say_charged(error, live, outcome)
            raise
        except asyncio.CancelledError:
            outcome = live.outcome or left_as(ticket, self._loop.time())
            if outcome is Outcome.SLOW_CONSUMER and live.error is not None and not task.uncancel():
                say_charged(live.error, live, outcome)
                raise live.error from None  # cancelled by the gate, not by the client
            raise
        except BaseException:
            outcome = Outcome.INTERNAL
            raise
        finally:
            self._gate.leave(live, outcome)
            now = self._loop.time()
            self._account(live, outcome, now)
            self._metrics.ended(live, outcome, now, span)
            if outcome in MESH_FAULTS:
                log_fault(live, outcome)

    def _cost(self, live: LiveRequest) -> float:
        used = consumption(live, Outcome.FINISHED)
        return self._prices.cost(live.ticket.model, used.prompt_tokens, used.output_tokens)

    def _account(self, live: LiveRequest, outcome: Outcome, now: float) -> None:
        """What an ended request used: settles its quota, and adds it to the tenant's usage."""
        ticket = live.ticket
        used = consumption(live, outcome)
        self._gate.quota.close(live, used)
        cost = self._prices.cost(ticket.model, used.prompt_tokens, used.output_tokens)
        engine_s = self._gate.domain.engine_seconds(ticket, now)
        self._usage.ended(ticket, outcome, used, cost, engine_s)
        self._decisions.ended(live, outcome, used, cost, now)

    async def _embed(
        self, live: LiveRequest, request: generate_pb2.EmbedRequest
    ) -> execution_pb2.ExecuteEmbedResponse:
        """Calls the instance that the gate chose, again after each failure that is placed anew."""
        attempt = 0
        while True:
            await live.placed(attempt)
            if live.error is not None:
                raise translate.public_error(live.error, "texts")
            attempt = live.attempt
            stub = self._embed_stub(live.instance)
            try:
                if stub is None:
                    raise unavailable("EXECUTION_UNREACHABLE", "no execution service is reachable")
                message = self._gate.embed_request(live, request.texts)
                timeout = live.ticket.deadline_s - self._loop.time()
                response = await stub.ExecuteEmbed(
                    message, timeout=timeout, metadata=_trace(live.traceparent)
                )
            except grpc.aio.AioRpcError as error:
                self._gate.unary_failed(live, from_rpc_error(error))
            except SluiceError as error:
                self._gate.unary_failed(live, error)
            else:
                self._gate.unary_ended(live, response.response.usage)
                return response


def outcome_of(refusal: SluiceError) -> Outcome:
    """What to record for a refusal."""
    if isinstance(refusal, Refusal):
        return refusal.outcome
    if refusal.reason.startswith("QUOTA_"):
        return Outcome.QUOTA_EXCEEDED  # also where quotas cannot be checked
    return _OUTCOMES.get(refusal.code, Outcome.INTERNAL)


def say_charged(error: SluiceError, live: LiveRequest, outcome: Outcome) -> None:
    """The client of a request that failed on its way hears whether its tenant pays for a part."""
    if consumption(live, outcome).charged:
        error.metadata = {**error.metadata, "charged": "true"}


def log_fault(live: LiveRequest, outcome: Outcome) -> None:
    """One line for a request that the mesh did not finish, found by its identifier."""
    context.request_id.set(live.ticket.request_id)
    log.warning(
        "request not finished",
        outcome=outcome.value,
        reason=live.error.reason if live.error is not None else None,
        instance=live.instance,
        attempts=live.attempt,
        delivered_tokens=live.tokens,
    )


def left_as(ticket: Ticket, now: float) -> Outcome:
    """What it was when the client's side ended the call: at its deadline a client's library (and
    Envoy) resets the stream just as one that leaves does, so only the time tells them apart."""
    rounding_s = DEADLINE_ROUNDING * (ticket.deadline_s - ticket.arrival_s)
    at_deadline = now >= ticket.deadline_s - rounding_s - DEADLINE_LATENCY_S
    return Outcome.DEADLINE_EXCEEDED if at_deadline else Outcome.CANCELLED


def _header(context: Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def _trace(traceparent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", traceparent),) if traceparent else ()
