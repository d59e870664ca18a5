"""Limits of a run: the deployment's fill in and cap."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.domain.run_budget import RunLimits, SomeLimits, granted

MOST = RunLimits(10, 1000, 5, 60.0, 2.0)


def test_who_asks_for_nothing_gets_the_deployments_limits() -> None:
    assert granted(SomeLimits(), MOST) == MOST


def test_fewer_are_granted_and_more_are_not() -> None:
    asked = SomeLimits(
        steps_max=3, tokens_max=10_000, tool_calls_max=0, wall_time_s=5.5, cost_max=9.0
    )
    assert granted(asked, MOST) == replace(MOST, steps_max=3, tool_calls_max=0, wall_time_s=5.5)


@given(st.builds(SomeLimits, *[st.none() | st.integers(0, 2000) for _ in fields(SomeLimits)]))
def test_no_limit_is_ever_above_the_deployments(asked: SomeLimits) -> None:
    limits = granted(asked, MOST)
    for field in fields(RunLimits):
        assert getattr(limits, field.name) <= getattr(MOST, field.name)
