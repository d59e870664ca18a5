"""What callers of values, blobs, documents and tools see: over gRPC, with the stores in memory.

Oracle: the protos' own words. Another tenant's and an unknown name answer alike.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from sluice.agent.v1 import tools_pb2 as agent_tools_pb2
from sluice.channels import open_channel
from sluice.deadline import MethodDeadline
from sluice.server import Health, MeshServer
from sluice.state.v1 import documents_pb2, tools_pb2, values_pb2
from sluice.state.v1.documents_pb2_grpc import (
    DocumentServiceStub,
    add_DocumentServiceServicer_to_server,
)
from sluice.state.v1.tools_pb2_grpc import ToolServiceStub, add_ToolServiceServicer_to_server
from sluice.state.v1.values_pb2_grpc import (
    BlobServiceStub,
    KeyValueServiceStub,
    add_BlobServiceServicer_to_server,
    add_KeyValueServiceServicer_to_server,
)
from sluice.status import from_rpc_error
from state_svc.adapters import documents_servicer
from state_svc.adapters.documents_servicer import DocumentServicer
from state_svc.adapters.matrix_index import IndexLimits, MatrixIndex
from state_svc.adapters.memory_documents import MemoryDocuments
from state_svc.adapters.memory_stores import MemoryRegistry
from state_svc.adapters.memory_values import MemoryBlobs, MemoryValues
from state_svc.adapters.tools_servicer import ToolServicer
from state_svc.adapters.values_servicers import BlobServicer, KeyValueServicer
from state_svc.document_ports import DocumentLimits
from state_svc.ports import CHILDREN_MAX, Kind, ValueLimits

EAST, NORTH = [1.0, 0.0], [0.0, 2.0]


class SlowDocuments(MemoryDocuments):
    """Reading for an index takes ``read_s``."""

    read_s = 0.0

    async def records(
        self, tenant: str, ranges: Sequence[tuple[int, int, int]]
    ) -> Sequence[Sequence[bytes | None]]:
        await asyncio.sleep(self.read_s)
        return await super().records(tenant, ranges)


@pytest.fixture
def documents() -> SlowDocuments:
    return SlowDocuments(DocumentLimits(documents_max=5))


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry()


@pytest.fixture
async def channel(
    documents: SlowDocuments, registry: MemoryRegistry
) -> AsyncIterator[grpc.aio.Channel]:
    path = "/sluice.state.v1.DocumentService/SearchChunks"
    server = MeshServer(
        "state", ["127.0.0.1:0"], Health(), deadlines={path: MethodDeadline(5.0, 5.0)}
    )
    index = MatrixIndex(documents, IndexLimits())
    limits = ValueLimits(items_max=3, bytes_max=8 << 20)
    add_KeyValueServiceServicer_to_server(KeyValueServicer(MemoryValues(limits)), server.grpc)
    add_BlobServiceServicer_to_server(BlobServicer(MemoryBlobs(limits)), server.grpc)
    add_DocumentServiceServicer_to_server(DocumentServicer(documents, index, 5.0), server.grpc)
    add_ToolServiceServicer_to_server(ToolServicer(registry), server.grpc)
    await server.start()
    opened = open_channel(f"127.0.0.1:{server.ports[0]}")
    await opened.channel_ready()
    yield opened
    await opened.close()
    await server.stop(0)
    await index.close()


async def refusal(call: Any) -> tuple[str, str]:
    """Code and reason of a call that fails; with a bad field the field in place of the reason."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    error = from_rpc_error(raised.value)
    return error.code.name, error.fields[0].field if error.fields else error.reason


