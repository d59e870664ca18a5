"""One scan over the tickets of a line inside a turn: who may take which row.

Owns the masks of the scan, the tickets that were set aside, and the order in which what was
dispatched leaves (``side_by_side``). A ticket that fits nowhere does not
stop the ones behind it, within two rules that keep order meaningful:

- a lower class never takes an instance that a ticket set aside from a higher class could use;
- inside a class a ticket may be passed over ``passed_over_max`` times; from then on the instances
  it could use take nothing else until it fits (a reservation, as in backfilling: Lifka 1995).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np

from scheduler_svc.domain.decision import Closed, Placement, best_of, removed_by
from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import Dispatch, InstanceName, Line, PriorityClass, Ticket
from scheduler_svc.domain.prefix_index import PrefixIndex
from scheduler_svc.domain.quarantine import Quarantine
from scheduler_svc.ports import Column, Mask, Need, PlacementPolicy

# Depths in blocks at which prefixes are compared when dispatches are put side by side.
SIDE_BY_SIDE_BLOCKS: Final = (2, 8, 32, 128)


class Scan:
    """Lives for one line and one turn. ``aside`` must be restored when it is over."""

    __slots__ = (
        *("_aside", "_fleet", "_found", "_holds", "_limits", "_line", "_now", "_open"),
        *("_placement", "_prefixes", "_quarantine", "_usable"),
        *("cached_tokens", "holds_until_s", "tried"),
    )

    def __init__(
        self,
        line: Line,
        fleet: Fleet,
        placement: PlacementPolicy,
        limits: SchedulerLimits,
        prefixes: PrefixIndex | None = None,
        now: float = 0.0,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._line = line
        self._fleet = fleet
        self._placement = placement
        self._limits = limits
        self._prefixes = prefixes if placement.reads_prefixes else None
        self._now = now
        self._quarantine = quarantine
        self._holds = 0
        self.holds_until_s = inf  # when the first of the tickets held now is held no longer
        self.cached_tokens = 0  # of the ticket found last, expected in its row's cache
        self._usable = fleet.usable(line)
        self._open: Mask = self._usable & fleet.with_sequence(line[1])
        self._aside: list[tuple[Ticket, Mask]] = []
        self._found: tuple[Need, Mask, Mask, Mask, Column] | None = None
        self.tried: Counter[PriorityClass] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether any row can start another sequence."""
        return bool(np.count_nonzero(self._open))  # any() takes ten times as long

    @property
    def aside(self) -> list[Ticket]:
        return [ticket for ticket, _ in self._aside]

    def find(self, ticket: Ticket) -> int | None:
        """The row for the ticket, or ``None`` when it fits nowhere now or is held."""
        if self._is_held(ticket):
            return None
        need = need_of(ticket, self._cached(ticket))
        allowed = self._allowed(ticket)
        eligible = self._placement.filter(self._fleet, need, allowed)
        to_read: int | Column = need.prompt_tokens
        if need.cached_tokens is not None:
            to_read = need.prompt_tokens - need.cached_tokens
        room = self._fleet.with_memory(ticket.kind, to_read, need.kv_tokens)
        room &= self._open
        room &= eligible
        for earlier, could_use in self._aside:
            if (
                earlier.priority_class < ticket.priority_class
                or earlier.held_row >= 0
                or earlier.passed_over >= self._limits.passed_over_max
            ):
                room &= ~could_use
        if not np.count_nonzero(room):
            return None
        probed = [row for row in self._fleet.probed() if room[row]]
        if probed:  # one that is tried again has to be met by somebody
            room = np.zeros_like(room)
            room[probed] = True
        scores = self._placement.score(self._fleet, need)
        if need.cached_tokens is not None and self._hold(ticket, need, scores, eligible, room):
            return None
        row = self._placement.pick(scores, room)
        self.cached_tokens = 0 if need.cached_tokens is None else int(need.cached_tokens[row])
        self._found = (need, allowed, eligible, room, scores)
        return row

    def placement(self, ticket: Ticket, row: int, closed: Closed) -> Placement:
        """The decision that ``find`` has just made, before it is carried out: in full where the
        ticket's trail wants it."""
        assert self._found is not None and ticket.trail is not None
        need, allowed, eligible, room, scores = self._found
        made = Placement(
            self._fleet.at(row).name,
            self._now,
            float(scores[row]),
            int(np.count_nonzero(room)),
            base_tokens=ticket.resumed_tokens,
        )
        if ticket.trail.wants_all:
            to_read: int | Column = need.prompt_tokens
            if need.cached_tokens is not None:
                to_read = need.prompt_tokens - need.cached_tokens
            sequence = eligible & self._open
            memory = sequence & self._fleet.with_memory(ticket.kind, to_read, need.kv_tokens)
            same = self._usable
            if ticket.resumed_tokens and ticket.fingerprint is not None:
                same = same & self._fleet.with_fingerprint(ticket.fingerprint)
            steps = (
                ("usable", self._usable),
                ("fingerprint", same),
                ("excluded", allowed),
                ("policy", eligible),
                ("no_room", sequence),
                ("no_memory", memory),
                ("kept_for_others", room),
            )
            made.removed = removed_by(closed.counts(self._line, self._now), steps)
            made.best = best_of(self._fleet, self._placement, need, scores, room)
        return made

    def set_aside(self, ticket: Ticket) -> None:
        """It fits nowhere, or is held for one row: later tickets are tried."""
        if ticket.held_row >= 0:
            only = np.zeros_like(self._usable)
            only[ticket.held_row] = True
            self._aside.append((ticket, only))
            self._holds += 1
            return
        eligible = self._placement.filter(self._fleet, need_of(ticket), self._allowed(ticket))
        self._aside.append((ticket, eligible))
        self.tried[ticket.priority_class] += 1
        if not np.count_nonzero(self._open & ~eligible):  # nothing is left for those it goes before
            reserved = ticket.passed_over >= self._limits.passed_over_max
            for cls in PriorityClass:
                if reserved or cls > ticket.priority_class:
                    self.tried[cls] = self._limits.bypass_max

    def took(self, row: int) -> None:
        """A ticket was dispatched to the row, past those set aside that could have used it."""
        self._open[row] = self._fleet.has_sequence(row, self._line[1])
        for ticket, could_use in self._aside:
            ticket.passed_over += bool(could_use[row])

    def _hold(self, ticket: Ticket, need: Need, scores: Column, eligible: Mask, room: Mask) -> bool:
        """Whether the ticket had better wait for an instance that has its prefix and no room now:
        when that costs less, waiting included, than the best with room. It waits as long as the
        difference, ``hold_max_s`` at most, once (delay scheduling: Zaharia 2010)."""
        until_s = ticket.held_until_s
        if self._holds >= self._limits.holds_max or (until_s is not None and until_s <= self._now):
            return False
        assert need.cached_tokens is not None
        costs = np.where(eligible & (need.cached_tokens > 0), scores, np.inf)
        row = int(costs.argmin())
        gain_s = float(np.min(scores, where=room, initial=np.inf) - costs[row])
        if room[row] or not gain_s > 0:
            return False
        ticket.held_row = row
        ticket.held_cached_tokens = int(need.cached_tokens[row])
        if until_s is None:
            until_s = self._now + min(gain_s, self._limits.hold_max_s)
            ticket.held_until_s = until_s
        self.holds_until_s = min(self.holds_until_s, until_s)
        return True

    def _is_held(self, ticket: Ticket) -> bool:
        """Whether it still waits for its row. O(1), since it is asked in every turn."""
        row = ticket.held_row
        if row < 0:
            return False
        assert ticket.held_until_s is not None
        to_read = ticket.read_tokens - ticket.held_cached_tokens
        waits = (
            self._now < ticket.held_until_s
            and self._usable[row]
            and self._holds < self._limits.holds_max
            and not (
                self._open[row]
                and self._fleet.has_memory(row, ticket.kind, to_read, ticket.kv_tokens)
            )
        )
        if waits:
            self.holds_until_s = min(self.holds_until_s, ticket.held_until_s)
        else:
            ticket.held_row = -1
        return bool(waits)

    def _cached(self, ticket: Ticket) -> Column | None:
        """Tokens of its prompt that each row should have in its cache, not 0 everywhere; at least
        one token less than the prompt, since an engine reads the last one always."""
        prefix = ticket.prefix
        if self._prefixes is None or prefix is None or ticket.prompt_tokens < 2:
            return None
        matched = self._prefixes.match(prefix.hashes, len(self._usable), self._now)
        if matched is None:
            return None
        tokens: Column = matched.astype(np.float64)
        tokens *= ticket.prompt_tokens / max(1.0, prefix.blocks)
        return np.minimum(tokens, ticket.prompt_tokens - 1, out=tokens)

    def _allowed(self, ticket: Ticket) -> Mask:
        usable = self._usable
        if ticket.suspicion is not None and self._quarantine is not None:
            usable = self._quarantine.apart(ticket, usable)
        return allowed_rows(ticket, self._fleet, usable)


