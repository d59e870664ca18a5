"""A collector that is stuck or gone costs clients nothing, and does not hold up an end.

Goal: with every request traced, a collector that takes calls and never answers, and one that
is not there, leave answers and their times as they are; every service ends in order and in bounded
time meanwhile. Method: one mesh whose collector hangs, then disappears, then hangs again while the
services are told to end. Oracle: times, of which a blocked export would be 2 s; exit statuses.

Seen to fail on the mutant: spans exported when they end (SimpleSpanProcessor). That a shutdown
keeps its limit to the second is shown by tests/contract/test_telemetry_export.py.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from pathlib import Path

import pytest

from sluice.telemetry import EXPORT_TIMEOUT_S, SHUTDOWN_S
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import client_of
from tests.otlp_receiver import otlp_receiver

REQUESTS = 30
PROBE_LAG_S = 1.0  # of a scheduler; the others have less
SLACK_S = 4.0  # for a busy machine


async def times(running: Mesh) -> list[float]:
    """Seconds of each of some requests, a few at a time."""
    async with client_of(running) as client:

        async def one() -> float:
            began = time.monotonic()
            await client.text("Hello", sampling={"max_tokens": 3})
            return time.monotonic() - began

        found: list[float] = []
        for _ in range(REQUESTS // 5):
            found += await asyncio.gather(*(one() for _ in range(5)))
        return found


@pytest.mark.timeout(120)
async def test_a_collector_that_is_stuck_or_gone_is_not_noticed(tmp_path: Path) -> None:
    with otlp_receiver(hang=True) as stuck:
        telemetry = {
            "otlp_endpoint": stuck.endpoint,
            "trace_sample_ratio": 1.0,
            "metric_interval_s": 1.0,
        }
        with mesh(tmp_path, Shape(mesh=telemetry)) as running:
            with_stuck = await times(running)
            running.until(lambda: stuck.calls >= 4, "every process waits for the collector")
            with_stuck += await times(running)
            stuck.stop()
            without = await times(running)
            for found in (with_stuck, without):
                assert statistics.median(found) < EXPORT_TIMEOUT_S / 2
                assert max(found) < EXPORT_TIMEOUT_S
            with otlp_receiver(hang=True, endpoint=stuck.endpoint) as again:
                await times(running)
                running.until(lambda: again.calls >= 3, "every service waits for the collector")
                began = time.monotonic()
                services = [p for name, p in running.processes.items() if name != "envoy"]
                for process in services:
                    process.send(signal.SIGTERM)
                for process in services:
                    assert process.ended(30.0) == 0, process.text()
                assert time.monotonic() - began < PROBE_LAG_S + SHUTDOWN_S + SLACK_S
