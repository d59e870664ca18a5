"""A mesh of its own for one test: temporary runtime folder, free ports, the real command line.

`LocalMesh(stand_ins=True)` runs the command in a folder whose services are stand-ins: real
processes that serve grpc.health.v1 and misbehave as `behaviour.json` says. Everything else (Envoy,
supervisor, command) is real. On exit the mesh is stopped and what is left of it is a failure.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sluice.command import processes
from sluice.command.mark import mark_of
from sluice.command.run_files import Record, RunPaths, read_record

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).with_name("stand_ins")
# Below the range that kernels give to outgoing connections, so that none of those takes one.
PORTS = range(20_000, 32_000)
COMMAND_LIMIT_S = 60.0
WAIT_LIMIT_S = 20.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; drawn at random, so that parallel runs rarely meet."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


@dataclass
class LocalMesh:
    """One mesh."""

    runtime: Path
    root: Path
    environ: dict[str, str]
    port: int
    sent: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def paths(self) -> RunPaths:
        """Its files."""
        return RunPaths(self.runtime)

    def run(
        self, *arguments: str, limit_s: float = COMMAND_LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs `sluice ARGUMENTS` to its end."""
        return subprocess.run(
            self.command(arguments),
            cwd=self.root,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `sluice ARGUMENTS`."""
        process = subprocess.Popen(
            self.command(arguments),
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.sent.append(process)
        return process

    def record(self, name: str) -> Record:
        """The record of a process, which must be there."""
        record = read_record(self.paths.record(name))
        assert record is not None, f"{name} has no record"
        return record

    def living(self) -> list[psutil.Process]:
        """Processes that carry this mesh's mark, seen without the product's own search."""
        mark = mark_of(self.runtime).encode()
        found = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue
            if b"SLUICE_MARK=" + mark in environment.split(b"\0"):
                found.append(process)
        return found

    def behave(self, **by_name: Mapping[str, object]) -> None:
        """Sets how the stand-ins behave from their next start on."""
        text = json.dumps({name.replace("_", "-"): rules for name, rules in by_name.items()})
        (self.root / "behaviour.json").write_text(text)

    def command(self, arguments: tuple[str, ...]) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "sluice.command.cli", *arguments]


@contextmanager
def local_mesh(folder: Path, *, stand_ins: bool) -> Iterator[LocalMesh]:
    """A mesh that is not started yet."""
    root = ROOT
    if stand_ins:
        root = folder / "root"
        shutil.copytree(STAND_INS, root)
        shutil.copy(ROOT / "sluice.toml", root / "sluice.toml")
    runtime = folder / "runtime"
    ports = free_ports(11)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLUICE_") and name not in ("ENGINE", "MAKEFLAGS")
    }
    environ |= {
        "SLUICE_CONFIG": str(root / "sluice.toml"),
        "SLUICE_MESH_RUNTIME_DIR": str(runtime),
        "SLUICE_ENVOY_PORT": str(ports[0]),
        "SLUICE_ENVOY_TLS_PORT": str(ports[1]),
        "SLUICE_ENVOY_ADMIN_PORT": str(ports[2]),
        "SLUICE_SCHEDULER_BIND": f"127.0.0.1:{ports[3]}",
        "SLUICE_SCHEDULER_MESH_BIND": f"127.0.0.1:{ports[4]}",
        "SLUICE_EXECUTION_BIND": f"127.0.0.1:{ports[5]}",
        "SLUICE_AGENT_BIND": f"127.0.0.1:{ports[10]}",
        "SLUICE_STATE_BIND": f"127.0.0.1:{ports[8]}",
        "SLUICE_LOCAL_STORE_PORT": str(ports[9]),
        "SLUICE_ADDRESS_CHAT_0": f"127.0.0.1:{ports[6]}",
        "SLUICE_ADDRESS_EMBED_0": f"127.0.0.1:{ports[7]}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }
    mesh = LocalMesh(runtime, root, environ, ports[0])
    try:
        yield mesh
    finally:
        for process in mesh.sent:
            if process.poll() is None:
                process.kill()
            process.communicate()
        down = mesh.run("down")
        left = mesh.living()
        processes.end(left, grace_s=0.0)
        assert down.returncode == 0, down.stdout + down.stderr
        assert not left, f"left behind: {left}"


def until(condition: Callable[[], bool], what: str, limit_s: float = WAIT_LIMIT_S) -> None:
    """Waits until `condition` holds; the state of other processes has no event to wait for."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.05)


def kill(process: int) -> None:
    """SIGKILL."""
    os.kill(process, signal.SIGKILL)


def plain(text: str) -> str:
    """Without what a terminal would interpret."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
