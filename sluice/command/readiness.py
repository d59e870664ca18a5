"""Waits until every process of a mesh serves, and says what each one does meanwhile.

Concurrency: the questions of one round run on threads, one per process, so that one process that
does not answer delays no other; a round takes at most the probe's timeout. Bounded by a time limit
and by crashes: a process that ends CRASHES_MAX times before it was ready will not become so.

Failure modes: NotReadyError names the process and the reason; the caller shows its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sluice.command import processes
from sluice.command.failures import NotReadyError
from sluice.command.probe import Health, check
from sluice.command.progress import READY, Row
from sluice.command.run_files import FAILED, SUPERVISOR, Record, RunPaths, read_record
from sluice.command.topology import Kind, Process, Topology
from sluice.mesh_config import Engine

ROUND_S: Final = 0.25
CRASHES_MAX: Final = 3
THREADS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """One process at one moment."""

    process: Process
    record: Record | None
    alive: bool
    health: Health


class Watcher:
    """Asks all processes of a topology, round by round."""

    def __init__(self, topology: Topology, paths: RunPaths, pool: ThreadPoolExecutor) -> None:
        self._topology = topology
        self._paths = paths
        self._pool = pool

    @classmethod
    @contextmanager
    def open(cls, topology: Topology, paths: RunPaths) -> Iterator[Watcher]:
        """With threads of its own."""
        threads = min(THREADS_MAX, len(topology.processes))
        with ThreadPoolExecutor(threads, thread_name_prefix="probe") as pool:
            yield cls(topology, paths, pool)

    def look(self) -> list[Seen]:
        """Asks every process once."""
        return list(self._pool.map(self._look_at, self._topology.processes))

    def wait(self, limit_s: float, show: Callable[[list[Row], float], None]) -> None:
        """Returns when all serve. Raises NotReadyError."""
        began = time.monotonic()
        took: dict[str, float] = {}
        while True:
            seen = self.look()
            now = time.monotonic()
            for one in seen:
                if one.health is Health.SERVING:
                    took.setdefault(one.process.name, now - began)
                else:
                    took.pop(one.process.name, None)
            rows = [self._row(one, took.get(one.process.name, now - began)) for one in seen]
            show(rows, now)
            if all(one.health is Health.SERVING for one in seen):
                return
            self._give_up(seen, now - began, limit_s)
            time.sleep(ROUND_S)

    def _look_at(self, process: Process) -> Seen:
        record = read_record(self._paths.record(process.name))
        alive = record is not None and processes.is_alive(record.identity)
        # Who does not run is not asked: another program could be on its port.
        health = check(process.probe) if alive else Health.DOWN
        return Seen(process, record, alive, health)

    def _row(self, seen: Seen, seconds: float) -> Row:
        name = seen.process.name
        if seen.health is Health.SERVING:
            return Row(name, READY, seconds)
        if seen.record is None:
            return Row(name, "starting", seconds)
        if not seen.alive:
            state = "restarting" if seen.record.state == "running" else seen.record.state
            return Row(name, state, seconds, seen.record.last_exit)
        if seen.health is Health.NOT_SERVING:
            return Row(name, self._waiting_phase(seen.process), seconds)
        return Row(name, "starting", seconds)

    def _waiting_phase(self, process: Process) -> str:
        """What a process that answers, but does not serve yet, is doing."""
        if process.kind is not Kind.INFERENCE:
            return "waiting"
        instance = next(one for one in self._topology.instances if one.name == process.name)
        return "loading model" if instance.engine is Engine.VLLM else "starting"

    def _give_up(self, seen: list[Seen], waited_s: float, limit_s: float) -> None:
        for one in seen:
            if one.record is None or one.health is Health.SERVING:
                continue
            if one.record.state == FAILED:
                raise NotReadyError(one.process.name, f"{one.process.name}: {one.record.last_exit}")
            if one.record.restarts >= CRASHES_MAX:
                raise NotReadyError(
                    one.process.name,
                    f"{one.process.name} ended {one.record.restarts} times"
                    f" ({one.record.last_exit})",
                )
        supervisor = read_record(self._paths.record(SUPERVISOR))
        if supervisor is None or not processes.is_alive(supervisor.identity):
            raise NotReadyError("", "the mesh was stopped while it started")
        if waited_s >= limit_s:
            late = next(one.process.name for one in seen if one.health is not Health.SERVING)
            raise NotReadyError(late, f"{late} was not ready after {limit_s:.0f} s")
