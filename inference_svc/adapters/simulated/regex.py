"""A short text that matches a regular expression in full.

Pure. Understands literals, escapes, classes, groups, alternatives and quantifiers: the regular
part that structured-output engines share. Look-around, back references and word borders are
refused. Each quantifier is met with its least count, so that texts stay short.
"""

from __future__ import annotations

from inference_svc.adapters.simulated.forms import (
    DEPTH_MAX,
    FormError,
    Picker,
    bounded,
    repeated,
)

PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
DIGITS = list("0123456789")
WORD = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *DIGITS, "_"]
SPACE = [" ", "\t", "\n"]
CLASSES = {
    "d": DIGITS,
    "w": WORD,
    "s": SPACE,
    "D": [char for char in PRINTABLE if char not in DIGITS],
    "W": [char for char in PRINTABLE if char not in WORD],
    "S": [char for char in PRINTABLE if char != " "],
}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
REPEATS_MAX = 10_000
CLASS_CHARACTERS_MAX = 256  # of a range; a larger one is used from its beginning


def regex_text(expression: str, picker: Picker) -> str:
    """A text that the whole expression matches; FormError when it cannot be made."""
    parser = _Parser(expression, picker)
    text = parser.alternatives(0)
    if not parser.over:
        raise FormError("has a closing bracket too many")
    return bounded(text)


class _Parser:
    """Reads an expression once and makes the text on the way: each part returns its text."""

    def __init__(self, expression: str, picker: Picker) -> None:
        self._text = expression
        self._at = 0
        self._picker = picker

    @property
    def over(self) -> bool:
        return self._at >= len(self._text)

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise FormError("ends in the middle of a part")
        self._at += 1
        return char

    def _take(self, token: str) -> bool:
        if self._text.startswith(token, self._at):
            self._at += len(token)
            return True
        return False

    def alternatives(self, depth: int) -> str:
        if depth > DEPTH_MAX:
            raise FormError(f"is nested deeper than {DEPTH_MAX}")
        branches = [self._branch(depth)]
        while self._take("|"):
            branches.append(self._branch(depth))
        return branches[self._picker.pick(len(branches))]

    def _branch(self, depth: int) -> str:
        parts: list[str] = []
        while not self.over and self._peek() not in "|)":
            if self._peek() in "^$":
                self._anchor(depth)
                continue
            text = self._part(depth)
            parts.append(repeated(text, self._least_count()))
        return bounded("".join(parts))

    def _anchor(self, depth: int) -> None:
        """The whole text is matched anyway: an anchor is allowed where it says just that."""
        char, at = self._next(), self._at - 1
        if depth or (char == "^" and at > 0) or (char == "$" and not self.over):
            raise FormError("has an anchor inside, which is not supported")

    def _part(self, depth: int) -> str:
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            members = self._class()
            return members[self._picker.pick(len(members))]
        if char == ".":
            return PRINTABLE[self._picker.pick(len(PRINTABLE))]
        if char == "\\":
            members = self._escape()
            return members[self._picker.pick(len(members))]
        if char in "*+?{":
            raise FormError("has a quantifier with nothing before it")
        return char

    def _group(self, depth: int) -> str:
        if self._take("?P<") or (self._text.startswith("?<", self._at) and self._name_follows()):
            while self._next() != ">":
                pass
        elif self._peek() == "?" and not self._take("?:"):
            raise FormError("has a group of a kind that is not supported")
        text = self.alternatives(depth + 1)
        if not self._take(")"):
            raise FormError("has a group that is not closed")
        return text

    def _name_follows(self) -> bool:
        if self._text[self._at + 2 : self._at + 3] in ("=", "!", ""):
            return False
        self._at += 2
        return True

    def _least_count(self) -> int:
        least = 1
        if self._take("*") or self._take("?"):
            least = 0
        elif self._take("+"):
            least = 1
        elif self._peek() == "{":
            least = self._counted()
        else:
            return 1
        self._take("?")  # lazy: the same text; possessive is refused, it may match nothing
        if self._peek() and self._peek() in "*+?{":
            raise FormError("has a quantifier on a quantifier")
        return least

    def _counted(self) -> int:
        end = self._text.find("}", self._at)
        low, comma, high = (
            self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        )
        least = int(low) if low.isascii() and low.isdigit() and len(low) < 6 else -1
        most = (
            least if not comma else int(high) if high.isdigit() and len(high) < 6 else REPEATS_MAX
        )
        if end < 0 or least < 0 or (high and not high.isdigit()):
            raise FormError("has a repetition count that is not a number")
        if not least <= most <= REPEATS_MAX:
            raise FormError(f"has a repetition count out of order or above {REPEATS_MAX}")
        self._at = end + 1
        return least

    def _escape(self) -> list[str]:
        char = self._next()
        if char in CLASSES:
            return CLASSES[char]
        if char in CONTROLS:
            return [CONTROLS[char]]
        if char in "xu":
            digits = self._text[self._at : self._at + (2 if char == "x" else 4)]
            self._at += len(digits)
            try:
                code = int(digits, 16)
            except ValueError:
                raise FormError("has an escape that is not a character") from None
            if 0xD800 <= code < 0xE000:
                raise FormError("has an escape that is not a character")
            return [chr(code)]
        if char.isalnum():
            raise FormError("has an escape that is not supported")
        return [char]

    def _class(self) -> list[str]:
        negated = self._take("^")
        members: list[str] = []
        first = True
        while first or self._peek() != "]":
            first = False
            members += self._class_part()
        self._next()
        if negated:
            unwanted = set(members)
            members = [char for char in PRINTABLE if char not in unwanted]
        if not members:
            raise FormError("has a class without a character")
        return members

    def _class_part(self) -> list[str]:
        char = self._next()
        low = self._escape() if char == "\\" else [char]
        ranged = self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", "")
        if not ranged:
            return low
        self._next()
        char = self._next()
        high = self._escape() if char == "\\" else [char]
        if len(low) != 1 or len(high) != 1 or low > high:
            raise FormError("has a range out of order")
        first, last = ord(low[0]), min(ord(high[0]), ord(low[0]) + CLASS_CHARACTERS_MAX)
        # Surrogates are no characters and cannot be written.
        return [chr(code) for code in range(first, last + 1) if not 0xD800 <= code < 0xE000]
