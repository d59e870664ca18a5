"""Every documented refusal, over gRPC and over HTTP: code, reason, field, and nothing else.

Goal: a client can tell from code, `ErrorInfo.reason` and `BadRequest` what was wrong, whichever way
it asked, and never reads text that an exception or an engine wrote. Method: one table of wrong
requests, sent to the shared mesh as a stream, as one piece and as JSON; then the refusals that take
time. Oracle: the table, and that the mesh is idle and answers afterwards.

Seen to fail on the mutants in tests/mutants: engine_text_sent_on, index_of_a_text_lost,
inference_paths_shown.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx
import pytest
from google.protobuf import json_format

from sluice.errors import Code, SluiceError
from sluice.reasons import HTTP_STATUS
from sluice.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    data_pb2,
    generate_pb2,
    runs_pb2,
)
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh
from tests.hermetic.mesh_client import MeshClient, collect, fresh_id, sim

BAD = Code.INVALID_ARGUMENT


@dataclass(frozen=True)
class Case:
    """A wrong request and its refusal."""

    fields: dict[str, Any]
    path: str = ""
    """The field that is named; empty: none."""
    code: Code = BAD
    reason: str = "INVALID_FIELD"
    metadata: dict[str, str] = field(default_factory=dict)


def sampling(path: str = "", **values: Any) -> Case:
    """A wrong sampling value; by default its own name is the path."""
    return Case({"prompt": "x", "sampling": values}, f"sampling.{path or next(iter(values))}")


def form(path: str, **values: Any) -> Case:
    """A wrong constraint."""
    return sampling(f"structured_output.{path}", structured_output=values)


CHAT = {"role": "user", "content": "x"}
LONG = "CONTEXT_LENGTH_EXCEEDED"

GENERATE = {
    "no input": Case({"sampling": {"max_tokens": 1}}, "messages"),
    "two inputs": Case({"prompt": "x", "text": "y"}, "prompt"),
    "tools without messages": Case({"prompt": "x", "tools": [{"name": "t"}]}, "tools"),
    "role": Case({"messages": [CHAT, {"role": "boss", "content": "x"}]}, "messages[1].role"),
    "empty message": Case({"messages": [{"role": "user"}]}, "messages[0].content"),
    "token out of the vocabulary": Case({"token_ids": [1, 10**6]}, "token_ids"),
    "temperature": sampling(temperature=2.01),
    "temperature is no number": sampling(temperature=float("nan")),
    "negative temperature": sampling(temperature=-0.1),
    "top_p zero": sampling(top_p=0.0),
    "top_p": sampling(top_p=1.01),
    "top_k": sampling(top_k=2**31),
    "min_p": sampling(min_p=1.5),
    "presence": sampling(presence_penalty=-2.5),
    "frequency": sampling(frequency_penalty=2.5),
    "repetition": sampling(repetition_penalty=0.0),
    "max_tokens zero": sampling(max_tokens=0),
    "min over max": sampling("min_tokens", max_tokens=2, min_tokens=3),
    "n zero": sampling(n=0),
    "n": sampling(n=9),
    "logprobs": sampling(logprobs=21),
    "empty stop": sampling("stop[1]", stop=["a", ""]),
    "long stop": sampling("stop[0]", stop=["a" * 257]),
    "many stops": sampling(stop=["a"] * 17),
    "stop token": sampling("stop_token_ids[0]", stop_token_ids=[10**6]),
    "bias": sampling(logit_bias={1: 101.0}),
    "schema": form("json_schema", json_schema='{"type": '),
    "regex": form("regex", regex="(((("),
    "grammar": form("grammar", grammar="nothing like a grammar"),
    "no choices": form("choice", choice={}),
    "request id": Case({"prompt": "x", "request_id": "with space"}, "request_id"),
    "class": Case({"prompt": "x", "priority_class": 99}, "priority_class"),
    "first token limit": Case({"prompt": "x", "first_token_limit": {}}, "first_token_limit"),
    "salt": Case({"prompt": "x", "cache_salt": "s" * 129}, "cache_salt"),
    "long prompt": Case({"prompt": "y" * 100_000}, "prompt", reason=LONG),
    "long text": Case({"text": "y" * 100_000}, "text", reason=LONG),
    "long messages": Case(
        {"messages": [CHAT | {"content": "y" * 99_999}]}, "messages", reason=LONG
    ),
    "long tokens": Case({"token_ids": [97] * 8_192}, "token_ids", reason=LONG),
    "unknown model": Case(
        {"prompt": "x", "model": "nope"},
        "model",
        code=Code.NOT_FOUND,
        reason="MODEL_UNKNOWN",
        metadata={"model": "nope"},
    ),
    "a model that only embeds": Case(
        {"prompt": "x", "model": "sim-embed"},
        code=Code.FAILED_PRECONDITION,
        reason="MODEL_CAPABILITY",
    ),
}

EMBED = {
    "no texts": Case({}, "texts"),
    "an empty text": Case({"texts": ["a", ""]}, "texts[1]"),
    "many texts": Case({"texts": ["a"] * 257}, "texts"),
    "a long text": Case({"texts": ["a", "y" * 100_000]}, "texts[1]", reason=LONG),
    "request id": Case({"texts": ["a"], "request_id": "é"}, "request_id"),
    "unknown model": Case(
        {"texts": ["a"], "model": "nope"}, "model", code=Code.NOT_FOUND, reason="MODEL_UNKNOWN"
    ),
    "a model that generates": Case(
        {"texts": ["a"], "model": "sim"}, code=Code.FAILED_PRECONDITION, reason="MODEL_CAPABILITY"
    ),
}


def check(error: SluiceError, case: Case) -> None:
    """The refusal is the table's."""
    assert (error.code, error.reason) == (case.code, case.reason), error
    assert [violation.field for violation in error.fields] == ([case.path] if case.path else [])
    assert case.metadata.items() <= dict(error.metadata).items()
    assert error.metadata["charged"] == "false"
    assert error.metadata["scope"]
    # What a client reads names its own field and no other layer's.
    assert "input" not in error.message
    assert case.path in error.message


