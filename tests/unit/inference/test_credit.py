"""Division of an engine's room: fair, work conserving, never above the capacity, and calm."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.domain.credit import (
    FAST_S,
    SLOW_S,
    CreditBook,
    Divider,
    Room,
    fair_goals,
    water_fill,
)

COUNTS = st.integers(0, 60)


def naive_fill(capacity: int, wants: list[int]) -> list[int]:
    """The definition of max-min fairness: unit by unit to whoever has least and wants more."""
    shares = [0] * len(wants)
    for _ in range(capacity):
        hungry = [i for i, want in enumerate(wants) if shares[i] < want]
        if not hungry:
            break
        shares[min(hungry, key=lambda i: (shares[i], i))] += 1
    return shares


@given(COUNTS, st.lists(COUNTS, max_size=8))
@settings(max_examples=500, deadline=None)
def test_water_filling_equals_giving_unit_by_unit_to_the_poorest(
    capacity: int, wants: list[int]
) -> None:
    assert water_fill(capacity, wants) == naive_fill(capacity, wants)


@given(COUNTS, st.lists(st.tuples(COUNTS, st.booleans()), min_size=1, max_size=8))
@settings(max_examples=500, deadline=None)
def test_goals_divide_everything_and_leave_nobody_who_shares_without(
    capacity: int, streams: list[tuple[int, bool]]
) -> None:
    demands = [min(demand, capacity) for demand, _ in streams]
    exact = [only for _, only in streams]
    goals = fair_goals(capacity, demands, exact)
    assert all(goal >= 0 for goal in goals)
    sharers = exact.count(False)
    if sharers:
        assert sum(goals) == capacity  # work conserving
        if capacity >= sum(d for d, only in streams if only) + len(streams):
            assert all(goal >= 1 for goal, only in zip(goals, exact, strict=True) if not only)
    else:
        assert sum(goals) <= capacity
    unmet = [i for i, goal in enumerate(goals) if goal < demands[i]]
    for i in unmet:  # nobody is poor beside somebody who is more than a unit richer than it needs
        assert all(
            goals[j] <= goals[i] + 1 or goals[j] <= _least(capacity, demands, exact, j)
            for j in range(len(goals))
        )


def _least(capacity: int, demands: list[int], exact: list[bool], stream: int) -> int:
    """What a stream may hold while another is short: its reserve."""
    sharers = max(1, exact.count(False))
    reserve = min(max(1, capacity // 32), capacity // sharers)
    return reserve if not exact[stream] else 0


def settle(divider: Divider, now: float, held: dict[int, int]) -> float | None:
    return divider.settle(now, held)


def test_a_single_stream_has_everything_whatever_it_asks_for() -> None:
    divider = Divider(64)
    divider.join(1, exact=False)
    settle(divider, 0.0, {1: 0})
    assert divider.credit(1) == 64


def test_idle_streams_keep_a_reserve_and_busy_ones_get_the_rest() -> None:
    divider = Divider(64)
    for stream in (1, 2, 3):
        divider.join(stream, exact=False)
    divider.demand(1, 1000)
    settle(divider, 0.0, {1: 0, 2: 0, 3: 0})
    assert [divider.credit(stream) for stream in (1, 2, 3)] == [60, 2, 2]


def test_a_newcomer_gets_room_only_as_the_over_holder_comes_down() -> None:
    divider = Divider(8)
    divider.join(1, exact=False)
    divider.demand(1, 100)
    settle(divider, 0.0, {1: 0})
    divider.join(2, exact=False)
    divider.demand(2, 100)
    settle(divider, 1.0, {1: 8, 2: 0})
    assert (divider.credit(1), divider.credit(2)) == (4, 0)  # the first is 4 over its credit
    assert divider.owed
    for held in (7, 6, 5, 4):
        settle(divider, 2.0, {1: held, 2: 0})
        assert divider.credit(2) == 8 - held
    assert not divider.owed


def test_demand_that_trembles_does_not_change_credits() -> None:
    """Seen to fail without the hysteresis (goals adopted at every settle): 400 changes."""
    divider = Divider(256)
    for stream in (1, 2):
        divider.join(stream, exact=False)
    divider.demand(1, 100)
    divider.demand(2, 100)
    changes = 0
    last = None
    for step in range(200):
        now = step * 0.01
        divider.demand(1 + step % 2, 100 + step % 7)
        settle(divider, now, {1: 100, 2: 100})
        shares = (divider.credit(1), divider.credit(2))
        changes += last is not None and shares != last
        last = shares
    assert changes == 0


def test_a_large_shortfall_is_met_fast_and_a_small_one_later() -> None:
    for demand, wait in ((200, FAST_S), (131, SLOW_S)):
        divider = Divider(256)
        for stream in (1, 2):
            divider.join(stream, exact=False)
        settle(divider, 10.0, {1: 0, 2: 0})
        assert divider.credit(1) == 128
        divider.demand(1, demand)
        due_at = settle(divider, 10.0 + wait / 2, {1: 0, 2: 0})
        assert due_at == 10.0 + wait
        assert divider.credit(1) == 128
        assert settle(divider, due_at, {1: 0, 2: 0}) is None
        assert divider.credit(1) >= demand


def test_streams_that_come_and_go_change_goals_at_once() -> None:
    divider = Divider(10)
    divider.join(1, exact=False)
    settle(divider, 0.0, {1: 0})
    divider.join(2, exact=False)
    settle(divider, 0.0, {1: 0, 2: 0})
    assert (divider.credit(1), divider.credit(2)) == (5, 5)
    divider.leave(1)
    settle(divider, 0.0, {2: 0})
    assert divider.credit(2) == 10


def test_an_exact_holder_gets_what_it_holds_and_no_more() -> None:
    divider = Divider(10)
    divider.join(1, exact=False)
    divider.join(2, exact=True)
    divider.demand(2, 1)
    settle(divider, 0.0, {1: 3, 2: 1})
    assert (divider.credit(1), divider.credit(2)) == (9, 1)


def test_the_book_tells_changes_only() -> None:
    book = CreditBook(Room(8, 800))
    book.join(1)
    held = {1: Room(0, 0)}
    assert book.settle(0.0, held)[0] == {1: Room(8, 800)}
    assert book.settle(1.0, held)[0] == {}
    book.demand(1, Room(4, 100))
    assert book.settle(2.0, held)[0] == {}
    book.resize(Room(4, 800))
    assert book.settle(3.0, held)[0] == {1: Room(4, 800)}
    book.leave(1)
    assert book.settle(4.0, {})[0] == {}


@dataclass
class Streams:
    """What the streams of the machine below hold and want."""

    held: dict[int, int] = field(default_factory=dict)
    demand: dict[int, int] = field(default_factory=dict)


class SeveralSchedulers(RuleBasedStateMachine):
    """Goal: several schedulers that keep to their credit never oversubscribe an engine, whatever
    they ask for and however the capacity changes, and room is not left idle for ever.
    Method: random joins, leaves, demands, starts within credit, ends and resizes. Oracle: the sum
    of credits and the sum of max(held, credit) against the capacity; after the hysteresis has
    passed and over-holders have come down, the fair goals. Seed: Hypothesis. Seen to fail when
    raises ignore what others hold (``_apply`` without ``taken``)."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 12
        self.divider = Divider(self.capacity)
        self.streams = Streams()
        self.now = 0.0
        self.count = 0
        self.excess = 0  # what a smaller capacity left too much

    def settle(self) -> None:
        self.divider.settle(self.now, self.streams.held)

    @precondition(lambda self: len(self.streams.held) < 5)
    @rule()
    def join(self) -> None:
        self.count += 1
        self.divider.join(self.count, exact=False)
        self.streams.held[self.count] = 0
        self.streams.demand[self.count] = 0
        self.settle()

    @precondition(lambda self: self.streams.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.streams.held)))
        del self.streams.held[stream]
        del self.streams.demand[stream]
        self.divider.leave(stream)
        self.settle()

    @precondition(lambda self: self.streams.held)
    @rule(data=st.data(), units=st.integers(0, 30))
    def ask(self, data: st.DataObject, units: int) -> None:
        stream = data.draw(st.sampled_from(sorted(self.streams.held)))
        self.streams.demand[stream] = units
        self.divider.demand(stream, units)
        self.settle()

    @precondition(lambda self: self.streams.held)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.streams.held)))
        if self.streams.held[stream] < self.divider.credit(stream):
            self.streams.held[stream] += 1

    @precondition(lambda self: any(self.streams.held.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        busy = sorted(s for s, held in self.streams.held.items() if held)
        self.streams.held[data.draw(st.sampled_from(busy))] -= 1
        self.settle()

    @rule(seconds=st.sampled_from([0.001, 0.03, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(capacity=st.integers(0, 24))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.divider.resize(capacity)
        self.settle()

    @invariant()
    def never_oversubscribed(self) -> None:
        shares = {stream: self.divider.credit(stream) for stream in self.streams.held}
        assert all(credit >= 0 for credit in shares.values())
        assert sum(shares.values()) <= self.capacity
        total = sum(max(held, shares[s]) for s, held in self.streams.held.items())
        assert total <= max(self.capacity, sum(self.streams.held.values()))

    def teardown(self) -> None:
        """Liveness: when the hysteresis has passed and all that was held has ended, everything is
        divided, and who wants no more than its fair share has it."""
        streams = sorted(self.streams.held)
        if not streams:
            return
        self.streams.held = dict.fromkeys(streams, 0)
        self.now += 2 * SLOW_S
        self.settle()
        demands = [min(self.streams.demand[stream], self.capacity) for stream in streams]
        fair = fair_goals(self.capacity, demands, [False] * len(streams))
        shares = [self.divider.credit(stream) for stream in streams]
        assert sum(shares) == self.capacity
        for share, demand, goal in zip(shares, demands, fair, strict=True):
            assert share >= min(demand, goal)


SeveralSchedulers.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None
)
TestSeveralSchedulers = SeveralSchedulers.TestCase
