"""Starts the real Envoy and scripted schedulers as processes on free loopback ports.

Each process belongs to a context manager that ends it; logs go to files under a temporary folder,
so that a full pipe never stops a process, and are shown when a start fails.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx

from sluice.edge import arguments, render
from sluice.edge_config import EnvoySettings
from sluice.mesh_config import MeshSettings
from tests.hermetic.edge_stub import CONTROL

ROOT = Path(__file__).resolve().parents[2]
ENVOY = Path(sys.executable).with_name("envoy")
START_LIMIT_S = 20.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(check: Any, limit_s: float = START_LIMIT_S, what: str = "condition") -> Any:
    """The first true result of `check`, asked every 20 ms."""
    end = time.monotonic() + limit_s
    while True:
        if result := check():
            return result
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(0.02)


@dataclass(frozen=True)
class Stub:
    """A running scripted scheduler."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def control(self, **command: Any) -> dict[str, Any]:
        """Its counters, and what was asked last (`seen`); `serving=` sets its health."""
        with grpc.insecure_channel(self.address) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CONTROL)
            answer = call(json.dumps(command).encode(), timeout=5)
        counters: dict[str, Any] = json.loads(answer)
        return counters


@contextmanager
def stub(name: str = "a", port: int = 0, *options: str) -> Iterator[Stub]:
    """A scripted scheduler for the time of the block."""
    command = [sys.executable, "-m", "tests.hermetic.edge_stub", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--name", name, *options],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield Stub(name, int(process.stdout.readline()), process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass(frozen=True)
class Edge:
    """A running Envoy."""

    settings: EnvoySettings
    process: subprocess.Popen[bytes]
    folder: Path
    stubs: Sequence[Stub]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.settings.port}"

    @property
    def url(self) -> str:
        return f"http://{self.target}"

    def admin(self, path: str, method: str = "GET") -> str:
        """What the admin interface answers."""
        url = f"http://127.0.0.1:{self.settings.admin_port}{path}"
        return httpx.request(method, url, timeout=5).text

    def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose names match."""
        answer = json.loads(self.admin(f"/stats?format=json&filter={pattern}"))
        return {item["name"]: item["value"] for item in answer["stats"] if "value" in item}

    def stat(self, name: str) -> int:
        """One counter or gauge, by its full name."""
        return self.stats(f"^{name}$")[name]

    def memory_bytes(self) -> int:
        """Bytes that the process has allocated."""
        return self.stat("server.memory_allocated")

    def resident_bytes(self) -> int:
        """Bytes that the process keeps in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def cpu_s(self) -> float:
        """Processor time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def access_log(self) -> list[dict[str, Any]]:
        """Its lines so far."""
        path = self.folder / "access.log"
        return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def edge(
    folder: Path, stubs: Sequence[Stub], mesh: MeshSettings | None = None, **values: Any
) -> Iterator[Edge]:
    """Envoy before `stubs` for the time of the block; `values` are settings of [envoy]."""
    mesh = mesh or MeshSettings(log_level="warning")
    values.setdefault("schedulers", tuple(each.address for each in stubs))
    settings = replace(
        EnvoySettings(),
        port=free_port(),
        admin_port=free_port(),
        access_log=str(folder / "access.log"),
        **values,
    )
    path = folder / "envoy.yaml"
    path.write_text(render(settings, mesh))
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [str(ENVOY), *arguments(settings, mesh, path)], stdout=log, stderr=log
        )
    running = Edge(settings, process, folder, stubs)

    def ready() -> bool:
        assert process.poll() is None, (folder / "envoy.log").read_text()[-2_000:]
        try:
            return running.admin("/ready").startswith("LIVE")
        except httpx.TransportError:
            return False

    try:
        wait_until(ready, what="Envoy is ready")
        if stubs:
            wait_until(
                lambda: running.stat("cluster.scheduler.membership_healthy") > 0,
                what="a scheduler is healthy",
            )
        yield running
    finally:
        process.kill()
        process.wait()


@contextmanager
def edge_with_stub(folder: Path, **values: Any) -> Iterator[Edge]:
    """Envoy before one scripted scheduler."""
    with ExitStack() as stack:
        one = stack.enter_context(stub())
        yield stack.enter_context(edge(folder, [one], **values))


def script(op: str, **values: Any) -> str:
    """A prompt for the stub."""
    return json.dumps({"op": op, **values})
