"""The words of an answer out of what a model writes, while it writes.

Pure; one object per model call. In structured output the client sees the characters of the string
``answer`` and no JSON; in a native format the text before a call's first mark and outside the
model's thoughts. Text that may turn out to be a mark is held back until it is known; nothing else
is kept, whatever comes.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

_ESCAPES: Final = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_KEY = "answer"
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class _At(Enum):
    OUTSIDE = auto()  # of strings
    KEY = auto()  # in a string that may be a key of the outermost object
    OTHER = auto()  # in another string
    ANSWER = auto()
    OVER = auto()


class AnswerField:
    """Takes JSON in pieces, gives the characters of the string under ``answer`` at the top."""

    def __init__(self) -> None:
        self._at = _At.OUTSIDE
        self._depth = 0
        self._key = ""
        self._expects_value = False  # a colon was read at the top
        self._escape = ""  # an escape that is not whole: a backslash, then up to "uXXX"
        self._high = 0  # first half of a surrogate pair
        self.found = False

    def push(self, piece: str) -> str:
        """What is new of the answer. After its closing quote: nothing any more."""
        shown: list[str] = []
        for char in piece:
            if self._at is _At.OVER:
                break
            if self._at is _At.OUTSIDE:
                self._outside(char)
            elif self._escape:
                self._escaped(char, shown)
            elif char == "\\":
                self._escape = "\\"
            elif char == '"':
                self._closed(shown)
            else:
                self._character(char, shown)
        return "".join(shown)

    def _outside(self, char: str) -> None:
        if char in "{[":
            self._depth += 1
            self._expects_value = False
        elif char in "}]":
            self._depth -= 1
        elif char == ":":
            self._expects_value = self._depth == 1
        elif char == ",":
            self._expects_value = False
        elif char == '"':
            if self._expects_value and self._key == _KEY:
                self._at, self.found = _At.ANSWER, True
            elif self._depth == 1 and not self._expects_value:
                self._at, self._key = _At.KEY, ""
            else:
                self._at = _At.OTHER

    def _character(self, char: str, shown: list[str]) -> None:
        if self._at is _At.KEY:
            # A longer one is not the key; one character more keeps it different.
            self._key = (self._key + char)[: len(_KEY) + 1]
        elif self._at is _At.ANSWER:
            if self._high:
                shown.append(_REPLACEMENT)
                self._high = 0
            shown.append(char)

    def _escaped(self, char: str, shown: list[str]) -> None:
        self._escape += char
        if self._escape[1] != "u":
            whole = _ESCAPES.get(char, _REPLACEMENT)
            self._escape = ""
            self._character(whole, shown)
            return
        if len(self._escape) < 6:
            return
        try:
            unit = int(self._escape[2:], 16)
        except ValueError:
            unit = 0xFFFD
        self._escape = ""
        if self._at is not _At.ANSWER:
            self._character(_REPLACEMENT if 0xD800 <= unit < 0xE000 else chr(unit), shown)
            return
        if 0xDC00 <= unit < 0xE000 and self._high:
            shown.append(chr(0x10000 + ((self._high - 0xD800) << 10) + unit - 0xDC00))
            self._high = 0
            return
        if self._high:
            shown.append(_REPLACEMENT)
            self._high = 0
        if 0xD800 <= unit < 0xDC00:
            self._high = unit
        else:
            shown.append(_REPLACEMENT if 0xDC00 <= unit < 0xE000 else chr(unit))

    def _closed(self, shown: list[str]) -> None:
        if self._at is _At.ANSWER:
            if self._high:
                shown.append(_REPLACEMENT)
            self._at = _At.OVER
        else:
            self._at = _At.OUTSIDE
            if self._expects_value:
                self._key = ""


THINK: Final = "<think>"
THINK_END: Final = "</think>"


class MarkedText:
    """Takes text in pieces, gives what comes before the first mark of a call, without thoughts.

    ``marks``: what a call begins with. ``opening``: a text that begins with one of these characters
    is a call as a whole."""

    def __init__(self, marks: tuple[str, ...], opening: str = "") -> None:
        self._marks = (*marks, THINK)
        self._opening = opening
        self._held = ""
        self._began = False
        self._thinks = False
        self._over = False

    def push(self, piece: str) -> str:
        """What is new and cannot be part of a mark."""
        if self._over:
            return ""
        self._held += piece
        shown = ""
        while self._held and not self._over:
            if self._thinks:
                _, mark, rest = self._held.partition(THINK_END)
                if not mark:
                    self._held = self._held[-len(THINK_END) + 1 :]
                    return shown
                self._held, self._thinks = rest, False
            if not self._began:
                self._held = self._held.lstrip()
                if self._held and self._opening and self._held[0] in self._opening:
                    self._over, self._held = True, ""
            at, mark = self._first_mark()
            if mark:
                shown += self._take(at)
                self._held = self._held[len(mark) :]
                self._thinks, self._over = mark == THINK, mark != THINK
                continue
            return shown + self._take(len(self._held) - self._possible())
        return shown

    def rest(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return "" if self._over or self._thinks else held

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        self._began = self._began or bool(taken)
        return taken

    def _first_mark(self) -> tuple[int, str]:
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        return min(found, default=(0, ""))

    def _possible(self) -> int:
        """How many characters at the end may be the beginning of a mark."""
        longest = max(map(len, self._marks)) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-count:]
            if any(mark.startswith(tail) for mark in self._marks):
                return count
        return 0
