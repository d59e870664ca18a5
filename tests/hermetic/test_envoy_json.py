"""JSON at the edge: the transcoder, its errors and its limits.

With the real Envoy before a scripted scheduler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest
from google.rpc import status_pb2

from sluice import reasons
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.server_limits import ServerLimits
from sluice.status import from_status
from tests.hermetic.edge_harness import Edge, edge_with_stub, script

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge_with_stub(tmp_path_factory.mktemp("edge")) as running:
        yield running


def post(running: Edge, body: Any = None, path: str = "/chat", **values: Any) -> httpx.Response:
    """POST of a JSON body."""
    return httpx.post(f"{running.url}{path}", json=body, timeout=20, **values)


def detail(answer: httpx.Response, kind: str) -> dict[str, Any]:
    """The error detail of a kind."""
    name = f"type.googleapis.com/google.rpc.{kind}"
    found: list[dict[str, Any]] = [
        each for each in answer.json()["details"] if each["@type"] == name
    ]
    assert len(found) == 1, answer.text
    return found[0]


@pytest.mark.parametrize("path", ["/v1/generate", "/chat"])
def test_a_question_in_json_is_answered_in_json(shared: Edge, path: str) -> None:
    answer = post(shared, {"prompt": "What is the capital of France?"}, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["instance"] == "a"


def test_a_body_without_content_type_is_understood(shared: Edge) -> None:
    answer = httpx.post(f"{shared.url}/chat", content=b'{"prompt":"x"}')
    assert answer.status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says
    assert post(shared, {"prompt": "x"}, headers=form).status_code == 200


def test_models_and_embeddings_have_routes_and_zeros_are_printed(shared: Edge) -> None:
    models = httpx.get(f"{shared.url}/v1/models").json()["models"]
    assert models[0]["name"] == "stub"
    assert (models[0]["simulated"], models[0]["context_tokens"], models[0]["aliases"]) == (
        False,
        0,
        [],
    )
    answer = post(shared, {"texts": ["3"]}, "/v1/embed")
    assert answer.json()["embeddings"] == [{"values": [0.1, 0.1, 0.1]}]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("FAILED_PRECONDITION", 400),
        ("UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", 403),
        ("NOT_FOUND", 404),
        ("ABORTED", 409),
        ("RESOURCE_EXHAUSTED", 429),
        ("INTERNAL", 500),
        ("UNIMPLEMENTED", 501),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
    ],
)
@pytest.mark.parametrize("initial", [False, True])
def test_an_error_before_any_message_has_its_http_status_and_its_details(
    shared: Edge, code: str, status: int, initial: bool
) -> None:
    """`initial`: the service had already sent its response headers."""
    answer = post(shared, {"prompt": script("fail", code=code, initial=initial)})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["message"] == "refused: SCRIPTED"
    assert detail(answer, "ErrorInfo")["reason"] == "SCRIPTED"
    assert ("www-authenticate" in answer.headers) == (status == 401)
    if code == "INVALID_ARGUMENT":
        assert detail(answer, "BadRequest")["field_violations"][0]["field"] == "sampling.top_p"


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize(("code", "status"), [("RESOURCE_EXHAUSTED", 429), ("UNAVAILABLE", 503)])
def test_a_refusal_says_when_to_ask_again(
    shared: Edge, code: str, status: int, initial: bool
) -> None:
    prompt = script("fail", code=code, retry_after=7, initial=initial)
    answer = post(shared, {"prompt": prompt})
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "7"
    assert detail(answer, "RetryInfo")["retry_delay"] == "7s"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"promt": "x"}, "promt"),
        ({"prompt": "x", "temperature": 0.5}, "temperature"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"messages": [{"role": "user", "text": "x"}]}, "messages.text"),
        (
            {"sampling": {"structured_output": {"choice": {"value": []}}}},
            "sampling.structured_output.choice.value",
        ),
        ({"prompt": 'a "quoted\\" [{', "x y": 1}, "x?y"),
        ({"token_ids": [1, 2, [3]], "after": 1}, "after"),
        ({"": 1}, ""),
    ],
)
def test_an_unknown_field_is_refused_by_name(shared: Edge, body: Any, field: str) -> None:
    for text in (json.dumps(body), json.dumps(body, indent=2)):
        answer = httpx.post(f"{shared.url}/chat", content=text)
        assert answer.status_code == 400, answer.text
        assert detail(answer, "ErrorInfo")["reason"] == "UNKNOWN_FIELD"
        assert detail(answer, "BadRequest")["field_violations"][0]["field"] == field


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"priority_class": "BATCH"}, "priority_class", "PRIORITY_CLASS_BATCH"),
        ({"priorityClass": ""}, "priorityClass", "PRIORITY_CLASS_CRITICAL"),
        ({"first_token_limit": "1.5"}, "first_token_limit", "1.5s"),
        ({"first_token_limit": 5}, "first_token_limit", "1.5s"),
        ({"first_token_limit": "a minute"}, "first_token_limit", "1.5s"),
    ],
)
def test_a_word_or_a_time_that_is_none_is_refused_by_its_field(
    shared: Edge, body: Any, field: str, said: str
) -> None:
    for text in (json.dumps({"prompt": "x"} | body), json.dumps(body | {"prompt": "x"}, indent=1)):
        answer = httpx.post(f"{shared.url}/chat", content=text)
        assert answer.status_code == 400, answer.text
        assert detail(answer, "ErrorInfo")["reason"] == "INVALID_FIELD"
        (violation,) = detail(answer, "BadRequest")["field_violations"]
        assert violation["field"] == field
        assert said in violation["description"] and "UNSPECIFIED" not in violation["description"]
        assert answer.json()["message"] == f"{field}: {violation['description']}"


@pytest.mark.parametrize(
    "body",
    [
        {"priority_class": "PRIORITY_CLASS_UNSPECIFIED"},
        {"priority_class": 2},
        {"priority_class": None},
        {"first_token_limit": "2s"},
        {"first_token_limit": None},
    ],
)
def test_every_form_of_a_word_and_a_time_is_let_through(shared: Edge, body: Any) -> None:
    answer = post(shared, {"prompt": "x"} | body)
    assert answer.status_code == 200, answer.text


def test_a_word_in_a_query_is_refused_by_its_field(shared: Edge) -> None:
    for name, word in (("state", "WAITING"), ("kind", "task")):
        answer = httpx.get(f"{shared.url}/v1/runs?page_size=1&{name}={word}")
        assert answer.status_code == 400
        (violation,) = detail(answer, "BadRequest")["field_violations"]
        assert violation["field"] == name
        assert f"RUN_{name.upper()}_" in violation["description"]
    for query in ("state=RUN_STATE_WAITING&kind=RUN_KIND_TASK", "state=4", "page_size=3"):
        assert httpx.get(f"{shared.url}/v1/runs?{query}").status_code == 200


def test_every_known_form_of_a_body_is_let_through(shared: Edge) -> None:
    body = {
        "prompt": "{}",
        "messages": [
            {
                "role": "assistant",
                "content": 'a } ] " \\ \n {"x": 1}',
                "toolCalls": [{"id": "1", "arguments_json": "{}"}],
            },
            {"role": "user"},
        ],
        "tokenIds": [1, 2],
        "sampling": {
            "temperature": 0,
            "logit_bias": {"17": -1.5, "18": 2},
            "stop": ["}", "]", '"', ","],
            "structuredOutput": {"choice": {"values": ["a", "b"]}},
            "seed": "12",
        },
        "priority_class": "PRIORITY_CLASS_BATCH",
        "first_token_limit": "1.5s",
        "cache_salt": None,
    }
    for text in (json.dumps(body | {"prompt": "x"}), json.dumps(body | {"prompt": "x"}, indent=1)):
        answer = httpx.post(f"{shared.url}/chat", content=text)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"prompt"',
        '{"prompt":',
        '{"prompt": "x',
        "[]",
        "[1]",
        '"x"',
        "nonsense",
        '{"prompt": "x"}}',
        '{"messages": [{"role": "user"',
        '{"sampling": []}',
        '{"messages": {"role": 1, "x": }',
        '{"messages": [}',
        '{"messages": [ } ]}',
        '{"messages": [{}, }]}',
        '{"sampling": {"stop": [}}}',
        '{"prompt": ' + "[" * 10_000,
        '{"messages": ' + "[" * 10_000 + "]" * 10_000 + "}",
        '{"messages": [' + "{" * 10_000,
        '{"prompt": "\\ud800"}',
        '{"sampling": {"temperature": "hot"}}',
        '{"sampling": {"max_tokens": -1}}',
    ],
)
def test_a_broken_body_is_a_client_error_and_the_edge_lives(shared: Edge, text: str) -> None:
    answer = httpx.post(f"{shared.url}/chat", content=text)
    # An empty body is an empty request, which the service judges.
    assert answer.status_code == (400 if text else 200), answer.text
    if text:
        assert answer.json()["code"] == 3
        assert detail(answer, "ErrorInfo")["reason"] in ("BAD_REQUEST", "UNKNOWN_FIELD")
    assert httpx.get(f"{shared.url}/v1/models").status_code == 200


@pytest.mark.parametrize("query", ["?x=1", "?prompt=x", "?"])
def test_query_parameters_are_refused(shared: Edge, query: str) -> None:
    for answer in (
        post(shared, {"prompt": "x"}, f"/chat{query}"),
        httpx.get(f"{shared.url}/v1/models{query}"),
    ):
        if query == "?" and answer.status_code == 200:
            continue  # some clients drop it
        assert answer.status_code == 400
        assert "query" in answer.json()["message"]


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_body_is_taken_up_to_its_limit(
    shared: Edge, extra: int, chunked: bool, http2: bool
) -> None:
    size = shared.settings.body_bytes_max + extra
    body = b'{"prompt":"%s"}' % (b"a" * (size - 13))
    parts = (body[at : at + 65_536] for at in range(0, size, 65_536))
    with httpx.Client(http1=not http2, http2=http2, timeout=20) as client:
        answer = client.post(f"{shared.url}/chat", content=parts if chunked else body)
    if extra > 0:
        assert answer.status_code == 413
        assert detail(answer, "ErrorInfo")["reason"] == "BODY_TOO_LARGE"
    else:
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["text"])["prompt_bytes"] == size - 13


def test_the_largest_answer_arrives(shared: Edge) -> None:
    size = ServerLimits().message_bytes - 1_000
    answer = post(shared, {"prompt": script("text", bytes=size)})
    assert answer.status_code == 200
    assert len(answer.json()["text"]) == size


def test_an_answer_over_the_edges_limit_is_an_error(tmp_path: Path) -> None:
    with edge_with_stub(tmp_path, response_bytes_max=MIB) as running:
        assert post(running, {"prompt": script("text", bytes=MIB - 100)}).status_code == 200
        answer = post(running, {"prompt": script("text", bytes=MIB + 100)})
        assert answer.status_code == 500
        assert detail(answer, "ErrorInfo")["reason"] == "INTERNAL"


def test_checking_a_body_of_many_small_values_takes_little_time(shared: Edge) -> None:
    """The check runs on the event loop: the slowest form of 1 MiB must not hold others for long."""
    forms = (
        '{"token_ids":[%s1]}' % ("1," * (MIB // 2)),
        '{"messages":[%s{}]}' % ("{}," * (MIB // 3)),
        '{"sampling":{"stop":[%s"a"]}}' % ('"a",' * (MIB // 4)),
        '{"prompt":"%s"}' % ("\\n" * (MIB // 2)),
    )
    for text in forms:
        before = shared.cpu_s()
        begin = time.monotonic()
        httpx.post(f"{shared.url}/chat", content=text, timeout=20)
        took = time.monotonic() - begin
        assert shared.cpu_s() - before < 0.5, (text[:20], took)


def test_a_client_that_goes_away_ends_the_call(shared: Edge) -> None:
    before = shared.stubs[0].control()["cancelled"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{shared.url}/chat", json={"prompt": script("hang")}, timeout=0.3)
    end = time.monotonic() + 2
    while shared.stubs[0].control()["cancelled"] == before:
        assert time.monotonic() < end
        time.sleep(0.02)


SERVED: dict[str, reasons.Reason] = {**reasons.REQUESTS, **reasons.ADMIN}


@pytest.mark.parametrize("reason", SERVED)
def test_every_refusal_is_the_same_over_grpc_and_http(shared: Edge, reason: str) -> None:
    known = SERVED[reason]
    delay_s = 1.5 if known.delay else None
    for code in known.codes:
        prompt = script("refuse", code=code.name, reason=reason, retry_after_s=delay_s)
        request = generate_pb2.GenerateTextRequest(prompt=prompt)
        with grpc.insecure_channel(shared.target) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GenerateText(request, timeout=10)
        trailers: Any = dict(cast("Any", caught.value.trailing_metadata()))
        told = from_status(status_pb2.Status.FromString(trailers["grpc-status-details-bin"]))
        assert (told.code, told.reason, told.retry_after_s) == (code, reason, delay_s)
        assert told.metadata == {"scope": known.scope, "charged": "false"}
        answer = post(shared, {"prompt": prompt})
        assert answer.status_code == reasons.HTTP_STATUS[code]
        assert answer.json()["code"] == code.value
        info = detail(answer, "ErrorInfo")
        assert (info["reason"], info["domain"], info["metadata"]) == (
            reason,
            "sluice",
            told.metadata,
        )
        assert answer.headers.get("retry-after") == ("2" if known.delay else None)
        assert trailers.get("retry-after") == ("2" if known.delay else None)
        if known.delay:
            assert detail(answer, "RetryInfo")["retry_delay"] == "1.500s"


def test_what_the_edge_refuses_says_its_scope_and_that_nothing_was_charged(shared: Edge) -> None:
    for answer, reason in (
        (post(shared, {"nope": 1}), "UNKNOWN_FIELD"),
        (httpx.get(f"{shared.url}/nowhere"), "NO_ROUTE"),
        (httpx.post(f"{shared.url}/chat", content=b"{"), "BAD_REQUEST"),
    ):
        info = detail(answer, "ErrorInfo")
        assert info["reason"] == reason
        assert info["metadata"] == {"scope": "edge", "charged": "false"}