def from_http(response: httpx.Response) -> SluiceError:
    """The error in a JSON body, after checks of its form."""
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    details = {entry["@type"].rsplit(".", 1)[1]: entry for entry in body["details"]}
    info = details["ErrorInfo"]
    assert info["domain"] == "sluice"
    fields = details.get("BadRequest", {}).get("field_violations", [])
    retry = details.get("RetryInfo", {}).get("retry_delay")
    error = SluiceError(
        Code(body["code"]),
        info["reason"],
        body["message"],
        metadata=info.get("metadata", {}),
        retry_after_s=float(retry.rstrip("s")) if retry else None,
        fields=[Violation(entry["field"]) for entry in fields],  # type: ignore[misc]
    )
    assert response.status_code == HTTP_STATUS[error.code], response.text
    if retry:
        assert int(response.headers["retry-after"]) >= 1
    return error


@dataclass(frozen=True)
class Violation:
    """As sluice.errors.FieldViolation, without a description."""

    field: str


async def refused(call: Any) -> SluiceError:
    """The error of a unary call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("name", GENERATE)
async def test_a_wrong_generation_is_refused_alike_everywhere(
    client: MeshClient, name: str
) -> None:
    case = GENERATE[name]
    metadata = client.mesh.metadata
    stream = client.stub.Generate(
        generate_pb2.GenerateRequest(**case.fields), metadata=metadata, timeout=20
    )
    answer = await collect(stream)
    assert not answer.messages
    check(answer.refused, case)
    request = generate_pb2.GenerateTextRequest(**case.fields)
    check(await refused(client.stub.GenerateText(request, metadata=metadata, timeout=20)), case)
    body = json_format.MessageToDict(request, preserving_proto_field_name=True)
    check(from_http(await client.http.post("/chat", json=body)), case)


@pytest.mark.parametrize("name", EMBED)
async def test_a_wrong_embedding_is_refused_alike_everywhere(client: MeshClient, name: str) -> None:
    case = EMBED[name]
    request = generate_pb2.EmbedRequest(**case.fields)
    call = client.stub.Embed(request, metadata=client.mesh.metadata, timeout=20)
    check(await refused(call), case)
    check(from_http(await client.http.post("/v1/embed", json=case.fields)), case)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "KEY_MISSING"),
        ("Basic abc", "KEY_MALFORMED"),
        ("Bearer", "KEY_MALFORMED"),
        ("Bearer wrong", "KEY_UNKNOWN"),
        ("Bearer " + "k" * 600, "KEY_MALFORMED"),
    ],
)
async def test_without_a_known_key_nothing_is_done(
    client: MeshClient, header: str | None, reason: str
) -> None:
    metadata = () if header is None else (("authorization", header),)
    text = generate_pb2.GenerateTextRequest(prompt="x")
    embed = generate_pb2.EmbedRequest(texts=["x"])
    models = generate_pb2.ListModelsRequest()
    async with httpx.AsyncClient(base_url=client.mesh.url, headers=dict(metadata)) as http:
        for error in (
            await refused(client.stub.GenerateText(text, metadata=metadata)),
            await refused(client.stub.Embed(embed, metadata=metadata)),
            await refused(client.stub.ListModels(models, metadata=metadata)),
            from_http(await http.post("/chat", json={"prompt": "x"})),
            from_http(await http.get("/v1/models")),
        ):
            assert (error.code, error.reason) == (Code.UNAUTHENTICATED, reason)


async def test_a_tenants_key_is_no_admin_key(client: MeshClient, shared_mesh: Mesh) -> None:
    stub = admin_pb2_grpc.SchedulerAdminServiceStub(client.channel)
    call = stub.WatchStatus(admin_pb2.WatchStatusRequest(), metadata=client.mesh.metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).reason == "ADMIN_ONLY"


@pytest.mark.parametrize("method", ["GetRun", "CreateSession", "PutDocument"])
async def test_without_a_state_service_nothing_is_kept(client: MeshClient, method: str) -> None:
    fields = {
        "GetRun": {"run_id": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"},
        "CreateSession": {},
        "PutDocument": {},
    }[method]
    kinds = vars(runs_pb2) | vars(data_pb2)
    request = kinds[f"{method}Request"](**fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(client.stub, method)(request, metadata=client.mesh.metadata)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) in (
        (Code.FAILED_PRECONDITION, "STATE_NOT_CONFIGURED"),
        (Code.UNAVAILABLE, "AGENT_SERVICE_MISSING"),
    )


# Refusals that take time.


def seconds(value: float) -> dict[str, int]:
    """A protobuf duration."""
    return {"seconds": int(value), "nanos": int(value % 1 * 1e9)}


async def test_no_first_token_within_its_limit(client: MeshClient, shared_mesh: Mesh) -> None:
    """The instance accepts and sends nothing, the client waits; all is freed."""
    prompt = sim(hang_after=0)
    answer = await client.generate(prompt, first_token_limit=seconds(0.4))
    assert (answer.refused.code, answer.refused.reason) == (
        Code.DEADLINE_EXCEEDED,
        "FIRST_TOKEN_TIMEOUT",
    )
    assert [message.WhichOneof("event") for message in answer.messages] == ["started"]
    shared_mesh.until_idle(2.0)
    body = {"prompt": prompt, "first_token_limit": "0.4s"}
    error = from_http(await client.http.post("/chat", json=body))
    assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "FIRST_TOKEN_TIMEOUT")
    shared_mesh.until_idle(2.0)


async def test_no_further_token_within_the_limit(client: MeshClient, shared_mesh: Mesh) -> None:
    prompt = sim(hang_after=3)
    answer = await client.generate(prompt, sampling={"max_tokens": 9}, return_token_ids=True)
    assert (answer.refused.code, answer.refused.reason) == (
        Code.DEADLINE_EXCEEDED,
        "INTER_TOKEN_TIMEOUT",
    )
    assert len(answer.tokens()) == 3, "what came before is delivered"
    shared_mesh.until_idle(2.0)
    error = from_http(await client.http.post("/chat", json={"prompt": prompt}))
    assert error.reason == "INTER_TOKEN_TIMEOUT"


async def test_the_total_deadline_ends_a_stream(client: MeshClient, shared_mesh: Mesh) -> None:
    answer = await client.generate(sampling={"max_tokens": 2000}, timeout=0.5)
    assert answer.refused.code is Code.DEADLINE_EXCEEDED
    assert answer.deltas
    shared_mesh.until_idle(1.0)
    answer = await client.generate(sim(hang_after=0), timeout=0.3)
    assert answer.refused.code is Code.DEADLINE_EXCEEDED
    shared_mesh.until_idle(1.0)


SECRET = "Traceback: /srv/secret.py\nline two\r\ndata: three"


@pytest.mark.parametrize("status", ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "DATA_LOSS"])
async def test_an_engine_that_fails_midway_gives_one_typed_error(
    client: MeshClient, shared_mesh: Mesh, status: str
) -> None:
    """The engine's own text, of several lines, is read by nobody."""
    prompt = sim(fail_after=3, status=status, message=SECRET, reason="ENGINE_BROKE")
    answer = await client.generate(prompt, sampling={"max_tokens": 9}, return_token_ids=True)
    error = answer.refused
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "INSTANCE_LOST")
    assert error.metadata["delivered_tokens"] == str(len(answer.tokens())) == "3"
    assert (error.metadata["instance"], error.metadata["cause"]) == ("sim-0", "ENGINE_BROKE")
    assert (error.metadata["scope"], error.metadata["charged"]) == ("instance", "true")
    response = await client.http.post("/chat", json={"prompt": prompt})
    assert from_http(response).reason == "INSTANCE_LOST"
    said = repr(answer.trailers) + response.text + repr(response.headers) + str(error)
    assert "secret" not in said
    assert "line two" not in said


