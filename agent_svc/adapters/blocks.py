"""Turns text, Markdown and HTML into blocks with the bytes that they came from.

* text/plain: a block is a paragraph, exactly as it stands.
* text/markdown (CommonMark with tables, markdown-it-py): the bytes of a block are its source lines;
  links and images are replaced by their texts, other marks in a line stay. Scripts, style sheets
  and comments that are blocks are left out.
* text/html (selectolax, a tree as browsers make it): a block's bytes run from the first to the last
  of its texts, which are found in the source by their order; where a text is not found (a browser
  moves what stands wrongly in a table, say), it has the place after the one before. Left out is
  what an element hides by itself (``hidden``, ``display: none``): a reader of the page would not
  see what a model is told.

Slow and large on hostile input, as all parsers of these are: called in a process of its own
(``parsers.py``). Content is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from agent_svc.domain.chunking import Block

if TYPE_CHECKING:
    from markdown_it.token import Token
    from selectolax.lexbor import LexborNode

_BOM: Final = b"\xef\xbb\xbf"
_PARAGRAPH: Final = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|$))+")
_LINE_END: Final = re.compile(rb"\r\n?|\n")
_LINK: Final = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*(?:\s[^()]*)?\)")
# At the beginning of a block of HTML: what it holds up to its end is no text.
_NO_TEXT: Final = re.compile(
    r"\s*+<(?:(script|style)\b.*?(?:</\1\s*>|\Z)|!--.*?(?:-->|\Z))", re.DOTALL | re.IGNORECASE
)
_NOT_SHOWN: Final = re.compile(
    r"(?<![\w-])(?:display\s*+:\s*+none|visibility\s*+:\s*+hidden)\b", re.IGNORECASE
)
_TAG: Final = re.compile(r"<[^<>]*>")
_HEADING: Final = re.compile(r"h([1-6])")
_SILENT: Final = frozenset({"script", "style", "noscript", "template", "svg", "math", "iframe"})
# What ends a block before and after itself; everything else stands in a line.
_BLOCK: Final = re.compile(
    r"address|article|aside|blockquote|body|caption|dd|details|dialog|div|dl|dt|fieldset|figcaption"
    r"|figure|footer|form|h[1-6]|header|hr|legend|li|main|menu|nav|ol|option|p|pre|section|select"
    r"|summary|table|tbody|tfoot|thead|title|tr|ul"
)
_CELLS: Final = frozenset({"td", "th"})
_REPLACED: Final = re.compile(
    r"\r\n?|&(?:#[0-9]{1,8};?|#[xX][0-9a-fA-F]{1,8};?|[A-Za-z][A-Za-z0-9]{1,31};?)"
)
_LOOK_AHEAD: Final = 65_536  # characters in which a text of the tree is looked for in the source


class NotTextError(ValueError):
    """The content is no UTF-8."""


def blocks_of(content: bytes, media_type: str) -> list[Block]:
    """The blocks of a content of one of :data:`MEDIA_TYPES`. Raises NotTextError."""
    skipped = len(_BOM) if content.startswith(_BOM) else 0
    try:
        text = content[skipped:].decode()
    except UnicodeDecodeError as error:
        raise NotTextError("no UTF-8") from error
    return [
        Block(b.text, b.begin_byte + skipped, b.end_byte + skipped, b.level)
        for b in _READERS[media_type](text)
    ]


def _plain(text: str) -> Iterator[Block]:
    position = _Position(text)
    for found in _PARAGRAPH.finditer(text):
        paragraph = found[0].rstrip()
        begin = position.byte(found.start())
        yield Block(paragraph, begin, begin + len(paragraph.encode()))


def _markdown(text: str) -> Iterator[Block]:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table").disable("inline")
    ends = [found.end() for found in _LINE_END.finditer(text.encode())]
    starts = [0, *ends, len(text.encode())]

    def block(lines: list[int] | None, of: str, level: int = 0) -> Iterator[Block]:
        if lines is not None and of.strip():
            last = min(lines[1], len(starts) - 1)
            yield Block(of.strip(), starts[min(lines[0], last)], starts[last], level)

    level = 0
    row: list[str] | None = None
    lines: list[int] | None = None
    for token in parser.parse(text):
        if token.type == "heading_open":
            level = int(token.tag[1:])
        elif token.type == "tr_open":
            row, lines = [], token.map or lines
        elif token.type == "tr_close" and row is not None:
            yield from block(lines, " | ".join(row))
            row = None
        elif token.type in ("inline", "fence", "code_block", "html_block"):
            of = _in_line(token)
            if row is not None:
                row.append(of)
            else:
                yield from block(token.map, of, level)
            level = 0


def _in_line(token: Token) -> str:
    match token.type:
        case "inline":
            return _LINK.sub(r"\1", token.content)
        case "html_block":
            code = _NO_TEXT.match(token.content)
            content = token.content[code.end() :] if code else token.content
            return html.unescape(_TAG.sub(" ", content))
    return token.content


def _html(text: str) -> Iterator[Block]:
    from selectolax.lexbor import LexborHTMLParser

    root = LexborHTMLParser(text).root
    return _Walk(text).blocks(root) if root is not None else iter(())


def _hidden(node: LexborNode, tag: str) -> bool:
    """Whether the element itself says that readers do not see it. Style sheets are not looked at,
    and a whole page is hidden until its script shows it."""
    if tag in ("html", "body") or not node.is_element_node:
        return False
    said = node.attributes
    if "hidden" in said and said["hidden"] != "until-found":
        return True
    return bool(_NOT_SHOWN.search(said.get("style") or ""))


def _level(tag: str) -> int:
    found = _HEADING.fullmatch(tag)
    return int(found[1]) if found else int(tag == "title")


class _Position:
    """Turns growing positions in a text into positions in its bytes."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._byte = text, 0, 0

    def byte(self, at: int) -> int:
        """Bytes before ``at``; one before the last one asked for counts as that one."""
        self._byte += len(self._text[self._at : at].encode())
        self._at = max(at, self._at)
        return self._byte


