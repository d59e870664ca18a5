"""Every bound and policy number of the scheduling domain, by name, with unit and default.

Owns nothing that changes: one frozen value is built at start and passed in. Where a default comes
from a peer or a measurement, the comment says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.domain.model import PriorityClass


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Bounds of one priority class; per tenant they apply inside the class.

    ``share``: while the class waits it is owed so many expected tokens for each one dispatched of
    a higher class (0 to 1; ignored for the highest class)."""

    requests_max: int
    bytes_max: int
    tenant_requests_max: int
    tenant_bytes_max: int
    share: float


_GIB = 1 << 30
_MIB = 1 << 20


def _classes() -> dict[PriorityClass, ClassLimits]:
    return {
        PriorityClass.CRITICAL: ClassLimits(2_000, 256 * _MIB, 1_000, 128 * _MIB, 0.0),
        PriorityClass.INTERACTIVE: ClassLimits(5_000, 512 * _MIB, 2_500, 256 * _MIB, 0.10),
        PriorityClass.STANDARD: ClassLimits(5_000, 512 * _MIB, 2_500, 256 * _MIB, 0.05),
        PriorityClass.BATCH: ClassLimits(20_000, 1 * _GIB, 10_000, 512 * _MIB, 0.02),
    }


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When an instance is barred and tried again. Starting points are peers' defaults: 5 faults in
    a row (vllm-project/router, SMG's worker), 5 s (LiteLLM) growing to 60 s (SMG)."""

    faults_max: int = 5
    error_ratio: float = 0.5
    slow_ratio: float = 0.8
    volume_min: int = 20
    window_s: float = 30.0
    cooldown_s: float = 5.0
    cooldown_max_s: float = 60.0
    probes_max: int = 3
    closes_after: int = 2
    # A first token is slow beyond this multiple of what was to be expected, but never before the
    # floor.
    slow_multiple: float = 8.0
    slow_floor_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often and how fast failed attempts are made again. ``budget_max`` is small: with all of
    1,000 calls failing, 10 further attempts are 1 %."""

    budget_ratio: float = 0.1
    budget_max: float = 10.0
    budget_min_per_s: float = 0.1
    # What one death orphaned returns at this rate, and so many at once.
    failover_per_s: float = 100.0
    failover_burst: float = 16.0


@dataclass(frozen=True, slots=True)
class PoisonLimits:
    """When an input counts as what kills engines."""

    # Deaths that convict: on so many instances, or so many of whichever.
    instances_max: int = 2
    deaths_max: int = 3
    # A suspect goes on when no other one is where it could go; so long it waits for that.
    apart_s: float = 1.0
    # Output tokens beyond the point at which an attempt died that clear its input: the count is as
    # old as a frame.
    cleared_tokens: int = 16
    # How long a suspicion is remembered, and how long a poisonous input is refused.
    suspicion_s: float = 600.0
    quarantine_s: float = 600.0
    inputs_max: int = 1_024


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's numbers. Times in seconds, sizes in tokens or bytes."""

    classes: dict[PriorityClass, ClassLimits] = field(default_factory=_classes)
    # Of tenants that are to get another part than one where they compete (see ``fair``).
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    # Counters of tokens served that are kept of tenants that neither wait nor run, per model and
    # class: about 400 bytes each.
    tenants_idle_max: int = 4_096
    # What a class is owed goes ahead of waiting critical work only when it is so many requests
    # more than one. 0: at once, so that critical work waits for others in every burst; 16 is hardly
    # better than 4, and makes a lower class wait that much longer under critical work without end.
    debts_put_off: int = 4

    # Fleet. Columns are allocated once at this size: 4,096 rows take about 1 MB.
    instances_max: int = 4_096
    # A report older than this counts as stale (reports come every 0.25 to 1 s).
    report_stale_s: float = 3.0
    # True: an instance with a stale report is used by ledger and credit alone; False: not at all.
    stale_open: bool = True
    # Sequences that may be started on an instance before its first credit. 0: none.
    initial_credit_sequences: int = 0
    # An instance that said NO_ROOM takes nothing for this long, unless it sends a credit, a report
    # or an end before.
    no_room_pause_s: float = 0.1
    # Share of an instance's KV memory that is never planned for: expected outputs are guesses.
    kv_reserve: float = 0.03
    # Prompt tokens outstanding per instance, as a multiple of its step_tokens_max: enough that the
    # next step is always full, little enough that running streams keep their pace.
    prefill_steps_max: float = 2.0

    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    retry: RetryLimits = field(default_factory=RetryLimits)
    poison: PoisonLimits = field(default_factory=PoisonLimits)

    # Attempts on instances that fail before the first token.
    attempts_max: int = 3
    # How often a request that was begun goes on after a failure.
    migrations_max: int = 5
    # How often a ticket may give its place away (to a higher class, or to a lowered credit), and
    # how long it has run at least before each time: it gets somewhere, whatever happens.
    yields_max: int = 4
    yield_run_min_s: float = 1.0
    # A waiting ticket takes the place of another after this long: room that comes free by itself
    # within it is used first. At most so many do at once, of so many that run and were looked at.
    preemption_wait_s: float = 0.1
    preemptions_per_look: int = 8
    preemption_candidates_max: int = 1_024
    # Nothing is looked at again for yields before this time.
    yield_look_s: float = 0.1
    # An instance that holds more than its credit is given so long to end something by itself.
    credit_grace_s: float = 0.25
    # What is expected to run for longer on an instance that drains goes on elsewhere.
    drain_run_max_s: float = 5.0
    # The instance itself ends a running ticket at its deadline; this much later the scheduler does.
    deadline_grace_s: float = 0.05
    # How long tickets wait for a known model that no instance can serve now (restart of an engine).
    no_instance_wait_s: float = 10.0
    # Tickets per model and turn that may be set aside because they fit nowhere, while later ones
    # are tried.
    bypass_max: int = 4
    # How often a ticket may be passed over by a later one of its class before instances that it
    # could use take nothing else.
    passed_over_max: int = 16

    # Prefix index, made only for a policy that reads it. 76 bytes a block: 128 MiB hold 1.7 million
    # blocks, 56 million tokens at 32 tokens each.
    prefix_index_bytes: int = 128 * _MIB
    # A block is at least this long, in whole KV blocks of the engine.
    prefix_block_tokens_min: int = 32
    # A prefix that nobody was sent for so long is not expected in any cache.
    prefix_ttl_s: float = 3_600.0
    # Tickets per model and turn, and the longest time, that wait for an instance with their prefix
    # while others have room.
    holds_max: int = 16
    hold_max_s: float = 10.0

    # Refusals say when to come back: the expected wait, between these bounds, +/- the jitter.
    retry_after_min_s: float = 0.5
    retry_after_max_s: float = 300.0
    retry_after_jitter: float = 0.2

    # Learnt estimates.
    models_max: int = 256
    tenant_models_max: int = 4_096
    default_bytes_per_token: float = 3.5
    default_output_tokens: int = 128
