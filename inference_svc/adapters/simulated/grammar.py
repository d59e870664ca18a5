"""A short text that follows an EBNF grammar (``name ::= alternatives``, rule ``root`` first).

Pure. Understands literals, classes, groups, rule names and the quantifiers ``? * + {m,n}``, with
``#`` comments: the form that structured-output engines take. Recursive rules end because only
alternatives of least height are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from inference_svc.adapters.simulated.forms import (
    DEPTH_MAX,
    FormError,
    Picker,
    bounded,
    repeated,
)
from inference_svc.adapters.simulated.regex import regex_text

ENDLESS = 10**9  # the height of a rule that never ends
RULES_MAX = 512

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<rule>[A-Za-z_][\w-]*)\s*::=|(?P<name>[A-Za-z_][\w-]*)"""
    r"""|(?P<literal>"(?:[^"\\\n]|\\.)*")|(?P<class>\[(?:[^\]\\]|\\.)+\])"""
    r"""|(?P<count>\{\s*\d{1,4}\s*(?:,\s*(?:\d{1,4}\s*)?)?\})|(?P<mark>[()|?*+])""",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    expression: str


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int


_Node = _Literal | _Class | _Name | _Sequence | _Choice | _Repeat


def grammar_text(grammar: str, picker: Picker) -> str:
    """A text that follows the grammar; FormError when none can be made."""
    rules = _Reader(grammar).rules()
    if "root" not in rules:
        raise FormError("has no rule named root")
    return _Text(rules, picker).rule("root")


class _Reader:
    def __init__(self, grammar: str) -> None:
        self._tokens = list(_tokens(grammar))
        self._at = 0

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self, kind: str, text: str | None = None) -> str | None:
        found_kind, found = self._peek()
        if found_kind != kind or (text is not None and found != text):
            return None
        self._at += 1
        return found

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._peek()[0] != "end":
            name = self._take("rule")
            if name is None:
                raise FormError("has something else where a rule should begin")
            if name in rules or len(rules) >= RULES_MAX:
                raise FormError(f"has a rule twice, or more than {RULES_MAX} rules")
            rules[name] = self._choice(0)
        return rules

    def _choice(self, depth: int) -> _Node:
        if depth > DEPTH_MAX:
            raise FormError(f"is nested deeper than {DEPTH_MAX}")
        branches = [self._sequence(depth)]
        while self._take("mark", "|") is not None:
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while (part := self._part(depth)) is not None:
            least = self._least()
            parts.append(part if least == 1 else _Repeat(part, least))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self, depth: int) -> _Node | None:
        if (literal := self._take("literal")) is not None:
            return _Literal(_unescaped(literal[1:-1]))
        if (members := self._take("class")) is not None:
            return _Class(members)
        if (name := self._take("name")) is not None:
            return _Name(name)
        if self._take("mark", "(") is None:
            return None
        inside = self._choice(depth + 1)
        if self._take("mark", ")") is None:
            raise FormError("has a group that is not closed")
        return inside

    def _least(self) -> int:
        if self._take("mark", "?") is not None or self._take("mark", "*") is not None:
            return 0
        if self._take("mark", "+") is not None:
            return 1
        count = self._take("count")
        return int(count.strip("{} ").split(",")[0]) if count is not None else 1


def _tokens(grammar: str) -> list[tuple[str, str]]:
    tokens = []
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            raise FormError("has a character that does not belong to a grammar")
        at = match.end()
        if match.lastgroup is not None:
            tokens.append((match.lastgroup, match.group(match.lastgroup)))
    return tokens


def _unescaped(text: str) -> str:
    if not re.fullmatch(r'(?:[^\\]|\\[ntr"\\])*', text, re.DOTALL):
        raise FormError("has an escape that is not supported")
    return re.sub(r"\\(.)", lambda match: _ESCAPES[match.group(1)], text)


def _height(node: _Node, heights: Mapping[str, int]) -> int:
    """Rules that are entered one inside the other on the shortest way through a node."""
    if isinstance(node, _Name):
        return min(heights[node.name] + 1, ENDLESS)
    if isinstance(node, _Sequence):
        return max((_height(part, heights) for part in node.parts), default=0)
    if isinstance(node, _Choice):
        return min(_height(branch, heights) for branch in node.branches)
    if isinstance(node, _Repeat):
        return _height(node.part, heights) if node.least else 0
    return 0


def _names(node: _Node) -> set[str]:
    if isinstance(node, _Name):
        return {node.name}
    if isinstance(node, _Repeat):
        return _names(node.part)
    if isinstance(node, _Sequence):
        return set().union(*map(_names, node.parts))
    if isinstance(node, _Choice):
        return set().union(*map(_names, node.branches))
    return set()


def _heights(rules: Mapping[str, _Node]) -> dict[str, int]:
    if not set().union(*map(_names, rules.values())) <= set(rules):
        raise FormError("uses a rule that it does not define")
    heights = dict.fromkeys(rules, ENDLESS)
    # After so many rounds all heights up to the depth that is allowed are final.
    for _ in range(DEPTH_MAX + 1):
        before = dict(heights)
        for name, node in rules.items():
            heights[name] = _height(node, heights)
        if heights == before:
            break
    return heights


class _Text:
    """Writes nodes; each rule is written once, or rules that use each other twice would take time
    that doubles with each of them."""

    def __init__(self, rules: Mapping[str, _Node], picker: Picker) -> None:
        self._rules = rules
        self._heights = _heights(rules)
        self._picker = picker
        self._written: dict[str, str] = {}

    def rule(self, name: str) -> str:
        if self._heights[name] > DEPTH_MAX:
            raise FormError(f"has a rule that never ends, or is nested deeper than {DEPTH_MAX}")
        if name not in self._written:
            self._written[name] = bounded(self._node(self._rules[name]))
        return self._written[name]

    def _node(self, node: _Node) -> str:
        if isinstance(node, _Literal):
            return node.text
        if isinstance(node, _Class):
            return regex_text(node.expression, self._picker)
        if isinstance(node, _Name):
            return self.rule(node.name)
        if isinstance(node, _Repeat):
            return repeated(self._node(node.part), node.least) if node.least else ""
        if isinstance(node, _Sequence):
            text = ""
            for part in node.parts:
                text = bounded(text + self._node(part))
            return text
        heights = [_height(branch, self._heights) for branch in node.branches]
        least = min(heights)
        shortest = [
            branch for branch, height in zip(node.branches, heights, strict=True) if height == least
        ]
        return self._node(shortest[self._picker.pick(len(shortest))])
