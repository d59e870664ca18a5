"""How deeply a document nests, by one pass over its characters, before anything parses it.

Parsers of HTML and Markdown take time and memory that grow with the square of the depth; what is
deeper than any document for readers is refused here at the price of reading it. HTML is read as the
tokenizer of the HTML standard reads it (comments, raw text, quoted values); what ends by itself
(``p``, ``li``, ``td``) does not count, and what a closing tag leaves open is closed with it, so
that careless documents pass. It is a bound on cost, not a parser: what it lets through is bounded
by the limits of the process that parses.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

ELEMENTS_MAX: Final = 512  # open at once; browsers cut a tree at the same depth
MARKS_MAX: Final = 64  # formatting that is open at once: each is made again in every paragraph
SAME_MARKS: Final = 3  # of the same formatting, more have no effect (HTML standard)
MARKERS_MAX: Final = 128  # quotes and list items that one line of Markdown opens

_WHITE: Final = r"[\t\n\f\r ]"
_BEGIN: Final = re.compile(r"<(?:(!--)|(/?)([A-Za-z][^\t\n\f\r />]*+))")
# From behind a tag's name to its end. A name of an attribute may begin with "=", and a quote means
# something at the beginning of a value only.
_ATTRIBUTES: Final = re.compile(
    rf"(?:{_WHITE}|/|[^\t\n\f\r />][^\t\n\f\r />=]*+"
    rf"(?:{_WHITE}*+={_WHITE}*+(?:\"[^\"]*+\"|'[^']*+'|(?![\"'])[^\t\n\f\r >]*+))?+)*+>"
)
_RAW: Final = frozenset(
    ("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes")
)
_FOREIGN: Final = frozenset(("svg", "math"))
_VOID: Final = frozenset(
    [
        "area",
        "base",
        "basefont",
        "bgsound",
        "br",
        "col",
        "embed",
        "frame",
        "hr",
        "image",
        "img",
        "input",
        "keygen",
        "link",
        "meta",
        "param",
        "source",
        "track",
        "wbr",
    ]
)
# Their end is implied by the next of their kind: they nest through other elements only.
_ENDS_ITSELF: Final = frozenset(
    [
        "html",
        "head",
        "body",
        "p",
        "li",
        "dt",
        "dd",
        "option",
        "optgroup",
        "tr",
        "td",
        "th",
        "thead",
        "tbody",
        "tfoot",
        "colgroup",
        "caption",
        "rb",
        "rt",
        "rp",
        "rtc",
        "a",
        "nobr",
        "button",
    ]
)
_MARKS: Final = frozenset(
    ["b", "big", "code", "em", "font", "i", "s", "small", "strike", "strong", "tt", "u"]
)
_MARKERS: Final = re.compile(r"^(?:[ \t]*+(?:>|(?:[-+*]|[0-9]{1,9}[.)])(?=[ \t])))++", re.MULTILINE)
_MARKER: Final = re.compile(r">|[-+*]|[0-9]++")


def too_deep(text: str, media_type: str) -> bool:
    """Whether a document nests deeper than the bounds above. Linear in its length."""
    if media_type == "text/html":
        return _html_too_deep(text)
    if media_type == "text/markdown":
        return any(
            sum(1 for _ in _MARKER.finditer(found[0])) > MARKERS_MAX
            for found in _MARKERS.finditer(text)
            if len(found[0]) > MARKERS_MAX
        )
    return False


def _html_too_deep(text: str) -> bool:
    open_ = _Open()
    at = 0
    while (begin := _BEGIN.search(text, at)) is not None:
        if begin[1]:
            at = text.find("-->", begin.end())
            if at < 0:
                return False  # a comment to the end
            continue
        end = _ATTRIBUTES.match(text, begin.end())
        if end is None:
            return False  # a tag without an end is none, and takes the rest with it
        at, name = end.end(), begin[3].lower()
        if begin[2]:
            open_.close(name)
        elif name in _RAW:
            closing = re.compile(rf"</{name}(?=[\t\n\f\r />])", re.IGNORECASE).search(text, at)
            if closing is None:
                return False
            at = closing.start()
        elif name == "plaintext":
            return False
        else:
            open_.open(name, text[begin.start() : at])
            if open_.too_many:
                return True
    return False


class _Open:
    """Elements that are open."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._counts: Counter[str] = Counter()
        self._marks: dict[str, list[str]] = {}
        self._same: Counter[str] = Counter()
        self._marks_open = 0

    @property
    def too_many(self) -> bool:
        """Whether a bound is passed."""
        return len(self._stack) > ELEMENTS_MAX or self._marks_open > MARKS_MAX

    def open(self, name: str, tag: str) -> None:
        """A start tag."""
        if name in _VOID or name in _ENDS_ITSELF:
            return
        if name in _MARKS:
            if self._same[tag] < SAME_MARKS:
                self._same[tag] += 1
                self._marks.setdefault(name, []).append(tag)
                self._marks_open += 1
            return
        if tag.endswith("/>") and any(self._counts[one] for one in _FOREIGN):
            return
        self._stack.append(name)
        self._counts[name] += 1

    def close(self, name: str) -> None:
        """An end tag. Each element is taken from the stack once: linear in all."""
        if marks := self._marks.get(name):
            self._same[marks.pop()] -= 1
            self._marks_open -= 1
        if not self._counts[name]:
            return
        while True:
            closed = self._stack.pop()
            self._counts[closed] -= 1
            if closed == name:
                return
