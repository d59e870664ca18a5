"""What an input is known by after an engine died of it: a hash salted by the tenant.

Worked out only for requests whose attempt ended with a death, and at entry while any input is
suspected. It holds what a model reads and the constraint on its output, not the sampling values:
those do not make an input poisonous, and a client that retries may change them. Stateless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from sluice.inference.v1 import inference_pb2

HASH_BYTES: Final = 16


def generation_hash(tenant: str, work: inference_pb2.Work) -> bytes:
    """Of a request to generate."""
    sampling = work.sampling
    parts = [work.input.SerializeToString(deterministic=True)]
    if sampling.HasField("structured_output"):
        parts.append(sampling.structured_output.SerializeToString(deterministic=True))
    return _hash(tenant, work.model, parts)


def embedding_hash(tenant: str, model: str, texts: Iterable[str]) -> bytes:
    """Of a request to embed."""
    return _hash(tenant, model, (text.encode() for text in texts))


def _hash(tenant: str, model: str, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"sluice input")
    for part in (tenant.encode(), model.encode(), *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
