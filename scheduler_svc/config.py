"""Settings of the scheduler service: section ``[scheduler]`` of ``sluice.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.domain.agent_gate import AgentLimits
from scheduler_svc.domain.limits import (
    BreakerLimits,
    ClassLimits,
    PoisonLimits,
    RetryLimits,
    SchedulerLimits,
)
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.domain.prices import Prices
from scheduler_svc.domain.run_budget import RunLimits
from sluice.config import ConfigError, section, setting

WEIGHT_MIN, WEIGHT_MAX = 0.01, 100.0


@section("scheduler")
@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything that can be set; times in seconds unless said."""

    name: str = setting("scheduler-0", help="Name of this scheduler in logs, grants and status.")
    bind: str = setting("127.0.0.1:50051", help="Address of the public API; only Envoy calls it.")
    mesh_bind: str = setting(
        "127.0.0.1:50052", help="Address of the mesh-only API for the model calls of agents."
    )
    executions: tuple[str, ...] = setting(
        ("127.0.0.1:50061",), ge=1, le=64, help="gRPC targets of the execution replicas."
    )
    instances: tuple[str, ...] = setting(
        (),
        le=4096,
        help="Instances: name=host:port each, or dns:///host:port for all addresses of a name.",
    )
    state: str = setting(
        "",
        help="Address of the state service: tenants, aliases, quotas, decision records. Empty:"
        " none; then tenants come from the file and quotas are not enforced.",
    )
    tenants_file: Path = setting(
        Path(".sluice/tenants.toml"), help="Tenants and the hashes of their keys."
    )
    keys_dir: Path = setting(
        Path(".sluice/keys"), help="Folder with the private key that signs dispatch grants."
    )
    default_model: str = setting(
        "", help="Model of requests that name none. Empty: the first that generates, by name."
    )
    default_embedding_model: str = setting(
        "",
        help="Model of embedding requests that name none, of documents and of searches. Empty: the"
        " first that embeds: name one where there are several. After a change, documents are put"
        " again.",
    )
    aliases: tuple[str, ...] = setting(
        (), le=1024, help="Further names of models: alias=model each."
    )
    prices: tuple[str, ...] = setting(
        (),
        le=1024,
        help="Prices of models per million tokens: model=prompt:output each, in any one currency.",
    )
    placement: str = setting(
        "weighted",
        choices=tuple(POLICIES),
        help="Policy that chooses the instance; weighted and prefix_affinity look at prefixes.",
    )
    prefix_index_mib: int = setting(
        128, unit="MiB", ge=1, le=65536, help="Memory of the prefix index, if the policy has one."
    )
    report_stale_s: float = setting(
        3.0, unit="s", ge=0.5, le=300.0, help="Age from which an instance's load report is stale."
    )
    stale_reports: str = setting(
        "open",
        choices=("open", "closed"),
        help="An instance with a stale report is used by ledger and credit alone, or not at all.",
    )
    drain_run_max_s: float = setting(
        5.0,
        unit="s",
        ge=0.0,
        le=3600.0,
        help="What is expected to run for longer on an instance that drains goes on elsewhere.",
    )
    no_instance_wait_s: float = setting(
        10.0,
        unit="s",
        ge=0.0,
        le=3600.0,
        help="How long requests wait for a known model that no instance can serve now.",
    )
    breaker_faults: int = setting(
        5, ge=1, le=1000, help="Faults in a row that open an instance's breaker."
    )
    breaker_error_ratio: float = setting(
        0.5, ge=0.01, le=1.0, help="Share of faults in the window that opens it."
    )
    breaker_slow_ratio: float = setting(
        0.8, ge=0.01, le=1.0, help="Share of slow first tokens in the window that opens it."
    )
    breaker_slow_multiple: float = setting(
        8.0,
        ge=1.5,
        le=1000.0,
        help="A first token is slow at this multiple of the expected time.",
    )
    breaker_slow_floor_s: float = setting(
        5.0, unit="s", ge=0.1, le=3600.0, help="No first token before this is slow."
    )
    breaker_volume: int = setting(
        20, ge=1, le=100000, help="Outcomes in the window below which no share opens it."
    )
    breaker_window_s: float = setting(
        30.0, unit="s", ge=1.0, le=3600.0, help="Length of the sliding window."
    )
    breaker_cooldown_s: float = setting(
        5.0, unit="s", ge=0.1, le=600.0, help="How long it stays open the first time; then doubled."
    )
    breaker_cooldown_max_s: float = setting(
        60.0, unit="s", ge=0.1, le=3600.0, help="The longest that it stays open."
    )
    breaker_probes: int = setting(
        3, ge=1, le=100, help="Requests at a time that try an instance whose breaker was open."
    )
    breaker_successes: int = setting(
        2, ge=1, le=100, help="First tokens of such requests that close the breaker."
    )
    agent_runs_max: int = setting(
        64, ge=1, le=1000, help="Open agent runs of a tenant that has no limit of its own."
    )
    agent_utilisation_max: float = setting(
        0.9, ge=0.0, le=1.0, help="No agent run begins while more of a model's places are taken."
    )
    agent_wait_max_s: float = setting(
        2.0,
        unit="s",
        ge=0.0,
        le=3600.0,
        help="No agent run begins while requests of its model are expected to wait longer.",
    )
    agent_steps_max: int = setting(
        50, ge=1, le=10000, help="Model and tool calls of a run; a client may ask for fewer."
    )
    agent_tokens_max: int = setting(
        500000, unit="tokens", ge=1, le=1000000000, help="Tokens of all model calls of a run."
    )
    agent_tool_calls_max: int = setting(100, ge=0, le=10000, help="Tool calls of a run.")
    agent_wall_time_max_s: float = setting(
        3600.0,
        unit="s",
        ge=1.0,
        le=2592000.0,
        help="Time of a run, what it waits for people not counted.",
    )
    agent_cost_max: float = setting(
        1000000.0, ge=0.000001, le=1000000000.0, help="Cost of a run, in the currency of prices."
    )
    run_watches_max: int = setting(
        4096, ge=4, le=100000, help="Runs watched at once in this scheduler; a quarter per tenant."
    )
    run_watch_bytes_max: int = setting(
        32 << 20,
        unit="bytes",
        ge=1 << 20,
        le=1 << 40,
        help="Events that are being written to those who watch runs, each held about three times; a"
        " quarter per tenant. Those that find no room wait.",
    )
    decision_sample_ratio: float = setting(
        0.01,
        ge=0.0,
        le=1.0,
        help="Share of ordinary requests whose decision record is kept; others always are.",
    )
    decision_slow_share: float = setting(
        0.25,
        ge=0.0,
        le=1.0,
        help="A request is slow, and its record kept, beyond this share of its first-token limit.",
    )
    decision_ring_mib: int = setting(
        16, unit="MiB", ge=1, le=4096, help="Decision records kept in this process."
    )
    retry_budget_ratio: float = setting(
        0.1, ge=0.0, le=1.0, help="Further attempts per request served; the first failover is free."
    )
    retry_budget_max: float = setting(
        10.0, ge=1.0, le=10000.0, help="Further attempts that may be saved up."
    )
    retry_budget_min_per_s: float = setting(
        0.1, unit="1/s", ge=0.001, le=1000.0, help="Further attempts per second without traffic."
    )
    failover_per_s: float = setting(
        100.0,
        unit="1/s",
        ge=0.1,
        le=100000.0,
        help="Rate at which requests that one loss orphaned go back to the queue.",
    )
    failover_burst: float = setting(
        16.0, ge=1.0, le=100000.0, help="How many of them go back at once."
    )
    poison_apart_s: float = setting(
        1.0,
        unit="s",
        ge=0.0,
        le=60.0,
        help="Longest wait of a request whose engine died for an instance without another such.",
    )
    quarantine_s: float = setting(
        600.0,
        unit="s",
        ge=1.0,
        le=86400.0,
        help="How long an input that killed engines is refused, and a suspected one remembered.",
    )
    drain_grace_s: float = setting(
        120.0, unit="s", ge=0.0, le=3600.0, help="Longest wait for open requests at shutdown."
    )

    deadline_critical_s: float = setting(
        60.0, unit="s", ge=0.1, le=86400.0, help="Deadline of critical requests that set none."
    )
    deadline_interactive_s: float = setting(
        120.0, unit="s", ge=0.1, le=86400.0, help="Deadline of interactive requests that set none."
    )
    deadline_standard_s: float = setting(
        300.0, unit="s", ge=0.1, le=86400.0, help="Deadline of standard requests that set none."
    )
    deadline_batch_s: float = setting(
        3600.0, unit="s", ge=0.1, le=86400.0, help="Deadline of batch requests that set none."
    )
    deadline_max_s: float = setting(
        3600.0, unit="s", ge=0.1, le=86400.0, help="Longest deadline that a request may set."
    )
    first_token_critical_s: float = setting(
        15.0, unit="s", ge=0.05, le=86400.0, help="First-token limit of critical requests."
    )
    first_token_interactive_s: float = setting(
        30.0, unit="s", ge=0.05, le=86400.0, help="First-token limit of interactive requests."
    )
    first_token_standard_s: float = setting(
        120.0, unit="s", ge=0.05, le=86400.0, help="First-token limit of standard requests."
    )
    first_token_batch_s: float = setting(
        3600.0, unit="s", ge=0.05, le=86400.0, help="First-token limit of batch requests."
    )
    share_interactive: float = setting(
        0.10,
        ge=0.0,
        le=1.0,
        help="What interactive work that waits is owed of what critical work gets.",
    )
    share_standard: float = setting(
        0.05, ge=0.0, le=1.0, help="The same for standard work, of what the classes above it get."
    )
    share_batch: float = setting(
        0.02, ge=0.0, le=1.0, help="The same for batch work, of what the classes above it get."
    )
    queue_critical: int = setting(
        2000, unit="requests", ge=1, le=1000000, help="Most critical requests that wait."
    )
    queue_interactive: int = setting(
        5000, unit="requests", ge=1, le=1000000, help="Most interactive requests that wait."
    )
    queue_standard: int = setting(
        5000, unit="requests", ge=1, le=1000000, help="Most standard requests that wait."
    )
    queue_batch: int = setting(
        20000, unit="requests", ge=1, le=1000000, help="Most batch requests that wait."
    )
    queue_critical_mib: int = setting(
        256, unit="MiB", ge=1, le=65536, help="Most input of critical requests that wait."
    )
    queue_interactive_mib: int = setting(
        512, unit="MiB", ge=1, le=65536, help="Most input of interactive requests that wait."
    )
    queue_standard_mib: int = setting(
        512, unit="MiB", ge=1, le=65536, help="Most input of standard requests that wait."
    )
    queue_batch_mib: int = setting(
        1024, unit="MiB", ge=1, le=65536, help="Most input of batch requests that wait."
    )
    queue_tenant_share: float = setting(
        0.5,
        ge=0.001,
        le=1.0,
        help="Of both bounds of a class, the part of one tenant; never more than is free.",
    )
    tenant_weights: tuple[str, ...] = setting(
        (),
        le=4096,
        help="Tenants that get another part than 1 when they compete: tenant=weight each, "
        "0.01 to 100.",
    )
    inter_token_limit_s: float = setting(
        30.0, unit="s", ge=0.05, le=3600.0, help="Longest pause between two tokens of one output."
    )
    write_cost_us: float = setting(
        150.0, unit="us", ge=1.0, le=10000.0, help="CPU time of one client write, for the flush."
    )
    write_share: float = setting(
        0.3, ge=0.05, le=1.0, help="Share of one core that client writes keep to."
    )
    write_capacity: float = setting(
        0.7, ge=0.05, le=1.0, help="Share of one core beyond which new streams are refused."
    )
    write_limit_s: float = setting(
        30.0, unit="s", ge=0.1, le=3600.0, help="A client that reads nothing for so long is ended."
    )

    def __post_init__(self) -> None:
        # What a range cannot say is refused here, where the command's check sees it too.
        _weights(self.tenant_weights)
        pairs("scheduler.aliases", self.aliases)
        prices(self)


