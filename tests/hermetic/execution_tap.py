"""A tap between scheduler and execution: passes every byte on and reads the starts in them.

A synchronous gRPC server on a port of its own, which the scheduler takes for the execution replica.
Its threads write `starts`, the test reads them when the requests are over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from sluice.execution.v1 import execution_pb2
from tests.hermetic.local_mesh import free_ports

EXECUTION = "sluice.execution.v1.ExecutionService"


class Tap:
    """Passes calls on to an execution replica as they are, and keeps the starts it saw."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.starts: dict[str, list[tuple[int, Any]]] = {}
        """Request id -> (number of the frame, start) of each attempt."""
        self.lock = threading.Lock()
        self.channel: grpc.Channel | None = None

    def frames(self, requests: Iterator[bytes], _: object) -> Iterator[bytes]:
        """ExecuteFrames."""
        assert self.channel is not None
        method: Any = self.channel.stream_stream(f"/{EXECUTION}/ExecuteFrames")
        answers = method(self._noted(requests))
        try:
            yield from answers
        finally:
            answers.cancel()

    def embed(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """ExecuteEmbed."""
        assert self.channel is not None
        call: Any = self.channel.unary_unary(f"/{EXECUTION}/ExecuteEmbed")
        metadata = [(k, v) for k, v in context.invocation_metadata() if k == "traceparent"]
        answer: bytes = call(request, metadata=metadata, timeout=20)
        return answer

    def _noted(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        for data in requests:
            frame = execution_pb2.ExecuteFramesRequest.FromString(data)
            with self.lock:
                for part in frame.parts:
                    for start in part.frame.starts:
                        entry = (frame.sequence, start)
                        self.starts.setdefault(start.work.request_id, []).append(entry)
            yield data


@contextmanager
def tapped(tap: Tap) -> Iterator[Tap]:
    """The tap, serving for the time of the block. Set its `channel` to the replica first."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    handlers: dict[str, Any] = {
        "ExecuteFrames": grpc.stream_stream_rpc_method_handler(tap.frames),
        "ExecuteEmbed": grpc.unary_unary_rpc_method_handler(tap.embed),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(EXECUTION, handlers)])
    assert server.add_insecure_port(tap.address)
    server.start()
    try:
        yield tap
    finally:
        server.stop(0).wait()
        if tap.channel is not None:
            tap.channel.close()
