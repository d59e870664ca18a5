"""The index in memory follows the store: whoever wrote, the next search sees it.

Method: the store in memory, under the virtual clock where time matters. Oracle: what the store
holds at the moment of the search.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from sluice.clock import run_virtual
from state_svc.adapters.matrix_index import IndexLimits, MatrixIndex
from state_svc.adapters.memory_documents import MemoryDocuments
from state_svc.document_ports import (
    CollectionUnknownError,
    IndexLoadingError,
    IndexTooLargeError,
    SearchBusyError,
    VectorLengthError,
)
from state_svc.domain.documents import (
    ChunkText,
    CollectionHead,
    Draft,
    Match,
    NewChunk,
    Query,
    SmallChange,
    index_record,
)
from state_svc.domain.words import terms_of
from state_svc.ports import StoreUnavailableError

WAIT_S = 5.0
EAST = np.array([1, 0], dtype=np.float32)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    run_virtual(scenario)


async def ingest(
    store: MemoryDocuments, name: str, *texts: str, of: str = "a", to: str = "c", label: str = ""
) -> None:
    labels = {"l": label} if label else {}
    draft = Draft(b"", "text/plain", labels, "")
    made = await store.put(of, to, name, draft, str(uuid.uuid4()))
    chunks = [
        NewChunk(n, ChunkText(text, 0, 0), index_record(EAST, terms_of(text)))
        for n, text in enumerate(texts)
    ]
    await store.store(of, to, name, made.generation, chunks, 2, len(chunks))


async def found(
    index: MatrixIndex, words: str, *, of: str = "a", to: str = "c", wait_s: float = WAIT_S
) -> list[str] | None:
    """The documents found; ``None``: there is no such collection."""
    try:
        matches: Sequence[Match] = await index.search(of, to, Query(10, words), wait_s)
    except CollectionUnknownError:
        return None
    return sorted(match.document_id for match in matches)


class SlowStore(MemoryDocuments):
    """Reads take a time; a read may be told to fail."""

    read_s = 0.0
    fails = False
    reads = 0

    async def records(
        self, tenant: str, ranges: Sequence[tuple[int, int, int]]
    ) -> Sequence[Sequence[bytes | None]]:
        self.reads += 1
        await asyncio.sleep(self.read_s)
        if self.fails:
            raise StoreUnavailableError("told to")
        return await super().records(tenant, ranges)

    async def small_change(
        self, tenant: str, collection: str, since: int, generations_max: int, chunks_max: int
    ) -> SmallChange | None:
        found = await super().small_change(tenant, collection, since, generations_max, chunks_max)
        if found is not None and found.live:
            self.reads += 1
            await asyncio.sleep(self.read_s)  # the answer is on its way
        return found


async def test_what_anybody_wrote_is_found_by_the_next_search() -> None:
    store = MemoryDocuments()
    here, there = MatrixIndex(store), MatrixIndex(store)
    assert await found(here, "red") is None
    await ingest(store, "x", "red apple")
    for index in (here, there):
        assert await found(index, "red") == ["x"]
    await ingest(store, "y", "red pear")
    await ingest(store, "x", "green apple")
    for index in (here, there):
        assert await found(index, "red") == ["y"]
    await store.delete("a", "c", "y")
    assert await found(here, "red") == []
    assert await found(here, "green") == ["x"]
    await store.delete("a", "c", "x")
    assert await found(here, "green") is None
    await ingest(store, "x", "blue")  # a collection of the same name, made anew
    assert await found(here, "green") == []
    assert await found(here, "blue") == ["x"]


async def test_a_tenant_finds_nothing_of_another_whatever_the_names() -> None:
    store = MemoryDocuments()
    index = MatrixIndex(store)
    await ingest(store, "x", "red", of="a")
    assert await found(index, "red", of="a") == ["x"]
    assert await found(index, "red", of="b") is None
    await ingest(store, "own", "red", of="b")
    assert await found(index, "red", of="b") == ["own"]
    assert await found(index, "red", of="a") == ["x"]
    assert await found(index, "red", of="a", to="d") is None


async def test_only_what_changed_is_read() -> None:
    store = SlowStore()
    index = MatrixIndex(store)
    for n in range(5):
        await ingest(store, f"d{n}", "red")
    await found(index, "red")
    reads = store.reads
    await found(index, "red")
    assert store.reads == reads
    await ingest(store, "new", "red")
    assert len(await found(index, "red") or []) == 6
    assert store.reads == reads + 1
    await store.delete("a", "c", "new")
    assert len(await found(index, "red") or []) == 5
    assert store.reads == reads + 1


def test_searches_wait_for_one_reading_and_are_told_when_their_time_is_over() -> None:
    async def scenario() -> None:
        store = SlowStore()
        store.read_s = 3.0
        index = MatrixIndex(store)
        await ingest(store, "x", "red")
        with pytest.raises(IndexLoadingError) as raised:
            await found(index, "red", wait_s=1.0)
        assert 0 < raised.value.retry_after_s <= 30
        both = [found(index, "red"), found(index, "red")]
        assert await asyncio.gather(*both) == [["x"], ["x"]]
        assert store.reads == 1  # the reading went on, and nobody began another

    run(scenario())


def test_a_search_that_is_given_up_ends_no_reading() -> None:
    async def scenario() -> None:
        store = SlowStore()
        store.read_s = 3.0
        index = MatrixIndex(store)
        await ingest(store, "x", "red")
        task = asyncio.create_task(found(index, "red"))
        await asyncio.sleep(1.0)
        task.cancel()
        assert await found(index, "red") == ["x"]
        assert store.reads == 1

    run(scenario())


def test_a_document_that_changes_while_it_is_read_is_found_as_it_is_then() -> None:
    async def scenario() -> None:
        store = SlowStore()
        store.read_s = 1.0
        index = MatrixIndex(store)
        await ingest(store, "x", "red")
        await ingest(store, "y", "red")
        task = asyncio.create_task(found(index, "red green"))
        await asyncio.sleep(0.5)
        await ingest(store, "x", "green")
        await store.delete("a", "c", "y")
        assert await task == ["x"]
        assert await found(index, "green") == ["x"]
        assert await found(index, "red") == []

    run(scenario())


def test_a_search_after_a_write_does_not_take_what_was_read_before_it() -> None:
    async def scenario() -> None:
        store = SlowStore()
        index = MatrixIndex(store)
        await ingest(store, "x", "red")
        await found(index, "red")
        store.read_s = 1.0
        await ingest(store, "y", "red")
        first = asyncio.create_task(found(index, "red"))
        await asyncio.sleep(0.5)
        await ingest(store, "z", "red")  # while the change before is being read
        assert await found(index, "red") == ["x", "y", "z"]
        assert await first in (["x", "y"], ["x", "y", "z"])

    run(scenario())


async def test_a_store_that_fails_is_told_and_the_next_search_reads_again() -> None:
    store = SlowStore()
    index = MatrixIndex(store)
    await ingest(store, "x", "red")
    store.fails = True
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await found(index, "red")
    store.fails = False
    assert await found(index, "red") == ["x"]


async def test_memory_is_bounded_and_the_longest_unused_goes() -> None:
    store = MemoryDocuments()
    text = " ".join(f"w{n}" for n in range(200))
    for name in ("c", "d", "e"):
        await ingest(store, "x", *[text] * 10, to=name)
    one = await store.head("a", "c")
    assert one is not None
    index = MatrixIndex(store, IndexLimits(bytes_max=2 * one.size_bytes))
    for name in ("c", "d", "c", "e"):
        assert await found(index, "w1", to=name)
    assert index.size_bytes <= 2 * one.size_bytes
    assert index.limit_hits["index_bytes_max"] >= 1
    assert index.used_bytes == index.size_bytes
    assert await found(index, "w1", to="d")  # it is read again
    small = MatrixIndex(store, IndexLimits(bytes_max=one.size_bytes - 1))
    with pytest.raises(IndexTooLargeError):
        await found(small, "w1")


async def test_labels_and_small_collections_count_against_the_memory() -> None:
    store = MemoryDocuments()
    index = MatrixIndex(store)
    for number in range(20):
        await ingest(store, f"x{number}", "red", label="l" * 256)
    assert await found(index, "red")
    many = index.size_bytes
    assert many > 20 * 256  # of arrays 600
    for number in range(80):
        await ingest(store, "x", "red", of="b", to=f"c{number}")
        assert await found(index, "red", of="b", to=f"c{number}") == ["x"]
        await store.delete("b", f"c{number}", "x")
    assert index.size_bytes > many + 80 * 1500  # about what Python takes for one
    small = MatrixIndex(store, IndexLimits(bytes_max=many))
    for number in range(80):
        await ingest(store, "x", "red", of="b", to=f"c{number}")
        assert await found(small, "red", of="b", to=f"c{number}") == ["x"]
    assert small.limit_hits["index_bytes_max"] > 60
    few = MatrixIndex(store, IndexLimits(collections_max=10))
    for number in range(80):
        assert await found(few, "red", of="b", to=f"c{number}") == ["x"]
    assert few.limit_hits["index_collections_max"] == 70
    assert few.size_bytes < 10 * 3_000


def test_searches_beyond_the_bound_are_refused() -> None:
    async def scenario() -> None:
        store = SlowStore()
        store.read_s = 1.0
        index = MatrixIndex(store, IndexLimits(searches_max=3))
        await ingest(store, "x", "red")
        two = [asyncio.create_task(found(index, "red")) for _ in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(SearchBusyError):
            await found(index, "red")
        assert index.limit_hits["searches_max"] == 1
        assert await asyncio.gather(*two) == [["x"], ["x"]]
        assert await found(index, "red") == ["x"]

    run(scenario())


def test_a_tenant_that_waits_for_its_collection_leaves_room_to_others() -> None:
    async def scenario() -> None:
        store = SlowStore()
        await ingest(store, "x", "red", of="b")
        index = MatrixIndex(store, IndexLimits(searches_max=4))
        assert await found(index, "red", of="b") == ["x"]
        store.read_s = 1.0
        await ingest(store, "x", "red")
        many = [asyncio.create_task(found(index, "red")) for _ in range(4)]
        await asyncio.sleep(0.1)
        store.read_s = 0.0
        assert await found(index, "red", of="b") == ["x"]
        answers = await asyncio.gather(*many, return_exceptions=True)
        assert [type(answer) for answer in answers] == [list, list] + 2 * [SearchBusyError]

    run(scenario())


async def test_a_vector_of_another_length_is_refused() -> None:
    store = MemoryDocuments()
    index = MatrixIndex(store)
    wrong = Query(1, "", np.ones(3, dtype=np.float32))
    await ingest(store, "x")
    assert await index.search("a", "c", wrong, WAIT_S) == []  # nothing to compare with
    await ingest(store, "x", "red")
    with pytest.raises(VectorLengthError):
        await index.search("a", "c", wrong, WAIT_S)


async def test_a_damaged_document_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryDocuments()
    index = MatrixIndex(store)
    await ingest(store, "x", "red")
    await ingest(store, "y", "red")
    changed = await store.changed("a", "c", 0)
    assert changed is not None
    live = await store.live("a", "c", changed.generations)
    bad = next(one.generation for one in live.values() if one.document_id == "x")
    whole = store.records

    async def records(tenant: str, ranges: Sequence[tuple[int, int, int]]) -> Any:
        read = await whole(tenant, ranges)
        return [
            [b"?"] if generation == bad else of_it
            for (generation, _, _), of_it in zip(ranges, read, strict=True)
        ]

    monkeypatch.setattr(store, "records", records)
    assert await found(index, "red") == ["y"]


async def test_an_end_leaves_no_task() -> None:
    store = SlowStore()
    store.read_s = 60.0
    index = MatrixIndex(store)
    await ingest(store, "x", "red")
    search = asyncio.create_task(found(index, "red"))
    await asyncio.sleep(0.05)
    await index.close()
    with pytest.raises(IndexLoadingError):
        await search
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_store_is_asked_for_the_version_at_each_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryDocuments()
    index = MatrixIndex(store)
    await ingest(store, "x", "red")
    asked = []
    head = store.head

    async def counted(tenant: str, collection: str) -> CollectionHead | None:
        asked.append((tenant, collection))
        return await head(tenant, collection)

    await found(index, "red")
    monkeypatch.setattr(store, "head", counted)
    for _ in range(3):
        await found(index, "red")
    assert asked == [("a", "c")] * 3


async def test_a_tenant_that_is_gone_takes_its_indexes_along() -> None:
    store = MemoryDocuments()
    index = MatrixIndex(store)
    for tenant in ("a", "b"):
        await ingest(store, "x", "red", of=tenant)
        assert await found(index, "red", of=tenant) == ["x"]
    both = index.used_bytes
    index.drop("a")
    assert 0 < index.used_bytes == index.size_bytes < both
    assert await found(index, "red", of="b") == ["x"]
