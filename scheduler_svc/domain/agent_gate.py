"""Whether a request takes the agent path: off unless it asks, its tenant may, and there is room.

An agent run is many model calls, of unknown number, that compete with everybody's; so the path is
closed while the fleet is busy and open runs are bounded. Pure and synchronous; owned by the public
API. Runs are counted by the state service, which refuses one too many when it is to be stored:
exact over all schedulers and their restarts. Here that becomes :meth:`AgentGate.too_many`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from scheduler_svc.domain.model import Outcome, Refusal
from scheduler_svc.domain.refusals import spread
from sluice.errors import Code, QuotaViolation


class AgentMode(Enum):
    """What a request asks for. ``AUTO``: the direct path will do when the agent path is closed."""

    DIRECT = "direct"
    AUTO = "auto"
    REQUIRED = "required"


class GateReason(Enum):
    """Why a request is on its path; the words that clients and records see."""

    NOT_ASKED = "NOT_ASKED"
    ALLOWED = "ALLOWED"
    NOT_ALLOWED = "NOT_ALLOWED"  # the tenant has no right to agents
    TOO_MANY_RUNS = "TOO_MANY_RUNS"  # the tenant has as many open runs as it may
    SATURATED = "SATURATED"  # the fleet has no time to spare for runs
    NOT_AVAILABLE = "NOT_AVAILABLE"  # there is no agent service


class Path(Enum):
    """How a request runs."""

    DIRECT = "direct"
    AGENT = "agent"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A path, and why. ``quota``: the tenant's, of TOO_MANY_RUNS. ``wait_s``: the expected wait in
    the queue, of SATURATED."""

    path: Path
    reason: GateReason
    wait_s: float = 0.0
    quota: QuotaViolation | None = None


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """How busy the instances of a model are. ``utilisation``: share of the sequences that may run
    at once which do, 0 to 1; 1 when none may. ``wait_s``: expected time in the queue."""

    utilisation: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """``runs_max``: open runs of a tenant that has no limit of its own.
    Beyond ``utilisation_max`` or ``wait_max_s`` no run begins. A refused one may ask again when the
    queue is expected to be gone, within the two bounds, +/- the jitter."""

    runs_max: int = 64
    utilisation_max: float = 0.9
    wait_max_s: float = 2.0
    retry_after_min_s: float = 5.0
    retry_after_max_s: float = 60.0
    retry_after_jitter: float = 0.2


class AgentGate:
    """See the module's docstring. One per scheduler."""

    def __init__(self, limits: AgentLimits) -> None:
        self._limits = limits
        self._refused = 0

    def runs_max(self, tenant_runs_max: int | None) -> int:
        """Most open runs of a tenant: its own limit, if it has one. Runs that wait for people do
        not count."""
        return self._limits.runs_max if tenant_runs_max is None else tenant_runs_max

    def judge(
        self,
        mode: AgentMode,
        load: FleetLoad,
        *,
        allowed: bool,
        available: bool,
    ) -> Verdict:
        """The path of a request. ``allowed``: the tenant's right to agents; ``available``: whether
        there is an agent service."""
        if mode is AgentMode.DIRECT:
            return Verdict(Path.DIRECT, GateReason.NOT_ASKED)
        reason, wait_s = GateReason.ALLOWED, 0.0
        if not allowed:
            reason = GateReason.NOT_ALLOWED
        elif not available:
            reason = GateReason.NOT_AVAILABLE
        elif (
            load.utilisation > self._limits.utilisation_max or load.wait_s > self._limits.wait_max_s
        ):
            reason, wait_s = GateReason.SATURATED, load.wait_s
        if reason is GateReason.ALLOWED:
            return Verdict(Path.AGENT, reason)
        return Verdict(_closed(mode), reason, wait_s)

    def too_many(self, mode: AgentMode, tenant: str, runs_max: int) -> Verdict:
        """The path of a request that was let through and is one run too many."""
        words = "limit of agent runs at once"
        quota = QuotaViolation(f"tenant:{tenant}", words, "concurrent_runs", runs_max)
        return Verdict(_closed(mode), GateReason.TOO_MANY_RUNS, quota=quota)

    def refusal(self, verdict: Verdict, *, away: bool = False) -> Refusal:
        """What the client of a refused request is told. ``away``: there was an agent service, so
        that asking again is worth it."""
        code, message = _REFUSALS[verdict.reason]
        if verdict.reason is GateReason.NOT_AVAILABLE and away:
            return Refusal(
                Outcome.AGENT_REFUSED,
                code,
                "no agent service answers now",
                reason="AGENT_UNREACHABLE",
                retry_after_s=self._retry_after_s(verdict),
            )
        if verdict.reason is GateReason.NOT_AVAILABLE:
            return Refusal(Outcome.AGENT_REFUSED, code, message, reason="AGENT_SERVICE_MISSING")
        busy = code is Code.RESOURCE_EXHAUSTED
        metadata = {"gate_reason": verdict.reason.value}
        refusal = Refusal(
            Outcome.AGENT_REFUSED,
            code,
            message,
            retry_after_s=self._retry_after_s(verdict) if busy else None,
            metadata=metadata,
        )
        if verdict.quota is not None:
            refusal.quotas = (verdict.quota,)
        return refusal

    def _retry_after_s(self, verdict: Verdict) -> float:
        limits = self._limits
        self._refused += 1
        wait_s = min(max(verdict.wait_s, limits.retry_after_min_s), limits.retry_after_max_s)
        return wait_s * spread(self._refused, limits.retry_after_jitter)


def _closed(mode: AgentMode) -> Path:
    return Path.DIRECT if mode is AgentMode.AUTO else Path.REFUSED


_REFUSALS: Final = {
    GateReason.NOT_ALLOWED: (
        Code.PERMISSION_DENIED,
        (
            "this tenant may not use the agent path: an operator opens it by `sluice tenants set"
            " TENANT --agents`; Generate and turns of sessions need no such right"
        ),
    ),
    GateReason.TOO_MANY_RUNS: (
        Code.RESOURCE_EXHAUSTED,
        (
            "too many agent runs of this tenant are under way: wait for one to end, or ask an"
            " operator for more (`sluice tenants set TENANT --concurrent-runs N`)"
        ),
    ),
    GateReason.SATURATED: (
        Code.RESOURCE_EXHAUSTED,
        "the fleet is too busy for agent runs now; mode AUTO is answered directly",
    ),
    GateReason.NOT_AVAILABLE: (
        Code.UNAVAILABLE,
        "this mesh has no agent service; mode AUTO without a session is answered directly",
    ),
}
