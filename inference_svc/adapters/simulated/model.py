"""The simulated engine's model: its vocabulary, tokenizer and next-token function.

Pure tables and functions, built once at import and read only.

The vocabulary is byte level: 256 single bytes, then pieces of several bytes (English fragments,
whole Hangul, CJK and emoji characters, and fragments that cut characters), then the end-of-sequence
token. The next token is a function of a 64-bit state into which every token of the prefix was
folded, ``state = state * FOLD + token + 1``, so that a lost, repeated or exchanged token changes
everything after it, and a step costs O(1). Which tokens may follow depends on the character that
the output's last bytes leave open, so that generated text is valid UTF-8 although its tokens cut
characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from inference_svc.domain.stop_text import spell

STATE_MASK = 2**64 - 1
STATES = 2**64
FOLD = 6364136223846793005  # odd, hence invertible: two different states never become one
ROW_BITS = 10
ROW_SHIFT = 64 - ROW_BITS  # the choice is made by the state's highest bits, the best mixed ones

_ENGLISH = (
    " the| of| and| to| in| a| is| that| it| was| for| on| with| as| at| by| from| be| this| not|"
    " sea| light| water| stone| morning| quiet| river| boat| harbour| wind| north| window| small|"
    " old| house| road| letter| music| garden| winter| when| where| which| there| here| then| an|"
    "ing|er|ed|ly|tion|en|re|st|al|or|es|an|in|th|on|ou|ow|le|nd|ch|, |. |.\n|; "
)
ENGLISH = _ENGLISH.split("|")
WHOLE_CHARACTERS = ("한", "국", "밤", "달", "龜", "海", "月", "🙂", "🫠", "é", "ß")
# The fragments cut characters of three and four bytes: their beginning, their end, or both.
FRAGMENTS = (
    b"\xec\x82", b"\xec\x95", b"\xe9\xbe", b"\xe9\xa6", b" \xec", b" \xe9", b"\xf0\x9f",
    b"\xf0\x9f\xa5", b" \xf0\x9f\xab", b"\x82\xbc", b"\x9c\xec", b"\x9c ", b"\xa5\xa0",
    b"\xa0\xec\x82", b"\xac\xf0\x9f",
)  # fmt: skip
# Characters that generated text may leave open between tokens, by the bytes seen of them.
OPEN_CHARACTERS = (
    b"", b"\xec", b"\xe9", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\xa5", b"\xf0\x9f\xab", b"\xf0\x9f\x98",
    b"\xec\x82", b"\xec\x95", b"\xec\x9d", b"\xe9\xbe", b"\xe9\xa6",
)  # fmt: skip
# Shares of the kinds of token where no character is open; they add up to 32.
ENGLISH_SHARE, LETTER_SHARE, CHARACTER_SHARE, OPENING_SHARE = 20, 4, 3, 5

TOKEN_BYTES: tuple[bytes, ...] = (
    *(bytes([value]) for value in range(256)),
    *(piece.encode() for piece in ENGLISH),
    *(character.encode() for character in WHOLE_CHARACTERS),
    *FRAGMENTS,
    b"",
)
EOS = len(TOKEN_BYTES) - 1
EOS_TEXT = "<eos>"
VOCABULARY_SIZE = len(TOKEN_BYTES)
TOKEN_OF: dict[bytes, int] = {piece: token for token, piece in enumerate(TOKEN_BYTES[:EOS])}
# Bytes whose tokens a text holds at most; a bound on tokens that needs no tokenising.
TOKEN_BYTES_MAX = max(len(piece) for piece in TOKEN_BYTES)
# Tokenising begins anew at each multiple of this, so that a long text can be done in slices.
ENCODE_SLICE_BYTES = 4096


class Choice:
    """One entry of a row: a token, as the step loop needs it."""

    __slots__ = ("fold", "ids", "row", "text", "token")

    def __init__(self, token: int, text: str, row: int) -> None:
        self.token = token
        self.ids = (token,)
        self.text = text  # characters that this token completes
        self.row = row  # index of the row of the next token
        self.fold = token + 1


def next_state(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * FOLD + token + 1) & STATE_MASK


def state_of(*parts: str) -> int:
    """A first state, from what else the output depends on."""
    digest = blake2b("\x00".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _open_bytes(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character and do not complete it."""
    for length in (1, 2, 3):
        end = data[-length:]
        if end and end[0] >= 0xC0:
            needed = 2 if end[0] < 0xE0 else 3 if end[0] < 0xF0 else 4
            return end if needed > len(end) else b""
    return b""


def row_after(pieces: Iterable[bytes]) -> int:
    """The row of the next token of an output with these bytes."""
    open_bytes = _open_bytes(b"".join(pieces)[-3:])
    return _ROW_OF.get(open_bytes, 0)


def _is_text(data: bytes) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in spell([data])


