"""The gRPC service of an instance: thin handlers over the parts that do the work.

Owns the open frame streams and the count of embedding calls. Concurrency: one task per call.
Errors are raised as SluiceError; the server's interceptor turns them into statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc.aio

from inference_svc.adapters import plain_call
from inference_svc.adapters.convert import check_model, check_request_id, to_prompts
from inference_svc.adapters.frame_stream import FrameStream
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.load_watch import LoadWatch, to_interval
from inference_svc.adapters.results import to_model
from inference_svc.adapters.room import PlainShare
from inference_svc.ports import GpuMonitor
from sluice.errors import SluiceError, exhausted, failed_precondition, unavailable
from sluice.frames import FrameBroken
from sluice.frames_grpc import server_connection
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from sluice.telemetry import current_traceparent
from sluice.telemetry_names import ATTR_INSTANCE, ATTR_REQUEST_ID, SPAN_EMBED, SPAN_GENERATE

FRAME_STREAMS_MAX = 64
EMBEDS_MAX = 64  # embedding calls in the engine at once
RETRY_S = 1.0


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """``sluice.inference.v1.InferenceService``.

    The streaming handlers write to the context and are coroutines, which grpc.aio takes as well as
    generators, though the stubs know only those: a generator that a cancelled call leaves behind is
    closed some time later, and the engine would be aborted that late."""

    def __init__(self, instance: Instance, gpus: GpuMonitor) -> None:
        self._instance = instance
        self._host = instance.host
        self._share = PlainShare(instance.room)
        self._streams: dict[FrameStream, None] = {}  # in order of coming
        self._open_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._embeds = 0
        self.load = LoadWatch(instance.host, gpus, lambda: len(self._streams))

    async def Generate(  # type: ignore[override]
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> None:
        messages = plain_call.generate(self._instance, self._share, request)
        with self._working(), self._traced(SPAN_GENERATE, request.work.request_id):
            async with aclosing(messages):
                async for message in messages:
                    await context.write(message)

    async def GenerateFrames(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[inference_pb2.GenerateFramesRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if len(self._streams) >= FRAME_STREAMS_MAX:
            raise exhausted("TOO_MANY_STREAMS", "This instance has too many streams.", RETRY_S)
        stream = FrameStream(server_connection(context), self._instance)
        self._streams[stream] = None
        try:
            with self._working():
                await stream.run()
        except* FrameBroken as breaks:
            for broken in breaks.exceptions:
                if isinstance(broken, FrameBroken):
                    self._instance.counts.losses[broken.reason.value] += 1
            raise
        finally:
            self._streams.pop(stream, None)

    async def Embed(
        self,
        request: inference_pb2.EmbedRequest,
        context: grpc.aio.ServicerContext[inference_pb2.EmbedRequest, inference_pb2.EmbedResponse],
    ) -> inference_pb2.EmbedResponse:
        self._instance.verify(request.grant, request.request_id)
        check_request_id(request.request_id)
        if self._host.draining:
            raise _draining()
        engine = self._host.engine()
        check_model(request.model, self._host.served_names)
        if not self._host.model().embed:
            raise failed_precondition("CANNOT_EMBED", "This model does not embed.")
        prompts = to_prompts(request.inputs)
        if self._embeds >= EMBEDS_MAX:
            raise exhausted("NO_ROOM", "This instance has no room now.", RETRY_S)
        self._embeds += 1
        try:
            with self._working(), self._traced(SPAN_EMBED, request.request_id):
                vectors, tokens = await engine.embed(request.request_id, prompts)
        finally:
            self._embeds -= 1
        response = inference_pb2.EmbedResponse(simulated=self._host.simulated)
        response.usage.prompt_tokens = tokens
        for vector in vectors:
            response.embeddings.add().values.extend(vector)
        return response

    async def GetModel(
        self,
        request: inference_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetModelRequest, inference_pb2.GetModelResponse
        ],
    ) -> inference_pb2.GetModelResponse:
        return to_model(self._host.model(), instance=self._instance.name, epoch=self._host.epoch)

    async def WatchLoad(  # type: ignore[override]
        self,
        request: inference_pb2.WatchLoadRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.WatchLoadRequest, inference_pb2.WatchLoadResponse
        ],
    ) -> None:
        interval_s = to_interval(request.interval if request.HasField("interval") else None)
        async with aclosing(self.load.reports(interval_s)) as reports:
            async for report in reports:
                await context.write(report)

    @property
    def frame_streams(self) -> int:
        """Frame streams open now."""
        return len(self._streams)

    async def drain(self) -> None:
        """Starts nothing more and waits until all peers have half-closed and all plain calls have
        ended. Unbounded: the caller sets a limit."""
        self._host.drain()
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

    @contextmanager
    def _traced(self, name: str, request_id: str) -> Iterator[None]:
        """A span around a plain call."""
        span = self._instance.telemetry.span(
            name,
            current_traceparent(),
            {ATTR_REQUEST_ID: request_id, ATTR_INSTANCE: self._instance.name},
        )
        error: str | None = "CANCELLED"
        try:
            yield
            error = None
        except SluiceError as failure:
            error = failure.reason
            raise
        finally:
            span.end(error)

    def stop(self) -> None:
        """Ends what is still open. Idempotent."""
        self.load.stop()
        for stream in list(self._streams):
            stream.end(unavailable("STOPPING", "This instance stops."))


def _draining() -> SluiceError:
    return unavailable("DRAINING", "This instance starts nothing more.")
