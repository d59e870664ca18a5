"""Documents in this process's memory: a twin of the real store for tests and simulation. Its clock
is the event loop's. Nothing survives the process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from state_svc.adapters.valkey_documents import REQUEST_KEPT_S
from state_svc.document_ports import (
    ChunksMissingError,
    DocumentDeletedError,
    DocumentLimits,
    GenerationReplacedError,
    VectorLengthError,
)
from state_svc.domain.documents import (
    Changed,
    ChunkText,
    CollectionHead,
    CollectionState,
    DocumentState,
    Draft,
    LiveDocument,
    NewChunk,
    SmallChange,
    record_bytes,
)
from state_svc.ports import LimitReachedError, RequestIdReusedError


@dataclass(slots=True)
class _Generation:
    number: int
    draft: Draft
    made_s: float
    chunks: dict[int, NewChunk] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(
            # As the real store counts it: with the range before the text.
            16 + len(chunk.shown.text.encode()) + len(chunk.record)
            for chunk in self.chunks.values()
        )


@dataclass(slots=True)
class _Document:
    newest: _Generation
    live: _Generation | None = None

    def generations(self) -> list[_Generation]:
        if self.live is None or self.live is self.newest:
            return [self.newest]
        return [self.newest, self.live]


@dataclass(slots=True)
class _Collection:
    version: int
    floor: int
    dims: int = 0
    documents: dict[str, _Document] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)  # generation -> version

    def stored(self) -> list[_Generation]:
        return [one for document in self.documents.values() for one in document.generations()]


@dataclass(slots=True)
class _Library:
    collections: dict[str, _Collection] = field(default_factory=dict)
    requests: dict[str, tuple[float, str, int, float]] = field(default_factory=dict)

    def bytes_used(self) -> int:
        return sum(
            sum(one.size for one in collection.stored())
            + sum(_weight(name, d.newest.draft) for name, d in collection.documents.items())
            for collection in self.collections.values()
        )


class MemoryDocuments:
    """A :class:`state_svc.document_ports.DocumentStore` and its ``ChunkSource``."""

    def __init__(self, limits: DocumentLimits | None = None) -> None:
        self._limits = limits or DocumentLimits()
        self._libraries: dict[str, _Library] = {}
        self._counter = 0

    async def put(
        self, tenant: str, collection: str, document_id: str, draft: Draft, request_id: str
    ) -> DocumentState:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        library = self._libraries.setdefault(tenant, _Library())
        now = _now()
        known = library.requests.get(request_id)
        if known is not None and known[0] > now:
            return self._known(tenant, collection, document_id, draft, known)
        document = self._document(tenant, collection, document_id)
        old = _weight(document_id, document.newest.draft) if document is not None else 0
        if library.bytes_used() + _weight(document_id, draft) - old > self._limits.bytes_max:
            raise LimitReachedError("documents_bytes_max")
        there = library.collections.get(collection)
        if there is None and len(library.collections) >= self._limits.collections_max:
            raise LimitReachedError("collections_max")
        count = 0 if there is None else len(there.documents)
        if document is None and count >= self._limits.documents_max:
            raise LimitReachedError("documents_max")
        generation = _Generation(self._next(), draft, now)
        if there is None:
            there = _Collection(generation.number, generation.number)
            library.collections[collection] = there
        if document is None:
            there.documents[document_id] = _Document(generation)
        else:
            document.newest = generation
        library.requests[request_id] = (
            now + REQUEST_KEPT_S,
            draft.digest,
            generation.number,
            now,
        )
        return _state(document_id, there.documents[document_id])

    def _known(
        self,
        tenant: str,
        collection: str,
        document_id: str,
        draft: Draft,
        known: tuple[float, str, int, float],
    ) -> DocumentState:
        _, digest, generation, made_s = known
        if digest != draft.digest:
            raise RequestIdReusedError
        document = self._document(tenant, collection, document_id)
        if document is None:
            raise DocumentDeletedError
        live = document.live
        return DocumentState(
            document_id,
            generation,
            len(draft.content),
            0 if live is None else len(live.chunks),
            live is not None and live.number == generation,
            draft.media_type,
            dict(draft.labels),
            int(made_s * 1000),
        )

    async def get(
        self, tenant: str, collection: str, document_id: str, *, with_content: bool = True
    ) -> tuple[DocumentState, bytes] | None:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        document = self._document(tenant, collection, document_id)
        if document is None:
            return None
        content = document.newest.draft.content if with_content else b""
        return _state(document_id, document), content

    async def list(
        self, tenant: str, collection: str, after: str, count: int
    ) -> tuple[Sequence[DocumentState], str]:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        there = self._collection(tenant, collection)
        documents = {} if there is None else there.documents
        names = sorted(documents, key=str.encode)
        page = [name for name in names if name.encode() > after.encode()][:count]
        states = [_state(name, documents[name]) for name in page]
        return states, page[-1] if len(page) == count else ""

    async def delete(
        self, tenant: str, collection: str, document_id: str, until: int | None = None
    ) -> bool:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        document = self._document(tenant, collection, document_id)
        if document is None or (until is not None and document.newest.number > until):
            return False
        there = self._libraries[tenant].collections[collection]
        del there.documents[document_id]
        if not there.documents:
            del self._libraries[tenant].collections[collection]
        elif document.live is not None:
            there.version = self._next()
            there.changes[document.live.number] = there.version
        return True

    async def newest(self, tenant: str) -> int:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        return self._counter

    async def collections(
        self, tenant: str, after: str, count: int
    ) -> tuple[Sequence[CollectionState], str]:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        there = self._libraries.get(tenant, _Library()).collections
        page = [name for name in sorted(there) if name > after][:count]
        states = []
        for name in page:
            stored = there[name].stored()
            chunks, size = sum(len(one.chunks) for one in stored), sum(one.size for one in stored)
            states.append(CollectionState(name, len(there[name].documents), chunks, size))
        return states, page[-1] if len(page) == count else ""

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
        """See :class:`state_svc.document_ports.DocumentStore`."""
        document = self._document(tenant, collection, document_id)
        if document is None or document.newest.number != generation:
            raise GenerationReplacedError
        newest = document.newest
        if document.live is newest:
            return _state(document_id, document)
        there = self._libraries[tenant].collections[collection]
        stored = sum(len(one.chunks) for one in there.stored())
        if chunks and there.dims != dims and stored:
            raise VectorLengthError(there.dims)
        before = dict(newest.chunks)
        newest.chunks.update({chunk.number: chunk for chunk in chunks})
        limit = ""
        if stored + len(newest.chunks) - len(before) > self._limits.chunks_max:
            limit = "chunks_max"
        elif self._libraries[tenant].bytes_used() > self._limits.bytes_max:
            limit = "documents_bytes_max"
        if limit:
            newest.chunks = before
            raise LimitReachedError(limit)
        if chunks:
            there.dims = dims
        if chunk_count is None:
            return _state(document_id, document)
        if sorted(newest.chunks) != list(range(chunk_count)):
            raise ChunksMissingError
        there.version = self._next()
        there.changes[generation] = there.version
        if document.live is not None:
            there.changes[document.live.number] = there.version
        document.live = newest
        return _state(document_id, document)

    async def abandon(
        self, tenant: str, collection: str, document_id: str, generation: int
    ) -> None:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        document = self._document(tenant, collection, document_id)
        newest = None if document is None or document.newest is document.live else document.newest
        if newest is not None and newest.number == generation:
            newest.chunks.clear()

    async def shown(
        self, tenant: str, places: Sequence[tuple[int, int]]
    ) -> Sequence[ChunkText | None]:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        chunks = [self._chunk(tenant, generation, number) for generation, number in places]
        return [None if chunk is None else chunk.shown for chunk in chunks]

    async def head(self, tenant: str, collection: str) -> CollectionHead | None:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        there = self._collection(tenant, collection)
        if there is None:
            return None
        size = sum(one.size for one in there.stored())
        return CollectionHead(there.version, there.dims, size)

    async def small_change(
        self, tenant: str, collection: str, since: int, generations_max: int, chunks_max: int
    ) -> SmallChange | None:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        there = self._collection(tenant, collection)
        if there is None:
            return SmallChange(0, 0, [], [])
        changed = await self.changed(tenant, collection, since)
        if changed is None or changed.everything or len(changed.generations) > generations_max:
            return None
        live = list((await self.live(tenant, collection, changed.generations)).values())
        if sum(document.chunk_count for document in live) > chunks_max:
            return None
        ranges = [(document.generation, 0, document.chunk_count) for document in live]
        of_each = [self._records(tenant, *one) for one in ranges]
        records = {one[0]: of_it for one, of_it in zip(ranges, of_each, strict=True)}
        return SmallChange(there.version, there.dims, changed.generations, live, records)

    async def changed(self, tenant: str, collection: str, since: int) -> Changed | None:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        there = self._collection(tenant, collection)
        if there is None:
            return None
        if since == 0 or since < there.floor:
            live = [d.live.number for d in there.documents.values() if d.live is not None]
            return Changed(there.version, there.dims, True, live)
        later = [generation for generation, at in there.changes.items() if at > since]
        return Changed(there.version, there.dims, False, later)

    async def live(
        self, tenant: str, collection: str, generations: Sequence[int]
    ) -> Mapping[int, LiveDocument]:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        there = self._collection(tenant, collection)
        found = {}
        for name, document in ({} if there is None else there.documents).items():
            live = document.live
            if live is not None and live.number in generations:
                found[live.number] = LiveDocument(
                    live.number, name, len(live.chunks), dict(live.draft.labels)
                )
        return found

    async def records(
        self, tenant: str, ranges: Sequence[tuple[int, int, int]]
    ) -> Sequence[Sequence[bytes | None]]:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        return [self._records(tenant, *one) for one in ranges]

    def _records(
        self, tenant: str, generation: int, first: int, end: int
    ) -> Sequence[bytes | None]:
        chunks = [self._chunk(tenant, generation, number) for number in range(first, end)]
        return [None if chunk is None else chunk.record for chunk in chunks]

    def _next(self) -> int:
        self._counter = max(self._counter + 1, int(_now() * 1000))
        return self._counter

    def _collection(self, tenant: str, collection: str) -> _Collection | None:
        return self._libraries.get(tenant, _Library()).collections.get(collection)

    def _document(self, tenant: str, collection: str, document_id: str) -> _Document | None:
        there = self._collection(tenant, collection)
        return None if there is None else there.documents.get(document_id)

    def _chunk(self, tenant: str, generation: int, number: int) -> NewChunk | None:
        for there in self._libraries.get(tenant, _Library()).collections.values():
            for one in there.stored():
                if one.number == generation:
                    return one.chunks.get(number)
        return None


def _weight(document_id: str, draft: Draft) -> int:
    """What a document counts for beside its chunks."""
    return len(draft.content) + record_bytes(document_id, draft.labels)


def _state(document_id: str, document: _Document) -> DocumentState:
    newest, live = document.newest, document.live
    return DocumentState(
        document_id,
        newest.number,
        len(newest.draft.content),
        0 if live is None else len(live.chunks),
        live is newest,
        newest.draft.media_type,
        dict(newest.draft.labels),
        int(newest.made_s * 1000),
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
