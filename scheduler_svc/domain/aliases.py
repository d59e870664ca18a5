"""Aliases: one name for several models (versions of one), by weight.

Pure values and functions. Which version a request gets is decided by a number alone: a counter
gives every target its exact share in any ``total weight`` requests in a row, well mixed (of 9 to 1
every tenth goes to the second); a hash of a session gives the session one version while the weights
stay. What may be set, and the way back, are the state service's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

_GOLDEN: Final = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Target:
    """A model and its weight relative to the others, 1 or more."""

    model: str
    weight: int


Targets = tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """``version`` grows by one with every change, a rollback too; 0: the configuration's."""

    name: str
    targets: Targets
    version: int = 1


def pick(alias: Alias, number: int) -> str:
    """The model for a request. ``number``: a counter, or a hash for what is to stay together.

    Walks the circle of weights with a step near the golden section of it that shares no factor with
    it: every place once in a round, and neighbours far apart (Weyl 1916). O(targets)."""
    total = sum(target.weight for target in alias.targets)
    step = max(1, round(total * _GOLDEN))
    while gcd(step, total) != 1:
        step += 1
    place = number * step % total
    for target in alias.targets:
        place -= target.weight
        if place < 0:
            return target.model
    raise AssertionError("a place beyond the circle")
