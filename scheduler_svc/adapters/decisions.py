"""What the handlers tell about the ends of requests, so that somebody can ask why.

Joins what a record says (``decision_records``) and where it is kept (``decision_log``). Nothing
here waits or raises on the way of a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from scheduler_svc.adapters.decision_log import DecisionLog
from scheduler_svc.adapters.decision_records import Recorder
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.quota_keeper import Consumption
from scheduler_svc.domain.model import Outcome, PriorityClass, Ticket
from sluice.errors import SluiceError


class Decisions:
    """See the module's docstring."""

    def __init__(
        self,
        recorder: Recorder,
        log: DecisionLog,
        sample_ratio: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``sample_ratio``: share of requests that are kept however they end."""
        self.log = log
        self._recorder = recorder
        self._ratio = sample_ratio
        self._draw = draw

    def sample(self) -> bool:
        """Whether the next request is one of the sample."""
        return self._draw() < self._ratio

    def ended(
        self, live: LiveRequest, outcome: Outcome, used: Consumption, cost: float, now: float
    ) -> None:
        """A request that was admitted is over."""
        if self._recorder.keeps(live, outcome, now):
            self.log.put(self._recorder.ended(live, outcome, used, cost, now))

    def refused(self, ticket: Ticket, outcome: Outcome, error: SluiceError, now: float) -> None:
        """A request was refused before it was admitted."""
        self.log.put(self._recorder.refused(ticket, outcome, error, now))

    def wrong(
        self,
        tenant: str,
        request_id: str,
        priority_class: PriorityClass,
        outcome: Outcome,
        error: SluiceError,
        gate_reason: str = "",
    ) -> None:
        """A request was refused for what it asked."""
        self.log.put(
            self._recorder.wrong(tenant, request_id, priority_class, outcome, error, gate_reason)
        )
