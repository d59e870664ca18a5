"""The scheduler: admits tickets, keeps them in order, and places them where there is room.

Owns every ticket from :meth:`Scheduler.submit` to its one terminal outcome. One object for the
owner task: what clients want is called here, what instances say of an attempt at ``attempts``, what
becomes known of instances at ``instances``. Synchronous and single-threaded: the owner task calls
it, then carries out the effects; time is passed in. After any call but ``turn`` something may be
placeable: the owner calls ``turn`` soon, and at :meth:`Scheduler.next_wakeup`.

A ticket: NEW -> WAITING -> RUNNING -> ENDED; from RUNNING back to WAITING (rejected, or failed and
to be placed again), to LOST (its stream broke; ``failed`` decides), to YIELDING (its place is
wanted; WAITING again when the instance confirms) or to ABORTING (cancelled or too late; the room is
taken until the instance confirms). Events for another attempt than the current one are stale and
change nothing.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from scheduler_svc.domain import refusals
from scheduler_svc.domain.agent_gate import FleetLoad
from scheduler_svc.domain.attempts import Attempts
from scheduler_svc.domain.decision import Trail
from scheduler_svc.domain.expiry import Expiry
from scheduler_svc.domain.instances import Instances
from scheduler_svc.domain.life import HOLDS_ROOM, RUNS, Life
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    Abort,
    Demand,
    Effect,
    InstanceName,
    Outcome,
    PriorityClass,
    Refusal,
    Ticket,
    TicketId,
    TicketState,
    WorkKind,
)
from scheduler_svc.domain.placing import Placing
from scheduler_svc.domain.prefix_blocks import PrefixBlock
from scheduler_svc.domain.snapshot import InstanceStatus, Snapshot
from scheduler_svc.domain.state import State
from scheduler_svc.ports import PlacementPolicy


class Scheduler:
    """The whole domain behind one object; see the module's text for the rules of calling it."""

    def __init__(self, limits: SchedulerLimits, placement: PlacementPolicy) -> None:
        state = State(limits, placement)
        self._limits = limits
        self._tickets = state.tickets
        self._queue = state.queue
        self._ledger = state.ledger
        self._fleet = state.fleet
        self._engine_time = state.engine_time
        self._estimates = state.estimates
        self._prefixes = state.prefixes
        self._prefix_blocks = state.prefix_blocks
        self._budget = state.budget
        self._pacing = state.pacing
        self._quarantine = state.quarantine
        self._timers = state.timers
        self._admission = state.admission
        self._yields = state.yields
        self._life = Life(state)
        self._expiry = Expiry(state, self._life)
        self._placing = Placing(state, self._life)
        self.attempts = Attempts(state, self._life)
        self.instances = Instances(state, self._life)
        self._draining = False
        self._submitted = 0

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
            self._life.note_refusal(ticket, now)
            self._life.finish(ticket, refusal.outcome)
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
            self._life.enqueue(ticket, now)
        return refusal

    def turn(self, now: float) -> list[Effect]:
        """Expires what is too late, then places what waits as long as there is room. Effects are
        in the order in which they happened. O(dispatches + lines), each times the columns."""
        effects: list[Effect] = []
        self._fleet.refresh(now)  # reports go stale, pauses end
        self._admission.look(now)
        self._expiry.release(now, effects)
        self._expiry.expire(now, effects)
        self._placing.place(now, effects)
        self._yields.look(now, lambda *who: effects.append(self._life.give_way(*who)))
        return effects

    def cancel(
        self, ticket_id: TicketId, now: float, outcome: Outcome = Outcome.CANCELLED
    ) -> Abort | None:
        """Ends a ticket from the client's side. Waiting: it is over. Running: the effect to carry
        out. Unknown, or aborting already: nothing."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is TicketState.ABORTING:
            return None
        if ticket.state in RUNS:
            return self._life.abort(ticket, outcome, None, now)
        self._life.withdraw(ticket)
        self._life.finish(ticket, outcome)
        return None

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
            times.append(self._placing.holds_until_s)
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
        if ticket.state not in HOLDS_ROOM:
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
            outcomes=dict(self._life.outcomes),
            waiting={cls: self._queue.usage(cls).requests for cls in PriorityClass},
            waiting_bytes={cls: self._queue.usage(cls).size_bytes for cls in PriorityClass},
            waiting_lines={line: self._queue.waiting(line)[0] for line in self._queue.lines()},
            running=len(self._ledger),
            instances={
                i.name: InstanceStatus.of(i, self._ledger.load(i.row))
                for i in self._fleet.instances()
            },
            refused_reports=self.instances.refused_reports,
            draining=self._draining,
            prefix_tokens_expected=self._placing.cached_expected,
            prefix_tokens_cached=self.attempts.cached_seen,
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
        assert sum(states[state] for state in HOLDS_ROOM) == len(self._ledger)
        assert states[TicketState.RETURNING] == len(self._pacing)
        self._quarantine.check()
        assert self._submitted == len(self._tickets) + self._life.outcomes.total()
        timed = {TicketState.WAITING, TicketState.RETURNING, TicketState.LOST, *RUNS}
        for ticket in self._tickets.values():
            assert (ticket.id in self._timers) == (ticket.state in timed)
        assert len(self._timers) == sum(states[state] for state in timed)
