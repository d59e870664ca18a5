"""The ranges of a run's limits, wherever somebody sets some: in a request, or for a tenant."""

from __future__ import annotations

import math
from typing import Final

from sluice.errors import invalid
from sluice.scheduler.v1 import runs_pb2

WALL_TIME_MAX_S: Final = 30 * 86_400.0


def check_run_budget(budget: runs_pb2.RunBudget, where: str) -> None:
    """Raises INVALID_ARGUMENT, naming the field below ``where``, for a limit out of its range."""
    for name in ("steps_max", "tokens_max"):
        if budget.HasField(name) and not getattr(budget, name):
            raise invalid(f"{where}.{name}", "must be 1 or more")
    if budget.HasField("cost_max") and not (budget.cost_max > 0 and math.isfinite(budget.cost_max)):
        raise invalid(f"{where}.cost_max", "must be more than 0")
    if budget.HasField("wall_time_max"):
        # Nanoseconds with a sign of their own, or of more than a second: no time at all.
        mixed = not 0 <= budget.wall_time_max.nanos < 10**9
        if mixed or not 0 < wall_time_s(budget) <= WALL_TIME_MAX_S:
            raise invalid(
                f"{where}.wall_time_max", f"must be more than 0, at most {WALL_TIME_MAX_S:.0f} s"
            )


def wall_time_s(budget: runs_pb2.RunBudget) -> float:
    """Its wall time in seconds."""
    return budget.wall_time_max.seconds + budget.wall_time_max.nanos / 1e9
