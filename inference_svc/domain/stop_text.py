"""From the bytes of tokens to text that may be sent: whole characters, and no stop string.

Owns the incremental UTF-8 decoding of one output and its search for stop strings, across the seam
of a continuation too. One instance per output, used from one task; no I/O. It holds back at most
the longest stop string less one character, plus an incomplete character of at most three bytes.

Bytes that are not UTF-8 become U+FFFD as soon as they are known to be none, independent of how
tokens cut them. An incomplete character at the end of an output is dropped.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


def spell(pieces: Iterable[bytes]) -> str:
    """The text of an output whose tokens have these bytes, without an incomplete last character."""
    return _new_decoder("replace").decode(b"".join(pieces))


class StopText:
    """The text of one output, released as far as it cannot become part of a stop string.

    Of several stop strings the one that is complete first ends the output; of those that are
    complete at the same character the longest does. ``min_tokens`` is how many tokens, a
    continuation's included, must have been pushed before the text of a further token can complete
    a stop string.
    """

    __slots__ = (
        "_decoder",
        "_first_characters",
        "_held",
        "_held_max",
        "_include_stop",
        "_min_tokens",
        "_skip_bytes",
        "_stops",
        "_tokens",
        "matched",
    )

    def __init__(
        self, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        # Longest first, so that of two that end alike the longest is found first.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held_max = len(self._stops[0]) - 1 if self._stops else 0
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decoder = _new_decoder("replace")
        self._held = ""
        self._tokens = 0
        self._skip_bytes = 0  # of text to come that an earlier attempt has delivered already
        self.matched: str | None = None

    def resume(self, pieces: Iterable[bytes], delivered_bytes: int) -> str:
        """Takes in the tokens of earlier attempts, of whose text ``delivered_bytes`` were
        delivered; returns what may be sent of the rest now. Only before the first push. When it
        sets ``matched`` the output was complete."""
        assert self._tokens == 0, "a seam comes before new tokens"
        released = "".join(self._push_all(pieces)).encode()
        if delivered_bytes <= len(released):
            return released[delivered_bytes:].decode()
        self._skip_bytes = delivered_bytes - len(released)
        return ""

    def push(self, piece: bytes) -> str:
        """Takes the bytes of the next token (empty for a special one); returns the text that may
        be sent now. After a match nothing more may be pushed."""
        text = self._push(piece)
        return self._unsent(text) if self._skip_bytes else text

    def finish(self) -> str:
        """The text held back, when the output ends without a match."""
        text, self._held = self._held, ""
        return self._unsent(text) if self._skip_bytes else text

    def _push_all(self, pieces: Iterable[bytes]) -> Iterable[str]:
        for piece in pieces:
            yield self._push(piece)
            if self.matched is not None:
                return

    def _push(self, piece: bytes) -> str:
        assert self.matched is None, "nothing follows a stop string"
        self._tokens += 1
        new = self._decoder.decode(piece)
        if not self._stops or not new:
            return new
        text = self._held + new
        if self._tokens > self._min_tokens:
            found = self._first_match(text, len(self._held))
            if found is not None:
                start, self.matched = found
                self._held = ""
                return text[: start + len(self.matched)] if self._include_stop else text[:start]
        held_from = self._held_from(text)
        self._held = text[held_from:]
        return text[:held_from]

    def _first_match(self, text: str, searched: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first, beyond ``searched`` characters."""
        best: tuple[int, str] | None = None
        best_end = len(text) + 1
        for stop in self._stops:
            start = text.find(stop, max(0, searched + 1 - len(stop)), best_end)
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = (start, stop), start + len(stop)
        return best

    def _held_from(self, text: str) -> int:
        """Where the longest end of ``text`` begins that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._held_max), len(text)):
            if text[start] in self._first_characters:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)

    def _unsent(self, text: str) -> str:
        data = text.encode()
        skipped = min(self._skip_bytes, len(data))
        self._skip_bytes -= skipped
        return data[skipped:].decode()
