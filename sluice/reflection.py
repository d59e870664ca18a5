"""Server reflection, v1 and v1alpha, from one servicer.

The two versions have the same messages in the same numbers; only the package differs. grpcurl and
other older tools speak v1alpha, newer ones v1. A reflection stream that a client leaves open (as
grpcurl does for the length of its call) must not hold up a stop: :meth:`Reflection.close` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION_SERVICES = (V1, V1ALPHA)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Reflection:
    """Answers for the given services from the generated descriptors."""

    def __init__(self, services: Sequence[str]) -> None:
        _describe_v1()
        self._servicer = ReflectionServicer((*services, *REFLECTION_SERVICES))
        self._streams: set[asyncio.Task[Any]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers both versions."""
        method = grpc.stream_stream_rpc_method_handler(
            cast("Any", self._info),
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handlers = [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
            for name in REFLECTION_SERVICES
        ]
        server.add_generic_rpc_handlers(handlers)

    async def _info(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], context: Context
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._streams.add(task)
        try:
            responses = cast("Any", self._servicer.ServerReflectionInfo(requests, context))
            async for response in responses:
                yield response
        finally:
            self._streams.discard(task)

    def close(self) -> None:
        """Ends all streams."""
        for task in self._streams:
            task.cancel()


def _describe_v1() -> None:
    """Adds the descriptor of v1, which no Python package has, made from that of v1alpha."""
    pool = descriptor_pool.Default()
    name = "grpc/reflection/v1/reflection.proto"
    try:
        pool.FindFileByName(name)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name = name
        file.package = "grpc.reflection.v1"
        for message in file.message_type:
            for field in (field for field in message.field if field.type_name):
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
        for service in file.service:
            for rpc in service.method:
                rpc.input_type = rpc.input_type.replace(".v1alpha.", ".v1.")
                rpc.output_type = rpc.output_type.replace(".v1alpha.", ".v1.")
        pool.AddSerializedFile(file.SerializeToString())
