"""Divides an engine's room among the frame streams that want it.

Owns who may hold how much: sequences and KV tokens are divided apart, each max-min fair by the
demand that the streams report (the classic water filling of Bertsekas and Gallager, *Data
Networks*, section 6.5, in whole units). Pure: time and what is held are passed in.

What holds, and is tested against a naive reference:

- The sum of all credits is never above the capacity. Room that nobody wants is divided too, so
  that a stream can start work before it has asked.
- Every stream's goal is at least one unit while there are units enough, and an idle stream keeps a
  small reserve. A credit rises to its goal only as other streams' holdings leave room for it: the
  sum of max(held, credit) is never above the capacity, unless what is held alone is.
- A lowered credit may be below what its stream holds (a negative credit): the stream yields or
  waits for its own ends, and starts nothing meanwhile.
- Goals change at once when streams come and go. Otherwise they change only for a stream that wants
  more than its goal and is owed it, a large shortfall after :data:`FAST_S`, a small one after
  :data:`SLOW_S`: demand that trembles does not make credits flap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# An idle stream's reserve: this fraction of the capacity, at least one unit.
RESERVE_DIVISOR = 32
# A shortfall of at least this fraction of the capacity is large.
BAND_DIVISOR = 16
# Seconds between two changes of goals for a large, and for a small shortfall.
FAST_S = 0.02
SLOW_S = 0.25


@dataclass(frozen=True, slots=True)
class Room:
    """An amount of an engine's room."""

    sequences: int
    kv_tokens: int


NO_ROOM = Room(0, 0)


def water_fill(capacity: int, wants: Sequence[int]) -> list[int]:
    """Max-min fair shares of ``capacity`` units: nobody gets more than it wants, and nobody gets
    less than another who gets more than one unit above it. Odd units go to the earlier ones."""
    shares = [0] * len(wants)
    order = sorted(range(len(wants)), key=wants.__getitem__)
    left = max(0, capacity)
    for at, index in enumerate(order):
        level, odd = divmod(left, len(order) - at)
        if wants[index] > level:
            for place, unmet in enumerate(sorted(order[at:])):
                shares[unmet] = level + (place < odd)
            return shares
        shares[index] = wants[index]
        left -= wants[index]
    return shares


