"""The values of documents: what is stored of one, its chunks, and what a search asks and finds.

A *generation* is one version of a document's content. Its number grows over the whole tenant and is
never used again. At most one generation of a document is *live*: complete, and found by searches.
The newest one is the one whose content is kept; it is live too once all its chunks are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from state_svc.domain.words import Terms, terms_of

VECTOR_BYTES: Final = 4  # of a dimension
TERM_BYTES: Final = 10  # of a word: its hash, its count
DOCUMENT_OVERHEAD_BYTES: Final = 512  # of a document in the store: its keys and their entries


@dataclass(frozen=True, slots=True)
class Draft:
    """A new generation's content. ``digest``: of all that the request said, so that a request id is
    not taken for another request."""

    content: bytes
    media_type: str
    labels: Mapping[str, str]
    digest: str


@dataclass(frozen=True, slots=True)
class DocumentState:
    """A document. ``generation``: the newest. ``chunk_count``: of the live generation. ``ready``:
    whether the newest is live."""

    document_id: str
    generation: int
    size_bytes: int
    chunk_count: int
    ready: bool
    media_type: str
    labels: Mapping[str, str]
    update_ms: int


@dataclass(frozen=True, slots=True)
class CollectionState:
    """A collection. ``chunk_count``, ``chunk_bytes``: of all that are stored."""

    name: str
    document_count: int
    chunk_count: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkText:
    """What a hit shows of a chunk: its text and the bytes of the content that it covers."""

    text: str
    begin_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to store: its number from 0, what it shows, and its record for the index."""

    number: int
    shown: ChunkText
    record: bytes


@dataclass(frozen=True, slots=True)
class LiveDocument:
    """A live generation, as an index sees it; its chunks have the numbers below ``chunk_count``."""

    generation: int
    document_id: str
    chunk_count: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CollectionHead:
    """A collection now. ``version`` grows with each change of what is found, and is never used
    again. ``dims``: of its vectors; 0: not known yet. ``size_bytes``: of all stored chunks."""

    version: int
    dims: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What changed since a version: generations that went live or away. ``everything``: the change
    is too long ago; ``generations`` are all that are live."""

    version: int
    dims: int
    everything: bool
    generations: Sequence[int]


@dataclass(frozen=True, slots=True)
class SmallChange:
    """What changed since a version, at one moment. ``generations``: all that went live or away;
    ``records``: of those that are live, of each of their chunks. ``version`` 0: there is no
    collection."""

    version: int
    dims: int
    generations: Sequence[int] = ()
    live: Sequence[LiveDocument] = ()
    records: Mapping[int, Sequence[bytes | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Query:
    """A search. ``words``: empty: by vector only. ``vector``: of length 1; ``None``: by words
    only. ``labels``: that a document must have."""

    top_k: int
    words: str = ""
    vector: NDArray[np.float32] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A chunk that was found: ``number`` of a generation. Scores as of ``ChunkHit``."""

    generation: int
    document_id: str
    number: int
    score: float
    vector_score: float
    term_score: float


def record_bytes(document_id: str, labels: Mapping[str, str]) -> int:
    """What a document counts for beside its content and chunks. Its identifier and labels are kept
    twice: with it, and for the index."""
    return DOCUMENT_OVERHEAD_BYTES + 2 * (len(document_id.encode()) + len(labels_text(labels)))


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as they are stored: JSON of ASCII letters, the same for the same labels."""
    return json.dumps(dict(sorted(labels.items())))


def index_record(vector: NDArray[np.float32], terms: Terms) -> bytes:
    """What an index needs of a chunk, as it is stored: the vector (little-endian float32, of length
    1), hashes of the words (uint64), their counts (uint16)."""
    return b"".join(
        (
            vector.astype("<f4", copy=False).tobytes(),
            terms.hashes.astype("<u8", copy=False).tobytes(),
            terms.counts.astype("<u2", copy=False).tobytes(),
        )
    )


def unit_vectors(stacked: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows scaled to length 1. Raises ValueError with the number of the first row that has no
    direction: zero, or not finite."""
    wide = stacked.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    wrong = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if wrong.size:
        raise ValueError(int(wrong[0]))
    return np.asarray(wide / norms[:, None], dtype=np.float32)


def records_of(texts: Sequence[str], vectors: Sequence[bytes]) -> list[bytes]:
    """The records of chunks whose vectors have one length. Raises ValueError with the number of the
    first chunk whose vector has no direction. About 0.1 ms a chunk: not for an event loop."""
    stacked = np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)
    return [
        index_record(vector, terms_of(text))
        for vector, text in zip(unit_vectors(stacked), texts, strict=True)
    ]


def is_record(record: bytes, dims: int) -> bool:
    """Whether it has the form of one with so many dimensions."""
    words = len(record) - dims * VECTOR_BYTES
    return words >= 0 and words % TERM_BYTES == 0
