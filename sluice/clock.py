"""Virtual time: an event loop whose clock jumps instead of waiting.

Owns :class:`VirtualTimeLoop` and :func:`run_virtual`. All async code takes its time from
``loop.time()``, so a scenario of minutes runs in milliseconds and always the same way. Sockets and
threads are real: while work runs in a thread the clock stands still, and a ready socket goes
before a jump. A loop that would wait for ever raises :class:`NothingLeftError` instead of hanging.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0  # not 0, so that code which takes 0 for "never" is found
THREAD_WAIT_S = 30.0  # real seconds that a thread may take


class NothingLeftError(RuntimeError):
    """Every task waits, no timer is set, no thread runs: nothing would ever happen."""


class _JumpingSelector(selectors.BaseSelector):
    """Answers a wait by moving the loop's clock to the next timer."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._real = selectors.DefaultSelector()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self._loop.threads:
            return self._real.select(THREAD_WAIT_S)
        if timeout is None:
            raise NothingLeftError(f"at {self._loop.time():.3f}: all tasks wait for ever")
        self._loop.jump(timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at :data:`START_S`."""

    def __init__(self) -> None:
        self._now = START_S
        self.threads = 0  # calls that run in threads now
        super().__init__(_JumpingSelector(self))
        self._sharpen()

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Moves the clock to the next timer, at most ``seconds`` ahead."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        # To the timer's own number: adding a difference to the clock may fall short of it.
        self._now = scheduled[0].when() if scheduled else self._now + seconds
        self._sharpen()

    def stall(self, seconds: float) -> None:
        """Moves the clock as a stopped process or a long callback does: timers fire late."""
        self._now += seconds
        self._sharpen()

    def _sharpen(self) -> None:
        """A timer is due at its own time and no float earlier: code that waits for a time would see
        it not come yet, wait again, and turn for ever while the clock stands."""
        self._clock_resolution = math.ulp(self._now)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self.threads += 1  # it joins the threads in one more thread
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self.threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self.threads -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` to its end in virtual time, as ``asyncio.run`` does in real time. Tasks that
    ``main`` leaves behind are cancelled."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