def fair_goals(capacity: int, demands: Sequence[int], exact: Sequence[bool]) -> list[int]:
    """The goal of each stream. An ``exact`` one gets no reserve and no surplus beyond its demand;
    the others get at least the reserve, and what is left over in equal parts."""
    sharers = [i for i, only in enumerate(exact) if not only]
    reserve = min(max(1, capacity // RESERVE_DIVISOR), capacity // max(1, len(sharers)))
    wants = [
        demand if only else max(demand, reserve)
        for demand, only in zip(demands, exact, strict=True)
    ]
    goals = water_fill(capacity, wants)
    surplus = capacity - sum(goals)
    if sharers and surplus > 0:
        each, odd = divmod(surplus, len(sharers))
        for place, index in enumerate(sharers):
            goals[index] += each + (place < odd)
    return goals


@dataclass(slots=True)
class _Member:
    exact: bool
    demand: int = 0
    goal: int = 0
    credit: int = 0


class Divider:
    """Divides one kind of room. Streams are known by a number, in the order of their coming."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._members: dict[int, _Member] = {}
        self._stale = False  # goals must be computed whatever the time
        self._changed_at = float("-inf")

    def resize(self, capacity: int) -> None:
        """Another capacity, e.g. of an engine that has just started."""
        self._capacity = capacity
        self._stale = True

    def join(self, stream: int, *, exact: bool) -> None:
        """A stream came; its credit is 0 until the next :meth:`settle`."""
        assert stream not in self._members
        self._members[stream] = _Member(exact)
        self._stale = True

    def leave(self, stream: int) -> None:
        """A stream went, and what it held with it."""
        del self._members[stream]
        self._stale = True

    def demand(self, stream: int, units: int) -> None:
        """What a stream would hold if it could. More than the capacity counts as the capacity."""
        member = self._members[stream]
        member.demand = units
        self._stale |= member.exact  # exact ones are few and in use: no hysteresis

    def credit(self, stream: int) -> int:
        """The credit of a stream, as last settled."""
        return self._members[stream].credit

    @property
    def owed(self) -> bool:
        """Whether a credit waits below its goal for others' holdings to come down."""
        return any(member.credit < member.goal for member in self._members.values())

    def settle(self, now: float, held: Mapping[int, int]) -> float | None:
        """Brings goals and credits up to date. ``held`` has every stream. Returns the time at
        which to settle again even if nothing happens, or ``None``."""
        again_at = self._adopt(now)
        self._apply(held)
        return again_at

    def _adopt(self, now: float) -> float | None:
        members = list(self._members.values())
        capped = [min(member.demand, self._capacity) for member in members]
        goals = fair_goals(self._capacity, capped, [member.exact for member in members])
        if not self._stale:
            shortfall = max(
                (
                    min(goal, demand) - member.goal
                    for goal, demand, member in zip(goals, capped, members, strict=True)
                ),
                default=0,
            )
            if shortfall <= 0:
                return None
            large = shortfall >= max(1, self._capacity // BAND_DIVISOR)
            due_at = self._changed_at + (FAST_S if large else SLOW_S)
            if now < due_at:
                return due_at
        for goal, member in zip(goals, members, strict=True):
            member.goal = goal
        self._stale = False
        self._changed_at = now
        return None

    def _apply(self, held: Mapping[int, int]) -> None:
        # Lower first. Raising a credit up to what is held anyway takes no room; the rest of the
        # raises share the room that holdings and credits leave.
        members = list(self._members.items())
        taken = 0
        for stream, member in members:
            member.credit = min(member.goal, max(member.credit, held[stream]))
            taken += max(member.credit, held[stream])
        if taken > self._capacity:  # it shrank: unused credit goes before anybody yields
            unused = [max(0, member.credit - held[stream]) for stream, member in members]
            kept = water_fill(self._capacity - (taken - sum(unused)), unused)
            for (_, member), was, now in zip(members, unused, kept, strict=True):
                member.credit -= was - now
            return
        raises = [member.goal - member.credit for _, member in members]
        for (_, member), more in zip(
            members, water_fill(self._capacity - taken, raises), strict=True
        ):
            member.credit += more


class CreditBook:
    """Both kinds of room together. One owner calls it; nothing here waits."""

    def __init__(self, capacity: Room) -> None:
        self.capacity = capacity
        self._sequences = Divider(capacity.sequences)
        self._kv_tokens = Divider(capacity.kv_tokens)
        self._told: dict[int, Room] = {}

    def resize(self, capacity: Room) -> None:
        """Another capacity; takes effect at the next :meth:`settle`."""
        self.capacity = capacity
        self._sequences.resize(capacity.sequences)
        self._kv_tokens.resize(capacity.kv_tokens)

    def join(self, stream: int, *, exact: bool = False) -> None:
        """A stream came. ``exact``: it wants its demand only, neither reserve nor surplus."""
        self._sequences.join(stream, exact=exact)
        self._kv_tokens.join(stream, exact=exact)
        self._told[stream] = NO_ROOM

    def leave(self, stream: int) -> None:
        """A stream went, and what it held with it."""
        self._sequences.leave(stream)
        self._kv_tokens.leave(stream)
        del self._told[stream]

    def demand(self, stream: int, room: Room) -> None:
        """What the stream would hold if it could: what it runs plus what waits for it."""
        self._sequences.demand(stream, room.sequences)
        self._kv_tokens.demand(stream, room.kv_tokens)

    def credit(self, stream: int) -> Room:
        """The stream's credit, as last settled."""
        return self._told[stream]

    @property
    def owed(self) -> bool:
        """Whether an end of something held lets a credit rise: settle again after it."""
        return self._sequences.owed or self._kv_tokens.owed

    def settle(self, now: float, held: Mapping[int, Room]) -> tuple[dict[int, Room], float | None]:
        """Brings the credits up to date with demands and holdings. Returns the credits that
        changed, and when to settle again even if nothing happens (seconds, or ``None``)."""
        dues = (
            self._sequences.settle(now, {s: held[s].sequences for s in self._told}),
            self._kv_tokens.settle(now, {s: held[s].kv_tokens for s in self._told}),
        )
        changes: dict[int, Room] = {}
        for stream, told in self._told.items():
            room = Room(self._sequences.credit(stream), self._kv_tokens.credit(stream))
            if room != told:
                changes[stream] = room
        self._told.update(changes)
        return changes, min((due for due in dues if due is not None), default=None)
