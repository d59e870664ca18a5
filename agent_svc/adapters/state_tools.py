"""What tools need of the state service: registered declarations, blobs, search in documents.

Clients over one channel, which the caller owns. Each call has a deadline; failures are the
SluiceErrors that the service sent, or UNAVAILABLE and DEADLINE_EXCEEDED of the way to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc.aio

from agent_svc.ports import ChunkFound
from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.state.v1 import documents_pb2, tools_pb2, values_pb2
from sluice.state.v1.documents_pb2_grpc import DocumentServiceStub
from sluice.state.v1.tools_pb2_grpc import ToolServiceStub
from sluice.state.v1.values_pb2_grpc import BlobServiceStub
from sluice.status import from_rpc_error

CALL_S: Final = 5.0  # the longest call of the state service


class StateTools:
    """A RegisteredTools, a Blobs and a ChunkSearch of the ports."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._tools: Any = ToolServiceStub(channel)
        self._blobs: Any = BlobServiceStub(channel)
        self._documents: Any = DocumentServiceStub(channel)

    async def registered(self, tenant: str) -> Sequence[ToolDeclaration]:
        """See RegisteredTools."""
        request = tools_pb2.ListToolsRequest(tenant=tenant)
        return list((await _call(self._tools.ListTools, request, CALL_S)).tools)

    async def put(
        self, tenant: str, owner: str, name: str, content: bytes, *, deadline_s: float
    ) -> None:
        """See Blobs."""
        request = values_pb2.PutBlobRequest(tenant=tenant, owner=owner, name=name, content=content)
        await _call(self._blobs.PutBlob, request, deadline_s)

    async def search(
        self,
        tenant: str,
        collection: str,
        query: str,
        vector: bytes,
        top_k: int,
        *,
        deadline_s: float,
    ) -> Sequence[ChunkFound]:
        """See ChunkSearch."""
        request = documents_pb2.SearchChunksRequest(
            tenant=tenant, collection=collection, query=query, vector=vector, top_k=top_k
        )
        response = await _call(self._documents.SearchChunks, request, deadline_s)
        return [
            ChunkFound(
                hit.document_id,
                hit.chunk.begin_byte,
                hit.chunk.end_byte,
                hit.chunk.text,
                hit.score,
                hit.vector_score,
            )
            for hit in response.hits
        ]


async def _call(method: Any, request: Any, deadline_s: float) -> Any:
    try:
        return await method(request, timeout=min(deadline_s, CALL_S))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
