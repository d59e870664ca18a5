"""Sessions and documents at the public service: over gRPC, before the state service's own servicers
with stores in memory.

Goal: what is asked is authorized first, then done as the state service does it; errors pass with
the names that fields have here; another tenant's are like unknown ones; a document is made
searchable by one run, however often it is put; a search embeds its question as the tenant. Oracle:
the protos' words, and what is stored.

Seen to fail on the mutants sessions_without_the_right, ingest_runs_twice and
search_under_another_name.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from scheduler_svc.domain.model import PriorityClass
from sluice.common.v1 import input_pb2
from sluice.errors import Code, exhausted, invalid, not_found
from sluice.scheduler.v1 import data_pb2, mesh_pb2, runs_pb2, spec_pb2
from sluice.state.v1 import documents_pb2, documents_pb2_grpc
from tests.contract.scheduler_rig import Rig, scheduler_rig


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with scheduler_rig(tmp_path) as made:
        yield made


def fresh() -> str:
    return str(uuid.uuid4())


def message(content: str = "hello", role: str = "user") -> input_pb2.ChatMessage:
    return input_pb2.ChatMessage(role=role, content=content)


async def session(rig: Rig, tenant: str = "a", **fields: Any) -> data_pb2.Session:
    request = data_pb2.CreateSessionRequest(request_id=fresh(), **fields)
    made: data_pb2.Session = (await rig.ask("CreateSession", request, tenant)).session
    return made


# Sessions.


async def test_a_session_lives_as_the_state_service_keeps_it(rig: Rig) -> None:
    made = await session(rig, messages=[message("be kind", "system")])
    assert made.message_count == 1
    append = data_pb2.AppendSessionRequest(
        session_id=made.session_id,
        messages=[message("hi"), message("hello", "assistant")],
        expected_version=made.version,
        request_id=fresh(),
    )
    after = (await rig.ask("AppendSession", append)).session
    assert (after.version, after.message_count) == (made.version + 1, 3)
    assert (await rig.ask("AppendSession", append)).session == after, "the same again"
    append.request_id = fresh()
    error = await rig.refused("AppendSession", append)
    assert (error.code, error.reason) == (Code.ABORTED, "VERSION_CONFLICT")
    request = data_pb2.GetSessionRequest(session_id=made.session_id, from_message=1)
    found = await rig.ask("GetSession", request)
    assert [one.content for one in found.messages] == ["hi", "hello"]
    assert found.session.expire_time.seconds > found.session.create_time.seconds
    listed = await rig.ask("ListSessions", data_pb2.ListSessionsRequest())
    assert [one.session_id for one in listed.sessions] == [made.session_id]
    delete = data_pb2.DeleteSessionRequest(session_id=made.session_id)
    await rig.ask("DeleteSession", delete)
    assert (await rig.refused("DeleteSession", delete)).reason == "SESSION_UNKNOWN"


async def test_without_a_request_id_every_call_is_a_new_one(rig: Rig) -> None:
    made = [
        (await rig.ask("CreateSession", data_pb2.CreateSessionRequest())).session.session_id
        for _ in range(2)
    ]
    assert made[0] != made[1]
    append = data_pb2.AppendSessionRequest(session_id=made[0], messages=[message()])
    for count in (1, 2):
        assert (await rig.ask("AppendSession", append)).session.message_count == count
    puts = [await rig.ask("PutDocument", document(request_id="")) for _ in range(2)]
    assert puts[0].run_id != puts[1].run_id


async def test_the_same_request_makes_the_same_session(rig: Rig) -> None:
    request = data_pb2.CreateSessionRequest(request_id=fresh())
    first = (await rig.ask("CreateSession", request)).session
    assert (await rig.ask("CreateSession", request)).session.session_id == first.session_id
    theirs = (await rig.ask("CreateSession", request, "b")).session
    assert theirs.session_id != first.session_id


SESSION_CALLS: dict[str, Any] = {
    "GetSession": data_pb2.GetSessionRequest,
    "DeleteSession": data_pb2.DeleteSessionRequest,
    "AppendSession": lambda **id_: data_pb2.AppendSessionRequest(
        messages=[message()], request_id=fresh(), **id_
    ),
}


async def test_another_tenants_session_is_like_an_unknown_one(rig: Rig) -> None:
    made = await session(rig)
    for method, kind in SESSION_CALLS.items():
        told = []
        for session_id in (made.session_id, fresh()):
            error = await rig.refused(method, kind(session_id=session_id), "b")
            told.append((error.code, error.reason, error.message, error.metadata))
        assert told[0] == told[1]
        assert told[0][:2] == (Code.NOT_FOUND, "SESSION_UNKNOWN")
    assert not (await rig.ask("ListSessions", data_pb2.ListSessionsRequest(), "b")).sessions
    assert await rig.ask("GetSession", data_pb2.GetSessionRequest(session_id=made.session_id))


async def test_the_right_is_asked_for_before_anything_else(rig: Rig) -> None:
    """Mutant sessions_without_the_right."""
    made = await session(rig)
    asks: dict[str, Any] = {
        **{method: kind(session_id=made.session_id) for method, kind in SESSION_CALLS.items()},
        "CreateSession": data_pb2.CreateSessionRequest(request_id="no"),
        "ListSessions": data_pb2.ListSessionsRequest(page_size=1000),
    }
    for method, request in asks.items():
        error = await rig.refused(method, request, "none")
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "SESSIONS_NOT_ALLOWED")
        assert (await rig.refused(method, request, "nobody")).code is Code.UNAUTHENTICATED


WRONG_SESSIONS: list[tuple[str, Any, str]] = [
    ("CreateSession", data_pb2.CreateSessionRequest(request_id="no"), "request_id"),
    (
        "CreateSession",
        data_pb2.CreateSessionRequest(request_id=fresh(), messages=[message(role="x")]),
        "messages[0].role",
    ),
    ("GetSession", data_pb2.GetSessionRequest(session_id="no"), "session_id"),
    ("GetSession", data_pb2.GetSessionRequest(session_id=fresh(), page_size=1001), "page_size"),
    ("ListSessions", data_pb2.ListSessionsRequest(page_size=101), "page_size"),
    ("ListSessions", data_pb2.ListSessionsRequest(page_token="x" * 600), "page_token"),
    ("ListSessions", data_pb2.ListSessionsRequest(page_token="no number"), "page_token"),
    (
        "AppendSession",
        data_pb2.AppendSessionRequest(session_id=fresh(), request_id=fresh()),
        "messages",
    ),
    (
        "AppendSession",
        data_pb2.AppendSessionRequest(
            session_id=fresh(), request_id=fresh(), messages=[message()] * 257
        ),
        "messages",
    ),
    (
        "AppendSession",
        data_pb2.AppendSessionRequest(
            session_id=fresh(), request_id=fresh(), messages=[message("x" * (2 << 20))]
        ),
        "messages",
    ),
    ("DeleteSession", data_pb2.DeleteSessionRequest(session_id=""), "session_id"),
]


@pytest.mark.parametrize(("method", "request_", "field"), WRONG_SESSIONS)
async def test_a_wrong_field_of_a_session_is_named(
    rig: Rig, method: str, request_: Any, field: str
) -> None:
    error = await rig.refused(method, request_)
    assert error.code is Code.INVALID_ARGUMENT
    assert [one.field for one in error.fields] == [field]


async def test_a_sessions_time_to_live_has_bounds(rig: Rig) -> None:
    for seconds, good in ((1, True), (0, False), (90 * 86_400, True), (90 * 86_400 + 1, False)):
        request = data_pb2.CreateSessionRequest(request_id=fresh())
        request.ttl.FromSeconds(seconds)
        if good:
            await rig.ask("CreateSession", request)
        else:
            error = await rig.refused("CreateSession", request)
            assert [one.field for one in error.fields] == ["ttl"]


# Documents.


UNSAYABLE = ("a/", "/", "a//", ".", "..", "x/../y", "./a", "a/..", "a/./b", "a\\b")
"""Identifiers that become others in the path of a URL."""


def document(**fields: Any) -> data_pb2.PutDocumentRequest:
    values: dict[str, Any] = {
        "collection": "manuals",
        "document_id": "a/b",
        "content": "Grüße".encode(),
        "media_type": "text/plain",
        "request_id": fresh(),
    }
    return data_pb2.PutDocumentRequest(**(values | fields))


async def test_a_document_is_stored_and_one_run_makes_it_searchable(rig: Rig) -> None:
    """Mutant ingest_runs_twice."""
    request = document(labels={"team": "x"})
    put = await rig.ask("PutDocument", request)
    again = await rig.ask("PutDocument", request)
    assert put == again
    assert (put.document.document_id, put.document.size_bytes) == ("a/b", 7)
    assert (put.document.ready, dict(put.document.labels)) == (False, {"team": "x"})
    run = rig.runs.only()
    assert put.run_id == run.stored.run_id
    assert rig.link.nudged[0] == ("a", put.run_id)
    assert (run.create.priority, run.create.open_max, run.create.active_max) == (4, 0, 0)
    spec = spec_pb2.RunSpec.FromString(run.stored.spec)
    assert (spec.ingest.collection, spec.ingest.document_id) == ("manuals", "a/b")
    assert spec.ingest.generation > 0 and spec.ingest.embedding_model == "e"
    credential = mesh_pb2.RunCredential.FromString(spec.credential.payload)
    assert (list(credential.models), credential.priority_class) == (["e"], 4)


async def test_a_tenant_without_the_embedding_model_stores_no_document(rig: Rig) -> None:
    rig.names.change("a", models=frozenset(("m",)))
    error = await rig.refused("PutDocument", document())
    assert (error.code, error.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")
    assert not error.fields, "a document has no field for a model"
    listing = data_pb2.ListDocumentsRequest(collection="manuals")
    assert (await rig.refused("ListDocuments", listing)).reason == "COLLECTION_UNKNOWN"


async def test_a_document_may_come_as_text(rig: Rig) -> None:
    """For JSON, where bytes are base64; a plain text in their place is told so."""
    put = await rig.ask("PutDocument", document(content=b"", text="Grüße"))
    assert put.document.size_bytes == 7
    run = rig.runs.only()
    assert runs_pb2.Run.FromString(run.stored.summary).kind == runs_pb2.RUN_KIND_INGEST
    error = await rig.refused("PutDocument", document(content=b"\xff"))
    assert "over JSON it is base64" in error.message and "`text`" in error.message


async def test_a_run_and_a_document_of_one_request_id_are_two(rig: Rig) -> None:
    request = document()
    put = await rig.ask("PutDocument", request)
    run = runs_pb2.RunAgentRequest(task="x", request_id=request.request_id, background=True)
    (queued,) = await rig.events("RunAgent", run)
    assert queued.run_id != put.run_id
    request.document_id = "another"
    error = await rig.refused("PutDocument", request)
    assert [one.field for one in error.fields] == ["request_id"]


async def test_a_new_content_is_a_new_run(rig: Rig) -> None:
    first = await rig.ask("PutDocument", document())
    second = await rig.ask("PutDocument", document(content=b"other"))
    assert first.run_id != second.run_id
    generations = [
        spec_pb2.RunSpec.FromString(run.stored.spec).ingest.generation
        for run in rig.runs.runs.values()
    ]
    assert generations == sorted(set(generations))


async def test_a_request_that_died_between_its_halves_is_carried_on(rig: Rig) -> None:
    request = document()
    rig.runs.away = True
    assert (await rig.refused("PutDocument", request)).code is Code.UNAVAILABLE
    rig.runs.away = False
    put = await rig.ask("PutDocument", request)
    assert rig.runs.only().stored.run_id == put.run_id
    spec = spec_pb2.RunSpec.FromString(rig.runs.only().stored.spec)
    get = data_pb2.GetDocumentRequest(collection="manuals", document_id="a/b")
    assert (await rig.ask("GetDocument", get)).document == put.document
    assert spec.ingest.generation > 0


async def test_documents_are_listed_and_deleted(rig: Rig) -> None:
    for name in ("c", "a", "b"):
        await rig.ask("PutDocument", document(document_id=name))
    page = await rig.ask(
        "ListDocuments", data_pb2.ListDocumentsRequest(collection="manuals", page_size=2)
    )
    rest = await rig.ask(
        "ListDocuments",
        data_pb2.ListDocumentsRequest(collection="manuals", page_token=page.next_page_token),
    )
    names = [one.document_id for one in (*page.documents, *rest.documents)]
    assert names == ["a", "b", "c"]
    assert not rest.next_page_token
    delete = data_pb2.DeleteDocumentRequest(collection="manuals", document_id="b")
    await rig.ask("DeleteDocument", delete)
    get = data_pb2.GetDocumentRequest(collection="manuals", document_id="b")
    assert (await rig.refused("GetDocument", get)).reason == "DOCUMENT_UNKNOWN"


COLLECTION_CALLS: dict[str, Any] = {
    "ListDocuments": data_pb2.ListDocumentsRequest,
    "DeleteCollection": data_pb2.DeleteCollectionRequest,
    "SearchDocuments": lambda **name: data_pb2.SearchDocumentsRequest(query="dogs", **name),
}


async def test_another_tenants_document_is_like_an_unknown_one(rig: Rig) -> None:
    await rig.ask("PutDocument", document())
    for method, kind in (
        ("GetDocument", data_pb2.GetDocumentRequest),
        ("DeleteDocument", data_pb2.DeleteDocumentRequest),
    ):
        told = []
        for name in ("a/b", "nowhere"):
            request = kind(collection="manuals", document_id=name)
            if method == "DeleteDocument":
                told.append(str(await _outcome(rig, method, request, "b")))
            else:
                error = await rig.refused(method, request, "b")
                told.append(f"{error.code} {error.reason} {error.message}")
        assert told[0] == told[1]
    for method, kind in COLLECTION_CALLS.items():
        answers = []
        for name in ("manuals", "nothing"):
            error = await rig.refused(method, kind(collection=name), "b")
            answers.append((error.code, error.reason, error.message, error.metadata))
        assert answers[0] == answers[1]
        assert answers[0][:2] == (Code.NOT_FOUND, "COLLECTION_UNKNOWN")
    collections = data_pb2.ListCollectionsRequest()
    assert not (await rig.ask("ListCollections", collections, "b")).collections
    listed = data_pb2.ListDocumentsRequest(collection="manuals")
    assert (await rig.ask("ListDocuments", listed)).documents


async def test_collections_are_listed_and_deleted(rig: Rig) -> None:
    for name in ("c", "a"):
        await rig.ask("PutDocument", document(document_id=name))
    await rig.ask("PutDocument", document(collection="B"))
    first = await rig.ask("ListCollections", data_pb2.ListCollectionsRequest(page_size=1))
    rest = await rig.ask(
        "ListCollections", data_pb2.ListCollectionsRequest(page_token=first.next_page_token)
    )
    both = (*first.collections, *rest.collections)
    assert [(one.collection, one.document_count) for one in both] == [("B", 1), ("manuals", 2)]
    delete = data_pb2.DeleteCollectionRequest(collection="manuals")
    done = await rig.ask("DeleteCollection", delete)
    assert (done.deleted, done.next_page_token) == (2, "")
    assert (await rig.refused("DeleteCollection", delete)).reason == "COLLECTION_UNKNOWN"
    (left,) = (await rig.ask("ListCollections", data_pb2.ListCollectionsRequest())).collections
    assert left.collection == "B"


async def test_the_content_of_a_document_comes_if_asked_for(rig: Rig) -> None:
    await rig.ask("PutDocument", document())
    get = data_pb2.GetDocumentRequest(collection="manuals", document_id="a/b")
    found = await rig.ask("GetDocument", get)
    assert (found.content, found.document.media_type) == (b"", "text/plain")
    get.with_content = True
    assert (await rig.ask("GetDocument", get)).content == "Grüße".encode()
    assert (await rig.refused("GetDocument", get, "b")).reason == "DOCUMENT_UNKNOWN"


async def _outcome(rig: Rig, method: str, request: Any, tenant: str) -> Any:
    """An answer or an error, for calls that may do either."""
    try:
        return await rig.ask(method, request, tenant)
    except Exception as error:
        return type(error).__name__


async def test_a_search_embeds_its_question_as_the_tenant(rig: Rig) -> None:
    put = await rig.ask("PutDocument", document())
    generation = spec_pb2.RunSpec.FromString(rig.runs.only().stored.spec).ingest.generation
    stub: Any = documents_pb2_grpc.DocumentServiceStub(rig.state)
    chunks = [
        documents_pb2.Chunk(
            number=number,
            text=f"about {topic}",
            begin_byte=number,
            end_byte=number + 1,
            vector=struct.pack("<3f", *values),
        )
        for number, (topic, values) in enumerate((("x", (1, 0, 0)), ("y", (0, 1, 0))))
    ]
    await stub.StoreChunks(
        documents_pb2.StoreChunksRequest(
            tenant="a",
            collection=put.document.collection,
            document_id=put.document.document_id,
            generation=generation,
            chunks=chunks,
            complete=True,
            chunk_count=2,
        )
    )
    request = data_pb2.SearchDocumentsRequest(collection="manuals", query="dogs", top_k=1)
    (hit,) = (await rig.ask("SearchDocuments", request)).hits
    assert (hit.document_id, hit.chunk, hit.text) == ("a/b", 1, "about y")
    assert (hit.begin_byte, hit.end_byte) == (1, 2)
    assert (hit.vector_score, hit.term_score) == (pytest.approx(1.0), 0.0), "none of its words"
    asked, caller = rig.answers.embedded[0]
    assert (list(asked.texts), caller.tenant.name) == (["dogs"], "a")
    assert caller.priority_class is PriorityClass.STANDARD
    assert 0 < caller.remaining_s < 11
    request.query = "birds"
    assert not (await rig.ask("SearchDocuments", request)).hits, "near neither vector"


async def test_a_search_that_cannot_embed_says_so_in_its_own_words(rig: Rig) -> None:
    request = data_pb2.SearchDocumentsRequest(collection="manuals", query="dogs")
    rig.answers.fails = exhausted("QUOTA_EXCEEDED", "used up", 3.0)
    error = await rig.refused("SearchDocuments", request)
    assert (error.code, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 3.0)
    rig.answers.fails = invalid("texts[0]", "is too long", "CONTEXT_LENGTH")
    error = await rig.refused("SearchDocuments", request)
    assert [one.field for one in error.fields] == ["query"]
    assert "texts" not in error.message
    rig.answers.fails = not_found("MODEL_UNKNOWN", "no such model for this tenant", field="model")
    error = await rig.refused("SearchDocuments", request)
    assert (error.reason, error.message) == ("MODEL_UNKNOWN", "no such model for this tenant")
    assert not error.fields, "a search has no field for a model"


async def test_a_search_is_recorded_under_the_name_that_its_client_gave_it(rig: Rig) -> None:
    """Mutant search_under_another_name."""
    rig.headers = (("x-request-id", "search-1"),)
    await rig.refused("SearchDocuments", data_pb2.SearchDocumentsRequest(collection="c", query="x"))
    _, caller = rig.answers.embedded[0]
    assert caller.request_id == "search-1"


BAD_DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"request_id": "no"}, "request_id"),
    ({"collection": ""}, "collection"),
    ({"collection": "a b"}, "collection"),
    ({"collection": "x" * 65}, "collection"),
    ({"document_id": ""}, "document_id"),
    ({"document_id": "é" * 129}, "document_id"),
    *(({"document_id": name}, "document_id") for name in UNSAYABLE),
    ({"media_type": "text/x"}, "media_type"),
    ({"content": b""}, "content"),
    ({"content": b"\xff"}, "content"),
    ({"text": "as well"}, "content"),
    ({"content": b"", "text": "x" * ((3 << 20) + 1)}, "text"),
    ({"content": b"x" * ((3 << 20) + 1)}, "content"),
    ({"labels": {str(n): "" for n in range(33)}}, "labels"),
    ({"labels": {"": "x"}}, "labels"),
    ({"labels": {"x": "y" * 257}}, "labels"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_DOCUMENTS)
async def test_a_wrong_field_of_a_document_is_named_and_nothing_stored(
    rig: Rig, fields: dict[str, Any], field: str
) -> None:
    error = await rig.refused("PutDocument", document(**fields))
    assert error.code is Code.INVALID_ARGUMENT
    assert [one.field for one in error.fields] == [field]
    listed = data_pb2.ListDocumentsRequest(collection="manuals")
    assert (await rig.refused("ListDocuments", listed)).reason == "COLLECTION_UNKNOWN"
    assert not rig.runs.calls


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"query": ""}, "query"),
        ({"query": "x" * (17 << 10)}, "query"),
        ({"top_k": 101}, "top_k"),
        ({"collection": "?"}, "collection"),
        ({"labels": {"": ""}}, "labels"),
    ],
)
async def test_a_wrong_search_costs_no_embedding(
    rig: Rig, fields: dict[str, Any], field: str
) -> None:
    values: dict[str, Any] = {"collection": "manuals", "query": "dogs"} | fields
    error = await rig.refused("SearchDocuments", data_pb2.SearchDocumentsRequest(**values))
    assert [one.field for one in error.fields] == [field]
    assert not rig.answers.embedded
