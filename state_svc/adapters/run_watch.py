"""Follows one run: replays its events, then waits for hints and reads on.

Events come from the store alone, by sequence number, so none is lost, doubled or out of order
whatever becomes of hints, of the store or of another replica; :data:`POLL_S` bounds what a lost
hint costs. Live text is shown only behind the last event that was shown: what a finished model call
has written is in its event.

What a watcher has not taken yet is counted, for its tenant and for the process
(``watch_bytes_max``): who finds no room waits for it, holding nothing, and is refused after
:data:`ROOM_WAIT_S`. So watchers that do not read cost bounded memory, and make their own tenant's
wait, not others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from sluice.errors import exhausted
from sluice.fair_rooms import FairRooms
from state_svc.adapters.watch_reads import WatchReads
from state_svc.domain.run_values import EventPage, RunUnknownError
from state_svc.ports import StoreUnavailableError
from state_svc.run_ports import TEXT_BYTES_MAX, LiveText, Poke, RunFeed, TextStore

POLL_S: Final = 2.0
# What is stored close together (a model's step, the call that it asks for, the result) is read and
# told together. Each telling wakes four processes; beside the run itself, on two cores, that cost
# every step of a run 1.9 ms (python -m bench.agent).
GATHER_S: Final = 0.005
RETRY_S: Final = 0.25  # while the store is away
ROOM_WAIT_S: Final = 30.0  # as long as a client may leave a message unread at a scheduler
ROOM_RETRY_S: Final = 5.0
TENANT_SHARE: Final = 0.25  # of the room for watchers, that of one tenant
SMALL_BYTES: Final = 4096  # not counted: ordinary steps of an agent never wait


class FeedClosedError(Exception):
    """This process is going down; the run goes on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event."""

    sequence: int
    event: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """Text of the running model call."""

    step: int
    text: str
    replaces: bool


@dataclass(frozen=True, slots=True)
class WatchParts:
    """What all watches of a process have in common. ``room``: bytes that watchers may hold."""

    reads: WatchReads
    texts: TextStore
    room: FairRooms


def watch_room(bytes_max: int) -> FairRooms:
    """Room of so many bytes."""
    return FairRooms(bytes_max, int(TENANT_SHARE * bytes_max), first_always=True)


class RunWatch:
    """One follower, from sequence number ``first`` on."""

    def __init__(self, parts: WatchParts, tenant: str, run_id: str, first: int) -> None:
        self._reads, self._texts, self._room = parts.reads, parts.texts, parts.room
        self._tenant, self._run_id = tenant, run_id
        self._next = max(first, 1)
        self._last = 0  # the run's last event when it was read
        self._create_ms: int | None = None  # of the run that is followed, and of no later one
        self._version, self._have = 0, 0  # of the text that was shown: which, and its bytes
        self._look_at_text = True
        self._was_read, self._ended = False, False

    async def follow(self, feed: RunFeed) -> AsyncGenerator[Entry | Words, None]:
        """Everything until the run has ended. Raises RunUnknownError; StoreUnavailableError only
        before the first event; FeedClosedError; RESOURCE_EXHAUSTED WATCH_BYTES."""
        async with feed.run(self._tenant, self._run_id) as hints:
            while True:
                try:
                    async with aclosing(self._entries()) as entries:
                        async for entry in entries:
                            yield entry
                    if self._ended:
                        return
                    async with aclosing(self._words_until_poke(hints)) as words:
                        async for word in words:
                            held = _counted(len(word.text.encode()))
                            if not self._room.enter_now(self._tenant, held):
                                self._version, self._have = 0, 0  # whole with what comes next
                                continue
                            try:
                                yield word
                            finally:
                                self._room.leave(self._tenant, held)
                except StoreUnavailableError:
                    if not self._was_read:
                        raise
                    await asyncio.sleep(RETRY_S)

    async def _entries(self) -> AsyncGenerator[Entry, None]:
        """The events that there are now."""
        more = True
        while more:
            page = await self._page()
            self._was_read = True
            self._last, more, ended = page.last, page.more, page.ended
            self._next = max(self._next, page.first)  # what came before was given up
            async with aclosing(self._of_page(page)) as entries:
                del page  # its events are let go as they are taken
                async for entry in entries:
                    yield entry
        self._ended = ended

    async def _page(self) -> EventPage:
        page = await self._reads.page(self._tenant, self._run_id, self._next, self._create_ms)
        if self._create_ms is not None and page.create_ms != self._create_ms:
            raise RunUnknownError  # another one of the same name
        self._create_ms = page.create_ms
        return page

    async def _of_page(self, page: EventPage) -> AsyncGenerator[Entry, None]:
        """The events of a page, counted until they are taken. Without room for them the page is
        let go, and read again when there is: the same events, and perhaps more."""
        left, held = deque(page.events), _counted(page.size)
        count = len(left)
        del page
        if not self._room.enter_now(self._tenant, held):
            left.clear()
            await self._wait_for_room(held)
            try:
                page = await self._page()
                self._next = max(self._next, page.first)
                left.extend(page.events[:count])
                del page
            except BaseException:
                self._room.leave(self._tenant, held)
                raise
        try:
            while left:
                event = left.popleft()
                yield Entry(self._next, event)
                self._next += 1
                if held:
                    held -= len(event)
                    self._room.leave(self._tenant, len(event))
        finally:
            self._room.leave(self._tenant, held)

    async def _wait_for_room(self, size: int) -> None:
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                await self._room.enter(self._tenant, size)
        except TimeoutError:
            raise exhausted(
                "WATCH_BYTES",
                "Clients of the tenant leave too much of watched runs unread.",
                ROOM_RETRY_S,
                metadata={"limit": "watch_bytes_max"},
            ) from None

    async def _words_until_poke(
        self, hints: AsyncIterator[Poke | LiveText]
    ) -> AsyncGenerator[Words, None]:
        """Text as it comes, until there may be new events."""
        if self._look_at_text:
            whole = await self._texts.whole(self._tenant, self._run_id)
            self._look_at_text = False
            if whole is not None and whole.sequence == self._last and self._is_more(whole):
                yield self._show(whole, replaces=True)
        while True:
            try:
                async with asyncio.timeout(POLL_S):
                    hint = await anext(hints)
            except TimeoutError:
                return
            except StopAsyncIteration:
                raise FeedClosedError from None
            if isinstance(hint, Poke):
                await asyncio.sleep(GATHER_S)
                return
            if not self._is_of_run(hint):
                continue
            if hint.sequence > self._last:  # its event comes first
                self._look_at_text = True
                return
            if hint.sequence == self._last:
                async for words in self._next_words(hint):
                    yield words

    async def _next_words(self, hint: LiveText) -> AsyncGenerator[Words, None]:
        if hint.version < self._version:
            return
        if hint.version > self._version and hint.offset == 0:
            yield self._show(hint, replaces=True)
            return
        if hint.version > self._version or hint.offset > self._have:  # some was missed
            whole = await self._texts.whole(self._tenant, self._run_id)
            if whole is not None and whole.version >= hint.version and self._is_more(whole):
                yield self._show(whole, replaces=True)
        # What is kept may be behind, unless it is full: then what was missed comes with the next.
        follows = hint.offset == self._have or hint.offset >= max(self._have, TEXT_BYTES_MAX)
        if hint.version == self._version and follows:
            yield self._show(hint, replaces=False)

    def _is_of_run(self, text: LiveText) -> bool:
        """What is kept may be of another run of the same name."""
        return text.create_ms == self._create_ms

    def _is_more(self, whole: LiveText) -> bool:
        """What is kept elsewhere may be behind what was shown."""
        if not self._is_of_run(whole):
            return False
        return (whole.version, len(whole.text.encode())) > (self._version, self._have)

    def _show(self, shown: LiveText, *, replaces: bool) -> Words:
        self._version = shown.version
        self._have = shown.offset + len(shown.text.encode())
        return Words(shown.step, shown.text, replaces)


def _counted(size: int) -> int:
    return size if size > SMALL_BYTES else 0
