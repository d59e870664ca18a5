"""A relay between two services: passes every call on, byte by byte, and notes what passed when.

A synchronous gRPC server on a port of its own that one service takes for the other. Its threads
write `passed`; the test reads it when what it looks for is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.hermetic.local_mesh import free_ports

THREADS = 24
FOREVER_S = 1e6  # what the library says of a call without a deadline is more
_OPTIONS = (("grpc.max_reconnect_backoff_ms", 100), ("grpc.enable_http_proxy", 0))


@dataclass(frozen=True)
class Passed:
    """One message."""

    at_s: float
    """time.monotonic() of its arrival."""
    method: str
    """Without the service."""
    forward: bool
    """Whether it is a request."""
    data: bytes


@dataclass
class Relay(grpc.GenericRpcHandler):
    """See the module's text."""

    address: str = field(default_factory=lambda: f"127.0.0.1:{free_ports(1)[0]}")
    passed: list[Passed] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    channel: grpc.Channel | None = None

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Any call is a stream both ways on the wire."""
        return grpc.stream_stream_rpc_method_handler(self._handler(details.method))

    def connect(self, target: str) -> None:
        """Says where calls go; before the first one."""
        self.channel = grpc.insecure_channel(target, _OPTIONS)

    def of(self, method: str, *, forward: bool) -> list[Passed]:
        """What passed in calls of a method so far."""
        with self.lock:
            return [one for one in self.passed if (one.method, one.forward) == (method, forward)]

    def _handler(self, path: str) -> Any:
        method = path.rsplit("/", 1)[1]

        def note(forward: bool, data: bytes) -> bytes:
            with self.lock:
                self.passed.append(Passed(time.monotonic(), method, forward, data))
            return data

        def handle(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            assert self.channel is not None
            left_s = context.time_remaining()
            method_of_target: Any = self.channel.stream_stream(path)
            call = method_of_target(
                (note(True, data) for data in requests),
                timeout=left_s if left_s < FOREVER_S else None,
            )
            context.add_callback(call.cancel)
            try:
                for data in call:
                    yield note(False, data)
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata() or ())
                context.abort(error.code(), error.details())

        return handle


@contextmanager
def relaying() -> Iterator[Relay]:
    """A relay for the time of the block; it passes nothing on before it is connected."""
    relay = Relay()
    server = grpc.server(futures.ThreadPoolExecutor(THREADS), handlers=[relay])
    assert server.add_insecure_port(relay.address)
    server.start()
    try:
        yield relay
    finally:
        server.stop(0).wait()
        if relay.channel is not None:
            relay.channel.close()
