"""Inputs that kill engines: who is suspected, who is convicted, and what is refused at entry.

A death is an engine or a stream that broke with attempts in it (``DEATHS``). Rules:

1. Every input that was there is a suspect. One death is no more than that: nearly all of them are
   bystanders.
2. Suspects are kept apart: one goes on where no other suspect is. That is waited for ``apart_s``
   after a first death; after a second one for as long as its deadline lets it.
3. A suspect is cleared when it gets ``cleared_tokens`` past the point at which it died, or any
   request with its input ends well.
4. An input that was there at deaths of two different instances, at the last one as the only
   suspect, is poison: it ends with a typed error and is refused for ``quarantine_s``. With a third
   death the same instance counts too, for there may be one only.

A lost connection is taken for a death until the instance reports with the engine that it had.

So at most three instances meet it: two, when it is kept apart in time. An innocent needs two deaths
around it within a few tokens, alone among suspects each time, to be taken for poison.

A suspicion belongs to the input (a hash salted by the tenant, worked out at a death; after one, for
as long as any is remembered, at entry too), so that a client which sends it again finds it still
there. Bounded by ``inputs_max``, the oldest out first. Pure; ``now`` never goes back.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

from scheduler_svc.domain.limits import PoisonLimits
from scheduler_svc.domain.model import FaultKind, InstanceName, Line, Ticket, TicketId
from scheduler_svc.ports import Mask

DEATHS: Final = frozenset((FaultKind.LOST_CONNECTION, FaultKind.ENGINE_DOWN))
# A report that comes sooner than this after a loss may have been sent before it.
PROOF_S: Final = 0.5


@dataclass(slots=True, eq=False)
class Suspicion:
    """Of one input. ``tokens``: how far it had come at its last death; ``shared``: another suspect
    was there when the instance that it is on died, so that it proves nothing."""

    instances: set[InstanceName] = field(default_factory=set)
    deaths: int = 0
    tokens: int = 0
    last_s: float = 0.0
    shared: bool = False
    poison: bool = False


class Quarantine:
    """See the module's text. A ticket's ``suspicion`` is set here alone."""

    def __init__(self, limits: PoisonLimits) -> None:
        self._limits = limits
        self._suspects: OrderedDict[bytes, Suspicion] = OrderedDict()  # by input, oldest first
        self._poison: OrderedDict[bytes, float] = OrderedDict()  # until when, oldest first
        self._loose: dict[TicketId, Ticket] = {}  # suspects in the queue or on an instance
        self._aboard: defaultdict[int, dict[TicketId, Ticket]] = defaultdict(dict)  # by row
        # Suspected of what may have been the loss of a connection only, by instance.
        self._unproven: defaultdict[InstanceName, deque[Suspicion]] = defaultdict(
            lambda: deque(maxlen=limits.inputs_max)
        )
        self.convicted = 0

    def refuses(self, ticket: Ticket, now: float) -> bool:
        """At entry: whether its input is poison. It inherits what its input is suspected of."""
        if not (self._suspects or self._poison):
            return False
        self._forget(now)
        if not (self._suspects or self._poison) or ticket.input_hash is None:
            return False
        key = ticket.input_hash()
        ticket.suspicion = self._suspects.get(key)
        return key in self._poison

    def died(self, ticket: Ticket, kind: FaultKind, now: float, delivered: int = 0) -> bool:
        """An attempt failed; whether its input is convicted. Call before it leaves its row, or
        ``breaks`` before all leave it. ``delivered``: its output tokens, if better known."""
        if kind not in DEATHS or ticket.instance is None:
            return False
        self.breaks(ticket.row)
        # Others with its input may have been at a death while it was here already, as no suspect.
        known = ticket.suspicion is not None
        suspicion = self._suspicion(ticket)
        twin = ticket.instance in suspicion.instances and ticket.dispatched_s <= suspicion.last_s
        if not twin:  # the same input may be there more than once
            suspicion.instances.add(ticket.instance)
            suspicion.deaths += 1
            limits = self._limits
            enough = len(suspicion.instances) >= limits.instances_max
            enough |= suspicion.deaths >= limits.deaths_max
            suspicion.poison = known and enough and not suspicion.shared
            suspicion.tokens = 0
            if kind is FaultKind.LOST_CONNECTION:
                self._unproven[ticket.instance].append(suspicion)
        tokens = ticket.resumed_tokens + ticket.generated_tokens
        suspicion.tokens = max(suspicion.tokens, tokens, delivered)
        suspicion.last_s = now
        self._remember(ticket, suspicion, now)
        return suspicion.poison

    def lived(self, instance: InstanceName, now: float) -> None:
        """It reports, with the engine that it had: a connection was lost, and nobody died."""
        suspicions = self._unproven.get(instance)
        if suspicions is None or now < suspicions[-1].last_s + PROOF_S:
            return
        for suspicion in self._unproven.pop(instance):
            if instance in suspicion.instances:
                suspicion.instances.discard(instance)
                suspicion.deaths -= 1

    def is_gone(self, instance: InstanceName) -> None:
        """It has another engine, or is no part of the fleet: what was lost there was a death."""
        self._unproven.pop(instance, None)

    def breaks(self, row: int) -> None:
        """The instance of a row died: two suspects in one place prove nothing."""
        aboard = self._aboard.get(row, {})
        suspicions = [one.suspicion for one in aboard.values() if one.suspicion is not None]
        if len({id(suspicion) for suspicion in suspicions}) > 1:
            for suspicion in suspicions:
                suspicion.shared = True

    def returns(self, ticket: Ticket) -> None:
        """It is in the queue."""
        if ticket.suspicion is not None:
            self._loose[ticket.id] = ticket

    def boards(self, ticket: Ticket) -> None:
        """It was dispatched to its row."""
        if ticket.suspicion is not None:
            self._loose[ticket.id] = ticket
            self._aboard[ticket.row][ticket.id] = ticket
            ticket.suspicion.shared = False

    def leaves(self, ticket: Ticket) -> None:
        """It is off its row, for whatever reason."""
        if ticket.suspicion is None:
            return
        self._loose.pop(ticket.id, None)
        aboard = self._aboard.get(ticket.row)
        if aboard is not None and aboard.pop(ticket.id, None) is not None and not aboard:
            del self._aboard[ticket.row]

    def progressed(self, ticket: Ticket) -> None:
        """It has more tokens than before: maybe enough to be cleared."""
        suspicion = ticket.suspicion
        if suspicion is None:
            return
        tokens = ticket.resumed_tokens + ticket.generated_tokens
        if tokens >= suspicion.tokens + self._limits.cleared_tokens:
            self.clear(ticket)

    def clear(self, ticket: Ticket) -> None:
        """It did what its input died of, and lives: so much for all that have the same input."""
        suspicion = ticket.suspicion
        if self._suspects and ticket.input_hash is not None:
            suspicion = self._suspects.pop(ticket.input_hash(), suspicion)
        if suspicion is not None:
            suspicion.deaths = 0
            suspicion.instances.clear()
        self.leaves(ticket)
        ticket.suspicion = None

    def may_go(self, ticket: Ticket, places: int, now: float) -> bool:
        """Whether a suspect may go on: as many as there are ``places`` (instances that could take
        it) are on their way or there, so that each has one; the others of a first death wait
        ``apart_s`` for that at most."""
        suspicion = ticket.suspicion
        if suspicion is None or self.loose(ticket.line) < max(1, places):
            return True
        return suspicion.deaths < 2 and now >= suspicion.last_s + self._limits.apart_s

    def go_at_s(self, ticket: Ticket) -> float | None:
        """When the ticket goes on in any case."""
        suspicion = ticket.suspicion
        if suspicion is None or suspicion.deaths >= 2:
            return None
        return suspicion.last_s + self._limits.apart_s

    def loose(self, line: Line) -> int:
        """Suspects of a line in the queue or on an instance."""
        return sum(ticket.line == line for ticket in self._loose.values())

    def apart(self, ticket: Ticket, usable: Mask) -> Mask:
        """The usable rows where no other suspect is. After a first death all of them, if there are
        no such rows: it has waited for one already."""
        alone = usable.copy()
        alone[[row for row in self._aboard if row < len(alone)]] = False
        suspicion = ticket.suspicion
        if suspicion is not None and suspicion.deaths < 2 and not alone.any():
            return usable
        return alone

    def counts(self) -> tuple[int, int]:
        """Inputs that are suspected, and inputs that are refused."""
        return len(self._suspects), len(self._poison)

    def check(self) -> None:
        """Every map is within its bound."""
        assert len(self._suspects) <= self._limits.inputs_max
        assert len(self._poison) <= self._limits.inputs_max
        assert all(self._aboard.values())
        assert all(ticket.suspicion is not None for ticket in self._loose.values())

    def _suspicion(self, ticket: Ticket) -> Suspicion:
        """What its input is suspected of so far; a new one for an input that was not."""
        if ticket.suspicion is not None:
            return ticket.suspicion
        known = None if ticket.input_hash is None else self._suspects.get(ticket.input_hash())
        return Suspicion() if known is None else known

    def _remember(self, ticket: Ticket, suspicion: Suspicion, now: float) -> None:
        self.leaves(ticket)
        ticket.suspicion = suspicion
        if ticket.input_hash is None:
            return
        key = ticket.input_hash()
        self._suspects.pop(key, None)
        if suspicion.poison:
            self.convicted += key not in self._poison
            self._poison[key] = now + self._limits.quarantine_s
            self._poison.move_to_end(key)
            if len(self._poison) > self._limits.inputs_max:
                self._poison.popitem(last=False)
        else:
            self._suspects[key] = suspicion
            if len(self._suspects) > self._limits.inputs_max:
                self._suspects.popitem(last=False)

    def _forget(self, now: float) -> None:
        while self._poison and next(iter(self._poison.values())) <= now:
            self._poison.popitem(last=False)
        oldest = now - self._limits.suspicion_s
        while self._suspects and next(iter(self._suspects.values())).last_s <= oldest:
            self._suspects.popitem(last=False)
