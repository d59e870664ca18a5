"""What of a mesh is there: running, half gone, or nothing. Reads records and processes, no health.

Blocking. Every record is checked against the live process, so a state that a crash left behind is
never taken for a running mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from sluice.command import processes
from sluice.command.mark import mark_of
from sluice.command.run_files import SUPERVISOR, Plan, Record, RunPaths, read_plan, read_records


@dataclass(frozen=True, slots=True)
class MeshState:
    """One runtime folder's mesh at one moment."""

    plan: Plan | None
    records: dict[str, Record]
    supervised: bool
    """Whether its supervisor lives."""
    strays: tuple[psutil.Process, ...]
    """Processes of the mesh, when it has no supervisor."""

    @property
    def supervisor(self) -> Record | None:
        """The supervisor's record."""
        return self.records.get(SUPERVISOR)


def look(paths: RunPaths) -> MeshState:
    """The state now."""
    records = read_records(paths.run)
    supervisor = records.get(SUPERVISOR)
    supervised = supervisor is not None and processes.is_alive(supervisor.identity)
    strays = () if supervised else tuple(of_mesh(paths, records.values()))
    return MeshState(read_plan(paths.plan), records, supervised, strays)


def of_mesh(paths: RunPaths, records: Iterable[Record]) -> list[psutil.Process]:
    """Every live process of the mesh, by record, group, descent and mark."""
    identities = [record.identity for record in records if record.pid > 0]
    return processes.belonging(mark_of(paths.runtime), identities)


def forget(paths: RunPaths) -> None:
    """Removes what a mesh that has ended wrote about itself; the logs stay."""
    for path in (*paths.run.glob("*.json"), *paths.run.glob(".*.json.*")):
        path.unlink(missing_ok=True)
