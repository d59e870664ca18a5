"""How a checked caller's generation or embedding is served, whoever asked for it.

Shared by the public API (a client's key) and the mesh API (a run's credential): checks, quota,
admission to the gate, the messages that leave, and what is counted at the end. Who calls is decided
before: see :class:`Caller`.

Concurrency: callers share the event loop with the owner task; each holds only its own request. A
client that goes away cancels its handler, whose ``finally`` frees everything.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import grpc

from scheduler_svc.adapters import translate
from scheduler_svc.adapters.answers import deltas_due, embeddings, finished, started, whole_answer
from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.input_hash import embedding_hash
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.metrics import SchedulerMetrics
from scheduler_svc.adapters.quota_keeper import NOTHING_USED, consumption
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.config import ClassTimes
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
from sluice.inference.v1 import inference_pb2
from sluice.scheduler.v1 import generate_pb2
from sluice.status import from_rpc_error
from sluice.telemetry import current_tracestate

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
class RunOf:
    """The run of a step. ``models``: the only ones that it may call; ``step``: its number."""

    run_id: str
    step: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and under which identifier. ``remaining_s``: the deadline of the call; ``None``:
    it set none. ``run``: the run whose step it is, if it is one."""

    tenant: Tenant
    request_id: str
    priority_class: PriorityClass
    remaining_s: float | None
    run: RunOf | None = None


class Serving:
    """See the module's docstring."""

    def __init__(
        self,
        gate: Gate,
        catalog: Catalog,
        times: ClassTimes,
        metrics: SchedulerMetrics,
        embed_stub: Callable[[InstanceName], EmbedStub | None],
        usage: UsageLog,
        prices: Prices,
        decisions: Decisions,
    ) -> None:
        self._gate = gate
        self._catalog = catalog
        self._times = times
        self._metrics = metrics
        self._embed_stub = embed_stub
        self._usage = usage
        self._prices = prices
        self._decisions = decisions
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    # The whole way of a call.

    async def stream(
        self,
        request: generate_pb2.GenerateRequest,
        caller: Caller,
        context: Context,
        told: Callable[[generate_pb2.GenerateResponse], Iterable[Any]],
        gate_reason: str = "",
        *,
        flush_min_s: float = 0.0,
    ) -> None:
        """Serves a generation message by message. ``told``: what a message is written as;
        ``flush_min_s``: between two of them, at least."""
        live, field = await self.generation(request, caller, whole=False, gate_reason=gate_reason)
        live.flush_min_s = flush_min_s
        async with self.served(live, field):
            await self._write(live, context, told)

    async def text(
        self, request: generate_pb2.GenerateTextRequest, caller: Caller
    ) -> generate_pb2.GenerateTextResponse:
        """Serves a generation in one piece."""
        live, field = await self.generation(request, caller, whole=True)
        async with self.served(live, field):
            await live.finished()
        return whole_answer(live, self._loop.time(), self._cost(live))

    async def embed(
        self, request: generate_pb2.EmbedRequest, caller: Caller
    ) -> generate_pb2.EmbedResponse:
        """Serves an embedding."""
        live = await self._embedding(request, caller)
        async with self.served(live, "texts"):
            response = await self._embed(live, request)
        return embeddings(live, response, self._cost(live))

    async def _write(
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

    # Admission.

    async def generation(
        self,
        request: translate.GenerateMessage,
        caller: Caller,
        *,
        whole: bool,
        gate_reason: str = "",
    ) -> tuple[LiveRequest, str]:
        """Checks a request, reserves its quota and makes its live form; raises a typed refusal.
        Cheapest check first, and nothing is copied or hashed for a request before all of them: a
        refusal costs little."""
        ticket = None
        try:
            source = translate.check_input(request)
            model = self._model(caller, request.model)
            output = translate.check_sampling(request.sampling)
            domain = self._gate.domain
            ticket = self._ticket(caller, model, source.size_bytes)
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
            self.refused(caller, ticket, refusal)
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

    async def _embedding(self, request: generate_pb2.EmbedRequest, caller: Caller) -> LiveRequest:
        ticket = None
        try:
            size_bytes = translate.check_embed(request)
            model = self._model(caller, request.model, embeds=True)
            ticket = self._ticket(caller, model, size_bytes, WorkKind.EMBED)
            ticket.first_token_limit_s = ticket.deadline_s
            ticket.prompt_tokens = self._gate.domain.expected_prompt_tokens(model, size_bytes)
            self._gate.check(ticket)
        except SluiceError as refusal:
            self.refused(caller, ticket, refusal)
            raise
        held = await self._reserve(ticket)
        with self._releasing(held):
            ticket.input_hash = partial(embedding_hash, ticket.tenant, model, request.texts)
            work = inference_pb2.Work(request_id=caller.request_id, model=model)
            live = LiveRequest(ticket, work, self._gate.flush, loop=self._loop, unary=True)
        live.quota = held
        return live

    def _model(self, caller: Caller, name: str, *, embeds: bool = False) -> str:
        if caller.run is None:
            return self._catalog.resolve(name, caller.tenant, embeds=embeds)
        return self._catalog.granted(name, caller.tenant, caller.run.models, embeds=embeds)

    def _ticket(
        self,
        caller: Caller,
        model: str,
        size_bytes: int,
        kind: WorkKind = WorkKind.GENERATE,
    ) -> Ticket:
        now = self._loop.time()
        remaining_s = caller.remaining_s
        if remaining_s is None:
            remaining_s = self._times.deadline_s(caller.priority_class)
        deadline_s = now + min(remaining_s, self._times.deadline_max_s)
        run = caller.run
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
            step_of=None if run is None else (run.run_id, run.step),
        )

    def refused(
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
            self.refused(None, ticket, refusal)
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
    async def served(self, live: LiveRequest, field: str) -> AsyncIterator[None]:
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
                self._gate.attempts.unary_failed(live, from_rpc_error(error))
            except SluiceError as error:
                self._gate.attempts.unary_failed(live, error)
            else:
                self._gate.attempts.unary_ended(live, response.response.usage)
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


def _trace(traceparent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", traceparent),) if traceparent else ()
