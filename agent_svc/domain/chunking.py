"""Cuts a document's text into chunks for retrieval.

A chunk holds whole sentences as far as they fit, up to a size that the embedding model reads whole:
all-MiniLM-L6-v2 reads 256 tokens, two of them its own. What a text takes is estimated here, without
the model's tokenizer: never by bytes alone, since one byte of "{};" and six of a word are a token
each. A chunk begins with the headings of its section and repeats the end of the chunk before
it, so that what is said across a cut is found too. A heading is no chunk of its own, which would
be found before the text that answers: it goes with the text below it.

Deterministic: the same blocks give the same chunks, so that an ingest that another process takes
over goes on where it was. Linear in the text's length. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

HEADING_BYTES_MAX: Final = 120  # of a heading, at the start of each chunk of its section
_SENTENCE_END: Final = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+\s++"  # a run of marks is looked at once: linear
    r"|[。！？]++[”’」』)]*+\s*+"
    r"|\n\s*+"
)
_PIECE: Final = re.compile(r"\S+\s*|\s+")
_WORD_CHARS_MAX: Final = 20  # what is longer is none
_TOKEN_LIKE: Final = re.compile(r"[A-Za-z0-9]+|[^\s]")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a heading (``level`` 1 to 6), an item. The bytes of the content from
    ``begin_byte`` to before ``end_byte`` hold it; where they are its text exactly (UTF-8), so are
    the ranges of its parts."""

    text: str
    begin_byte: int
    end_byte: int
    level: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk: its number from 0, its text, and the bytes of the content that it covers. Of the
    headings that a text begins with, only its section's first chunk covers its own."""

    number: int
    text: str
    begin_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """``bytes_max`` and ``tokens_max``: of a chunk with its heading. ``overlap_bytes``: at most so
    much of the chunk before is repeated. ``chunks_max``: of a document."""

    bytes_max: int = 900
    tokens_max: int = 210
    overlap_bytes: int = 150
    chunks_max: int = 8_192


class TooManyChunksError(ValueError):
    """The text makes more chunks than a document may have."""


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    begin_byte: int
    end_byte: int
    size_bytes: int
    tokens: int


def estimated_tokens(text: str) -> int:
    """About how many tokens a text takes of a WordPiece vocabulary, rather too many: a mark is one,
    and so is a character of another script; about four letters of a word, two digits of a number,
    and one and a half characters of what is neither, as keys and hashes."""
    tokens = 0
    for found in _TOKEN_LIKE.findall(text):
        if not found.isascii() or not found.isalnum():
            tokens += len(found)
        elif found.isalpha() and len(found) <= _WORD_CHARS_MAX:
            tokens += 1 if len(found) <= 4 else (len(found) + 1) // 4
        elif found.isdigit():
            tokens += (len(found) + 1) // 2
        else:
            tokens += (2 * len(found) + 2) // 3
    return tokens


def chunk(blocks: Sequence[Block], sizes: ChunkSizes | None = None) -> list[Chunk]:
    """The chunks of a document. Raises TooManyChunksError."""
    sizes = sizes or ChunkSizes()
    chunks: list[Chunk] = []
    for section in _sections(blocks):
        for text, begin, end in _filled(section, sizes):
            if len(chunks) == sizes.chunks_max:
                raise TooManyChunksError(f"more than {sizes.chunks_max} chunks")
            chunks.append(Chunk(len(chunks), text, begin, end))
    return chunks


@dataclass(slots=True)
class _Section:
    """What stands below a heading, or below several that follow one another. ``path``: these with
    the ones above, as chunks show them; ``begin_byte``: of the first of these, if there is one."""

    path: str
    begin_byte: int | None
    blocks: list[Block]


def _sections(blocks: Sequence[Block]) -> Iterator[_Section]:
    """No heading is a section alone: those without text below them belong to the text that comes
    next; at the end of a document they are text of what came before."""
    section = _Section("", None, [])
    above: list[tuple[int, str]] = []
    opened: list[Block] = []  # headings whose text is still to come
    for block in blocks:
        if not block.text.strip():
            continue
        if block.level:
            opened.append(block)
            continue
        if opened:
            yield section
            section = _opened(opened, above)
            for heading in opened:
                above = [one for one in above if one[0] < heading.level]
                above.append((heading.level, _line(heading)))
            opened = []
        section.blocks.append(block)
    section.blocks += opened
    yield section


