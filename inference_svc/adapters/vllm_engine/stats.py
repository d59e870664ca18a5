"""Reads the statistics that vLLM's scheduler reports after every engine step.

Owns the latest scheduler state and short windows of rates. vLLM calls :meth:`record` on the event
loop once per engine step; :meth:`read` is called there too, so nothing is locked. A record costs a
few microseconds. Nothing is printed.

It stands in for vLLM's Prometheus logger, which costs several histogram updates per token and
serves an endpoint that Sluice does not have; hence the base class.

Failure modes: before the first step everything but the batch size is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import CachingMetrics

from inference_svc.ports import EngineStats

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

BUCKET_S = 0.25
# Rates are means over the last two seconds: long enough to be steady, short enough that a scheduler
# that asks every 250 ms sees a change.
BUCKETS = 8


@dataclass(slots=True)
class _Bucket:
    number: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0


class SchedulerStatistics(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is untyped here
    """One reader for all data-parallel engines of this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # The base's own set-up, which registers metrics, is left out on purpose.
        self._clock = clock
        self._began_s = clock()
        self._by_engine: dict[int, Any] = {}
        self._prefix = CachingMetrics()
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self._preemptions = 0
        self.last_step_s: float | None = None
        """Loop time of the latest step; None before the first."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """One engine step."""
        now = self._clock()
        self.last_step_s = now
        if scheduler_stats is not None:
            self._by_engine[engine_idx] = scheduler_stats
            self._prefix.observe(scheduler_stats.prefix_cache_stats)
        if iteration_stats is None:
            return
        self._preemptions += iteration_stats.num_preempted_reqs
        bucket = self._bucket(now)
        bucket.prompt_tokens += iteration_stats.prompt_token_stats.computed
        bucket.output_tokens += iteration_stats.num_generation_tokens
        if iteration_stats.inter_token_latencies_iter:
            # The shortest gap is the time since the previous step; a sequence that had to wait or
            # was preempted shows a longer one.
            bucket.steps += 1
            bucket.step_s += min(iteration_stats.inter_token_latencies_iter)

    def log(self) -> None:
        """vLLM's moment to print. Nothing is printed."""

    def log_engine_initialized(self) -> None:
        """As above."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Sluice does not put engines to sleep."""

    def record_admission_rejection(self, reason: str) -> None:
        """Sluice admits by credits; vLLM's own queue limits are off."""

    def read(self, *, kv_tokens: int, sequences_max: int) -> EngineStats:
        """The statistics now. ``kv_tokens`` is the size of the KV cache, 0 where there is none."""
        if not self._by_engine:
            return EngineStats(sequences_max=sequences_max)
        engines = list(self._by_engine.values())
        used = None
        if kv_tokens:
            usage = sum(stats.kv_cache_usage for stats in engines) / len(engines)
            used = round(usage * kv_tokens)
        now = self._clock()
        oldest = self._number(now) - BUCKETS + 1
        window = [bucket for bucket in self._buckets if bucket.number >= oldest]
        covered_s = min(now - oldest * BUCKET_S, max(now - self._began_s, BUCKET_S))
        steps = sum(bucket.steps for bucket in window)
        return EngineStats(
            running=sum(stats.num_running_reqs for stats in engines),
            waiting=sum(
                stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in engines
            ),
            kv_tokens_used=used,
            kv_tokens_free=None if used is None else kv_tokens - used,
            prefix_hit_rate=None if self._prefix.empty else float(self._prefix.hit_rate),
            prompt_tokens_per_s=sum(bucket.prompt_tokens for bucket in window) / covered_s,
            output_tokens_per_s=sum(bucket.output_tokens for bucket in window) / covered_s,
            sequences_max=sequences_max,
            preemptions=self._preemptions,
            step_ms=1000.0 * sum(bucket.step_s for bucket in window) / steps if steps else None,
        )

    def _number(self, now: float) -> int:
        return int(now / BUCKET_S)

    def _bucket(self, now: float) -> _Bucket:
        number = self._number(now)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]


def statistics_factory(
    clock: Callable[[], float], made: Callable[[SchedulerStatistics], None]
) -> Any:  # a class, of which vLLM makes the instance
    """The class that vLLM is given as a stat logger: vLLM makes the one instance, which ``made``
    receives. ``clock`` is the event loop's."""

    class Bound(SchedulerStatistics):
        def __init__(self, vllm_config: object, engine_indexes: object) -> None:
            super().__init__(clock)
            made(self)

    return Bound
