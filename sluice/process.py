"""The life of a service process: its event loop, its signals, its exit code.

Owns :func:`run`, which every service's main hands its coroutine to, on uvloop where that is
installed. The first SIGTERM or SIGINT asks for an orderly end: :func:`shutdown_requested` returns.
While nobody waits for that (during start-up) it cancels the main task instead. The second signal
ends the process at once. The way out is bounded: a thread or an exporter that hangs does not keep
the process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import FrameType
from typing import Any

from sluice import logs
from sluice.config import ConfigError

EXIT_FAILED = 1
EXIT_CONFIG = 78  # as EX_CONFIG of sysexits.h: starting again will not help
EXIT_SIGNALLED = 128  # plus the signal's number, for an end without order

START_CANCEL_S = 10.0  # a start-up that was told to end has this long
EXIT_S = 10.0  # closing the loop and its threads has this long

SIGNALS = (signal.SIGTERM, signal.SIGINT)

COLLECT_EVERY = (10_000, 10, 10)
"""Containers made and not freed between two collections, and how many of one generation make one of
the next. Python's 700 looks at the live requests again and again: 4 % of the CPU per token
(`make bench-mesh`, alternated). What is garbage in cycles meanwhile is at most some megabytes."""

log = logs.get(__name__)


class _Shutdown:
    """The request to end, of one process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.main: asyncio.Task[Any] | None = None
        self.requested = asyncio.Event()
        self.awaited = False
        self.cancelled_start = False
        self._signals = 0

    def on_signal(self, number: int, _: FrameType | None) -> None:
        # A Python signal handler: runs in the main thread between two bytecodes, also when the
        # loop is busy with a long callback.
        self._signals += 1
        if self._signals > 1:
            os._exit(EXIT_SIGNALLED + number)
        self._loop.call_soon_threadsafe(self.request)

    def request(self) -> None:
        if self.requested.is_set():
            return
        self.requested.set()
        if not self.awaited and self.main is not None:
            self.cancelled_start = True
            self.main.cancel()
            self._loop.call_later(START_CANCEL_S, os._exit, EXIT_SIGNALLED + signal.SIGTERM)


_current: ContextVar[_Shutdown | None] = ContextVar("sluice_shutdown", default=None)


async def shutdown_requested() -> None:
    """Returns when the process was asked to end. Outside :func:`run`: never."""
    shutdown = _current.get()
    if shutdown is None:
        await asyncio.Event().wait()
    else:
        shutdown.awaited = True
        await shutdown.requested.wait()


def run(main: Coroutine[Any, Any, int | None]) -> int:
    """Runs a service's main coroutine to its end and returns the exit code: what it returned,
    0 when a signal ended its start-up, :data:`EXIT_CONFIG` after a ConfigError (on stderr, naming
    the setting), :data:`EXIT_FAILED` after any other exception (logged). Use as
    ``sys.exit(run(main()))``."""
    code = EXIT_FAILED
    gc.freeze()  # what was imported stays to the end: not looked at again
    gc.set_threshold(*COLLECT_EVERY)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            code = runner.run(_supervised(main)) or 0
        except ConfigError as error:
            print(f"configuration: {error}", file=sys.stderr)  # noqa: T201
            code = EXIT_CONFIG
        except Exception as error:
            log.failure("ended by an error", error)
        # Closing the loop joins its threads, and so does the interpreter's end.
        last_resort = threading.Timer(EXIT_S, os._exit, (code,))
        last_resort.daemon = True
        last_resort.start()
    return code


async def _supervised(main: Coroutine[Any, Any, int | None]) -> int | None:
    loop = asyncio.get_running_loop()
    shutdown = _Shutdown(loop)
    _current.set(shutdown)  # the main task inherits it
    shutdown.main = task = loop.create_task(main)
    previous = {number: signal.signal(number, shutdown.on_signal) for number in SIGNALS}
    try:
        return await task
    except asyncio.CancelledError:
        if shutdown.cancelled_start and task.done():
            log.info("start-up ended by a signal")
            return 0
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
