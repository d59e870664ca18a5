"""What the execution service needs from the instances, as it reaches them.

Implemented over gRPC by ``adapters/instance_channels.py`` and in memory by tests. All calls are
made from one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeAlias

from sluice.frames import FrameConnection
from sluice.inference.v1 import inference_pb2

InstanceConnection: TypeAlias = FrameConnection[
    inference_pb2.GenerateFramesRequest, inference_pb2.GenerateFramesResponse
]


class Instances(Protocol):
    """The way to instances by address ("host:port")."""

    def open_frames(self, address: str) -> InstanceConnection:
        """A new ``GenerateFrames`` stream. Does not block and does not fail: a connection that
        cannot be made is FrameBroken UNREACHABLE on its first use. Connecting again to an address
        that refused is held off by the channel's backoff, 100 ms to 2 s, in which opening fails at
        once."""

    def generate(
        self,
        address: str,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float,
        traceparent: str,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of one ``Generate``. Raises the instance's error as SluiceError;
        UNAVAILABLE with reason INSTANCE_UNREACHABLE when it cannot be reached. Closing the
        generator cancels the call."""

    async def embed(
        self,
        address: str,
        request: inference_pb2.EmbedRequest,
        *,
        timeout_s: float,
        traceparent: str,
    ) -> inference_pb2.EmbedResponse:
        """One ``Embed``; errors as for :meth:`generate`."""
