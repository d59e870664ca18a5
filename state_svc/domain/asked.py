"""What a request asked for, as a digest that is kept with the mark of its id: so that the id is not
taken for another request's. Pure. Digests are 32 hexadecimal digits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def asked_to_create(ttl_ms: int, messages: Sequence[bytes]) -> str:
    """Of the creation of a session."""
    return _digest(ttl_ms, *messages)


def asked_to_append(messages: Sequence[bytes], expected_version: int | None) -> str:
    """Of an append to a session."""
    return _digest(expected_version, *messages)


def asked_to_resume(step: int, decision: bytes) -> str:
    """Of a decision for a run."""
    return _digest(step, decision)


def _digest(*parts: bytes | int | None) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        word = part if isinstance(part, bytes) else repr(part).encode()
        hashed.update(len(word).to_bytes(8, "little"))
        hashed.update(word)
    return hashed.hexdigest()
