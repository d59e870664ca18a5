"""What belongs to one tenant does not exist for another.

Goal: no call of the public service tells a tenant whether another tenant's thing exists, gives any
of it away or changes it. Method: the fields of all requests that name something, found in the
descriptors of the service, each with a row here that says how it is called; one tenant owns a run
that waits, a large result, a session, a document and a decision; another calls every RPC with the
owner's name of the thing and with a name that nobody uses. Oracle: the same code, text and details
for both, and the owner's things as they were. A new RPC or field without a row fails. Seed: none.

How long an answer takes tells nothing either: both are asked again and again, in turn, and neither
is the slower one more often than chance allows.

Seen to fail on mutants: a store that finds a session, run or document of any tenant; one that
looks whether another tenant has it (run_of_another_takes_longer).
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest_asyncio
from google.protobuf.message import Message

from sluice.common.v1 import input_pb2
from sluice.scheduler.v1 import data_pb2, records_pb2, runs_pb2, scheduler_pb2
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh
from tests.hermetic.mesh_client import MeshClient, client_of, sim
from tests.security.conftest import COLLECTION, OTHER_KEY

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
CANARY = "the canary sings at midnight"
DOCUMENT = "plan"
# As the state service makes it: the newest generation that goes, the last document that is gone.
DELETION_TOKEN = base64.urlsafe_b64encode(f"{2**52} a".encode()).decode()
LIMIT_S = 20.0
ROUNDS = 40
FAR = 0.3


@dataclass(frozen=True)
class Owned:
    """What the owner has."""

    run_id: str
    step: int
    run_request_id: str
    session_id: str
    session_request_id: str
    decision_id: str
    runs_token: str
    sessions_token: str
    documents_token: str
    blob_run_id: str
    blob: str


Row = Callable[[Owned, str], Message]
"""The request with the owner's thing, in whose place stands ``other`` if that is not empty."""

S = runs_pb2
D = data_pb2
SAY = [input_pb2.ChatMessage(role="user", content="hello")]


def fresh() -> str:
    return str(uuid.uuid4())


# Fields that name something of the caller's tenant: the same answer for a name that is another
# tenant's and for one that is nobody's.
NAMES: Mapping[tuple[str, str], Row] = {
    ("RunAgent", "session_id"): lambda has, other: S.RunAgentRequest(
        task="go on", session_id=other or has.session_id, request_id=fresh()
    ),
    ("GetRun", "run_id"): lambda has, other: S.GetRunRequest(run_id=other or has.run_id),
    ("WatchRun", "run_id"): lambda has, other: S.WatchRunRequest(run_id=other or has.run_id),
    ("CancelRun", "run_id"): lambda has, other: S.CancelRunRequest(
        run_id=other or has.run_id, request_id=fresh()
    ),
    ("ResumeRun", "run_id"): lambda has, other: S.ResumeRunRequest(
        run_id=other or has.run_id,
        step=has.step,
        decision=S.RESUME_DECISION_RETRY,
        request_id=fresh(),
    ),
    ("GetRunBlob", "run_id"): lambda has, other: S.GetRunBlobRequest(
        run_id=other or has.blob_run_id, blob=has.blob
    ),
    ("GetRunBlob", "blob"): lambda has, other: S.GetRunBlobRequest(
        run_id=has.blob_run_id, blob=other or has.blob
    ),
    ("GetSession", "session_id"): lambda has, other: D.GetSessionRequest(
        session_id=other or has.session_id
    ),
    ("AppendSession", "session_id"): lambda has, other: D.AppendSessionRequest(
        session_id=other or has.session_id, messages=SAY, request_id=fresh()
    ),
    ("DeleteSession", "session_id"): lambda has, other: D.DeleteSessionRequest(
        session_id=other or has.session_id
    ),
    ("GetDocument", "collection"): lambda has, other: D.GetDocumentRequest(
        collection=other or COLLECTION, document_id=DOCUMENT
    ),
    ("GetDocument", "document_id"): lambda has, other: D.GetDocumentRequest(
        collection=COLLECTION, document_id=other or DOCUMENT
    ),
    ("ListDocuments", "collection"): lambda has, other: D.ListDocumentsRequest(
        collection=other or COLLECTION
    ),
    ("DeleteDocument", "collection"): lambda has, other: D.DeleteDocumentRequest(
        collection=other or COLLECTION, document_id=DOCUMENT
    ),
    ("DeleteDocument", "document_id"): lambda has, other: D.DeleteDocumentRequest(
        collection=COLLECTION, document_id=other or DOCUMENT
    ),
    ("DeleteCollection", "collection"): lambda has, other: D.DeleteCollectionRequest(
        collection=other or COLLECTION
    ),
    ("SearchDocuments", "collection"): lambda has, other: D.SearchDocumentsRequest(
        collection=other or COLLECTION, query=CANARY, top_k=20
    ),
    ("GetDecision", "request_id"): lambda has, other: records_pb2.GetDecisionRequest(
        request_id=other or has.decision_id
    ),
}

