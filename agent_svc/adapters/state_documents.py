"""Documents in the state service: the port Documents. Stateless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio

from agent_svc.adapters.state_calls import answered
from agent_svc.run_ports import DocumentContent, IngestSpec, VectorChunk
from sluice.state.v1 import documents_pb2, documents_pb2_grpc


class StateDocuments:
    """See the module's docstring. ``timeout_s``: of every call."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub: Any = documents_pb2_grpc.DocumentServiceStub(channel)
        self._timeout_s = timeout_s

    async def content(self, tenant: str, collection: str, document_id: str) -> DocumentContent:
        """See :class:`agent_svc.run_ports.Documents`."""
        request = documents_pb2.GetDocumentRequest(
            tenant=tenant, collection=collection, document_id=document_id, with_content=True
        )
        found = await answered(self._stub.GetDocument(request, timeout=self._timeout_s))
        return DocumentContent(found.content, found.document.media_type, found.document.generation)

    async def store(
        self, tenant: str, spec: IngestSpec, chunks: Sequence[VectorChunk], total: int | None
    ) -> None:
        """See :class:`agent_svc.run_ports.Documents`."""
        request = documents_pb2.StoreChunksRequest(
            tenant=tenant,
            collection=spec.collection,
            document_id=spec.document_id,
            generation=spec.generation,
            complete=total is not None,
            chunk_count=total or 0,
            chunks=[
                documents_pb2.Chunk(
                    number=one.number,
                    text=one.text,
                    begin_byte=one.begin_byte,
                    end_byte=one.end_byte,
                    vector=one.vector,
                )
                for one in chunks
            ],
        )
        await answered(self._stub.StoreChunks(request, timeout=self._timeout_s))

    async def abandon(self, tenant: str, spec: IngestSpec) -> None:
        """See :class:`agent_svc.run_ports.Documents`."""
        request = documents_pb2.AbandonGenerationRequest(
            tenant=tenant,
            collection=spec.collection,
            document_id=spec.document_id,
            generation=spec.generation,
        )
        await answered(self._stub.AbandonGeneration(request, timeout=self._timeout_s))
