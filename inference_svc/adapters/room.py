"""Who holds how much of the engine's room: connects the pure credit book to streams and time.

Owns the book and the list of holders. A holder is a frame stream, or the plain calls together.
Concurrency: called from the event loop only; one timer, set only while a change of credits is put
off. Nothing here fails.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from inference_svc.domain.credit import CreditBook, Room
from sluice.errors import exhausted

# Plain calls (grpcurl, tests, single callers) may hold this fraction of the sequences together.
PLAIN_DIVISOR = 8
PLAIN_RETRY_S = 1.0


class Holder(Protocol):
    """Something that holds room."""

    def held(self) -> Room:
        """What it holds now."""

    def kv_tokens_bound(self) -> int:
        """The most KV tokens that what it holds can come to; cheaper than :meth:`held`."""

    def credit_changed(self, credit: Room) -> None:
        """It may hold this much from now on."""


class RoomKeeper:
    """The room of one engine."""

    def __init__(self, capacity: Room) -> None:
        self._book = CreditBook(capacity)
        self._holders: dict[int, Holder] = {}
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def capacity(self) -> Room:
        """What is divided."""
        return self._book.capacity

    def resize(self, capacity: Room) -> None:
        """Another capacity."""
        if capacity != self._book.capacity:
            self._book.resize(capacity)
            self._settle()

    def join(self, holder: Holder, *, exact: bool = False) -> int:
        """A holder came; returns its number. Its first credit is told before this returns, if it
        gets any. ``exact``: see :meth:`CreditBook.join`."""
        self._numbers += 1
        number = self._numbers
        self._holders[number] = holder
        self._book.join(number, exact=exact)
        self._settle()
        return number

    def leave(self, number: int) -> None:
        """A holder went with all it held."""
        del self._holders[number]
        self._book.leave(number)
        self._settle()

    def demand(self, number: int, room: Room) -> None:
        """What a holder would hold if it could."""
        self._book.demand(number, room)
        if len(self._holders) > 1 or self._book.owed:  # a lone holder has everything anyway
            self._settle()

    def credit(self, number: int) -> Room:
        """What a holder may hold."""
        return self._book.credit(number)

    def released(self) -> None:
        """Something that was held ended."""
        if self._book.owed:
            self._settle()

    def sequences_held(self) -> int:
        """Sequences held by all together."""
        return sum(holder.held().sequences for holder in self._holders.values())

    def prompt_fits(self, number: int, kv_tokens: int) -> bool:
        """Whether a further sequence with a prompt of so many tokens has room for it: within the
        holder's credit, unless the holder holds nothing else (a prompt larger than a share must
        still run), and within the engine's KV memory together with what all others hold now."""
        capacity = self._book.capacity.kv_tokens
        if capacity == 0:  # the engine has no KV cache
            return True
        mine = self._holders[number]
        credit = self._book.credit(number).kv_tokens
        if mine.kv_tokens_bound() + kv_tokens > credit:
            held = mine.held().kv_tokens
            if held and held + kv_tokens > credit:
                return False
        bound = sum(holder.kv_tokens_bound() for holder in self._holders.values())
        if bound + kv_tokens <= capacity:
            return True
        held = sum(holder.held().kv_tokens for holder in self._holders.values())
        return held == 0 or held + kv_tokens <= capacity

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        held = {number: holder.held() for number, holder in self._holders.items()}
        changes, again_at = self._book.settle(loop.time(), held)
        if again_at is not None:
            self._timer = loop.call_at(again_at, self._settle)
        for number, credit in changes.items():
            self._holders[number].credit_changed(credit)


class PlainShare:
    """The room of all plain calls together: a holder that is there only while a call is."""

    def __init__(self, keeper: RoomKeeper) -> None:
        self._keeper = keeper
        self._number: int | None = None
        self._sequences = 0
        self._kv_tokens = 0

    def held(self) -> Room:
        return Room(self._sequences, self._kv_tokens)

    def kv_tokens_bound(self) -> int:
        return self._kv_tokens

    def credit_changed(self, credit: Room) -> None:
        """Plain calls are admitted one by one; see :meth:`enter`."""

    def enter(self) -> None:
        """A call begins. RESOURCE_EXHAUSTED when the engine is full or plain calls hold their
        share."""
        capacity = self._keeper.capacity.sequences
        share = max(1, capacity // PLAIN_DIVISOR)
        if self._keeper.sequences_held() >= capacity or self._sequences >= share:
            raise exhausted("NO_ROOM", "This instance has no room now.", PLAIN_RETRY_S)
        self._change(1, 0)

    def hold(self, kv_tokens: int) -> None:
        """A call knows the KV tokens of its prompt. RESOURCE_EXHAUSTED without room."""
        assert self._number is not None
        if not self._keeper.prompt_fits(self._number, kv_tokens):
            raise exhausted("NO_ROOM", "This instance has no room now.", PLAIN_RETRY_S)
        self._change(0, kv_tokens)

    def exit(self, kv_tokens: int) -> None:
        """A call is over; gives back what it took."""
        self._change(-1, -kv_tokens)

    def _change(self, sequences: int, kv_tokens: int) -> None:
        self._sequences += sequences
        self._kv_tokens += kv_tokens
        assert self._sequences >= 0
        assert self._kv_tokens >= 0
        if self._sequences == 0 and self._number is not None:
            number, self._number = self._number, None
            self._keeper.leave(number)
            return
        if self._number is None:
            self._number = self._keeper.join(self, exact=True)
        self._keeper.demand(self._number, self.held())