# Fields by which a caller names what it makes, or repeats a call of its own: with another tenant's
# name it makes its own thing. Each is tried by the test that is named.
OWN_NAMES: Mapping[tuple[str, str], str] = {
    ("RunAgent", "request_id"): "test_a_repeated_request_id_is_repeated_for_its_tenant_only",
    ("CreateSession", "request_id"): "test_a_repeated_request_id_is_repeated_for_its_tenant_only",
    ("AppendSession", "request_id"): "test_a_repeated_request_id_is_repeated_for_its_tenant_only",
    ("PutDocument", "collection"): "test_a_document_of_the_same_name_is_another_document",
    ("PutDocument", "document_id"): "test_a_document_of_the_same_name_is_another_document",
    ("PutDocument", "request_id"): "test_a_document_of_the_same_name_is_another_document",
    ("ListRuns", "page_token"): "test_a_page_token_opens_nothing",
    ("ListSessions", "page_token"): "test_a_page_token_opens_nothing",
    ("ListDocuments", "page_token"): "test_a_page_token_opens_nothing",
    ("ListCollections", "page_token"): "test_a_page_token_opens_nothing",
    ("DeleteCollection", "page_token"): "test_a_page_token_opens_nothing",
    # Under a run that is named too, and which is refused first.
    ("CancelRun", "request_id"): "test_another_tenants_name_is_as_one_that_nobody_uses",
    ("ResumeRun", "request_id"): "test_another_tenants_name_is_as_one_that_nobody_uses",
    # A label of one request, kept with its decision, which GetDecision shows to its tenant only.
    ("Generate", "request_id"): "test_a_request_of_the_same_id_has_a_decision_of_its_own",
    ("GenerateText", "request_id"): "test_a_request_of_the_same_id_has_a_decision_of_its_own",
    ("Embed", "request_id"): "test_a_request_of_the_same_id_has_a_decision_of_its_own",
}
NO_NAMES = {("Generate", "token_ids"), ("GenerateText", "token_ids")}
_ENDINGS = ("_id", "_ids", "_token", "_name", "blob", "collection", "document", "session", "run")


def naming_fields() -> set[tuple[str, str]]:
    """The text fields of all requests whose names say that they name something."""
    return {
        (method.name, field.name)
        for method in SERVICE.methods
        for field in method.input_type.fields
        if field.name.endswith(_ENDINGS) and field.type in (field.TYPE_STRING, field.TYPE_UINT32)
    }


def test_every_field_that_names_something_has_a_row() -> None:
    found = naming_fields() - NO_NAMES
    rows = set(NAMES) | set(OWN_NAMES)
    assert not set(NAMES) & set(OWN_NAMES)
    assert found - rows == set(), "a new field that names something needs a row here"
    assert rows - found == set(), "a row for what is not there any more"
    assert {name for name in OWN_NAMES.values() if name not in globals()} == set()


def test_every_rpc_is_known() -> None:
    """One that names nothing by its fields could still show what is another's."""
    nothing = {"Generate", "GenerateText", "Embed", "ListModels", "ListTools", "GetUsage"}
    assert {method.name for method in SERVICE.methods} == (
        nothing | {rpc for rpc, _ in NAMES} | {rpc for rpc, _ in OWN_NAMES}
    )


