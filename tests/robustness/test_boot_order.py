"""Processes may start in any order; what is missing makes a service not ready, never dead.

Goal: a scheduler without an execution replica is not ready and says which part is missing; without
an instance it is ready and refuses with UNAVAILABLE; nothing ends or is started again; once what
was missing serves, the mesh does within 2 s. (A collector that is absent: tests/hermetic/
test_collector.py.) Method: meshes started without one of their processes, which comes up late.
Oracle: grpc.health.v1, the metric `sluice.health` by component, the answers at the edge, process
ids. Seed: none, nothing is drawn.

Seen to fail on the mutants in tests/mutants: link_gives_up, ready_without_execution,
unknown_before_known.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from sluice import telemetry_names
from sluice.errors import Code
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import client_of, eventually
from tests.otlp_receiver import OtlpReceiver, otlp_receiver

HEALTHY_S = 2.0
ABSENT_S = 2.5  # long enough that every backoff has grown to its most
TINY = {"max_tokens": 2}


def pids(running: Mesh) -> dict[str, int]:
    """Of the processes that run."""
    return {name: one.pid for name, one in running.processes.items() if one.alive}


async def test_a_scheduler_waits_for_an_execution(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        shape = Shape(mesh={"otlp_endpoint": receiver.endpoint, "metric_interval_s": 1.0})
        with mesh(tmp_path, shape, absent=["execution-0"]) as running:
            await eventually(lambda: running.serving("sim-0"), "the instance is up", 30.0)
            await eventually(
                lambda: running.health("scheduler-0") >= 0, "the scheduler answers", 30.0
            )
            before = pids(running)
            await asyncio.sleep(ABSENT_S)
            assert not running.serving("scheduler-0")
            assert health(receiver) == {"terminating": 1, "execution": 0, "instances": 1}
            async with client_of(running) as client:
                assert (await client.http.get("/healthz")).status_code == 503
                refused = (await client.generate()).error
                assert refused is not None
                assert refused.code is Code.UNAVAILABLE
                running["execution-0"].start()
                await eventually(lambda: running.serving("execution-0"), "it serves", 30.0)
                took_s = await eventually(lambda: running.serving("scheduler-0"), "ready", 10.0)
                assert took_s <= HEALTHY_S
                await eventually(lambda: running.edge_members() == 1, "the edge knows", 2.0)
                assert (await client.generate(sampling=TINY)).ok.messages
                receiver.until(lambda: all(health(receiver).values()), "all its parts are up")
            assert pids(running).items() >= before.items()


def health(receiver: OtlpReceiver) -> dict[str, int]:
    """The parts of the scheduler, and whether each is up, as exported."""
    name = telemetry_names.HEALTH.name

    def parts() -> dict[str, int]:
        known = receiver.labels("scheduler", name, "component")
        return {part: int(receiver.sum("scheduler", name, component=part).value) for part in known}

    receiver.until(lambda: "execution" in parts(), "the component is named")
    return parts()


async def test_instances_may_come_late(tmp_path: Path) -> None:
    shape = Shape({"sim-0": {"start_s": 1.0}, "sim-1": {}})
    with mesh(tmp_path, shape, absent=["sim-0", "sim-1"]) as running:
        await eventually(lambda: running.serving("scheduler-0"), "the scheduler is ready", 30.0)
        before = pids(running)
        await asyncio.sleep(ABSENT_S)
        async with client_of(running) as client:
            await eventually(lambda: running.edge_members() == 1, "the edge knows it", 5.0)
            for fields in ({}, {"model": "sim"}):
                error = (await client.generate(timeout=5, **fields)).refused
                # Not NOT_FOUND: nobody knows yet which models there will be.
                assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_INSTANCE")
                assert error.retry_after_s
            running["sim-0"].start()
            await eventually(lambda: running.health("sim-0") >= 0, "its process is up", 30.0)
            assert not running.serving("sim-0"), "the engine loads for a second"
            await eventually(lambda: running.serving("sim-0"), "the engine is up", 10.0)
            begin = time.monotonic()
            while (await client.generate(timeout=5, sampling=TINY)).error is not None:
                assert time.monotonic() - begin < HEALTHY_S
            # One that is still absent harms nobody.
            for _ in range(3):
                assert (await client.generate(sampling=TINY)).ok.finished.instance == "sim-0"
            running["sim-1"].start()
            await eventually(lambda: running.serving("sim-1"), "it serves", 30.0)
            took_s = await eventually(lambda: running.reachable("scheduler-0"), "in use", 10.0)
            assert took_s <= HEALTHY_S
        assert pids(running).items() >= before.items()


@pytest.mark.parametrize("last", ["scheduler-0", "envoy"])
async def test_the_way_in_may_come_last(tmp_path: Path, last: str) -> None:
    with mesh(tmp_path, absent=[last]) as running:
        for name in {"execution-0", "sim-0", "scheduler-0"} - {last}:
            await eventually(partial(running.serving, name), f"{name} serves", 30.0)
        running[last].start()
        if last == "scheduler-0":
            await eventually(lambda: running.serving(last), "it serves", 30.0)
        await eventually(lambda: running.edge_members() == 1, "the edge knows it", 10.0)
        async with client_of(running) as client:
            begin = time.monotonic()
            while (await client.generate(timeout=5, sampling=TINY)).error is not None:
                assert time.monotonic() - begin < HEALTHY_S
