"""Reads the GPUs of this instance through NVML.

Owns the NVML session and one thread, which reads all GPUs once a second and listens for critical
Xid events; :meth:`NvmlMonitor.read` returns the latest result and never blocks. A call into a sick
driver can hang for seconds: only the thread waits for it.

Which GPUs: those that CUDA shows this process, that is ``CUDA_VISIBLE_DEVICES`` (indexes, GPU UUIDs
or their unique beginnings, MIG UUIDs) or else all of them.

Failure modes: without NVML or without a GPU there are no readings; a value that the device does not
support is None, one value alone; a lost GPU keeps its identity with every value None until it
answers again, its Xid counts kept; a reading older than ``STALE_S`` (the driver hangs) counts as
none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

from inference_svc.adapters.no_gpus import NoGpus
from inference_svc.ports import GpuMonitor, GpuReading
from sluice import logs

_log = logs.get(__name__)

READ_EVERY_S = 1.0
STALE_S = 10.0
CLOSE_S_MAX = 2.0

T = TypeVar("T")
# Handles, event sets and structures of NVML are opaque here.
Handle = object


class NvmlUtilization(Protocol):
    """Percent of time, 0 to 100."""

    gpu: int


class NvmlMemory(Protocol):
    """Bytes."""

    used: int
    total: int


class NvmlEvent(Protocol):
    """One event; ``eventData`` is the Xid."""

    device: Handle
    eventType: int  # noqa: N815  # NVML's name
    eventData: int  # noqa: N815  # NVML's name


class Nvml(Protocol):
    """The part of the module ``pynvml`` that is used; names as NVML's."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle: ...
    def nvmlDeviceGetIndex(self, handle: Handle) -> int: ...
    def nvmlDeviceGetUUID(self, handle: Handle) -> str | bytes: ...
    def nvmlDeviceGetName(self, handle: Handle) -> str | bytes: ...
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Handle) -> Handle: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> NvmlUtilization: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> NvmlMemory: ...
    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle) -> int: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, kind: int, counter: int) -> int: ...
    def nvmlEventSetCreate(self) -> Handle: ...
    def nvmlEventSetFree(self, events: Handle) -> None: ...
    def nvmlDeviceRegisterEvents(self, handle: Handle, kinds: int, events: Handle) -> None: ...
    def nvmlEventSetWait_v2(self, events: Handle, timeout_ms: int) -> NvmlEvent: ...


# Constants of NVML's interface (nvml.h), which never change their values.
TEMPERATURE_GPU = 0
MEMORY_ERROR_TYPE_UNCORRECTED = 1
VOLATILE_ECC = 0  # since the driver loaded
EVENT_TYPE_XID_CRITICAL = 0x8
# Bit of NVML's clock event reasons -> name of the proto's ThrottleReason without its prefix.
# Idle clocks (0x1), application clocks (0x2) and sync boost (0x10) lower nothing by a fault.
THROTTLE_REASONS: Mapping[int, str] = {
    0x04: "SW_POWER_CAP",
    0x08: "HW_SLOWDOWN",
    0x20: "SW_THERMAL",
    0x40: "HW_THERMAL",
    0x80: "HW_POWER_BRAKE",
}


@dataclass(slots=True)
class _Gpu:
    """One device: ``handle`` may be a MIG slice, ``whole`` is the GPU that it is part of."""

    handle: Handle
    whole: Handle
    whole_uuid: str
    index: int
    uuid: str
    name: str
    xid_supported: bool = False
    xid_errors: int = 0
    last_xid: int | None = None


class NvmlMonitor:
    """Fulfils ``GpuMonitor``."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        visible: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        """``visible`` is the value of CUDA_VISIBLE_DEVICES, None where it is not set. Raises
        NVMLError without a driver. ``threaded`` False leaves the reading to :meth:`poll`."""
        self._nvml = nvml
        self._clock = clock
        nvml.nvmlInit()
        try:
            self._gpus = [_identify(nvml, handle) for handle in _find(nvml, visible)]
            self._events = self._listen()
        except Exception:
            nvml.nvmlShutdown()
            raise
        self._readings: tuple[GpuReading, ...] = ()
        self._read_at_s = clock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.poll(0)
        if threaded and self._gpus:
            self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
            self._thread.start()

    def read(self) -> tuple[GpuReading, ...]:
        """See ``GpuMonitor``."""
        if self._ending.is_set() or self._clock() - self._read_at_s > STALE_S:
            return ()
        return self._readings

    def close(self) -> None:
        """See ``GpuMonitor``. Bounded by ``CLOSE_S_MAX``: a hanging driver is left to itself."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
            if self._thread.is_alive():
                return
        if self._events is not None:
            _try(self._nvml, lambda: self._nvml.nvmlEventSetFree(self._events))
        _try(self._nvml, self._nvml.nvmlShutdown)

    def poll(self, wait_ms: int) -> None:
        """Waits for Xid events up to ``wait_ms``, then reads every GPU. Blocks."""
        self._take_events(wait_ms)
        self._readings = tuple(_read(self._nvml, gpu) for gpu in self._gpus)
        self._read_at_s = self._clock()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.poll(int(READ_EVERY_S * 1000) if self._events is not None else 0)
            except Exception as error:  # the readings must go on whatever the library does
                _log.failure("reading the GPUs failed", error)
                self._ending.wait(READ_EVERY_S)
            if self._events is None:
                self._ending.wait(READ_EVERY_S)

    def _listen(self) -> Handle | None:
        """The event set for Xid events; None where no device has them."""
        events = _try(self._nvml, self._nvml.nvmlEventSetCreate)
        if events is None:
            return None
        for gpu in self._gpus:
            try:
                self._nvml.nvmlDeviceRegisterEvents(gpu.whole, EVENT_TYPE_XID_CRITICAL, events)
            except self._nvml.NVMLError:
                continue
            gpu.xid_supported = True
        if any(gpu.xid_supported for gpu in self._gpus):
            return events
        _try(self._nvml, lambda: self._nvml.nvmlEventSetFree(events))
        return None

    def _take_events(self, wait_ms: int) -> None:
        """Counts Xid events until ``wait_ms`` have passed."""
        if self._events is None:
            return
        until_s = self._clock() + wait_ms / 1000
        while True:
            left_s = max(0.0, until_s - self._clock())
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, int(left_s * 1000))
            except self._nvml.NVMLError:
                # A timeout, as a rule. An error that comes at once must not make a busy loop.
                self._ending.wait(max(0.0, until_s - self._clock()))
                return
            self._note_event(event)
            if left_s == 0.0:
                return

    def _note_event(self, event: NvmlEvent) -> None:
        if not event.eventType & EVENT_TYPE_XID_CRITICAL:
            return
        uuid = _try(self._nvml, lambda: _text(self._nvml.nvmlDeviceGetUUID(event.device)))
        for gpu in self._gpus:
            if uuid == gpu.whole_uuid:
                gpu.xid_errors += 1
                gpu.last_xid = int(event.eventData)
                _log.error("a GPU reports an Xid", gpu=gpu.index, xid=gpu.last_xid)


