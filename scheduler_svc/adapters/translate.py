"""From a client's request to an engine's work, with every check that costs nothing.

Checks sizes, counts, which input was given and the ranges of sampling parameters, so that a wrong
request takes no place in a queue; nothing of a request is copied before its checks are done. What
only a model knows (vocabulary, context length, whether a constraint compiles) is the inference
layer's to refuse, with the same field paths. Stateless. All limits are named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler_svc.domain.continuation import Obstacle, obstacle
from scheduler_svc.domain.model import PriorityClass
from sluice import sampling_rules
from sluice.common.v1 import policy_pb2, sampling_pb2
from sluice.errors import FieldViolation, SluiceError, invalid
from sluice.ids import is_request_id, new_request_id
from sluice.inference.v1 import inference_pb2
from sluice.input_rules import check_message
from sluice.scheduler.v1 import generate_pb2

PROMPT_BYTES_MAX: Final = 4 * 1024 * 1024
MESSAGES_MAX: Final = 4096
TOOLS_MAX: Final = 128
TOKEN_IDS_MAX: Final = 1_000_000
CACHE_SALT_BYTES_MAX: Final = 128
EMBED_TEXTS_MAX: Final = 256
DEFAULT_MAX_TOKENS: Final = 512
"""Output limit of a request that sets none; the model's context caps it further."""

GenerateMessage = generate_pb2.GenerateRequest | generate_pb2.GenerateTextRequest

_CLASSES: Final = {
    policy_pb2.PRIORITY_CLASS_CRITICAL: PriorityClass.CRITICAL,
    policy_pb2.PRIORITY_CLASS_INTERACTIVE: PriorityClass.INTERACTIVE,
    policy_pb2.PRIORITY_CLASS_STANDARD: PriorityClass.STANDARD,
    policy_pb2.PRIORITY_CLASS_BATCH: PriorityClass.BATCH,
}


@dataclass(frozen=True, slots=True)
class Input:
    """What a request gives a model to read: the field that holds it, its size in bytes of text (0
    for token ids), and its token count where that is known exactly."""

    field: str
    size_bytes: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Output:
    """What a request may get: the number of outputs and the output limit of each."""

    count: int
    tokens_max: int


def request_id(given: str, header: str | None) -> str:
    """The request's identifier: the field, else a sane x-request-id header, else a new UUID."""
    if given:
        if not is_request_id(given):
            raise invalid("request_id", "must be 1 to 128 visible ASCII characters")
        return given
    if header and is_request_id(header):
        return header
    return new_request_id()


def priority_class(
    wanted: policy_pb2.PriorityClass.ValueType,
) -> PriorityClass | None:
    """The class asked for; None when unset."""
    if wanted == policy_pb2.PRIORITY_CLASS_UNSPECIFIED:
        return None
    if wanted not in _CLASSES:
        raise invalid("priority_class", "is not a known class")
    return _CLASSES[wanted]


def check_input(request: GenerateMessage) -> Input:
    """Checks what a model is to read; exactly one of its four forms must be given."""
    given = [name for name in ("prompt", "messages", "text", "token_ids") if getattr(request, name)]
    if len(given) != 1:
        problem = "is needed" if not given else "may be given, not " + " and ".join(given)
        raise invalid(
            given[0] if given else "messages",
            f"exactly one of prompt, messages, text and token_ids {problem}",
        )
    field = given[0]
    if request.tools and field != "messages":
        raise invalid("tools", "need messages")
    if len(request.cache_salt.encode()) > CACHE_SALT_BYTES_MAX:
        raise invalid("cache_salt", f"must be at most {CACHE_SALT_BYTES_MAX} bytes")
    size_bytes, tokens = 0, None
    if field == "token_ids":
        tokens = len(request.token_ids)
        _check_count("token_ids", tokens, TOKEN_IDS_MAX)
    elif field == "messages":
        _check_count("messages", len(request.messages), MESSAGES_MAX)
        _check_count("tools", len(request.tools), TOOLS_MAX)
        for index, message in enumerate(request.messages):
            check_message(message, f"messages[{index}]")
            size_bytes += message.ByteSize()
        size_bytes += sum(tool.ByteSize() for tool in request.tools)
    else:
        size_bytes = len((request.prompt or request.text).encode())
    if size_bytes > PROMPT_BYTES_MAX:
        raise invalid(field, f"is {size_bytes} bytes; at most {PROMPT_BYTES_MAX} are allowed")
    return Input(field, size_bytes, tokens)


