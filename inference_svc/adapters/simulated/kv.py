"""The simulated engine's KV memory: blocks, and the prefix cache over them.

Owned by the step loop, used from the event loop only. A block is private to a sequence, shared
(held by sequences that have the same prefix under the same salt) or idle (cached, held by none,
given away in order of last use when memory is needed). Idle blocks count as free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KvHold:
    """What one sequence holds. Freed as a whole, by :meth:`KvMemory.free`."""

    __slots__ = ("private", "shared")

    def __init__(self) -> None:
        self.private = 0  # blocks
        self.shared: list[int] = []  # keys, in order of the prefix


class KvMemory:
    """A number of blocks of a fixed number of tokens."""

    __slots__ = ("_cache", "_idle", "_private", "_shared", "block_tokens", "blocks")

    def __init__(self, tokens: int, block_tokens: int, *, prefix_cache: bool) -> None:
        self.blocks = tokens // block_tokens
        self.block_tokens = block_tokens
        self._cache = prefix_cache
        self._private = 0
        self._shared: dict[int, int] = {}  # key: sequences that hold it
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self._private + len(self._shared)

    @property
    def cached(self) -> int:
        """Idle blocks: their content may be found again."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def found(self, keys: Sequence[int]) -> int:
        """How many blocks at the beginning of a prefix are cached."""
        count = 0
        for key in keys:
            if key not in self._shared and key not in self._idle:
                break
            count += 1
        return count

    def take(self, hold: KvHold, keys: Sequence[int], private: int) -> bool:
        """Takes cached blocks and new ones for a sequence; False, and nothing taken, when the
        memory does not hold them."""
        revived = sum(1 for key in keys if key in self._idle)
        if self.used + revived + private > self.blocks:
            return False
        for key in keys:
            if key in self._idle:
                del self._idle[key]
                self._shared[key] = 1
            else:
                self._shared[key] += 1
            hold.shared.append(key)
        self._private += private
        hold.private += private
        while self.used + len(self._idle) > self.blocks:
            self._idle.popitem(last=False)
        return True

    def publish(self, hold: KvHold, keys: Sequence[int]) -> None:
        """Makes a sequence's private blocks, whose content is known now, findable."""
        if not self._cache:
            return
        for key in keys:
            if key in self._shared or key in self._idle:
                continue  # another sequence computed the same: this copy stays private
            assert hold.private > 0, "a published block was held"
            hold.private -= 1
            self._private -= 1
            self._shared[key] = 1
            hold.shared.append(key)

    def free(self, hold: KvHold) -> None:
        """Gives back all that a sequence holds. Idempotent."""
        self._private -= hold.private
        hold.private = 0
        # The end of a prefix becomes idle first and is given away first: without its beginning
        # it cannot be found.
        for key in reversed(hold.shared):
            holders = self._shared[key] - 1
            if holders:
                self._shared[key] = holders
            else:
                del self._shared[key]
                self._idle[key] = None
        hold.shared.clear()