def vector(values: list[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def a_chunk(number: int, text: str, of: list[float]) -> documents_pb2.Chunk:
    begin = number * 100
    return documents_pb2.Chunk(
        number=number, text=text, begin_byte=begin, end_byte=begin + 50, vector=vector(of)
    )


async def ingest(
    stub: Any, name: str, *chunks: documents_pb2.Chunk, of: str = "a", **more: Any
) -> documents_pb2.StoredDocument:
    place: Any = {"tenant": of, "collection": "c", "document_id": name}
    put = documents_pb2.PutDocumentRequest(
        **place, media_type="text/plain", request_id=str(uuid.uuid4()), **more
    )
    generation = (await stub.PutDocument(put)).document.generation
    stored = await stub.StoreChunks(
        documents_pb2.StoreChunksRequest(
            **place,
            generation=generation,
            chunks=chunks,
            complete=True,
            chunk_count=len(chunks),
        )
    )
    document: documents_pb2.StoredDocument = stored.document
    return document


def a_search(**fields: Any) -> documents_pb2.SearchChunksRequest:
    given: Any = {"tenant": "a", "collection": "c", "top_k": 5, **fields}
    return documents_pb2.SearchChunksRequest(**given)


async def test_values_over_the_wire(channel: grpc.aio.Channel) -> None:
    stub: Any = KeyValueServiceStub(channel)
    put, get = values_pb2.PutValueRequest, values_pb2.GetValueRequest
    version = (await stub.PutValue(put(tenant="a", key="run:1/x", value=b"1"))).version
    found = await stub.GetValue(get(tenant="a", key="run:1/x"))
    assert (found.value, found.version) == (b"1", version)
    unknown = ("NOT_FOUND", "VALUE_UNKNOWN")
    assert await refusal(stub.GetValue(get(tenant="b", key="run:1/x"))) == unknown
    assert await refusal(stub.GetValue(get(tenant="a", key="y"))) == unknown
    conflict = stub.PutValue(put(tenant="a", key="run:1/x", expected_version=version + 1))
    assert await refusal(conflict) == ("ABORTED", "VERSION_CONFLICT")
    large = stub.PutValue(put(tenant="a", key="run:1/x", expected_version=2**64 - 1))
    assert await refusal(large) == ("ABORTED", "VERSION_CONFLICT")
    for key in ("y", "z"):
        await stub.PutValue(put(tenant="a", key=key))
    full = stub.PutValue(put(tenant="a", key="w"))
    assert await refusal(full) == ("FAILED_PRECONDITION", "STORAGE_FULL")
    delete = values_pb2.DeleteValueRequest
    await stub.DeleteValue(delete(tenant="a", key="y"))
    assert await refusal(stub.DeleteValue(delete(tenant="a", key="y"))) == unknown


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"tenant": "A"}, "tenant"),
        ({"key": ""}, "key"),
        ({"key": "a b"}, "key"),
        ({"key": "}x{"}, "key"),
        ({"value": bytes((1 << 20) + 1)}, "value"),
        ({"ttl": Duration(seconds=0)}, "ttl"),
        ({"ttl": Duration(seconds=90 * 86_400 + 1)}, "ttl"),
    ],
    ids=lambda one: str(one)[:40],
)
async def test_a_bad_value_is_refused_by_its_field(
    channel: grpc.aio.Channel, bad: Any, field: str
) -> None:
    stub: Any = KeyValueServiceStub(channel)
    request = values_pb2.PutValueRequest(**{"tenant": "a", "key": "k", "value": b"1", **bad})
    assert await refusal(stub.PutValue(request)) == ("INVALID_ARGUMENT", field)


async def test_blobs_over_the_wire(channel: grpc.aio.Channel) -> None:
    stub: Any = BlobServiceStub(channel)
    place: Any = {"tenant": "a", "owner": "run-1", "name": "step-2"}
    content = bytes(range(256)) * (16 << 10)  # exactly 4 MiB
    await stub.PutBlob(values_pb2.PutBlobRequest(**place, content=content))
    whole = await stub.GetBlob(values_pb2.GetBlobRequest(**place))
    assert (whole.content == content, whole.size_bytes) == (True, len(content))
    part = await stub.GetBlob(values_pb2.GetBlobRequest(**place, offset=254, size_max=4))
    assert part.content == b"\xfe\xff\x00\x01"
    beyond = await stub.GetBlob(values_pb2.GetBlobRequest(**place, offset=2**63))
    assert (beyond.content, beyond.size_bytes) == (b"", len(content))
    too_large = values_pb2.PutBlobRequest(**place, content=content + b"x")
    assert await refusal(stub.PutBlob(too_large)) == ("INVALID_ARGUMENT", "content")
    for other in ({"tenant": "b"}, {"owner": "run-2"}, {"name": "step-3"}):
        call = stub.GetBlob(values_pb2.GetBlobRequest(**{**place, **other}))
        assert await refusal(call) == ("NOT_FOUND", "BLOB_UNKNOWN")
    bad = stub.GetBlob(values_pb2.GetBlobRequest(**{**place, "owner": "a/b"}))
    assert await refusal(bad) == ("INVALID_ARGUMENT", "owner")
    deletes = [values_pb2.DeleteBlobsRequest(tenant=t, owner="run-1") for t in ("b", "a", "a")]
    assert [(await stub.DeleteBlobs(one)).deleted for one in deletes] == [0, 1, 0]


