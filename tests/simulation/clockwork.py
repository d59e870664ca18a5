"""What makes a run repeatable: the loop, the clocks and the random source of the whole process.

With these in place nothing in the process depends on the real time, on addresses of objects or on
the operating system's randomness. ``PYTHONHASHSEED`` is the one thing that has to be set before the
process starts (``python -m tests.simulation`` sees to that).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from sluice import logs as sluice_logs
from sluice.clock import VirtualTimeLoop

T = TypeVar("T")

UNIX_S = 1_700_000_000.0  # the wall clock at loop time 0


class NumberedTask(asyncio.Task[T]):
    """A task whose place in a set does not depend on its address: task groups keep sets."""

    _numbers = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(NumberedTask._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class SimulationLoop(VirtualTimeLoop):
    """Virtual time with numbered tasks. ``broken`` collects what callbacks raised."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[str] = []
        self.set_task_factory(_make)
        self.set_exception_handler(self._note)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.broken.append(f"{context.get('message')}: {context.get('exception')!r}")


def _make(loop: asyncio.AbstractEventLoop, work: Any, **kwargs: Any) -> asyncio.Task[Any]:
    return NumberedTask(work, loop=loop, **kwargs)


@contextmanager
def clockwork(loop: SimulationLoop, seed: int, logs: bool) -> Iterator[None]:
    """Puts the process's clocks and random sources under the simulation's control."""
    bits = random.Random(f"{seed}/os")
    random.seed(f"{seed}/global")
    NumberedTask._numbers = itertools.count(1)
    level = logging.root.manager.disable
    if logs:
        sluice_logs.setup("simulation", "debug")
    else:
        logging.disable(logging.CRITICAL)
    gc_was_on = gc.isenabled()
    gc.disable()  # a collection would close forgotten generators at a time of its own
    try:

        def unix_s() -> float:
            return UNIX_S + loop.time()

        with (
            mock.patch.object(os, "urandom", bits.randbytes),
            mock.patch.object(time, "time", unix_s),
            mock.patch.object(time, "time_ns", side_effect=lambda: int(unix_s() * 1e9)),
            mock.patch.object(time, "monotonic", loop.time),
        ):
            yield
    finally:
        logging.disable(level)
        if gc_was_on:
            gc.enable()


def run(
    seed: int, main: Callable[[SimulationLoop], Coroutine[Any, Any, T]], *, logs: bool = False
) -> T:
    """Runs ``main(loop)`` to its end. ``logs``: what the services log is seen."""
    loop = SimulationLoop()
    try:
        with clockwork(loop, seed, logs), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main(loop))
    finally:
        gc.collect()
