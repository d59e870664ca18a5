"""The state service and holders of quota as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice import fault_points
from sluice.channels import open_channel

ROOT = Path(__file__).resolve().parents[2]
READY_S = 20.0
STORE_TIMEOUT_S = 0.2  # longest wait for a reply of the store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


class StateProcess:
    """``python -m state_svc.main`` on a free port."""

    def __init__(self, store_url: str, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._environ = _environ(
            SLUICE_STATE_BIND=self.address,
            SLUICE_STATE_DURABLE_URL=store_url,
            SLUICE_STATE_STORE_TIMEOUT_S=str(timeout_s),
            SLUICE_STATE_PROBE_LAG_S="0",
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, fault_point: str = "") -> None:
        """``fault_point``: where it dies (sluice/fault_points.py); empty: nowhere."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "state_svc.main"],
            env={**self._environ, fault_points.VARIABLE: fault_point},
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and waits; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        status = self._process.wait(10)
        self._process = None
        return status

    def send(self, number: signal.Signals) -> None:
        """Sends a signal and does not wait."""
        os.kill(self.pid, number)

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@contextlib.asynccontextmanager
async def state_service(
    store_url: str, timeout_s: float = STORE_TIMEOUT_S
) -> AsyncIterator[tuple[StateProcess, grpc.aio.Channel]]:
    """A running service and a channel to it, both gone at the end."""
    service = StateProcess(store_url, timeout_s)
    service.start()
    channel = open_channel(service.address)
    try:
        await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
        yield service, channel
    finally:
        await channel.close()
        service.kill()


async def health(channel: grpc.aio.Channel) -> int:
    """What the service says of itself; UNKNOWN when it does not answer."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.aio.AioRpcError:
        return int(health_pb2.HealthCheckResponse.UNKNOWN)
    return int(reply.status)


async def until_health(channel: grpc.aio.Channel, wanted: int, within_s: float = READY_S) -> None:
    async with asyncio.timeout(within_s):
        while await health(channel) != wanted:
            await asyncio.sleep(0.05)


class HolderProcess:
    """A holder under load (a script of this folder); its lines are JSON."""

    def __init__(self, address: str, script: str = "quota_holder.py", **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environ(),
            cwd=ROOT,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"address": address, **settings}) + "\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def line(self, event: str, within_s: float = READY_S) -> dict[str, Any]:
        """The next line of this event; others are dropped."""
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            while True:
                text = await asyncio.to_thread(self._process.stdout.readline)
                assert text, f"the holder ended before {event}"
                found: dict[str, Any] = json.loads(text)
                if found["event"] == event:
                    return found

    def finish(self) -> list[dict[str, Any]]:
        """Waits for its end; returns the lines that are left."""
        # Not communicate(): it would pass over what readline() has buffered.
        assert self._process.stdout is not None
        lines = [json.loads(line) for line in self._process.stdout]
        self._process.wait(30)
        return lines

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def holders(address: str, *settings: dict[str, Any]) -> Iterator[list[HolderProcess]]:
    """Running holders, gone at the end."""
    started: list[HolderProcess] = []
    try:
        started.extend(HolderProcess(address, **one) for one in settings)
        yield started
    finally:
        for holder in started:
            holder.kill()
