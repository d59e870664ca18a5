"""Documents at the public service: authorized here, kept and searched by the state service.

A document that is put is stored first; a durable run in class batch then makes it searchable. It is
the same run however often the request is repeated, also when this process died in between. A search
embeds its question through this scheduler's own gate, as an Embed of the tenant, and searches then:
see docs/adr/0009-a-search-embeds-through-the-gate.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, Final

import grpc.aio

from scheduler_svc.adapters.identity import Identity, remaining_s, request_id
from scheduler_svc.adapters.requests import check_page_token, page_size, request_id_of
from scheduler_svc.adapters.run_store import NewRun
from scheduler_svc.adapters.runs_api import RunParts
from scheduler_svc.adapters.serving import Caller
from scheduler_svc.adapters.state_calls import answered, not_configured, time_limit_s
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.domain.agent_gate import GateReason
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.domain.run_budget import RunLimits
from sluice.errors import FieldViolation, SluiceError, invalid
from sluice.scheduler.v1 import data_pb2, generate_pb2, scheduler_pb2_grpc, spec_pb2
from sluice.state.v1 import documents_pb2, documents_pb2_grpc

COLLECTION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
DOCUMENT_ID_BYTES_MAX: Final = 256
CONTENT_BYTES_MAX: Final = 3 << 20
MEDIA_TYPES: Final = ("text/plain", "text/markdown", "text/html")
LABELS_MAX: Final = 32
LABEL_BYTES_MAX: Final = 256
QUERY_BYTES_MAX: Final = 16 << 10
TOP_K_DEFAULT: Final = 5
TOP_K_MAX: Final = 100
INGEST_LIMITS: Final = RunLimits(
    steps_max=100_000, tokens_max=2**40, tool_calls_max=0, wall_time_s=86_400.0, cost_max=1e9
)
"""Of an ingest run: its work is bounded by the size of a document."""

Context = grpc.aio.ServicerContext[Any, Any]


class DocumentsApi(scheduler_pb2_grpc.SchedulerServiceServicer):
    """See the module's docstring. ``channel``: to the state service; ``None``: there is none."""

    def __init__(
        self, parts: RunParts, identity: Identity, channel: grpc.aio.Channel | None
    ) -> None:
        self._parts = parts
        self._identity = identity
        self._stub: Any = (
            None if channel is None else documents_pb2_grpc.DocumentServiceStub(channel)
        )

    async def PutDocument(
        self, request: data_pb2.PutDocumentRequest, context: Context
    ) -> data_pb2.PutDocumentResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        request.request_id = request_id_of(request.request_id)
        _check_place(request.collection, request.document_id)
        _check_new(request.document_id)
        content = _content(request)
        _check_labels(request.labels)
        model = self._embedding_model(tenant)
        stored = await self._stored(request, content, tenant)
        assert self._parts.store is not None
        new = NewRun(
            tenant=tenant.name,
            request_id=f"ingest:{request.request_id}",
            priority_class=PriorityClass.BATCH,
            models=(model,),
            gate_reason=GateReason.NOT_ASKED.value,
            budget=INGEST_LIMITS,
        )
        ingest = spec_pb2.IngestTask(
            collection=request.collection,
            document_id=request.document_id,
            generation=stored.generation,
            embedding_model=model,
        )
        run = await self._parts.store.create_ingest(new, ingest)
        self._parts.link.nudge(tenant.name, run.run_id)
        return data_pb2.PutDocumentResponse(document=_shown(stored), run_id=run.run_id)

    async def GetDocument(
        self, request: data_pb2.GetDocumentRequest, context: Context
    ) -> data_pb2.GetDocumentResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        _check_place(request.collection, request.document_id)
        message = documents_pb2.GetDocumentRequest(
            tenant=tenant.name,
            collection=request.collection,
            document_id=request.document_id,
            with_content=request.with_content,
        )
        found = await answered(self._stub.GetDocument(message, timeout=time_limit_s()))
        return data_pb2.GetDocumentResponse(document=_shown(found.document), content=found.content)

    async def ListDocuments(
        self, request: data_pb2.ListDocumentsRequest, context: Context
    ) -> data_pb2.ListDocumentsResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        _check_collection(request.collection)
        check_page_token(request.page_token)
        message = documents_pb2.ListDocumentsRequest(
            tenant=tenant.name,
            collection=request.collection,
            page_size=page_size(request.page_size),
            page_token=request.page_token,
        )
        found = await answered(self._stub.ListDocuments(message, timeout=time_limit_s()))
        return data_pb2.ListDocumentsResponse(
            documents=map(_shown, found.documents), next_page_token=found.next_page_token
        )

    async def DeleteDocument(
        self, request: data_pb2.DeleteDocumentRequest, context: Context
    ) -> data_pb2.DeleteDocumentResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        _check_place(request.collection, request.document_id)
        message = documents_pb2.DeleteDocumentRequest(
            tenant=tenant.name, collection=request.collection, document_id=request.document_id
        )
        await answered(self._stub.DeleteDocument(message, timeout=time_limit_s()))
        return data_pb2.DeleteDocumentResponse()

    async def ListCollections(
        self, request: data_pb2.ListCollectionsRequest, context: Context
    ) -> data_pb2.ListCollectionsResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        check_page_token(request.page_token)
        message = documents_pb2.ListCollectionsRequest(
            tenant=tenant.name,
            page_size=page_size(request.page_size),
            page_token=request.page_token,
        )
        found = await answered(self._stub.ListCollections(message, timeout=time_limit_s()))
        return data_pb2.ListCollectionsResponse(
            collections=map(_collection, found.collections), next_page_token=found.next_page_token
        )

    async def DeleteCollection(
        self, request: data_pb2.DeleteCollectionRequest, context: Context
    ) -> data_pb2.DeleteCollectionResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        _check_collection(request.collection)
        check_page_token(request.page_token)
        message = documents_pb2.DeleteCollectionRequest(
            tenant=tenant.name, collection=request.collection, page_token=request.page_token
        )
        done = await answered(self._stub.DeleteCollection(message, timeout=time_limit_s()))
        return data_pb2.DeleteCollectionResponse(
            deleted=done.deleted, next_page_token=done.next_page_token
        )

    async def SearchDocuments(
        self, request: data_pb2.SearchDocumentsRequest, context: Context
    ) -> data_pb2.SearchDocumentsResponse:
        """See scheduler.proto."""
        tenant = self._tenant(context)
        _check_collection(request.collection)
        if not request.query:
            raise invalid("query", "must not be empty")
        if len(request.query.encode()) > QUERY_BYTES_MAX:
            raise invalid("query", f"at most {QUERY_BYTES_MAX} bytes are allowed")
        if request.top_k > TOP_K_MAX:
            raise invalid("top_k", f"must be 1 to {TOP_K_MAX}")
        _check_labels(request.labels)
        message = documents_pb2.SearchChunksRequest(
            tenant=tenant.name,
            collection=request.collection,
            query=request.query,
            vector=await self._embedded(request.query, tenant, context),
            top_k=request.top_k or TOP_K_DEFAULT,
            labels=request.labels,
        )
        found = await answered(self._stub.SearchChunks(message, timeout=time_limit_s()))
        return data_pb2.SearchDocumentsResponse(hits=map(_hit, found.hits))

    def _embedding_model(self, tenant: Tenant) -> str:
        """The deployment's. Raises as the catalog, without a field: a document names no model."""
        try:
            return self._parts.catalog.resolve("", tenant, embeds=True)
        except SluiceError as error:
            error.fields = ()
            raise

    async def _stored(
        self, request: data_pb2.PutDocumentRequest, content: bytes, tenant: Tenant
    ) -> documents_pb2.StoredDocument:
        message = documents_pb2.PutDocumentRequest(
            tenant=tenant.name,
            collection=request.collection,
            document_id=request.document_id,
            content=content,
            media_type=request.media_type,
            labels=request.labels,
            request_id=request.request_id,
        )
        done = await answered(self._stub.PutDocument(message, timeout=time_limit_s()))
        stored: documents_pb2.StoredDocument = done.document
        return stored

    async def _embedded(self, query: str, tenant: Tenant, context: Context) -> bytes:
        """The question's vector, as the state service takes it."""
        caller = Caller(tenant, request_id(context), tenant.class_for(None), remaining_s(context))
        request = generate_pb2.EmbedRequest(texts=[query])
        try:
            answer = await self._parts.serving.embed(request, caller)
        except SluiceError as error:
            raise _in_a_searchs_words(error) from None
        values = answer.embeddings[0].values
        return struct.pack(f"<{len(values)}f", *values)

    def _tenant(self, context: Context) -> Tenant:
        tenant = self._identity.tenant(context)
        if self._stub is None:
            raise not_configured()
        return tenant


