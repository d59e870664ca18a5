"""The scheduler: admits tickets, keeps them in order, and places them where there is room.

Signatures first; the body follows."""

from __future__ import annotations

from typing import Literal

from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    Abort,
    Demand,
    Effect,
    InstanceName,
    InstanceReport,
    Outcome,
    Refusal,
    RejectKind,
    Ticket,
    TicketId,
)
from scheduler_svc.ports import PlacementPolicy


class Scheduler:
    """All calls are synchronous, from one owner task. Stale (ticket, attempt) pairs are ignored."""

    def __init__(self, limits: SchedulerLimits, placement: PlacementPolicy) -> None: ...

    # --- tickets -----------------------------------------------------------------------------
    def submit(self, ticket: Ticket, now: float) -> Refusal | None:
        """None = queued. Refusal (a SluiceError with .outcome): QUEUE_FULL, HOPELESS, NO_INSTANCE,
        DRAINING, DEADLINE_EXCEEDED. Needs a turn() afterwards."""
        raise NotImplementedError

    def turn(self, now: float) -> list[Effect]:
        """Dispatch / Refuse / Abort (a running ticket passed its first-token limit or deadline:
        Abort.reason FIRST_TOKEN_TIMEOUT or DEADLINE_EXCEEDED with Abort.error for the client)."""
        raise NotImplementedError

    def cancel(
        self, ticket_id: TicketId, now: float, outcome: Outcome = Outcome.CANCELLED
    ) -> Abort | None:
        """Queued: removed. Running: Abort, room is freed by ended/rejected/failed/lost. Unknown or
        already aborting: None."""
        raise NotImplementedError

    def accepted(
        self, ticket_id: TicketId, attempt: int, prompt_tokens: int, cached_tokens: int, now: float
    ) -> None: ...

    def first_token(self, ticket_id: TicketId, attempt: int, now: float) -> None: ...

    def progressed(self, ticket_id: TicketId, attempt: int, tokens: int) -> None:
        """``tokens``: output tokens of this attempt SO FAR (cumulative)."""

    def rejected(self, ticket_id: TicketId, attempt: int, kind: RejectKind, now: float) -> None: ...

    def ended(
        self,
        ticket_id: TicketId,
        attempt: int,
        now: float,
        outcome: Outcome = Outcome.FINISHED,
        output_tokens: int | None = None,
    ) -> None: ...

    def failed(
        self, ticket_id: TicketId, attempt: int, now: float, delivered: bool
    ) -> Literal["requeued", "ended"] | Refusal:
        """ "requeued": wait for another Dispatch. "ended": stale, or it was aborting: nobody waits.
        Refusal: tell the client. To be called for every id that lost() returned, too."""
        raise NotImplementedError

    # --- instances ---------------------------------------------------------------------------
    def report(self, report: InstanceReport, now: float) -> bool:
        """False: the fleet is full and the instance is not known."""
        raise NotImplementedError

    def credit(
        self, instance: InstanceName, sequences: int, kv_tokens: int, now: float
    ) -> None: ...

    def unreachable(self, instance: InstanceName, reason: str, now: float) -> None:
        """The load watch broke: no dispatch until the next report. Running tickets stay."""

    def lost(self, instance: InstanceName, now: float) -> list[TicketId]:
        """The frame stream broke (or a new epoch): its room is free, its credit is 0 until the next
        credit(). Returns the tickets that still want an answer; call failed() for each."""
        raise NotImplementedError

    def remove(self, instance: InstanceName, now: float) -> None:
        """No longer part of the fleet; what runs there ends as it will."""

    # --- the rest ----------------------------------------------------------------------------
    def drain(self) -> None:
        """submit() refuses from now on (DRAINING); what waits and runs goes on."""

    def next_wakeup(self, now: float) -> float | None:
        """Earliest time at which turn() would change something by time alone."""
        raise NotImplementedError

    def demand(self, instance: InstanceName) -> Demand:
        """For Demand in frames."""
        raise NotImplementedError

    def serves(self, model: str) -> bool:
        """Whether any known instance, reachable or not, has this model."""
        raise NotImplementedError

    def expected_prompt_tokens(self, model: str, size_bytes: int) -> int:
        """From the learnt bytes per token."""
        raise NotImplementedError

    def expected_output_tokens(self, tenant: str, model: str, max_tokens: int | None) -> int:
        """From what the tenant's outputs of this model were; at most max_tokens."""
        raise NotImplementedError
