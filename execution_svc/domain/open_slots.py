"""Which uses of slots are open on one instance stream.

Pure bookkeeping. A use is (slot, attempt). It opens with its start and closes with ``ended``,
``rejected``, or the end of the stream; everything else about it (a stale attempt, an event of
another use) changes nothing.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

Use = tuple[int, int]


class OpenSlots(Generic[T]):
    """The open uses, each with a value of the owner's."""

    def __init__(self) -> None:
        self._open: dict[Use, T] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, use: Use, value: T) -> None:
        """A start was taken."""
        self._open[use] = value

    def close(self, use: Use) -> T | None:
        """A use is over; its value, or ``None`` when it was not open."""
        return self._open.pop(use, None)

    def close_all(self) -> list[T]:
        """The stream is over; the values of what was open."""
        values = list(self._open.values())
        self._open.clear()
        return values