async def test_an_engine_that_always_fails_is_tried_and_given_up(client: MeshClient) -> None:
    """Before the first token a failed request is placed again, a bounded number of times."""
    prompt = sim(fail_after=0, status="INTERNAL", message=SECRET)
    answer = await client.generate(prompt)
    error = answer.refused
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "INSTANCE_LOST")
    assert (error.metadata["attempts"], error.metadata["delivered_tokens"]) == ("3", "0")
    assert error.metadata["charged"] == "false"
    assert "secret" not in repr(answer.trailers) + str(error)
    assert not answer.deltas


async def test_refusals_of_the_engine_keep_their_code(client: MeshClient) -> None:
    prompt = sim(refuse=True, status="INVALID_ARGUMENT", reason="ENGINE_SAYS_NO", message="no")
    error = (await client.generate(prompt)).refused
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "ENGINE_SAYS_NO")
    assert (
        from_http(await client.http.post("/chat", json={"prompt": prompt})).reason == error.reason
    )


async def test_neither_prompts_nor_keys_are_in_any_log(
    client: MeshClient, shared_mesh: Mesh
) -> None:
    canary = fresh_id("canary-prompt")
    await client.generate(canary, sampling={"max_tokens": 4})
    await client.generate(sim(canary, fail_after=1))
    await client.http.post("/chat", json={"prompt": canary, "sampling": {"temperature": 9}})
    await asyncio.sleep(0)
    for process in shared_mesh.processes.values():
        text = process.text()
        assert canary not in text
        assert shared_mesh.api_key not in text


async def test_lines_of_the_logs_are_json(client: MeshClient, shared_mesh: Mesh) -> None:
    await client.generate(sim(fail_after=1))
    for name in ("scheduler-0", "execution-0", "sim-0"):
        lines = shared_mesh[name].text().splitlines()
        assert lines
        for line in lines:
            assert {"time", "level", "service", "message"} <= json.loads(line).keys(), line
