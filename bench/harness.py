"""What benchmarks share: a mesh of real processes, their CPU time, and the results file.

A benchmark starts its own mesh from ``bench/mesh.toml`` in its own runtime folder and on shifted
ports, so that it never meets a running one. CPU time is the operating system's accounting of
each process and its children, read before and after a load.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from sluice.command.run_files import RunPaths, read_records
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MODELS_LIMIT_S = 10.0


@dataclass(frozen=True)
class Mesh:
    """A running mesh."""

    runtime: Path
    port_offset: int

    @property
    def envoy(self) -> str:
        """Envoy's clear-text address."""
        return f"127.0.0.1:{8080 + self.port_offset}"

    @property
    def key(self) -> str:
        """The key of tenant ``dev``."""
        return (self.runtime / "api-key").read_text().strip()

    def instance(self, number: int = 0) -> str:
        """Address of an instance."""
        return f"127.0.0.1:{50081 + number + self.port_offset}"

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by process name, children included, since each started."""
        return {name: _family_cpu_s(pid) for name, pid in self._pids().items()}

    def memory_mb(self) -> dict[str, float]:
        """Resident memory in MB by process name, children included."""
        return {name: _family_rss(pid) / 1e6 for name, pid in self._pids().items()}

    def _pids(self) -> dict[str, int]:
        """Services by name; the supervisor, whose children they are, is left out: it sleeps."""
        records = read_records(RunPaths(self.runtime).run)
        return {
            name: record.pid
            for name, record in records.items()
            if record.pid and name != "supervisor"
        }


@contextmanager
def mesh(
    runtime: Path,
    *,
    engine: str = "simulated",
    config: Path = ROOT / "bench" / "mesh.toml",
    port_offset: int = 7000,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Mesh]:
    """Runs a mesh for the length of the block."""
    env = {
        **os.environ,
        "SLUICE_CONFIG": str(config),
        "SLUICE_MESH_RUNTIME_DIR": str(runtime),
        "SLUICE_LOCAL_PORT_OFFSET": str(port_offset),
        **(environ or {}),
    }
    command = [sys.executable, "-m", "sluice.command.cli"]
    up = [*command, "up", "--engine", engine, "--no-question"]
    started = subprocess.run(up, env=env, cwd=ROOT, capture_output=True, text=True)
    if started.returncode != 0:
        raise SystemExit(f"the mesh did not start:\n{started.stdout}{started.stderr}")
    running = Mesh(runtime, port_offset)
    try:
        _await_models(running)
        yield running
    finally:
        subprocess.run([*command, "down"], env=env, check=True, cwd=ROOT, capture_output=True)


def _await_models(running: Mesh) -> None:
    """The scheduler learns of its instances, and Envoy of it, a moment after they serve."""
    metadata = (("authorization", f"Bearer {running.key}"),)
    until = time.monotonic() + MODELS_LIMIT_S
    with grpc.insecure_channel(running.envoy) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while time.monotonic() < until:
            with contextlib.suppress(grpc.RpcError):  # Envoy looks for schedulers every 0.4 s
                listed = stub.ListModels(generate_pb2.ListModelsRequest(), metadata=metadata).models
                if listed and all(model.available for model in listed):
                    return
            time.sleep(0.1)
    raise SystemExit(f"no model was available within {MODELS_LIMIT_S:.0f} s")


def write_results(name: str, figures: Mapping[str, float]) -> Path:
    """Writes one flat object: metric names with units to numbers, the machine and the commit."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    path = RESULTS / f"{name}.json"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    content = {**{key: round(value, 4) for key, value in figures.items()}}
    path.write_text(json.dumps({**content, "machine": machine, "commit": commit}, indent=2) + "\n")
    return path


def table(rows: list[list[str]]) -> str:
    """Rows as aligned text; the first is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the sorted values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _family_cpu_s(pid: int) -> float:
    total = 0.0
    for process in _family(pid):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def _family_rss(pid: int) -> int:
    total = 0
    for process in _family(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
