"""The processes of one vLLM engine: known from the start on, and gone at the end.

Owns the list of processes that appeared below this one since the engine began to start, and the
guard that ends them if this process is killed. All calls come from the event loop; what blocks for
milliseconds runs on the loop's default executor.

Failure modes: a process that outlives its shutdown is killed. Processes are known by pid and start
time, so that a pid in new use is not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import TypeVar

import psutil

from sluice.process_guard import ProcessGuard

WATCH_S = 0.5  # between two looks for new processes while the engine starts
KILL_S_MAX = 5.0

T = TypeVar("T")


class EngineProcesses:
    """Between :meth:`begin` and :meth:`end`."""

    def __init__(self) -> None:
        self._before: set[psutil.Process] = set()
        self._own: list[psutil.Process] = []
        self._guard: ProcessGuard | None = None
        self._watching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Before the engine starts: what appears from now on is the engine's."""
        self._before = set(await _in_thread(_children))
        self._guard = await _in_thread(ProcessGuard)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def settle(self) -> None:
        """After the engine has started, or failed to: no more processes will appear."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        await self._note()

    async def kill(self) -> None:
        """Kills what there is now; more may appear."""
        await self._note()
        own = list(self._own)
        await _in_thread(lambda: _kill(own))

    async def end(self) -> None:
        """After the engine was shut down: kills what is left and waits for it. Idempotent."""
        if self._watching is not None:
            await self.settle()
        guard, self._guard = self._guard, None
        if guard is not None:
            await _in_thread(guard.close)
        own, self._own = self._own, []
        await _in_thread(lambda: _end_all(own))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._note()

    async def _note(self) -> None:
        children = await _in_thread(_children)
        if self._guard is None:
            return
        guard = self._guard.pid
        self._own = [one for one in children if one not in self._before and one.pid != guard]
        self._guard.watch(process.pid for process in self._own)


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def _end_all(processes: list[psutil.Process]) -> None:
    gc.collect()  # vLLM's objects refer to each other, and complain when found at exit
    _kill(processes)
    if processes and all(one.pid == _tracker_pid() for one in _children()):
        _stop_resource_tracker()


def _kill(processes: list[psutil.Process]) -> None:
    left = [one for one in processes if one.pid != _tracker_pid() and one.is_running()]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=KILL_S_MAX)


def _tracker_pid() -> int | None:
    return getattr(resource_tracker._resource_tracker, "_pid", None)  # no public way


def _stop_resource_tracker() -> None:
    """Ends the helper process that Python starts beside spawned ones; it is started anew on demand.

    Killed instead, it would make Python warn of leaks the next time. Only when no child is left:
    each holds its pipe open, and this waits for its end."""
    stop = getattr(resource_tracker._resource_tracker, "_stop", None)  # no public way
    if stop is not None:
        stop()
