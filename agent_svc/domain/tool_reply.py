"""What a model wrote, read as calls or as an answer.

Pure. Each format's parser gives the calls as they are written, or the text of an answer; judging
them (known tool, valid arguments, allowed now) is ``tool_format``'s. Everything is bounded before
it is parsed; nothing here raises but ReplyError, whose texts are fixed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent_svc.domain.answer_text import THINK, THINK_END, AnswerField
from agent_svc.domain.pythonic import PythonicError, parse_calls
from agent_svc.domain.tool_prompt import CUT_OFF, NO_ANSWER
from sluice.json_schemas import JsonError, parse

REPLY_BYTES_MAX: Final = 256 * 1024
CALLS_MAX: Final = 64  # in one reply, before any setting


class ReplyError(ValueError):
    """A reply that is neither calls nor an answer; the message is for the model."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as written. ``id``: the model's own, if the format has one."""

    name: str
    arguments: object
    id: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """What a reply says: calls, or else an answer (any JSON value)."""

    calls: tuple[WrittenCall, ...] = ()
    answer: object = ""


def read_structured(text: str, *, cut_off: bool, typed: bool = False) -> Written:
    """A reply in structured output. ``typed``: a part of an answer is none."""
    try:
        value = parse(text, bytes_max=REPLY_BYTES_MAX)
    except JsonError as error:
        field = AnswerField()
        begun = field.push(text[:REPLY_BYTES_MAX])
        if cut_off and begun.strip() and not typed:
            return Written(answer=begun)  # the client saw it; the limit was the caller's
        if cut_off:
            raise ReplyError(CUT_OFF) from None
        raise ReplyError(f"The reply {error}. Write one JSON object of the given form.") from None
    if isinstance(value, dict):
        if set(value) == {"answer"}:
            return Written(answer=value["answer"])
        if set(value) == {"tool", "arguments"}:
            return Written(calls=(_call(value, "tool", "arguments"),))
        calls = value.get("calls")
        if set(value) == {"calls"} and isinstance(calls, list) and calls:
            return Written(calls=_all(calls, "tool", "arguments"))
    raise ReplyError(
        'The reply has another form. Write {"tool": ..., "arguments": ...} or {"answer": ...}.'
    )


def read_words(text: str) -> Written:
    """A reply that was to be an answer in words. One in the form of earlier steps is understood all
    the same, also with quotation marks that are not escaped."""
    said = _without_thoughts(text)
    if not said:
        raise ReplyError(NO_ANSWER)
    head = _ANSWER_HEAD.match(said)
    if head is None and _CALL_HEAD.match(said) is None:
        return Written(answer=said)
    try:
        return read_structured(said, cut_off=False)
    except ReplyError:
        if head is None:
            raise ReplyError(NO_ANSWER) from None
    rest = said[head.end() :].removesuffix("}").rstrip().removesuffix('"')
    return Written(answer=rest.replace('\\"', '"').replace("\\n", "\n"))


REPEATED_CHARS_MAX: Final = 8192  # of an answer that is looked at for this


def only_repeats(answer: str, said: Sequence[str]) -> bool:
    """Whether an answer consists of nothing but what the model was told: without case and marks,
    nothing of it is left when these texts are taken out."""
    if len(answer) > REPEATED_CHARS_MAX:
        return False
    left = _bare(answer)
    for text in said:
        if told := _bare(text):
            left = left.replace(told, "")
    return bool(answer.strip()) and not left.strip()


def _bare(text: str) -> str:
    words = "".join(char if char.isalnum() else " " for char in text.casefold()).split()
    return "".join(f" {word} " for word in words)


_ANSWER_HEAD = re.compile(r'\{\s{0,9}"answer"\s{0,9}:\s{0,9}"')
_CALL_HEAD = re.compile(r'\{\s{0,9}"(?:tool|calls)"\s{0,9}:')
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL_CALL = re.compile(
    r"\s*([A-Za-z0-9_.-]{1,256})\s*(?:\[CALL_ID\]\s*(\w{1,64})\s*)?(?:\[ARGS\])?\s*"
)
# What a tokenizer may leave at the end when special tokens are kept.
_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "</s>")
HERMES_MARKS, LLAMA_MARKS, MISTRAL_MARKS = ("<tool_call>",), ("<|python_tag|>",), ("[TOOL_CALLS]",)


