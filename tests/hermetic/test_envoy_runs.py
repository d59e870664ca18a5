"""Runs, sessions and documents as JSON: the real Envoy before a scripted scheduler.

Goal: every annotated method is reached by its own verb and path, with what path, query and body
say in the message's fields; another verb or path reaches nobody; a field that no message has is
refused by name also where the path has variables; events of a run come as they happen, one JSON
value a line. Oracle: what the scheduler was asked.

Seen to fail on the mutants variables_unchecked, streams_as_arrays, reserved_characters_stay_escaped
and slashes_merged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sluice import edge as renderer
from tests.hermetic.edge_harness import Edge, edge_with_stub

RUN = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"
MESSAGE = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge_with_stub(tmp_path_factory.mktemp("edge-runs")) as running:
        yield running


def seen(running: Edge, method: str) -> Any:
    """What a method was asked last."""
    return running.stubs[0].control()["seen"].get(method)


CALLS: list[tuple[str, str, Any, str, dict[str, Any]]] = [
    ("GET", f"/v1/runs/{RUN}", None, "GetRun", {"run_id": RUN}),
    ("GET", "/v1/runs", None, "ListRuns", {}),
    (
        "GET",
        "/v1/runs?page_size=5&page_token=t%2B1&state=RUN_STATE_WAITING",
        None,
        "ListRuns",
        {"page_size": 5, "page_token": "t+1", "state": "RUN_STATE_WAITING"},
    ),
    (
        "POST",
        f"/v1/runs/{RUN}/cancel",
        {"request_id": "r"},
        "CancelRun",
        {"run_id": RUN, "request_id": "r"},
    ),
    (
        "POST",
        f"/v1/runs/{RUN}/resume",
        {"step": 3, "decision": "RESUME_DECISION_SKIP"},
        "ResumeRun",
        {"run_id": RUN, "step": 3, "decision": "RESUME_DECISION_SKIP"},
    ),
    (
        "GET",
        f"/v1/runs/{RUN}/blobs/{RUN}:2:1?offset=7",
        None,
        "GetRunBlob",
        {"run_id": RUN, "blob": f"{RUN}:2:1", "offset": "7"},
    ),
    ("GET", "/v1/tools", None, "ListTools", {}),
    (
        "POST",
        "/v1/sessions",
        {"request_id": "r", "ttl": "60s", "messages": [MESSAGE]},
        "CreateSession",
        {"request_id": "r", "ttl": "60s", "messages": [MESSAGE]},
    ),
    ("GET", "/v1/sessions", None, "ListSessions", {}),
    (
        "GET",
        "/v1/sessions/s-1?from_message=2",
        None,
        "GetSession",
        {"session_id": "s-1", "from_message": 2},
    ),
    (
        "POST",
        "/v1/sessions/s-1/messages",
        {"messages": [MESSAGE], "expected_version": "7"},
        "AppendSession",
        {"session_id": "s-1", "messages": [MESSAGE], "expected_version": "7"},
    ),
    ("DELETE", "/v1/sessions/s-1", None, "DeleteSession", {"session_id": "s-1"}),
    (
        "PUT",
        "/v1/collections/c/documents/a/b%20c.md",
        {"content": "aGk=", "media_type": "text/plain", "labels": {"x": "y"}},
        "PutDocument",
        {
            "collection": "c",
            "document_id": "a/b c.md",
            "content": "aGk=",
            "media_type": "text/plain",
            "labels": {"x": "y"},
        },
    ),
    (
        "GET",
        "/v1/collections/c/documents/a/b",
        None,
        "GetDocument",
        {"collection": "c", "document_id": "a/b"},
    ),
    (
        "GET",
        "/v1/collections/c/documents/a/b?with_content=true",
        None,
        "GetDocument",
        {"collection": "c", "document_id": "a/b", "with_content": True},
    ),
    ("GET", "/v1/collections?page_size=3", None, "ListCollections", {"page_size": 3}),
    (
        "DELETE",
        "/v1/collections/c?page_token=t%2B1",
        None,
        "DeleteCollection",
        {"collection": "c", "page_token": "t+1"},
    ),
    (
        "GET",
        "/v1/collections/c/documents?page_size=2",
        None,
        "ListDocuments",
        {"collection": "c", "page_size": 2},
    ),
    (
        "DELETE",
        "/v1/collections/c/documents/a",
        None,
        "DeleteDocument",
        {"collection": "c", "document_id": "a"},
    ),
    (
        "POST",
        "/v1/collections/c/search",
        {"query": "what?", "top_k": 3},
        "SearchDocuments",
        {"collection": "c", "query": "what?", "top_k": 3},
    ),
]


@pytest.mark.parametrize(("verb", "path", "body", "method", "asked"), CALLS)
def test_a_verb_and_a_path_are_a_method(
    shared: Edge, verb: str, path: str, body: Any, method: str, asked: dict[str, Any]
) -> None:
    answer = httpx.request(verb, f"{shared.url}{path}", json=body, timeout=10)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert seen(shared, method) == asked


@pytest.mark.parametrize(
    ("written", "document"),
    [
        ("a%3Fb", "a?b"),
        ("a%23b", "a#b"),
        ("a%3Ab", "a:b"),
        ("a:b", "a:b"),
        ("a%2Bb", "a+b"),
        ("a+b", "a+b"),
        ("a%40b%26c%3Dd", "a@b&c=d"),
        ("100%25", "100%"),
        ("%253F", "%3F"),
        ("%5Ba%5D%20%C3%A9", "[a] é"),
        ("a//b", "a//b"),
        ("/a", "/a"),
        ("a/.../b", "a/.../b"),
        (".a/..b", ".a/..b"),
    ],
)
def test_a_documents_identifier_is_what_its_path_says(
    shared: Edge, written: str, document: str
) -> None:
    """Mutants reserved_characters_stay_escaped and slashes_merged."""
    base = httpx.URL(f"{shared.url}/v1/collections/c/documents/")
    url = base.copy_with(raw_path=base.raw_path + written.encode())
    for verb, method, body in (
        ("PUT", "PutDocument", {"text": "x"}),
        ("GET", "GetDocument", None),
        ("DELETE", "DeleteDocument", None),
    ):
        assert httpx.request(verb, url, json=body).status_code == 200
        assert seen(shared, method)["document_id"] == document


@pytest.mark.parametrize("written", ["a%2Fb", "a%5Cb", "a%00b"])
def test_an_identifier_with_an_escaped_slash_reaches_nobody(shared: Edge, written: str) -> None:
    before = shared.stubs[0].control()["calls"]
    base = httpx.URL(f"{shared.url}/v1/collections/c/documents/")
    url = base.copy_with(raw_path=base.raw_path + written.encode())
    for verb in ("GET", "DELETE"):
        assert httpx.request(verb, url).status_code == 400
    assert shared.stubs[0].control()["calls"] == before


def test_every_annotated_method_is_called_here() -> None:
    streams = {"RunAgent", "WatchRun"}
    elsewhere = {"GenerateText", "Embed", "ListModels", "GetDecision", "GetUsage"}
    annotated = set(renderer.annotated_methods())
    assert annotated == {call[3] for call in CALLS} | streams | elsewhere


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", f"/v1/runs/{RUN}/cancel"),
        ("POST", f"/v1/runs/{RUN}"),
        ("DELETE", f"/v1/runs/{RUN}"),
        ("PUT", "/v1/sessions/s-1"),
        ("POST", "/v1/collections/c/documents/a"),
        ("PATCH", "/v1/collections/c/documents/a"),
        ("GET", f"/v1/runs/{RUN}/events/more"),
        ("GET", "/v1/runs/"),
        ("POST", "/v1/runs/a/b/cancel"),
        ("POST", "/v1/collections/c/d/search"),
        ("GET", "/v1/collections//documents"),
        ("PUT", "/v1/collections/c/documents/"),
        ("GET", "/v1/collections/c"),
        ("DELETE", "/v1/collections"),
        ("GET", f"/v1/runs/{RUN}/blobs"),
        ("GET", "/v1/sessions/../../stats"),
        ("GET", "/v1/runs/a%2Fevents"),
    ],
)
def test_another_verb_or_path_reaches_nobody(shared: Edge, verb: str, path: str) -> None:
    before = shared.stubs[0].control()["calls"]
    with httpx.Client() as client:
        request = client.build_request(verb, f"{shared.url}/")
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = client.send(request)
    assert answer.status_code in (400, 404), answer.text
    reason = answer.json()["details"][0]["reason"]
    assert reason in ("NO_ROUTE", "BAD_REQUEST")
    assert shared.stubs[0].control()["calls"] == before


@pytest.mark.parametrize(
    ("verb", "path", "body", "field"),
    [
        ("POST", "/v1/runs", {"tsk": "x"}, "tsk"),
        ("POST", "/v1/runs", {"budget": {"steps": 1}}, "budget.steps"),
        ("POST", f"/v1/runs/{RUN}/cancel", {"id": "x"}, "id"),
        ("POST", f"/v1/runs/{RUN}/resume", {"stepp": 1}, "stepp"),
        ("POST", "/v1/sessions", {"messages": [{"rol": "user"}]}, "messages.rol"),
        ("POST", "/v1/sessions/s/messages", {"message": []}, "message"),
        ("PUT", "/v1/collections/c/documents/a/b", {"words": "x"}, "words"),
        ("POST", "/v1/collections/c/search", {"topk": 1}, "topk"),
    ],
)
def test_an_unknown_field_is_refused_by_name(
    shared: Edge, verb: str, path: str, body: Any, field: str
) -> None:
    """Mutant variables_unchecked: bodies of paths with variables are not looked into."""
    before = shared.stubs[0].control()["calls"]
    answer = httpx.request(verb, f"{shared.url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["details"][0]["reason"] == "UNKNOWN_FIELD"
    assert answer.json()["details"][1]["field_violations"][0]["field"] == field
    assert shared.stubs[0].control()["calls"] == before


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("GET", "/v1/runs?page=1", None),
        ("GET", f"/v1/runs/{RUN}?x=1", None),
        ("POST", "/v1/runs?task=x", {"task": "x"}),
        ("DELETE", "/v1/sessions/s?x=1", None),
        ("PUT", "/v1/collections/c/documents/a?media_type=x", {"content": ""}),
        ("POST", f"/v1/runs/{RUN}/cancel", {"run_id": "another"}),
    ],
)
def test_what_contradicts_the_path_or_is_no_field_is_refused(
    shared: Edge, verb: str, path: str, body: Any
) -> None:
    before = shared.stubs[0].control()["calls"]
    answer = httpx.request(verb, f"{shared.url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["details"][0]["reason"] == "BAD_REQUEST"
    assert shared.stubs[0].control()["calls"] == before


@pytest.mark.parametrize(
    ("verb", "path", "body", "method"),
    [
        ("POST", "/v1/runs", {"task": "x", "request_id": RUN}, "RunAgent"),
        ("GET", f"/v1/runs/{RUN}/events?from_sequence=4", None, "WatchRun"),
    ],
)
def test_events_come_as_they_happen_one_json_value_a_line(
    shared: Edge, verb: str, path: str, body: Any, method: str
) -> None:
    """Mutant streams_as_arrays: the value is whole only at its end."""
    times, events = [], []
    with httpx.stream(verb, f"{shared.url}{path}", json=body, timeout=10) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        for line in answer.iter_lines():
            times.append(time.monotonic())
            events.append(json.loads(line)["event"])
    assert [event["sequence"] for event in events] == ["1", "2", "3"]
    assert times[2] - times[0] > 0.4
    asked = {"task": "x", "request_id": RUN}
    if method == "WatchRun":
        asked = {"run_id": RUN, "from_sequence": "4"}
    assert seen(shared, method) == asked
