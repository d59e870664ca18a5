"""Load reports, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from google.protobuf import duration_pb2

from inference_svc.adapters import load_watch
from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.load_watch import LoadWatch, to_interval
from inference_svc.adapters.no_gpus import NoGpus
from inference_svc.ports import GpuReading
from sluice.clock import run_virtual
from sluice.errors import Code, SluiceError
from sluice.inference.v1 import inference_pb2, load_pb2
from tests.fakes import FakeEngine


class OneGpu(NoGpus):
    def read(self) -> tuple[GpuReading, ...]:
        return (
            GpuReading(
                index=0,
                uuid="u",
                name="n",
                utilization=0.0,
                throttle_reasons=("hw_thermal", "new_reason"),
            ),
        )


async def collect(
    watch: LoadWatch, interval_s: float, into: list[tuple[float, inference_pb2.WatchLoadResponse]]
) -> None:
    async with aclosing(watch.reports(interval_s)) as reports:
        async for report in reports:
            into.append((asyncio.get_running_loop().time(), report))  # noqa: PERF401


def test_reports_come_at_the_interval_and_at_once_after_a_change() -> None:
    async def body() -> None:
        engine = FakeEngine()
        host = EngineHost(lambda: engine)
        watch = LoadWatch(host, NoGpus(), lambda: 3)
        keeper = asyncio.create_task(host.run())
        await asyncio.sleep(0.05)
        began = asyncio.get_running_loop().time()
        seen: list[tuple[float, inference_pb2.WatchLoadResponse]] = []
        task = asyncio.create_task(collect(watch, 1.0, seen))
        await asyncio.sleep(2.5)
        assert [round(at - began, 3) for at, _ in seen] == [0.0, 1.0, 2.0]
        assert [report.sequence for _, report in seen] == [1, 2, 3]
        assert seen[0][1].serving
        assert seen[0][1].frame_streams == 3
        assert seen[0][1].simulated
        host.drain()
        await asyncio.sleep(0.01)
        assert seen[-1][1].draining
        engine.crash()
        await asyncio.sleep(0.15)
        assert not seen[-1][1].serving
        assert not seen[-1][1].HasField("engine")
        watch.stop()
        with pytest.raises(SluiceError) as caught:
            await task
        assert caught.value.code is Code.UNAVAILABLE
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await host.close()

    run_virtual(body())


def test_what_is_not_known_is_absent_and_zero_is_zero() -> None:
    async def body() -> None:
        engine = FakeEngine()
        host = EngineHost(lambda: engine)
        keeper = asyncio.create_task(host.run())
        await asyncio.sleep(0.05)
        report = LoadWatch(host, OneGpu(), lambda: 0).report(1)
        assert report.engine.HasField("running")
        assert report.engine.running == 0
        assert not report.engine.HasField("waiting")
        [gpu] = report.gpus
        assert gpu.HasField("utilization")
        assert not gpu.HasField("power_watts")
        assert list(gpu.throttle_reasons) == [
            load_pb2.THROTTLE_REASON_HW_THERMAL,
            load_pb2.THROTTLE_REASON_UNSPECIFIED,
        ]
        assert not LoadWatch(host, NoGpus(), lambda: 0).report(1).gpus
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await host.close()

    run_virtual(body())


def test_watchers_are_bounded() -> None:
    async def body() -> None:
        host = EngineHost(FakeEngine)
        watch = LoadWatch(host, NoGpus(), lambda: 0)
        tasks = [
            asyncio.create_task(collect(watch, 1.0, [])) for _ in range(load_watch.WATCHERS_MAX)
        ]
        await asyncio.sleep(0.01)
        with pytest.raises(SluiceError) as caught:
            await collect(watch, 1.0, [])
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        late: list[tuple[float, inference_pb2.WatchLoadResponse]] = []
        task = asyncio.create_task(collect(watch, 1.0, late))
        await asyncio.sleep(0.01)
        assert late
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(body())


def test_the_interval_has_a_default_and_a_range() -> None:
    assert to_interval(None) == 0.25
    for seconds, nanos in ((0, 50_000_000), (60, 0)):
        duration = duration_pb2.Duration(seconds=seconds, nanos=nanos)
        assert to_interval(duration) == seconds + nanos / 1e9
    for seconds, nanos in ((0, 49_999_999), (60, 1), (0, 0), (-1, 0)):
        with pytest.raises(SluiceError) as caught:
            to_interval(duration_pb2.Duration(seconds=seconds, nanos=nanos))
        assert caught.value.fields[0].field == "interval"