def _in_a_searchs_words(error: SluiceError) -> SluiceError:
    """The same error, with the field that a search calls ``query``, and without those that it has
    not: its model is the deployment's."""
    texts = [one for one in error.fields if one.field.startswith("texts")]
    error.fields = tuple(FieldViolation("query", one.description) for one in texts)
    if texts:
        error.message = f"query: {texts[0].description}"
    return error


def _check_collection(name: str) -> None:
    if not COLLECTION.fullmatch(name):
        raise invalid("collection", "must be 1 to 64 of A-Z, a-z, 0-9, _ and -")


def _check_place(collection: str, document_id: str) -> None:
    _check_collection(collection)
    if not 1 <= len(document_id.encode()) <= DOCUMENT_ID_BYTES_MAX:
        raise invalid("document_id", f"must be 1 to {DOCUMENT_ID_BYTES_MAX} bytes")


def _check_new(document_id: str) -> None:
    """Refuses what a URL's path cannot say: on its way it would become another identifier."""
    segments = document_id.split("/")
    if "\\" in document_id or not segments[-1] or not {".", ".."}.isdisjoint(segments):
        raise invalid(
            "document_id",
            "must not hold a backslash, end with a slash, or have . or .. for a part between"
            " slashes: over HTTP it would be another document",
        )


