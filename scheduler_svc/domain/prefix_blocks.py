"""How large a block of the prefix index is, by model: whole blocks of the engine's cache, in bytes.

An engine reuses whole KV blocks only, so a block here is a whole number of those, and at least
``tokens_min`` long so that the index reaches further for its memory. The gate sees bytes: a block's
bytes are its tokens times the bytes per token learnt for the model. Hashes with another block size
have nothing in common, so the size is kept until the ratio has left it by ``DRIFT``. A repeated
prompt of n blocks is then estimated at floor(n) / n of itself, whatever the ratio: matched blocks
count as their share of the prompt, above 0.9 from 10 blocks on.

Owned by the scheduler. Bounded by ``models_max``, least recently used out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeVar

from scheduler_svc.domain.canonical import BLOCK_BYTES_MAX

V = TypeVar("V")

DRIFT: Final = 1.5  # of the learnt ratio against the one in use, either way
_WORD: Final = 8  # hashes are made of whole words
TOKEN_ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    """A block's size for a model: tokens, bytes of text, bytes of token ids."""

    tokens: int
    text_bytes: int

    @property
    def id_bytes(self) -> int:
        return min(self.tokens * TOKEN_ID_BYTES, BLOCK_BYTES_MAX)


class PrefixBlocks:
    """Block sizes in use."""

    def __init__(self, models_max: int, tokens_min: int) -> None:
        self._models_max = models_max
        self._tokens_min = tokens_min
        self._engine_tokens: OrderedDict[str, int] = OrderedDict()
        self._blocks: OrderedDict[str, PrefixBlock] = OrderedDict()

    def saw(self, model: str, kv_block_tokens: int) -> int:
        """An instance's KV block; the largest of a model counts. Returns the index's block in
        tokens."""
        known = max(kv_block_tokens, 1, self._engine_tokens.get(model, 0))
        self._engine_tokens[model] = known
        _use(self._engine_tokens, model, self._models_max)
        return self._tokens(known)

    def block(self, model: str, bytes_per_token: float) -> PrefixBlock | None:
        """The block for a model; ``None`` while no instance has said what its engine's is."""
        engine_tokens = self._engine_tokens.get(model)
        if engine_tokens is None:
            return None
        tokens = self._tokens(engine_tokens)
        block = self._blocks.get(model)
        wanted = tokens * bytes_per_token
        if block is None or block.tokens != tokens or _drifted(block.text_bytes, wanted):
            words = max(1, round(wanted / _WORD))
            block = PrefixBlock(tokens, min(words * _WORD, BLOCK_BYTES_MAX))
            self._blocks[model] = block
        _use(self._blocks, model, self._models_max)
        return block

    def _tokens(self, engine_tokens: int) -> int:
        whole = -(-self._tokens_min // engine_tokens) * engine_tokens
        return whole + whole % 2 * engine_tokens  # even, so that token ids fill whole words


def _drifted(used_bytes: int, wanted_bytes: float) -> bool:
    wanted_bytes = min(max(wanted_bytes, _WORD), BLOCK_BYTES_MAX)
    return not wanted_bytes / DRIFT <= used_bytes <= wanted_bytes * DRIFT


def _use(known: OrderedDict[str, V], model: str, models_max: int) -> None:
    known.move_to_end(model)
    if len(known) > models_max:
        known.popitem(last=False)
