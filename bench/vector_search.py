"""What a search costs: 100,000 chunks of 384 dimensions, exactly compared, in a state service.

``python -m bench.vector_search [--quick]``: starts Valkey and the state service on free ports,
fills one collection with made-up chunks (70 words each, by Zipf's law from 50,000; random
vectors), then asks through gRPC as schedulers do, one question after the other: by both, by
vector, by words. Also how long the first search takes, which reads the collection, what other
calls of the process notice of it, and the memory. Prints JSON. On a busy machine the times are
upper bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import uuid
from typing import Any

import grpc.aio
import numpy as np
import psutil
from grpc_health.v1 import health_pb2

from sluice.channels import open_channel
from sluice.state.v1 import documents_pb2, values_pb2
from sluice.state.v1.documents_pb2_grpc import DocumentServiceStub
from sluice.state.v1.values_pb2_grpc import KeyValueServiceStub
from state_svc.adapters.valkey_documents import ValkeyDocuments
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.domain.documents import ChunkText, Draft, NewChunk, records_of
from tests.robustness.state_process import StateProcess, until_health
from tests.valkey import valkey

CHUNKS = 100_000
QUICK_CHUNKS = 5_000
DIMS = 384
WORDS = 70
VOCABULARY = 50_000
DOCUMENT_CHUNKS = 1_000
CALL_CHUNKS = 250
QUESTIONS = 100
QUESTION_WORDS = 10
TENANT = "bench"
STORE_TIMEOUT_S = 2.0


class Texts:
    """Made-up texts and vectors, always the same."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(7)
        weights = 1 / np.arange(1, VOCABULARY + 1)
        self._reach = np.cumsum(weights / weights.sum())

    def text(self, words: int) -> str:
        chosen = np.searchsorted(self._reach, self._random.random(words))
        return " ".join(f"w{number}" for number in chosen)

    def vectors(self, count: int) -> list[bytes]:
        made = self._random.standard_normal((count, DIMS)).astype("<f4")
        return [row.tobytes() for row in made]


async def fill(link: ValkeyLink, texts: Texts, chunks: int) -> None:
    """Stores documents of ``DOCUMENT_CHUNKS`` each."""
    store = ValkeyDocuments(link)
    for number in range(chunks // DOCUMENT_CHUNKS):
        draft = Draft(b"", "text/plain", {"part": str(number % 10)}, "")
        name = f"document-{number}"
        made = await store.put(TENANT, "c", name, draft, str(uuid.uuid4()))
        for first in range(0, DOCUMENT_CHUNKS, CALL_CHUNKS):
            of = [texts.text(WORDS) for _ in range(CALL_CHUNKS)]
            records = records_of(of, texts.vectors(CALL_CHUNKS))
            new = [
                NewChunk(first + n, ChunkText(text, 0, 0), record)
                for n, (text, record) in enumerate(zip(of, records, strict=True))
            ]
            last = first + CALL_CHUNKS == DOCUMENT_CHUNKS
            total = DOCUMENT_CHUNKS if last else None
            await store.store(TENANT, "c", name, made.generation, new, DIMS, total)


def a_question(texts: Texts, *, words: bool, vector: bool) -> documents_pb2.SearchChunksRequest:
    """A request as a scheduler sends it."""
    return documents_pb2.SearchChunksRequest(
        tenant=TENANT,
        collection="c",
        query=texts.text(QUESTION_WORDS) if words else "",
        vector=texts.vectors(1)[0] if vector else b"",
        top_k=5,
    )


async def asked(stub: Any, questions: list[documents_pb2.SearchChunksRequest]) -> dict[str, float]:
    """Milliseconds of each, one after the other."""
    taken = []
    for question in questions:
        began = time.perf_counter()
        await stub.SearchChunks(question)
        taken.append((time.perf_counter() - began) * 1e3)
    return {"p50": statistics.median(taken), "p99": statistics.quantiles(taken, n=100)[98]}


async def first_search(channel: grpc.aio.Channel, texts: Texts) -> dict[str, float]:
    """Reads the collection, while other calls go on: seconds, refusals, and their longest."""
    documents: Any = DocumentServiceStub(channel)
    values: Any = KeyValueServiceStub(channel)
    worst = 0.0

    async def others() -> None:
        nonlocal worst
        put = values_pb2.PutValueRequest(tenant=TENANT, key="k", value=b"1")
        while True:
            began = time.perf_counter()
            await values.PutValue(put, timeout=5.0)
            worst = max(worst, time.perf_counter() - began)
            await asyncio.sleep(0.005)

    beside = asyncio.create_task(others())
    began, refusals = time.perf_counter(), 0
    question = a_question(texts, words=True, vector=True)
    while True:
        try:
            await documents.SearchChunks(question, timeout=4.0)
            break
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            refusals += 1  # INDEX_LOADING: asks again
    taken = time.perf_counter() - began
    beside.cancel()
    return {"load_s": taken, "load_refusals": refusals, "load_other_call_worst_ms": worst * 1e3}


async def measured(chunks: int) -> dict[str, float]:
    """All figures; times in milliseconds, memory in MB."""
    texts = Texts()
    with valkey() as store:
        link = ValkeyLink(store.url, STORE_TIMEOUT_S)
        await fill(link, texts, chunks)
        held: Any = await link.run(lambda client: client.info("memory"))
        await link.close()
        service = StateProcess(store.url, STORE_TIMEOUT_S)
        service.start()
        channel = open_channel(service.address)
        try:
            await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
            process = psutil.Process(service.pid)
            before = process.memory_info().rss
            figures = await first_search(channel, texts)
            figures["state_memory_mb"] = (process.memory_info().rss - before) / 1e6
            figures["store_memory_mb"] = held["used_memory"] / 1e6
            stub: Any = DocumentServiceStub(channel)
            for name, words, vector in (
                ("both", True, True),
                ("vector", False, True),
                ("words", True, False),
            ):
                questions = [
                    a_question(texts, words=words, vector=vector) for _ in range(QUESTIONS)
                ]
                taken = await asked(stub, questions)
                figures |= {f"{name}_ms_{quantile}": value for quantile, value in taken.items()}
        finally:
            await channel.close()
            service.kill()
    return figures


def measure(*, quick: bool) -> dict[str, float]:
    """The figures for ``bench.agent``; ``quick``: of few chunks, under names of their own."""
    chunks = QUICK_CHUNKS if quick else CHUNKS
    suffix = f"{chunks // 1000}k"
    figures = asyncio.run(measured(chunks))
    named = {f"vector_search_{name}_{suffix}": round(v, 2) for name, v in figures.items()}
    return {f"vector_search_ms_p50_{suffix}": round(figures["both_ms_p50"], 2), **named}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="5,000 chunks")
    print(json.dumps(measure(quick=parser.parse_args().quick), indent=2))
