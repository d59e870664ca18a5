"""Whether a request takes the agent path: off unless it asks, its tenant may, and there is room.

An agent run is many model calls, of unknown number, that compete with everybody's; so the path is
closed while the fleet is busy and open runs are bounded. Pure and synchronous; owned by the public
API. Runs are counted here by :meth:`AgentGate.begin` and :meth:`AgentGate.end`.
"""

from __future__ import annotations

from collections import Counter
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
    TOO_MANY_RUNS = "TOO_MANY_RUNS"  # the tenant, or the scheduler, has as many runs as it may
    SATURATED = "SATURATED"  # the fleet has no time to spare for runs
    NOT_AVAILABLE = "NOT_AVAILABLE"  # there is no agent service


class Path(Enum):
    """How a request runs."""

    DIRECT = "direct"
    AGENT = "agent"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A path, and why. ``scope``: "tenant" or "scheduler", of TOO_MANY_RUNS; ``quota``: the
    tenant's, of the first. ``wait_s``: the expected wait in the queue, of SATURATED."""

    path: Path
    reason: GateReason
    scope: str = ""
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
    """``runs_max``: runs at once in this scheduler, and of a tenant that has no limit of its own.
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
        self._runs: Counter[str] = Counter()
        self._refused = 0

    @property
    def runs(self) -> int:
        """Runs that have begun and not ended."""
        return self._runs.total()

    def judge(
        self,
        mode: AgentMode,
        tenant: str,
        load: FleetLoad,
        *,
        allowed: bool,
        available: bool,
        tenant_runs_max: int | None,
    ) -> Verdict:
        """The path of a request. ``allowed``: the tenant's right to agents; ``available``: whether
        there is an agent service."""
        if mode is AgentMode.DIRECT:
            return Verdict(Path.DIRECT, GateReason.NOT_ASKED)
        quota = None
        reason, scope, wait_s = GateReason.ALLOWED, "", 0.0
        if not allowed:
            reason = GateReason.NOT_ALLOWED
        elif not available:
            reason = GateReason.NOT_AVAILABLE
        elif tenant_runs_max is not None and self._runs[tenant] >= tenant_runs_max:
            reason, scope = GateReason.TOO_MANY_RUNS, "tenant"
            words = "limit of agent runs at once"
            quota = QuotaViolation(f"tenant:{tenant}", words, "concurrent_runs", tenant_runs_max)
        elif self.runs >= self._limits.runs_max:
            reason, scope = GateReason.TOO_MANY_RUNS, "scheduler"
        elif (
            load.utilisation > self._limits.utilisation_max or load.wait_s > self._limits.wait_max_s
        ):
            reason, wait_s = GateReason.SATURATED, load.wait_s
        if reason is GateReason.ALLOWED:
            return Verdict(Path.AGENT, reason)
        path = Path.DIRECT if mode is AgentMode.AUTO else Path.REFUSED
        return Verdict(path, reason, scope, wait_s, quota)

    def begin(self, tenant: str) -> None:
        """A run that was let through begins."""
        self._runs[tenant] += 1

    def end(self, tenant: str) -> None:
        """A run is over, however it ended."""
        assert self._runs[tenant] > 0, "more runs ended than began"
        self._runs[tenant] -= 1
        if not self._runs[tenant]:
            del self._runs[tenant]

    def refusal(self, verdict: Verdict) -> Refusal:
        """What the client of a refused request is told."""
        code, message = _REFUSALS[verdict.reason]
        if verdict.reason is GateReason.NOT_AVAILABLE:
            return Refusal(Outcome.AGENT_REFUSED, code, message, reason="AGENT_SERVICE_MISSING")
        busy = code is Code.RESOURCE_EXHAUSTED
        metadata = {"gate_reason": verdict.reason.value}
        if verdict.scope:
            metadata["scope"] = verdict.scope
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


_REFUSALS: Final = {
    GateReason.NOT_ALLOWED: (
        Code.PERMISSION_DENIED,
        "this tenant may not use the agent path; Generate is open to it",
    ),
    GateReason.TOO_MANY_RUNS: (Code.RESOURCE_EXHAUSTED, "too many agent runs are under way"),
    GateReason.SATURATED: (
        Code.RESOURCE_EXHAUSTED,
        "the fleet is too busy for agent runs now; mode AUTO is answered directly",
    ),
    GateReason.NOT_AVAILABLE: (
        Code.UNAVAILABLE,
        "this mesh has no agent service; mode AUTO without a session is answered directly",
    ),
}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What an agent run did. ``cost`` and ``direct_cost``: what it cost, and what one direct call
    with the same task and answer would have, in the currency of the price list."""

    tenant: str
    model: str
    model_calls: int
    tool_calls: int
    cost: float
    direct_cost: float


def agent_not_needed(summary: RunSummary) -> bool:
    """Whether a direct call would have done: at most one model call and no tool call."""
    return summary.model_calls <= 1 and summary.tool_calls == 0


def extra_cost(summary: RunSummary) -> float:
    """What a run that was not needed cost beyond a direct call; 0 for one that was."""
    if not agent_not_needed(summary):
        return 0.0
    return max(0.0, summary.cost - summary.direct_cost)
