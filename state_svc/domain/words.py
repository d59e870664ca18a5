"""The words of a text, for search by words.

Words are runs of Unicode letters, digits and underscores, after compatibility normalization (NFKC)
and case folding; nothing is stemmed or left out, so that any language is treated alike. Scripts
that write no spaces (Han, kana, Hangul, Thai) give pairs of neighbouring characters, as Lucene's
CJKBigramFilter does.

A word is kept as a 64-bit hash: an index is then built from arrays alone, without a dictionary of
strings. Two of a million different words meet with a probability of 3e-8.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

COUNT_MAX: Final = 65_535
WORD_CHARS_MAX: Final = 64  # of longer ones only the first; nobody asks for the rest
# Of combining marks in a row; no language needs more than 30 (UAX 15, stream-safe text). To put
# more in order takes time with the square of their number, and no other thread runs meanwhile.
MARKS_MAX: Final = 32

_UNSPACED: Final = (
    "\u0e00-\u0e7f"  # Thai
    "\u3040-\u30ff"  # Hiragana, Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\uac00-\ud7af"  # Hangul
    "\U00020000-\U0002ffff"  # Han, rare
)
_WORD: Final = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
# Marks, and the two letters that become some, are among these.
_NO_LETTERS: Final = re.compile(rf"(?:[^\w\s]|[\uff9e\uff9f]){{{MARKS_MAX + 1},}}")
_STARTS_UNSPACED: Final = re.compile(rf"[{_UNSPACED}]")


def words(text: str) -> Iterator[str]:
    """The words in their order."""
    if not text.isascii():
        text = _NO_LETTERS.sub(_with_few_marks, text)
    folded = unicodedata.normalize("NFKC", text).casefold()
    plain = folded.isascii()
    for run in _WORD.findall(folded):
        if plain or not _STARTS_UNSPACED.match(run):
            yield run[:WORD_CHARS_MAX]
        elif len(run) == 1:
            yield run
        else:
            for at in range(len(run) - 1):
                yield run[at : at + 2]


def _with_few_marks(run: re.Match[str]) -> str:
    """The same without marks beyond ``MARKS_MAX`` in a row."""
    kept: list[str] = []
    marks = 0
    for char in run[0]:
        marks = marks + 1 if unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) else 0
        if marks <= MARKS_MAX:
            kept.append(char)
    return "".join(kept)


def term(word: str) -> int:
    """A word's hash. The same in every process and release: it is stored."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Terms:
    """The different words of a text by hash, ascending, and how often each occurs (at most
    ``COUNT_MAX`` is counted). Arrays of equal length."""

    hashes: NDArray[np.uint64]
    counts: NDArray[np.uint16]


def terms_of(text: str) -> Terms:
    """A text's words, counted."""
    counted = Counter(words(text))
    hashes = np.fromiter(map(term, counted), dtype="<u8", count=len(counted))
    counts = np.fromiter(
        (min(count, COUNT_MAX) for count in counted.values()), dtype="<u2", count=len(counted)
    )
    order = np.argsort(hashes)
    return Terms(hashes[order], counts[order])
