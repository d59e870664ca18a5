"""How late the event loop is: the longest that a timer had to wait for its turn.

Owns one timer per process, ten times a second. A callback that blocks the loop, or a machine that
is short of CPU, shows here first. For one event loop; :meth:`LoopLag.read` may be called from the
telemetry thread (a reading may then miss the newest value, which the next one has).
"""

from __future__ import annotations

import asyncio

PERIOD_S = 0.1


class LoopLag:
    """Measures from :meth:`start` on."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._longest_s = 0.0

    def start(self) -> None:
        """Begins to measure on the running loop."""
        assert self._timer is None
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stops measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def read(self) -> float:
        """The longest lateness in seconds since the last reading."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due_at = loop.time() + PERIOD_S
        self._timer = loop.call_at(due_at, self._fired, loop, due_at)

    def _fired(self, loop: asyncio.AbstractEventLoop, due_at: float) -> None:
        self._longest_s = max(self._longest_s, loop.time() - due_at)
        self._arm(loop)
