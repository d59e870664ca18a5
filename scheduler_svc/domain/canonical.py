"""What a prompt is for the prefix index: canonical bytes, cut into blocks, hashed as a chain.

Two requests share a prefix in an engine's KV cache when their rendered token ids begin alike. The
gate does not tokenise, so it compares the conversation itself: tools first (templates render them
into the beginning), then message by message. Parts are set off by bytes that no UTF-8 text can
contain, so nothing in a text can imitate a seam, and no length comes before a text, so that two
long texts that differ at their ends share their beginnings.

Hash ``i`` stands for all bytes up to the end of block ``i``, so a hash that is known says that the
whole prefix is. Blocks are hashed and chained by numpy (16 KiB of text: about 30 µs), with 64-bit
sums modulo 2**64 that are mixed before and after. Salt (model, tenant, cache salt, kind of input)
and key enter every hash: hashes of different tenants have nothing in common, and nobody who does
not know the key can make two prompts collide. Two hashes that are equal by chance (2**-64 a pair)
cost one misplaced request.

Pure and stateless but for tables that are fixed at construction. Nothing here fails on any text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_256
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

BLOCKS_MAX: Final = 4_096
"""Blocks of a prompt that are hashed; at 32 tokens each, 131,072 tokens. The rest of a longer
prompt is not looked at."""
BLOCK_BYTES_MAX: Final = 4_096

_PART, _FIELD, _CALL, _TOOL = b"\xff", b"\xfe", b"\xfd", b"\xfc"  # never part of UTF-8
_WORD: Final = 8


class CallParts(Protocol):
    """A tool call."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments_json(self) -> str: ...


class MessageParts(Protocol):
    """One message, as in ``sluice.common.v1.ChatMessage``."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[CallParts]: ...
    @property
    def tool_call_id(self) -> str: ...


class ToolParts(Protocol):
    """One tool that is offered, as in ``sluice.common.v1.Tool``."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters_json(self) -> str: ...


def conversation_bytes(
    messages: Iterable[MessageParts], tools: Iterable[ToolParts], bytes_max: int
) -> bytes:
    """The canonical beginning of a conversation, at least ``bytes_max`` bytes of it or all."""
    parts = [
        _TOOL + _FIELD.join(_utf8(t) for t in (tool.name, tool.description, tool.parameters_json))
        for tool in tools
    ]
    size = sum(map(len, parts))
    for message in messages:
        head = _FIELD.join(
            _utf8(text) for text in (message.role, message.name, message.tool_call_id)
        )
        part = _PART + head + _FIELD + _utf8(message.content)
        for call in message.tool_calls:
            part += _CALL + _FIELD.join(_utf8(t) for t in (call.id, call.name, call.arguments_json))
        parts.append(part)
        size += len(part)
        if size >= bytes_max:
            break
    return b"".join(parts)


def token_bytes(ids: Sequence[int]) -> bytes:
    """Token ids (0 to 2**32 - 1) as 4 bytes each: block bytes are then 4 times block tokens."""
    return np.array(ids[: BLOCKS_MAX * BLOCK_BYTES_MAX // 4], dtype=np.uint32).tobytes()


class PrefixHasher:
    """Chained hashes of canonical bytes. ``key``: secret bytes, the same for all prompts whose
    hashes are compared; a fixed key makes runs repeatable."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = blake2b(key, digest_size=32).digest()
        words = BLOCK_BYTES_MAX // _WORD
        stretched = shake_256(self._key).digest((2 * words + BLOCKS_MAX) * _WORD)
        numbers: Hashes = np.frombuffer(stretched, dtype="<u8").astype(np.uint64)
        self._add: Hashes = numbers[:words]
        self._times: Hashes = numbers[words : 2 * words] | np.uint64(1)  # odd: loses no bit
        self._at: Hashes = numbers[2 * words :] | np.uint64(1)

    def hashes(self, data: bytes, block_bytes: int, salt: Sequence[str]) -> Hashes:
        """One hash for each whole block of ``data``, at most ``BLOCKS_MAX``; read-only.
        ``block_bytes``: a multiple of 8, at most ``BLOCK_BYTES_MAX``. ``salt``: parts that two
        prompts must have in common to have anything in common; the block size is one of them."""
        assert 0 < block_bytes <= BLOCK_BYTES_MAX and block_bytes % _WORD == 0
        blocks = min(len(data) // block_bytes, BLOCKS_MAX)
        words = block_bytes // _WORD
        cut = np.frombuffer(data, dtype=np.uint64, count=blocks * words).reshape(blocks, words)
        mixed = _mix(cut + self._add[:words])
        mixed *= self._times[:words]
        each = _mix(mixed.sum(axis=1, dtype=np.uint64))
        each *= self._at[:blocks]
        chain = np.cumsum(each, dtype=np.uint64)
        chain += np.uint64(self._salted(block_bytes, salt))
        chain = _mix(chain)
        chain[chain == 0] = 1  # 0 is the index's empty place
        chain.flags.writeable = False
        return chain

    def _salted(self, block_bytes: int, salt: Sequence[str]) -> int:
        digest = blake2b(digest_size=8, key=self._key)
        for part in (str(block_bytes), *salt):
            digest.update(_utf8(part) + _PART)
        return int.from_bytes(digest.digest(), "little")


def _mix(values: Hashes) -> Hashes:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection that lets every bit
    touch every other."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
