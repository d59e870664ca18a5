"""How often a client's stream is written to: the budget of one process for client writes.

A write of one message to one client costs this process about 150 µs, however much text the
message carries (docs/BENCHMARKS.md). So the first token leaves at once, and after that a stream
is flushed at an interval that grows with the number of streams written to, such that all writes
together keep a bounded share of one core. The interval is capped by the priority class: past the
point where the caps no longer fit into the process's write capacity, new streams are refused.

Only streams that were dispatched count as written to: what waits in the queue writes nothing, and a
long queue of one class must not refuse another.

Pure and synchronous; owned by the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.domain.model import PriorityClass

FLUSH_CAP_S: Mapping[PriorityClass, float] = {
    PriorityClass.CRITICAL: 0.020,
    PriorityClass.INTERACTIVE: 0.050,
    PriorityClass.STANDARD: 0.250,
    PriorityClass.BATCH: 1.000,
}
"""Longest time in seconds that text waits for a flush, by class."""


@dataclass(slots=True)
class FlushBudget:
    """Counts open streams per class, those written to apart, and says how often each is flushed.

    ``write_cost_s``: CPU seconds of one client write. ``write_share``: share of one core that
    writes keep when no cap binds. ``capacity_share``: share of one core that writes may take at
    most, when caps bind; a stream beyond it is refused."""

    write_cost_s: float = 150e-6
    write_share: float = 0.3
    capacity_share: float = 0.7
    _open: dict[PriorityClass, int] = field(default_factory=lambda: dict.fromkeys(PriorityClass, 0))
    _open_streams: int = 0
    _written: dict[PriorityClass, int] = field(
        default_factory=lambda: dict.fromkeys(PriorityClass, 0)
    )
    _written_streams: int = 0

    @property
    def open_streams(self) -> int:
        """Streams open now, over all classes."""
        return self._open_streams

    @property
    def written_streams(self) -> int:
        """Streams that were dispatched and are open, over all classes."""
        return self._written_streams

    def open_by_class(self) -> Mapping[PriorityClass, int]:
        """Streams open now, by class."""
        return self._open

    def interval_s(self, priority_class: PriorityClass) -> float:
        """Seconds between two flushes of one stream of this class."""
        fair = self._written_streams * self.write_cost_s / self.write_share
        return min(FLUSH_CAP_S[priority_class], fair)

    def can_open(self, priority_class: PriorityClass) -> bool:
        """Whether one more stream of this class keeps all writes within the capacity."""
        fair = (self._written_streams + 1) * self.write_cost_s / self.write_share
        return self._load(fair, extra=priority_class) <= self.capacity_share

    def open(self, priority_class: PriorityClass) -> None:
        """Counts a stream in."""
        self._open[priority_class] += 1
        self._open_streams += 1

    def close(self, priority_class: PriorityClass) -> None:
        """Counts a stream out."""
        assert self._open[priority_class] > 0, "a stream was closed twice"
        self._open[priority_class] -= 1
        self._open_streams -= 1

    def begin(self, priority_class: PriorityClass) -> None:
        """An open stream was dispatched: it is written to from now on."""
        self._written[priority_class] += 1
        self._written_streams += 1

    def end(self, priority_class: PriorityClass) -> None:
        """It is written to no more."""
        assert self._written[priority_class] > 0, "a stream ended twice"
        self._written[priority_class] -= 1
        self._written_streams -= 1

    def _load(self, fair_s: float, extra: PriorityClass) -> float:
        """Share of a core that writes take at the interval ``fair_s`` under the caps."""
        writes_per_s = 0.0
        for priority_class, count in self._written.items():
            streams = count + (1 if priority_class is extra else 0)
            if streams:
                writes_per_s += streams / min(FLUSH_CAP_S[priority_class], fair_s)
        return writes_per_s * self.write_cost_s
