"""What an agent service counts, as metrics."""

from __future__ import annotations

from agent_svc.adapters.counts import Counts
from agent_svc.adapters.worker import Worker
from sluice import telemetry_names as names
from sluice.telemetry import Telemetry


def observe(telemetry: Telemetry, worker: Worker, counts: Counts) -> None:
    """Exports the numbers, which are read once per interval."""
    telemetry.gauge(names.RUNS_ACTIVE, lambda: worker.active)
    telemetry.gauge(names.RUN_HISTORY, lambda: worker.history_bytes)
    telemetry.counter(names.RUNS_ENDED, worker.end_readings)
    telemetry.counter(names.RUN_STEPS, counts.step_readings)
    telemetry.counter(names.AGENT_NOT_NEEDED, counts.needless_readings)
    telemetry.counter(names.AGENT_EXTRA_COST, counts.extra_cost_readings)
    telemetry.counter(names.RUN_TOOL_CALLS, lambda: counts.tool_calls)
    telemetry.counter(names.RUN_LEASES_LOST, lambda: worker.leases_lost)
