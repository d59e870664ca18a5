"""What a follower has not read yet: bounded, because hints may be lost and pile up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

ITEMS_MAX: Final = 256
BYTES_MAX: Final = 64 << 10


class Inbox(AsyncIterator[T], Generic[T]):
    """Items in order, behind one ``again`` that stands for any number of "look again" and goes
    first. Beyond :data:`ITEMS_MAX` or :data:`BYTES_MAX` all items are dropped, and it says
    ``again``."""

    def __init__(self, again: T) -> None:
        self._again = again
        self._is_again = False
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self._closed = False

    def again(self) -> None:
        """Something may have been missed."""
        self._is_again = True
        self._ready.set()

    def put(self, item: T, size: int = 0) -> None:
        """Something happened; ``size``: the bytes that it holds."""
        if len(self._items) == ITEMS_MAX or (self._items and self._bytes + size > BYTES_MAX):
            self._items.clear()
            self._bytes = 0
            self._is_again = True
        self._items.append((item, size))
        self._bytes += size
        self._ready.set()

    def close(self) -> None:
        """Nothing comes any more."""
        self._closed = True
        self._ready.set()

    async def __anext__(self) -> T:
        """The next one. Cancelling it loses nothing."""
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._is_again:
                self._is_again = False
                return self._again
            if self._items:
                item, size = self._items.popleft()
                self._bytes -= size
                return item
            self._ready.clear()
            await self._ready.wait()
