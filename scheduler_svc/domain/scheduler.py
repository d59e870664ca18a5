"""The scheduler: admits tickets, keeps them in order, and places them where there is room.

Owns every ticket from :meth:`Scheduler.submit` to its one terminal outcome, through the queue, the
ledger, the fleet and the timers. Synchronous and single-threaded: the owner task calls it, then
carries out the effects; time is passed in. After any call but ``turn`` something may be placeable:
the owner calls ``turn`` soon, and at :meth:`Scheduler.next_wakeup`.

A ticket: NEW -> WAITING -> RUNNING -> ENDED; from RUNNING back to WAITING (rejected, or failed and
to be placed again), to LOST (its stream broke; ``failed`` decides), to YIELDING (its place is
wanted; WAITING again when the instance confirms) or to ABORTING (cancelled or too late; the room is
taken until the instance confirms). Events for another attempt than the current one are stale and
change nothing.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Literal

import numpy as np

from scheduler_svc.domain import refusals
from scheduler_svc.domain.admission import Admission
from scheduler_svc.domain.agent_gate import FleetLoad
from scheduler_svc.domain.breaker import (
    BreakerState,
    FirstTokenPace,
    Verdict,
    verdict_of_end,
    verdict_of_failure,
)
from scheduler_svc.domain.decision import Closed, Placement, Trail, removed_by
from scheduler_svc.domain.engine_time import EngineTime
from scheduler_svc.domain.estimate import Estimates
from scheduler_svc.domain.fleet import Fleet, Instance
from scheduler_svc.domain.heap import LazyHeap
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    OUTPUT_WEIGHT,
    Abort,
    Demand,
    Dispatch,
    Effect,
    FaultKind,
    InstanceName,
    InstanceReport,
    Line,
    Outcome,
    PriorityClass,
    Refusal,
    Refuse,
    RejectKind,
    Ticket,
    TicketId,
    TicketState,
    WorkKind,
    Yield,
)
from scheduler_svc.domain.prefix_blocks import PrefixBlock, PrefixBlocks
from scheduler_svc.domain.prefix_index import PrefixIndex
from scheduler_svc.domain.quarantine import Quarantine
from scheduler_svc.domain.queue import TicketQueue
from scheduler_svc.domain.retry_budget import LOSSES, Pacing, RetryBudget
from scheduler_svc.domain.snapshot import InstanceStatus, Snapshot
from scheduler_svc.domain.turn import Scan, allowed_rows, side_by_side
from scheduler_svc.domain.yielding import Yields
from scheduler_svc.ports import PlacementPolicy

_WAITS = (TicketState.WAITING, TicketState.RETURNING)
_RUNS = (TicketState.RUNNING, TicketState.YIELDING)
_NOT_AS_REPORTED = (FaultKind.NOT_SERVING, FaultKind.FINGERPRINT)
_HOLDS_ROOM = (*_RUNS, TicketState.ABORTING)


class Scheduler:
    """The whole domain behind one object; see the module's text for the rules of calling it."""

    def __init__(self, limits: SchedulerLimits, placement: PlacementPolicy) -> None:
        self._limits = limits
        self._placement = placement
        self._prefixes = (
            PrefixIndex(limits.instances_max, limits.prefix_index_bytes, limits.prefix_ttl_s)
            if placement.reads_prefixes
            else None
        )
        self._prefix_blocks = PrefixBlocks(limits.models_max, limits.prefix_block_tokens_min)
        self._cached_expected = self._cached_seen = 0
        self._tickets: dict[TicketId, Ticket] = {}  # bounded by the queue's and the fleet's bounds
        self._queue = TicketQueue(
            limits.classes,
            limits.tenant_weights,
            limits.tenants_idle_max,
            limits.debts_put_off,
        )
        self._ledger = Ledger(limits.instances_max)
        self._engine_time = EngineTime()
        self._fleet = Fleet(limits, self._ledger)
        self._estimates = Estimates(limits)
        self._budget = RetryBudget(limits.retry)
        self._pacing = Pacing(limits.retry)
        self._quarantine = Quarantine(limits.poison)
        self._pace = FirstTokenPace(limits.breaker, limits.models_max)
        self._closed = Closed(self._fleet, limits)
        self._timers: LazyHeap[Ticket] = LazyHeap()
        self._admission = Admission(limits, self._queue, self._ledger, self._fleet, self._estimates)
        self._yields = Yields(limits, self._queue, self._ledger, self._fleet, self._tickets)
        self._draining = False
        self._submitted = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._fleet_full = 0
        self._holds_until_s = inf

    # --- tickets -------------------------------------------------------------------------------

    def refuse(self, ticket: Ticket, now: float) -> Refusal | None:
        """What ``submit`` would refuse the ticket with now; then it is over. ``None``: nothing, and
        it is as new. For callers that have work to do before they submit. O(1)."""
        assert ticket.state is TicketState.NEW, "submitted before"
        self._fleet.refresh_breakers(now)
        if self._draining:
            jitter = refusals.spread(ticket.id, self._limits.retry_after_jitter)
            refusal: Refusal | None = refusals.draining(self._limits.retry_after_min_s * jitter)
        else:
            refusal = self._admission.refusal(ticket, now)
        if refusal is None and self._quarantine.refuses(ticket, now):
            refusal = refusals.poison(ticket)
        if refusal is not None:
            self._submitted += 1
            ticket.trail = Trail(ticket.sampled)
            self._note_refusal(ticket, now)
            self._finish(ticket, refusal.outcome)
        return refusal

    def submit(self, ticket: Ticket, now: float) -> Refusal | None:
        """Queues a ticket; ``None`` when it waits. Otherwise it is over, with one of QUEUE_FULL,
        HOPELESS, NO_INSTANCE, DRAINING, POISON or DEADLINE_EXCEEDED. O(log n)."""
        assert ticket.id not in self._tickets, "two tickets with one id"
        refusal = self.refuse(ticket, now)
        if refusal is None:
            self._submitted += 1
            self._tickets[ticket.id] = ticket
            ticket.trail = Trail(ticket.sampled, round(self._admission.ahead_of(ticket)))
            self._enqueue(ticket, now)
        return refusal

    def turn(self, now: float) -> list[Effect]:
        """Expires what is too late, then places what waits as long as there is room. Effects are
        in the order in which they happened. O(dispatches + lines), each times the columns."""
        effects: list[Effect] = []
        self._look(now)
        self._release(now, effects)
        self._expire(now, effects)
        self._place(now, effects)
        self._yields.look(now, lambda *who: effects.append(self._yield(*who)))
        return effects

    def cancel(
        self, ticket_id: TicketId, now: float, outcome: Outcome = Outcome.CANCELLED
    ) -> Abort | None:
        """Ends a ticket from the client's side. Waiting: it is over. Running: the effect to carry
        out. Unknown, or aborting already: nothing."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is TicketState.ABORTING:
            return None
        if ticket.state in _RUNS:
            return self._abort(ticket, outcome, None, now)
        self._withdraw(ticket)
        self._finish(ticket, outcome)
        return None

    def accepted(
        self, ticket_id: TicketId, attempt: int, prompt_tokens: int, cached_tokens: int, now: float
    ) -> None:
        """The engine took it; the exact prompt corrects the ledger and the learnt ratio."""
        ticket = self._holding(ticket_id, attempt)
        if ticket is None:
            return
        self._estimates.saw_prompt(ticket.model, ticket.size_bytes, prompt_tokens)
        ticket.prompt_tokens = prompt_tokens
        ticket.taken = True
        instance = self._fleet.at(ticket.row)
        block, kv_max = self._memory(instance)
        self._ledger.correct(ticket, cached_tokens, block, kv_max)
        if ticket.prefix is not None:
            self._cached_seen += cached_tokens
        self._fleet.changed(ticket.row)

    def first_token(self, ticket_id: TicketId, attempt: int, now: float) -> None:
        """The attempt made its first token; from here on only the total deadline counts."""
        ticket = self._holding(ticket_id, attempt)
        if ticket is None or ticket.first_token:
            return
        ticket.first_token = True
        self._estimates.saw_first_token(ticket.line, now - ticket.dispatched_s)
        self._judge_first_token(ticket, now)
        self._ledger.first_token(ticket)
        self._fleet.changed(ticket.row)
        if ticket.state in _RUNS:
            self._watch_running(ticket)

    def progressed(self, ticket_id: TicketId, attempt: int, tokens: int) -> None:
        """``tokens``: output tokens of this attempt so far, over all its outputs."""
        ticket = self._holding(ticket_id, attempt)
        if ticket is None or tokens <= ticket.generated_tokens:
            return
        ticket.generated_tokens = tokens
        self._quarantine.progressed(ticket)
        block, kv_max = self._memory(self._fleet.at(ticket.row))
        self._ledger.progress(ticket, block, kv_max)
        self._fleet.changed(ticket.row)

    def rejected(self, ticket_id: TicketId, attempt: int, kind: RejectKind, now: float) -> None:
        """The instance did not take it: back to the head of its class, uncharged. NO_ROOM pauses
        the instance, DRAINING closes it until its next report, EXPIRED makes the ticket too late,
        LAPSED does nothing more.
        """
        ticket = self._holding(ticket_id, attempt)
        if ticket is None:
            return
        self._judge(ticket, Verdict.NEUTRAL, now)
        instance = self._free(ticket, now)
        _note_end(ticket, "rejected", kind.value)
        if kind is RejectKind.EXPIRED:
            ticket.deadline_s = min(ticket.deadline_s, now)
        elif kind is RejectKind.LAPSED or instance.removed:
            pass  # says nothing about the instance; and a removed one starts nothing any more
        elif kind is RejectKind.NO_ROOM:
            self._fleet.pause(instance, now + self._limits.no_room_pause_s)
        else:
            self._fleet.drain(instance)
        if ticket.state is TicketState.ABORTING:
            self._finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
        else:
            self._return(ticket, now)

    def ended(
        self,
        ticket_id: TicketId,
        attempt: int,
        now: float,
        outcome: Outcome = Outcome.FINISHED,
        output_tokens: int | None = None,
    ) -> None:
        """The generation is over and its room free. ``outcome``: how, unless an abort was under
        way; ``output_tokens``: the exact count, if known."""
        ticket = self._current(ticket_id, attempt)
        if ticket is None:
            return
        self._judge(ticket, verdict_of_end(outcome), now)
        if ticket.state in _HOLDS_ROOM:
            self._free(ticket, now)
        if ticket.state is TicketState.ABORTING:
            outcome = ticket.abort_outcome or outcome
        elif outcome is Outcome.FINISHED:
            if output_tokens is not None:
                ticket.generated_tokens = output_tokens
            tokens = ticket.resumed_tokens + ticket.generated_tokens
            self._estimates.saw_end(ticket, tokens, ticket.ran_s + now - ticket.dispatched_s)
            self._quarantine.clear(ticket)
            self._budget.served()
        self._finish(ticket, outcome)

    def failed(
        self, ticket_id: TicketId, attempt: int, kind: FaultKind, now: float, delivered: int
    ) -> Literal["requeued", "ended"] | Refusal:
        """The attempt failed through no fault of the request. ``delivered``: output tokens over all
        attempts so far. None: "requeued" for another instance, ``attempts_max`` times in all. Some:
        "requeued" to go on with them elsewhere, if it can be, ``migrations_max`` times. Both as far
        as the retry budget goes. Otherwise, and for poison, the error for the client. "ended":
        stale or aborting, so nobody waits for an answer. What shows that the instance is not what
        its last report says also closes it until its next one: more would use up their attempts
        there."""
        ticket = self._current(ticket_id, attempt)
        if ticket is None:
            return "ended"
        self._judge(ticket, verdict_of_failure(kind), now)
        known = self._fleet.get(ticket.instance) if ticket.instance is not None else None
        if kind in _NOT_AS_REPORTED and known is not None:
            self._fleet.close(known, kind.value, silent=False)
        poison = self._quarantine.died(ticket, kind, now, int(delivered))
        if ticket.state in _HOLDS_ROOM:
            self._free(ticket, now)
        if ticket.state is TicketState.ABORTING:
            self._finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
            return "ended"
        _note_end(ticket, "lost", kind.value)
        ticket.attempts += 1
        if poison:
            self._finish(ticket, Outcome.POISON)
            return refusals.poison(ticket)
        if delivered:
            again = self._goes_on(ticket, kind) and self._may_retry(ticket, kind, now)
            ticket.migrations += again
            self._yields.moves["failure"] += again
            ticket.resumed_tokens, ticket.generated_tokens = delivered, 0
        else:
            again = ticket.attempts < self._limits.attempts_max
            again = again and self._may_retry(ticket, kind, now)
        if not again:
            self._finish(ticket, Outcome.INSTANCE_FAILED)
            return refusals.instance_lost(ticket, delivered=bool(delivered))
        assert ticket.instance is not None
        if not (delivered and kind is FaultKind.LOST_RELAY):
            ticket.excluded.add(ticket.instance)
        self._return(ticket, now, paced=kind in LOSSES)
        return "requeued"

    def yielded(
        self, ticket_id: TicketId, attempt: int, now: float, delivered: int
    ) -> Literal["requeued", "ended", "unasked"]:
        """The instance stopped the attempt without an end of its own. ``delivered``: output tokens
        over all attempts so far. "requeued": it waits again, to go on with them. "ended": stale or
        aborting. "unasked": nothing has changed; an instance that stops of itself has failed."""
        ticket = self._current(ticket_id, attempt)
        if ticket is None:
            return "ended"
        if ticket.state is TicketState.ABORTING:
            self._free(ticket, now)
            self._finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
            return "ended"
        if ticket.state is not TicketState.YIELDING:
            return "unasked"
        self._judge(ticket, Verdict.NEUTRAL, now)
        _note_end(ticket, "yielded", ticket.yield_cause)
        self._free(ticket, now)
        ticket.resumed_tokens = delivered
        self._return(ticket, now)
        return "requeued"

    # --- instances -----------------------------------------------------------------------------

    def report(self, report: InstanceReport, now: float) -> bool:
        """Takes in what an instance says of itself; a new one joins. False: the fleet is full."""
        known = self._fleet.get(report.name)
        busy = known is not None and self._ledger.load(known.row).reads_full_steps(
            report.step_tokens_max
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
            self._fleet_full += 1
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
        stream is free and the credit gone. Returns the tickets that wait for an answer: ``failed``
        decides on each. EMBED tickets run over calls of their own and stay."""
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
            self._free(ticket, now)
            if ticket.state is TicketState.ABORTING:
                self._finish(ticket, ticket.abort_outcome or Outcome.CANCELLED)
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

    def drain_instance(self, instance: InstanceName, drain: bool, now: float) -> bool:
        """An operator closes an instance, or opens it again. What runs there and is expected to
        run on for long goes on elsewhere, if it can; the rest ends there. False: not known."""
        known = self._fleet.get(instance)
        if known is not None:
            self._fleet.drain_by_hand(known, drain)
        return known is not None

    # --- the rest ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuses new tickets from now on; what waits and runs goes on."""
        self._draining = True

    def next_wakeup(self, now: float) -> float | None:
        """The earliest time at which ``turn`` would change something by time alone."""
        timer = self._timers.peek()
        times = [None if timer is None else timer[0][0], self._yields.next_s]
        times.append(self._pacing.next_s(now, self._quarantine.go_at_s))
        if len(self._queue):
            times += [self._fleet.next_change(), self._admission.next_impatience()]
            times.append(self._holds_until_s)
        known = [time for time in times if time is not None and time < inf]
        return max(now, min(known)) if known else None

    def demand(self, instance: InstanceName) -> Demand:
        """What would run there if it had the room: what runs there and all that waits for it."""
        known = self._fleet.get(instance)
        if known is None:
            return Demand(0, 0)
        load = self._ledger.load(known.row)
        waiting, kv_tokens = self._queue.waiting((known.report.model, WorkKind.GENERATE))
        return Demand(load.sequences + waiting, load.kv_tokens + kv_tokens)

    def load_of(self, model: str) -> FleetLoad:
        """How busy the instances are that generate with a model, for the agent gate."""
        line = (model, WorkKind.GENERATE)
        running = self._ledger.running(line)
        parallel = running + self._fleet.free_for(line)
        service_s = self._estimates.service_s(line)
        if not parallel:
            return FleetLoad(1.0, inf)
        waiting = self._queue.waiting(line)[0]
        return FleetLoad(running / parallel, waiting * (service_s or 0.0) / parallel)

    def serves(self, model: str) -> bool:
        """Whether any known instance, usable or not, has this model."""
        return self._fleet.has_model(model)

    def expected_prompt_tokens(self, model: str, size_bytes: int) -> int:
        """Tokens of a text of that size, by the ratio learnt for the model."""
        return self._estimates.prompt_tokens(model, size_bytes)

    def readable_tokens(self, model: str, prompt_tokens: int) -> int:
        """Of a prompt's tokens, as many as any instance of the model can read. A longer one is
        refused by the instance, with exact counts; it must not wait for room that nobody has, and
        hold up others meanwhile."""
        return int(min(prompt_tokens, self._fleet.longest_context(model)))

    def expected_output_tokens(self, tenant: str, model: str, max_tokens: int | None) -> int:
        """Output tokens by what this tenant's requests of the model needed; at most max_tokens."""
        return self._estimates.output_tokens(tenant, model, max_tokens)

    def engine_seconds(self, ticket: Ticket, now: float) -> float:
        """Engine time given to a ticket so far, over all its attempts."""
        if ticket.state not in _HOLDS_ROOM:
            return ticket.engine_s
        return ticket.engine_s + self._engine_time.so_far(ticket.row, ticket.engine_mark_s, now)

    def prefix_block(self, model: str) -> PrefixBlock | None:
        """The block in which prompts for the model are to be hashed; ``None``: not at all, since
        the policy does not look or no instance of it is known."""
        if self._prefixes is None:
            return None
        return self._prefix_blocks.block(model, self._estimates.bytes_per_token(model))

    def snapshot(self) -> Snapshot:
        """Plain numbers for metrics and status. O(instances)."""
        return Snapshot(
            submitted=self._submitted,
            outcomes=dict(self._outcomes),
            waiting={cls: self._queue.usage(cls).requests for cls in PriorityClass},
            waiting_bytes={cls: self._queue.usage(cls).size_bytes for cls in PriorityClass},
            waiting_lines={line: self._queue.waiting(line)[0] for line in self._queue.lines()},
            running=len(self._ledger),
            instances={
                i.name: InstanceStatus.of(i, self._ledger.load(i.row))
                for i in self._fleet.instances()
            },
            refused_reports=self._fleet_full,
            draining=self._draining,
            prefix_tokens_expected=self._cached_expected,
            prefix_tokens_cached=self._cached_seen,
            returning=len(self._pacing),
            retries=self._budget.taken,
            retries_refused=self._budget.refused,
            suspected=self._quarantine.counts()[0],
            poisoned=self._quarantine.counts()[1],
            prefix_evictions=0 if self._prefixes is None else self._prefixes.evictions,
            moves=dict(self._yields.moves),
        )

    def check_invariants(self) -> None:
        """Recounts everything; raises AssertionError. O(everything), for tests."""
        self._queue.check()
        self._ledger.check()
        self._fleet.check()
        self._estimates.check()
        for instance in self._fleet.instances():
            load = self._ledger.load(instance.row)
            assert self._engine_time.running(instance.row) == len(load.tickets)
        self._timers.check()
        self._yields.check()
        states = Counter(ticket.state for ticket in self._tickets.values())
        assert states[TicketState.NEW] == states[TicketState.ENDED] == 0
        assert states[TicketState.WAITING] == len(self._queue)
        assert sum(states[state] for state in _HOLDS_ROOM) == len(self._ledger)
        assert states[TicketState.RETURNING] == len(self._pacing)
        self._quarantine.check()
        assert self._submitted == len(self._tickets) + self._outcomes.total()
        timed = {TicketState.WAITING, TicketState.RETURNING, TicketState.LOST, *_RUNS}
        for ticket in self._tickets.values():
            assert (ticket.id in self._timers) == (ticket.state in timed)
        assert len(self._timers) == sum(states[state] for state in timed)

    # --- turn ----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Lets time pass for reports, pauses and absences."""
        self._fleet.refresh(now)
        self._admission.look(now)

    def _expire(self, now: float, effects: list[Effect]) -> None:
        """Ends tickets whose time has come, and those that waited too long for any instance."""
        while (entry := self._timers.peek()) is not None and entry[0][0] <= now:
            self._timers.pop()
            ticket = entry[2]
            if ticket.state in _RUNS:
                error = self._too_late_running(ticket, now)
                effects.append(self._abort(ticket, error.outcome, error, now))
                continue
            if self._waits_on(ticket, now):
                continue
            error = self._too_late_waiting(ticket, now)
            if ticket.state is TicketState.WAITING:
                self._note_refusal(ticket, now)
            self._withdraw(ticket)
            effects.append(Refuse(ticket, error.outcome, error))
            self._finish(ticket, error.outcome)
        for line in self._queue.lines():
            if self._admission.patience_until(line, now) <= now:
                self._refuse_line(line, now, effects)

    def _refuse_line(self, line: Line, now: float, effects: list[Effect]) -> None:
        for ticket in sorted(self._queue.tickets(line), key=lambda t: t.id):
            error = self._admission.no_instance(ticket, now)
            if ticket.resumed_tokens:
                error = refusals.instance_lost(ticket, delivered=True)
            self._queue.leave(ticket, served=False)
            self._note_refusal(ticket, now)
            effects.append(Refuse(ticket, error.outcome, error))
            self._finish(ticket, error.outcome)

    def _release(self, now: float, effects: list[Effect]) -> None:
        """Lets tickets back into the queue after a loss, at their pace and suspects apart."""
        if not self._pacing:
            return
        for ticket in self._pacing.release(now, lambda ticket: self._may_go(ticket, now)):
            if ticket.suspicion is not None and ticket.suspicion.poison:
                error = refusals.poison(ticket)  # its like was convicted meanwhile
                effects.append(Refuse(ticket, error.outcome, error))
                self._finish(ticket, error.outcome)
            else:
                self._enqueue(ticket, now)

    def _may_go(self, ticket: Ticket, now: float) -> bool:
        if ticket.suspicion is None:
            return True
        usable = self._fleet.usable(ticket.line)
        known = filter(None, map(self._fleet.get, ticket.excluded))
        spent = sum(bool(usable[instance.row]) for instance in known)
        return self._quarantine.may_go(ticket, int(np.count_nonzero(usable)) - spent, now)

    def _may_retry(self, ticket: Ticket, kind: FaultKind, now: float) -> bool:
        """The first failover after a loss is free; everything else is the budget's."""
        if kind in LOSSES and not ticket.failed_over:
            ticket.failed_over = True
            return True
        return self._budget.take(now)

    def _place(self, now: float, effects: list[Effect]) -> None:
        """Line by line: takes the next ticket, finds it a row, dispatches it or sets it aside."""
        self._holds_until_s = inf
        for line in self._queue.lines():
            dispatches: list[Dispatch] = []
            scan = Scan(
                line,
                self._fleet,
                self._placement,
                self._limits,
                self._prefixes,
                now,
                self._quarantine,
            )
            while scan.is_open:
                ticket = self._queue.take(line, scan.tried, self._limits.bypass_max)
                if ticket is None:
                    break
                row = scan.find(ticket)
                if row is None:
                    scan.set_aside(ticket)
                else:
                    if ticket.trail is not None:
                        ticket.trail.placed(scan.placement(ticket, row, self._closed))
                    dispatches.append(self._dispatch(ticket, row, now, scan.cached_tokens))
                    scan.took(row)
            for ticket in scan.aside:
                self._queue.restore(ticket)
            self._holds_until_s = min(self._holds_until_s, scan.holds_until_s)
            effects += side_by_side(dispatches)

    def _dispatch(self, ticket: Ticket, row: int, now: float, cached_tokens: int) -> Dispatch:
        self._queue.leave(ticket, served=True)
        instance = self._fleet.at(row)
        block, kv_max = self._memory(instance)
        self._ledger.take(ticket, row, block, kv_max, cached_tokens)
        ticket.engine_mark_s = self._engine_time.begin(row, now)
        self._fleet.refresh_row(row)
        if self._prefixes is not None and ticket.prefix is not None:
            self._prefixes.note(ticket.prefix.hashes, row, now)
            self._cached_expected += cached_tokens
        ticket.state = TicketState.RUNNING
        ticket.attempt += 1
        ticket.row, ticket.instance = row, instance.name
        ticket.dispatched_s = now
        ticket.first_token_expected_s = self._fleet.first_token_s(row)
        self._quarantine.boards(ticket)
        ticket.trial = instance.breaker.begin()
        if instance.breaker.state is BreakerState.HALF_OPEN:
            self._fleet.judged(instance)
        ticket.passed_over = 0
        if not ticket.resumed_tokens:
            ticket.fingerprint = instance.report.fingerprint
        self._yields.dispatched(ticket)
        self._watch_running(ticket)
        return Dispatch(ticket, instance.name, ticket.attempt)

    # --- life of a ticket ----------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket, now: float) -> None:
        ticket.state = TicketState.WAITING
        ticket.row = ticket.held_row = -1
        self._queue.push(ticket)
        self._quarantine.returns(ticket)
        self._watch_waiting(ticket, now)

    def _watch_waiting(self, ticket: Ticket, now: float) -> None:
        at = self._admission.hopeless_at(ticket, now)
        if ticket.resumed_tokens:
            ticket.stranded = False
            at = min(ticket.deadline_s, now + self._limits.no_instance_wait_s)
        self._timers.push(ticket.id, (at,), ticket)

    def _return(self, ticket: Ticket, now: float, paced: bool = False) -> None:
        """Back to the head of its class, as if it had not run, or to go on from where it is.
        ``paced``: when its turn comes."""
        ticket.taken = bool(ticket.resumed_tokens)
        if ticket.resumed_tokens:
            ticket.ran_s += now - ticket.dispatched_s
        ticket.generated_tokens = 0
        ticket.first_token = False
        ticket.held_until_s = None
        if not paced:
            self._enqueue(ticket, now)
            return
        ticket.state = TicketState.RETURNING
        self._pacing.push(ticket, ticket.suspicion.tokens if ticket.suspicion is not None else 0)
        self._watch_waiting(ticket, now)

    def _withdraw(self, ticket: Ticket) -> None:
        """Out of the queue, or off the way there."""
        if ticket.state is TicketState.WAITING:
            self._queue.leave(ticket, served=False)
        elif ticket.state is TicketState.RETURNING:
            self._pacing.remove(ticket)

    def _watch_running(self, ticket: Ticket) -> None:
        """The instance ends it at its deadline; the timer is the backstop, hence the grace."""
        at = ticket.deadline_s + self._limits.deadline_grace_s
        begun = ticket.first_token or ticket.resumed_tokens
        if not begun and ticket.kind is WorkKind.GENERATE:
            at = min(at, ticket.first_token_limit_s)
        self._timers.push(ticket.id, (at,), ticket)

    def _abort(self, ticket: Ticket, outcome: Outcome, error: Refusal | None, now: float) -> Abort:
        assert ticket.instance is not None
        verdict = verdict_of_end(outcome)
        if outcome is Outcome.FIRST_TOKEN_TIMEOUT and self._is_slow(ticket, now):
            verdict = Verdict.FAULT  # the limit is the client's word, which proves nothing
        self._judge(ticket, verdict, now)
        ticket.state = TicketState.ABORTING
        ticket.abort_outcome = outcome
        self._ledger.leave(ticket.id)
        self._timers.remove(ticket.id)
        return Abort(ticket, ticket.instance, ticket.attempt, outcome, error)

    def _judge_first_token(self, ticket: Ticket, now: float) -> None:
        slow = self._is_slow(ticket, now)
        took_s = now - ticket.dispatched_s
        self._pace.saw(ticket.line, ticket.first_token_expected_s, took_s)
        if ticket.trial >= 0:
            instance = self._fleet.at(ticket.row)
            before = instance.breaker.state
            spare = slow and self._fleet.can_spare(ticket.row)
            instance.breaker.first_token(ticket.trial, slow, spare, now)
            if not instance.breaker.state is before is BreakerState.CLOSED:
                self._fleet.judged(instance)

    def _is_slow(self, ticket: Ticket, now: float) -> bool:
        limit_s = self._pace.limit_s(ticket.line, ticket.first_token_expected_s)
        return now - ticket.dispatched_s > limit_s

    def _judge(self, ticket: Ticket, verdict: Verdict, now: float) -> None:
        """Tells the instance's breaker what became of the attempt; once per attempt."""
        trial, ticket.trial = ticket.trial, -1
        instance = self._fleet.get(ticket.instance) if ticket.instance is not None else None
        if trial < 0 or instance is None:
            return
        before = instance.breaker.state
        instance.breaker.end(trial, verdict, ticket.first_token, now)
        if not instance.breaker.state is before is BreakerState.CLOSED:
            self._fleet.judged(instance)

    def _yield(self, ticket: Ticket, cause: str, now: float) -> Yield:
        """Its place is wanted; ``yielded`` puts it back into the queue."""
        assert ticket.instance is not None
        assert ticket.state is TicketState.RUNNING
        ticket.state = TicketState.YIELDING
        ticket.yields += 1
        ticket.yielded_s, ticket.yield_cause = now, cause
        self._ledger.leave(ticket.id)
        return Yield(ticket, ticket.instance, ticket.attempt)

    def _goes_on(self, ticket: Ticket, kind: FaultKind) -> bool:
        """Whether what was begun may go on after a failure: on another instance that has the model
        which began it, be it down for the moment. Losing the relay says nothing of the instance."""
        if not ticket.continuable or ticket.migrations >= self._limits.migrations_max:
            return False
        failed = None if kind is FaultKind.LOST_RELAY else ticket.instance
        return any(
            instance.name != failed
            and not instance.removed
            and instance.report.model == ticket.model
            and instance.report.fingerprint == ticket.fingerprint
            for instance in self._fleet.instances()
        )

    def _waits_on(self, ticket: Ticket, now: float) -> bool:
        """Whether a ticket that was begun and waits may wait on: one whose model was to be had
        nowhere at two looks in a row is given up. Others of its line may be served meanwhile."""
        if not ticket.resumed_tokens or ticket.state not in _WAITS:
            return False
        usable = allowed_rows(ticket, self._fleet, self._fleet.usable(ticket.line)).any()
        if ticket.deadline_s <= now or (ticket.stranded and not usable):
            return False
        ticket.stranded = not usable
        at = min(ticket.deadline_s, now + self._limits.no_instance_wait_s)
        self._timers.push(ticket.id, (at,), ticket)
        return True

    def _too_late_waiting(self, ticket: Ticket, now: float) -> Refusal:
        if ticket.resumed_tokens and ticket.deadline_s > now:
            return refusals.instance_lost(ticket, delivered=True)
        return self._admission.too_late(ticket, now)

    def _free(self, ticket: Ticket, now: float) -> Instance:
        """Gives the ticket's room back; returns the instance that had it."""
        self._quarantine.leaves(ticket)
        row = self._ledger.free(ticket.id)
        ticket.engine_s += self._engine_time.end(row, ticket.engine_mark_s, now)
        instance = self._fleet.at(row)
        self._yields.freed(ticket)
        self._fleet.freed(instance)
        return instance

    def _note_refusal(self, ticket: Ticket, now: float) -> None:
        """It waits no more: notes what stood in its way."""
        usable = self._fleet.usable(ticket.line)
        sequence = usable & self._fleet.with_sequence(ticket.kind)
        closed = self._closed.counts(ticket.line, now)
        removed = removed_by(closed, (("usable", usable), ("no_room", sequence)))
        assert ticket.trail is not None
        ticket.trail.placed(
            Placement("", now, removed=removed, base_tokens=ticket.resumed_tokens, end="refused")
        )

    def _forget_prefixes(self, instance: Instance) -> None:
        if self._prefixes is not None:
            self._prefixes.forget(instance.row)

    def _finish(self, ticket: Ticket, outcome: Outcome) -> None:
        """The one place where a ticket ends."""
        assert ticket.state is not TicketState.ENDED, "ended twice"
        ticket.state = TicketState.ENDED
        self._quarantine.leaves(ticket)
        self._timers.remove(ticket.id)
        self._tickets.pop(ticket.id, None)
        self._queue.settle(ticket, _took(ticket, outcome))
        self._outcomes[outcome] += 1

    def _current(self, ticket_id: TicketId, attempt: int) -> Ticket | None:
        """The ticket, if this attempt of it is not over."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.attempt != attempt:
            return None
        return None if ticket.state in _WAITS else ticket

    def _holding(self, ticket_id: TicketId, attempt: int) -> Ticket | None:
        """The ticket, if it holds room in this attempt."""
        ticket = self._current(ticket_id, attempt)
        return ticket if ticket is not None and ticket.state in _HOLDS_ROOM else None

    def _memory(self, instance: Instance) -> tuple[int, int]:
        """KV tokens per block, and KV tokens that are planned with."""
        return max(1, instance.report.kv_block_tokens), self._fleet.kv_max(instance)

    @staticmethod
    def _too_late_running(ticket: Ticket, now: float) -> Refusal:
        if ticket.deadline_s <= now or ticket.first_token or ticket.resumed_tokens:
            return refusals.deadline_exceeded()
        return refusals.first_token_timeout()


def _note_end(ticket: Ticket, end: str, cause: str) -> None:
    if ticket.trail is not None:
        ticket.trail.ended(end, cause)


def _took(ticket: Ticket, outcome: Outcome) -> int:
    """Weighted tokens that a ticket took of the engines over all its attempts: a prompt counts once
    an instance has taken it. What an instance that failed took for nothing is nobody's."""
    output = ticket.resumed_tokens + ticket.generated_tokens
    if outcome is Outcome.INSTANCE_FAILED and not output:
        return 0
    # Embeddings are not accepted before their end.
    taken = ticket.taken or outcome is Outcome.FINISHED
    return (ticket.prompt_tokens if taken else 0) + OUTPUT_WEIGHT * output
