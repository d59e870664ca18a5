"""``make bench-recall DATASET=FOLDER``: how many of the passages that answer a question are found.

Recall@5 on HotpotQA: of the passages that hold a question's supporting facts (two for most), the
share that is among the five documents found first. Each passage is a document of its own, under
its title; chunks are those of ingest, vectors those of all-MiniLM-L6-v2 on real vLLM through the
mesh's public Embed, searches those of the mesh's state service: by words and vector, by words
alone, by vector alone.

FOLDER holds ``hotpotqa_train.json`` (questions) and ``hotpotqa_train_corpus.json`` (passages by
title, as lists of sentences), as in the repository of HippoRAG.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from agent_svc.domain.chunking import Block, Chunk, chunk
from bench.harness import ROOT, Mesh, mesh, table, write_results
from sluice.channels import open_channel
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.state.v1 import documents_pb2
from sluice.state.v1.documents_pb2_grpc import DocumentServiceStub

K = 5
CHUNKS_LOOKED_AT = 25  # several of a document count once
TEXTS_AT_ONCE = 64
COLLECTION = "hotpotqa"
TENANT = "dev"
CALL_S = 120.0
MODES = ("hybrid", "words", "vector")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the documents that answer it."""

    text: str
    gold: frozenset[str]


def load(folder: Path) -> tuple[list[Question], dict[str, list[Chunk]]]:
    """The questions, and the chunks of each passage by its title."""
    asked = json.loads((folder / "hotpotqa_train.json").read_text(encoding="utf-8"))
    corpus = json.loads((folder / "hotpotqa_train_corpus.json").read_text(encoding="utf-8"))
    questions = [
        Question(one["question"], frozenset(title for title, _ in one["supporting_facts"]))
        for one in asked
    ]
    return questions, {title: chunks_of(title, "".join(text)) for title, text in corpus.items()}


def chunks_of(title: str, text: str) -> list[Chunk]:
    """A passage as ingest cuts it, its title the heading."""
    heading = len(title.encode())
    body = Block(text, heading + 1, heading + 1 + len(text.encode()))
    return chunk([Block(title, 0, heading, 1), body])


def recall(found: Iterable[Sequence[str]], questions: Sequence[Question], k: int = K) -> float:
    """Mean share of a question's documents among its first ``k`` different ones found."""
    shares = [
        len(question.gold & set(list(dict.fromkeys(documents))[:k])) / len(question.gold)
        for documents, question in zip(found, questions, strict=True)
    ]
    return sum(shares) / len(shares)


class Client:
    """Embeds through Envoy, stores and searches at the state service, as the mesh does."""

    def __init__(self, running: Mesh, edge: grpc.aio.Channel, state: grpc.aio.Channel) -> None:
        self._mesh: Any = scheduler_pb2_grpc.SchedulerServiceStub(edge)
        self._documents: Any = DocumentServiceStub(state)
        self._metadata = (("authorization", f"Bearer {running.key}"),)

    async def embed(self, texts: Sequence[str]) -> list[bytes]:
        """A vector for each."""
        vectors: list[bytes] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            request = generate_pb2.EmbedRequest(texts=texts[first : first + TEXTS_AT_ONCE])
            reply = await self._mesh.Embed(request, metadata=self._metadata, timeout=CALL_S)
            assert not reply.simulated
            vectors += [np.array(e.values, dtype="<f4").tobytes() for e in reply.embeddings]
        return vectors

    async def store(self, title: str, chunks: Sequence[Chunk], vectors: Sequence[bytes]) -> None:
        """A passage, complete."""
        place: Any = {"tenant": TENANT, "collection": COLLECTION, "document_id": title}
        put = documents_pb2.PutDocumentRequest(
            **place, media_type="text/plain", request_id=str(uuid.uuid4())
        )
        generation = (await self._documents.PutDocument(put, timeout=CALL_S)).document.generation
        request = documents_pb2.StoreChunksRequest(
            **place, generation=generation, complete=True, chunk_count=len(chunks)
        )
        for one, vector in zip(chunks, vectors, strict=True):
            request.chunks.add(
                number=one.number,
                text=one.text,
                begin_byte=one.begin_byte,
                end_byte=one.end_byte,
                vector=vector,
            )
        await self._documents.StoreChunks(request, timeout=CALL_S)

    async def search(self, mode: str, text: str, vector: bytes) -> list[str]:
        """The documents of the chunks found, best first."""
        request = documents_pb2.SearchChunksRequest(
            tenant=TENANT,
            collection=COLLECTION,
            query="" if mode == "vector" else text,
            vector=b"" if mode == "words" else vector,
            top_k=CHUNKS_LOOKED_AT,
        )
        reply = await self._documents.SearchChunks(request, timeout=CALL_S)
        return [hit.document_id for hit in reply.hits]


async def measured(
    running: Mesh, questions: Sequence[Question], passages: Mapping[str, Sequence[Chunk]]
) -> dict[str, float]:
    """Recall@5 of each way to search."""
    async with (
        open_channel(running.envoy) as edge,
        open_channel(f"127.0.0.1:{50091 + running.port_offset}") as state,
    ):
        client = Client(running, edge, state)
        texts = [one.text for chunks in passages.values() for one in chunks]
        vectors = iter(await client.embed(texts))
        for title, chunks in passages.items():
            await client.store(title, chunks, [next(vectors) for _ in chunks])
        asked = await client.embed([question.text for question in questions])
        figures = {}
        for mode in MODES:
            found = [
                await client.search(mode, question.text, vector)
                for question, vector in zip(questions, asked, strict=True)
            ]
            figures[f"recall_at_5_{mode}"] = recall(found, questions)
    return figures | {"questions": len(questions), "passages": len(passages), "chunks": len(texts)}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", type=Path, help="folder of the questions and passages")
    parser.add_argument("--port-offset", type=int, default=7400)
    arguments = parser.parse_args()
    questions, passages = load(arguments.dataset)
    config = ROOT / "bench" / "profiles" / "recall.toml"
    with (
        tempfile.TemporaryDirectory() as scratch,
        mesh(
            Path(scratch) / "run",
            engine="vllm",
            config=config,
            port_offset=arguments.port_offset,
        ) as running,
    ):
        figures = asyncio.run(measured(running, questions, passages))
    rows = [["search", "Recall@5"]]
    rows += [[mode, f"{figures[f'recall_at_5_{mode}']:.3f}"] for mode in MODES]
    print(table(rows))
    print(f"written: {write_results('bench-recall', figures).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
