"""The ingest of a document, from its claim to its end or to the next who holds it.

Parse and chunk once per claim, then batch by batch: embed in class batch, store, say so. Between
two batches the run may be cancelled, handed over or put off. For one event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_svc.adapters.held_run import HeldRun, InterruptedRunError
from agent_svc.adapters.journal import Journal
from agent_svc.adapters.model_step import CONTEXT_REASONS
from agent_svc.domain.ending import Finish, Pause, Rules, after_refusal, failed
from agent_svc.domain.history import request_id
from agent_svc.domain.ingest import StoreBatch, next_batch, stored
from agent_svc.domain.model import End, Ended, Progress
from agent_svc.run_ports import Chunks, Documents, IngestSpec, Model, TextChunk, VectorChunk
from sluice import logs
from sluice.errors import Code, SluiceError
from sluice.fault_points import fault_point

log = logs.get(__name__)


class IngestRun:
    """See the module's docstring. ``batch``: chunks of one call."""

    def __init__(
        self,
        held: HeldRun,
        journal: Journal,
        spec: IngestSpec,
        documents: Documents,
        model: Model,
        chunks_of: Chunks,
        *,
        batch: int,
        rules: Rules,
    ) -> None:
        self._held = held
        self._journal = journal
        self._spec = spec
        self._documents = documents
        self._model = model
        self._chunks_of = chunks_of
        self._batch = batch
        self._rules = rules
        self._chunks: Sequence[TextChunk] | None = None

    async def run(self) -> Ended | None:
        """Works until the run is given back; its end, if it came. Raises SluiceError LEASE_LOST,
        or what the state service refuses."""
        journal = self._journal
        while True:
            action = next_batch(
                journal.bounds,
                journal.history,
                journal.now_s(),
                is_cancelled=self._held.cancelled,
            )
            if not isinstance(action, StoreBatch):
                return await self._leave(action)
            if self._held.draining:
                await journal.hand_over()
                return None
            left = await self._step(action)
            if left is not None:
                return await self._leave(left)

    async def _leave(self, left: Pause | Finish) -> Ended | None:
        """Pauses or finishes. When the document will not be searchable, what was stored of it goes:
        after the end, which only the holder of the lease can store. A process that dies between
        the two leaves it until the document is put again or deleted."""
        ended = await self._journal.leave(left)
        if ended is not None and ended.end is not End.SUCCEEDED:
            try:
                await self._documents.abandon(self._held.lease.tenant, self._spec)
            except SluiceError as error:
                log.warning("chunks of a document are left", reason=error.reason)
        return ended

    async def _step(self, action: StoreBatch) -> Pause | Finish | None:
        journal = self._journal
        await journal.store()
        try:
            await self._held.until_valid()
            progress = await self._held.effect(self._store_batch(action))
        except InterruptedRunError:
            return None
        except SluiceError as error:
            if error.code is Code.ABORTED or error.reason == "DOCUMENT_UNKNOWN":
                return failed(journal.bounds, journal.history, _replaced())
            return after_refusal(
                journal.bounds,
                journal.history,
                error,
                journal.now_s(),
                spread=random.random(),
                rules=self._rules,
            )
        journal.add(progress)
        return None

    async def _store_batch(self, action: StoreBatch) -> Progress:
        chunks = await self._all_chunks()
        batch = chunks[action.first : action.first + self._batch]
        done, total = action.first + len(batch), len(chunks)
        vectors: Sequence[bytes] = ()
        if batch:
            vectors = await self._vectors([chunk.text for chunk in batch], action)
        fault_point("agent.before_store_chunks")
        await self._documents.store(
            self._held.lease.tenant,
            self._spec,
            [
                VectorChunk(one.number, one.text, one.begin_byte, one.end_byte, vector)
                for one, vector in zip(batch, vectors, strict=True)
            ],
            total if done >= total else None,
        )
        fault_point("agent.after_store_chunks")
        return stored(done, total)

    async def _vectors(self, texts: Sequence[str], action: StoreBatch) -> Sequence[bytes]:
        """A vector for each text. One that the model's context does not hold gets that of its
        beginning; a refused batch is halved to find it."""
        try:
            return await self._model.embed(
                texts,
                request_id=request_id(self._held.lease.run_id, action.first),
                deadline_s=action.deadline_s,
            )
        except SluiceError as error:
            if error.reason not in CONTEXT_REASONS or (len(texts) == 1 and len(texts[0]) < 2):
                raise
        if len(texts) == 1:
            return await self._vectors([texts[0][: len(texts[0]) // 2]], action)
        half = len(texts) // 2
        first = await self._vectors(texts[:half], action)
        return [*first, *await self._vectors(texts[half:], action)]

    async def _all_chunks(self) -> Sequence[TextChunk]:
        if self._chunks is None:
            spec = self._spec
            document = await self._documents.content(
                self._held.lease.tenant, spec.collection, spec.document_id
            )
            if document.generation != spec.generation:
                raise _replaced()
            self._chunks = await self._chunks_of(
                self._held.lease.tenant, document.content, document.media_type
            )
        return self._chunks


def _replaced() -> SluiceError:
    return SluiceError(
        Code.ABORTED, "GENERATION_REPLACED", "The document was replaced or deleted meanwhile."
    )