async def test_tools_belong_to_their_tenant_and_go_with_it(
    channel: grpc.aio.Channel, registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub: Any = ToolServiceStub(channel)

    def put(tenant: str, name: str, **more: Any) -> Any:
        tool = agent_tools_pb2.ToolDeclaration(name=name, **more)
        return stub.PutTool(tools_pb2.PutToolRequest(tenant=tenant, tool=tool))

    async def names(tenant: str) -> list[str]:
        listed = await stub.ListTools(tools_pb2.ListToolsRequest(tenant=tenant))
        return [tool.name for tool in listed.tools]

    assert await refusal(put("a", "x")) == ("NOT_FOUND", "TENANT_UNKNOWN")
    for tenant in ("a", "ab"):
        await registry.put(Kind.TENANTS, tenant, b"")
    first = (await put("a", "y")).version
    await put("a", "x", description="does things")
    await put("ab", "z")
    assert (await put("a", "y", description="changed")).version > first
    assert await names("a") == ["x", "y"]
    assert await names("ab") == ["z"]
    assert await names("b") == []
    monkeypatch.setitem(CHILDREN_MAX, Kind.TOOLS, 2)
    assert await refusal(put("a", "w")) == ("FAILED_PRECONDITION", "REGISTRY_FULL")
    await put("a", "y")
    for tenant in ("ab", "b"):
        call = stub.DeleteTool(tools_pb2.DeleteToolRequest(tenant=tenant, name="x"))
        assert await refusal(call) == ("NOT_FOUND", "TOOL_UNKNOWN")
    await stub.DeleteTool(tools_pb2.DeleteToolRequest(tenant="a", name="x"))
    assert await names("a") == ["y"]
    assert await refusal(put("a", "a/b")) == ("INVALID_ARGUMENT", "tool.name")
    await registry.delete(Kind.TENANTS, "a")
    assert await names("a") == []
    assert await names("ab") == ["z"]


async def test_a_document_is_searched_by_words_and_by_vector(channel: grpc.aio.Channel) -> None:
    stub: Any = DocumentServiceStub(channel)
    made = await ingest(
        stub,
        "x",
        a_chunk(0, "the red apple", EAST),
        a_chunk(1, "a green pear", NORTH),
        content=b"red green",
        labels={"kind": "fruit"},
    )
    assert (made.ready, made.chunk_count, made.size_bytes) == (True, 2, 9)
    await ingest(stub, "y", a_chunk(0, "the red car", NORTH))

    async def hits(**fields: Any) -> list[tuple[str, int]]:
        found = await stub.SearchChunks(a_search(**fields))
        return [(hit.document_id, hit.chunk.number) for hit in found.hits]

    assert await hits(query="pear") == [("x", 1)]
    assert sorted(await hits(query="red")) == [("x", 0), ("y", 0)]
    assert await hits(vector=vector(EAST), top_k=1) == [("x", 0)]
    assert (await hits(query="car", vector=vector(NORTH)))[0] == ("y", 0)
    assert await hits(query="red", labels={"kind": "fruit"}) == [("x", 0)]
    assert await hits(query="red", labels={"kind": "car"}) == []
    unknown = stub.SearchChunks(a_search(query="red", collection="unknown"))
    assert await refusal(unknown) == ("NOT_FOUND", "COLLECTION_UNKNOWN")
    found = (await stub.SearchChunks(a_search(query="pear", vector=vector(NORTH)))).hits[0]
    assert (found.chunk.text, found.chunk.begin_byte, found.chunk.end_byte) == (
        "a green pear",
        100,
        150,
    )
    assert found.vector_score == pytest.approx(1.0)
    assert found.term_score > 0
    assert not found.chunk.vector


async def test_documents_are_read_listed_and_deleted(channel: grpc.aio.Channel) -> None:
    stub: Any = DocumentServiceStub(channel)
    for n in range(5):
        await ingest(stub, f"d{n}", a_chunk(0, "red", EAST), content=b"%d" % n)
    seen, token = [], ""
    while True:
        page = await stub.ListDocuments(
            documents_pb2.ListDocumentsRequest(
                tenant="a", collection="c", page_size=2, page_token=token
            )
        )
        seen += [document.document_id for document in page.documents]
        token = page.next_page_token
        if not token:
            break
    assert seen == [f"d{n}" for n in range(5)]
    get = documents_pb2.GetDocumentRequest(tenant="a", collection="c", document_id="d1")
    assert (await stub.GetDocument(get)).content == b""
    get.with_content = True
    assert (await stub.GetDocument(get)).content == b"1"
    gone = documents_pb2.DeleteDocumentRequest(tenant="a", collection="c", document_id="d1")
    await stub.DeleteDocument(gone)
    assert await refusal(stub.DeleteDocument(gone)) == ("NOT_FOUND", "DOCUMENT_UNKNOWN")
    assert await refusal(stub.GetDocument(get)) == ("NOT_FOUND", "DOCUMENT_UNKNOWN")
    found = await stub.SearchChunks(a_search(query="red"))
    assert "d1" not in {hit.document_id for hit in found.hits}
    bad = documents_pb2.ListDocumentsRequest(
        tenant="a", collection="c", page_size=2, page_token="%"
    )
    assert await refusal(stub.ListDocuments(bad)) == ("INVALID_ARGUMENT", "page_token")


async def test_another_tenant_sees_nothing_and_cannot_tell(channel: grpc.aio.Channel) -> None:
    stub: Any = DocumentServiceStub(channel)
    made = await ingest(stub, "x", a_chunk(0, "red", EAST), content=b"secret")
    assert (await stub.SearchChunks(a_search(query="red"))).hits
    for query in ({"query": "red"}, {"vector": vector(EAST)}):
        call = stub.SearchChunks(a_search(tenant="b", **query))
        assert await refusal(call) == ("NOT_FOUND", "COLLECTION_UNKNOWN")
    for name in ("x", "unknown"):
        place: Any = {"tenant": "b", "collection": "c", "document_id": name}
        for call in (
            stub.GetDocument(documents_pb2.GetDocumentRequest(**place)),
            stub.DeleteDocument(documents_pb2.DeleteDocumentRequest(**place)),
        ):
            assert await refusal(call) == ("NOT_FOUND", "DOCUMENT_UNKNOWN")
        store = documents_pb2.StoreChunksRequest(**place, generation=made.generation)
        assert await refusal(stub.StoreChunks(store)) == ("ABORTED", "GENERATION_REPLACED")
    for collection in ("c", "unknown"):
        listed = documents_pb2.ListDocumentsRequest(tenant="b", collection=collection, page_size=5)
        deleted = documents_pb2.DeleteCollectionRequest(tenant="b", collection=collection)
        for call in (stub.ListDocuments(listed), stub.DeleteCollection(deleted)):
            assert await refusal(call) == ("NOT_FOUND", "COLLECTION_UNKNOWN")
    collections = documents_pb2.ListCollectionsRequest(tenant="b", page_size=5)
    assert not (await stub.ListCollections(collections)).collections
    assert (await stub.SearchChunks(a_search(query="red"))).hits


async def test_collections_are_listed_and_deleted_a_part_at_a_time(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a deletion that stops anywhere leaves whole documents, and ends however many there are;
    what is put meanwhile stays."""
    monkeypatch.setattr(documents_servicer, "DELETE_MAX", 2)
    stub: Any = DocumentServiceStub(channel)
    for n in range(4):
        await ingest(stub, f"d{n}", a_chunk(0, "red", EAST), content=b"%d" % n)
    listing = documents_pb2.ListCollectionsRequest(tenant="a", page_size=5)
    (one,) = (await stub.ListCollections(listing)).collections
    assert (one.collection, one.document_count, one.chunk_count) == ("c", 4, 4)
    assert one.chunk_bytes > 0
    request = documents_pb2.DeleteCollectionRequest(tenant="a", collection="c")
    first = await stub.DeleteCollection(request)
    assert (first.deleted, bool(first.next_page_token)) == (2, True)
    hits = (await stub.SearchChunks(a_search(query="red"))).hits
    assert [hit.document_id for hit in hits] == ["d2", "d3"]
    await ingest(stub, "d2", a_chunk(0, "red again", EAST), content=b"new")
    await ingest(stub, "a", a_chunk(0, "red before", EAST), content=b"new")
    request.page_token = first.next_page_token
    second = await stub.DeleteCollection(request)
    assert second.deleted == 1
    request.page_token = second.next_page_token
    assert (await stub.DeleteCollection(request)).deleted == 0
    hits = (await stub.SearchChunks(a_search(query="red"))).hits
    assert sorted(hit.document_id for hit in hits) == ["a", "d2"]
    request.page_token = ""
    assert (await stub.DeleteCollection(request)).deleted == 2
    assert not (await stub.ListCollections(listing)).collections
    assert await refusal(stub.DeleteCollection(request)) == ("NOT_FOUND", "COLLECTION_UNKNOWN")


async def test_an_ingest_of_a_deleted_collection_is_told(channel: grpc.aio.Channel) -> None:
    stub: Any = DocumentServiceStub(channel)
    place: Any = {"tenant": "a", "collection": "c", "document_id": "x"}
    put = documents_pb2.PutDocumentRequest(
        **place, media_type="text/plain", request_id=str(uuid.uuid4())
    )
    generation = (await stub.PutDocument(put)).document.generation
    store = documents_pb2.StoreChunksRequest(
        **place, generation=generation, chunks=[a_chunk(0, "red", EAST)]
    )
    await stub.StoreChunks(store)
    gone = documents_pb2.DeleteCollectionRequest(tenant="a", collection="c")
    assert (await stub.DeleteCollection(gone)).deleted == 1
    store.complete, store.chunk_count = True, 1
    assert await refusal(stub.StoreChunks(store)) == ("ABORTED", "GENERATION_REPLACED")
    listing = documents_pb2.ListCollectionsRequest(tenant="a", page_size=5)
    assert not (await stub.ListCollections(listing)).collections


@pytest.mark.parametrize("token", ["%", "eA==", "eCB4", "MSA=", "OTk5OTk5OTk5OTk5OTk5OTkgeA=="])
async def test_a_token_of_nobody_deletes_nothing(channel: grpc.aio.Channel, token: str) -> None:
    """None of base64, and of it "x", "x x", "1 ", "99999999999999999 x"."""
    stub: Any = DocumentServiceStub(channel)
    await ingest(stub, "x", a_chunk(0, "red", EAST))
    request = documents_pb2.DeleteCollectionRequest(tenant="a", collection="c", page_token=token)
    assert await refusal(stub.DeleteCollection(request)) == ("INVALID_ARGUMENT", "page_token")
    assert (await stub.SearchChunks(a_search(query="red"))).hits


async def test_a_search_that_cannot_be_ready_in_time_says_when_to_ask_again(
    channel: grpc.aio.Channel, documents: SlowDocuments
) -> None:
    stub: Any = DocumentServiceStub(channel)
    await ingest(stub, "x", a_chunk(0, "red", EAST))
    documents.read_s = 0.6
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.SearchChunks(a_search(query="red"), timeout=0.4)
    error = from_rpc_error(raised.value)
    assert (error.code.name, error.reason) == ("UNAVAILABLE", "INDEX_LOADING")
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    assert (await stub.SearchChunks(a_search(query="red"))).hits


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"tenant": ""}, "tenant"),
        ({"collection": "a/b"}, "collection"),
        ({"document_id": ""}, "document_id"),
        ({"document_id": "é" * 129}, "document_id"),
        ({"content": bytes((3 << 20) + 1)}, "content"),
        ({"media_type": ""}, "media_type"),
        ({"labels": {str(n): "" for n in range(33)}}, "labels"),
        ({"labels": {"x": "y" * 257}}, "labels"),
        ({"labels": {"": "y"}}, "labels"),
        ({"request_id": ""}, "request_id"),
    ],
    ids=lambda one: str(one)[:40],
)
async def test_a_bad_document_is_refused_by_its_field(
    channel: grpc.aio.Channel, bad: Any, field: str
) -> None:
    stub: Any = DocumentServiceStub(channel)
    given: Any = {"tenant": "a", "collection": "c", "document_id": "x", "media_type": "text/plain"}
    request = documents_pb2.PutDocumentRequest(**{**given, "request_id": "r", **bad})
    assert await refusal(stub.PutDocument(request)) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize(
    ("chunks", "field"),
    [
        ([a_chunk(8_192, "x", EAST)], "chunks[0].number"),
        ([a_chunk(0, "x" * ((16 << 10) + 1), EAST)], "chunks[0].text"),
        ([a_chunk(0, "x", EAST), a_chunk(1, "x", [1.0, 0.0, 0.0])], "chunks[1].vector"),
        ([a_chunk(0, "x", [])], "chunks[0].vector"),
        ([a_chunk(0, "x", EAST), a_chunk(1, "x", [0.0, 0.0])], "chunks[1].vector"),
        ([a_chunk(0, "x", [math.nan, 0.0])], "chunks[0].vector"),
        ([documents_pb2.Chunk(vector=b"123")], "chunks[0].vector"),
        ([documents_pb2.Chunk(begin_byte=2, end_byte=1)], "chunks[0].end_byte"),
        ([a_chunk(0, "x", EAST)] * 2, "chunks"),
        ([a_chunk(n, "x", EAST) for n in range(257)], "chunks"),
        ([a_chunk(n, "x" * (16 << 10), EAST) for n in range(200)], "chunks"),
    ],
    ids=lambda one: str(one)[:20] if isinstance(one, str) else "",
)
async def test_bad_chunks_are_refused_by_their_field(
    channel: grpc.aio.Channel, chunks: list[documents_pb2.Chunk], field: str
) -> None:
    stub: Any = DocumentServiceStub(channel)
    place: Any = {"tenant": "a", "collection": "c", "document_id": "x"}
    put = documents_pb2.PutDocumentRequest(**place, media_type="text/plain", request_id="r")
    generation = (await stub.PutDocument(put)).document.generation
    request = documents_pb2.StoreChunksRequest(**place, generation=generation, chunks=chunks)
    assert await refusal(stub.StoreChunks(request)) == ("INVALID_ARGUMENT", field)


async def test_what_cannot_be_completed_or_compared_is_refused(channel: grpc.aio.Channel) -> None:
    stub: Any = DocumentServiceStub(channel)
    made = await ingest(stub, "x", a_chunk(0, "red", EAST))
    place: Any = {"tenant": "a", "collection": "c", "document_id": "y"}
    put = documents_pb2.PutDocumentRequest(**place, media_type="text/plain", request_id="r")
    generation = (await stub.PutDocument(put)).document.generation
    assert generation > made.generation
    store = documents_pb2.StoreChunksRequest(
        **place, generation=generation, complete=True, chunk_count=1
    )
    missing = ("FAILED_PRECONDITION", "CHUNKS_MISSING")
    assert await refusal(stub.StoreChunks(store)) == missing
    store.chunks.append(a_chunk(0, "x", [1.0, 0.0, 0.0]))
    assert await refusal(stub.StoreChunks(store)) == ("INVALID_ARGUMENT", "vector")
    again = documents_pb2.PutDocumentRequest(
        **place, media_type="text/plain", request_id="r", content=b"other"
    )
    assert await refusal(stub.PutDocument(again)) == ("INVALID_ARGUMENT", "request_id")


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"top_k": 0, "query": "x"}, "top_k"),
        ({"top_k": 101, "query": "x"}, "top_k"),
        ({}, "query"),
        ({"query": "x" * ((16 << 10) + 1)}, "query"),
        ({"vector": b"123"}, "vector"),
        ({"vector": vector([0.0, 0.0])}, "vector"),
        ({"vector": vector([1.0, 0.0, 0.0])}, "vector"),
        ({"query": "x", "labels": {"": "y"}}, "labels"),
    ],
    ids=lambda one: str(one)[:30],
)
async def test_a_bad_search_is_refused_by_its_field(
    channel: grpc.aio.Channel, bad: Any, field: str
) -> None:
    stub: Any = DocumentServiceStub(channel)
    await ingest(stub, "x", a_chunk(0, "red", EAST))
    assert await refusal(stub.SearchChunks(a_search(**bad))) == ("INVALID_ARGUMENT", field)
