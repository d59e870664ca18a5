"""Ends a service's child processes when the service is killed.

Some children do not notice the death of the process that started them: vLLM's engine would keep
the GPU's memory for good after a SIGKILL, and a tool server that ignores the end of its input would
run for ever. The guard is a tiny process (standard library only) that holds the reading end of a
pipe. It is told the children as they appear; when the pipe ends without a farewell, it kills them.

Failure modes: a guard that was killed itself guards nothing, and nobody notices; processes that
appear in the last moments before a kill are not known to it, nor is a group whose leader has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FAREWELL = "done"
WAIT_S_MAX = 5.0
_WATCH, _GROUP, _FORGET = "watch", "group", "forget"


class ProcessGuard:
    """The side of the guarded process."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C for the service is not for the guard
        )

    @property
    def pid(self) -> int:
        """The guard's own process."""
        return self._process.pid

    def watch(self, pids: Iterable[int]) -> None:
        """Adds processes to those that end with this one."""
        for pid in set(pids) - self._told - {self.pid}:
            self._tell(_WATCH, pid)

    def watch_group(self, leader: int) -> None:
        """Adds a process group, by its leader: all its members end with this process."""
        self._tell(_GROUP, leader)

    def forget(self, pid: int) -> None:
        """Takes out a process or group that has ended, before its number is used again."""
        self._told.discard(pid)
        self._write(f"{_FORGET} {pid}")

    def close(self) -> None:
        """Ends the guard, which then kills nothing. Idempotent; blocks for milliseconds."""
        if self._process.poll() is None:
            self._write(FAREWELL)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(WAIT_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, word: str, pid: int) -> None:
        self._told.add(pid)
        self._write(f"{word} {pid}")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the guard is gone: nothing to tell
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def _guard() -> None:
    """The guard's whole life: from the first line to the end of the pipe."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watched: dict[int, tuple[str, str]] = {}  # pid -> what it was told as, its start time
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == FAREWELL:
            return
        if word == _FORGET:
            watched.pop(int(number), None)
        else:
            watched[int(number)] = word, _start_time(int(number))
    for pid, (word, started) in watched.items():
        # A pid that is in use again belongs to another process, with another start time.
        if started and _start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if word == _GROUP else os.kill)(pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


if __name__ == "__main__":
    _guard()
