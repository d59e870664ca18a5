"""From protos to what an engine reads: presence, forms, sizes, and the names of wrong fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_svc.adapters import convert
from inference_svc.ports import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Continuation,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from sluice.common.v1 import input_pb2, sampling_pb2
from sluice.errors import Code, SluiceError
from sluice.inference.v1 import inference_pb2

Work = inference_pb2.Work
NAMES = frozenset({"m", "alias"})


def work() -> Work:
    made = Work(request_id="r")
    made.input.text = "hi"
    return made


def chat(*roles: str) -> Work:
    made = Work(request_id="r")
    for role in roles:
        made.input.conversation.messages.add(role=role, content="hi")
    return made


def test_unset_is_none_and_zero_stays_zero() -> None:
    unset = convert.to_spec(work(), NAMES).sampling
    assert unset == Sampling()
    made = work()
    made.sampling.temperature = 0.0
    made.sampling.seed = 0
    made.sampling.top_k = 0
    made.sampling.min_tokens = 0
    made.sampling.logprobs = 0
    zero = convert.to_spec(made, NAMES).sampling
    assert zero == Sampling(temperature=0.0, seed=0, top_k=0, min_tokens=0, logprobs=0)


def test_every_sampling_field_arrives() -> None:
    made = work()
    made.sampling.CopyFrom(
        sampling_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=1.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            max_tokens=9,
            min_tokens=3,
            stop=["a", "b"],
            stop_token_ids=[4, 5],
            include_stop=True,
            ignore_eos=True,
            seed=-3,
            n=2,
            logprobs=4,
            logit_bias={6: -1.0},
            keep_special_tokens=True,
            total_tokens_max=90,
            structured_output=sampling_pb2.StructuredOutput(regex="a+"),
        )
    )
    assert convert.to_spec(made, NAMES).sampling == Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=3,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        include_stop=True,
        ignore_eos=True,
        seed=-3,
        n=2,
        logprobs=4,
        logit_bias={6: -1.0},
        keep_special_tokens=True,
        total_tokens_max=90,
        constraint=Constraint(ConstraintKind.REGEX, "a+"),
    )
    known = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert len(known) == 20  # a new field needs a line above


def test_each_form_of_input_and_constraint_is_told_apart() -> None:
    assert convert.to_spec(work(), NAMES).prompt == TextPrompt("hi")
    tokens = Work(request_id="r")
    tokens.input.token_ids.ids.extend([1, 2])
    assert convert.to_spec(tokens, NAMES).prompt == TokenPrompt((1, 2))
    structured = sampling_pb2.StructuredOutput
    for given, expected in (
        (structured(json_schema="{}"), Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        (structured(grammar="root"), Constraint(ConstraintKind.GRAMMAR, "root")),
        (structured(json_object=True), Constraint(ConstraintKind.JSON_OBJECT)),
        (
            structured(choice=sampling_pb2.ChoiceList(values=["a", "b"])),
            Constraint(ConstraintKind.CHOICE, choices=("a", "b")),
        ),
    ):
        made = work()
        made.sampling.structured_output.CopyFrom(given)
        assert convert.to_spec(made, NAMES).sampling.constraint == expected


def test_a_conversation_takes_the_shape_that_templates_read() -> None:
    made = chat("system", "user")
    call = made.input.conversation.messages.add(role="assistant")
    call.tool_calls.add(id="c1", name="add", arguments_json='{"a": 1}')
    call.tool_calls.add(id="c2", name="add", arguments_json="{broken")
    made.input.conversation.messages.add(role="tool", content="2", tool_call_id="c1", name="add")
    made.input.conversation.tools.add(
        name="add", description="adds", parameters_json='{"type": "object"}'
    )
    prompt = convert.to_spec(made, NAMES).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0] == {"role": "system", "content": "hi"}
    assert prompt.messages[2]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
    ]
    assert prompt.messages[3] == {
        "role": "tool",
        "content": "2",
        "tool_call_id": "c1",
        "name": "add",
    }
    assert prompt.tools == (
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "adds",
                "parameters": {"type": "object"},
            },
        },
    )
    assert not prompt.continue_final_message


def test_a_continuation_arrives_whole_and_its_absence_is_none() -> None:
    assert convert.to_spec(work(), NAMES).continuation is None
    made = work()
    made.continuation.output_token_ids.extend([5, 6])
    made.continuation.delivered_text_bytes = 3
    made.continuation.delivered_text_tail = "abc"
    made.continuation.model_fingerprint = "f"
    assert convert.to_spec(made, NAMES).continuation == Continuation((5, 6), 3, "abc", "f")


def test_an_alias_is_served_and_another_model_is_not_found() -> None:
    made = work()
    made.model = "alias"
    convert.to_spec(made, NAMES)
    made.model = "other"
    with pytest.raises(SluiceError) as caught:
        convert.to_spec(made, NAMES)
    assert caught.value.code is Code.NOT_FOUND


def set_text(made: Work, text: str) -> None:
    made.input.text = text


def add_messages(made: Work, count: int) -> None:
    for _ in range(count):
        made.input.conversation.messages.add(role="user", content="x")


def add_tool(made: Work, parameters: str) -> None:
    made.input.conversation.messages.add(role="user", content="x")
    made.input.conversation.tools.add(name="t", parameters_json=parameters)


WRONG: list[tuple[str, Callable[[Work], object]]] = [
    ("request_id", lambda w: setattr(w, "request_id", "")),
    ("request_id", lambda w: setattr(w, "request_id", "x" * 129)),
    ("request_id", lambda w: setattr(w, "request_id", "a b")),
    ("cache_salt", lambda w: setattr(w, "cache_salt", "x" * 257)),
    ("input", lambda w: w.ClearField("input")),
    ("input.text", lambda w: set_text(w, "")),
    ("input.token_ids", lambda w: w.input.token_ids.SetInParent()),
    ("input.conversation.messages", lambda w: w.input.conversation.SetInParent()),
    ("input.conversation.messages", lambda w: add_messages(w, convert.MESSAGES_MAX + 1)),
    ("input.conversation.messages[0].role", lambda w: w.input.conversation.messages.add(role="x")),
    (
        "input.conversation.messages[0].content",
        lambda w: w.input.conversation.messages.add(role="user"),
    ),
    ("input.conversation.tools[0].parameters_json", lambda w: add_tool(w, "[1]")),
    ("input.conversation.tools[0].parameters_json", lambda w: add_tool(w, "[" * 100_000)),
    ("sampling.temperature", lambda w: setattr(w.sampling, "temperature", 2.5)),
    ("sampling.temperature", lambda w: setattr(w.sampling, "temperature", float("nan"))),
    ("sampling.max_tokens", lambda w: setattr(w.sampling, "max_tokens", 0)),
    ("sampling.n", lambda w: setattr(w.sampling, "n", 0)),
    ("sampling.stop", lambda w: w.sampling.stop.extend(["x"] * 17)),
    ("sampling.structured_output", lambda w: w.sampling.structured_output.SetInParent()),
    (
        "sampling.structured_output.json_object",
        lambda w: setattr(w.sampling.structured_output, "json_object", False),
    ),
    ("continuation.model_fingerprint", lambda w: w.continuation.SetInParent()),
]


@pytest.mark.parametrize(("field", "spoil"), WRONG)
def test_a_wrong_field_is_named(field: str, spoil: Callable[[Work], object]) -> None:
    made = work()
    spoil(made)
    with pytest.raises(SluiceError) as caught:
        convert.to_spec(made, NAMES)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.fields[0].field == field


def test_what_is_embedded_is_counted_and_never_a_conversation() -> None:
    text = input_pb2.Input(text="a")
    assert convert.to_prompts([text] * 256) == [TextPrompt("a")] * 256
    talk = input_pb2.Input(conversation=input_pb2.Conversation())
    empty = input_pb2.Input(text="")
    for inputs, field in (
        ([], "inputs"),
        ([text] * 257, "inputs"),
        ([text, talk], "inputs[1].conversation"),
        ([text, text, empty], "inputs[2].text"),
    ):
        with pytest.raises(SluiceError) as caught:
            convert.to_prompts(inputs)
        assert caught.value.fields[0].field == field


@pytest.mark.parametrize(
    ("parameters", "taken"),
    [
        (r'{"description": "\ud83d\ude00"}', True),
        (r'{"description": "\ud83d"}', False),
        (r'{"\udfff": 1}', False),
    ],
)
def test_a_tool_that_spells_half_a_character_is_refused(parameters: str, taken: bool) -> None:
    source = input_pb2.Input()
    source.conversation.messages.add(role="user", content="hi")
    source.conversation.tools.add(name="f", parameters_json=parameters)
    if taken:
        convert.to_prompt(source, "input")
        return
    with pytest.raises(SluiceError) as refusal:
        convert.to_prompt(source, "input")
    assert refusal.value.fields[0].field == "input.conversation.tools[0].parameters_json"


def test_arguments_that_spell_half_a_character_stay_as_they_are_written() -> None:
    source = input_pb2.Input()
    message = source.conversation.messages.add(role="assistant")
    message.tool_calls.add(id="1", name="f", arguments_json=r'{"a": "\ud83d"}')
    prompt: Any = convert.to_prompt(source, "input")
    function = prompt.messages[0]["tool_calls"][0]["function"]
    assert function["arguments"] == message.tool_calls[0].arguments_json
