"""Is there one order of all operations on a key that explains every answer?

The search of Wing and Gong (1993) with the memory of Lowe (2017): operations are put in order one
by one, each between its call and its return; a set of operations done, together with a state that
was reached before, is not looked at twice. An operation without an answer may have happened at any
time after its call, or never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

UNKNOWN: Final = "unknown"
"""The result of an operation without an answer."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What was asked, what came back, and when, by one clock."""

    asked: Any
    result: Any
    called: float
    returned: float = math.inf


Model = Callable[[Hashable, Any, Any], Hashable | None]
"""The state after an operation with this result in this state; ``None``: it could not give this
result here. Of an UNKNOWN result also where it would change nothing: that is as if it had never
happened, and to try it would double the search each time."""

PLACES_MAX: Final = 1_000_000  # a search that meets more is given up


def is_linearizable(history: Sequence[Operation], initial: Hashable, model: Model) -> bool:
    """Whether an order exists."""
    operations = sorted(history, key=lambda one: one.called)
    twins = _twins(operations)
    wanted = sum(1 << n for n, one in enumerate(operations) if one.result != UNKNOWN)
    done, state = 0, initial
    seen: set[tuple[int, Hashable]] = {(done, state)}
    path: list[tuple[int, Hashable, int]] = []  # done and state before, and the last one tried
    begin = 0
    while done & wanted != wanted:
        number = _next(operations, twins, done, begin)
        if number is None:
            if not path:
                return False
            done, state, begin = path.pop()
            begin += 1
            continue
        after = model(state, operations[number].asked, operations[number].result)
        place = (done | 1 << number, after)
        if after is None or place in seen:
            begin = number + 1
            continue
        seen.add(place)
        if len(seen) > PLACES_MAX:
            raise AssertionError("the history is too long to be judged")
        path.append((done, state, number))
        done, state, begin = done | 1 << number, after, 0
    return True


def _twins(operations: Sequence[Operation]) -> list[int]:
    """Of each operation without an answer the one before it that asked the same, as a bit: whatever
    it may stand for, that one may as well, so that it is tried only when that one is done."""
    last: dict[Any, int] = {}
    twins = []
    for number, one in enumerate(operations):
        same = one.result == UNKNOWN and one.asked in last
        twins.append(1 << last[one.asked] if same else 0)
        if one.result == UNKNOWN:
            last[one.asked] = number
    return twins


def _next(
    operations: Sequence[Operation], twins: Sequence[int], done: int, begin: int
) -> int | None:
    """The first operation from ``begin`` on that can be the next in order: it was called before any
    other one that is not done had returned."""
    first_return = math.inf
    # Operations are in the order of their calls: those called after the first return are no
    # candidates, and neither is what comes behind them.
    number = (~done & (done + 1)).bit_length() - 1  # the first one that is not done
    while number < len(operations):
        one = operations[number]
        if one.called > first_return:
            return None
        if not done >> number & 1:
            first_return = min(first_return, one.returned)
            if number >= begin and done & twins[number] == twins[number]:
                return number
        number += 1
    return None


def session_model(state: Hashable, asked: Any, result: Any) -> Hashable | None:
    """A session: its messages, one per append; the version is one more than their number.
    ("append", message, expected version or None) gives its version or "conflict"; ("read",) gives
    the messages."""
    assert isinstance(state, tuple)
    if asked[0] == "read":
        return state if result == state else None
    _, message, expected = asked
    fits = expected is None or expected == len(state) + 1
    if result == "conflict":
        return None if fits else state
    after = (*state, message)
    return after if fits and result in (UNKNOWN, len(after) + 1) else None


def run_model(state: Hashable, asked: Any, result: Any) -> Hashable | None:
    """A run: (token of its holder or None, largest token, number of events).
    ("claim",) gives a token; ("append", token, last event known, "hold" or "give back") gives the
    last event, "lost" or "conflict"; ("read",) gives the number of events."""
    assert isinstance(state, tuple)
    holder, largest, events = state
    if asked[0] == "read":
        return state if result == events else None
    if asked[0] == "claim":
        if result == UNKNOWN:  # some token that nobody knows, below the next one that is known
            return None if holder is None else (None, largest, events)
        return (result, result, events) if result > largest else None
    _, token, expected, after = asked
    if token != holder:
        return state if result == "lost" else None
    if expected != events:
        return state if result == "conflict" else None
    if result not in (UNKNOWN, events + 1):
        return None
    return (holder if after == "hold" else None), largest, events + 1
