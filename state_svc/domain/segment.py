"""A part of a collection's index: a matrix of vectors and an inverted index, both fixed.

Segments are made from stored records and merged into larger ones, as in a log-structured merge
tree; which of their documents still count is said beside them (:class:`Part`). All work is done on
whole arrays, so that it leaves the interpreter free for the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from state_svc.domain.documents import TERM_BYTES, VECTOR_BYTES, LiveDocument

K1: Final = 1.2  # BM25: how soon repeating a word stops to count
B: Final = 0.75  # BM25: how much long chunks are discounted
DOCUMENT_MEMORY: Final = 160  # bytes in memory of a document in a segment, without words
LABEL_MEMORY: Final = 160  # and of one of its labels


@dataclass(frozen=True, slots=True)
class Segment:
    """``vectors``: (rows, dims), of length 1. ``lengths``: (rows,), words of each chunk.
    ``documents``: each has the rows from its entry in ``begins`` (documents + 1,) on, in the order
    of its chunks. ``vocabulary``: (words,) ascending; the postings of word i are those from
    ``offsets[i]`` to ``offsets[i + 1]``: ``rows``, ascending, and ``counts``.
    ``documents_bytes``: memory of ``documents``."""

    vectors: NDArray[np.float32]
    lengths: NDArray[np.float32]
    documents: tuple[LiveDocument, ...]
    begins: NDArray[np.int64]
    vocabulary: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int32]
    counts: NDArray[np.uint16]
    documents_bytes: int

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays and of the documents' names and labels."""
        return self.documents_bytes + sum(
            array.nbytes
            for array in (
                self.vectors,
                self.lengths,
                self.begins,
                self.vocabulary,
                self.offsets,
                self.rows,
                self.counts,
            )
        )

    def postings(self, term: int) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
        """Rows that have a word, and how often."""
        at = int(np.searchsorted(self.vocabulary, np.uint64(term)))
        if at == self.vocabulary.size or int(self.vocabulary[at]) != term:
            return self.rows[:0], self.counts[:0]
        begin, end = self.offsets[at], self.offsets[at + 1]
        return self.rows[begin:end], self.counts[begin:end]

    def place(self, row: int) -> tuple[LiveDocument, int]:
        """The document of a row, and the number of the chunk in it."""
        at = int(np.searchsorted(self.begins, row, side="right")) - 1
        return self.documents[at], row - int(self.begins[at])

    def rows_of(self, wanted: Sequence[bool]) -> NDArray[np.bool_]:
        """(rows,): whether a row's document is wanted; one entry for each document."""
        return np.repeat(np.asarray(wanted, dtype=np.bool_), np.diff(self.begins))


@dataclass(frozen=True, slots=True)
class Part:
    """A segment and the documents of it that do not count any more, by generation. ``alive``:
    (rows,); ``None``: all rows count."""

    segment: Segment
    dead: frozenset[int] = frozenset()
    alive: NDArray[np.bool_] | None = None

    @property
    def rows(self) -> int:
        """Rows that count."""
        return len(self.segment.lengths) if self.alive is None else int(self.alive.sum())

    def without(self, generations: frozenset[int]) -> Part:
        """The same but for these."""
        gone = {d.generation for d in self.segment.documents} & generations
        if not gone - self.dead:
            return self
        dead = self.dead | gone
        wanted = [d.generation not in dead for d in self.segment.documents]
        return Part(self.segment, dead, self.segment.rows_of(wanted))


def build(documents: Sequence[tuple[LiveDocument, Sequence[bytes]]], dims: int) -> Segment:
    """A segment from the records of documents, each with one for each of its chunks, in order.
    Raises ValueError when a record is damaged."""
    records = [record for _, of_document in documents for record in of_document]
    head = dims * VECTOR_BYTES
    words = np.array([(len(record) - head) // TERM_BYTES for record in records], dtype=np.int64)
    if any(
        len(record) != head + int(count) * TERM_BYTES
        for record, count in zip(records, words, strict=True)
    ):
        raise ValueError("a record has a wrong length")
    vectors = np.frombuffer(b"".join(record[:head] for record in records), dtype="<f4")
    split = [head + int(count) * 8 for count in words]
    hashes = b"".join(record[head:at] for record, at in zip(records, split, strict=True))
    counts = b"".join(record[at:] for record, at in zip(records, split, strict=True))
    return _segment(
        vectors.reshape(len(records), dims),
        tuple(document for document, _ in documents),
        np.array([len(of_document) for _, of_document in documents], dtype=np.int64),
        np.frombuffer(hashes, dtype="<u8"),
        np.repeat(np.arange(len(records), dtype=np.int32), words),
        np.frombuffer(counts, dtype="<u2"),
    )


def merge(parts: Sequence[Part]) -> Segment:
    """One segment of all that counts in these."""
    vectors, documents, sizes, hashes, rows, counts = [], [], [], [], [], []
    before = 0
    for part in parts:
        segment = part.segment
        alive = part.alive if part.alive is not None else np.ones(len(segment.lengths), np.bool_)
        renumbered = np.cumsum(alive, dtype=np.int32) - 1 + before
        kept = alive[segment.rows]
        vectors.append(segment.vectors[alive])
        counted = [d.generation not in part.dead for d in segment.documents]
        documents += [d for d, counts_ in zip(segment.documents, counted, strict=True) if counts_]
        sizes.append(np.diff(segment.begins)[np.asarray(counted, dtype=np.bool_)])
        hashes.append(np.repeat(segment.vocabulary, np.diff(segment.offsets))[kept])
        rows.append(renumbered[segment.rows[kept]].astype(np.int32))
        counts.append(segment.counts[kept])
        before += int(alive.sum())
    return _segment(
        np.concatenate(vectors),
        tuple(documents),
        np.concatenate(sizes),
        np.concatenate(hashes),
        np.concatenate(rows),
        np.concatenate(counts),
    )


def _segment(
    vectors: NDArray[np.float32],
    documents: tuple[LiveDocument, ...],
    sizes: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    rows: NDArray[np.int32],
    counts: NDArray[np.uint16],
) -> Segment:
    """Orders postings (hash, row, count) by word, and within a word by row."""
    order = np.argsort(hashes, kind="stable")
    hashes, rows, counts = hashes[order], rows[order], counts[order]
    first = np.ones(len(hashes), dtype=np.bool_)
    first[1:] = hashes[1:] != hashes[:-1]
    starts = np.flatnonzero(first)
    return Segment(
        vectors=vectors,
        lengths=np.bincount(rows, weights=counts, minlength=len(vectors)).astype(np.float32),
        documents=documents,
        begins=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        vocabulary=hashes[starts],
        offsets=np.append(starts, len(hashes)).astype(np.int64),
        rows=rows,
        counts=counts,
        documents_bytes=sum(map(_memory_of, documents)),
    )


def _memory_of(document: LiveDocument) -> int:
    """About what Python takes for it."""
    labels = document.labels
    words = sum(map(len, labels)) + sum(map(len, labels.values()))
    return DOCUMENT_MEMORY + len(document.document_id) + LABEL_MEMORY * len(labels) + words