def pairs(where: str, entries: tuple[str, ...]) -> Mapping[str, str]:
    """Entries of the form name=value. Raises ConfigError naming `where`."""
    pairs = {}
    for entry in entries:
        name, separator, value = entry.partition("=")
        if not (name and separator and value):
            raise ConfigError(where, f"{entry!r} is not of the form name=value")
        pairs[name] = value
    return pairs


def prices(config: SchedulerConfig) -> Prices:
    """What tokens cost. Raises ConfigError."""
    try:
        return Prices(config.prices)
    except ValueError as error:
        raise ConfigError("scheduler.prices", str(error)) from error


def agent_limits(config: SchedulerConfig) -> AgentLimits:
    """What the agent gate lets through."""
    return AgentLimits(
        runs_max=config.agent_runs_max,
        utilisation_max=config.agent_utilisation_max,
        wait_max_s=config.agent_wait_max_s,
    )


def run_limits(config: SchedulerConfig) -> RunLimits:
    """The limits of a run that asks for none, and the most that one may ask for."""
    return RunLimits(
        steps_max=config.agent_steps_max,
        tokens_max=config.agent_tokens_max,
        tool_calls_max=config.agent_tool_calls_max,
        wall_time_s=config.agent_wall_time_max_s,
        cost_max=config.agent_cost_max,
    )


