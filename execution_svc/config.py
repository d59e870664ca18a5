"""Settings of the execution service: section ``[execution]`` of ``sluice.toml``."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config import section, setting


@section("execution")
@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Everything that can be set; times in seconds unless said."""

    name: str = setting("execution-0", help="Name of this replica in logs and telemetry.")
    bind: str = setting("127.0.0.1:50061", help="Address that schedulers call.")
    agents: tuple[str, ...] = setting(
        (),
        le=64,
        help="gRPC targets of the agent services, which are told of new runs. Empty: none.",
    )
    drain_grace_s: float = setting(
        120.0, unit="s", ge=0.0, le=3600.0, help="Longest wait for open work at shutdown."
    )
    probe_lag_s: float = setting(
        1.0, unit="s", ge=0.0, le=60.0, help="From NOT_SERVING to the start of the drain."
    )
    execute_deadline_s: float = setting(
        300.0, unit="s", ge=0.1, le=86400.0, help="Deadline of a plain Execute that sets none."
    )
    embed_deadline_s: float = setting(
        60.0, unit="s", ge=0.1, le=3600.0, help="Deadline of an ExecuteEmbed that sets none."
    )
