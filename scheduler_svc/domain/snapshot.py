"""The state of the scheduler as plain numbers, for metrics and the status command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.domain.fleet import Instance
from scheduler_svc.domain.ledger import Load
from scheduler_svc.domain.model import InstanceName, Line, Outcome, PriorityClass


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance. ``breaker``: the name of a ``BreakerState``, ``breaker_opened`` how often it
    opened. Counts are this scheduler's own; ``foreign_sequences`` are others'. Credits are
    ``None`` before the first one."""

    model: str
    serving: bool
    draining: bool
    gpu_fault: bool
    reachable: bool
    stale: bool
    simulated: bool
    breaker: str
    breaker_opened: int
    running: int
    prefill_tokens: int
    kv_tokens: int
    foreign_sequences: int
    credit_sequences: int | None
    credit_kv_tokens: int | None
    prefill_tokens_per_s: float
    step_s: float

    @classmethod
    def of(cls, instance: Instance, load: Load) -> InstanceStatus:
        return cls(
            model=instance.report.model,
            serving=instance.report.serving and not instance.removed,
            draining=instance.drains,
            gpu_fault=instance.gpu_fault,
            reachable=instance.reachable,
            stale=instance.stale,
            simulated=instance.report.simulated,
            breaker=instance.breaker.state.value,
            breaker_opened=instance.breaker.opened,
            running=load.sequences,
            prefill_tokens=load.prefill_tokens,
            kv_tokens=load.kv_tokens,
            foreign_sequences=instance.foreign_sequences,
            credit_sequences=instance.credit_sequences,
            credit_kv_tokens=instance.credit_kv_tokens,
            prefill_tokens_per_s=instance.prefill_tokens_per_s,
            step_s=instance.step_s,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``submitted`` = sum of ``outcomes`` + waiting + running + those between two attempts.
    ``refused_reports``: reports of instances for which the fleet had no row.
    ``prefix_tokens_expected``: prompt tokens that placement expected in the caches of the chosen
    instances; ``prefix_tokens_cached``: those that the engines found, for tickets with a prefix.
    ``returning``: those of them on their way back to the queue. ``retries`` and
    ``retries_refused``: attempts that the retry budget allowed and did not. ``suspected``: inputs
    that were there when an engine died; ``poisoned``: those that are refused for it.
    ``moves``: how often a request went on later or elsewhere, by cause: failure, drain, credit,
    preempted. ``prefix_evictions``: blocks that the index gave up for others at its bound."""

    submitted: int
    outcomes: Mapping[Outcome, int]
    waiting: Mapping[PriorityClass, int]
    waiting_bytes: Mapping[PriorityClass, int]
    waiting_lines: Mapping[Line, int]
    running: int
    instances: Mapping[InstanceName, InstanceStatus]
    refused_reports: int
    draining: bool
    prefix_tokens_expected: int = 0
    prefix_tokens_cached: int = 0
    prefix_evictions: int = 0
    moves: Mapping[str, int] = field(default_factory=dict)
    returning: int = 0
    retries: int = 0
    retries_refused: int = 0
    suspected: int = 0
    poisoned: int = 0