@dataclass(frozen=True, slots=True)
class ClassTimes:
    """Limits on time by class, in seconds."""

    deadlines_s: dict[PriorityClass, float]
    first_tokens_s: dict[PriorityClass, float]
    deadline_max_s: float
    inter_token_limit_s: float

    def deadline_s(self, priority_class: PriorityClass) -> float:
        """Total deadline of a request that sets none."""
        return self.deadlines_s[priority_class]

    def first_token_limit_s(self, priority_class: PriorityClass) -> float:
        """Longest wait for the first token."""
        return self.first_tokens_s[priority_class]


def domain_limits(config: SchedulerConfig) -> SchedulerLimits:
    """The domain's numbers, as far as they can be set."""
    return SchedulerLimits(
        classes=_classes(config),
        tenant_weights=_weights(config.tenant_weights),
        prefix_index_bytes=config.prefix_index_mib << 20,
        report_stale_s=config.report_stale_s,
        stale_open=config.stale_reports == "open",
        drain_run_max_s=config.drain_run_max_s,
        no_instance_wait_s=config.no_instance_wait_s,
        breaker=breaker_limits(config),
        retry=RetryLimits(
            budget_ratio=config.retry_budget_ratio,
            budget_max=config.retry_budget_max,
            budget_min_per_s=config.retry_budget_min_per_s,
            failover_per_s=config.failover_per_s,
            failover_burst=config.failover_burst,
        ),
        poison=PoisonLimits(
            apart_s=config.poison_apart_s,
            suspicion_s=config.quarantine_s,
            quarantine_s=config.quarantine_s,
        ),
    )


