"""What the makers of constrained texts share: choices, bounds and their error. Pure."""

from __future__ import annotations

from inference_svc.adapters.simulated.model import FOLD, STATE_MASK

FORM_CHARACTERS_MAX = 16_384
DEPTH_MAX = 48


class FormError(ValueError):
    """A constraint that does not compile or is not understood; the text is safe for clients."""


class Picker:
    """Makes choices from a state: the same state makes the same choices."""

    __slots__ = ("_state",)

    def __init__(self, state: int) -> None:
        self._state = state

    def pick(self, count: int) -> int:
        """A number from 0 to ``count`` - 1."""
        self._state = (self._state * FOLD + 1) & STATE_MASK
        return (self._state >> 33) % count


def bounded(text: str) -> str:
    """The text, unless it is longer than a form may be."""
    if len(text) > FORM_CHARACTERS_MAX:
        raise FormError(f"asks for a text of more than {FORM_CHARACTERS_MAX} characters")
    return text


def repeated(text: str, count: int) -> str:
    """The text so many times; refused before it is made when that is too long."""
    if len(text) * count > FORM_CHARACTERS_MAX:
        raise FormError(f"asks for a text of more than {FORM_CHARACTERS_MAX} characters")
    return text * count
