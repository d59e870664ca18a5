"""From a spec to a prompt that the simulated engine can run: rendering, tokenising, checking.

Stateless. Long texts are tokenised in slices between which the event loop runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from inference_svc.adapters.simulated.faults import DIRECTIVE, Fault
from inference_svc.adapters.simulated.model import (
    ENCODE_SLICE_BYTES,
    EOS,
    TOKEN_BYTES,
    TOKEN_BYTES_MAX,
    TOKEN_OF,
    VOCABULARY_SIZE,
    decode,
    encode,
    encode_slice,
    state_of,
)
from inference_svc.adapters.simulated.writer import Script
from inference_svc.domain.stop_text import spell
from inference_svc.ports import (
    ChatPrompt,
    Constraint,
    PreparedPrompt,
    Prompt,
    Sampling,
    TextPrompt,
)
from sluice.errors import SluiceError, failed_precondition, invalid

SLICES_PER_TURN = 2  # of text tokenised before the event loop runs: about 1 ms
# Fields that change which tokens follow, and those of them that matter to greedy sampling too.
_CHOOSING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "logit_bias",
)  # fmt: skip
_CHOOSING_GREEDY = (
    "temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SimulatedPrompt(PreparedPrompt):
    """A prepared prompt and what was found out about it on the way."""

    state: int  # after the prompt, for the first output
    keys: tuple[int, ...]  # of the prompt's whole blocks
    script: Script | None
    fault: Fault | None


def render(prompt: ChatPrompt) -> str:
    """The chat template: ``<role>: content`` a line, then the beginning of the answer."""
    lines = [
        *(f"<tool>: {json.dumps(dict(tool), ensure_ascii=False)}\n" for tool in prompt.tools),
        *(f"<{message.get('role', '')}>: {_said(message)}\n" for message in prompt.messages),
    ]
    if prompt.continue_final_message:
        return "".join(lines).removesuffix("\n")
    return "".join(lines) + "<assistant>: "


def _said(message: Mapping[str, object]) -> str:
    said = str(message.get("content") or "")
    for key in ("name", "tool_calls", "tool_call_id"):
        if message.get(key):
            said += f" [{key} {json.dumps(message[key], ensure_ascii=False, default=str)}]"
    return said


def prompt_text(prompt: Prompt) -> str:
    """The text of a prompt, as rules look for their markers in it."""
    if isinstance(prompt, ChatPrompt):
        return render(prompt)
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return decode([token for token in prompt.token_ids if 0 <= token < VOCABULARY_SIZE])


def turn_of(prompt: Prompt, marker: str) -> int:
    """How many assistant messages a conversation holds after the first message with the marker;
    without one, after the last message with a directive, or in all."""
    if not isinstance(prompt, ChatPrompt):
        return 0
    roles = [message.get("role") for message in prompt.messages]
    texts = [str(message.get("content") or "") for message in prompt.messages]
    if marker:
        start = next((at for at, text in enumerate(texts) if marker in text), 0)
    else:
        held = [at for at, text in enumerate(texts) if DIRECTIVE.search(text)]
        start = held[-1] if held else 0
    return roles[start:].count("assistant")


def over_length(field: str, length: int, limit: int, *, at_least: bool = False) -> SluiceError:
    """A prompt that leaves no room for an output token, or none at all."""
    count = f"at least {length}" if at_least else str(length)
    return invalid(
        field,
        f"holds {count} tokens; the context of this model is {limit} tokens, of which an output "
        "needs at least one",
        reason="CONTEXT_LENGTH_EXCEEDED",
    )


async def tokenise(
    prompt: Prompt, field: str, most: int, limit: int, *, chat: bool
) -> tuple[int, ...]:
    """The token ids of a prompt, at most ``most``; INVALID_ARGUMENT below ``field``."""
    if isinstance(prompt, ChatPrompt):
        if not chat:
            raise failed_precondition("NO_CHAT_TEMPLATE", "This model has no chat template.")
        if not prompt.messages:
            raise invalid(f"{field}.conversation.messages", "must hold at least one message")
        return await _tokenise_text(render(prompt), f"{field}.conversation", most, limit)
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise invalid(f"{field}.text", "must not be empty")
        return await _tokenise_text(prompt.text, f"{field}.text", most, limit)
    ids = prompt.token_ids
    if not ids:
        raise invalid(f"{field}.token_ids", "must not be empty")
    if min(ids) < 0 or max(ids) >= VOCABULARY_SIZE:
        raise invalid(
            f"{field}.token_ids", f"ids must be below {VOCABULARY_SIZE}, the vocabulary's size"
        )
    if len(ids) > most:
        raise over_length(f"{field}.token_ids", len(ids), limit)
    return ids


async def _tokenise_text(text: str, field: str, most: int, limit: int) -> tuple[int, ...]:
    data = text.encode("utf-8", "replace")
    least = -(-len(data) // TOKEN_BYTES_MAX)
    if least > most:
        raise over_length(field, least, limit, at_least=True)
    tokens: list[int] = []
    for turn, start in enumerate(range(0, len(data), ENCODE_SLICE_BYTES), start=1):
        tokens += encode_slice(data, start)
        if turn % SLICES_PER_TURN == 0:
            await asyncio.sleep(0)
    if len(tokens) > most:
        raise over_length(field, len(tokens), limit)
    return tuple(tokens)


def first_state(fingerprint: str, sampling: Sampling, index: int) -> int:
    """The state before a prompt: the model, the output's index and the sampling as far as it is
    set, so that unset and zero differ and each field shows. Greedy sampling ignores the fields
    that draw from a distribution, the seed among them."""
    if sampling.temperature == 0.0:
        return state_of(fingerprint, *_set_fields(sampling, _CHOOSING_GREEDY))
    return state_of(fingerprint, str(index), *_set_fields(sampling, _CHOOSING))


def _set_fields(sampling: Sampling, names: Sequence[str]) -> list[str]:
    parts = []
    for name in names:
        value = getattr(sampling, name)
        if name == "logit_bias":
            value = sorted(value.items()) or None
        if value is not None:
            parts.append(f"{name}={value!r}")
    return parts


def received(sampling: Sampling) -> dict[str, object]:
    """A sampling as the engine got it: the fields that are set, as JSON values."""
    values: dict[str, object] = {}
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if isinstance(value, Constraint):
            value = {"kind": value.kind.value, "text": value.text, "choices": list(value.choices)}
        elif isinstance(value, Mapping):
            value = {str(key): entry for key, entry in value.items()} or None
        if value is not None:
            values[field.name] = value
    return values


def scripted_reply(fault: Fault, sampling: Sampling, prompt: tuple[int, ...]) -> Script | None:
    """The script of a fault that says what the output is."""
    reply = fault.reply
    if fault.echo == "sampling":
        reply = json.dumps(received(sampling), ensure_ascii=False)
    elif fault.echo == "prompt":
        reply = decode(prompt)
    if reply is None:
        return None
    if fault.reply_cuts or fault.reply_bytes:
        data = reply.encode()
        ends = (*(cut for cut in fault.reply_cuts if cut < len(data)), len(data))
        # A byte is a token here, so that offsets in bytes are offsets in tokens.
        return Script(tuple(data), ends if fault.reply_cuts else ())
    return Script(encode(reply))


def spelled(token_ids: Sequence[int], *, keep_special: bool, eos_text: str) -> str:
    """The text of output tokens as a client got it."""
    special = eos_text.encode() if keep_special else b""
    return spell([special if token == EOS else TOKEN_BYTES[token] for token in token_ids])


assert TOKEN_OF[b"a"] == ord("a"), "single bytes are their own tokens: scripted cuts rely on it"
