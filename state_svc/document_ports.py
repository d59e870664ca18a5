"""What documents and their search need from a store. As ``ports.py``, of which this is a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from state_svc.domain.documents import (
    Changed,
    ChunkText,
    CollectionHead,
    CollectionState,
    DocumentState,
    Draft,
    LiveDocument,
    Match,
    NewChunk,
    Query,
    SmallChange,
)


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Bounds of one tenant: its collections, the bytes of all contents, labels and chunks, with 512
    for each document; of one collection: its documents and its chunks, those included that are not
    found yet."""

    collections_max: int = 100
    bytes_max: int = 1 << 30
    documents_max: int = 10_000
    chunks_max: int = 200_000


class GenerationReplacedError(Exception):
    """There is a later generation, or the document is gone. Nothing was done."""


class CollectionUnknownError(Exception):
    """There is no collection of this name: nothing is in it."""


class DocumentDeletedError(Exception):
    """The document that the request stored was deleted since. Nothing was done."""


class ChunksMissingError(Exception):
    """A generation was to be completed, but chunks of it are missing. What the call brought is
    stored."""


class VectorLengthError(Exception):
    """A vector's length is not that of the collection (``dims``). Nothing was done."""

    def __init__(self, dims: int) -> None:
        super().__init__(dims)
        self.dims = dims


class DocumentStore(Protocol):
    """Documents; durable store, no time to live: they stay until they are deleted."""

    async def put(
        self, tenant: str, collection: str, document_id: str, draft: Draft, request_id: str
    ) -> DocumentState:
        """Stores a new generation. The same request id within 24 hours: nothing happens, and the
        answer shows the generation that it made. Raises LimitReachedError,
        RequestIdReusedError, DocumentDeletedError."""

    async def get(
        self, tenant: str, collection: str, document_id: str, *, with_content: bool = True
    ) -> tuple[DocumentState, bytes] | None:
        """A document and the content of its newest generation, empty unless asked for."""

    async def list(
        self, tenant: str, collection: str, after: str, count: int
    ) -> tuple[Sequence[DocumentState], str]:
        """The next ``count`` documents beyond an identifier (empty: from the first on), by the
        bytes of their identifiers, and the last identifier looked at; empty: that was all."""

    async def delete(
        self, tenant: str, collection: str, document_id: str, until: int | None = None
    ) -> bool:
        """Deletes a document with content, chunks, vectors and words; whether it was there.
        ``until``: only if its newest generation is not a later one."""

    async def newest(self, tenant: str) -> int:
        """A number that no generation of the tenant exceeds, and every later one does."""

    async def collections(
        self, tenant: str, after: str, count: int
    ) -> tuple[Sequence[CollectionState], str]:
        """As ``list``, of the tenant's collections: those in which a document is."""

    async def store(
        self,
        tenant: str,
        collection: str,
        document_id: str,
        generation: int,
        chunks: Sequence[NewChunk],
        dims: int,
        chunk_count: int | None,
    ) -> DocumentState:
        """Stores chunks of a generation. ``dims``: of their vectors. ``chunk_count``: the
        generation is complete with these, and has so many; it goes live in the same moment in
        which the earlier one goes away. Nothing happens to one that is complete. Raises
        GenerationReplacedError, ChunksMissingError, VectorLengthError, LimitReachedError."""

    async def abandon(
        self, tenant: str, collection: str, document_id: str, generation: int
    ) -> None:
        """Drops the chunks of a document's newest generation, unless it is complete."""

    async def shown(
        self, tenant: str, places: Sequence[tuple[int, int]]
    ) -> Sequence[ChunkText | None]:
        """What chunks (generation, number) show; ``None``: it is gone."""


class ChunkSource(Protocol):
    """What an index is made from, of the same store."""

    async def head(self, tenant: str, collection: str) -> CollectionHead | None:
        """A collection now; ``None``: there is none."""

    async def small_change(
        self, tenant: str, collection: str, since: int, generations_max: int, chunks_max: int
    ) -> SmallChange | None:
        """What changed since a version, in one step; ``None``: more than the bounds allow, or too
        long ago."""

    async def changed(self, tenant: str, collection: str, since: int) -> Changed | None:
        """What changed since a version (0: everything); ``None``: there is no collection."""

    async def live(
        self, tenant: str, collection: str, generations: Sequence[int]
    ) -> Mapping[int, LiveDocument]:
        """Those of the generations that are live."""

    async def records(
        self, tenant: str, ranges: Sequence[tuple[int, int, int]]
    ) -> Sequence[Sequence[bytes | None]]:
        """Records for an index: for each (generation, first number, end) the records of these
        chunks; ``None``: it is gone."""


class IndexLoadingError(Exception):
    """The index is not there yet; it goes on loading. ``retry_after_s``: about as long as it will
    take."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class IndexTooLargeError(Exception):
    """The collection's index exceeds the memory that all indexes may take."""


class SearchBusyError(Exception):
    """As many searches are running as may."""


class SearchIndex(Protocol):
    """Finds chunks. An implementation either keeps an index of its own and proves it against the
    store at each search, or asks an engine that the store has."""

    async def search(
        self, tenant: str, collection: str, query: Query, wait_s: float
    ) -> Sequence[Match]:
        """The best chunks of what is live when this is called, or later. Waits for an index at
        most ``wait_s``. Raises CollectionUnknownError, IndexLoadingError,
        IndexTooLargeError, SearchBusyError, VectorLengthError and StoreUnavailableError."""
