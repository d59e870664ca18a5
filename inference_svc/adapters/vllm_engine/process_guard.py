"""Ends the engine's processes when this one is killed.

vLLM's engine process does not notice the death of the process that started it: after a SIGKILL it
would keep the GPU's memory for good, and the next start would fail. The guard is a tiny process
(standard library only) that holds the reading end of a pipe. It is told the engine's processes as
they appear; when the pipe ends without a farewell, it kills them.

One guard per engine. Failure modes: a guard that was killed itself guards nothing, and nobody
notices; processes that appear in the last half second before a kill are not known to it.
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
            self._told.add(pid)
            self._write(str(pid))

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

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the guard is gone: nothing to tell
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def _guard() -> None:
    """The guard's whole life: from the first line to the end of the pipe."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    watched: dict[int, str] = {}
    for line in sys.stdin:
        word = line.strip()
        if word == FAREWELL:
            return
        watched[int(word)] = _start_time(int(word))
    for pid, started in watched.items():
        # A pid that is in use again belongs to another process, with another start time.
        if started and _start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


if __name__ == "__main__":
    _guard()
