"""Stops a mesh and makes sure that nothing of it is left. Idempotent; bounded in time.

In order through the supervisor when it lives; then, and in every other case, by searching for what
still belongs to the mesh (see `processes`) and ending it. Blocking.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sluice.command import mesh_state, processes, shared_memory
from sluice.command.run_files import Record, RunPaths, read_records

# Over the plan's own limit: the supervisor kills and reaps what did not drain.
SUPERVISOR_EXTRA_S: Final = 15.0
NO_PLAN_LIMIT_S: Final = 60.0
SETTLE_S: Final = 2.0
# A process may be started between two searches, by what is being ended.
SEARCHES_MAX: Final = 3
SAY_EVERY_S: Final = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a stop found and left."""

    was_running: bool
    ended: int
    """Processes that had to be ended one by one."""
    left: tuple[str, ...]
    """Processes that could not be ended."""
    seconds: float


def stop(paths: RunPaths, say: Say, *, hurry: bool = False) -> Stopped:
    """Stops everything. `hurry` drains nothing: for a mesh that was never ready."""
    began = time.monotonic()
    state = mesh_state.look(paths)
    records = dict(state.records)
    was_running = state.supervised or bool(state.strays)
    segments = shared_memory.mapped(one.pid for one in mesh_state.of_mesh(paths, records.values()))
    if state.supervised and state.supervisor is not None:
        limit_s = state.plan.stop_limit_s if state.plan else NO_PLAN_LIMIT_S
        _stop_supervisor(paths, state.supervisor, limit_s + SUPERVISOR_EXTRA_S, say, hurry)
        # What it started meanwhile is in newer records.
        records |= read_records(paths.run)
        # Helpers of an engine notice by themselves that it is gone.
        processes.wait_for(lambda: not mesh_state.of_mesh(paths, records.values()), SETTLE_S)
    ended, left = _end_rest(paths, records)
    if not left:
        shared_memory.remove(segments)
        mesh_state.forget(paths)
    return Stopped(was_running, ended, tuple(left), time.monotonic() - began)


def _stop_supervisor(
    paths: RunPaths, supervisor: Record, limit_s: float, say: Say, hurry: bool
) -> None:
    for _ in range(2 if hurry else 1):
        with suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGTERM)
        if hurry:
            # A second signal, once the first was seen, says that nothing is worth draining.
            processes.wait_for(lambda: not processes.is_alive(supervisor.identity), 0.3)
    began = said = time.monotonic()
    while processes.is_alive(supervisor.identity) and time.monotonic() - began < limit_s:
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            say(f"still stopping: {', '.join(_running(paths)) or 'the supervisor'}")
        time.sleep(processes.POLL_S)


def _running(paths: RunPaths) -> list[str]:
    records = read_records(paths.run).values()
    return [one.name for one in records if one.ports and processes.is_alive(one.identity)]


def _end_rest(paths: RunPaths, records: dict[str, Record]) -> tuple[int, list[str]]:
    ended = 0
    left: list[str] = []
    for _ in range(SEARCHES_MAX):
        found = mesh_state.of_mesh(paths, records.values())
        if not found:
            return ended, []
        # The supervisor first: it would start again what is ended under it.
        supervisor = records.get("supervisor")
        first = [one for one in found if supervisor and one.pid == supervisor.pid]
        for process in first:
            with suppress(Exception):
                process.kill()
        remaining = processes.end(found)
        ended += len(found) - len(remaining)
        left = [processes.describe(process.pid) for process in remaining]
    return ended, left
