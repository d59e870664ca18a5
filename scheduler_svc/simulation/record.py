"""What a simulation writes down: per class and tenant, per second, and a hash of every event.

Memory is 16 bytes a finished request and a few hundred bytes a second of simulated time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from struct import Struct

from scheduler_svc.domain.model import Outcome, PriorityClass
from scheduler_svc.simulation.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class Slo:
    """What a class promises: the first token within ``ttft_s``, and a time per output token of at
    most ``tpot_s``, and at most ``tpot_factor`` times that of a lone request on the instance that
    served it. ``inf``: no such promise; a request that finished met it."""

    ttft_s: float = inf
    tpot_factor: float = inf
    tpot_s: float = inf


SLOS: Mapping[PriorityClass, Slo] = {
    PriorityClass.CRITICAL: Slo(1.0, 2.0),
    PriorityClass.INTERACTIVE: Slo(2.0, 2.0),
    PriorityClass.STANDARD: Slo(10.0, 4.0),
    PriorityClass.BATCH: Slo(),
}


@dataclass(slots=True)
class Group:
    """Requests of one tenant in one class. Tokens are output tokens."""

    offered: int = 0
    offered_tokens: int = 0
    served_tokens: int = 0
    prompt_tokens: int = 0  # of requests that finished
    met: int = 0
    goodput_tokens: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class Second:
    """One second of simulated time: output tokens by the second in which the request arrived
    (``offered``) or ended; counts of what waits and runs at its end."""

    offered_tokens: int = 0
    served_tokens: int = 0
    goodput_tokens: int = 0
    refused: int = 0
    waiting: tuple[int, ...] = ()
    running: int = 0


class Recorder:
    """Takes events in order of time."""

    _EVENT = Struct("<cdqq")

    def __init__(self, slos: Mapping[PriorityClass, Slo]) -> None:
        self._slos = slos
        self._hash = blake2b(digest_size=16)
        self.groups: dict[tuple[PriorityClass, str], Group] = {}
        self.seconds: list[Second] = []
        self.events = 0

    @property
    def event_hash(self) -> str:
        """Of all events so far: equal hashes are equal histories."""
        return self._hash.hexdigest()

    def event(self, code: bytes, now: float, ticket: int, instance: int) -> None:
        self.events += 1
        self._hash.update(self._EVENT.pack(code, now, ticket, instance))

    def offered(self, arrival: Arrival) -> None:
        group = self.group(arrival)
        group.offered += 1
        group.offered_tokens += arrival.output_tokens
        self.second(arrival.at_s).offered_tokens += arrival.output_tokens

    def refused(self, arrival: Arrival, outcome: Outcome, now: float) -> None:
        """It ended without its output: refused, late or invalid."""
        self.group(arrival).outcomes[outcome] += 1
        self.second(now).refused += 1

    def finished(
        self, arrival: Arrival, tokens: int, first_s: float, now: float, unloaded_s: float
    ) -> None:
        group = self.group(arrival)
        group.outcomes[Outcome.FINISHED] += 1
        group.served_tokens += tokens
        group.prompt_tokens += arrival.prompt_tokens
        second = self.second(now)
        second.served_tokens += tokens
        slo = self._slos[arrival.priority_class]
        ttft_s = first_s - arrival.at_s
        group.ttft_s.append(ttft_s)
        met = ttft_s <= slo.ttft_s
        if tokens > 1:
            tpot_s = (now - first_s) / (tokens - 1)
            group.tpot_s.append(tpot_s)
            met = met and tpot_s <= min(slo.tpot_s, slo.tpot_factor * unloaded_s)
        if met:
            group.met += 1
            group.goodput_tokens += tokens
            second.goodput_tokens += tokens

    def group(self, arrival: Arrival) -> Group:
        key = (arrival.priority_class, arrival.tenant)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group()
        return group

    def second(self, now: float) -> Second:
        while len(self.seconds) <= now:
            self.seconds.append(Second())
        return self.seconds[int(now)]

    def of_class(self, priority_class: PriorityClass) -> Iterator[Group]:
        return (group for key, group in self.groups.items() if key[0] is priority_class)

    def of_tenant(self, tenant: str) -> Iterator[Group]:
        return (group for key, group in self.groups.items() if key[1] == tenant)