def check_sampling(sampling: sampling_pb2.SamplingParams) -> Output:
    """Checks every range; returns what counts here, with its defaults filled in."""
    values = {field.name: value for field, value in sampling.ListFields()}
    sampling_rules.check(values)
    constraint = values.get("structured_output")
    if constraint is not None:
        kind = constraint.WhichOneof("kind")
        if kind is None:
            raise sampling_rules.no_constraint()
        value = getattr(constraint, kind)
        sampling_rules.check_constraint(kind, value.values if kind == "choice" else value)
    default = max(DEFAULT_MAX_TOKENS, values.get("min_tokens", 0))
    return Output(values.get("n", 1), values.get("max_tokens", default))


def obstacle_of(sampling: sampling_pb2.SamplingParams) -> Obstacle | None:
    """What keeps an output sampled so from going on elsewhere, if anything does."""
    return obstacle(
        seeded=sampling.HasField("seed"),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        structured=sampling.HasField("structured_output"),
        outputs=sampling.n if sampling.HasField("n") else 1,
        logprobs=sampling.HasField("logprobs"),
    )


def work_for(
    request: GenerateMessage,
    tenant: str,
    identifier: str,
    model: str,
    source: Input,
    output: Output,
) -> inference_pb2.Work:
    """The engine's work, from a request that was checked. Prefixes are never shared between
    tenants: the tenant is part of every salt."""
    work = inference_pb2.Work(
        request_id=identifier,
        model=model,
        sampling=request.sampling,
        cache_salt=f"{tenant}/{request.cache_salt}",
    )
    work.sampling.n, work.sampling.max_tokens = output.count, output.tokens_max
    if source.field == "prompt":
        work.input.conversation.messages.add(role="user", content=request.prompt)
    elif source.field == "messages":
        work.input.conversation.messages.extend(request.messages)
        work.input.conversation.tools.extend(request.tools)
    elif source.field == "text":
        work.input.text = request.text
    else:
        work.input.token_ids.ids.extend(request.token_ids)
    return work


def check_embed(request: generate_pb2.EmbedRequest) -> int:
    """Checks an embedding request; returns its size in bytes."""
    _check_count("texts", len(request.texts), EMBED_TEXTS_MAX)
    if not request.texts:
        raise invalid("texts", "at least one text is needed")
    for index, text in enumerate(request.texts):
        if not text:
            raise invalid(f"texts[{index}]", "must not be empty")
    size_bytes = sum(len(text.encode()) for text in request.texts)
    if size_bytes > PROMPT_BYTES_MAX:
        raise invalid("texts", f"are {size_bytes} bytes; at most {PROMPT_BYTES_MAX} are allowed")
    return size_bytes


def public_error(error: SluiceError, field: str) -> SluiceError:
    """An inference error in the client's words: ``input...`` becomes the field that was sent."""
    if not any(violation.field.startswith("input") for violation in error.fields):
        return error
    fields = [
        FieldViolation(_public_path(violation.field, field), violation.description)
        for violation in error.fields
    ]
    return SluiceError(
        error.code,
        error.reason,
        error.message.replace(error.fields[0].field, fields[0].field, 1),
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
        fields=fields,
        quotas=error.quotas,
    )


def _public_path(path: str, field: str) -> str:
    if not path.startswith("input"):
        return path
    tail = path.removeprefix("input.conversation.messages")
    if field == "messages" and tail != path:
        return f"messages{tail}"
    if path.startswith("input.conversation.tools"):
        return path.removeprefix("input.conversation.")
    if path.startswith("inputs["):
        return field + path[len("inputs") : path.index("]") + 1]
    return field


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise invalid(field, f"has {count} entries; at most {limit} are allowed")
