"""Requests are checked before they are copied or queued, with the paths of the inference layer."""

from __future__ import annotations

from typing import Any

import pytest

from inference_svc.adapters import convert
from scheduler_svc.adapters import translate
from sluice.common.v1 import input_pb2, sampling_pb2
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import generate_pb2

Request = generate_pb2.GenerateRequest
Sampling = sampling_pb2.SamplingParams

WRONG: dict[str, dict[str, Any]] = {
    "sampling.temperature": {"temperature": 2.01},
    "sampling.top_p": {"top_p": 0.0},
    "sampling.top_k": {"top_k": 2**31},
    "sampling.min_p": {"min_p": 1.5},
    "sampling.presence_penalty": {"presence_penalty": float("nan")},
    "sampling.frequency_penalty": {"frequency_penalty": -2.5},
    "sampling.repetition_penalty": {"repetition_penalty": 0.0},
    "sampling.max_tokens": {"max_tokens": 0},
    "sampling.min_tokens": {"min_tokens": 4, "max_tokens": 3},
    "sampling.total_tokens_max": {"total_tokens_max": 0},
    "sampling.stop": {"stop": ["x"] * 17},
    "sampling.stop[1]": {"stop": ["x", ""]},
    "sampling.stop_token_ids": {"stop_token_ids": [1] * 65},
    "sampling.stop_token_ids[0]": {"stop_token_ids": [2**31]},
    "sampling.n": {"n": 9},
    "sampling.logprobs": {"logprobs": 21},
    "sampling.logit_bias": {"logit_bias": {1: 101.0}},
    "sampling.structured_output": {"structured_output": {}},
    "sampling.structured_output.regex": {"structured_output": {"regex": "a" * 4097}},
    "sampling.structured_output.choice": {"structured_output": {"choice": {}}},
    "sampling.structured_output.choice.values[0]": {
        "structured_output": {"choice": {"values": [""]}}
    },
    "sampling.structured_output.json_object": {"structured_output": {"json_object": False}},
}


def refusal(check: Any, *arguments: Any) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        check(*arguments)
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value


@pytest.mark.parametrize("field", WRONG)
def test_both_layers_refuse_the_same_value_in_the_same_words(field: str) -> None:
    sampling = Sampling(**WRONG[field])
    here = refusal(translate.check_sampling, sampling)
    there = refusal(convert.to_sampling, sampling)
    assert here.fields == there.fields
    assert here.fields[0].field == field
    assert str(here) == str(there)


def test_every_sampling_field_with_a_range_has_a_wrong_value_above() -> None:
    free = {"include_stop", "ignore_eos", "seed", "keep_special_tokens"}
    tried = {field.split(".")[1].split("[")[0] for field in WRONG}
    assert tried | free == {field.name for field in Sampling.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("sampling", "count", "tokens_max"),
    [
        (Sampling(), 1, translate.DEFAULT_MAX_TOKENS),
        (Sampling(n=8, max_tokens=1, temperature=0.0), 8, 1),
        (Sampling(min_tokens=translate.DEFAULT_MAX_TOKENS + 1), 1, 513),
        (
            Sampling(structured_output=sampling_pb2.StructuredOutput(json_object=True)),
            1,
            translate.DEFAULT_MAX_TOKENS,
        ),
    ],
)
def test_what_is_not_said_has_its_default(
    sampling: sampling_pb2.SamplingParams, count: int, tokens_max: int
) -> None:
    assert translate.check_sampling(sampling) == translate.Output(count, tokens_max)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(prompt="né"), translate.Input("prompt", 3, None)),
        (Request(text="abc"), translate.Input("text", 3, None)),
        (Request(token_ids=[1, 2]), translate.Input("token_ids", 0, 2)),
    ],
)
def test_an_input_is_measured_without_a_copy(
    request_: generate_pb2.GenerateRequest, expected: translate.Input
) -> None:
    assert translate.check_input(request_) == expected


def test_a_work_has_the_defaults_filled_in_and_the_tenant_in_its_salt() -> None:
    request = Request(messages=[input_pb2.ChatMessage(role="user", content="x")], cache_salt="s")
    source = translate.check_input(request)
    assert source.size_bytes == request.messages[0].ByteSize()
    work = translate.work_for(request, "dev", "r", "m", source, translate.Output(2, 9))
    assert (work.sampling.n, work.sampling.max_tokens) == (2, 9)
    assert not work.sampling.HasField("temperature")
    assert work.cache_salt == "dev/s"
    assert [message.content for message in work.input.conversation.messages] == ["x"]
    assert not request.HasField("sampling"), "the client's own message stays as it was"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "messages"),
        (Request(prompt="x", text="y"), "prompt"),
        (Request(prompt="x", tools=[input_pb2.Tool(name="t")]), "tools"),
        (Request(prompt="x", cache_salt="s" * 129), "cache_salt"),
        (Request(text="x" * (translate.PROMPT_BYTES_MAX + 1)), "text"),
        (Request(token_ids=[0] * (translate.TOKEN_IDS_MAX + 1)), "token_ids"),
    ],
)
def test_a_wrong_input_is_named(request_: generate_pb2.GenerateRequest, field: str) -> None:
    assert refusal(translate.check_input, request_).fields[0].field == field


MESSAGES: dict[str, dict[str, Any]] = {
    "messages[1].role": {"role": "boss", "content": "x"},
    "messages[1].content": {"role": "user"},
    "messages[1].name": {"role": "user", "content": "x", "name": "n" * 257},
    "messages[1].tool_call_id": {"role": "tool", "content": "x", "tool_call_id": "i" * 257},
    "messages[1].tool_calls": {"role": "assistant", "tool_calls": [{"id": "i", "name": "n"}] * 257},
    "messages[1].tool_calls[0].id": {"role": "assistant", "tool_calls": [{"name": "n"}]},
    "messages[1].tool_calls[0].name": {"role": "assistant", "tool_calls": [{"id": "i"}]},
}


@pytest.mark.parametrize("field", MESSAGES)
def test_both_layers_refuse_the_same_message_and_a_good_one_neither(field: str) -> None:
    """An empty message is the client's fault, found before it waits for anything."""
    good = input_pb2.ChatMessage(role="user", content="x")
    wrong = input_pb2.ChatMessage(**MESSAGES[field])
    request = Request(messages=[good, wrong])
    here = refusal(translate.check_input, request)
    source = input_pb2.Input()
    source.conversation.messages.extend(request.messages)
    there = refusal(convert.to_prompt, source, "input")
    assert here.fields[0].field == field
    assert there.fields[0].field == f"input.conversation.{field}"
    assert here.fields[0].description == there.fields[0].description
    translate.check_input(Request(messages=[good]))
