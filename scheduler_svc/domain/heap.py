"""A heap of items by id, with removal: the order inside queues, and the scheduler's timers.

One live entry per id. Removing or replacing leaves a dead entry behind, which is dropped when it
surfaces, or when the dead outnumber the live by :data:`DEAD_MAX`: memory is bounded by the live.
Single-threaded, like everything in the domain.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

Key = tuple[float, ...]
Entry = tuple[
    Key, int, T
]  # key, stamp (unique, growing: first in first out among equal keys), item

DEAD_MAX = 64


class LazyHeap(Generic[T]):
    """Push and pop in O(log n), remove in O(1) plus an amortised O(log n)."""

    __slots__ = ("_heap", "_live", "_stamp")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Hashable]] = []
        self._live: dict[Hashable, Entry[T]] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item_id: Hashable) -> bool:
        return item_id in self._live

    def items(self) -> Iterator[T]:
        """All live items, in no order."""
        return (entry[2] for entry in self._live.values())

    def push(self, item_id: Hashable, key: Key, item: T) -> None:
        """Adds ``item``, or moves it when its id is there already."""
        self._stamp += 1
        self.restore(item_id, (key, self._stamp, item))

    def restore(self, item_id: Hashable, entry: Entry[T]) -> None:
        """Puts back what :meth:`pop` returned, to exactly where it was."""
        self._live[item_id] = entry
        heappush(self._heap, (entry[0], entry[1], item_id))
        self._sweep()

    def remove(self, item_id: Hashable) -> bool:
        """Whether it was there."""
        removed = self._live.pop(item_id, None) is not None
        if removed:
            self._sweep()
        return removed

    def peek(self) -> Entry[T] | None:
        """The least entry."""
        while self._heap:
            _, stamp, item_id = self._heap[0]
            entry = self._live.get(item_id)
            if entry is not None and entry[1] == stamp:
                return entry
            heappop(self._heap)
        return None

    def pop(self) -> Entry[T] | None:
        """Takes the least entry out."""
        entry = self.peek()
        if entry is not None:
            del self._live[heappop(self._heap)[2]]
        return entry

    def check(self) -> None:
        """Every live item can be found, and memory is bounded."""
        stored = {(stamp, item_id) for _, stamp, item_id in self._heap}
        assert all((entry[1], item_id) in stored for item_id, entry in self._live.items())
        assert len(self._heap) <= 2 * len(self._live) + DEAD_MAX

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._live) + DEAD_MAX:
            self._heap = [(key, stamp, id_) for id_, (key, stamp, _) in self._live.items()]
            heapify(self._heap)
