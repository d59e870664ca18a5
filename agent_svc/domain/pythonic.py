"""Calls written as Python: ``[search(query="x"), f(n=1, names=["a"])]``.

Pure. A small parser of its own: Python's can be brought down by deep nesting, and evaluates more
than is wanted. Takes literals only (strings, numbers, True, False, None, lists, dicts), every
argument by name.
"""

from __future__ import annotations

import re
from typing import Final

DEPTH_MAX: Final = 32

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<name>[A-Za-z_][\w.-]*)|(?P<mark>[][(){},:=]))""",
    re.DOTALL,
)
_WORDS: Final = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)

Written = list[tuple[str, dict[str, object]]]


class PythonicError(ValueError):
    """Not calls of this form."""


def parse_calls(text: str) -> Written:
    """Name and arguments of each call. Raises PythonicError."""
    reader = _Reader(text)
    reader.take("[")
    calls: Written = []
    while not reader.taken("]"):
        calls.append((reader.name(), reader.arguments()))
        if not reader.taken(","):
            reader.take("]")
            break
    if text[reader.at :].strip():
        raise PythonicError
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def _next(self) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self.at)
        if match is None or match.lastgroup is None:
            raise PythonicError
        self.at = match.end()
        return match.lastgroup, match.group(match.lastgroup)

    def taken(self, mark: str) -> bool:
        """Takes the mark if it is next."""
        before = self.at
        match = _TOKEN.match(self._text, before)
        if match is None or match.group("mark") != mark:
            return False
        self.at = match.end()
        return True

    def take(self, mark: str) -> None:
        if not self.taken(mark):
            raise PythonicError

    def name(self) -> str:
        kind, text = self._next()
        if kind != "name":
            raise PythonicError
        return text

    def arguments(self) -> dict[str, object]:
        self.take("(")
        made: dict[str, object] = {}
        while not self.taken(")"):
            name = self.name()
            self.take("=")
            if name in made:
                raise PythonicError
            made[name] = self.value(1)
            if not self.taken(","):
                self.take(")")
                break
        return made

    def value(self, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise PythonicError
        kind, text = self._next()
        if kind == "text":
            return _ESCAPE.sub(_unescaped, text[1:-1])
        if kind == "number":
            return _number(text)
        if kind == "name" and text in _WORDS:
            return _WORDS[text]
        if text == "[" and kind == "mark":
            return self._items(depth)
        if text == "{" and kind == "mark":
            return self._entries(depth)
        raise PythonicError

    def _items(self, depth: int) -> list[object]:
        made: list[object] = []
        while not self.taken("]"):
            made.append(self.value(depth + 1))
            if not self.taken(","):
                self.take("]")
                break
        return made

    def _entries(self, depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        while not self.taken("}"):
            key = self.value(depth + 1)
            self.take(":")
            if not isinstance(key, str) or key in made:
                raise PythonicError
            made[key] = self.value(depth + 1)
            if not self.taken(","):
                self.take("}")
                break
        return made


def _unescaped(match: re.Match[str]) -> str:
    code = match.group(1) or match.group(2)
    if code:
        return chr(int(code, 16))
    return _ESCAPES.get(match.group(3), match.group(3))


def _number(text: str) -> object:
    if len(text) > 300:
        raise PythonicError
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise PythonicError
    return value
