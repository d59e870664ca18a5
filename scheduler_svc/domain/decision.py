"""Why a ticket waited and landed where it did: what the scheduler knew when it decided.

A :class:`Trail` goes with each ticket and takes note of its placements. The first placement of most
tickets is noted in brief (about 2 µs: the instance, its score, how many there were to choose from);
in full, with the best candidates and what removed the others, where the trail will be kept for
certain: sampled tickets, and every placement after the first. Holds no text of any request.
Bounded: ``PLACEMENTS_KEPT`` placements with ``CANDIDATES_KEPT`` candidates each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from scheduler_svc.domain.breaker import BreakerState
from scheduler_svc.domain.fleet import Fleet, Instance
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import InstanceName, Line, WorkKind
from scheduler_svc.ports import Column, Mask, Need, PlacementPolicy

CANDIDATES_KEPT: Final = 8
PLACEMENTS_KEPT: Final = 8
"""The first, and the last ones."""

LOOK_S: Final = 0.1
"""How old the counts of instances that are closed may be: counting walks over the fleet."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that could have run the ticket; ``score`` in seconds, less is better, and its
    ``parts`` as the policy names them."""

    instance: InstanceName
    score: float
    parts: Mapping[str, float]


@dataclass(slots=True)
class Placement:
    """One decision. ``instance``: empty when the ticket was refused while it waited.
    ``candidates``: how many instances had room. ``best``: some of them, best first; empty in brief.
    ``removed``: instances by what removed them. ``base_tokens``: output tokens that came before.
    ``end``, ``cause`` and ``tokens`` say how it went on."""

    instance: str
    at_s: float
    score: float = 0.0
    candidates: int = 0
    best: tuple[Candidate, ...] = ()
    removed: Mapping[str, int] | None = None
    base_tokens: int = 0
    tokens: int = 0
    end: str = ""
    cause: str = ""


class Trail:
    """The placements of one ticket. ``ahead``: about how many went before it when it was queued.
    ``full``: its first placement is noted in full, too."""

    __slots__ = ("ahead", "full", "placements")

    def __init__(self, full: bool, ahead: int = 0) -> None:
        self.full = full
        self.ahead = ahead
        self.placements: list[Placement] = []

    @property
    def wants_all(self) -> bool:
        """Whether the next placement is to be noted in full."""
        return self.full or bool(self.placements)

    def placed(self, placement: Placement) -> None:
        """It was placed, or its wait ended."""
        if self.placements:
            last = self.placements[-1]
            last.tokens = max(0, placement.base_tokens - last.base_tokens)
            if len(self.placements) == PLACEMENTS_KEPT:
                del self.placements[1]
        self.placements.append(placement)

    def ended(self, end: str, cause: str = "") -> None:
        """The last placement is over; what is told first holds."""
        if self.placements and not self.placements[-1].end:
            self.placements[-1].end, self.placements[-1].cause = end, cause

    def close(self, tokens: int, end: str = "ended") -> None:
        """The ticket is over with so many output tokens in all; ``end``: of the last placement,
        where nothing was told of it: "ended" by itself or "stopped"."""
        if self.placements:
            last = self.placements[-1]
            last.tokens = max(0, tokens - last.base_tokens)
        self.ended(end)


class Closed:
    """Counts the instances that a line cannot use, by the reason; looks at most every LOOK_S."""

    def __init__(self, fleet: Fleet, limits: SchedulerLimits) -> None:
        self._fleet = fleet
        self._limits = limits
        self._seen: dict[Line, tuple[float, Mapping[str, int]]] = {}

    def counts(self, line: Line, now: float) -> Mapping[str, int]:
        """Reason -> instances. O(instances) once in LOOK_S and line."""
        seen = self._seen.get(line)
        if seen is None or now - seen[0] >= LOOK_S:
            if seen is None and len(self._seen) >= self._limits.models_max:
                self._seen.clear()
            stale_open = self._limits.stale_open
            counts = Counter(closed_by(one, line, stale_open) for one in self._fleet.instances())
            del counts[""]
            seen = (now, MappingProxyType(dict(counts)))
            self._seen[line] = seen
        return seen[1]


def closed_by(instance: Instance, line: Line, stale_open: bool) -> str:
    """Why nothing of the line starts on an instance, room aside; empty: it may."""
    model, kind = line
    report = instance.report
    serves = report.generates if kind is WorkKind.GENERATE else report.embeds
    if report.model != model or not serves:
        return "model"
    if instance.removed or not report.serving or not instance.reachable:
        return "health"
    if instance.gpu_fault:
        return "gpu_fault"
    if instance.drains:
        return "drain"
    if instance.barred or instance.breaker.state is BreakerState.OPEN:
        return "breaker"
    return "stale" if instance.stale and not stale_open else ""


def removed_by(closed: Mapping[str, int], steps: Iterable[tuple[str, Mask]]) -> dict[str, int]:
    """What each step of a decision removed, beside the closed instances. ``steps``: a name and the
    rows that were left after it, the first without a name: what was usable."""
    counts = dict(closed)
    left = -1
    for name, mask in steps:
        rows = int(np.count_nonzero(mask))
        if left > rows:
            counts[name] = left - rows
        left = rows
    return counts


def best_of(
    fleet: Fleet, policy: PlacementPolicy, need: Need, scores: Column, room: Mask
) -> tuple[Candidate, ...]:
    """The best rows with room, at most CANDIDATES_KEPT."""
    rows = np.flatnonzero(room)
    rows = rows[np.argsort(scores[rows], kind="stable")][:CANDIDATES_KEPT]
    return tuple(
        Candidate(fleet.at(int(row)).name, float(scores[row]), policy.parts(fleet, need, int(row)))
        for row in rows
    )
