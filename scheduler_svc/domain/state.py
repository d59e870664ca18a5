"""What one scheduler knows: the tickets, their order, the fleet, and what was learnt of both.

One object per scheduler, built once; the parts that act (``life``, ``placing``, ``expiry``,
``attempts``, ``instances``) are given it and keep what they need of it. Nothing in it is ever bound
anew, so that all of them see the same.
"""

from __future__ import annotations

from scheduler_svc.domain.admission import Admission
from scheduler_svc.domain.breaker import FirstTokenPace
from scheduler_svc.domain.decision import Closed
from scheduler_svc.domain.engine_time import EngineTime
from scheduler_svc.domain.estimate import Estimates
from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.heap import LazyHeap
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import Ticket, TicketId
from scheduler_svc.domain.prefix_blocks import PrefixBlocks
from scheduler_svc.domain.prefix_index import PrefixIndex
from scheduler_svc.domain.quarantine import Quarantine
from scheduler_svc.domain.queue import TicketQueue
from scheduler_svc.domain.retry_budget import Pacing, RetryBudget
from scheduler_svc.domain.yielding import Yields
from scheduler_svc.ports import PlacementPolicy


class State:
    """See the module's text."""

    def __init__(self, limits: SchedulerLimits, placement: PlacementPolicy) -> None:
        self.limits = limits
        self.placement = placement
        self.tickets: dict[TicketId, Ticket] = {}  # bounded by the queue's and the fleet's bounds
        self.queue = TicketQueue(
            limits.classes,
            limits.tenant_weights,
            limits.tenants_idle_max,
            limits.debts_put_off,
        )
        self.timers: LazyHeap[Ticket] = LazyHeap()
        self.ledger = Ledger(limits.instances_max)
        self.fleet = Fleet(limits, self.ledger)
        self.closed = Closed(self.fleet, limits)
        self.engine_time = EngineTime()
        self.prefixes = (
            PrefixIndex(limits.instances_max, limits.prefix_index_bytes, limits.prefix_ttl_s)
            if placement.reads_prefixes
            else None
        )
        self.prefix_blocks = PrefixBlocks(limits.models_max, limits.prefix_block_tokens_min)
        self.estimates = Estimates(limits)
        self.pace = FirstTokenPace(limits.breaker, limits.models_max)
        self.budget = RetryBudget(limits.retry)
        self.pacing = Pacing(limits.retry)
        self.quarantine = Quarantine(limits.poison)
        self.admission = Admission(limits, self.queue, self.ledger, self.fleet, self.estimates)
        self.yields = Yields(limits, self.queue, self.ledger, self.fleet, self.tickets)