async def call(client: MeshClient, rpc: str, request: Message) -> list[Any]:
    """All answers of an RPC, streamed or not."""
    stub = getattr(client.stub, rpc)
    made = stub(request, metadata=client.metadata, timeout=LIMIT_S, wait_for_ready=True)
    if SERVICE.methods_by_name[rpc].server_streaming:
        return [answer async for answer in made]
    return [await made]


async def outcome(client: MeshClient, rpc: str, request: Message, name: str) -> str:
    """What a caller sees, without the name itself."""
    try:
        seen = repr([str(answer) for answer in await call(client, rpc, request)])
    except grpc.aio.AioRpcError as error:
        raised = from_rpc_error(error)
        details = {
            key: value
            for key, value in raised.metadata.items()
            if key not in ("request_id", "trace_id")
        }
        seen = repr((raised.code, raised.reason, raised.message, details, raised.retry_after_s))
    return seen.replace(name, "NAME")


@pytest_asyncio.fixture
async def owner(agent_mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(agent_mesh) as client:
        yield client


@pytest_asyncio.fixture
async def stranger(agent_mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(agent_mesh, key=OTHER_KEY) as client:
        yield client


async def put_document(client: MeshClient, text: str, document: str = DOCUMENT) -> None:
    """Stores a document and waits until it can be searched."""
    request = D.PutDocumentRequest(
        collection=COLLECTION,
        document_id=document,
        content=text.encode(),
        media_type="text/plain",
        request_id=fresh(),
    )
    (stored,) = await call(client, "PutDocument", request)
    events = await call(client, "WatchRun", S.WatchRunRequest(run_id=stored.run_id))
    assert events[-1].event.ended.state == S.RUN_STATE_SUCCEEDED, events[-1]


async def waiting_run(client: MeshClient, request_id: str) -> tuple[str, int]:
    """A run that waits for a person's approval: its id and step."""
    replies = [{"tool": "ask", "arguments": {}}, {"answer": CANARY}]
    request = S.RunAgentRequest(
        task=sim(CANARY, replies=replies), tools=["ask"], request_id=request_id
    )
    stream = client.stub.RunAgent(request, metadata=client.metadata, timeout=LIMIT_S)
    async for answer in stream:
        if answer.event.HasField("waiting"):
            stream.cancel()
            return answer.event.run_id, answer.event.waiting.step
    raise AssertionError("the run does not wait")


async def large_result(client: MeshClient) -> tuple[str, str]:
    """A run whose tool gave more than its events show: its id and the name of the whole."""
    replies = [{"tool": "desk__huge", "arguments": {"bytes": 40_000}}, {"answer": CANARY}]
    request = S.RunAgentRequest(
        task=sim("Ask.", replies=replies), tools=["desk"], request_id=fresh()
    )
    events = [answer.event for answer in await call(client, "RunAgent", request)]
    (ended,) = [event.tool_call_ended for event in events if event.HasField("tool_call_ended")]
    assert ended.truncated and ended.blob, ended
    return events[0].run_id, ended.blob


async def session(client: MeshClient, request_id: str) -> str:
    messages = [input_pb2.ChatMessage(role="user", content=CANARY)]
    request = D.CreateSessionRequest(request_id=request_id, messages=messages)
    (made,) = await call(client, "CreateSession", request)
    return str(made.session.session_id)


@pytest_asyncio.fixture
async def has(owner: MeshClient) -> Owned:
    """The owner's things, made anew for each test."""
    run_request_id, session_request_id, decision_id = fresh(), fresh(), fresh()
    run_id, step = await waiting_run(owner, run_request_id)
    session_id = await session(owner, session_request_id)
    await session(owner, fresh())
    await waiting_run(owner, fresh())
    await put_document(owner, CANARY)
    await put_document(owner, "another one", "sequel")
    await owner.text("Hello", request_id=decision_id)
    (runs,) = await call(owner, "ListRuns", S.ListRunsRequest(page_size=1))
    (sessions,) = await call(owner, "ListSessions", D.ListSessionsRequest(page_size=1))
    page = D.ListDocumentsRequest(collection=COLLECTION, page_size=1)
    (documents,) = await call(owner, "ListDocuments", page)
    tokens = (runs.next_page_token, sessions.next_page_token, documents.next_page_token)
    assert all(tokens)
    large = await large_result(owner)
    return Owned(
        run_id,
        step,
        run_request_id,
        session_id,
        session_request_id,
        decision_id,
        *tokens,
        *large,
    )


async def all_is_as_it_was(owner: MeshClient, has: Owned) -> None:
    """The owner's things are there, and untouched."""
    (run,) = await call(owner, "GetRun", S.GetRunRequest(run_id=has.run_id))
    assert run.run.state == S.RUN_STATE_WAITING
    (kept,) = await call(owner, "GetSession", D.GetSessionRequest(session_id=has.session_id))
    assert [message.content for message in kept.messages] == [CANARY]
    found = await call(
        owner, "SearchDocuments", D.SearchDocumentsRequest(collection=COLLECTION, query=CANARY)
    )
    assert CANARY in str(found)
    await call(owner, "GetDecision", records_pb2.GetDecisionRequest(request_id=has.decision_id))


async def test_another_tenants_name_is_as_one_that_nobody_uses(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    differences = []
    for (rpc, field), row in NAMES.items():
        nobodys = fresh()
        request = row(has, "")
        theirs = await outcome(stranger, rpc, request, str(getattr(request, field)))
        unknown = await outcome(stranger, rpc, row(has, nobodys), nobodys)
        if theirs != unknown or CANARY in theirs:
            differences.append(f"{rpc}.{field}: {theirs} != {unknown}")
    assert differences == []
    await all_is_as_it_was(owner, has)


async def test_another_tenants_name_takes_as_long_as_one_that_nobody_uses(
    stranger: MeshClient, has: Owned
) -> None:
    """The share of pairs in which the call with the owner's name took longer (Mann and Whitney's U
    over the number of pairs): 0.5 if time tells nothing, 1 if it always does. Over ROUNDS equal
    calls each, its standard deviation is about 0.065; four rows in a million go beyond FAR by
    chance."""
    told = {}
    for (rpc, field), row in NAMES.items():
        took: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * ROUNDS + 2):
            theirs = number % 4 in (0, 3)  # so that none of the two is always the second
            request = row(has, "" if theirs else fresh())
            begun = time.perf_counter()
            await outcome(stranger, rpc, request, str(getattr(request, field)))
            if number >= 2:
                took[theirs].append(time.perf_counter() - begun)
        unknown, owned = took
        longer = sum(one > other for one in owned for other in unknown)
        share = longer / (len(owned) * len(unknown))
        if abs(share - 0.5) > FAR:
            told[f"{rpc}.{field}"] = share
    assert told == {}


async def test_the_owner_itself_is_answered_otherwise(owner: MeshClient, has: Owned) -> None:
    """So that the rows above name what exists: a row of a wrong request would show nothing."""
    for (rpc, field), row in NAMES.items():
        if rpc in ("WatchRun", "CancelRun", "ResumeRun") or rpc.startswith("Delete"):
            continue  # it would follow, change or end what the next rows need
        nobodys = fresh()
        request = row(has, "")
        own = await outcome(owner, rpc, request, str(getattr(request, field)))
        assert own != await outcome(owner, rpc, row(has, nobodys), nobodys), (rpc, field)


async def test_lists_show_what_is_the_callers_alone(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    seen = [
        await call(stranger, "ListRuns", S.ListRunsRequest(page_size=100)),
        await call(stranger, "ListSessions", D.ListSessionsRequest(page_size=100)),
        await call(stranger, "ListCollections", D.ListCollectionsRequest(page_size=100)),
        await call(stranger, "GetUsage", records_pb2.GetUsageRequest()),
    ]
    for name in (has.run_id, has.session_id, CANARY, "sequel"):
        assert name not in str(seen)


async def test_a_page_token_opens_nothing(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    seen = []
    for rpc, request in (
        ("ListRuns", S.ListRunsRequest(page_token=has.runs_token)),
        ("ListSessions", D.ListSessionsRequest(page_token=has.sessions_token)),
        (
            "ListDocuments",
            D.ListDocumentsRequest(collection=COLLECTION, page_token=has.documents_token),
        ),
        (
            "ListCollections",
            D.ListCollectionsRequest(page_token=has.documents_token),
        ),
        (
            "DeleteCollection",
            D.DeleteCollectionRequest(collection=COLLECTION, page_token=DELETION_TOKEN),
        ),
    ):
        seen.append(await outcome(stranger, rpc, request, "no name"))
    await all_is_as_it_was(owner, has)
    for name in (has.run_id, has.session_id, CANARY, DOCUMENT, "sequel"):
        assert name not in str(seen)


async def test_a_repeated_request_id_is_repeated_for_its_tenant_only(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    assert await session(owner, has.session_request_id) == has.session_id
    assert await session(stranger, has.session_request_id) != has.session_id
    again, _ = await waiting_run(owner, has.run_request_id)
    theirs, _ = await waiting_run(stranger, has.run_request_id)
    assert again == has.run_id != theirs
    append_id = fresh()
    mine = await session(stranger, fresh())
    for client, session_id in ((owner, has.session_id), (stranger, mine)):
        request = D.AppendSessionRequest(session_id=session_id, messages=SAY, request_id=append_id)
        (answer,) = await call(client, "AppendSession", request)
        assert (answer.session.session_id, answer.session.message_count) == (session_id, 2)
    cancel = S.CancelRunRequest(run_id=theirs, request_id=fresh())
    await call(stranger, "CancelRun", cancel)


async def test_a_document_of_the_same_name_is_another_document(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    """Goal: retrieval shows a tenant its own documents only. Method: a document of the same name in
    a collection of the same name, then the other's text as the query, by the search and by its
    words alone. Oracle: none of its text, and the caller's own."""
    await put_document(stranger, "mine says nothing")
    for query in (f"{CANARY} nothing", "canary midnight nothing", "mine says nothing"):
        request = D.SearchDocumentsRequest(collection=COLLECTION, query=query, top_k=20)
        (found,) = await call(stranger, "SearchDocuments", request)
        assert "canary" not in str(found)
        assert "mine says nothing" in str(found)
    document = D.DeleteDocumentRequest(collection=COLLECTION, document_id=DOCUMENT)
    await call(stranger, "DeleteDocument", document)
    await all_is_as_it_was(owner, has)


async def test_an_agent_finds_the_documents_of_its_own_tenant_only(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    """The retrieval tool is one declaration for all tenants."""
    await put_document(stranger, "mine says nothing", "own")
    shown = {}
    for name, client in (("owner", owner), ("stranger", stranger)):
        query = {"query": "canary midnight nothing"}
        replies = [{"tool": "papers", "arguments": query}, {"answer": "x"}]
        request = S.RunAgentRequest(
            task=sim("Search.", replies=replies), tools=["papers"], request_id=fresh()
        )
        events = [answer.event for answer in await call(client, "RunAgent", request)]
        (found,) = [event.tool_call_ended for event in events if event.HasField("tool_call_ended")]
        assert not found.HasField("status"), found
        shown[name] = found.result_json
    assert CANARY in shown["owner"]
    assert "canary" not in shown["stranger"]
    assert "mine says nothing" in shown["stranger"]


async def test_a_request_of_the_same_id_has_a_decision_of_its_own(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    await stranger.text("Hello", request_id=has.decision_id)
    request = records_pb2.GetDecisionRequest(request_id=has.decision_id)
    for client, tenant in ((owner, "dev"), (stranger, "other")):
        (found,) = await call(client, "GetDecision", request)
        assert found.decision.tenant == tenant


async def test_what_a_watcher_waits_for_is_not_shown_to_another(
    owner: MeshClient, stranger: MeshClient, has: Owned
) -> None:
    """A run that goes on while a stranger tries to follow it."""
    request = S.WatchRunRequest(run_id=has.run_id)
    decision = S.ResumeRunRequest(
        run_id=has.run_id,
        step=has.step,
        decision=S.RESUME_DECISION_RETRY,
        request_id=fresh(),
    )
    seen, _ = await asyncio.gather(
        outcome(stranger, "WatchRun", request, has.run_id), call(owner, "ResumeRun", decision)
    )
    assert CANARY not in seen
    (
        kept,
        *_,
    ) = [
        event.event.ended
        for event in await call(owner, "WatchRun", request)
        if event.event.HasField("ended")
    ]
    assert kept.answer == CANARY
