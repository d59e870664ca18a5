"""The gRPC service of an execution replica: thin handlers over the parts that do the work.

Owns the open scheduler streams. Concurrency: one task per call. Errors are raised as SluiceError;
the server's interceptor turns them into statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from datetime import timedelta
from typing import Any

import grpc.aio

from execution_svc.adapters.agents import Agents
from execution_svc.adapters.counts import Counts
from execution_svc.adapters.scheduler_stream import SchedulerStream
from execution_svc.ports import Instances
from sluice import deadline
from sluice.channels import is_target
from sluice.errors import SluiceError, exhausted, invalid, unavailable
from sluice.execution.v1 import execution_pb2, execution_pb2_grpc
from sluice.frames_grpc import server_connection
from sluice.ids import is_request_id
from sluice.inference.v1 import inference_pb2
from sluice.telemetry import Telemetry, current_traceparent
from sluice.telemetry_names import ATTR_INSTANCE, ATTR_REQUEST_ID, SPAN_EXECUTE

SCHEDULER_STREAMS_MAX = 64
RETRY_S = 1.0
# What this layer needs of a deadline after the instance's part, and the least worth starting with.
MARGIN_S = 0.01
BUDGET_MIN_S = 0.01
BUDGET_MAX_S = 3600.0
# How often agent services look for runs by themselves.
POLL_DELAY = timedelta(seconds=1)


class ExecutionServicer(execution_pb2_grpc.ExecutionServiceServicer):
    """``sluice.execution.v1.ExecutionService``.

    The streaming handlers write to the context and are coroutines, which grpc.aio takes as well as
    generators, though the stubs know only those: so a cancelled call cancels its instance's call at
    once, not when a forgotten generator is closed."""

    def __init__(
        self, instances: Instances, telemetry: Telemetry, counts: Counts, agents: Agents
    ) -> None:
        self._instances = instances
        self._agents = agents
        self._telemetry = telemetry
        self._counts = counts
        self._streams: dict[SchedulerStream, None] = {}  # in order of coming
        self._open_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def Execute(  # type: ignore[override]
        self,
        request: execution_pb2.ExecuteRequest,
        context: grpc.aio.ServicerContext[
            execution_pb2.ExecuteRequest, execution_pb2.ExecuteResponse
        ],
    ) -> None:
        self._admit(request.instance)
        timeout_s = _budget()
        name = request.instance.name
        with self._working(), self._traced(request.work.request_id, name) as traceparent:
            messages = self._instances.generate(
                request.instance.address,
                inference_pb2.GenerateRequest(work=request.work, grant=request.grant),
                timeout_s=timeout_s,
                traceparent=traceparent,
            )
            async with aclosing(messages):
                async for message in messages:
                    await context.write(
                        execution_pb2.ExecuteResponse(instance=name, response=message)
                    )

    async def ExecuteFrames(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[execution_pb2.ExecuteFramesRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if self._draining:
            raise _draining()
        if len(self._streams) >= SCHEDULER_STREAMS_MAX:
            raise exhausted("TOO_MANY_STREAMS", "This replica serves too many streams.", RETRY_S)
        stream = SchedulerStream(
            server_connection(context), self._instances, self._telemetry, self._counts
        )
        self._streams[stream] = None
        try:
            with self._working():
                await stream.run()
        finally:
            self._streams.pop(stream, None)

    async def ExecuteEmbed(
        self,
        request: execution_pb2.ExecuteEmbedRequest,
        context: grpc.aio.ServicerContext[
            execution_pb2.ExecuteEmbedRequest, execution_pb2.ExecuteEmbedResponse
        ],
    ) -> execution_pb2.ExecuteEmbedResponse:
        self._admit(request.instance)
        timeout_s = _budget()
        name = request.instance.name
        with self._working(), self._traced(request.request.request_id, name) as traceparent:
            response = await self._instances.embed(
                request.instance.address,
                request.request,
                timeout_s=timeout_s,
                traceparent=traceparent,
            )
        return execution_pb2.ExecuteEmbedResponse(instance=name, response=response)

    async def StartRun(
        self,
        request: execution_pb2.StartRunRequest,
        context: grpc.aio.ServicerContext[
            execution_pb2.StartRunRequest, execution_pb2.StartRunResponse
        ],
    ) -> execution_pb2.StartRunResponse:
        if self._draining:
            raise _draining()
        if not request.tenant:
            raise invalid("tenant", "must not be empty")
        if not is_request_id(request.run_id):
            raise invalid("run_id", "must be 1 to 128 visible ASCII characters")
        with self._working():
            nudged = await self._agents.nudge(request.tenant, request.run_id)
        response = execution_pb2.StartRunResponse(nudged=nudged)
        if not nudged:
            response.poll_delay.FromTimedelta(POLL_DELAY)
        return response

    async def ListTools(
        self,
        request: execution_pb2.ListToolsRequest,
        context: grpc.aio.ServicerContext[
            execution_pb2.ListToolsRequest, execution_pb2.ListToolsResponse
        ],
    ) -> execution_pb2.ListToolsResponse:
        if not request.tenant:
            raise invalid("tenant", "must not be empty")
        with self._working():
            tools = await self._agents.tools(request.tenant)
        return execution_pb2.ListToolsResponse(tools=tools)

    @property
    def scheduler_streams(self) -> int:
        """Scheduler streams open now."""
        return len(self._streams)

    async def drain(self) -> None:
        """Starts nothing more, tells all schedulers, and waits until they have half-closed and all
        plain calls have ended. Unbounded: the caller sets a limit."""
        self._draining = True
        for stream in self._streams:
            stream.drain()
        await self._idle.wait()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Counts a call as work that a drain waits for."""
        self._open_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open_calls -= 1
            if self._open_calls == 0:
                self._idle.set()

    def _admit(self, instance: execution_pb2.InstanceRef) -> None:
        if self._draining:
            raise _draining()
        if not is_request_id(instance.name):
            raise invalid("instance.name", "must be 1 to 128 visible ASCII characters")
        if not is_target(instance.address):
            raise invalid("instance.address", "must be host:port")

    @contextmanager
    def _traced(self, request_id: str, instance: str) -> Iterator[str]:
        """A span around a plain call; yields the traceparent for the instance."""
        span = self._telemetry.span(
            SPAN_EXECUTE,
            current_traceparent(),
            {ATTR_REQUEST_ID: request_id, ATTR_INSTANCE: instance},
        )
        error: str | None = "CANCELLED"
        try:
            yield span.traceparent
            error = None
        except SluiceError as failure:
            error = failure.reason
            raise
        finally:
            span.end(error)


def _budget() -> float:
    limit = deadline.current()
    if limit is None:
        return BUDGET_MAX_S
    now = asyncio.get_running_loop().time()
    return deadline.child_budget(limit.remaining(now), MARGIN_S, BUDGET_MAX_S, BUDGET_MIN_S)


def _draining() -> SluiceError:
    return unavailable("DRAINING", "This replica starts nothing more.")
