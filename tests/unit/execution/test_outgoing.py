"""What waits for an instance: order, cut, cancels, and the deadline that shrinks while it waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from execution_svc.domain.open_slots import OpenSlots
from execution_svc.domain.outgoing import REMAINING_S_MAX, Outgoing, remaining_at_write


def names(outgoing: Outgoing[str, str]) -> list[str]:
    return [queued.start for queued in outgoing.take()[1]]


def test_starts_leave_by_class_and_then_as_they_came() -> None:
    outgoing: Outgoing[str, str] = Outgoing()
    for name, priority in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        outgoing.add_start(name, name, priority=priority, size_bytes=1, now=0.0)
    assert names(outgoing) == ["b", "d", "c", "a"]
    assert not outgoing


def test_a_frame_is_cut_and_a_larger_start_travels_alone() -> None:
    outgoing: Outgoing[str, str] = Outgoing(frame_bytes_max=10)
    for name, size in (("a", 4), ("b", 6), ("c", 11), ("d", 1)):
        outgoing.add_start(name, name, priority=1, size_bytes=size, now=0.0)
    assert outgoing.bytes == 22
    assert names(outgoing) == ["a", "b"]
    assert names(outgoing) == ["c"]
    assert names(outgoing) == ["d"]
    assert names(outgoing) == []
    assert outgoing.bytes == 0


def test_a_lower_class_does_not_overtake_what_only_does_not_fit() -> None:
    outgoing: Outgoing[str, str] = Outgoing(frame_bytes_max=10)
    for name, priority, size in (("a", 1, 8), ("b", 1, 8), ("c", 2, 1)):
        outgoing.add_start(name, name, priority=priority, size_bytes=size, now=0.0)
    assert names(outgoing) == ["a"]
    assert names(outgoing) == ["b", "c"]


def test_a_cancel_goes_first_but_never_before_the_start_that_it_means() -> None:
    outgoing: Outgoing[str, str] = Outgoing(frame_bytes_max=10)
    outgoing.add_start((1, 2), "start", priority=1, size_bytes=1, now=0.0)
    outgoing.add_cancel((1, 1), "of the use before")
    outgoing.add_cancel((1, 2), "of the start that waits")
    cancels, starts = outgoing.take()
    assert (cancels, [queued.start for queued in starts]) == (["of the use before"], ["start"])
    assert outgoing
    assert outgoing.take() == (["of the start that waits"], [])
    assert not outgoing


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.booleans()), max_size=30),
    st.integers(1, 40),
)
@settings(max_examples=300, deadline=None)
def test_everything_leaves_once_within_the_limit(
    starts: list[tuple[int, int, bool]], limit: int
) -> None:
    outgoing: Outgoing[int, int] = Outgoing(frame_bytes_max=limit)
    for number, (priority, size, cancelled) in enumerate(starts):
        outgoing.add_start(number, number, priority=priority, size_bytes=size, now=0.0)
        if cancelled:
            outgoing.add_cancel(number, number)
    sent: list[int] = []
    cancelled_in: list[int] = []
    while outgoing:
        cancels, taken = outgoing.take()
        assert all(number in sent for number in cancels)
        cancelled_in += cancels
        sent += [queued.start for queued in taken]
        assert sum(queued.size_bytes for queued in taken) <= limit or len(taken) == 1
    assert sorted(sent) == list(range(len(starts)))
    assert sorted(cancelled_in) == [n for n, (_, _, gone) in enumerate(starts) if gone]
    classes = [starts[number][0] for number in sent]
    assert classes == sorted(classes)


@pytest.mark.parametrize(
    ("remaining", "arrived", "now", "left"),
    [
        (5.0, 10.0, 10.0, 4.999),
        (5.0, 10.0, 12.0, 3.0),
        (5.0, 10.0, 15.0, 0.0),
        (5.0, 1.0, 99.0, 0.0),
        (float(2**63), 1.0, 1.0, REMAINING_S_MAX),  # more than a duration can hold
    ],
)
def test_the_time_a_start_spends_here_is_taken_from_its_deadline(
    remaining: float, arrived: float, now: float, left: float
) -> None:
    assert remaining_at_write(remaining, arrived, now) == left


def test_only_the_current_use_of_a_slot_closes_it() -> None:
    slots: OpenSlots[str] = OpenSlots()
    slots.open((1, 1), "first")
    assert slots.close((1, 2)) is None
    assert slots.close((2, 1)) is None
    assert len(slots) == 1
    assert slots.close((1, 1)) == "first"
    assert slots.close((1, 1)) is None
    slots.open((1, 2), "second")
    slots.open((2, 1), "third")
    assert sorted(slots.close_all()) == ["second", "third"]
    assert not slots
