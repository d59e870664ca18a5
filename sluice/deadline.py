"""Deadlines: how much time a piece of work has, and how much of it a child may use.

Pure. Times are seconds of the event loop's clock (``loop.time()``); on the wire a deadline travels
as remaining time. gRPC's asyncio stack does not hand a deadline on by itself: the server
interceptor binds the inbound one here, and every outgoing call takes its timeout from
:func:`child_budget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sluice.errors import deadline_exceeded


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A point in time on the event loop's clock."""

    at: float

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        """The deadline ``seconds`` from ``now``."""
        return cls(now + seconds)

    def remaining(self, now: float) -> float:
        """Seconds left; 0 or less when it has passed."""
        return self.at - now

    def expired(self, now: float) -> bool:
        """Whether no time is left."""
        return now >= self.at


@dataclass(frozen=True, slots=True)
class MethodDeadline:
    """What a method grants: ``default_s`` to a caller that sets no deadline, ``cap_s`` at most."""

    default_s: float
    cap_s: float

    def __post_init__(self) -> None:
        assert 0 < self.default_s <= self.cap_s

    def grant(self, asked_s: float | None) -> float:
        """Seconds granted to a caller that asks for ``asked_s`` (``None``: does not say)."""
        return self.default_s if asked_s is None else min(asked_s, self.cap_s)


def child_budget(remaining: float, margin: float, cap: float, minimum: float) -> float:
    """Seconds a child may take: ``min(remaining - margin, cap)``.

    ``margin`` is what this layer needs after the child, at least 0. Raises DEADLINE_EXCEEDED
    (reason ``DEADLINE_TOO_CLOSE``) when that is below ``minimum`` or not positive: work that
    cannot finish is not started."""
    budget = min(remaining - margin, cap)
    if not (budget > 0 and budget >= minimum):  # also refuses NaN
        raise deadline_exceeded(
            "DEADLINE_TOO_CLOSE", "Less time is left than the work needs; it was not started."
        )
    return budget


_current: ContextVar[Deadline | None] = ContextVar("sluice_deadline", default=None)


def current() -> Deadline | None:
    """The deadline of the call that is being served, if any."""
    return _current.get()


@contextmanager
def bind(deadline: Deadline | None) -> Iterator[None]:
    """Makes ``deadline`` the current one inside the block."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


def set_current(deadline: Deadline | None) -> None:
    """Makes ``deadline`` the current one for the rest of this task's context."""
    _current.set(deadline)