def _followers(opened: bytes) -> list[int]:
    """Tokens that may follow an open character, so that it stays valid and known."""
    return [
        token
        for token in range(EOS)
        if 0x80 <= TOKEN_BYTES[token][0] < 0xC0
        and _is_text(opened + TOKEN_BYTES[token])
        and _open_bytes(opened + TOKEN_BYTES[token]) in _ROW_OF
    ]


def _openers() -> list[list[int]]:
    """Tokens that may come where no character is open, one entry for each part of 32."""
    english = [TOKEN_OF[piece.encode()] for piece in ENGLISH]
    letters = [ord(letter) for letter in "abcdefghiklmnoprstuvwy -'0123456789"]
    characters = [TOKEN_OF[character.encode()] for character in WHOLE_CHARACTERS]
    opening = [TOKEN_OF[piece] for piece in (*FRAGMENTS, b"\xec", b"\xe9", b"\xf0")
               if _open_bytes(piece) and not 0x80 <= piece[0] < 0xC0]  # fmt: skip
    return (
        [english] * ENGLISH_SHARE
        + [letters] * LETTER_SHARE
        + [characters] * CHARACTER_SHARE
        + [opening] * OPENING_SHARE
    )


def _row(opened: bytes) -> list[Choice]:
    followers = _followers(opened) if opened else []
    shares = [followers] * 32 if opened else _openers()
    made: dict[int, Choice] = {}
    row = []
    for index in range(1 << ROW_BITS):
        tokens = shares[index % 32]
        token = tokens[(index // 32 * 7 + index) % len(tokens)]
        if token not in made:
            data = opened + TOKEN_BYTES[token]
            made[token] = Choice(token, spell([data]), _ROW_OF[_open_bytes(data)])
        row.append(made[token])
    return row


_ROW_OF = {opened: index for index, opened in enumerate(OPEN_CHARACTERS)}
ROWS: tuple[list[Choice], ...] = tuple(_row(opened) for opened in OPEN_CHARACTERS)


# --- the tokenizer ---


def _piece_pattern() -> re.Pattern[bytes]:
    by_first: dict[bytes, list[bytes]] = {}
    for piece in TOKEN_BYTES[256:EOS]:
        by_first.setdefault(piece[:1], []).append(piece[1:])
    groups = [
        re.escape(first)
        + b"(?:"
        + b"|".join(re.escape(rest) for rest in sorted(rests, key=len, reverse=True))
        + b")?"
        for first, rests in by_first.items()
    ]
    return re.compile(b"|".join([*groups, b"."]), re.DOTALL)


_PIECES = _piece_pattern()


def encode_slice(data: bytes, start: int) -> list[int]:
    """The tokens of the slice of ``data`` that begins at ``start``, a multiple of the size."""
    pieces = _PIECES.findall(data, start, start + ENCODE_SLICE_BYTES)
    return list(map(TOKEN_OF.__getitem__, pieces))


def encode(text: str) -> tuple[int, ...]:
    """The token ids of a text: the longest piece at each place. ``decode`` gives it back."""
    data = text.encode()
    tokens: list[int] = []
    for start in range(0, len(data), ENCODE_SLICE_BYTES):
        tokens += encode_slice(data, start)
    return tuple(tokens)


def decode(token_ids: Iterable[int]) -> str:
    """The text of token ids: without special tokens and an incomplete last character."""
    return spell([TOKEN_BYTES[token] for token in token_ids])


# --- folding many tokens at once ---

_powers = np.ones(1, dtype=np.uint64)


def _powers_below(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """FOLD to the powers count - 1 down to 0, modulo 2**64."""
    global _powers
    if count > len(_powers):
        factors = np.full(max(count, 2 * len(_powers)), FOLD, dtype=np.uint64)
        factors[0] = 1
        _powers = np.multiply.accumulate(factors)
    return _powers[:count][::-1]


def fold(state: int, token_ids: Sequence[int]) -> int:
    """The state after many more tokens; equals :func:`next_state` for each in turn."""
    count = len(token_ids)
    if not count:
        return state
    terms = (np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)) * _powers_below(count)
    return (state * pow(FOLD, count, STATES) + int(terms.sum(dtype=np.uint64))) & STATE_MASK


def block_keys(salt: str, token_ids: Sequence[int], block_tokens: int) -> list[int]:
    """A key for each whole block of a prompt, which depends on all tokens up to its end."""
    count = len(token_ids) // block_tokens
    if not count:
        return []
    tokens = np.asarray(token_ids[: count * block_tokens], dtype=np.uint64) + np.uint64(1)
    terms = tokens.reshape(count, block_tokens) * _powers_below(block_tokens)
    factor = pow(FOLD, block_tokens, STATES)
    key = state_of("block", salt)
    keys = []
    for term in terms.sum(axis=1, dtype=np.uint64).tolist():
        key = (key * factor + term) & STATE_MASK
        keys.append(key)
    return keys
