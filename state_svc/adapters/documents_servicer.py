"""``DocumentService``: documents, their chunks and the search in them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from sluice import deadline
from sluice.errors import (
    SluiceError,
    invalid,
)
from sluice.state.v1 import documents_pb2, documents_pb2_grpc
from state_svc.adapters.document_errors import document_errors, unknown, unknown_collection
from state_svc.document_ports import (
    DocumentStore,
    SearchIndex,
)
from state_svc.domain.documents import (
    VECTOR_BYTES,
    ChunkText,
    CollectionState,
    DocumentState,
    Draft,
    Match,
    NewChunk,
    Query,
    records_of,
    unit_vectors,
)
from state_svc.domain.names import (
    check_collection,
    check_document,
    check_request_id,
    check_tenant,
)

CONTENT_BYTES_MAX: Final = 3 << 20
MEDIA_TYPE_CHARS_MAX: Final = 128
LABELS_MAX: Final = 32
LABEL_BYTES_MAX: Final = 256
PAGE_MAX: Final = 100
DELETE_MAX: Final = 100  # documents of one call; each about 1 ms of the store
DELETE_S: Final = 1.0  # of one call, also where the store is slow
DIGITS_MAX: Final = 16  # of a generation
CHUNKS_MAX: Final = 256  # of one call
CHUNKS_BYTES_MAX: Final = 3 << 20  # of one call, with vectors
CHUNK_TEXT_BYTES_MAX: Final = 16 << 10
DOCUMENT_CHUNKS_MAX: Final = 8_192
DIMS_MAX: Final = 4_096
TOP_K_MAX: Final = 100
QUERY_BYTES_MAX: Final = 16 << 10
ATTEMPTS_MAX: Final = 3  # searches whose hits were replaced before they were read
ANSWER_S: Final = 0.1  # of the deadline, kept for the answer after the index is there


class DocumentServicer(documents_pb2_grpc.DocumentServiceServicer):
    """See the proto. ``wait_s_max``: longest wait for an index, for a caller without deadline."""

    def __init__(self, store: DocumentStore, index: SearchIndex, wait_s_max: float) -> None:
        self._store, self._index = store, index
        self._wait_s_max = wait_s_max

    async def PutDocument(
        self, request: documents_pb2.PutDocumentRequest, context: Any
    ) -> documents_pb2.PutDocumentResponse:
        """Stores a new generation."""
        _check_place(request)
        check_request_id(request.request_id, "request_id")
        if len(request.content) > CONTENT_BYTES_MAX:
            raise invalid("content", f"at most {CONTENT_BYTES_MAX} bytes")
        if not 1 <= len(request.media_type) <= MEDIA_TYPE_CHARS_MAX:
            raise invalid("media_type", f"must be 1 to {MEDIA_TYPE_CHARS_MAX} characters")
        labels = _checked_labels(request.labels)
        digest = await asyncio.to_thread(_digest, request, labels)
        draft = Draft(request.content, request.media_type, labels, digest)
        with document_errors():
            state = await self._store.put(
                request.tenant, request.collection, request.document_id, draft, request.request_id
            )
        return documents_pb2.PutDocumentResponse(document=_document(request.collection, state))

    async def GetDocument(
        self, request: documents_pb2.GetDocumentRequest, context: Any
    ) -> documents_pb2.GetDocumentResponse:
        """Reads a document."""
        _check_place(request)
        with document_errors():
            found = await self._store.get(
                request.tenant,
                request.collection,
                request.document_id,
                with_content=request.with_content,
            )
        if found is None:
            raise unknown()
        return documents_pb2.GetDocumentResponse(
            document=_document(request.collection, found[0]),
            content=found[1],
        )

    async def ListDocuments(
        self, request: documents_pb2.ListDocumentsRequest, context: Any
    ) -> documents_pb2.ListDocumentsResponse:
        """Lists a collection."""
        check_tenant(request.tenant, "tenant")
        check_collection(request.collection, "collection")
        if not 1 <= request.page_size <= PAGE_MAX:
            raise invalid("page_size", f"must be 1 to {PAGE_MAX}")
        after = _from_token(request.page_token)
        with document_errors():
            states, last = await self._store.list(
                request.tenant, request.collection, after, request.page_size
            )
        if not states and not last and not after:
            raise unknown_collection()
        return documents_pb2.ListDocumentsResponse(
            documents=[_document(request.collection, state) for state in states],
            next_page_token=_to_token(last),
        )

    async def DeleteDocument(
        self, request: documents_pb2.DeleteDocumentRequest, context: Any
    ) -> documents_pb2.DeleteDocumentResponse:
        """Deletes a document."""
        _check_place(request)
        with document_errors():
            if not await self._store.delete(
                request.tenant, request.collection, request.document_id
            ):
                raise unknown()
        return documents_pb2.DeleteDocumentResponse()

    async def ListCollections(
        self, request: documents_pb2.ListCollectionsRequest, context: Any
    ) -> documents_pb2.ListCollectionsResponse:
        """Lists collections."""
        check_tenant(request.tenant, "tenant")
        if not 1 <= request.page_size <= PAGE_MAX:
            raise invalid("page_size", f"must be 1 to {PAGE_MAX}")
        after = _from_token(request.page_token)
        with document_errors():
            states, last = await self._store.collections(request.tenant, after, request.page_size)
        return documents_pb2.ListCollectionsResponse(
            collections=map(_collection, states), next_page_token=_to_token(last)
        )

    async def DeleteCollection(
        self, request: documents_pb2.DeleteCollectionRequest, context: Any
    ) -> documents_pb2.DeleteCollectionResponse:
        """Deletes some documents. The token holds how far it came and the newest generation at the
        first call. Nothing of it is kept here: whoever dies on the way leaves whole documents,
        and the same call again deletes them. An ingest in progress finds its document gone."""
        check_tenant(request.tenant, "tenant")
        check_collection(request.collection, "collection")
        told = _from_token(request.page_token)
        with document_errors():
            if told:
                until, after = _progress(told)
            else:
                until, after = await self._store.newest(request.tenant), ""
            states, last = await self._store.list(
                request.tenant, request.collection, after, DELETE_MAX
            )
            if not states and not last and not told:
                raise unknown_collection()
            deleted, end_s = 0, asyncio.get_running_loop().time() + DELETE_S
            for state in states:
                deleted += await self._store.delete(
                    request.tenant, request.collection, state.document_id, until
                )
                if asyncio.get_running_loop().time() > end_s:
                    last = state.document_id
                    break
        return documents_pb2.DeleteCollectionResponse(
            deleted=deleted, next_page_token=_to_token(f"{until} {last}" if last else "")
        )

    async def StoreChunks(
        self, request: documents_pb2.StoreChunksRequest, context: Any
    ) -> documents_pb2.StoreChunksResponse:
        """Stores chunks; with the last ones the generation goes live."""
        _check_place(request)
        dims = _checked_chunks(request.chunks)
        if request.complete and request.chunk_count > DOCUMENT_CHUNKS_MAX:
            raise invalid("chunk_count", f"at most {DOCUMENT_CHUNKS_MAX}")
        chunks = await asyncio.to_thread(_new_chunks, request.chunks)
        with document_errors():
            state = await self._store.store(
                request.tenant,
                request.collection,
                request.document_id,
                request.generation,
                chunks,
                dims,
                request.chunk_count if request.complete else None,
            )
        return documents_pb2.StoreChunksResponse(document=_document(request.collection, state))

    async def AbandonGeneration(
        self, request: documents_pb2.AbandonGenerationRequest, context: Any
    ) -> documents_pb2.AbandonGenerationResponse:
        """Gives a generation up."""
        _check_place(request)
        with document_errors():
            await self._store.abandon(
                request.tenant, request.collection, request.document_id, request.generation
            )
        return documents_pb2.AbandonGenerationResponse()

    async def SearchChunks(
        self, request: documents_pb2.SearchChunksRequest, context: Any
    ) -> documents_pb2.SearchChunksResponse:
        """Searches."""
        query = _checked_query(request)
        with document_errors():
            for attempt in range(1, ATTEMPTS_MAX + 1):
                matches = await self._index.search(
                    request.tenant, request.collection, query, self._wait_s()
                )
                places = [(match.generation, match.number) for match in matches]
                shown = await self._store.shown(request.tenant, places) if places else []
                if None not in shown or attempt == ATTEMPTS_MAX:
                    break
        return documents_pb2.SearchChunksResponse(
            hits=[
                _hit(match, text)
                for match, text in zip(matches, shown, strict=True)
                if text is not None
            ]
        )

    def _wait_s(self) -> float:
        """Of the time that the caller has, what the index may take."""
        ends = deadline.current()
        if ends is None:
            return self._wait_s_max
        remaining = ends.remaining(asyncio.get_running_loop().time())
        return min(max(remaining - ANSWER_S, 0.0), self._wait_s_max)


def _check_place(request: Any) -> None:
    check_tenant(request.tenant, "tenant")
    check_collection(request.collection, "collection")
    check_document(request.document_id, "document_id")


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > LABELS_MAX:
        raise invalid("labels", f"at most {LABELS_MAX}")
    for name, value in labels.items():
        if not name or max(len(name.encode()), len(value.encode())) > LABEL_BYTES_MAX:
            raise invalid(
                "labels", f"names are 1 to {LABEL_BYTES_MAX} bytes, values at most as many"
            )
    return dict(labels)


def _checked_chunks(chunks: Sequence[documents_pb2.Chunk]) -> int:
    """The dimensions of the vectors; 0 without chunks."""
    if len(chunks) > CHUNKS_MAX:
        raise invalid("chunks", f"at most {CHUNKS_MAX}")
    if sum(len(chunk.vector) + len(chunk.text.encode()) for chunk in chunks) > CHUNKS_BYTES_MAX:
        raise invalid("chunks", f"at most {CHUNKS_BYTES_MAX} bytes together")
    if len({chunk.number for chunk in chunks}) < len(chunks):
        raise invalid("chunks", "a number occurs twice")
    for at, chunk in enumerate(chunks):
        where = f"chunks[{at}]"
        if chunk.number >= DOCUMENT_CHUNKS_MAX:
            raise invalid(f"{where}.number", f"must be below {DOCUMENT_CHUNKS_MAX}")
        if len(chunk.text.encode()) > CHUNK_TEXT_BYTES_MAX:
            raise invalid(f"{where}.text", f"at most {CHUNK_TEXT_BYTES_MAX} bytes")
        if not chunk.begin_byte <= chunk.end_byte <= CONTENT_BYTES_MAX:
            raise invalid(f"{where}.end_byte", f"must be begin_byte to {CONTENT_BYTES_MAX}")
        _check_vector(chunk.vector, f"{where}.vector")
        if len(chunk.vector) != len(chunks[0].vector):
            raise invalid(f"{where}.vector", "has another length than the first")
    return len(chunks[0].vector) // VECTOR_BYTES if chunks else 0


def _check_vector(vector: bytes, field: str) -> None:
    dims, rest = divmod(len(vector), VECTOR_BYTES)
    if rest or not 1 <= dims <= DIMS_MAX:
        raise invalid(field, f"must be 1 to {DIMS_MAX} float32")


def _new_chunks(chunks: Sequence[documents_pb2.Chunk]) -> list[NewChunk]:
    if not chunks:
        return []
    try:
        records = records_of([c.text for c in chunks], [c.vector for c in chunks])
    except ValueError as error:
        raise invalid(f"chunks[{error.args[0]}].vector", "is zero or not finite") from error
    return [
        NewChunk(chunk.number, ChunkText(chunk.text, chunk.begin_byte, chunk.end_byte), record)
        for chunk, record in zip(chunks, records, strict=True)
    ]


def _checked_query(request: documents_pb2.SearchChunksRequest) -> Query:
    check_tenant(request.tenant, "tenant")
    check_collection(request.collection, "collection")
    if not 1 <= request.top_k <= TOP_K_MAX:
        raise invalid("top_k", f"must be 1 to {TOP_K_MAX}")
    if len(request.query.encode()) > QUERY_BYTES_MAX:
        raise invalid("query", f"at most {QUERY_BYTES_MAX} bytes")
    if not request.query and not request.vector:
        raise invalid("query", "words or a vector are needed")
    vector: NDArray[np.float32] | None = None
    if request.vector:
        _check_vector(request.vector, "vector")
        try:
            (vector,) = unit_vectors(np.frombuffer(request.vector, dtype="<f4").reshape(1, -1))
        except ValueError as error:
            raise invalid("vector", "is zero or not finite") from error
    return Query(request.top_k, request.query, vector, _checked_labels(request.labels))


def _digest(request: documents_pb2.PutDocumentRequest, labels: Mapping[str, str]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    named = [part for name in sorted(labels) for part in (name, labels[name])]
    parts = [request.collection, request.document_id, request.media_type, *named]
    for part in [*(part.encode() for part in parts), request.content]:
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


def _to_token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _progress(told: str) -> tuple[int, str]:
    """Of a token of DeleteCollection: the last generation that goes, the last document done."""
    until, _, after = told.partition(" ")
    if not (until.isascii() and until.isdecimal() and len(until) <= DIGITS_MAX and after):
        raise _no_token()
    return int(until), after


def _no_token() -> SluiceError:
    return invalid("page_token", "is none of a previous response")


def _from_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):  # a UnicodeDecodeError is one
        raise _no_token() from None


def _document(collection: str, state: DocumentState) -> documents_pb2.StoredDocument:
    update_time = Timestamp()
    update_time.FromMilliseconds(state.update_ms)
    return documents_pb2.StoredDocument(
        collection=collection,
        document_id=state.document_id,
        generation=state.generation,
        size_bytes=state.size_bytes,
        chunk_count=state.chunk_count,
        ready=state.ready,
        media_type=state.media_type,
        labels=state.labels,
        update_time=update_time,
    )


def _collection(state: CollectionState) -> documents_pb2.StoredCollection:
    return documents_pb2.StoredCollection(
        collection=state.name,
        document_count=state.document_count,
        chunk_count=state.chunk_count,
        chunk_bytes=state.chunk_bytes,
    )


def _hit(match: Match, text: ChunkText) -> documents_pb2.ChunkHit:
    return documents_pb2.ChunkHit(
        document_id=match.document_id,
        chunk=documents_pb2.Chunk(
            number=match.number,
            text=text.text,
            begin_byte=text.begin_byte,
            end_byte=text.end_byte,
        ),
        score=match.score,
        vector_score=match.vector_score,
        term_score=match.term_score,
    )
