"""What the tests of the scheduling domain share: makers with defaults, and how long to search.

``SLUICE_TEST_THOROUGH=1`` searches 2,000 examples of 50 steps per machine (minutes); the default
is small and the same every time."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Final

from hypothesis import HealthCheck, settings

from scheduler_svc.domain.limits import ClassLimits, SchedulerLimits
from scheduler_svc.domain.model import (
    Dispatch,
    InstanceName,
    InstanceReport,
    PriorityClass,
    Refuse,
    Ticket,
    TicketId,
)
from scheduler_svc.domain.placement import LeastWork
from scheduler_svc.domain.scheduler import Scheduler

THOROUGH: Final = os.environ.get("SLUICE_TEST_THOROUGH") == "1"

SEARCH_TIMEOUT_S: Final = 7_200 if THOROUGH else 600

SEARCH: Final = settings(
    max_examples=2_000 if THOROUGH else 120,
    stateful_step_count=50 if THOROUGH else 40,
    deadline=None,
    derandomize=not THOROUGH,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

NO_SHARE: Final = {cls: ClassLimits(100, 100_000, 50, 50_000, 0.0) for cls in PriorityClass}

_REPORT: Final = InstanceReport(
    name=InstanceName("a"),
    model="m",
    fingerprint="f",
    serving=True,
    draining=False,
    sequences_max=4,
    kv_tokens=100_000,
    context_tokens=4_096,
    step_tokens_max=0,
    kv_block_tokens=16,
    generates=True,
    embeds=False,
    simulated=True,
)

_TICKET: Final = Ticket(
    id=TicketId(0),
    request_id="r",
    tenant="t",
    model="m",
    priority_class=PriorityClass.STANDARD,
    arrival_s=0.0,
    deadline_s=60.0,
    first_token_limit_s=30.0,
    prompt_tokens=100,
    output_tokens=50,
    size_bytes=400,
)

_ids = itertools.count(1)


def a_report(name: str = "a", **changes: object) -> InstanceReport:
    """A healthy idle instance of model "m" with room for 4 sequences and ample memory."""
    return replace(_REPORT, name=InstanceName(name), **changes)  # type: ignore[arg-type]


def a_ticket(**changes: object) -> Ticket:
    """A standard ticket for model "m": 100 prompt tokens, due in 30 s, a fresh id."""
    values = {"id": TicketId(next(_ids)), "excluded": set()} | changes
    ticket = replace(_TICKET, **values)  # type: ignore[arg-type]
    ticket.request_id = str(ticket.id)
    return ticket


def limits(**changes: object) -> SchedulerLimits:
    """Small columns, otherwise the defaults."""
    return replace(SchedulerLimits(instances_max=8), **changes)  # type: ignore[arg-type]


class Bench:
    """A scheduler with instances that are up and have credit."""

    def __init__(self, *names: str, report: dict[str, object] | None = None, **changes: object):
        self.scheduler = Scheduler(limits(**changes), LeastWork())
        self.now = 0.0
        for name in names:
            self.up(name, **(report or {}))

    def up(self, name: str, **report: object) -> None:
        """A report and a credit for everything the instance has."""
        made = a_report(name, **report)
        self.scheduler.instances.report(made, self.now)
        self.scheduler.instances.credit(made.name, made.sequences_max, made.kv_tokens, self.now)

    def submit(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            assert self.scheduler.submit(ticket, self.now) is None

    def turn(self) -> list[Dispatch]:
        """A turn that only dispatches."""
        effects = self.scheduler.turn(self.now)
        assert all(isinstance(effect, Dispatch) for effect in effects)
        self.scheduler.check_invariants()
        return [effect for effect in effects if isinstance(effect, Dispatch)]

    def refused(self) -> list[Refuse]:
        """A turn that only refuses."""
        effects = self.scheduler.turn(self.now)
        assert all(isinstance(effect, Refuse) for effect in effects)
        self.scheduler.check_invariants()
        return [effect for effect in effects if isinstance(effect, Refuse)]

    def dispatch(self, ticket: Ticket) -> Dispatch:
        """Submits it and expects it to be placed at once."""
        self.submit(ticket)
        (effect,) = self.turn()
        assert effect.ticket is ticket
        return effect

    def is_empty(self) -> bool:
        """Whether every counter is back to zero."""
        self.scheduler.check_invariants()
        state = self.scheduler.snapshot()
        return (
            not state.running
            and not any(state.waiting.values())
            and state.submitted == sum(state.outcomes.values())
            and all(
                i.running == i.kv_tokens == i.prefill_tokens == 0 for i in state.instances.values()
            )
            and self.scheduler.next_wakeup(self.now) is None
            and not self.scheduler._queue._lines
        )
