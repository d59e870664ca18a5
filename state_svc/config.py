"""Settings of the state service: section ``[state]`` of ``sluice.toml``."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config import section, setting
from state_svc.domain.run_values import RunLimits, SessionLimits


@section("state")
@dataclass(frozen=True, slots=True)
class StateConfig:
    """Everything that can be set; times in seconds unless said."""

    name: str = setting("state-0", help="Name of this replica in logs and telemetry.")
    bind: str = setting("127.0.0.1:50091", help="Address that the mesh calls.")
    durable_url: str = setting(
        "redis://127.0.0.1:16379/0",
        secret=True,
        help="Redis or Valkey for all that must not be lost; appendfsync always.",
    )
    volatile_url: str = setting(
        "",
        secret=True,
        help="Redis or Valkey for quotas, decision records and live text. Empty: the durable one.",
    )
    store_timeout_s: float = setting(
        0.5, unit="s", ge=0.01, le=30.0, help="Longest wait for a reply of the store."
    )
    connections_max: int = setting(
        32, unit="connections", ge=1, le=1024, help="Connections to each store."
    )
    decisions_kept_s: int = setting(
        86400, unit="s", ge=60, le=2592000, help="How long a decision record is kept."
    )
    decisions_max: int = setting(
        10000, unit="records", ge=1, le=1000000, help="Decision records kept per tenant."
    )
    values_max: int = setting(
        10000, unit="values", ge=1, le=1000000, help="Values that a tenant may have."
    )
    values_bytes_max: int = setting(
        64 << 20, unit="bytes", ge=1024, le=1 << 40, help="Bytes of a tenant's values together."
    )
    blobs_max: int = setting(
        10000, unit="blobs", ge=1, le=1000000, help="Large results that a tenant may have."
    )
    blobs_bytes_max: int = setting(
        256 << 20, unit="bytes", ge=1024, le=1 << 40, help="Bytes of a tenant's results together."
    )
    collections_max: int = setting(
        100, unit="collections", ge=1, le=10000, help="Collections that a tenant may have."
    )
    documents_max: int = setting(
        10000, unit="documents", ge=1, le=100000, help="Documents that a collection may have."
    )
    chunks_max: int = setting(
        200000,
        unit="chunks",
        ge=1,
        le=10000000,
        help="Chunks that a collection may have, those of replacements in the making included.",
    )
    documents_bytes_max: int = setting(
        1 << 30,
        unit="bytes",
        ge=1024,
        le=1 << 40,
        help="Bytes of a tenant's documents, labels, chunks, vectors and words together, with 512"
        " for each document.",
    )
    index_bytes_max: int = setting(
        1 << 30,
        unit="bytes",
        ge=1 << 20,
        le=1 << 40,
        help="Memory of this process for searches; about 2.2 KB a chunk of 384 dimensions. The"
        " collections that were searched longest ago make room.",
    )
    searches_max: int = setting(
        64,
        unit="searches",
        ge=1,
        le=10000,
        help="Searches in progress, half of them per tenant; more are refused.",
    )
    runs_open_max: int = setting(
        2000, unit="runs", ge=1, le=1000000, help="Runs of a tenant that have not ended."
    )
    runs_bytes_max: int = setting(
        134217728,
        unit="bytes",
        ge=8388608,
        le=1099511627776,
        help="All stored runs of a tenant; ended ones make room, oldest first.",
    )
    run_events_max: int = setting(
        10000, unit="events", ge=100, le=1000000, help="Events of a run, its end excepted."
    )
    run_bytes_max: int = setting(
        16777216,
        unit="bytes",
        ge=8388608,
        le=1073741824,
        help="Task and events of a run, its end excepted.",
    )
    runs_kept_s: int = setting(
        604800, unit="s", ge=86400, le=31536000, help="How long an ended run is kept."
    )
    watch_bytes_max: int = setting(
        32 << 20,
        unit="bytes",
        ge=1 << 20,
        le=1 << 40,
        help="Events and text that watchers of runs have not taken yet, each held about three"
        " times; a quarter per tenant. Those that find no room wait.",
    )
    sessions_max: int = setting(
        10000, unit="sessions", ge=1, le=1000000, help="Sessions of a tenant."
    )
    sessions_bytes_max: int = setting(
        134217728, unit="bytes", ge=8388608, le=1099511627776, help="All sessions of a tenant."
    )
    session_messages_max: int = setting(
        10000, unit="messages", ge=2, le=1000000, help="Messages of a session."
    )
    session_bytes_max: int = setting(
        8388608, unit="bytes", ge=1048576, le=1073741824, help="Messages of a session together."
    )
    deadline_s: float = setting(
        5.0, unit="s", ge=0.1, le=60.0, help="Deadline of a call that sets none, and the longest."
    )
    drain_grace_s: float = setting(
        5.0, unit="s", ge=0.0, le=600.0, help="Longest wait for open calls at shutdown."
    )
    probe_lag_s: float = setting(
        1.0, unit="s", ge=0.0, le=60.0, help="From NOT_SERVING to the end of the watches."
    )


def run_limits(config: StateConfig) -> RunLimits:
    """The bounds of a tenant's runs."""
    return RunLimits(
        open_max=config.runs_open_max,
        tenant_bytes_max=config.runs_bytes_max,
        events_max=config.run_events_max,
        run_bytes_max=config.run_bytes_max,
        kept_ms=config.runs_kept_s * 1000,
    )


def session_limits(config: StateConfig) -> SessionLimits:
    """The bounds of a tenant's sessions."""
    return SessionLimits(
        sessions_max=config.sessions_max,
        tenant_bytes_max=config.sessions_bytes_max,
        messages_max=config.session_messages_max,
        session_bytes_max=config.session_bytes_max,
    )
