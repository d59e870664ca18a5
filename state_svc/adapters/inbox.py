"""What a follower has not read yet: bounded, because hints may be lost and pile up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

ITEMS_MAX: Final = 256


class Inbox(AsyncIterator[T], Generic[T]):
    """Items in order, behind one ``again`` that stands for any number of "look again" and goes
    first. Beyond :data:`ITEMS_MAX` all items are dropped, and it says ``again``."""

    def __init__(self, again: T) -> None:
        self._again = again
        self._is_again = False
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def again(self) -> None:
        """Something may have been missed."""
        self._is_again = True
        self._ready.set()

    def put(self, item: T) -> None:
        """Something happened."""
        if len(self._items) == ITEMS_MAX:
            self._items.clear()
            self._is_again = True
        self._items.append(item)
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
                return self._items.popleft()
            self._ready.clear()
            await self._ready.wait()
