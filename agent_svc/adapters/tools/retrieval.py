"""Search in the tenant's documents.

Embeds the question under the run's credential and searches by vector and by words; where nothing
embeds (no model, or it refuses now), by words alone, and the answer says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ChunkFound, ChunkSearch, ToolContext, ToolError, ToolResult
from sluice.errors import Code, SluiceError

QUERY_CHARS_MAX: Final = 2048
LOADING_S: Final = 10.0  # waited for a collection that is being read into memory
LOADING_POLL_S: Final = 0.2  # where its refusal says no delay

PARAMETERS = {
    "type": "object",
    "properties": {
        "query": {
            "type": "string",
            "minLength": 1,
            "maxLength": QUERY_CHARS_MAX,  # no description: a small model would copy it
        }
    },
    "required": ["query"],
    "additionalProperties": False,
}


class RetrievalTool:
    """See Tool. The tenant is that of the call, never an argument."""

    def __init__(self, info: ToolInfo, search: ChunkSearch, collection: str, top_k: int) -> None:
        self._info = info
        self._search = search
        self._collection = collection
        self._top_k = top_k

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        query = str(arguments.get("query", ""))
        try:
            vector = await self._vector(query, context)
            hits = await self._found(query, vector, context)
        except SluiceError as error:
            raise _failure(error) from None
        answer = {
            "hits": [
                {
                    "document_id": hit.document_id,
                    "begin_byte": hit.begin_byte,
                    "end_byte": hit.end_byte,
                    "score": round(hit.score, 4),
                    "vector_score": round(hit.vector_score, 4),
                    "text": hit.text,
                }
                for hit in hits
            ],
            "by": "vector and words" if vector else "words",
        }
        return ToolResult(json.dumps(answer, ensure_ascii=False))

    async def _found(self, query: str, vector: bytes, context: ToolContext) -> Sequence[ChunkFound]:
        loop = asyncio.get_running_loop()
        end = loop.time() + min(LOADING_S, context.deadline_s)
        while True:
            try:
                return await self._search.search(
                    context.tenant,
                    self._collection,
                    query,
                    vector,
                    self._top_k,
                    deadline_s=context.deadline_s,
                )
            except SluiceError as error:
                if error.reason == "COLLECTION_UNKNOWN":  # of this tenant: nothing was put yet
                    return []
                pause_s = error.retry_after_s or LOADING_POLL_S
                if error.reason != "INDEX_LOADING" or loop.time() + pause_s > end:
                    raise
            await asyncio.sleep(pause_s)

    async def _vector(self, query: str, context: ToolContext) -> bytes:
        if context.embed is None:
            return b""
        try:
            return bytes((await context.embed([query], context.deadline_s))[0])
        except SluiceError as error:
            if error.code in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):  # no model embeds here
                return b""
            raise


def _failure(error: SluiceError) -> ToolError:
    if error.code is Code.DEADLINE_EXCEEDED:
        return ToolError("TOOL_TIMEOUT", "The search took too long.", made=True)
    if error.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED):
        return ToolError("TOOL_LOST", "Documents cannot be searched now.", made=True)
    return ToolError("TOOL_REFUSED", "The search was refused.", made=False)
