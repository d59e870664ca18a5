"""The way to instances over gRPC: one channel per address, opened on first use.

Owns the channels. All schedulers' streams to an instance share its channel but never a stream.
Concurrency: one event loop. Bound: :data:`CHANNELS_MAX` channels; one that is not in use gives way
to a new address, the longest unused first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from sluice import context
from sluice.channels import ChannelLimits, ClientTls, ending, open_channel
from sluice.errors import Code, SluiceError, unavailable
from sluice.frames_grpc import GrpcClientConnection, client_connection
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from sluice.interceptors import REQUEST_ID_KEY
from sluice.status import from_rpc_error

CHANNELS_MAX = 1024
CLOSE_GRACE_S = 0.5

Metadata = tuple[tuple[str, str], ...]
FramesConnection = GrpcClientConnection[
    inference_pb2.GenerateFramesRequest, inference_pb2.GenerateFramesResponse
]


class _Way:
    """A channel and the number of calls that use it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(channel)
        )
        self.calls = 0


class GrpcInstances:
    """See :class:`execution_svc.ports.Instances`."""

    def __init__(self, limits: ChannelLimits | None = None, tls: ClientTls | None = None) -> None:
        self._limits = limits
        self._tls = tls
        self._ways: dict[str, _Way] = {}  # the longest unused first
        self._closing: set[asyncio.Task[None]] = set()

    def open_frames(self, address: str) -> FramesConnection:
        """See the port."""
        way = self._way(address)
        call: Any = way.stub.GenerateFrames()
        way.calls += 1
        call.add_done_callback(lambda _: self._done(way))
        return client_connection(call)

    async def generate(
        self,
        address: str,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float,
        traceparent: str,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See the port."""
        way = self._way(address)
        with _typed_errors(), self._in_use(way):
            call = way.stub.Generate(
                request, timeout=timeout_s, metadata=_metadata(request.work.request_id, traceparent)
            )
            with ending(call):
                async for message in call:
                    yield message

    async def embed(
        self,
        address: str,
        request: inference_pb2.EmbedRequest,
        *,
        timeout_s: float,
        traceparent: str,
    ) -> inference_pb2.EmbedResponse:
        """See the port."""
        way = self._way(address)
        with _typed_errors(), self._in_use(way):
            return await way.stub.Embed(
                request, timeout=timeout_s, metadata=_metadata(request.request_id, traceparent)
            )

    async def close(self) -> None:
        """Closes all channels. Idempotent."""
        ways, self._ways = self._ways, {}
        await asyncio.gather(*(way.channel.close() for way in ways.values()), *self._closing)

    def _way(self, address: str) -> _Way:
        way = self._ways.pop(address, None)
        if way is None:
            if len(self._ways) >= CHANNELS_MAX:
                self._give_way()
            way = _Way(open_channel(address, limits=self._limits, tls=self._tls))
        self._ways[address] = way
        return way

    def _give_way(self) -> None:
        for address, way in self._ways.items():
            if way.calls == 0:
                del self._ways[address]
                task = asyncio.create_task(way.channel.close(CLOSE_GRACE_S))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
                return
        raise unavailable("TOO_MANY_INSTANCES", "Too many instances are in use here.")

    @contextmanager
    def _in_use(self, way: _Way) -> Iterator[None]:
        way.calls += 1
        try:
            yield
        finally:
            self._done(way)

    @staticmethod
    def _done(way: _Way) -> None:
        way.calls -= 1


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _typed(from_rpc_error(error)) from None


def _typed(error: SluiceError) -> SluiceError:
    if error.code is Code.UNAVAILABLE and error.reason == "PEER_UNAVAILABLE":
        return unavailable("INSTANCE_UNREACHABLE", "The instance cannot be reached.")
    return error


def _metadata(request_id: str, traceparent: str) -> Metadata:
    metadata: Metadata = ((REQUEST_ID_KEY, request_id),)
    if traceparent:
        metadata += (("traceparent", traceparent),)
    if tracestate := context.tracestate.get():
        metadata += (("tracestate", tracestate),)
    return metadata