class _Source:
    """A source as a tree shows its texts: references resolved, one kind of line end. Finds texts
    one after the other, and knows the bytes that they were made from."""

    def __init__(self, source: str) -> None:
        self._position = _Position(source)
        self._cursor = 0
        # Where each piece begins in the text, where in the source, and where a replaced one ends.
        self._begins: list[int] = []
        self._pieces: list[tuple[int, int | None]] = []
        text: list[str] = []
        at = length = 0
        for found in _REPLACED.finditer(source):
            literal = source[at : found.start()]
            made = html.unescape(found[0]) if found[0][0] == "&" else "\n"
            self._begins += [length, length + len(literal)]
            self._pieces += [(at, None), (found.start(), found.end())]
            text += [literal, made]
            length += len(literal) + len(made)
            at = found.end()
        self._begins.append(length)
        self._pieces.append((at, None))
        self._text = "".join([*text, source[at:]])

    def find(self, text: str) -> tuple[int, int] | None:
        """The bytes of the next place where this text stands."""
        until = self._cursor + len(text) + _LOOK_AHEAD
        at = self._text.find(text, self._cursor, until)
        if at < 0:
            return None
        self._cursor = at + len(text)
        begin = self._position.byte(self._to_source(at, end=False))
        return begin, self._position.byte(self._to_source(self._cursor, end=True))

    def here(self) -> int:
        """The byte after what was found last."""
        return self._position.byte(0)

    def _to_source(self, at: int, *, end: bool) -> int:
        looked_at = at - 1 if end else at
        number = bisect_right(self._begins, looked_at) - 1
        begin, replaced_end = self._pieces[number]
        if replaced_end is not None:
            return replaced_end if end else begin
        return begin + at - self._begins[number]


class _Walk:
    """Goes through a tree in the order of its source, without recursion."""

    def __init__(self, source: str) -> None:
        self._source = _Source(source)
        self._parts: list[str] = []
        self._range: tuple[int, int] | None = None  # in bytes
        self._level = 0

    def blocks(self, root: LexborNode) -> Iterator[Block]:
        """All blocks below a node."""
        node: LexborNode | None = root
        while node is not None:
            tag = node.tag or ""
            silent = tag in _SILENT or _hidden(node, tag)
            if node.is_text_node:
                self._text(node.text_content or "")
            elif silent:
                if _BLOCK.fullmatch(tag):
                    yield from self._flush()
                self._pass_over(node)
            elif _BLOCK.fullmatch(tag):
                yield from self._flush()
                self._level = _level(tag)
            elif tag in _CELLS and self._parts:
                self._parts.append(" | ")
            elif tag == "br":
                self._parts.append("\n")
            down = None if silent else node.child
            if down is not None:
                node = down
                continue
            while node is not None and node.next is None:
                node = node.parent
                if node is not None and _BLOCK.fullmatch(node.tag or ""):
                    yield from self._flush()
            node = node.next if node is not None else None
        yield from self._flush()

    def _pass_over(self, node: LexborNode) -> None:
        """What comes after the node is looked for behind its texts."""
        for inner in node.traverse(include_text=True):
            if inner.is_text_node and (text := (inner.text_content or "").strip()):
                self._source.find(text)

    def _flush(self) -> Iterator[Block]:
        text = "".join(self._parts)
        lines = (" ".join(line.split()) for line in text.split("\n"))
        text = "\n".join(line for line in lines if line).strip(" |")
        if text:
            here = self._source.here()
            begin, end = self._range or (here, here)
            yield Block(text, begin, end, self._level)
        self._parts, self._range, self._level = [], None, 0

    def _text(self, text: str) -> None:
        self._parts.append(text)
        if not text.strip():
            return
        found = self._source.find(text.strip())
        if found is not None:
            begin = found[0] if self._range is None else self._range[0]
            self._range = (begin, found[1])


_READERS: Final[Mapping[str, Callable[[str], Iterator[Block]]]] = {
    "text/plain": _plain,
    "text/markdown": _markdown,
    "text/html": _html,
}
MEDIA_TYPES: Final = tuple(_READERS)
