"""Clients that were ended for slowness come back at a bounded rate; times are given.

Oracle: watches that may begin in a time, by the rule of the docstring. Seen to fail on the mutant
slow_watchers_come_back_at_once.
"""

from __future__ import annotations

from scheduler_svc.domain.slow_watchers import FORGOTTEN_S, FREE, PACE_S, SlowWatchers


def begun(slow: SlowWatchers, tenant: str, from_s: float, for_s: float) -> int:
    """How many watches begin when the tenant tries all the time."""
    count = 0
    for step in range(round(for_s * 100)):
        now = from_s + step / 100
        if not slow.wait_s(tenant, now):
            slow.began(tenant, now)
            count += 1
    return count


def test_those_that_were_ended_come_back_one_by_one() -> None:
    slow = SlowWatchers()
    for _ in range(100):
        slow.ended("a", 10.0)
    assert begun(slow, "a", 10.0, 20.0) <= 20.0 / PACE_S + 1
    assert begun(slow, "b", 10.0, 1.0) == 100  # others know nothing of it


def test_a_wait_is_told_and_is_enough() -> None:
    slow = SlowWatchers()
    for _ in range(FREE + 2):
        slow.ended("a", 0.0)
    slow.began("a", 0.0)
    wait_s = slow.wait_s("a", 0.1)
    assert 0 < wait_s <= PACE_S
    assert not slow.wait_s("a", 0.1 + wait_s)


def test_few_ends_cost_nothing_and_old_ones_are_forgotten() -> None:
    slow = SlowWatchers()
    for _ in range(FREE):
        slow.ended("a", 0.0)
    assert begun(slow, "a", 0.0, 1.0) == 100
    for _ in range(50):
        slow.ended("a", 1.0)
    assert begun(slow, "a", 1.0 + FORGOTTEN_S, 1.0) == 100
    assert not slow._owed