def _opened(headings: Sequence[Block], above: Sequence[tuple[int, str]]) -> _Section:
    """The section that headings open, its text still to come. What its path has no room for is
    text as well, but for headings above: the chunks of their own sections show them."""
    highest = min(heading.level for heading in headings)
    path = [text for level, text in above if level < highest]
    for heading in headings:
        text = _line(heading)
        if not path or path[-1] != text:  # a title is often the first heading again
            path.append(text)
    shown, as_text = " > ".join(path), list[Block]()
    if len(shown.encode()) > HEADING_BYTES_MAX:
        shown, as_text = path[-1], list(headings[:-1])
        if len(shown.encode()) > HEADING_BYTES_MAX:
            shown, as_text = _cut(shown, HEADING_BYTES_MAX), list(headings)
    return _Section(shown, min(heading.begin_byte for heading in headings), as_text)


def _line(heading: Block) -> str:
    return " ".join(heading.text.split())


def _filled(section: _Section, sizes: ChunkSizes) -> Iterator[tuple[str, int, int]]:
    """The chunks of a section: as many pieces as fit, then on with the last of them."""
    path, opening = section.path, section.begin_byte
    pieces = [piece for block in section.blocks for piece in _pieces(block, sizes)]
    bytes_max = sizes.bytes_max - len(path.encode()) - 1
    tokens_max = sizes.tokens_max - estimated_tokens(path)
    at = 0
    while at < len(pieces):
        end, size, tokens = at, 0, 0
        while end < len(pieces):
            piece = pieces[end]
            if end > at and (
                size + piece.size_bytes > bytes_max or tokens + piece.tokens > tokens_max
            ):
                break
            size, tokens, end = size + piece.size_bytes, tokens + piece.tokens, end + 1
        begin = min(piece.begin_byte for piece in pieces[at:end])
        last = max(piece.end_byte for piece in pieces[at:end])
        text = "".join(piece.text for piece in pieces[at:end]).strip()
        if text:
            if opening is not None:
                begin, opening = min(begin, opening), None
            yield (f"{path}\n{text}" if path else text), begin, last
        if end == len(pieces):
            return
        at = end - _repeated(pieces[at + 1 : end], pieces[end], bytes_max, tokens_max, sizes)


def _repeated(
    before: Sequence[_Piece], following: _Piece, bytes_max: int, tokens_max: int, sizes: ChunkSizes
) -> int:
    """How many of the last pieces the next chunk repeats: they leave room for what follows."""
    size, tokens, count = 0, 0, 0
    for piece in reversed(before):
        size, tokens = size + piece.size_bytes, tokens + piece.tokens
        room = size + following.size_bytes <= bytes_max and tokens + following.tokens <= tokens_max
        if size > sizes.overlap_bytes or not room:
            break
        count += 1
    return count


def _pieces(block: Block, sizes: ChunkSizes) -> Iterator[_Piece]:
    """The sentences of a block, and of too long ones their parts; they join to its text and end
    with white space."""
    text = block.text if block.text[-1:].isspace() else block.text + "\n"
    exact = len(block.text.encode()) == block.end_byte - block.begin_byte
    # Half of the room, so that a heading always leaves enough of it.
    at = block.begin_byte
    for sentence in _sentences(text):
        for part in _parts(sentence, sizes.bytes_max // 2, sizes.tokens_max // 2):
            size = len(part.encode())
            begin, end = block.begin_byte, block.end_byte
            if exact:
                begin, end = at, min(at + size, block.end_byte)
            yield _Piece(part, begin, end, size, estimated_tokens(part))
            at += size


def _sentences(text: str) -> Iterator[str]:
    at = 0
    for found in _SENTENCE_END.finditer(text):
        yield text[at : found.end()]
        at = found.end()
    if at < len(text):
        yield text[at:]


def _parts(sentence: str, bytes_max: int, tokens_max: int) -> Iterator[str]:
    """The sentence if it fits, else its words in as few parts as they need."""
    if len(sentence.encode()) <= bytes_max and estimated_tokens(sentence) <= tokens_max:
        yield sentence
        return
    part: list[str] = []
    size = tokens = 0
    for word in _PIECE.findall(sentence):
        for bit in _bits(word, bytes_max, tokens_max):
            more, cost = len(bit.encode()), estimated_tokens(bit)
            if part and (size + more > bytes_max or tokens + cost > tokens_max):
                yield "".join(part)
                part, size, tokens = [], 0, 0
            part.append(bit)
            size, tokens = size + more, tokens + cost
    if part:
        yield "".join(part)


def _bits(word: str, bytes_max: int, tokens_max: int) -> Iterator[str]:
    """A word, cut where it is longer than a part may be."""
    # No character has more than four bytes, nor is one more than one token.
    most = min(bytes_max // 4, tokens_max)
    for at in range(0, len(word), most):
        yield word[at : at + most]


def _cut(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode(errors="ignore").strip()
