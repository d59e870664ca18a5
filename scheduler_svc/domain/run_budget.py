"""Limits of a run: what its client asked for, and the deployment's, which fill in and cap. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Each ends a run. ``steps_max``: model and tool calls together; ``tokens_max``: prompt and
    output over all model calls; ``wall_time_s``: without what it waits for people; ``cost_max``: in
    the deployment's currency."""

    steps_max: int
    tokens_max: int
    tool_calls_max: int
    wall_time_s: float
    cost_max: float


@dataclass(frozen=True, slots=True)
class SomeLimits:
    """Limits that a client asks for, or that a tenant has; ``None``: nothing is said."""

    steps_max: int | None = None
    tokens_max: int | None = None
    tool_calls_max: int | None = None
    wall_time_s: float | None = None
    cost_max: float | None = None


def granted(asked: SomeLimits, most: RunLimits) -> RunLimits:
    """The limits in force: ``most`` where nothing is asked, and never more than that."""
    return RunLimits(
        steps_max=_least(asked.steps_max, most.steps_max),
        tokens_max=_least(asked.tokens_max, most.tokens_max),
        tool_calls_max=_least(asked.tool_calls_max, most.tool_calls_max),
        wall_time_s=_least(asked.wall_time_s, most.wall_time_s),
        cost_max=_least(asked.cost_max, most.cost_max),
    )


def _least(asked: T | None, most: T) -> T:
    return most if asked is None else min(asked, most)
