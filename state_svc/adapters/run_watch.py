"""Follows one run: replays its events, then waits for hints and reads on.

Events come from the store alone, by sequence number, so none is lost, doubled or out of order
whatever becomes of hints, of the store or of another replica; :data:`POLL_S` bounds what a lost
hint costs. Live text is shown only behind the last event that was shown: what a finished model call
has written is in its event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from state_svc.ports import StoreUnavailableError
from state_svc.run_ports import LiveText, Poke, RunFeed, RunStore, TextStore

POLL_S: Final = 2.0
RETRY_S: Final = 0.25  # while the store is away


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


class RunWatch:
    """One follower, from sequence number ``first`` on."""

    def __init__(
        self, store: RunStore, texts: TextStore, tenant: str, run_id: str, first: int
    ) -> None:
        self._store, self._texts = store, texts
        self._tenant, self._run_id = tenant, run_id
        self._next = max(first, 1)
        self._last = 0  # the run's last event when it was read
        self._version, self._have = 0, 0  # of the text that was shown: which, and its bytes
        self._look_at_text = True

    async def follow(self, feed: RunFeed) -> AsyncIterator[Entry | Words]:
        """Everything until the run has ended. Raises RunUnknownError; StoreUnavailableError only
        before the first event; FeedClosedError."""
        async with feed.run(self._tenant, self._run_id) as hints:
            first = True
            while True:
                try:
                    more = True
                    while more:
                        page = await self._store.read(self._tenant, self._run_id, self._next)
                        first = False
                        self._next = max(self._next, page.first)
                        for event in page.events:
                            yield Entry(self._next, event)
                            self._next += 1
                        more, self._last = page.more, page.last
                    if page.ended:
                        return
                    async for words in self._words_until_poke(hints):
                        yield words
                except StoreUnavailableError:
                    if first:
                        raise
                    await asyncio.sleep(RETRY_S)

    async def _words_until_poke(
        self, hints: AsyncIterator[Poke | LiveText]
    ) -> AsyncIterator[Words]:
        """Text as it comes, until there may be new events."""
        if self._look_at_text:
            whole = await self._texts.whole(self._tenant, self._run_id)
            self._look_at_text = False
            if whole is not None and whole.sequence == self._last and not self._has(whole):
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
                return
            if hint.sequence > self._last:  # its event comes first
                self._look_at_text = True
                return
            if hint.sequence == self._last:
                async for words in self._next_words(hint):
                    yield words

    async def _next_words(self, hint: LiveText) -> AsyncIterator[Words]:
        if hint.version < self._version:
            return
        if hint.version > self._version and hint.offset == 0:
            yield self._show(hint, replaces=True)
            return
        if hint.version > self._version or hint.offset > self._have:  # some was missed
            whole = await self._texts.whole(self._tenant, self._run_id)
            if whole is not None and whole.version >= hint.version:
                yield self._show(whole, replaces=True)
        if hint.version == self._version and hint.offset >= self._have:
            yield self._show(hint, replaces=False)

    def _has(self, whole: LiveText) -> bool:
        return (whole.version, len(whole.text.encode())) == (self._version, self._have)

    def _show(self, shown: LiveText, *, replaces: bool) -> Words:
        self._version = shown.version
        self._have = shown.offset + len(shown.text.encode())
        return Words(shown.step, shown.text, replaces)