def read_hermes(text: str) -> Written:
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, repeated."""
    said = _without_thoughts(text)
    blocks = _HERMES.findall(said)
    if not blocks:
        return _answered(said)
    calls: list[WrittenCall] = []
    for block in blocks[: CALLS_MAX + 1]:
        value = _json(block)
        calls += _all(value if isinstance(value, list) else [value], "name", "arguments")
    return Written(calls=_counted(calls))


def read_llama3(text: str) -> Written:
    """Llama 3: ``{"name": ..., "parameters": ...}``, several joined by semicolons; words may stand
    before, then ``<|python_tag|>``."""
    said = _without_thoughts(text)
    words, mark, marked = said.partition(LLAMA_MARKS[0])
    said = marked.strip() if mark else said
    if not mark and not said.startswith("{"):
        return _answered(words)
    return Written(
        calls=_counted([_call(_json(part), "name", "parameters") for part in _objects(said)])
    )


def read_mistral(text: str) -> Written:
    """Mistral: ``[TOOL_CALLS]`` and a list, or (newer) a name and its arguments, repeated."""
    said, mark, rest = _without_thoughts(text).partition(MISTRAL_MARKS[0])
    if not mark:
        return _answered(said)
    if rest.lstrip().startswith("["):
        value = _json(rest)
        return Written(calls=_counted(_all(value, "name", "arguments")))
    calls: list[WrittenCall] = []
    for part in rest.split(MISTRAL_MARKS[0])[: CALLS_MAX + 1]:
        match = _MISTRAL_CALL.match(part)
        if match is None:
            raise _unreadable()
        calls.append(WrittenCall(match.group(1), _json(part[match.end() :]), match.group(2) or ""))
    return Written(calls=_counted(calls))


def read_pythonic(text: str) -> Written:
    """Llama 4 and others: ``[name(argument=value), ...]``."""
    said = spoken(text)
    if not said.startswith("["):
        return _answered(said)
    try:
        calls = parse_calls(said)
    except PythonicError:
        raise _unreadable() from None
    return Written(calls=_counted([WrittenCall(name, made) for name, made in calls]))


def _answered(text: str) -> Written:
    return Written(answer=_ended(text.strip()))


def _ended(text: str) -> str:
    for end in _ENDS:
        text = text.removesuffix(end)
    return text.rstrip()


_THOUGHTS = re.compile(f"{THINK}.*?(?:{THINK_END}|\\Z)", re.DOTALL)


def spoken(text: str) -> str:
    """What a reply says, without thoughts and what a tokenizer may leave at the end."""
    return _ended(_without_thoughts(text))


def _without_thoughts(text: str) -> str:
    """The text without what a model says to itself: that calls nothing and answers nothing. The
    first thought may have begun in the prompt."""
    head, mark, tail = text.partition(THINK_END)
    if mark and THINK not in head:
        text = tail
    return _THOUGHTS.sub("", text).strip()


def _unreadable() -> ReplyError:
    return ReplyError("The call of a tool could not be read. Write it exactly in the given form.")


def _json(text: str) -> object:
    try:
        value: object = parse(_ended(text.strip()), bytes_max=REPLY_BYTES_MAX)
    except JsonError:
        raise _unreadable() from None
    return value


def _all(values: object, name: str, arguments: str) -> tuple[WrittenCall, ...]:
    if not isinstance(values, list) or not values:
        raise _unreadable()
    return _counted([_call(value, name, arguments) for value in values[: CALLS_MAX + 1]])


def _counted(calls: list[WrittenCall] | tuple[WrittenCall, ...]) -> tuple[WrittenCall, ...]:
    if not calls or len(calls) > CALLS_MAX:
        raise _unreadable()
    return tuple(calls)


def _call(value: object, name: str, arguments: str) -> WrittenCall:
    """A call from its object; arguments may be left out or empty, and may be JSON as text."""
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise _unreadable()
    given = value.get(arguments)
    if given is None:
        given = value.get("arguments", {}) or {}
    if isinstance(given, str):
        given = _json(given) if given.strip() else {}
    identifier = value.get("id")
    return WrittenCall(value[name], given, identifier if isinstance(identifier, str) else "")


_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}]', re.DOTALL)


def _objects(text: str) -> list[str]:
    """The objects of a text, with whatever parts them left out; at most one more than allowed."""
    found: list[str] = []
    depth = start = 0
    for match in _PARTS.finditer(text):
        mark = match.group()
        if mark == "{":
            if not depth:
                start = match.start()
            depth += 1
        elif mark == "}" and depth:
            depth -= 1
            if not depth:
                found.append(text[start : match.end()])
                if len(found) > CALLS_MAX:
                    break
    if depth or not found:
        raise _unreadable()
    return found
