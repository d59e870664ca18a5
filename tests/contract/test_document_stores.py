"""Documents: one contract for the store in memory and the real one on Valkey.

Oracle: the ports' own words (state_svc/document_ports.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import numpy as np
import pytest
from redis.asyncio import Redis

from state_svc.adapters.memory_documents import MemoryDocuments
from state_svc.adapters.valkey_documents import ValkeyDocuments
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.document_ports import (
    ChunksMissingError,
    ChunkSource,
    DocumentDeletedError,
    DocumentLimits,
    DocumentStore,
    GenerationReplacedError,
    VectorLengthError,
)
from state_svc.domain.documents import (
    ChunkText,
    DocumentState,
    Draft,
    NewChunk,
    SmallChange,
    index_record,
    record_bytes,
)
from state_svc.domain.words import terms_of
from state_svc.ports import LimitReachedError, RequestIdReusedError
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

LIMITS = DocumentLimits(collections_max=2, bytes_max=20_000, documents_max=4, chunks_max=12)


class Store(DocumentStore, ChunkSource, Protocol):
    """Both ports, as both implementations have them."""


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture
async def link(server: ValkeyProcess) -> AsyncIterator[ValkeyLink]:
    opened = ValkeyLink(server.url, PATIENT_S)
    await opened.run(lambda client: client.flushdb())
    yield opened
    await opened.close()


@pytest.fixture(params=["memory", "valkey"])
def store(request: pytest.FixtureRequest, link: ValkeyLink) -> Store:
    return MemoryDocuments(LIMITS) if request.param == "memory" else ValkeyDocuments(link, LIMITS)


def a_chunk(number: int, text: str = "some words", *, dims: int = 2) -> NewChunk:
    vector = np.ones(dims, dtype=np.float32)
    record = index_record(vector / np.float32(np.sqrt(dims)), terms_of(text))
    return NewChunk(number, ChunkText(text, number * 10, number * 10 + 10), record)


async def put(
    store: Store, name: str, content: bytes = b"text", *, to: str = "c", of: str = "a", **more: Any
) -> DocumentState:
    given = {"media_type": "text/plain", "labels": {"kind": "é"}, "digest": "d", **more}
    return await store.put(of, to, name, Draft(content, **given), str(uuid.uuid4()))


async def ingest(
    store: Store, name: str, *texts: str, to: str = "c", of: str = "a"
) -> DocumentState:
    """Puts a document and completes it."""
    made = await put(store, name, to=to, of=of)
    chunks = [a_chunk(n, text) for n, text in enumerate(texts)]
    return await store.store(of, to, name, made.generation, chunks, 2, len(chunks))


async def live_documents(store: Store, to: str = "c") -> dict[str, int]:
    """What an index would find: documents and their chunks."""
    changed = await store.changed("a", to, 0)
    if changed is None:
        return {}
    live = await store.live("a", to, changed.generations)
    return {document.document_id: document.chunk_count for document in live.values()}


async def test_a_document_is_stored_and_read(store: Store) -> None:
    made = await put(store, "näme {x}", b"\x00\xff")
    assert (made.ready, made.chunk_count, made.size_bytes) == (False, 0, 2)
    found = await store.get("a", "c", "näme {x}")
    assert found == (made, b"\x00\xff")
    assert made.labels == {"kind": "é"}
    for other in (("b", "c", "näme {x}"), ("a", "d", "näme {x}"), ("a", "c", "x")):
        assert await store.get(*other) is None
        assert not await store.delete(*other)


async def test_a_document_is_looked_at_without_its_content(store: Store) -> None:
    """Up to 3 MiB, which whoever waits for an ingest asks for again and again."""
    made = await put(store, "x", b"y" * 1_000)
    assert await store.get("a", "c", "x", with_content=False) == (made, b"")
    assert await store.get("a", "c", "none", with_content=False) is None


async def test_the_same_request_makes_one_generation(store: Store) -> None:
    request, draft = str(uuid.uuid4()), Draft(b"1", "text/plain", {}, "d1")
    first = await store.put("a", "c", "x", draft, request)
    assert await store.put("a", "c", "x", draft, request) == first
    with pytest.raises(RequestIdReusedError):
        await store.put("a", "c", "x", Draft(b"2", "text/plain", {}, "d2"), request)
    await store.store("a", "c", "x", first.generation, [a_chunk(0)], 2, 1)
    again = await store.put("a", "c", "x", draft, request)
    assert (again.generation, again.ready, again.chunk_count) == (first.generation, True, 1)
    # When it is gone meanwhile, a late repetition brings nothing back and says so.
    await store.delete("a", "c", "x")
    with pytest.raises(DocumentDeletedError):
        await store.put("a", "c", "x", draft, request)
    assert await store.get("a", "c", "x") is None
    assert (await store.put("b", "c", "x", draft, request)).generation  # another tenant's id


async def test_a_document_stays_searchable_until_the_next_generation_is_complete(
    store: Store,
) -> None:
    first = await ingest(store, "x", "one", "two")
    assert first.ready
    second = await put(store, "x", b"new text")
    assert (second.ready, second.chunk_count) == (False, 2)
    assert second.generation > first.generation
    part = await store.store("a", "c", "x", second.generation, [a_chunk(0, "three")], 2, None)
    assert not part.ready
    assert await live_documents(store) == {"x": 2}
    old, new = (first.generation, 0), (second.generation, 0)
    assert [one and one.text for one in await store.shown("a", [old])] == ["one"]
    whole = await store.store("a", "c", "x", second.generation, [], 0, 1)
    assert (whole.ready, whole.chunk_count) == (True, 1)
    assert await live_documents(store) == {"x": 1}
    assert [one and one.text for one in await store.shown("a", [old, new])] == [None, "three"]
    changed = await store.changed("a", "c", 0)
    assert changed is not None
    assert list(changed.generations) == [second.generation]


async def test_chunks_of_a_replaced_generation_are_refused(store: Store) -> None:
    first = await put(store, "x")
    await store.store("a", "c", "x", first.generation, [a_chunk(0)], 2, None)
    second = await put(store, "x")
    with pytest.raises(GenerationReplacedError):
        await store.store("a", "c", "x", first.generation, [a_chunk(1)], 2, 2)
    assert await store.shown("a", [(first.generation, 0)]) == [None]
    await store.delete("a", "c", "x")
    third = await put(store, "x")
    assert third.generation > second.generation
    for generation in (first.generation, second.generation, 0):
        with pytest.raises(GenerationReplacedError):
            await store.store("a", "c", "x", generation, [a_chunk(0)], 2, 1)
    with pytest.raises(GenerationReplacedError):
        await store.store("b", "c", "x", third.generation, [a_chunk(0)], 2, 1)


async def test_chunks_may_be_written_again_and_in_any_order(store: Store) -> None:
    made = await put(store, "x")
    where = ("a", "c", "x", made.generation)
    await store.store(*where, [a_chunk(2, "c"), a_chunk(1, "b")], 2, None)
    with pytest.raises(ChunksMissingError):
        await store.store(*where, [], 0, 3)
    await store.store(*where, [a_chunk(1, "B"), a_chunk(0, "a")], 2, None)
    with pytest.raises(ChunksMissingError):
        await store.store(*where, [], 0, 2)
    whole = await store.store(*where, [a_chunk(0, "A")], 2, 3)
    assert whole.ready
    # Complete: nothing that comes late changes it.
    assert await store.store(*where, [a_chunk(0, "late"), a_chunk(3)], 2, 4) == whole
    shown = await store.shown("a", [(made.generation, n) for n in range(4)])
    assert [one and one.text for one in shown] == ["A", "B", "c", None]
    (records,) = await store.records("a", [(made.generation, 0, 4)])
    assert list(records) == [*(a_chunk(0, text).record for text in "ABc"), None]
    head = await store.head("a", "c")
    assert head is not None
    assert head.size_bytes == sum(len(a_chunk(0, text).record) + 17 for text in "ABc")


async def test_a_document_without_chunks_can_be_complete(store: Store) -> None:
    made = await put(store, "x", b"")
    assert (await store.store("a", "c", "x", made.generation, [], 0, 0)).ready
    assert await live_documents(store) == {"x": 0}


async def test_vectors_of_a_collection_have_one_length(store: Store) -> None:
    await ingest(store, "x", "one")
    made = await put(store, "y")
    with pytest.raises(VectorLengthError) as raised:
        await store.store("a", "c", "y", made.generation, [a_chunk(0, dims=3)], 3, 1)
    assert raised.value.dims == 2
    await store.delete("a", "c", "x")  # nothing is left to compare with
    await store.store("a", "c", "y", made.generation, [a_chunk(0, dims=3)], 3, 1)
    head = await store.head("a", "c")
    assert head is not None
    assert head.dims == 3


async def test_versions_tell_what_changed(store: Store) -> None:
    first = await ingest(store, "x", "one")
    before = await store.head("a", "c")
    assert before is not None
    await put(store, "y")  # nothing that a search finds
    assert await store.head("a", "c") == before
    second = await ingest(store, "x", "two")
    third = await ingest(store, "y", "three")
    changed = await store.changed("a", "c", before.version)
    assert changed is not None
    assert not changed.everything
    assert sorted(changed.generations) == sorted(one.generation for one in (first, second, third))
    nothing = await store.changed("a", "c", changed.version)
    assert nothing is not None
    assert (list(nothing.generations), nothing.version) == ([], changed.version)
    await store.delete("a", "c", "y")
    gone = await store.changed("a", "c", changed.version)
    assert gone is not None
    assert list(gone.generations) == [third.generation]


async def test_a_small_change_is_read_whole_and_a_large_one_not(store: Store) -> None:
    assert await store.small_change("a", "c", 1, 9, 9) == SmallChange(0, 0, [], [])
    first = await ingest(store, "x", "one", "two")
    head = await store.head("a", "c")
    assert head is not None
    assert await store.small_change("a", "c", 0, 9, 9) is None  # all
    assert await store.small_change("a", "c", head.version, 9, 9) == SmallChange(
        head.version, 2, [], []
    )
    second = await ingest(store, "x", "three", "four")
    third = await ingest(store, "y", "five")
    small = await store.small_change("a", "c", head.version, 3, 3)
    assert small is not None
    now = await store.head("a", "c")
    assert now is not None
    assert (small.version, small.dims) == (now.version, 2)
    assert sorted(small.generations) == sorted(one.generation for one in (first, second, third))
    assert {one.document_id: one.chunk_count for one in small.live} == {"x": 2, "y": 1}
    assert {generation: list(records) for generation, records in small.records.items()} == {
        second.generation: [a_chunk(0, text).record for text in ("three", "four")],
        third.generation: [a_chunk(0, "five").record],
    }
    assert await store.small_change("a", "c", head.version, 2, 3) is None
    assert await store.small_change("a", "c", head.version, 3, 2) is None


async def test_a_generation_that_is_given_up_leaves_the_earlier_one_and_holds_nothing(
    store: Store,
) -> None:
    first = await ingest(store, "x", "one")
    second = await put(store, "x", b"next")
    room = [a_chunk(n) for n in range(LIMITS.chunks_max - 1)]
    await store.store("a", "c", "x", second.generation, room, 2, None)
    with pytest.raises(LimitReachedError):
        await ingest(store, "y", "other")
    for generation in (first.generation, second.generation + 1):  # live; not there
        await store.abandon("a", "c", "x", generation)
    with pytest.raises(LimitReachedError):
        await ingest(store, "z", "other")
    await store.abandon("a", "c", "x", second.generation)
    await ingest(store, "y", "other")
    assert await live_documents(store) == {"x": 1, "y": 1}
    await store.abandon("b", "c", "x", second.generation)  # nothing of another tenant's
    await store.abandon("a", "c", "unknown", 1)


async def test_a_collection_made_anew_is_another(store: Store) -> None:
    await ingest(store, "x", "one")
    before = await store.head("a", "c")
    assert before is not None
    await store.delete("a", "c", "x")
    assert await store.head("a", "c") is None
    assert await store.changed("a", "c", before.version) is None
    again = await ingest(store, "x", "two")
    changed = await store.changed("a", "c", before.version)
    assert changed is not None
    assert changed.everything
    assert changed.version > before.version
    assert list(changed.generations) == [again.generation]


async def test_documents_are_listed_in_pages(store: Store) -> None:
    names = ["a/1", "a", "é", "B"]
    for name in names:
        await put(store, name)
    await put(store, "a", of="b")
    seen: list[str] = []
    after = ""
    while True:
        states, after = await store.list("a", "c", after, 3)
        seen += [state.document_id for state in states]
        if not after:
            break
    assert seen == sorted(names, key=str.encode)
    assert await store.list("a", "none", "", 3) == ([], "")
    assert [s.document_id for s in (await store.list("b", "c", "", 3))[0]] == ["a"]


async def test_collections_are_those_in_which_a_document_is(store: Store) -> None:
    assert await store.collections("a", "", 3) == ([], "")
    await ingest(store, "x", "one", "two")
    await put(store, "y", to="B")
    await ingest(store, "z", "one", of="b", to="other")
    (upper, lower), last = await store.collections("a", "", 3)
    assert last == ""
    assert (upper.name, upper.document_count, upper.chunk_count) == ("B", 1, 0)
    assert (lower.name, lower.document_count, lower.chunk_count) == ("c", 1, 2)
    head = await store.head("a", "c")
    assert head is not None
    assert lower.chunk_bytes == head.size_bytes > 0
    assert await store.collections("a", "", 1) == ([upper], "B")
    assert await store.collections("a", "B", 1) == ([lower], "c")
    assert await store.collections("a", "c", 1) == ([], "")
    await store.delete("a", "B", "y")
    assert [one.name for one in (await store.collections("a", "", 3))[0]] == ["c"]


async def test_what_was_put_later_is_not_deleted_with_what_was_before(store: Store) -> None:
    first = await ingest(store, "x", "one")
    await ingest(store, "y", "one")
    until = await store.newest("a")
    assert until >= first.generation
    again = await put(store, "x")
    assert again.generation > until
    assert not await store.delete("a", "c", "x", until)
    assert await live_documents(store) == {"x": 1, "y": 1}
    assert await store.delete("a", "c", "y", until)
    assert not await store.delete("a", "c", "y", until)
    assert await store.delete("a", "c", "x", await store.newest("a"))
    assert await store.head("a", "c") is None


async def test_every_bound_holds_and_room_comes_back(store: Store) -> None:
    async def full(work: Any) -> str:
        with pytest.raises(LimitReachedError) as raised:
            await work
        return raised.value.limit

    for n in range(4):
        await put(store, f"x{n}", b"")
    assert await full(put(store, "x4", b"")) == "documents_max"
    await put(store, "x0", b"")  # a further generation is no further document
    await put(store, "x", b"", to="d")
    assert await full(put(store, "x", b"", to="e")) == "collections_max"
    made = await put(store, "x1", b"")
    where = ("a", "c", "x1", made.generation)
    await store.store(*where, [a_chunk(n) for n in range(12)], 2, None)
    assert await full(store.store(*where, [a_chunk(12)], 2, None)) == "chunks_max"
    await store.store(*where, [a_chunk(0)], 2, 12)
    other = await put(store, "x2", b"")
    beyond = store.store("a", "c", "x2", other.generation, [a_chunk(0)], 2, 1)
    assert await full(beyond) == "chunks_max"
    assert await full(put(store, "x3", b"x" * 20_000)) == "documents_bytes_max"
    for n in range(4):
        await store.delete("a", "c", f"x{n}")
    await store.delete("a", "d", "x")
    room = 20_000 - record_bytes("x", {"kind": "é"})
    await put(store, "x", b"x" * room, to="e")  # all room is back
    made = await put(store, "x", b"x" * (room - 1_000), to="e")
    large = a_chunk(0, "y" * 1_000)
    beyond = store.store("a", "e", "x", made.generation, [large], 2, 1)
    assert await full(beyond) == "documents_bytes_max"


async def test_labels_and_documents_without_words_count(store: Store) -> None:
    """Else a tenant fills the store of all within its bounds: 16 KiB of labels a document."""
    labels = {f"{n:0256}": "x" * 256 for n in range(16)}  # 8 KiB, kept twice
    await put(store, "x", b"", labels=labels)
    with pytest.raises(LimitReachedError, match="documents_bytes_max"):
        await put(store, "y", b"", labels=labels)
    await put(store, "x", b"")  # its labels are gone
    await put(store, "y", b"", labels=labels)
    await store.delete("a", "c", "y")
    await put(store, "z", b"", labels=labels)


async def test_what_an_earlier_release_put_gives_back_what_it_took(link: ValkeyLink) -> None:
    store = ValkeyDocuments(link, LIMITS)
    await put(store, "x", b"x" * 100)
    await put(store, "y", b"")
    more = record_bytes("x", {"kind": "é"})

    async def as_before(client: Redis) -> None:
        await client.hdel("sluice:{a}:document:c/x", "weight")
        await client.hincrby("sluice:{a}:library", "bytes", -more)

    await link.run(as_before)
    await store.delete("a", "c", "x")
    await store.delete("a", "c", "y")
    assert await link.run(lambda client: client.hget("sluice:{a}:library", "bytes")) == b"0"


async def test_of_two_that_complete_a_generation_both_succeed(store: Store) -> None:
    made = await put(store, "x")
    chunks = [a_chunk(0), a_chunk(1)]
    both = [store.store("a", "c", "x", made.generation, chunks, 2, 2) for _ in range(2)]
    assert all(state.ready for state in await asyncio.gather(*both))


async def test_what_changed_too_long_ago_is_told_as_everything(link: ValkeyLink) -> None:
    store = ValkeyDocuments(link)
    await ingest(store, "x", "one")
    before = await store.head("a", "c")
    assert before is not None
    for _ in range(1_001):
        last = await ingest(store, "x", "one")
    changed = await store.changed("a", "c", before.version)
    assert changed is not None
    assert changed.everything
    assert list(changed.generations) == [last.generation]
    assert await link.run(lambda client: client.zcard("sluice:{a}:collection:c:changes")) == 1000


async def test_delete_leaves_nothing_of_a_document_in_the_store(link: ValkeyLink) -> None:
    """Oracle: every key and every value of the store is searched for canaries."""
    store = ValkeyDocuments(link)
    await ingest(store, "other", "other text")
    for canary in ("cnry-one", "cnry-two"):  # a generation that was replaced, then the last
        made = await put(store, "cnry-id", b"cnry-content", labels={"cnry-label": "cnry-value"})
        chunk = a_chunk(0, f"{canary} xyzzy")
        await store.store("a", "c", "cnry-id", made.generation, [chunk], 2, 1)
    pending = await put(store, "cnry-id", b"cnry-pending")
    await store.store("a", "c", "cnry-id", pending.generation, [a_chunk(0, "cnry-3")], 2, None)
    kept = [b"cnry", terms_of("xyzzy").hashes.tobytes()]
    assert all([await _holds(link, piece) for piece in kept])
    assert await store.delete("a", "c", "cnry-id")
    assert not any([await _holds(link, piece) for piece in kept])
    assert await live_documents(store) == {"other": 1}
    assert await store.delete("a", "c", "other")
    keys: Any = await link.run(lambda client: client.keys("*"))
    left = {key.decode().rpartition("}:")[2].partition(":")[0] for key in keys}
    assert left == {"library", "put"}  # a counter, and request ids for 24 hours
    assert await link.run(lambda client: client.hget("sluice:{a}:library", "bytes")) == b"0"


async def _holds(link: ValkeyLink, piece: bytes) -> bool:
    """Whether a key or a value of the store holds these bytes."""
    keys: Any = await link.run(lambda client: client.keys("*"))
    for key in keys:
        dumped: Any = await link.run(_read_all(key))
        if piece in key or piece in repr_bytes(dumped):
            return True
    return False


def _read_all(key: bytes) -> Any:
    async def read(client: Any) -> Any:
        match await client.type(key):
            case b"string":
                return await client.get(key)
            case b"hash":
                return await client.hgetall(key)
            case b"zset":
                return await client.zrange(key, 0, -1)
            case b"set":
                return await client.smembers(key)
        raise AssertionError(key)

    return read


def repr_bytes(value: Any) -> bytes:
    """All bytes in what the client returned, joined."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return b"\n".join(part for pair in value.items() for part in pair)
    return b"\n".join(value)
