"""The way to the schedulers: model calls of runs over their mesh API.

A run's calls go to one scheduler while that answers: the first of the rendezvous order of its
affinity (a session's turns share one), so that a conversation meets its KV cache again. The next
one is asked when a scheduler is UNAVAILABLE and nothing came yet; what comes after the first text
is the caller's to repeat. Credentials are renewed ahead of their time, and once when a scheduler
says that one has expired; a renewed one is kept with the run's model only. For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from agent_svc.adapters.translate import chat_message
from agent_svc.domain.model import ToolInfo
from agent_svc.run_ports import IngestSpec, LeaseKey, Model, Prompt, Spec, Written
from sluice import context
from sluice.channels import ending, open_channel
from sluice.common.v1 import input_pb2, result_pb2, sampling_pb2
from sluice.errors import Code, SluiceError, unavailable
from sluice.sampling_rules import TOTAL_TOKENS_MAX
from sluice.scheduler.v1 import generate_pb2, mesh_pb2, mesh_pb2_grpc
from sluice.status import from_rpc_error

RENEW_BEFORE_S: Final = 300.0
RENEW_TIMEOUT_S: Final = 5.0
MARGIN_S: Final = 0.5  # the scheduler's own deadline comes first
CALL_S_MAX: Final = 3_600.0
"""Longest model call; a run's wall time is usually sooner."""
# After a reply that ran on, where the run itself says nothing. The penalty grows with what is
# repeated: an end of the text, which was not written yet, becomes likelier than one more round.
RETRY_TEMPERATURE: Final = 0.7
RETRY_PENALTY: Final = 0.6


@dataclass(frozen=True, slots=True)
class Scheduler:
    """One scheduler's mesh API."""

    address: str
    stub: Any


class MeshModels:
    """See the module's docstring. ``addresses``: of the schedulers' mesh APIs."""

    def __init__(self, addresses: Sequence[str], wall: Callable[[], float] = time.time) -> None:
        self._channels = {address: open_channel(address) for address in addresses}
        self._schedulers = [
            Scheduler(address, mesh_pb2_grpc.SchedulerMeshServiceStub(channel))
            for address, channel in self._channels.items()
        ]
        self._wall = wall

    def of_run(self, lease: LeaseKey, spec: Spec, affinity: str) -> Model:
        """See :class:`agent_svc.run_ports.Models`."""
        return MeshModel(spec, ranked(self._schedulers, affinity), self._wall)

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


def ranked(schedulers: Sequence[Scheduler], affinity: str) -> list[Scheduler]:
    """The schedulers in the rendezvous order of a key: one that comes or goes moves only the keys
    that are its own."""

    def weight(one: Scheduler) -> bytes:
        return hashlib.blake2b(f"{one.address}\0{affinity}".encode(), digest_size=8).digest()

    return sorted(schedulers, key=weight, reverse=True)


