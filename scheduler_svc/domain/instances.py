"""What becomes known of instances: reports, credit, losses, drains, and that they are gone.

Keeps the fleet, the prefix index and the quarantine in step with it; of tickets only those that ran
over a stream that broke are touched (``lost``). After any call something may be placeable.
Synchronous; time is passed in.
"""

from __future__ import annotations

from scheduler_svc.domain.fleet import Instance
from scheduler_svc.domain.life import Life
from scheduler_svc.domain.model import (
    InstanceName,
    InstanceReport,
    Outcome,
    TicketId,
    TicketState,
    WorkKind,
)
from scheduler_svc.domain.state import State


class Instances:
    """See the module's text. ``refused_reports``: of instances that the fleet has no row for."""

    def __init__(self, state: State, life: Life) -> None:
        self._life = life
        self._tickets = state.tickets
        self._ledger = state.ledger
        self._fleet = state.fleet
        self._engine_time = state.engine_time
        self._estimates = state.estimates
        self._quarantine = state.quarantine
        self._prefixes = state.prefixes
        self._prefix_blocks = state.prefix_blocks
        self._yields = state.yields
        self.refused_reports = 0

    def report(self, report: InstanceReport, now: float) -> bool:
        """Takes in what an instance says of itself; a new one joins. False: the fleet is full."""
        known = self._fleet.get(report.name)
        busy = known is not None and self._ledger.load(known.row).reads_full_steps(
            report.step_tokens_max, now
        )
        if busy and report.prompt_tokens_per_s:
            self._estimates.saw_prefill(report.model, report.prompt_tokens_per_s, now)
        if known is not None and report.epoch != known.report.epoch:
            self._forget_prefixes(known)
            self._quarantine.is_gone(report.name)
        elif report.serving:
            self._quarantine.lived(report.name, now)
        instance = self._fleet.report(report, now)
        if instance is None:
            self.refused_reports += 1
            return False
        self._engine_time.report(instance.row, report.running or 0, now)
        if self._prefixes is not None:
            block_tokens = self._prefix_blocks.saw(report.model, report.kv_block_tokens)
            self._prefixes.set_capacity(instance.row, report.kv_tokens // block_tokens)
        return True

    def credit(self, instance: InstanceName, sequences: int, kv_tokens: int, now: float) -> None:
        """The most that may run there for this scheduler, what runs there now included."""
        known = self._fleet.get(instance)
        if known is not None:
            self._fleet.credit(known, sequences, kv_tokens)
            self._yields.credited(known, now)

    def cut_off(self, instance: InstanceName, now: float) -> None:
        """There is no way to it for the moment: nothing starts there before its next credit; what
        runs there, runs on."""
        known = self._fleet.get(instance)
        if known is not None:
            self._fleet.revoke_credit(known)

    def unreachable(self, instance: InstanceName, reason: str, now: float) -> None:
        """Its load watch broke: nothing starts there until its next report; what runs, runs on."""
        known = self._fleet.get(instance)
        if known is not None:
            self._fleet.close(known, reason)

    def lost(self, instance: InstanceName, now: float) -> list[TicketId]:
        """Its frame stream broke, or its engine has a new epoch: the room of all that ran over the
        stream is free and the credit gone. Returns the tickets that wait for an answer:
        ``Attempts.failed`` decides on each. EMBED tickets run over calls of their own and stay."""
        known = self._fleet.get(instance)
        if known is None:
            return []
        self._fleet.revoke_credit(known)
        self._forget_prefixes(known)
        self._quarantine.breaks(known.row)
        orphans = []
        for ticket_id in sorted(self._ledger.load(known.row).tickets):
            ticket = self._tickets[ticket_id]
            if ticket.kind is WorkKind.EMBED:
                continue
            self._life.free(ticket, now)
            if ticket.state is TicketState.ABORTING:
                self._life.finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
            else:
                ticket.state = TicketState.LOST
                orphans.append(ticket_id)
        return orphans

    def remove(self, instance: InstanceName, now: float) -> None:
        """It is no longer part of the fleet; what runs there ends as it will."""
        known = self._fleet.get(instance)
        if known is not None:
            self._forget_prefixes(known)
            self._quarantine.is_gone(instance)
            self._fleet.remove(known)

    def bar(self, instance: InstanceName, barred: bool, now: float) -> None:
        """Nothing starts there until it is unbarred; what runs, runs on."""
        known = self._fleet.get(instance)
        if known is not None:
            self._fleet.bar(known, barred)

    def drain(self, instance: InstanceName, drain: bool, now: float) -> bool:
        """An operator closes an instance, or opens it again. What runs there and is expected to
        run on for long goes on elsewhere, if it can; the rest ends there. False: not known."""
        known = self._fleet.get(instance)
        if known is not None:
            self._fleet.drain_by_hand(known, drain)
        return known is not None

    def _forget_prefixes(self, instance: Instance) -> None:
        if self._prefixes is not None:
            self._prefixes.forget(instance.row)
