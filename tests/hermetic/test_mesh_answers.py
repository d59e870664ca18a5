"""What a client gets from a whole mesh of real processes: every public call, input and form.

Goal: the same answer over gRPC and HTTP, streamed or whole, through the mesh or straight from the
instance. Method: the shared mesh on the simulated engine, whose text is a function of the whole
token prefix, so that a lost, repeated or exchanged token changes everything after it. Oracle: the
instance's own plain `Generate`, and what the engine says it received.

Seen to fail on the mutants in tests/mutants: end_during_a_write, forbidden_is_told,
sequence_stands, text_sent_twice, zero_is_unset.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import pytest

from sluice.common.v1 import input_pb2, result_pb2, sampling_pb2
from sluice.grants import GrantSigner
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from sluice.scheduler.v1 import generate_pb2
from tests.hermetic.mesh import Mesh
from tests.hermetic.mesh_client import MeshClient, fresh_id, sim

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48}
LENGTH = result_pb2.FINISH_REASON_LENGTH
STOP = result_pb2.FINISH_REASON_STOP
KOREAN = "삼겹살 🫠 龜 and back"


def ask_instance(mesh: Mesh, work: inference_pb2.Work) -> str:
    """The text that the instance itself gives, past the scheduler, with a grant."""
    signer = GrantSigner.load(mesh.runtime / "keys", "test")
    grant = signer.sign(work.request_id, "sim-0", now_unix_s=time.time())
    stub = inference_pb2_grpc.InferenceServiceStub(mesh.channel("sim-0"))
    messages = stub.Generate(inference_pb2.GenerateRequest(work=work, grant=grant), timeout=20)
    return "".join(message.delta.text for message in messages)


async def http(client: MeshClient, path: str, **body: Any) -> dict[str, Any]:
    """A JSON call that succeeds."""
    response = await client.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_every_way_to_ask_gives_the_same_answer(
    client: MeshClient, shared_mesh: Mesh
) -> None:
    streamed = (await client.generate("A question", sampling=GREEDY)).ok
    whole = await client.text("A question", sampling=GREEDY)
    body = {"prompt": "A question", "sampling": GREEDY}
    chat = await http(client, "/chat", **body)
    generate = await http(client, "/v1/generate", **body)
    work = inference_pb2.Work(
        request_id=fresh_id(),
        input=input_pb2.Input(
            conversation=input_pb2.Conversation(
                messages=[input_pb2.ChatMessage(role="user", content="A question")]
            )
        ),
        sampling=sampling_pb2.SamplingParams(**GREEDY),
    )
    direct = ask_instance(shared_mesh, work)
    assert direct
    assert streamed.text() == whole.text == chat["text"] == generate["text"] == direct
    assert whole.outputs[0].finish.finish_reason == LENGTH


async def test_a_stream_is_started_then_deltas_then_finished(client: MeshClient) -> None:
    answer = (await client.generate(sampling=GREEDY, return_token_ids=True)).ok
    started, finished = answer.started, answer.finished
    assert (started.model, started.instance, started.simulated) == ("sim", "sim-0", True)
    assert len(answer.deltas) > 1, "it came in one piece"
    assert len(answer.tokens()) == finished.usage.completion_tokens == 48
    assert started.prompt_tokens == finished.usage.prompt_tokens > 0
    assert started.request_id == finished.request_id
    assert (finished.attempts, finished.simulated) == (1, True)
    assert [end.finish_reason for end in finished.outputs] == [LENGTH]
    timings = finished.timings
    assert timings.first_token.ToNanoseconds() <= timings.total.ToNanoseconds()
    assert timings.per_output_token.ToMilliseconds() >= 3  # a step is 4 ms


async def test_every_stream_has_its_end_whenever_it_comes(client: MeshClient) -> None:
    """Short outputs, whose end often arrives while the handler writes."""
    answers = await asyncio.gather(
        *(
            client.generate(str(number), sampling={"max_tokens": 1 + number % 5})
            for number in range(120)
        )
    )
    for number, answer in enumerate(answers):
        assert answer.ok.finished.usage.completion_tokens == 1 + number % 5


async def test_the_four_forms_of_input_reach_the_engine(client: MeshClient) -> None:
    """`text` and `token_ids` are taken as they are; `prompt` is one user message."""
    fault = sim("", echo="prompt")
    raw = (await client.generate(text="raw " + fault, sampling={"max_tokens": 200})).ok
    assert raw.text() == "raw " + fault
    ids = list(("ids " + fault).encode())  # single bytes are tokens of the simulated vocabulary
    tokens = (await client.generate(token_ids=ids, sampling={"max_tokens": 200})).ok
    assert tokens.text() == "ids " + fault
    assert tokens.started.prompt_tokens == len(ids)
    prompt = (await client.generate("said " + fault, sampling={"max_tokens": 200})).ok
    message = {"role": "user", "content": "said " + fault}
    messages = (await client.generate(messages=[message], sampling={"max_tokens": 200})).ok
    assert prompt.text() == messages.text()
    assert prompt.text().startswith("<user>: said ")
    system = {"role": "system", "content": "Be brief."}
    two = (await client.generate(messages=[system, message], sampling={"max_tokens": 200})).ok
    assert two.text().startswith("<system>: Be brief.\n<user>: said ")
    tool = {"name": "look_up", "description": "Looks up.", "parameters_json": '{"type": "object"}'}
    offered = await client.generate(messages=[message], tools=[tool], sampling={"max_tokens": 250})
    assert "look_up" in offered.ok.text()


ZEROES = {
    "temperature": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "seed": 0,
}


async def test_unset_and_zero_are_different_things_at_the_engine(client: MeshClient) -> None:
    """Over gRPC and over JSON."""
    prompt = sim("", echo="sampling")
    limit = {"max_tokens": 500}
    unset = json.loads((await client.generate(prompt, sampling=limit)).ok.text())
    assert not unset.keys() & (ZEROES.keys() | {"top_p", "repetition_penalty", "logprobs"})
    zero = json.loads((await client.generate(prompt, sampling=limit | ZEROES)).ok.text())
    assert {name: zero[name] for name in ZEROES} == ZEROES
    over_http = json.loads((await http(client, "/chat", prompt=prompt, sampling=limit))["text"])
    assert over_http == unset
    body = {"prompt": prompt, "sampling": limit | ZEROES}
    assert json.loads((await http(client, "/chat", **body))["text"]) == zero
    none = json.loads((await client.generate(prompt)).ok.text())
    assert none["max_tokens"] == 512  # the documented default
    assert none.keys() == unset.keys()


async def test_every_sampling_field_reaches_the_engine(client: MeshClient) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "max_tokens": 700,
        "min_tokens": 3,
        "stop": ["never said"],
        "stop_token_ids": [5],
        "include_stop": True,
        "ignore_eos": True,
        "seed": -9,
        "n": 1,
        "logprobs": 1,
        "logit_bias": {3: 2.5},
        "keep_special_tokens": True,
        "total_tokens_max": 4000,
    }
    answer = await client.generate(sim("", echo="sampling"), sampling=sampling)
    # With ignore_eos and keep_special_tokens the output goes on after its end, visibly.
    got = json.loads(answer.ok.text().split("<eos>")[0])
    assert got == sampling | {"logit_bias": {"3": 2.5}}


async def test_several_outputs_have_their_own_text_and_end(client: MeshClient) -> None:
    sampling = {"n": 2, "max_tokens": 20, "seed": 4}
    answer = (await client.generate(sampling=sampling, return_token_ids=True)).ok
    assert len(answer.tokens(0)) == len(answer.tokens(1)) == 20
    assert answer.text(0) != answer.text(1)
    assert [end.index for end in answer.finished.outputs] == [0, 1]
    assert answer.finished.usage.completion_tokens == 40
    whole = await client.text(sampling=sampling)
    assert [output.text for output in whole.outputs] == [answer.text(0), answer.text(1)]
    assert whole.text == whole.outputs[0].text


async def test_log_probabilities_come_for_every_token(client: MeshClient) -> None:
    sampling = {"logprobs": 2, "max_tokens": 12}
    answer = (await client.generate(sampling=sampling, return_token_ids=True)).ok
    entries = [entry for delta in answer.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == answer.tokens()
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in entries)
    whole = await http(client, "/chat", prompt="Hello", sampling=sampling)
    assert len(whole["outputs"][0]["logprobs"]) == 12


async def test_a_stop_string_ends_the_output_and_is_not_sent(
    client: MeshClient, shared_mesh: Mesh
) -> None:
    """The string lies across two tokens, long before max_tokens."""
    prompt = sim("", reply="one two STOP HERE " + "three " * 200, reply_bytes=True)
    sampling = {"stop": ["STOP HERE"], "max_tokens": 1000}
    answer = (await client.generate(prompt, sampling=sampling)).ok
    assert answer.text() == "one two "
    end = answer.finished.outputs[0]
    assert (end.finish_reason, end.stop_string) == (STOP, "STOP HERE")
    assert answer.finished.usage.completion_tokens < 24
    shared_mesh.until_idle(1.0)
    kept = await client.text(prompt, sampling=sampling | {"include_stop": True})
    assert kept.text == "one two STOP HERE"


async def test_structured_output_is_followed(client: MeshClient) -> None:
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    form = {"max_tokens": 200, "structured_output": {"json_schema": schema}}
    whole = await http(client, "/chat", prompt="Hello", sampling=form)
    assert isinstance(json.loads(whole["text"])["n"], int)
    choice = {"structured_output": {"choice": {"values": ["yes", "no"]}}}
    assert (await client.generate(sampling=choice)).ok.text() in ("yes", "no")


async def test_characters_are_whole_however_tokens_cut_them(client: MeshClient) -> None:
    """One byte a token and, as the model does it, fragments of characters."""
    prompt = sim("", reply=KOREAN, reply_bytes=True, pace_ms=6)
    answer = (await client.generate(prompt, sampling={"max_tokens": 100})).ok
    assert answer.text() == KOREAN
    assert len(answer.deltas) > 2
    assert (await client.text(prompt, sampling={"max_tokens": 100})).text == KOREAN
    cuts = sim("", reply=KOREAN, reply_cuts=[1, 2, 4, 11, 12, 13])
    assert (await client.generate(cuts, sampling={"max_tokens": 100})).ok.text() == KOREAN
    for number in range(4):
        made = (await client.generate(f"Say {number}", sampling={"max_tokens": 150})).ok
        assert "\ufffd" not in made.text()
        made.text().encode()


async def test_the_request_id_is_the_field_or_the_header_or_new(client: MeshClient) -> None:
    own = fresh_id("own")
    tiny = {"max_tokens": 1}
    assert (await client.generate(request_id=own, sampling=tiny)).ok.started.request_id == own
    header = fresh_id("header")
    response = await client.http.post(
        "/chat", json={"prompt": "x", "sampling": tiny}, headers={"x-request-id": header}
    )
    assert response.json()["request_id"] == header
    first = (await client.generate(sampling=tiny)).ok.started.request_id
    second = (await client.generate(sampling=tiny)).ok.started.request_id
    assert first != second
    assert len(first) == len(second) == 36


async def test_an_alias_names_its_model(client: MeshClient) -> None:
    answer = (await client.generate(model="fast", sampling={"max_tokens": 1})).ok
    assert answer.started.model == "sim"


async def test_models_are_listed_with_what_they_can(client: MeshClient) -> None:
    listed = await client.stub.ListModels(
        generate_pb2.ListModelsRequest(), metadata=client.mesh.metadata
    )
    models = {model.name: model for model in listed.models}
    assert models.keys() == {"sim", "sim-embed"}
    text, vectors = models["sim"], models["sim-embed"]
    assert text.generates and not text.embeds and text.is_default and text.available
    assert vectors.embeds and not vectors.generates and vectors.is_default
    assert (text.instances, vectors.embedding_dimensions) == (1, 8)
    assert (text.simulated, list(text.aliases)) == (True, ["fast"])
    over_http = (await client.http.get("/v1/models")).json()["models"]
    assert {model["name"] for model in over_http} == models.keys()


async def test_a_tenant_sees_only_its_models(client: MeshClient, shared_mesh: Mesh) -> None:
    headers = {"authorization": "Bearer narrow-key"}
    listed = await client.http.get("/v1/models", headers=headers)
    assert [model["name"] for model in listed.json()["models"]] == ["sim-embed"]
    refused = await client.http.post("/chat", json={"prompt": "x", "model": "sim"}, headers=headers)
    unknown = await client.http.post(
        "/chat", json={"prompt": "x", "model": "nope"}, headers=headers
    )
    assert refused.status_code == unknown.status_code == 404
    # Not even the text says which of the two exists, beyond the name that was asked for.
    assert refused.json()["message"].replace("'sim'", "'nope'") == unknown.json()["message"]


async def test_texts_are_embedded_in_their_order(client: MeshClient) -> None:
    texts = ["one", "two", "one"]
    response = await client.stub.Embed(
        generate_pb2.EmbedRequest(texts=texts), metadata=client.mesh.metadata, timeout=20
    )
    vectors = [list(embedding.values) for embedding in response.embeddings]
    assert [len(vector) for vector in vectors] == [8, 8, 8]
    assert vectors[0] == vectors[2] != vectors[1]
    assert (response.model, response.instance, response.simulated) == ("sim-embed", "embed-0", True)
    assert response.usage.prompt_tokens > 0
    over_http = await http(client, "/v1/embed", texts=texts)
    assert len(over_http["embeddings"]) == 3
    assert over_http["embeddings"][0]["values"] == pytest.approx(vectors[0], abs=1e-6)


async def test_grpc_web_and_reflection_are_served(client: MeshClient, shared_mesh: Mesh) -> None:
    message = generate_pb2.GenerateRequest(
        prompt="x", sampling=sampling_pb2.SamplingParams(max_tokens=2)
    )
    data = message.SerializeToString()
    response = await client.http.post(
        "/sluice.scheduler.v1.SchedulerService/Generate",
        content=b"\0" + len(data).to_bytes(4, "big") + data,
        headers={"content-type": "application/grpc-web+proto"},
    )
    assert response.status_code == 200
    assert b"grpc-status:0" in response.content.replace(b" ", b"")
    health = grpc.insecure_channel(shared_mesh.target)
    with health:
        assert (await client.http.get("/healthz")).status_code == 200
