"""The GPU monitor of a machine without NVML: there is nothing to read, and that is no error."""

from __future__ import annotations

from inference_svc.ports import GpuReading


class NoGpus:
    """See :class:`inference_svc.ports.GpuMonitor`."""

    def read(self) -> tuple[GpuReading, ...]:
        return ()

    def close(self) -> None:
        """Nothing to release."""
