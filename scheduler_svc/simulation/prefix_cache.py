"""The prefix cache of the engine model: least recently used blocks go first.

Blocks are those of the trace (``block_tokens`` each), named by ids that stand for a block and all
before it. Memory that sequences hold is not shared with the cache here, so that hits are counted
low when the memory is nearly full.
"""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Ids of blocks, bounded by the memory that is free when blocks are added. ``looked_tokens``
    and ``hit_tokens``: of prompts, and what was found of them, as the engine counts them."""

    __slots__ = ("_blocks", "block_tokens", "hit_tokens", "looked_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.hit_tokens = 0
        self.looked_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, prefix: tuple[int, ...]) -> int:
        """Tokens at the beginning of a prompt that are cached; they count as used now."""
        count = 0
        for block in prefix:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            count += 1
        return count * self.block_tokens

    def add(self, prefix: tuple[int, ...], free_tokens: float) -> None:
        """A prompt was read. Its end goes first when memory is needed: without its beginning it
        cannot be found."""
        for block in reversed(prefix):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * self.block_tokens > free_tokens:
            self._blocks.popitem(last=False)
            if not self._blocks:
                return