def _classes(config: SchedulerConfig) -> dict[PriorityClass, ClassLimits]:
    bounds = {
        PriorityClass.CRITICAL: (config.queue_critical, config.queue_critical_mib, 0.0),
        PriorityClass.INTERACTIVE: (
            config.queue_interactive,
            config.queue_interactive_mib,
            config.share_interactive,
        ),
        PriorityClass.STANDARD: (
            config.queue_standard,
            config.queue_standard_mib,
            config.share_standard,
        ),
        PriorityClass.BATCH: (config.queue_batch, config.queue_batch_mib, config.share_batch),
    }
    part = config.queue_tenant_share
    return {
        cls: ClassLimits(
            requests_max=requests,
            bytes_max=mib << 20,
            tenant_requests_max=max(1, int(part * requests)),
            tenant_bytes_max=int(part * (mib << 20)),
            share=share,
        )
        for cls, (requests, mib, share) in bounds.items()
    }


def _weights(entries: tuple[str, ...]) -> dict[str, float]:
    weights = {}
    for entry in entries:
        tenant, _, text = entry.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not tenant or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise ConfigError(
                "scheduler.tenant_weights",
                f"{entry!r} is not tenant=weight with a weight of {WEIGHT_MIN} to {WEIGHT_MAX}",
            )
        weights[tenant] = weight
    return weights


def breaker_limits(config: SchedulerConfig) -> BreakerLimits:
    """When instances are barred and tried again."""
    return BreakerLimits(
        faults_max=config.breaker_faults,
        error_ratio=config.breaker_error_ratio,
        slow_ratio=config.breaker_slow_ratio,
        volume_min=config.breaker_volume,
        window_s=config.breaker_window_s,
        cooldown_s=config.breaker_cooldown_s,
        cooldown_max_s=config.breaker_cooldown_max_s,
        probes_max=config.breaker_probes,
        closes_after=config.breaker_successes,
        slow_multiple=config.breaker_slow_multiple,
        slow_floor_s=config.breaker_slow_floor_s,
    )


def class_times(config: SchedulerConfig) -> ClassTimes:
    """The limits on time, by class."""
    return ClassTimes(
        deadlines_s={
            PriorityClass.CRITICAL: config.deadline_critical_s,
            PriorityClass.INTERACTIVE: config.deadline_interactive_s,
            PriorityClass.STANDARD: config.deadline_standard_s,
            PriorityClass.BATCH: config.deadline_batch_s,
        },
        first_tokens_s={
            PriorityClass.CRITICAL: config.first_token_critical_s,
            PriorityClass.INTERACTIVE: config.first_token_interactive_s,
            PriorityClass.STANDARD: config.first_token_standard_s,
            PriorityClass.BATCH: config.first_token_batch_s,
        },
        deadline_max_s=config.deadline_max_s,
        inter_token_limit_s=config.inter_token_limit_s,
    )
