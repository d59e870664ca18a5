"""One scan over the tickets of a line inside a turn: who may take which row.

Owns the masks of the scan and the tickets that were set aside. A ticket that fits nowhere does not
stop the ones behind it, within two rules that keep order meaningful:

- a lower class never takes an instance that a ticket set aside from a higher class could use;
- inside a class a ticket may be passed over ``passed_over_max`` times; from then on the instances
  it could use take nothing else until it fits (a reservation, as in backfilling: Lifka 1995).
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import Line, PriorityClass, Ticket
from scheduler_svc.ports import Mask, Need, PlacementPolicy


class Scan:
    """Lives for one line and one turn. ``aside`` must be restored when it is over."""

    __slots__ = ("_aside", "_fleet", "_limits", "_line", "_open", "_placement", "_usable", "tried")

    def __init__(
        self, line: Line, fleet: Fleet, placement: PlacementPolicy, limits: SchedulerLimits
    ) -> None:
        self._line = line
        self._fleet = fleet
        self._placement = placement
        self._limits = limits
        self._usable = fleet.usable(line)
        self._open: Mask = self._usable & fleet.with_sequence(line[1])
        self._aside: list[tuple[Ticket, Mask]] = []
        self.tried: Counter[PriorityClass] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether any row can start another sequence."""
        return bool(self._open.any())

    @property
    def aside(self) -> list[Ticket]:
        return [ticket for ticket, _ in self._aside]

    def find(self, ticket: Ticket) -> int | None:
        """The row for the ticket, or ``None`` when it fits nowhere now."""
        need = need_of(ticket)
        eligible = self._placement.filter(self._fleet, need, self._allowed(ticket))
        room = self._fleet.with_memory(ticket.kind, need.prompt_tokens, need.kv_tokens)
        room &= self._open
        room &= eligible
        for earlier, could_use in self._aside:
            if (
                earlier.priority_class < ticket.priority_class
                or earlier.passed_over >= self._limits.passed_over_max
            ):
                room &= ~could_use
        if not room.any():
            return None
        return self._placement.pick(self._placement.score(self._fleet, need), room)

    def set_aside(self, ticket: Ticket) -> None:
        """It fits nowhere: later tickets are tried."""
        eligible = self._placement.filter(self._fleet, need_of(ticket), self._allowed(ticket))
        self._aside.append((ticket, eligible))
        self.tried[ticket.priority_class] += 1
        if not (self._open & ~eligible).any():  # nothing is left for those it goes before
            reserved = ticket.passed_over >= self._limits.passed_over_max
            for cls in PriorityClass:
                if reserved or cls > ticket.priority_class:
                    self.tried[cls] = self._limits.bypass_max

    def took(self, row: int) -> None:
        """A ticket was dispatched to the row, past those set aside that could have used it."""
        self._open[row] = self._fleet.has_sequence(row, self._line[1])
        for ticket, could_use in self._aside:
            ticket.passed_over += bool(could_use[row])

    def _allowed(self, ticket: Ticket) -> Mask:
        """Usable rows without those that failed the ticket; when those are all there are, they may
        try again: attempts are bounded, and waiting for another instance may be for ever."""
        if not ticket.excluded:
            return self._usable
        allowed = self._usable.copy()
        for name in ticket.excluded:
            instance = self._fleet.get(name)
            if instance is not None:
                allowed[instance.row] = False
        return allowed if allowed.any() else self._usable


def need_of(ticket: Ticket) -> Need:
    return Need(
        model=ticket.model,
        tenant=ticket.tenant,
        prompt_tokens=ticket.prompt_tokens,
        output_tokens=ticket.output_tokens,
        kv_tokens=ticket.kv_tokens,
        context_tokens=ticket.prompt_tokens + (1 if ticket.output_tokens else 0),
    )
