"""What runs did in this process. For one event loop; read by the telemetry's thread."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from sluice.telemetry import Labels

TENANTS_MAX: Final = 200
"""Tenants counted apart, below the series of a metric; more are counted together."""

OTHER: Final = "other"


class Counts:
    """Plain numbers."""

    def __init__(self) -> None:
        self.steps = 0
        self.refused_steps = 0
        self.tool_calls = 0
        self._needless: Counter[str] = Counter()
        self._extra_cost: defaultdict[str, float] = defaultdict(float)

    def not_needed(self, tenant: str, extra_cost: float) -> None:
        """A direct call would have done; ``extra_cost``: what the run cost beyond one."""
        if tenant not in self._needless and len(self._needless) >= TENANTS_MAX:
            tenant = OTHER
        self._needless[tenant] += 1
        self._extra_cost[tenant] += extra_cost

    def needless_readings(self) -> Iterator[tuple[int, Labels]]:
        """Runs for which a direct call would have done, by tenant."""
        for tenant, count in list(self._needless.items()):
            yield count, {"tenant": tenant}

    def extra_cost_readings(self) -> Iterator[tuple[float, Labels]]:
        """What those cost beyond it."""
        for tenant, cost in list(self._extra_cost.items()):
            yield cost, {"tenant": tenant}

    def step_readings(self) -> Iterator[tuple[int, Labels]]:
        """Model calls, by result."""
        yield self.steps, {"result": "written"}
        yield self.refused_steps, {"result": "refused"}
