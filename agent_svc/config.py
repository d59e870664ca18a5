"""Settings of the agent service: section ``[agent]`` of ``sluice.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice.config import section, setting


@section("agent")
@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Everything that can be set; times in seconds unless said."""

    name: str = setting("agent-0", help="Name of this replica in logs and telemetry.")
    bind: str = setting("127.0.0.1:50071", help="Address that execution services call.")
    state: str = setting("127.0.0.1:50091", help="Address of the state service.")
    schedulers: tuple[str, ...] = setting(
        ("127.0.0.1:50052",),
        unit="addresses",
        ge=1,
        le=64,
        help="Mesh addresses of the schedulers. A run keeps to one while that answers.",
    )
    folder: Path | None = setting(
        None, help="What relative paths of tools count from. Unset: the configuration's folder."
    )
    runs_max: int = setting(200, unit="runs", ge=1, le=1024, help="Runs that are held at once.")
    tenant_share: float = setting(
        0.75,
        unit="of runs_max",
        ge=0.1,
        le=1.0,
        help="Most runs that one tenant holds here; less, the more others hold. 1: all.",
    )
    urgent_share: float = setting(
        0.1,
        unit="of runs_max",
        ge=0.0,
        le=0.9,
        help="Slots that STANDARD and BATCH leave free for CRITICAL and INTERACTIVE.",
    )
    run_history_bytes_max: int = setting(
        8 << 20,
        unit="bytes",
        ge=1 << 16,
        le=1 << 30,
        help="Events of one run; a longer one ends with RUN_TOO_LONG.",
    )
    history_bytes_max: int = setting(
        256 << 20,
        unit="bytes",
        ge=1 << 20,
        le=1 << 40,
        help="Events of all runs that are held; beyond that none is claimed.",
    )
    lease_s: float = setting(
        5.0, unit="s", ge=1.0, le=60.0, help="How long a claimed run is kept from others."
    )
    renew_s: float = setting(
        1.5, unit="s", ge=0.1, le=20.0, help="Between renewals; at most a third of lease_s."
    )
    state_timeout_s: float = setting(
        3.0, unit="s", ge=0.1, le=60.0, help="Longest wait for a reply of the state service."
    )
    wrong_calls_max: int = setting(
        3, unit="replies", ge=1, le=20, help="Replies in a row that the model may write in vain."
    )
    repeats_max: int = setting(
        3, unit="calls", ge=1, le=100, help="The same tool call with the same result in one run."
    )
    failures_max: int = setting(
        5, unit="pauses", ge=1, le=100, help="Tries in a row that the same fault of the mesh ends."
    )
    output_tokens_max: int = setting(
        512, unit="tokens", ge=1, le=1 << 20, help="Of a model call whose run sets none."
    )
    call_tokens_max: int = setting(
        256,
        unit="tokens",
        ge=16,
        le=1 << 20,
        help="Likewise, of one that has to call a tool; more where the tool's schema needs it.",
    )
    in_place_s: float = setting(
        1.0,
        unit="s",
        ge=0.0,
        le=10.0,
        help="A step that was refused for longer gives its run back until then.",
    )
    text_interval_ms: float = setting(
        40.0, unit="ms", ge=1.0, le=5000.0, help="Between two messages of a run's live text."
    )
    tool_format: str = setting(
        "auto",
        choices=("auto", "structured", "hermes", "llama3", "mistral", "pythonic"),
        help="How models are offered tools. auto: structured, which every model can.",
    )
    parallel_calls_max: int = setting(
        4, unit="calls", ge=1, le=16, help="Tool calls that the model may ask for in one step."
    )
    prompt_bytes: int = setting(
        0,
        unit="bytes",
        ge=0,
        le=1 << 20,
        help="Of a conversation; its oldest turns are left out. 0: as the model's context allows.",
    )
    result_bytes: int = setting(
        1200, unit="bytes", ge=128, le=65536, help="Of a tool's result, as the model reads it."
    )
    embed_batch: int = setting(
        32, unit="texts", ge=1, le=256, help="Chunks of a document embedded in one call."
    )
    drain_grace_s: float = setting(
        20.0, unit="s", ge=0.0, le=600.0, help="Longest wait for steps to end at shutdown."
    )
    probe_lag_s: float = setting(
        1.0, unit="s", ge=0.0, le=60.0, help="From NOT_SERVING to the start of the drain."
    )

    def __post_init__(self) -> None:
        if self.renew_s * 3 > self.lease_s * 1.0001:
            raise ValueError("renew_s must be at most a third of lease_s")