def allowed_rows(ticket: Ticket, fleet: Fleet, usable: Mask) -> Mask:
    """Usable rows that may run the ticket, room aside: what was begun goes on only with the model
    that began it. Without those that failed the ticket; when those are all there are, they may try
    again: attempts are bounded, and waiting for another instance may be for ever."""
    if ticket.resumed_tokens and ticket.fingerprint is not None:
        usable = usable & fleet.with_fingerprint(ticket.fingerprint)
    if not ticket.excluded:
        return usable
    allowed = usable.copy()
    for name in ticket.excluded:
        instance = fleet.get(name)
        if instance is not None:
            allowed[instance.row] = False
    return allowed if np.count_nonzero(allowed) else usable


def side_by_side(dispatches: Sequence[Dispatch]) -> list[Dispatch]:
    """The same dispatches, those of one instance and class with a common prefix next to each other,
    so that they meet in the engine while the prefix is there. Places are only exchanged inside an
    instance and class; who comes first in a group keeps the group's place. O(n)."""
    places: defaultdict[tuple[InstanceName, PriorityClass], list[int]] = defaultdict(list)
    for place, dispatch in enumerate(dispatches):
        if dispatch.ticket.prefix is not None:
            places[dispatch.instance, dispatch.ticket.priority_class].append(place)
    ordered = list(dispatches)
    for group in places.values():
        if len(group) < 3:  # two are next to each other
            continue
        first: dict[int, int] = {}
        keys = {place: _prefix_key(dispatches[place].ticket, place, first) for place in group}
        for place, source in zip(group, sorted(group, key=keys.__getitem__), strict=True):
            ordered[place] = dispatches[source]
    return ordered


def _prefix_key(ticket: Ticket, place: int, first: dict[int, int]) -> list[int]:
    """At each depth the first place at which the ticket's prefix was seen; then its own."""
    assert ticket.prefix is not None
    hashes = ticket.prefix.hashes
    depths = [depth for depth in SIDE_BY_SIDE_BLOCKS if depth <= len(hashes)]
    return [*(first.setdefault(int(hashes[depth - 1]), place) for depth in depths), place]


def need_of(ticket: Ticket, cached_tokens: Column | None = None) -> Need:
    return Need(
        model=ticket.model,
        tenant=ticket.tenant,
        prompt_tokens=ticket.read_tokens,
        output_tokens=ticket.output_left,
        kv_tokens=ticket.kv_tokens,
        context_tokens=ticket.read_tokens + (1 if ticket.output_tokens else 0),
        cached_tokens=cached_tokens,
    )
