"""What `sluice status` shows: the processes, and the instances as the scheduler sees them.

Processes come from their records and the operating system; instances from the scheduler's own
report under the admin key, or, when it gives none, from each instance directly. Blocking, bounded:
every question has a time limit of a few seconds and all are asked at once.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import grpc
from rich.table import Table
from rich.text import Text

from sluice.command import mesh_state, processes
from sluice.command.client import MeshClient
from sluice.command.failures import UnreachableError
from sluice.command.first_files import admin_key_path
from sluice.command.probe import Health, check_grpc, check_http, check_ping
from sluice.command.run_files import SUPERVISOR, Plan, Record, RunPaths
from sluice.command.topology import MIB
from sluice.errors import SluiceError
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc, load_pb2
from sluice.mesh_config import Address, parse_address
from sluice.scheduler.v1 import admin_pb2

ASK_TIMEOUT_S: Final = 3.0
_INFERENCE_MODULE: Final = "inference_svc.main"
# What people copy: other columns wrap first.
_NAMES: Final = ("process", "instance")


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process."""

    record: Record
    alive: bool
    health: Health
    uptime_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """One instance."""

    name: str
    model: str
    state: str
    simulated: bool
    load: load_pb2.EngineLoad | None


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """Everything at one moment."""

    supervised: bool
    processes: tuple[ProcessSeen, ...]
    instances: tuple[InstanceSeen, ...]
    source: str
    """Who told about the instances."""

    @property
    def running(self) -> bool:
        """Whether anything runs."""
        return self.supervised or any(one.alive for one in self.processes)

    @property
    def simulated(self) -> bool:
        """Whether any instance is."""
        return any(one.simulated for one in self.instances)


def read_status(paths: RunPaths) -> StatusSeen:
    """Asks everything once."""
    state = mesh_state.look(paths)
    records = [one for name, one in state.records.items() if name != SUPERVISOR]
    if not state.supervised and not state.strays:
        return StatusSeen(False, (), (), "")
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="status") as pool:
        seen = tuple(pool.map(_process, records))
        instances, source = _instances(paths, state.plan, seen, pool)
    return StatusSeen(state.supervised, seen, instances, source)


def process_table(seen: StatusSeen) -> Table:
    """Services."""
    table = Table(box=None, pad_edge=False)
    for column in ("process", "pid", "health", "uptime", "restarts", "memory", "ports"):
        table.add_column(column, overflow="fold", no_wrap=column in _NAMES)
    for one in seen.processes:
        health = one.health.value if one.alive else one.record.state
        style = "green" if one.health is Health.SERVING else "yellow"
        table.add_row(
            one.record.name,
            str(one.record.pid) if one.alive else "-",
            Text(health, style=style),
            _span(one.uptime_s) if one.alive else "-",
            str(one.record.restarts),
            f"{one.memory_bytes / MIB:.0f} MiB" if one.alive else "-",
            " ".join(one.record.ports.values()),
        )
    return table


def instance_table(seen: StatusSeen) -> Table:
    """Instances; a figure that the engine does not report is shown as -."""
    table = Table(box=None, pad_edge=False, caption=None)
    for column in ("instance", "model", "state", "running", "waiting", "KV tokens", "tokens/s"):
        table.add_column(column, overflow="fold", no_wrap=column in _NAMES)
    for one in seen.instances:
        load = one.load
        used = _figure(load, "kv_tokens_used")
        free = _figure(load, "kv_tokens_free")
        total = f"{used} of {int(used) + int(free)}" if "-" not in (used, free) else used
        table.add_row(
            Text(one.name),
            Text(one.model + (" SIMULATED" if one.simulated else "")),
            Text(one.state),
            _figure(load, "running"),
            _figure(load, "waiting"),
            total,
            _figure(load, "output_tokens_per_s"),
        )
    return table


def _process(record: Record) -> ProcessSeen:
    alive = record.create_time > 0 and processes.is_alive(record.identity)
    if not alive:
        return ProcessSeen(record, False, Health.DOWN, 0.0, 0)
    return ProcessSeen(
        record,
        True,
        _health(record),
        max(0.0, time.time() - record.create_time),
        processes.memory_bytes(record.identity),
    )


def _health(record: Record) -> Health:
    if "admin" in record.ports:
        return check_http(f"http://{record.ports['admin']}/ready", ASK_TIMEOUT_S)
    if "store" in record.ports:
        return check_ping(parse_address(record.ports["store"], "store"), ASK_TIMEOUT_S)
    return check_grpc(record.ports["api"], ASK_TIMEOUT_S) if "api" in record.ports else Health.DOWN


def _instances(
    paths: RunPaths,
    plan: Plan | None,
    seen: tuple[ProcessSeen, ...],
    pool: ThreadPoolExecutor,
) -> tuple[tuple[InstanceSeen, ...], str]:
    envoy = next((one for one in seen if "admin" in one.record.ports), None)
    if envoy is not None and envoy.alive:
        reported = _from_scheduler(paths, parse_address(envoy.record.ports["http"], "envoy"))
        if reported:
            return reported, "scheduler"
    if plan is None:
        return (), ""
    asked = [one for one in seen if _INFERENCE_MODULE in one.record.command and one.alive]
    return tuple(pool.map(_from_instance, asked)), "instances"


def _from_scheduler(paths: RunPaths, endpoint: Address) -> tuple[InstanceSeen, ...]:
    try:
        key = admin_key_path(paths.runtime).read_text(encoding="utf-8").strip()
        with MeshClient(str(endpoint), key) as client:
            report = client.status()
    except (OSError, SluiceError, UnreachableError):
        return ()
    if report is None:
        return ()
    return tuple(
        InstanceSeen(
            name=one.name,
            model=one.model,
            state=_state(one),
            simulated=one.simulated,
            load=one.load if one.HasField("load") else None,
        )
        for one in report.instances
    )


def _state(one: admin_pb2.InstanceStatus) -> str:
    """With the reason, and its breaker where that holds requests back."""
    breaker = "" if one.breaker in ("", "closed") else f"breaker {one.breaker.replace('_', '-')}"
    notes = "; ".join(note for note in (one.reason, breaker) if note)
    return f"{one.state} ({notes})" if notes else one.state


def _from_instance(process: ProcessSeen) -> InstanceSeen:
    name = process.record.name
    with grpc.insecure_channel(process.record.ports["api"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            model = stub.GetModel(inference_pb2.GetModelRequest(), timeout=ASK_TIMEOUT_S)
            reports = stub.WatchLoad(inference_pb2.WatchLoadRequest(), timeout=ASK_TIMEOUT_S)
            report = next(iter(reports), None)
        except grpc.RpcError:
            return InstanceSeen(name, "-", process.health.value, False, None)
    load = report.engine if report is not None and report.HasField("engine") else None
    return InstanceSeen(name, model.model, process.health.value, model.simulated, load)


def _figure(load: load_pb2.EngineLoad | None, field: str) -> str:
    if load is None or not load.HasField(field):  # type: ignore[arg-type]  # names are checked by tests
        return "-"
    value = getattr(load, field)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