def _content(request: data_pb2.PutDocumentRequest) -> bytes:
    """The document, in UTF-8. Raises INVALID_ARGUMENT."""
    if request.media_type not in MEDIA_TYPES:
        raise invalid("media_type", f"must be one of {', '.join(MEDIA_TYPES)}")
    if bool(request.content) == bool(request.text):
        raise invalid("content", "exactly one of content (over JSON base64) and text is needed")
    content = request.content or request.text.encode()
    if len(content) > CONTENT_BYTES_MAX:
        field = "content" if request.content else "text"
        raise invalid(field, f"must be 1 to {CONTENT_BYTES_MAX} bytes")
    try:
        content.decode()
    except UnicodeDecodeError:
        raise invalid(
            "content", "must be UTF-8; over JSON it is base64: `text` takes words as they are"
        ) from None
    return content


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        raise invalid("labels", f"at most {LABELS_MAX} are allowed")
    for name, value in labels.items():
        if not name or max(len(name.encode()), len(value.encode())) > LABEL_BYTES_MAX:
            raise invalid("labels", f"names and values have at most {LABEL_BYTES_MAX} bytes")


def _shown(stored: documents_pb2.StoredDocument) -> data_pb2.Document:
    document = data_pb2.Document(
        collection=stored.collection,
        document_id=stored.document_id,
        size_bytes=stored.size_bytes,
        chunk_count=stored.chunk_count,
        ready=stored.ready,
        labels=stored.labels,
        media_type=stored.media_type,
    )
    if stored.HasField("update_time"):
        document.update_time.CopyFrom(stored.update_time)
    return document


def _collection(stored: documents_pb2.StoredCollection) -> data_pb2.Collection:
    return data_pb2.Collection(
        collection=stored.collection,
        document_count=stored.document_count,
        chunk_count=stored.chunk_count,
        chunk_bytes=stored.chunk_bytes,
    )


def _hit(hit: documents_pb2.ChunkHit) -> data_pb2.SearchHit:
    return data_pb2.SearchHit(
        document_id=hit.document_id,
        chunk=hit.chunk.number,
        text=hit.chunk.text,
        score=hit.score,
        vector_score=hit.vector_score,
        term_score=hit.term_score,
        begin_byte=hit.chunk.begin_byte,
        end_byte=hit.chunk.end_byte,
    )
