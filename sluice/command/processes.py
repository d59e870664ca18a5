"""Finds and ends processes of one mesh, and nothing else.

A process belongs to a mesh by three signs: it is, or descends from, a process whose id and start
time were recorded; it is in the process group that such a process led; or its environment carries
the mesh's mark. The three together also find an engine's children that changed their title (and
with it their visible environment) or lost their parent.

Blocking; meant for the command line and the supervisor, not for a service. Failure modes: processes
of other users cannot be read and are never touched; a process may vanish at any moment, which is
not an error.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from sluice.command.mark import MARK_VARIABLE

# Start times are wall-clock seconds computed from the boot time, which a clock correction moves.
CREATE_TIME_TOLERANCE_S = 2.0
POLL_S = 0.05
# Between SIGTERM and SIGKILL for processes that nobody drains any more.
END_GRACE_S = 5.0
# After SIGKILL; longer only in uninterruptible I/O.
KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, told apart from a later one with the same id."""

    pid: int
    create_time: float
    """Unix seconds."""


def identify(pid: int) -> Identity | None:
    """The identity of the live process `pid`; None when there is none."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return Identity(pid, process.create_time())
    except psutil.Error:
        return None


def is_alive(identity: Identity) -> bool:
    """Whether that very process still runs."""
    now = identify(identity.pid)
    return now is not None and _same_time(now.create_time, identity.create_time)


def describe(pid: int) -> str:
    """`name (pid N)` for messages."""
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def group_members(pgid: int) -> list[psutil.Process]:
    """The live processes of a group."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return members


def memory_bytes(identity: Identity) -> int:
    """Resident memory of a process, its descendants and its group."""
    total = 0
    for process in _family(identity):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def belonging(mark: str, recorded: Iterable[Identity]) -> list[psutil.Process]:
    """Every live process of the mesh, by all three signs. Never the caller or its ancestors."""
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found: dict[int, psutil.Process] = {}
    for identity in recorded:
        for process in _family(identity):
            found[process.pid] = process
    for process in psutil.process_iter():
        if process.pid not in found and _marker(process) == mark:
            found[process.pid] = process
            for child in _descendants(process):
                found[child.pid] = child
    return [process for pid, process in found.items() if pid not in spared and _live(process)]


def end(processes: Iterable[psutil.Process], grace_s: float = END_GRACE_S) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL after `grace_s`. Returns what still lives; takes at most grace_s + 5
    s.
    """
    remaining = _signal_and_wait(list(processes), signal.SIGTERM, grace_s)
    return _signal_and_wait(remaining, signal.SIGKILL, KILL_WAIT_S)


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Polls `condition` for at most `limit_s`; returns whether it came true."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


def _signal_and_wait(
    processes: list[psutil.Process], number: signal.Signals, limit_s: float
) -> list[psutil.Process]:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue
    wait_for(lambda: not any(_live(process) for process in processes), limit_s)
    return [process for process in processes if _live(process)]


def _family(identity: Identity) -> list[psutil.Process]:
    """The process, its descendants and its group; the group also when its leader is gone."""
    leader = identify(identity.pid)
    if leader is not None and not _same_time(leader.create_time, identity.create_time):
        return []  # the id was given to a stranger
    family: dict[int, psutil.Process] = {}
    if leader is not None:
        try:
            process = psutil.Process(identity.pid)
            family[process.pid] = process
            family |= {child.pid: child for child in _descendants(process)}
        except psutil.Error:
            pass
    for member in group_members(identity.pid):
        # Started before the recorded leader: a group from before the id was given to it.
        if _created(member) + CREATE_TIME_TOLERANCE_S >= identity.create_time:
            family[member.pid] = member
    return list(family.values())


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _marker(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK_VARIABLE)
    except (psutil.Error, OSError):
        return None


def _created(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:
        return 0.0


def _live(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _same_time(left: float, right: float) -> bool:
    return abs(left - right) <= CREATE_TIME_TOLERANCE_S