def open_monitor(environ: Mapping[str, str] = os.environ) -> GpuMonitor:
    """The monitor of this process's GPUs; one without readings where there is no NVML."""
    try:
        import pynvml
    except ImportError:
        return NoGpus()
    try:
        return NvmlMonitor(cast("Nvml", pynvml), visible=environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        _log.info("there are no GPU readings", nvml=str(error))
        return NoGpus()


def _find(nvml: Nvml, visible: str | None) -> list[Handle]:
    """Handles of the devices that CUDA shows. Like CUDA, it stops at the first entry that names
    none. Indexes count as NVML counts: with GPUs of several kinds in one machine set
    CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA counts alike."""
    everything = [
        nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
    ]
    if visible is None:
        return everything
    found: list[Handle] = []
    for entry in (part.strip() for part in visible.split(",")):
        handle: Handle | None = None
        if entry.isdecimal():
            handle = everything[int(entry)] if int(entry) < len(everything) else None
        elif entry.startswith("MIG-"):
            handle = _try(nvml, partial(nvml.nvmlDeviceGetHandleByUUID, entry))
        elif entry.startswith("GPU-"):
            named = [one for one in everything if _uuid(nvml, one).startswith(entry)]
            handle = named[0] if len(named) == 1 else None
        if handle is None:
            break
        found.append(handle)
    return found


def _identify(nvml: Nvml, handle: Handle) -> _Gpu:
    """What does not change. A MIG slice is named itself, and counted where its GPU is."""
    whole = _try(nvml, partial(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle))
    if whole is None:
        whole = handle
    return _Gpu(
        handle=handle,
        whole=whole,
        whole_uuid=_uuid(nvml, whole),
        index=_try(nvml, partial(nvml.nvmlDeviceGetIndex, whole)) or 0,
        uuid=_uuid(nvml, handle),
        name=_text(_try(nvml, partial(nvml.nvmlDeviceGetName, handle)) or ""),
    )


def _read(nvml: Nvml, gpu: _Gpu) -> GpuReading:
    """Every value by itself. A slice has its own memory; heat, power and faults are its GPU's."""
    utilization = _try(nvml, partial(nvml.nvmlDeviceGetUtilizationRates, gpu.handle))
    memory = _try(nvml, partial(nvml.nvmlDeviceGetMemoryInfo, gpu.handle))
    power_mw = _try(nvml, partial(nvml.nvmlDeviceGetPowerUsage, gpu.whole))
    temperature = _try(nvml, partial(nvml.nvmlDeviceGetTemperature, gpu.whole, TEMPERATURE_GPU))
    clocks = _try(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu.whole))
    if clocks is None:  # the name before CUDA 12.2
        clocks = _try(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.whole))
    ecc = _try(
        nvml,
        partial(
            nvml.nvmlDeviceGetTotalEccErrors,
            gpu.whole,
            MEMORY_ERROR_TYPE_UNCORRECTED,
            VOLATILE_ECC,
        ),
    )
    return GpuReading(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        utilization=None if utilization is None else utilization.gpu / 100.0,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_watts=None if power_mw is None else power_mw / 1000.0,
        temperature_celsius=None if temperature is None else float(temperature),
        throttle_reasons=tuple(
            name for bit, name in THROTTLE_REASONS.items() if (clocks or 0) & bit
        ),
        ecc_uncorrected_errors=ecc,
        xid_errors=gpu.xid_errors if gpu.xid_supported else None,
        last_xid=gpu.last_xid,
    )


def _try(nvml: Nvml, ask: Callable[[], T]) -> T | None:
    """The answer, or None where the device, the driver or this NVML does not give one."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def _uuid(nvml: Nvml, handle: Handle) -> str:
    return _text(_try(nvml, partial(nvml.nvmlDeviceGetUUID, handle)) or "")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
