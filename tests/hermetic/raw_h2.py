"""An HTTP/2 client that does what ordinary clients never do: closed windows, resets, floods.

Blocking, one connection, no flow control of its own: a window opens only when a test opens it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from sluice.scheduler.v1 import generate_pb2

GENERATE = "/sluice.scheduler.v1.SchedulerService/Generate"
GENERATE_TEXT = "/sluice.scheduler.v1.SchedulerService/GenerateText"


def grpc_frame(message: bytes) -> bytes:
    """A message with its gRPC prefix, not compressed."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def generate_body(prompt: str) -> bytes:
    """The body of a Generate or GenerateText call."""
    return grpc_frame(generate_pb2.GenerateRequest(prompt=prompt).SerializeToString())


class RawH2:
    """One connection to a port of loopback."""

    def __init__(self, port: int, *, stream_window: int = 65_535) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        config = h2.config.H2Configuration(
            client_side=True, header_encoding="utf-8", validate_outbound_headers=False
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: stream_window,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: 65_536,
            },
        )
        self.h2.initiate_connection()
        # The connection's window is opened wide: what stalls is the stream.
        self.h2.increment_flow_control_window(1 << 24)
        self.events: list[h2.events.Event] = []
        self.closed = False
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def flush(self) -> None:
        """Writes what has gathered."""
        try:
            self._socket.sendall(self.h2.data_to_send())
        except OSError:
            self.closed = True

    def request(
        self,
        path: str = GENERATE,
        body: bytes | None = b"",
        headers: Sequence[tuple[str, str]] = (),
        content_type: str = "application/grpc",
    ) -> int:
        """Sends a request; the number of its stream. Without a body it stays open."""
        stream = self.h2.get_next_available_stream_id()
        base = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", content_type),
            ("te", "trailers"),
        ]
        self.h2.send_headers(stream, [*base, *headers], end_stream=False)
        if body is not None:
            self.h2.send_data(stream, body, end_stream=True)
        self.flush()
        return stream

    def pump(self, seconds: float) -> list[h2.events.Event]:
        """Reads for at most so long or until the peer closes; the events that came."""
        end = time.monotonic() + seconds
        fresh: list[h2.events.Event] = []
        while not self.closed and (rest := end - time.monotonic()) > 0:
            self._socket.settimeout(rest)
            try:
                data = self._socket.recv(65_536)
            except TimeoutError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            try:
                fresh += self.h2.receive_data(data)
            except h2.exceptions.ProtocolError:
                self.closed = True
            self.flush()
        self.events += fresh
        return fresh

    def outcome(self, stream: int, limit_s: float = 5.0) -> dict[str, Any]:
        """Waits for the stream's end: headers, trailers, "data", and "reset" if it was."""
        end = time.monotonic() + limit_s
        while True:
            mine = [e for e in self.events if getattr(e, "stream_id", None) == stream]
            over = (h2.events.StreamEnded, h2.events.StreamReset)
            if any(isinstance(event, over) for event in mine) or self.closed:
                break
            assert time.monotonic() < end, f"stream {stream} did not end: {mine}"
            self.pump(0.05)
        result: dict[str, Any] = {"data": b""}
        for event in mine:
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                result.update((str(name), value) for name, value in event.headers)
            elif isinstance(event, h2.events.DataReceived):
                result["data"] += event.data
            elif isinstance(event, h2.events.StreamReset):
                result["reset"] = event.error_code
        return result
