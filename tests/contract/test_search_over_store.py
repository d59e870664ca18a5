"""Searches over a store that several write to, by several replicas of the index.

Goal: a search finds exactly what is live; of a document that is replaced all the time it finds all
chunks of one version. Method: random histories with a seed, on the store in memory and on Valkey;
then writers and searchers at once. Oracle: a plain dictionary of what was acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from state_svc.adapters.matrix_index import IndexLimits, MatrixIndex
from state_svc.adapters.memory_documents import MemoryDocuments
from state_svc.adapters.valkey_documents import ValkeyDocuments
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.document_ports import CollectionUnknownError
from state_svc.domain.documents import ChunkText, Draft, NewChunk, Query, index_record
from state_svc.domain.words import terms_of
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

WAIT_S = 10.0
VECTOR = np.array([1, 0], dtype=np.float32)
Store = MemoryDocuments | ValkeyDocuments


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture(params=["memory", "valkey"])
async def store(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryDocuments()
        return
    link = ValkeyLink(server.url, PATIENT_S)
    await link.run(lambda client: client.flushdb())
    yield ValkeyDocuments(link)
    await link.close()


async def put(store: Store, name: str, chunks: int, *, complete: bool = True) -> int:
    """A new generation with so many chunks, or all but the last of them."""
    draft = Draft(b"", "text/plain", {}, "")
    made = await store.put("a", "c", name, draft, str(uuid.uuid4()))
    record = index_record(VECTOR, terms_of("all"))
    given = [
        NewChunk(n, ChunkText("all", 0, 0), record)
        for n in range(chunks if complete else chunks - 1)
    ]
    total = chunks if complete else None
    await store.store("a", "c", name, made.generation, given, 2, total)
    return made.generation


async def found(index: MatrixIndex) -> set[tuple[str, int, int]]:
    """(document, generation, chunk) of all that a search finds."""
    try:
        matches = await index.search("a", "c", Query(100, "all", VECTOR), WAIT_S)
    except CollectionUnknownError:
        return set()
    assert len({(m.generation, m.number) for m in matches}) == len(matches)
    return {(match.document_id, match.generation, match.number) for match in matches}


@pytest.mark.parametrize("seed", range(4))
async def test_a_search_finds_exactly_what_is_live(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    # The third has room for nothing but the collection it searches, so that it reads it anew.
    indexes = [MatrixIndex(store), MatrixIndex(store), MatrixIndex(store, IndexLimits(1 << 20))]
    live: dict[str, tuple[int, int]] = {}
    for _ in range(40):
        name = f"d{chance.randrange(5)}"
        match chance.randrange(6):
            case 0 | 1 | 2:
                chunks = chance.randrange(4)
                live[name] = (await put(store, name, chunks), chunks)
            case 3:
                await put(store, name, 2, complete=False)
            case 4:
                await store.delete("a", "c", name)
                live.pop(name, None)
            case 5:
                for one in [f"d{n}" for n in range(5)]:
                    await store.delete("a", "c", one)
                live.clear()
        expected = {
            (one, generation, n) for one, (generation, size) in live.items() for n in range(size)
        }
        # Not each of them each time, so that some have more to follow.
        for index in chance.sample(indexes, chance.randrange(1, 3)):
            assert await found(index) == expected
    for index in indexes:
        await index.close()


async def test_of_a_document_that_is_replaced_all_the_time_one_version_is_found_whole(
    store: Store,
) -> None:
    names = ["x", "y", "z"]
    for name in names:
        await put(store, name, 3)
    indexes = [MatrixIndex(store), MatrixIndex(store)]
    acknowledged = dict.fromkeys(names, 0)
    looking = True

    async def write(name: str) -> None:
        while looking:
            acknowledged[name] = await put(store, name, 3)
            await asyncio.sleep(0.001)  # in memory a write waits for nothing

    async def look(index: MatrixIndex) -> None:
        for _ in range(20):
            at_least = dict(acknowledged)
            seen: dict[str, set[tuple[int, int]]] = {}
            for document, generation, number in await found(index):
                seen.setdefault(document, set()).add((generation, number))
            assert sorted(seen) == names
            for name, chunks in seen.items():
                (generation,) = {one for one, _ in chunks}
                assert {number for _, number in chunks} == {0, 1, 2}
                assert generation >= at_least[name]

    writing = [asyncio.create_task(write(name)) for name in names]
    try:
        await asyncio.gather(*(look(index) for index in indexes))
    finally:
        looking = False
        await asyncio.gather(*writing)
    assert all(acknowledged.values())
    for index in indexes:
        await index.close()
