"""A run that this process holds: its lease as seen from here, and how its work is interrupted.

The lease holds in the store, not here: from the moment the last renewal was *sent* it lasts
``lease_s``, by a clock that also counts while the process is stopped. After that no new effect
begins until a renewal says that the run is still this process's; an effect that is under way goes
on, since its own intent is stored and whatever it appends is fenced by the token. A lease that is
lost for good ends the run's task at once. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from agent_svc.run_ports import Claimed, LeaseKey
from sluice import logs
from sluice.errors import Code, SluiceError

T = TypeVar("T")

LEASE_MARGIN_S: Final = 0.5  # an effect does not begin in the last moment of a lease
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 1.0
_NO_ANSWER: Final = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
STORE_FULL: Final = "STORE_FULL"  # of the whole store, which others free; not a bound of the tenant

log = logs.get(__name__)


class InterruptedRunError(Exception):
    """An effect was ended, since the run is to be cancelled or handed over."""


def lease_lost() -> SluiceError:
    """The run is somebody else's."""
    return SluiceError(Code.ABORTED, "LEASE_LOST", "Another process holds the run now.")


async def persistently(
    held: HeldRun,
    call: Callable[[], Awaitable[T]],
    is_over: Callable[[], bool] = lambda: False,
) -> T:
    """The answer of a call of the store that can be repeated as it is. While the lease may hold it
    is asked again for as long as nobody answers, since it may have happened; and while the whole
    store is full, until the run is cancelled or ``is_over``. Raises SluiceError: LEASE_LOST, or
    what the store refuses; a bound of the tenant is no reason to ask again."""
    delay_s = RETRY_MIN_S
    while not held.lost:
        try:
            return await call()
        except SluiceError as error:
            if error.code is Code.ABORTED:
                # VERSION_CONFLICT cannot be under a lease that holds; so it does not hold.
                raise lease_lost() from None
            waits = error.reason == STORE_FULL and not (held.cancelled or is_over())
            if error.code not in _NO_ANSWER and not waits:
                raise
            log.warning("the store is asked again", reason=error.reason, delay_s=delay_s)
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, RETRY_MAX_S)
    raise lease_lost()


class HeldRun:
    """See the module's docstring."""

    def __init__(self, claimed: Claimed, valid_until: float, clock: Callable[[], float]) -> None:
        self.claimed = claimed
        self.cancelled = claimed.cancelled
        self.draining = False
        self.lost = False
        self.leaving = False  # the append that gives it back is under way
        self.task: asyncio.Task[None] | None = None
        self.history_bytes = 0  # of its events, as far as they are kept here
        self._valid_until = valid_until
        self._clock = clock
        self._changed = asyncio.Event()
        self._effect: asyncio.Task[Any] | None = None
        self._cut = False

    @property
    def lease(self) -> LeaseKey:
        """The lease."""
        return self.claimed.lease

    def renewed(self, valid_until: float) -> None:
        """The lease holds until then."""
        self._valid_until = max(self._valid_until, valid_until)
        self._changed.set()

    def lose(self) -> None:
        """The run is somebody else's: its task ends at once. While it is being given back, the
        answer to that says what became of it."""
        if not self.lost and not self.leaving:
            self.lost = True
            if self.task is not None:
                self.task.cancel()

    def cancel(self) -> None:
        """The run is to be cancelled: what it does now ends, and it goes on to its end."""
        if not self.cancelled:
            self.cancelled = True
            self._end_effect()

    def drain(self, *, now: bool = False) -> None:
        """The run is to be handed over at the next step; ``now``: without waiting for it."""
        self.draining = True
        if now and not self._cut:
            self._cut = True
            self._end_effect()

    def _end_effect(self) -> None:
        if self._effect is not None:
            self._effect.cancel()

    async def until_valid(self) -> None:
        """Waits until the lease is known to hold, so that an effect may begin. Raises
        InterruptedRunError when the run is interrupted meanwhile."""
        while self._clock() >= self._valid_until - LEASE_MARGIN_S:
            self._changed.clear()
            await self.effect(self._changed.wait())

    async def effect(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` so that it can be interrupted: InterruptedRunError."""
        if self.cancelled or self._cut:
            work.close()
            raise InterruptedRunError
        effect: asyncio.Task[T] = asyncio.get_running_loop().create_task(work)
        self._effect = effect
        try:
            return await effect
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # not the effect alone: this task ends
            raise InterruptedRunError from None
        finally:
            self._effect = None
