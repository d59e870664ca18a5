"""The GPU monitor over a scripted NVML: no GPU is needed, and none was used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from inference_svc.adapters import nvml_monitor
from inference_svc.adapters.no_gpus import NoGpus
from inference_svc.adapters.nvml_monitor import STALE_S, NvmlMonitor, open_monitor
from inference_svc.ports import GpuReading
from sluice.inference.v1 import load_pb2


class FakeNvmlError(Exception):
    """What pynvml raises."""


@dataclass
class Figures:
    """A structure of NVML, by its names."""

    gpu: int = 0
    used: int = 0
    total: int = 0


@dataclass
class Event:
    """An event of NVML, by its names."""

    device: object
    eventType: int  # noqa: N815
    eventData: int  # noqa: N815


@dataclass
class FakeGpu:
    """A device: the answer of each query by name; a missing one is not supported."""

    uuid: str
    values: dict[str, object] = field(default_factory=dict)
    lost: bool = False
    parent: FakeGpu | None = None


def healthy_values() -> dict[str, object]:
    """What a data-centre GPU answers."""
    return {
        "UtilizationRates": Figures(gpu=37),
        "MemoryInfo": Figures(used=4 << 30, total=80 << 30),
        "PowerUsage": 251_500,
        "Temperature": 61,
        "CurrentClocksEventReasons": 0x1 | 0x04 | 0x40,
        "TotalEccErrors": 2,
        "Events": True,
    }


class FakeNvml:
    """The part of ``pynvml`` that the monitor uses."""

    NVMLError = FakeNvmlError

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus
        self.slices: list[FakeGpu] = []
        self.events: list[Event] = []
        self.sessions = 0
        self.hidden: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "hidden") if name.startswith("nvml") else False:
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in (*self.gpus, *self.slices):
            if gpu.uuid == uuid:
                return gpu
        raise FakeNvmlError("not found")

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:
        return self.gpus.index(gpu)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> bytes:
        return gpu.uuid.encode()

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return "Fake 80GB"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu:
        if gpu.parent is None:
            raise FakeNvmlError("not a slice")
        return gpu.parent

    def _answer(self, gpu: FakeGpu, name: str) -> Any:
        if gpu.lost:
            raise FakeNvmlError("GPU is lost")
        if name not in gpu.values:
            raise FakeNvmlError("not supported")
        return gpu.values[name]

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "UtilizationRates")

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "MemoryInfo")

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "PowerUsage")

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> Any:
        assert sensor == 0
        return self._answer(gpu, "Temperature")

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "CurrentClocksEventReasons")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "CurrentClocksEventReasons")

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> Any:
        assert (kind, counter) == (1, 0)
        return self._answer(gpu, "TotalEccErrors")

    def nvmlEventSetCreate(self) -> object:
        return self.events

    def nvmlEventSetFree(self, events: object) -> None:
        assert events is self.events

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, kinds: int, events: object) -> None:
        assert kinds == 0x8
        self._answer(gpu, "Events")

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Event:
        if self.events:
            return self.events.pop(0)
        raise FakeNvmlError("timeout")


def monitor(nvml: FakeNvml, visible: str | None = None, **more: Any) -> NvmlMonitor:
    """A monitor that reads when told to."""
    return NvmlMonitor(cast("Any", nvml), visible=visible, threaded=False, **more)


def test_every_value_is_read_in_the_units_of_the_port() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", healthy_values()))
    assert monitor(nvml).read() == (
        GpuReading(
            index=0,
            uuid="GPU-a",
            name="Fake 80GB",
            utilization=0.37,
            memory_used_bytes=4 << 30,
            memory_total_bytes=80 << 30,
            power_watts=251.5,
            temperature_celsius=61.0,
            throttle_reasons=("SW_POWER_CAP", "HW_THERMAL"),
            ecc_uncorrected_errors=2,
            xid_errors=0,
            last_xid=None,
        ),
    )


def test_what_a_device_does_not_support_is_absent_and_not_zero() -> None:
    [reading] = monitor(FakeNvml(FakeGpu("GPU-a"))).read()
    assert reading == GpuReading(index=0, uuid="GPU-a", name="Fake 80GB")


@pytest.mark.parametrize("missing", sorted(healthy_values()))
def test_one_missing_value_leaves_the_others(missing: str) -> None:
    values = healthy_values()
    del values[missing]
    [whole] = monitor(FakeNvml(FakeGpu("GPU-a", healthy_values()))).read()
    [reading] = monitor(FakeNvml(FakeGpu("GPU-a", values))).read()
    fields = {
        "UtilizationRates": {"utilization"},
        "MemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
        "PowerUsage": {"power_watts"},
        "Temperature": {"temperature_celsius"},
        "CurrentClocksEventReasons": {"throttle_reasons"},
        "TotalEccErrors": {"ecc_uncorrected_errors"},
        "Events": {"xid_errors"},
    }[missing]
    differing = {
        name
        for name in GpuReading.__dataclass_fields__
        if getattr(whole, name) != getattr(reading, name)
    }
    assert differing == fields
    assert all(not getattr(reading, name) for name in fields)


def test_an_older_library_names_the_clock_reasons_otherwise() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", healthy_values()))
    nvml.hidden = {"nvmlDeviceGetCurrentClocksEventReasons"}
    [reading] = monitor(nvml).read()
    assert reading.throttle_reasons == ("SW_POWER_CAP", "HW_THERMAL")


def test_every_throttle_reason_is_one_of_the_contract() -> None:
    known = set(load_pb2.ThrottleReason.keys())
    for name in nvml_monitor.THROTTLE_REASONS.values():
        assert f"THROTTLE_REASON_{name}" in known


def test_a_lost_gpu_keeps_its_name_and_comes_back() -> None:
    gpu = FakeGpu("GPU-a", healthy_values())
    watched = monitor(FakeNvml(gpu))
    gpu.lost = True
    watched.poll(0)
    [reading] = watched.read()
    assert reading == GpuReading(index=0, uuid="GPU-a", name="Fake 80GB", xid_errors=0)
    gpu.lost = False
    watched.poll(0)
    assert watched.read()[0].utilization == 0.37


def test_xid_events_are_counted_for_their_own_gpu() -> None:
    first, second = FakeGpu("GPU-a", healthy_values()), FakeGpu("GPU-b", healthy_values())
    nvml = FakeNvml(first, second)
    watched = monitor(nvml)
    nvml.events += [Event(second, 0x8, 79), Event(second, 0x8, 48), Event(first, 0x1, 5)]
    for _ in range(3):
        watched.poll(0)
    one, other = watched.read()
    assert (one.xid_errors, one.last_xid) == (0, None)
    assert (other.xid_errors, other.last_xid) == (2, 48)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aa1", "GPU-ab2", "GPU-b3"]),
        ("", []),
        ("-1", []),
        ("2", ["GPU-b3"]),
        ("1, 0", ["GPU-ab2", "GPU-aa1"]),
        ("GPU-ab2", ["GPU-ab2"]),
        ("GPU-b", ["GPU-b3"]),
        ("GPU-a", []),
        ("0,7,1", ["GPU-aa1"]),
        ("MIG-x", ["MIG-x"]),
        ("MIG-unknown", []),
        ("NoDevFiles", []),
    ],
)
def test_only_the_gpus_that_cuda_shows_are_read(visible: str | None, uuids: list[str]) -> None:
    gpus = [FakeGpu(uuid, healthy_values()) for uuid in ("GPU-aa1", "GPU-ab2", "GPU-b3")]
    nvml = FakeNvml(*gpus)
    nvml.slices = [FakeGpu("MIG-x", parent=gpus[1])]
    assert [reading.uuid for reading in monitor(nvml, visible).read()] == uuids


def test_a_slice_has_its_own_memory_and_the_heat_and_faults_of_its_gpu() -> None:
    whole = FakeGpu("GPU-a", healthy_values())
    nvml = FakeNvml(FakeGpu("GPU-0", healthy_values()), whole)
    memory = {"MemoryInfo": Figures(used=1 << 30, total=10 << 30)}
    nvml.slices = [FakeGpu("MIG-x", dict(memory), parent=whole)]
    watched = monitor(nvml, "MIG-x")
    nvml.events.append(Event(whole, 0x8, 94))
    watched.poll(0)
    [reading] = watched.read()
    assert (reading.index, reading.uuid) == (1, "MIG-x")
    assert reading.memory_total_bytes == 10 << 30
    assert reading.utilization is None
    assert reading.power_watts == 251.5
    assert reading.last_xid == 94


def test_a_reading_that_has_grown_old_counts_as_none() -> None:
    now = 100.0
    watched = monitor(FakeNvml(FakeGpu("GPU-a", healthy_values())), clock=lambda: now)
    now += STALE_S
    assert watched.read()
    now += 0.1
    assert watched.read() == ()


def test_close_releases_nvml_once_and_ends_the_thread() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a", healthy_values()))
    watched = NvmlMonitor(cast("Any", nvml))
    assert nvml.sessions == 1
    watched.close()
    watched.close()
    assert nvml.sessions == 0
    assert watched.read() == ()


def test_a_failed_set_up_releases_nvml() -> None:
    nvml = FakeNvml(FakeGpu("GPU-a"))
    nvml.hidden = {"nvmlDeviceGetHandleByIndex"}
    with pytest.raises(AttributeError):
        monitor(nvml)
    assert nvml.sessions == 0


def test_without_a_driver_there_are_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    opened = open_monitor({})
    assert isinstance(opened, NoGpus)
    assert opened.read() == ()


def test_what_cuda_shows_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    fake = FakeNvml(FakeGpu("GPU-a", healthy_values()), FakeGpu("GPU-b", healthy_values()))
    names: Mapping[str, Callable[..., Any]] = {
        name: getattr(fake, name) for name in dir(FakeNvml) if name.startswith("nvml")
    }
    for name, function in names.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.setattr(pynvml, "NVMLError", FakeNvmlError)
    opened = open_monitor({"CUDA_VISIBLE_DEVICES": "1"})
    try:
        assert [reading.uuid for reading in opened.read()] == ["GPU-b"]
    finally:
        opened.close()
