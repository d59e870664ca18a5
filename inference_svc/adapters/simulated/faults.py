"""Scripted faults of the simulated engine.

Owns the rules: given by code, by a JSON file that is read again when it changes, or, where the
profile allows it, by a directive in a prompt (``[[sim: {...}]]``). Used from the event loop only.
A file that cannot be read or holds a wrong rule leaves the rules as they were; ``rejected`` counts
those.

The file: ``{"rules": [{"request_id": "bench-*", "times": 1, "hang_after": 3}]}``;
keys are the fields of :class:`Fault`. The first rule that matches a request applies to it.

A rule may also say what is answered (``reply``, ``replies``), so that what calls a model can be
tested without one. This answers prompts that hold the marker with a call, then with an answer::

    {"marker": "task-7", "replies": [{"tool": "search", "arguments": {}}, {"answer": "x"}]}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

from sluice.errors import Code, SluiceError

RULES_MAX = 1_000
REPLIES_MAX = 1_000
FILE_BYTES_MAX = 1024 * 1024
LOOK_INTERVAL_S = 0.02  # the file's state is looked at no more often
DIRECTIVE = re.compile(r"\[\[sim: *(\{.*?\})\]\]", re.DOTALL)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the requests that a rule matches. Token counts are those of the attempt;
    ``None`` = not this fault. Where several apply at one token, the first listed here does."""

    request_id: str = "*"  # pattern (shell style) of request ids
    model: str = "*"  # pattern of model names
    times: int | None = None  # requests that it applies to; None: all
    exit_after: int | None = None  # the process ends after so many tokens, as if killed
    exit_code: int = 137
    crash_after: int | None = None  # the engine dies: all its requests fail, it is unhealthy
    fail_after: int | None = None  # this request fails with `status`; 0: instead of a first token
    refuse: bool = False  # this request is refused with `status` before it starts
    status: str = "UNAVAILABLE"  # name of the gRPC code
    reason: str = "SCRIPTED_FAULT"
    message: str = "A fault that was asked for."
    retry_after_ms: float | None = None
    hang_after: int | None = None  # no further output after so many tokens; 0: never a first one
    hang_ms: float | None = None  # how long it hangs; None: until it is aborted
    pace_ms: float | None = None  # least time between two outputs of a sequence
    marker: str = ""  # only for prompts that hold this text
    reply: str | None = None  # the output's text, instead of a generated one
    # Replies by turn: how many assistant messages follow the message that holds the marker (or the
    # directive; without either, all count). Beyond the last one: the last one again.
    replies: tuple[str, ...] = ()
    words: str | None = None  # where nothing constrains the output: instead of a turn's reply
    reply_bytes: bool = False  # the reply's tokens are single bytes, not pieces
    reply_cuts: tuple[int, ...] = ()  # byte offsets at which a delta of the reply ends
    echo: str = (
        ""  # "sampling": the reply is the sampling as received, as JSON; "prompt": the prompt
    )

    def matches(self, request_id: str, model: str, text: Callable[[], str]) -> bool:
        """Whether the rule applies to a request. ``text``: of its prompt."""
        return (
            fnmatchcase(request_id, self.request_id)
            and fnmatchcase(model, self.model)
            and (not self.marker or self.marker in text())
        )

    def at_turn(self, turn: int, *, constrained: bool) -> Fault:
        """The rule with the reply of a turn, from 0, as its reply."""
        if self.words is not None and not constrained:
            return replace(self, reply=self.words)
        if not self.replies:
            return self
        return replace(self, reply=self.replies[min(turn, len(self.replies) - 1)])

    def error(self) -> SluiceError:
        """The scripted status."""
        retry_after_s = None if self.retry_after_ms is None else self.retry_after_ms / 1000.0
        return SluiceError(
            Code[self.status], self.reason, self.message, retry_after_s=retry_after_s
        )

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Fault:
        """A rule from its JSON form; ValueError for an unknown key or a wrong value."""
        unknown = set(table) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a fault has no {sorted(unknown)[0]}")
        values = dict(table)
        cuts = values.get("reply_cuts", ())
        if not isinstance(cuts, list | tuple) or any(type(cut) is not int for cut in cuts):
            raise ValueError("reply_cuts must be byte offsets")
        if list(cuts) != sorted(set(cuts)) or (cuts and cuts[0] < 1):
            raise ValueError("reply_cuts must grow, from 1")
        values["reply_cuts"] = tuple(cuts)
        values["replies"] = _replies(values.get("replies", ()))
        fault = cls(**values)  # type: ignore[arg-type]
        _check(fault)
        return fault


