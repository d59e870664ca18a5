"""What a running mesh writes about itself, in `<runtime>/run/`, and the plan that its supervisor
follows.

One JSON file per process plus `supervisor.json` and `plan.json`. Written by one process each,
replaced atomically, so that a reader sees an old or a new file, never half of one. They are hints:
a reader checks every process id against its start time. A file that is missing or damaged reads as
None.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sluice.command.processes import Identity

SUPERVISOR = "supervisor"
FAILED = "failed"
PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Where files of a runtime folder are."""

    runtime: Path

    @property
    def run(self) -> Path:
        """Process records, plan, effective configuration."""
        return self.runtime / "run"

    @property
    def store(self) -> Path:
        """What the mesh's own store keeps."""
        return self.runtime / "store"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.runtime / "logs"

    @property
    def plan(self) -> Path:
        """What the supervisor runs."""
        return self.run / PLAN

    @property
    def config(self) -> Path:
        """The effective configuration."""
        return self.run / "sluice.toml"

    def record(self, name: str) -> Path:
        """The record of process `name`."""
        return self.run / f"{name}.json"

    def log(self, name: str) -> Path:
        """The log of process `name`."""
        return self.logs / f"{name}.log"


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process as the supervisor needs it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, str]
    stop_order: int
    drain_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one supervisor runs."""

    mark: str
    fingerprint: str
    engine: str
    runtime: str
    root: str
    log_bytes_max: int
    log_files_kept: int
    services: tuple[ServicePlan, ...]

    @property
    def stop_limit_s(self) -> float:
        """The longest orderly stop: orders one after the other, processes of one order together."""
        longest: dict[int, float] = {}
        for service in self.services:
            longest[service.stop_order] = max(longest.get(service.stop_order, 0.0), service.drain_s)
        return sum(longest.values())


@dataclass(frozen=True, slots=True)
class Record:
    """One process as the supervisor last saw it."""

    name: str
    pid: int
    create_time: float
    """Unix seconds; 0 while it does not run."""
    state: str
    """running, restarting, stopping, stopped, or failed (it is not started again)."""
    command: tuple[str, ...] = ()
    ports: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    last_exit: str = ""
    """How it ended the last time, e.g. "exit code 1" or "SIGKILL"."""

    @property
    def identity(self) -> Identity:
        """To check against the live process."""
        return Identity(self.pid, self.create_time)


def write_plan(path: Path, plan: Plan) -> None:
    """Replaces the plan."""
    write_atomically(path, json.dumps(asdict(plan), indent=1))


def read_plan(path: Path) -> Plan | None:
    """The plan, or None."""
    raw = _read_json(path)
    if raw is None:
        return None
    try:
        services = tuple(
            ServicePlan(**{**service, "command": tuple(service["command"])})
            for service in raw.pop("services")
        )
        return Plan(**raw, services=services)
    except (TypeError, KeyError):
        return None


def write_record(path: Path, record: Record) -> None:
    """Replaces a record."""
    write_atomically(path, json.dumps(asdict(record), indent=1))


def read_record(path: Path) -> Record | None:
    """A record, or None."""
    raw = _read_json(path)
    if raw is None:
        return None
    try:
        return Record(**{**raw, "command": tuple(raw["command"])})
    except (TypeError, KeyError):
        return None


def read_records(run: Path) -> dict[str, Record]:
    """All records in a run folder by name, the supervisor's included."""
    found = (read_record(path) for path in sorted(run.glob("*.json")) if path.name != PLAN)
    return {record.name: record for record in found if record is not None}


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Puts `text` in the place of `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
