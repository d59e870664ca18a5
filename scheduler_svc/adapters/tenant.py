"""A tenant and a key of one, as the scheduler holds them. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.domain.run_budget import SomeLimits
from sluice.quota.exchange import Limits

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's rights and limits. ``concurrent_runs``: open agent runs, those that wait for
    people not counted; None: the scheduler's ``agent_runs_max``. ``run_limits``: of each of them,
    below the scheduler's ``agent_steps_max`` and the like."""

    name: str
    ceiling: PriorityClass = PriorityClass.CRITICAL
    default_class: PriorityClass = PriorityClass.STANDARD
    models: frozenset[str] = frozenset()
    agents: bool = False
    sessions: bool = True
    limits: Limits = field(default_factory=Limits)
    quota_fail_open: bool = False
    concurrent_runs: int | None = None
    tools: frozenset[str] = frozenset()
    run_limits: SomeLimits = field(default_factory=SomeLimits)

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use a model or alias, by its name."""
        return not self.models or model in self.models

    def class_for(self, wanted: PriorityClass | None) -> PriorityClass:
        """The class of a request: what it wants, lowered to the ceiling."""
        return max(self.default_class if wanted is None else wanted, self.ceiling)


@dataclass(frozen=True, slots=True)
class Key:
    """A key. ``key_hash``: SHA-256 in hex; ``expires_s``: Unix time from which it is void."""

    key_id: str
    tenant: str
    key_hash: str
    expires_s: float = NEVER
