"""Documents while their store, or the state service, is killed, frozen or read anew.

Goal: what was acknowledged is found again, by every replica; a store that does not answer costs a
typed error within its bound; reading a collection holds up nobody else. Method: state services as
processes and a Valkey of its own with its log on disk, SIGKILL and SIGSTOP. Oracle: hits of
searches. Seed: fixed vectors.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from sluice.state.v1 import documents_pb2, values_pb2
from sluice.state.v1.documents_pb2_grpc import DocumentServiceStub
from sluice.state.v1.values_pb2_grpc import KeyValueServiceStub
from sluice.status import from_rpc_error
from tests.robustness.state_process import state_service, until_health
from tests.valkey import ValkeyProcess

DIMS = 64
UP = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def store() -> Iterator[ValkeyProcess]:
    with tempfile.TemporaryDirectory() as folder:
        server = ValkeyProcess(Path(folder), "--appendonly", "yes", "--appendfsync", "always")
        server.start()
        yield server
        server.kill()


@asynccontextmanager
async def documents_at(
    store: ValkeyProcess, timeout_s: float = 2.0
) -> AsyncIterator[tuple[Any, grpc.aio.Channel, Any]]:
    """A replica: its documents, its channel, its process. ``timeout_s``: for the store, whose disk
    may take its time."""
    async with state_service(store.url, timeout_s) as (process, channel):
        yield DocumentServiceStub(channel), channel, process


def vectors(count: int) -> list[bytes]:
    made = np.random.default_rng(1).standard_normal((count, DIMS)).astype("<f4")
    return [row.tobytes() for row in made]


async def ingest(stub: Any, name: str, text: str, chunks: int = 1) -> None:
    place: Any = {"tenant": "a", "collection": "c", "document_id": name}
    put = documents_pb2.PutDocumentRequest(
        **place, content=text.encode(), media_type="text/plain", request_id=str(uuid.uuid4())
    )
    generation = (await stub.PutDocument(put)).document.generation
    of = [
        documents_pb2.Chunk(number=n, text=f"{text} {n}", end_byte=1, vector=vector)
        for n, vector in enumerate(vectors(chunks))
    ]
    for first in range(0, chunks, 256):
        await stub.StoreChunks(
            documents_pb2.StoreChunksRequest(
                **place,
                generation=generation,
                chunks=of[first : first + 256],
                complete=first + 256 >= chunks,
                chunk_count=chunks,
            )
        )


async def found(stub: Any, words: str) -> set[str]:
    request = documents_pb2.SearchChunksRequest(tenant="a", collection="c", query=words, top_k=100)
    return {hit.document_id for hit in (await stub.SearchChunks(request)).hits}


async def test_what_was_acknowledged_survives_the_death_of_store_and_service(
    store: ValkeyProcess,
) -> None:
    async with documents_at(store) as (stub, channel, process):
        await ingest(stub, "x", "red")
        await ingest(stub, "y", "red")
        store.kill()
        store.start()
        await until_health(channel, UP)
        assert await found(stub, "red") == {"x", "y"}
        await ingest(stub, "x", "green")
        process.end(signal.SIGKILL)
    async with documents_at(store) as (stub, _, _):
        assert await found(stub, "red") == {"y"}
        assert await found(stub, "green") == {"x"}


async def test_each_replica_finds_what_the_other_wrote(store: ValkeyProcess) -> None:
    async with documents_at(store) as (one, _, _), documents_at(store) as (other, _, _):
        for number in range(10):
            await ingest(one, "x", f"word{number}")
            assert await found(other, f"word{number}") == {"x"}
            await ingest(other, f"y{number}", "same")
            assert len(await found(one, "same")) == number + 1
        for number in range(10):
            place: Any = {"tenant": "a", "collection": "c", "document_id": f"y{number}"}
            await one.DeleteDocument(documents_pb2.DeleteDocumentRequest(**place))
            assert len(await found(other, "same")) == 9 - number


async def test_a_frozen_store_costs_a_typed_error_within_its_bound(store: ValkeyProcess) -> None:
    async with documents_at(store, 0.5) as (stub, _, _):
        await ingest(stub, "x", "red")
        assert await found(stub, "red") == {"x"}
        store.send(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await found(stub, "red")
        assert from_rpc_error(raised.value).reason == "STORE_UNAVAILABLE"
        assert time.monotonic() - began < 3.0  # twice the store's 0.5 s, and a busy machine
        store.send(signal.SIGCONT)
        assert await found(stub, "red") == {"x"}


async def test_reading_a_collection_holds_up_nobody_else(store: ValkeyProcess) -> None:
    async with documents_at(store) as (stub, _, _):
        for number in range(5):
            await ingest(stub, f"d{number}", "red " * 50, chunks=1_024)
    async with documents_at(store) as (stub, channel, _):
        values: Any = KeyValueServiceStub(channel)
        put = values_pb2.PutValueRequest(tenant="a", key="k")
        searching = asyncio.create_task(found(stub, "red"))
        worst, calls = 0.0, 0
        while not searching.done():
            began = time.monotonic()
            await values.PutValue(put)
            worst, calls = max(worst, time.monotonic() - began), calls + 1
        assert await searching
        assert calls > 3
        assert worst < 0.4