def _replies(values: object) -> tuple[str, ...]:
    """Replies as texts; an object stands for its JSON."""
    if not isinstance(values, list | tuple) or len(values) > REPLIES_MAX:
        raise ValueError(f"replies must be a list of at most {REPLIES_MAX}")
    if not all(isinstance(value, str | dict) for value in values):
        raise ValueError("replies must be texts or objects")
    return tuple(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    )


def _check(fault: Fault) -> None:
    for name in ("request_id", "model", "status", "reason", "message", "echo", "marker"):
        if not isinstance(getattr(fault, name), str):
            raise ValueError(f"{name} must be text")
    if fault.reply is not None and not isinstance(fault.reply, str):
        raise ValueError("reply must be text")
    if fault.words is not None and not isinstance(fault.words, str):
        raise ValueError("words must be text")
    if fault.words is not None and not fault.replies:
        raise ValueError("words go with replies")
    if fault.replies and (fault.reply is not None or fault.echo):
        raise ValueError("replies go without reply and echo")
    if fault.status not in Code.__members__ or fault.status == "OK":
        raise ValueError("status must be the name of a gRPC code other than OK")
    if fault.echo not in ("", "sampling", "prompt"):
        raise ValueError("echo must be sampling or prompt")
    for name in ("times", "exit_after", "exit_code", "crash_after", "fail_after", "hang_after"):
        count = getattr(fault, name)
        if count is not None and (type(count) is not int or count < 0):
            raise ValueError(f"{name} must be a whole number, 0 or more")
    for name in ("hang_ms", "pace_ms", "retry_after_ms"):
        span = getattr(fault, name)
        if span is not None and (type(span) not in (int, float) or not span >= 0):
            raise ValueError(f"{name} must be milliseconds, 0 or more")


class FaultBook:
    """The rules in force and how often each may still apply."""

    def __init__(self, path: str = "", rules: Sequence[Fault] = ()) -> None:
        self._path = Path(path) if path else None
        self._given = [_Rule(rule) for rule in rules]
        self._read: list[_Rule] = []
        self._seen: tuple[int, int] | None = None
        self._look_at_s = float("-inf")
        self.rejected = 0

    def add(self, rule: Fault) -> None:
        """Puts a rule before the others."""
        assert len(self._given) < RULES_MAX, "rules are taken back by clear()"
        self._given.insert(0, _Rule(rule))

    def clear(self) -> None:
        """Takes the rules back that were given by code."""
        self._given.clear()

    def find(
        self, request_id: str, model: str, now: float, text: Callable[[], str] = str
    ) -> Fault | None:
        """The rule for a request, whose use is counted. ``now`` in seconds; ``text`` gives the
        prompt's text, and is called only where a rule has a marker."""
        if self._path is not None and now >= self._look_at_s:
            self._look_at_s = now + LOOK_INTERVAL_S
            self._look(self._path)
        for rule in (*self._given, *self._read):
            if rule.left != 0 and rule.fault.matches(request_id, model, text):
                if rule.left is not None:
                    rule.left -= 1
                return rule.fault
        return None

    def _look(self, path: Path) -> None:
        try:
            state = path.stat()
        except OSError:
            self._read, self._seen = [], None
            return
        seen = (state.st_mtime_ns, state.st_size)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._read = [_Rule(fault) for fault in _parse(path.read_bytes())]
        except (OSError, ValueError, TypeError) as error:
            self.rejected += 1
            _log.warning("faults file not taken: %s", error)


class _Rule:
    __slots__ = ("fault", "left")

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.left = fault.times


def directive(text: str) -> Fault | None:
    """The fault that a prompt asks for; ValueError when it is wrong."""
    found = DIRECTIVE.findall(text)
    return Fault.from_table(json.loads(found[-1])) if found else None


def _parse(data: bytes) -> list[Fault]:
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
    document = json.loads(data)
    rules = document.get("rules") if isinstance(document, dict) else None
    if not isinstance(rules, list) or len(rules) > RULES_MAX:
        raise ValueError(f"rules must be a list of at most {RULES_MAX}")
    return [Fault.from_table(rule) for rule in rules]
