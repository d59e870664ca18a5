"""The process that keeps a mesh running: starts its processes, starts crashed ones again, stops
them in order.

Run as `python -m sluice.command.supervisor RUNTIME_DIR` by `sluice up`, detached from the terminal.
It owns the records in `<runtime>/run/` and the size of the logs, and holds a lock on
`<runtime>/run/supervisor.lock` for as long as it lives, so that one runtime folder has at most one
supervisor. It knows nothing of health or gRPC: who wants to know whether the mesh is ready asks the
processes.

Concurrency: one event loop; one task per process, and one for the logs. Each process leads a
session and group of its own, so a terminal's Ctrl-C does not reach it and all that it started can
be ended with it.

Failure modes: a process that dies is started again after 100 ms to 10 s (see `backoff`), once what
is left of its group has ended. If the supervisor itself is killed, the mesh goes on without one;
the next `sluice up` or `sluice down` finds the processes by their records and their mark and ends
them. SIGTERM stops everything in order, within the drain times of the plan; a second SIGTERM kills
what is left at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sluice.command import log_files, processes
from sluice.command.backoff import Backoff
from sluice.command.run_files import (
    FAILED,
    SUPERVISOR,
    Plan,
    Record,
    RunPaths,
    ServicePlan,
    read_plan,
    write_record,
)

ROTATE_EVERY_S: Final = 2.0
GROUP_POLL_S: Final = 0.1
# For the rest of a group whose leader has died: its leader's orderly stop is no longer possible.
GROUP_GRACE_S: Final = 2.0
EXIT_LOCKED: Final = 3
EXIT_NO_PLAN: Final = 4
# What a service exits with when its configuration is wrong: another start would end the same way.
EXIT_CONFIG: Final = 78


@dataclass(slots=True)
class Service:
    """One process and what became of it."""

    plan: ServicePlan
    paths: RunPaths
    backoff: Backoff = field(default_factory=Backoff)
    process: subprocess.Popen[bytes] | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    started_s: float = 0.0
    create_time: float = 0.0
    restarts: int = 0
    last_exit: str = ""

    def spawn(self, root: Path) -> None:
        """Starts it. Raises OSError when its program cannot be started."""
        self.exited.clear()
        self.started_s = time.monotonic()
        log = self.paths.log(self.plan.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                self.plan.command,
                env={**os.environ, **self.plan.env},
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        identity = processes.identify(self.process.pid)
        self.create_time = identity.create_time if identity else time.time()
        self.record("running")

    def record(self, state: str) -> None:
        """Writes down what it is now."""
        running = self.process is not None and state in ("running", "stopping")
        # A full disk must not end the supervision; the record is a hint and is written again.
        with suppress(OSError):
            write_record(self.paths.record(self.plan.name), self._record(state, running))

    def _record(self, state: str, running: bool) -> Record:
        return Record(
            name=self.plan.name,
            pid=self.process.pid if self.process else 0,
            create_time=self.create_time if running else 0.0,
            state=state,
            command=self.plan.command,
            ports=self.plan.ports,
            restarts=self.restarts,
            last_exit=self.last_exit,
        )

    def has_exited(self) -> bool:
        """Whether the leader is a zombie. It is not reaped yet: its id cannot be given to another
        process.
        """
        if self.process is None:
            return True
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, options) is not None
        except ChildProcessError:
            return True

    async def end_group(self, grace_s: float) -> None:
        """Ends what is left of the group and reaps the leader. At most `grace_s` plus 5 s."""
        if self.process is None:
            return
        pid = self.process.pid
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, processes.KILL_WAIT_S)):
            if not processes.group_members(pid):
                break
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
            until = time.monotonic() + limit_s
            # No event tells that a group is empty: its members need not be children of ours.
            while processes.group_members(pid) and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(GROUP_POLL_S)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=processes.KILL_WAIT_S)
        self.last_exit = exit_text(self.process.returncode)


class Supervisor:
    """Runs a plan until it is told to stop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._paths = RunPaths(Path(plan.runtime))
        self._services = [Service(service, self._paths) for service in plan.services]
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Returns when everything has stopped."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._child_changed)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        self._record("running")
        say(f"supervising {len(self._services)} processes")
        async with asyncio.TaskGroup() as tasks:
            logs = tasks.create_task(self._bound_logs())
            keepers = {
                service.plan.name: tasks.create_task(self._keep(service))
                for service in self._services
            }
            await self._stopping.wait()
            self._record("stopping")
            # A keeper that waits to start its process again has nothing to stop.
            for order in sorted({service.plan.stop_order for service in self._services}):
                group = [service for service in self._services if service.plan.stop_order == order]
                await asyncio.gather(
                    *(self._stop(service, keepers[service.plan.name]) for service in group)
                )
            logs.cancel()
        say("everything has stopped")

    def _asked_to_stop(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def _child_changed(self) -> None:
        for service in self._services:
            running = service.process is not None and service.process.returncode is None
            if running and service.has_exited():
                service.exited.set()

    async def _keep(self, service: Service) -> None:
        """Starts `service` again and again; cancelled by `_stop`."""
        root = Path(self._plan.root)
        while not self._stopping.is_set():
            try:
                service.spawn(root)
                self._child_changed()
                await service.exited.wait()
                if self._stopping.is_set():
                    return
                await service.end_group(GROUP_GRACE_S)
            except OSError as error:
                service.process, service.last_exit = None, f"not started: {error.strerror}"
            if service.process is not None and service.process.returncode == EXIT_CONFIG:
                service.last_exit = "its configuration is wrong"
                service.record(FAILED)
                say(f"{service.plan.name}: {service.last_exit}; it is not started again")
                return
            ran_s = time.monotonic() - service.started_s
            delay_s = service.backoff.crashed(ran_s)
            service.record("restarting")
            say(
                f"{service.plan.name}: {service.last_exit} after {ran_s:.1f} s;"
                f" again in {delay_s:.1f} s"
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            service.restarts += 1

    async def _stop(self, service: Service, keeper: asyncio.Task[None]) -> None:
        running = service.process is not None and service.process.returncode is None
        if running and service.process is not None and not keeper.done():
            service.record("stopping")
            with suppress(ProcessLookupError):
                service.process.terminate()
            await self._exited_or_hurried(service)
        keeper.cancel()
        await asyncio.wait([keeper])
        if running:
            await service.end_group(0.0 if self._hurry.is_set() else GROUP_GRACE_S)
        service.record("stopped")
        say(f"{service.plan.name}: stopped ({service.last_exit or 'it did not run'})")

    async def _exited_or_hurried(self, service: Service) -> None:
        """Until it has ended by itself, its drain time is over, or there is a hurry."""
        waits = [
            asyncio.ensure_future(service.exited.wait()),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        try:
            await asyncio.wait(
                waits, timeout=service.plan.drain_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()

    async def _bound_logs(self) -> None:
        names = [service.plan.name for service in self._services] + [SUPERVISOR]
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for name in names:
                with suppress(OSError):
                    log_files.rotate(
                        self._paths.log(name), self._plan.log_bytes_max, self._plan.log_files_kept
                    )

    def _record(self, state: str) -> None:
        own = processes.identify(os.getpid())
        write_record(
            self._paths.record(SUPERVISOR),
            Record(
                name=SUPERVISOR,
                pid=os.getpid(),
                create_time=own.create_time if own else time.time(),
                state=state,
                command=tuple(sys.argv),
            ),
        )


def exit_text(code: int | None) -> str:
    """`exit code 1`, or the signal's name."""
    if code is None:
        return "did not end"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def say(text: str) -> None:
    """One line into the supervisor's own log."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stderr.write(f"{stamp} {text}\n")
    sys.stderr.flush()


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds the lock of a runtime folder; yields False when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def main(argv: list[str]) -> int:
    """Runs the plan of the runtime folder `argv[0]`."""
    paths = RunPaths(Path(argv[0]))
    plan = read_plan(paths.plan)
    if plan is None:
        say(f"{paths.plan}: there is no readable plan")
        return EXIT_NO_PLAN
    with locked(paths.run / "supervisor.lock") as free:
        if not free:
            say("another supervisor runs this folder's mesh")
            return EXIT_LOCKED
        asyncio.run(Supervisor(plan).run())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
