"""What an ingest does next: a pure function of its events.

An ingest embeds and stores the chunks of one document in order, a batch at a time. A batch is
stored before the event that says so; one that was stored and not said is stored again, which
changes nothing. Chunks are the same for the same content, so who takes over makes them anew and
goes on at the first number that is not said to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_svc.domain.ending import (
    Bounds,
    Finish,
    Pause,
    cancelled,
    out_of_time,
    succeeded,
)
from agent_svc.domain.history import History
from agent_svc.domain.model import Progress

STORE = "store"  # the phase whose progress counts chunks that are embedded and stored


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """Embed and store chunks from number ``first`` on. ``deadline_s``: seconds left to the run."""

    first: int
    deadline_s: float


def next_batch(
    bounds: Bounds, history: History, now_s: float, *, is_cancelled: bool = False
) -> StoreBatch | Pause | Finish:
    """The next action of an ingest."""
    assert history.ended is None, "the run has ended"
    if is_cancelled:
        return cancelled(bounds, history)
    progress = history.progress
    if progress is not None and progress.phase == STORE and progress.done >= progress.total:
        return succeeded(bounds, history, "")
    if bounds.left_s(history, now_s) <= 0:
        return out_of_time(bounds, history, now_s)
    if history.paused is not None and history.paused.ready_s > now_s:
        return Pause(history.paused.ready_s, None)
    first = progress.done if progress is not None and progress.phase == STORE else 0
    return StoreBatch(first, bounds.left_s(history, now_s))


def stored(done: int, total: int) -> Progress:
    """The event after a batch."""
    return Progress(STORE, done, total)