class _Tries:
    """The schedulers that one call may still go to."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._left = list(schedulers)
        self._failure: SluiceError | None = None
        self.renewed = False

    @property
    def current(self) -> Scheduler:
        """The one to ask."""
        return self._left[0]

    def unavailable(self, error: SluiceError) -> None:
        """It does not take the call. Raises when there is no other one: the refusal that says to
        come back soonest."""
        known = self._failure
        if known is None or (error.retry_after_s or 0) < (known.retry_after_s or 0):
            self._failure = error
        del self._left[0]
        if not self._left:
            assert self._failure is not None
            raise self._failure


class MeshModel:
    """The models of one run."""

    def __init__(
        self, spec: Spec, schedulers: Sequence[Scheduler], wall: Callable[[], float]
    ) -> None:
        self._schedulers = schedulers
        self._wall = wall
        self._credential = mesh_pb2.SignedRunCredential.FromString(spec.credential)
        self._sampling = sampling_pb2.SamplingParams.FromString(spec.sampling)
        # Empty: the credential's own, whose aliases were resolved at admission.
        self._embedding_model = spec.work.model if isinstance(spec.work, IngestSpec) else ""

    async def generate(
        self,
        prompt: Prompt,
        *,
        step: int,
        request_id: str,
        max_tokens: int,
        total_tokens_max: int,
        deadline_s: float,
    ) -> AsyncGenerator[str | Written, None]:
        """See :class:`agent_svc.run_ports.Model`."""
        limit_s = min(deadline_s, CALL_S_MAX)
        message = mesh_pb2.GenerateStepRequest(
            request=self._request(prompt, request_id, max_tokens), step=step
        )
        sampling = message.request.sampling
        if (
            not sampling.HasField("total_tokens_max")
            or total_tokens_max < sampling.total_tokens_max
        ):
            sampling.total_tokens_max = min(total_tokens_max, TOTAL_TOKENS_MAX)
        message.remaining.FromMicroseconds(round(limit_s * 1e6))
        tries = _Tries(self._schedulers)
        while True:
            began = False
            try:
                await self._keep_fresh(tries.current)
                message.credential.CopyFrom(self._credential)
                stream = _stream(tries.current, message, limit_s)
                async with contextlib.aclosing(stream):
                    async for piece in stream:
                        began = True
                        yield piece
                return
            except SluiceError as error:
                if began:
                    raise  # somebody has seen the first text
                await self._next_try(tries, error)

    async def embed(
        self, texts: Sequence[str], *, request_id: str, deadline_s: float
    ) -> Sequence[bytes]:
        """See :class:`agent_svc.run_ports.Model`."""
        limit_s = min(deadline_s, CALL_S_MAX)
        message = mesh_pb2.EmbedStepRequest(
            request=generate_pb2.EmbedRequest(
                texts=texts, model=self._embedding_model, request_id=request_id
            )
        )
        tries = _Tries(self._schedulers)
        while True:
            try:
                await self._keep_fresh(tries.current)
                message.credential.CopyFrom(self._credential)
                found = await _answered(
                    tries.current.stub.EmbedStep(message, timeout=limit_s, metadata=_metadata())
                )
            except SluiceError as error:
                await self._next_try(tries, error)
                continue
            vectors = [one.values for one in found.response.embeddings]
            return [struct.pack(f"<{len(values)}f", *values) for values in vectors]

    async def _next_try(self, tries: _Tries, error: SluiceError) -> None:
        """Returns when another try makes sense; raises otherwise."""
        if error.code is Code.UNAUTHENTICATED and not tries.renewed:
            tries.renewed = True
            await self._renew(tries.current)
        elif error.code is Code.UNAVAILABLE:
            tries.unavailable(error)
        else:
            raise error

    async def _keep_fresh(self, scheduler: Scheduler) -> None:
        content = mesh_pb2.RunCredential.FromString(self._credential.payload)
        if content.expire_time.ToMicroseconds() / 1e6 < self._wall() + RENEW_BEFORE_S:
            await self._renew(scheduler)

    async def _renew(self, scheduler: Scheduler) -> None:
        request = mesh_pb2.RenewRunCredentialRequest(credential=self._credential)
        answer = await _answered(
            scheduler.stub.RenewRunCredential(request, timeout=RENEW_TIMEOUT_S)
        )
        self._credential = answer.credential

    def _request(
        self, prompt: Prompt, request_id: str, max_tokens: int
    ) -> generate_pb2.GenerateRequest:
        request = generate_pb2.GenerateRequest(
            messages=map(chat_message, prompt.messages),
            tools=map(_tool, prompt.tools),
            sampling=self._sampling,
            request_id=request_id,
        )
        request.sampling.max_tokens = max_tokens
        if request.sampling.min_tokens > max_tokens:
            request.sampling.min_tokens = max_tokens
        if prompt.json_schema:
            request.sampling.structured_output.json_schema = prompt.json_schema
        if prompt.keep_special_tokens:
            request.sampling.keep_special_tokens = True
        if prompt.otherwise:
            if not request.sampling.HasField("temperature"):
                request.sampling.temperature = RETRY_TEMPERATURE
            if not request.sampling.HasField("frequency_penalty"):
                request.sampling.frequency_penalty = RETRY_PENALTY
        return request


async def _stream(
    scheduler: Scheduler, message: mesh_pb2.GenerateStepRequest, limit_s: float
) -> AsyncGenerator[str | Written, None]:
    call = scheduler.stub.GenerateStep(message, timeout=limit_s + MARGIN_S, metadata=_metadata())
    with ending(call):
        try:
            # Not by the library's iterator: that and the call hold each other and the last message
            # until a full garbage collection, after each step.
            while (piece := await call.read()) is not grpc.aio.EOF:
                event = piece.response.WhichOneof("event")
                if event == "delta" and piece.response.delta.text:
                    yield piece.response.delta.text
                elif event == "finished":
                    yield _written(piece.response.finished)
                    return
        except grpc.aio.AioRpcError as error:
            raise _told(error) from None
    raise SluiceError(Code.INTERNAL, "STREAM_PROTOCOL", "A model call ended without its end.")


async def _answered(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _told(error) from None


def _told(error: grpc.aio.AioRpcError) -> SluiceError:
    typed = from_rpc_error(error)
    if typed.reason in ("PEER_UNAVAILABLE", "PEER_CANCELLED"):
        return unavailable("SCHEDULER_UNREACHABLE", "No scheduler answers the agent service now.")
    return typed


def _written(finished: generate_pb2.GenerateFinished) -> Written:
    whole = finished.outputs[0].finish_reason == result_pb2.FINISH_REASON_STOP
    return Written(
        finish_reason="stop" if whole else "length",
        prompt_tokens=finished.usage.prompt_tokens,
        completion_tokens=finished.usage.completion_tokens,
        cached_tokens=finished.usage.cached_tokens,
        cost=finished.cost,
        request_id=finished.request_id,
    )


def _tool(info: ToolInfo) -> input_pb2.Tool:
    return input_pb2.Tool(
        name=info.name,
        description=info.description,
        parameters_json=json.dumps(info.parameters, ensure_ascii=False),
    )


def _metadata() -> tuple[tuple[str, str], ...]:
    traceparent = context.traceparent.get()
    return (("traceparent", traceparent),) if traceparent else ()
