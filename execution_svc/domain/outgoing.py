"""What waits to be sent to one instance: which starts go into the next frame, and in what order.

Pure: sizes, classes and times are passed in, and what is queued is opaque. A frame holds starts in
the order of their class, first come first served inside a class, up to a number of bytes; a start
that is larger than a frame travels alone. A cancel of a start that still waits here follows it in
the next frame: before it, the instance would not know whom it means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

FRAME_BYTES_MAX = 256 * 1024

# What a start takes to pass here even when it does not wait: the loop's clock counts whole
# milliseconds, and would show the time left to be the same at both hops.
PASSING_S = 0.001

# The longest time left that is passed on; instances keep no longer deadlines. A peer may write more
# than a duration can hold once it was computed with.
REMAINING_S_MAX = 86_400.0

S = TypeVar("S")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class QueuedStart(Generic[S]):
    """A start that waits. ``use`` names the use of a slot; ``arrived_at`` is in seconds."""

    use: Hashable
    start: S
    size_bytes: int
    arrived_at: float


class Outgoing(Generic[S, C]):
    """The starts and cancels that wait for one instance."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._classes: dict[int, deque[QueuedStart[S]]] = {}
        self._waiting: set[Hashable] = set()
        self._cancels: list[C] = []
        self._held_cancels: dict[Hashable, C] = {}
        self.bytes = 0

    def add_start(
        self, use: Hashable, start: S, *, priority: int, size_bytes: int, now: float
    ) -> None:
        """A start came. A lower ``priority`` goes first."""
        queue = self._classes.setdefault(priority, deque())
        queue.append(QueuedStart(use, start, size_bytes, now))
        self._waiting.add(use)
        self.bytes += size_bytes

    def add_cancel(self, use: Hashable, cancel: C) -> None:
        """A cancel came."""
        if use in self._waiting:
            self._held_cancels[use] = cancel
        else:
            self._cancels.append(cancel)

    def __bool__(self) -> bool:
        return bool(self._waiting or self._cancels)

    def take(self) -> tuple[list[C], list[QueuedStart[S]]]:
        """The cancels and starts of the next frame."""
        cancels, self._cancels = self._cancels, []
        starts: list[QueuedStart[S]] = []
        size = 0
        for priority in sorted(self._classes):
            queue = self._classes[priority]
            while queue and (not starts or size + queue[0].size_bytes <= self._frame_bytes_max):
                start = queue.popleft()
                size += start.size_bytes
                starts.append(start)
            if queue:
                break  # a lower class does not overtake a start that only does not fit
            del self._classes[priority]
        for start in starts:
            self._waiting.discard(start.use)
            held = self._held_cancels.pop(start.use, None)
            if held is not None:
                self._cancels.append(held)
        self.bytes -= size
        return cancels, starts


def remaining_at_write(remaining_s: float, arrived_at: float, now: float) -> float:
    """What is left of a deadline after the time that the start spent here: at least 0, and at most
    :data:`REMAINING_S_MAX`."""
    return min(max(0.0, remaining_s - max(PASSING_S, now - arrived_at)), REMAINING_S_MAX)
