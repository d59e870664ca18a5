"""Aliases: one name for several models (versions of one), by weight, with a way back.

Pure values and functions. Which version a request gets is decided by a number alone: a counter
gives every target its exact share in any ``total weight`` requests in a row, well mixed (of 9 to 1
every tenth goes to the second); a hash of a session gives the session one version while the weights
stay. Changes return a new alias and keep what was there, ``HISTORY_MAX`` changes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

from sluice.errors import failed_precondition, invalid

TARGETS_MAX: Final = 16
WEIGHT_MAX: Final = 10_000
HISTORY_MAX: Final = 32
_GOLDEN: Final = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Target:
    """A model and its weight relative to the others, 1 to ``WEIGHT_MAX``."""

    model: str
    weight: int


Targets = tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """``version`` grows by one with every change, a rollback too. ``history``: what it pointed at
    before, newest last."""

    name: str
    targets: Targets
    version: int = 1
    history: tuple[Targets, ...] = ()


def create(name: str, targets: Sequence[Target]) -> Alias:
    """A new alias. INVALID_ARGUMENT names the field that is wrong."""
    if not name:
        raise invalid("alias", "must not be empty")
    return Alias(name, _checked(name, targets))


def set_targets(alias: Alias, targets: Sequence[Target]) -> Alias:
    """Points it elsewhere; the same targets again change nothing."""
    checked = _checked(alias.name, targets)
    if checked == alias.targets:
        return alias
    history = (*alias.history, alias.targets)[-HISTORY_MAX:]
    return Alias(alias.name, checked, alias.version + 1, history)


def rollback(alias: Alias) -> Alias:
    """Takes the last change back; again, the one before. FAILED_PRECONDITION: there is none."""
    if not alias.history:
        raise failed_precondition("NO_EARLIER_TARGETS", f"alias {alias.name} was never changed")
    return Alias(alias.name, alias.history[-1], alias.version + 1, alias.history[:-1])


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


def _checked(name: str, targets: Sequence[Target]) -> Targets:
    if not 1 <= len(targets) <= TARGETS_MAX:
        raise invalid("targets", f"must be 1 to {TARGETS_MAX}")
    models = [target.model for target in targets]
    if len(set(models)) < len(models):
        raise invalid("targets", "name a model twice")
    for index, target in enumerate(targets):
        if not target.model or target.model == name:
            raise invalid(f"targets[{index}].model", "must be the name of another model")
        if not 1 <= target.weight <= WEIGHT_MAX:
            raise invalid(f"targets[{index}].weight", f"must be 1 to {WEIGHT_MAX}")
    return tuple(targets)
