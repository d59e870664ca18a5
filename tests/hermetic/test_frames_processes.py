"""Inference and execution as real processes with the simulated engine: what they say of
themselves, and that they end in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.channels import open_channel
from sluice.execution.v1 import execution_pb2, execution_pb2_grpc
from sluice.frames_grpc import client_connection
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.frame_peer import make_start
from tests.hermetic.frames_harness import SchedulerPeer, part

START_S = 30.0
STREAMS = 20

CONFIG = """
[inference]
require_grant = false
probe_lag_s = 0.1
[execution]
probe_lag_s = 0.1
[[instance]]
name = "sim-0"
address = "127.0.0.1:{inference}"
engine = "{engine}"
model = "sim"
[instance.simulated]
decode_step_ms = 20.0
start_s = {start_s}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """One process."""

    process: asyncio.subprocess.Process
    address: str
    log: Path

    async def ended(self, within_s: float = 20.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()


@asynccontextmanager
async def service(package: str, folder: Path, port: int, **environ: str) -> AsyncIterator[Service]:
    log = folder / f"{package}.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{package}.main",
            env={**os.environ, "SLUICE_CONFIG": str(folder / "sluice.toml"), **environ},
            stderr=out,
        )
    try:
        yield Service(process, f"127.0.0.1:{port}", log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def serving(channel: grpc.aio.Channel) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_serving(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(START_S):
        while not await serving(channel):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[tuple[Service, Service, SchedulerPeer]]:
    """An instance, a replica, and a scheduler with STREAMS requests in flight."""
    ports = {"inference": free_port(), "execution": free_port()}
    (folder / "sluice.toml").write_text(CONFIG.format(engine="simulated", start_s=0.1, **ports))
    bind = f"127.0.0.1:{ports['execution']}"
    async with (
        service("inference_svc", folder, ports["inference"]) as instance,
        service("execution_svc", folder, ports["execution"], SLUICE_EXECUTION_BIND=bind) as replica,
    ):
        channels = [open_channel(instance.address), open_channel(replica.address)]
        for channel in channels:
            await until_serving(channel)
        stub = execution_pb2_grpc.ExecutionServiceStub(channels[1])
        scheduler = SchedulerPeer(client_connection(stub.ExecuteFrames())).begin()
        await scheduler.send(part("sim-0", instance.address))
        await scheduler.until(lambda: scheduler.of and scheduler.peer("sim-0").credit)
        starts = [make_start(slot, max_tokens=80) for slot in range(STREAMS)]
        for start in starts:
            start.work.sampling.ignore_eos = True
        await scheduler.send(part("sim-0", instance.address, *starts))
        await scheduler.until(lambda: len(scheduler.peer("sim-0").deltas) > STREAMS)
        try:
            yield instance, replica, scheduler
        finally:
            await scheduler.stop()
            for channel in channels:
                await channel.close()


async def all_complete(scheduler: SchedulerPeer) -> None:
    for slot in range(STREAMS):
        ended = await scheduler.peer("sim-0").over(slot)
        assert ended.usage.completion_tokens == 80
        assert ended.simulated


async def test_an_instance_that_is_told_to_end_lets_its_streams_end(tmp_path: Path) -> None:
    """Goal: SIGTERM with streams in flight loses nothing. Method: 20 streams of 1.6 s, the
    signal after the first tokens. Oracle: every stream has all its tokens, health said NOT_SERVING
    before the end, exit status 0 soon after the last token. Seen to fail when drain does not wait
    for the streams."""
    async with mesh(tmp_path) as (instance, _, scheduler):
        channel = open_channel(instance.address)
        instance.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(2.0):
            while await serving(channel):
                await asyncio.sleep(0.01)
        assert instance.process.returncode is None
        await all_complete(scheduler)
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("sim-0", execution_pb2.LOSS_REASON_CLOSED)]
        assert await instance.ended(5.0) == 0
        await channel.close()


async def test_a_replica_that_is_told_to_end_lets_its_streams_end(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (_, replica, scheduler):
        replica.process.send_signal(signal.SIGTERM)
        await scheduler.until(lambda: scheduler.messages[-1].draining)
        await all_complete(scheduler)
        await scheduler.half_close()
        await scheduler.until(lambda: scheduler.ended)
        assert await replica.ended(5.0) == 0


async def test_an_instance_that_is_killed_is_lost_within_a_second(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (instance, _, scheduler):
        instance.process.kill()
        await scheduler.until(lambda: scheduler.lost, within_s=1.0)
        assert scheduler.lost == [("sim-0", execution_pb2.LOSS_REASON_DISCONNECTED)]


async def test_the_server_is_up_before_the_engine_and_says_what_it_serves(tmp_path: Path) -> None:
    port = free_port()
    # Far longer than a channel takes to find the server.
    config = CONFIG.format(engine="simulated", inference=port, start_s=4.0)
    (tmp_path / "sluice.toml").write_text(config)
    async with service("inference_svc", tmp_path, port) as instance:
        channel = open_channel(instance.address)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.WatchLoad(
            inference_pb2.WatchLoadRequest(), wait_for_ready=True, timeout=START_S
        )
        reports = []
        async for report in call:
            reports.append(report)
            if report.serving:
                break
            if len(reports) == 1:  # later ones may be read when the engine is up already
                assert not await serving(channel)
        assert not reports[0].serving
        assert reports[0].epoch == 0
        await until_serving(channel)
        model = await stub.GetModel(inference_pb2.GetModelRequest())
        assert (model.instance, model.model, model.simulated) == ("sim-0", "sim", True)
        assert model.epoch == reports[-1].epoch != 0
        call.cancel()
        instance.process.send_signal(signal.SIGTERM)
        assert await instance.ended() == 0
        assert "SIMULATED" in instance.log.read_text()
        await channel.close()


@pytest.mark.parametrize("engine", ["", "other"])
async def test_a_wrong_engine_ends_the_process_with_the_setting_s_name(
    tmp_path: Path, engine: str
) -> None:
    port = free_port()
    config = CONFIG.format(engine=engine, inference=port, start_s=0.1)
    (tmp_path / "sluice.toml").write_text(config)
    async with service("inference_svc", tmp_path, port) as instance:
        assert await instance.ended() == 78
        assert "instance.sim-0.engine" in instance.log.read_text()
