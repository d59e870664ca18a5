"""Deadlines and the budget of a child call.

Goal: a child never gets more than its parent has left, less the margin, and never less than it
needs. Method: Hypothesis, 10,000 cases over (remaining, margin, cap, minimum), infinities and NaN
included; derandomised, so the seed is the test's name. Oracle: the three inequalities below.
Mutants seen to fail: ``min`` becomes ``max``; the margin is added; ``>=`` minimum becomes ``>``;
the check for NaN is dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.deadline import Deadline, MethodDeadline, bind, child_budget, current
from sluice.errors import Code, SluiceError

_SECONDS = st.floats(min_value=0.0, max_value=1e6)
_REMAINING = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-10.0, 100.0)


@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(_REMAINING, _SECONDS, _SECONDS | st.just(math.inf), _SECONDS)
@example(1.0, 0.25, 10.0, 0.75)
@example(math.nan, 0.0, 1.0, 0.0)
def test_a_childs_budget_fits_its_parent_or_is_refused(
    remaining: float, margin: float, cap: float, minimum: float
) -> None:
    enough = remaining - margin >= minimum and cap >= minimum and min(remaining - margin, cap) > 0
    if not enough:
        with pytest.raises(SluiceError) as caught:
            child_budget(remaining, margin, cap, minimum)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        assert caught.value.reason == "DEADLINE_TOO_CLOSE"
        return
    budget = child_budget(remaining, margin, cap, minimum)
    assert budget == min(remaining - margin, cap)
    assert 0 < budget <= remaining - margin
    assert minimum <= budget <= cap


def test_a_method_grants_its_default_and_never_more_than_its_cap() -> None:
    method = MethodDeadline(default_s=10.0, cap_s=60.0)
    assert method.grant(None) == 10.0
    assert method.grant(30.0) == 30.0
    assert method.grant(3600.0) == 60.0
    assert method.grant(-1.0) == -1.0


def test_a_default_above_its_cap_is_refused() -> None:
    with pytest.raises(AssertionError):
        MethodDeadline(default_s=10.0, cap_s=5.0)


def test_a_deadline_counts_down_on_the_clock_it_is_given() -> None:
    deadline = Deadline.after(5.0, now=100.0)
    assert deadline.remaining(101.0) == 4.0
    assert not deadline.expired(104.9)
    assert deadline.expired(105.0)
    assert deadline.remaining(107.0) == -2.0


def test_a_bound_deadline_is_seen_by_tasks_made_inside_and_ends_with_the_block(
    run_virtual: Callable[[Coroutine[Any, Any, Any]], Any],
) -> None:
    async def seen() -> Deadline | None:
        return current()

    async def scenario() -> None:
        with bind(Deadline(5.0)):
            assert await asyncio.create_task(seen()) == Deadline(5.0)
            with bind(None):
                assert current() is None
            assert current() == Deadline(5.0)
        assert current() is None

    run_virtual(scenario())
