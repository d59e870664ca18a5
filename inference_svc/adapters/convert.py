"""Work as it arrives to what an engine reads: ``Work`` and ``Input`` protos to the port's values.

Stateless. Presence in the proto becomes ``None`` when unset; zero stays zero. Checks identifiers,
forms, sizes and counts here and sampling values by ``domain/sampling_rules.py``; what only the
model knows (vocabulary, context length, whether a grammar compiles) is the engine's. A refusal is
INVALID_ARGUMENT naming the field by its path in ``Work``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from inference_svc.domain import sampling_rules
from inference_svc.ports import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Continuation,
    GenerateSpec,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from sluice.common.v1 import input_pb2, sampling_pb2
from sluice.errors import invalid, not_found
from sluice.ids import REQUEST_ID_CHARS_MAX, is_request_id
from sluice.inference.v1 import inference_pb2
from sluice.input_rules import check_message, check_name
from sluice.sampling_rules import check_constraint, no_constraint

MESSAGES_MAX = 4096
TOOLS_MAX = 256
CACHE_SALT_BYTES_MAX = 256
EMBED_INPUTS_MAX = 256


def check_request_id(request_id: str) -> str:
    """The id, or INVALID_ARGUMENT."""
    if not is_request_id(request_id):
        raise invalid("request_id", f"must be 1 to {REQUEST_ID_CHARS_MAX} visible ASCII characters")
    return request_id


def check_model(asked: str, served: Collection[str]) -> None:
    """NOT_FOUND when ``asked`` is not a name of the served model; empty asks for whatever it is."""
    if asked and asked not in served:
        raise not_found("MODEL_NOT_FOUND", "This instance serves another model.")


def to_spec(work: inference_pb2.Work, served: Collection[str]) -> GenerateSpec:
    """What to generate; ``served`` holds the names of the model."""
    check_request_id(work.request_id)
    check_model(work.model, served)
    _check_bytes("cache_salt", work.cache_salt, 0, CACHE_SALT_BYTES_MAX)
    return GenerateSpec(
        request_id=work.request_id,
        prompt=to_prompt(work.input, "input"),
        sampling=to_sampling(work.sampling),
        continuation=_to_continuation(work.continuation) if work.HasField("continuation") else None,
        cache_salt=work.cache_salt,
    )


def to_prompts(inputs: Sequence[input_pb2.Input]) -> list[Prompt]:
    """Inputs of an embedding call; conversations are refused."""
    if not 1 <= len(inputs) <= EMBED_INPUTS_MAX:
        raise invalid("inputs", f"must hold 1 to {EMBED_INPUTS_MAX} inputs")
    prompts = []
    for index, item in enumerate(inputs):
        if item.WhichOneof("kind") == "conversation":
            raise invalid(f"inputs[{index}].conversation", "cannot be embedded")
        prompts.append(to_prompt(item, f"inputs[{index}]"))
    return prompts


def to_prompt(source: input_pb2.Input, path: str) -> Prompt:
    """What the model reads; ``path`` names the input in errors."""
    kind = source.WhichOneof("kind")
    if kind == "text":
        if not source.text:
            raise invalid(f"{path}.text", "must not be empty")
        return TextPrompt(source.text)
    if kind == "token_ids":
        if not source.token_ids.ids:
            raise invalid(f"{path}.token_ids", "must not be empty")
        return TokenPrompt(tuple(source.token_ids.ids))
    if kind == "conversation":
        return _to_chat(source.conversation, f"{path}.conversation")
    raise invalid(path, "must be text, token_ids or a conversation")


def _to_chat(source: input_pb2.Conversation, path: str) -> ChatPrompt:
    if not 1 <= len(source.messages) <= MESSAGES_MAX:
        raise invalid(f"{path}.messages", f"must hold 1 to {MESSAGES_MAX} messages")
    if len(source.tools) > TOOLS_MAX:
        raise invalid(f"{path}.tools", f"must hold at most {TOOLS_MAX} tools")
    if source.continue_final_message and source.messages[-1].role != "assistant":
        raise invalid(f"{path}.continue_final_message", "needs an assistant message at the end")
    return ChatPrompt(
        messages=tuple(
            _to_message(message, f"{path}.messages[{index}]")
            for index, message in enumerate(source.messages)
        ),
        tools=tuple(
            _to_tool(tool, f"{path}.tools[{index}]") for index, tool in enumerate(source.tools)
        ),
        continue_final_message=source.continue_final_message,
    )


def _to_message(source: input_pb2.ChatMessage, path: str) -> dict[str, object]:
    check_message(source, path)
    message: dict[str, object] = {"role": source.role, "content": source.content}
    if source.name:
        message["name"] = source.name
    if source.tool_call_id:
        message["tool_call_id"] = source.tool_call_id
    if source.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments(call.arguments_json),
                },
            }
            for call in source.tool_calls
        ]
    return message


def _arguments(text: str) -> object:
    # Templates render arguments as an object; what the model wrote wrongly stays as it is.
    parsed = _json_object(text)
    return text if parsed is None else parsed


def _to_tool(source: input_pb2.Tool, path: str) -> dict[str, object]:
    check_name(source.name, f"{path}.name")
    function: dict[str, object] = {
        "name": source.name,
        "description": source.description,
    }
    if source.parameters_json:
        parameters = _json_object(source.parameters_json)
        if parameters is None:
            raise invalid(f"{path}.parameters_json", "must be a JSON object")
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _json_object(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair is no character: no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _to_continuation(source: inference_pb2.Continuation) -> Continuation:
    if not source.model_fingerprint:
        raise invalid("continuation.model_fingerprint", "must not be empty")
    return Continuation(
        output_token_ids=tuple(source.output_token_ids),
        delivered_text_bytes=source.delivered_text_bytes,
        delivered_text_tail=source.delivered_text_tail,
        model_fingerprint=source.model_fingerprint,
    )


def to_sampling(source: sampling_pb2.SamplingParams) -> Sampling:
    """How to write. INVALID_ARGUMENT when a value is out of its range."""
    has = source.HasField
    sampling = Sampling(
        temperature=source.temperature if has("temperature") else None,
        top_p=source.top_p if has("top_p") else None,
        top_k=source.top_k if has("top_k") else None,
        min_p=source.min_p if has("min_p") else None,
        presence_penalty=source.presence_penalty if has("presence_penalty") else None,
        frequency_penalty=source.frequency_penalty if has("frequency_penalty") else None,
        repetition_penalty=source.repetition_penalty if has("repetition_penalty") else None,
        max_tokens=source.max_tokens if has("max_tokens") else None,
        min_tokens=source.min_tokens if has("min_tokens") else None,
        stop=tuple(source.stop),
        stop_token_ids=tuple(source.stop_token_ids),
        include_stop=source.include_stop,
        ignore_eos=source.ignore_eos,
        seed=source.seed if has("seed") else None,
        n=source.n if has("n") else 1,
        logprobs=source.logprobs if has("logprobs") else None,
        logit_bias=dict(source.logit_bias),
        keep_special_tokens=source.keep_special_tokens,
        constraint=_to_constraint(source.structured_output) if has("structured_output") else None,
        total_tokens_max=source.total_tokens_max if has("total_tokens_max") else None,
    )
    sampling_rules.check(sampling)
    return sampling


def _to_constraint(source: sampling_pb2.StructuredOutput) -> Constraint:
    kind = source.WhichOneof("kind")
    if kind == "json_schema":
        return Constraint(ConstraintKind.JSON_SCHEMA, source.json_schema)
    if kind == "regex":
        return Constraint(ConstraintKind.REGEX, source.regex)
    if kind == "grammar":
        return Constraint(ConstraintKind.GRAMMAR, source.grammar)
    if kind == "choice":
        return Constraint(ConstraintKind.CHOICE, choices=tuple(source.choice.values))
    if kind == "json_object":
        check_constraint(kind, source.json_object)
        return Constraint(ConstraintKind.JSON_OBJECT)
    raise no_constraint()


def _check_bytes(path: str, text: str, least: int, most: int) -> None:
    if not least <= len(text.encode()) <= most:
        raise invalid(path, f"must be {least} to {most} bytes long")
