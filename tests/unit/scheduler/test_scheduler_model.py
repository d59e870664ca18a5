"""The whole scheduler under random histories, against a reference that keeps plain lists.

The reference knows nothing of heaps, columns or holds: it records what instances said and what
effects came, and judges each effect and each state by counting anew."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.domain.admission import FIRST_TOKEN_SHARE
from scheduler_svc.domain.canonical import PrefixHasher
from scheduler_svc.domain.limits import BreakerLimits, ClassLimits, RetryLimits
from scheduler_svc.domain.model import (
    Abort,
    Dispatch,
    FaultKind,
    InstanceName,
    InstanceReport,
    Outcome,
    Prefix,
    PriorityClass,
    Refusal,
    RejectKind,
    Ticket,
    TicketId,
    WorkKind,
    Yield,
)
from scheduler_svc.domain.placement import LeastWork, PrefixAffinity, Weighted
from scheduler_svc.domain.scheduler import Scheduler
from scheduler_svc.ports import PlacementPolicy
from tests.unit.scheduler.scheduling import SEARCH, SEARCH_TIMEOUT_S, a_report, a_ticket, limits

NAMES = ("a", "b", "c")
PAUSE_S, STALE_S, ABSENT_S, ATTEMPTS = 0.5, 3.0, 4.0, 3
MIGRATIONS, YIELDS = 2, 2
STEP_TOKENS = 600
HASHER = PrefixHasher(b"test")
EVENTS = ("accepted", "first_token", "progressed", "ended", "failed", "yielded", *RejectKind)


@dataclass(eq=False)
class Known:
    """What an instance said, and what was done to it."""

    report: InstanceReport
    at_s: float
    reachable: bool = True
    draining: bool = False
    drained_by_hand: bool = False
    credit: tuple[int, int] | None = None
    paused_until_s: float = 0.0


@dataclass(eq=False)
class Run:
    """An attempt that holds room."""

    ticket: Ticket
    instance: InstanceName
    attempt: int
    aborting: bool = False
    yielding: bool = False


@dataclass(eq=False)
class Reference:
    """Everything that happened, as lists."""

    instances: dict[InstanceName, Known] = field(default_factory=dict)
    waiting: list[Ticket] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)
    lost: list[Run] = field(default_factory=list)
    ended: dict[TicketId, Outcome] = field(default_factory=dict)
    paid: set[TicketId] = field(default_factory=set)  # were dispatched
    submitted: int = 0

    def on(self, name: InstanceName) -> list[Run]:
        return [run for run in self.running if run.instance == name]

    def end(self, ticket: Ticket, outcome: Outcome) -> None:
        assert ticket.id not in self.ended, "ended twice"
        self.ended[ticket.id] = outcome

    def usable(self, ticket: Ticket) -> list[InstanceName]:
        """Instances that may run it, room aside."""
        up = [
            name
            for name, known in self.instances.items()
            if known.report.model == ticket.model
            and known.report.serving
            and known.reachable
            and not known.draining
            and not known.drained_by_hand
            and (not ticket.resumed_tokens or known.report.fingerprint == ticket.fingerprint)
            and (known.report.generates if ticket.kind is WorkKind.GENERATE else False)
        ]
        return [name for name in up if name not in ticket.excluded] or up

    def has_sequence(self, name: InstanceName, now: float) -> bool:
        known, runs = self.instances[name], len(self.on(name))
        credit = known.credit[0] if known.credit else 0
        return runs < min(known.report.sequences_max, credit) and known.paused_until_s <= now

    def has_memory(self, name: InstanceName, ticket: Ticket) -> bool:
        """Whether KV memory, credit and the bound on prompts outstanding leave room."""
        known, runs = self.instances[name], self.on(name)
        memory = int(known.report.kv_tokens * (1 - limits().kv_reserve))
        block = known.report.kv_block_tokens
        held = sum(min(memory, blocks(run.ticket.kv_tokens, block)) for run in runs)
        free, credit = memory - held, (known.credit[1] if known.credit else 0)
        if not runs:
            free, credit = 10**9, (10**9 if credit else 0)
        outstanding = sum(run.ticket.read_tokens for run in runs if not run.ticket.first_token)
        prefill = 2 * known.report.step_tokens_max - outstanding
        fits_prefill = not outstanding or not known.report.step_tokens_max
        need = ticket.kv_tokens + block - 1
        return min(free, credit - held) >= need and (fits_prefill or ticket.read_tokens <= prefill)


def blocks(tokens: int, block: int) -> int:
    return (tokens + block - 1) // block * block


class SchedulerMachine(RuleBasedStateMachine):
    """Subclasses say how tight memory is, and who places."""

    policy: Callable[[int], PlacementPolicy] = LeastWork
    holds_max = 0
    kv_tokens = 10**6
    step_tokens = 0
    prompts = st.integers(1, 200)

    @initialize(seed=st.integers(0, 5), up=st.sampled_from([NAMES, NAMES, ("a", "b"), ("a",), ()]))
    def start(self, seed: int, up: tuple[str, ...]) -> None:
        bounds = ClassLimits(10, 9_000, 8, 8_000, 0.0)
        self.limits = limits(
            classes=dict.fromkeys(PriorityClass, bounds),
            instances_max=4,
            no_room_pause_s=PAUSE_S,
            report_stale_s=STALE_S,
            no_instance_wait_s=ABSENT_S,
            attempts_max=ATTEMPTS,
            breaker=BreakerLimits(faults_max=10**9, volume_min=10**9),  # test_breaker's
            retry=RetryLimits(budget_max=10**9),  # test_retry_budget's
            bypass_max=100,
            passed_over_max=10**9,
            prefix_index_bytes=100_000,
            holds_max=self.holds_max,
            migrations_max=MIGRATIONS,
            yields_max=YIELDS,
            yield_run_min_s=0.1,
            preemption_wait_s=0.05,
            credit_grace_s=0.1,
            yield_look_s=0.05,
            drain_run_max_s=0.5,
        )
        self.scheduler = Scheduler(self.limits, type(self).policy(seed))
        self.reference = Reference()
        self.now = 0.0
        self.turned = False
        for name in up:
            self.heal(name, "n" if name == "c" else "m", 2)

    # --- what clients do -----------------------------------------------------------------------

    @rule(
        wants=st.lists(
            st.tuples(
                st.sampled_from(PriorityClass),
                st.sampled_from("mmn"),
                st.sampled_from([50.0, 5.0, 0.5]),  # first-token limit
                st.sampled_from([100.0, 10.0, 1.0]),  # deadline
            ),
            min_size=1,
            max_size=5,
        ),
        data=st.data(),
    )
    def submit_and_turn(
        self, wants: list[tuple[PriorityClass, str, float, float]], data: st.DataObject
    ) -> None:
        for cls, model, limit_s, deadline_s in wants:
            self._submit(
                a_ticket(
                    priority_class=cls,
                    model=model,
                    tenant=data.draw(st.sampled_from("tu")),
                    prompt_tokens=data.draw(self.prompts),
                    prefix=self._prefix(data),
                    continuable=data.draw(st.booleans()),
                    output_tokens=data.draw(st.integers(1, 100)),
                    arrival_s=self.now,
                    first_token_limit_s=self.now + limit_s,
                    deadline_s=self.now + deadline_s,
                )
            )
        self.turn()

    def _prefix(self, data: st.DataObject) -> Prefix | None:
        return None

    def _submit(self, ticket: Ticket) -> None:
        model = ticket.model
        self.reference.submitted += 1
        known = any(k.report.model == model for k in self.reference.instances.values())
        refusal = self.scheduler.submit(ticket, self.now)
        if refusal is None:
            assert known
            self.reference.waiting.append(ticket)
        else:
            assert known or refusal.outcome is Outcome.NO_INSTANCE
            self.reference.end(ticket, refusal.outcome)
        self.turned = False

    @precondition(lambda self: self.reference.waiting or self.reference.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        runs = {run.ticket.id: run for run in [*self.reference.running, *self.reference.lost]}
        ticket = data.draw(
            st.sampled_from([*self.reference.waiting, *(run.ticket for run in runs.values())])
        )
        abort = self.scheduler.cancel(ticket.id, self.now)
        run = runs.get(ticket.id)
        if run is not None and run in self.reference.running and not run.aborting:
            assert abort == Abort(ticket, run.instance, run.attempt, Outcome.CANCELLED)
            run.aborting = True
        else:
            assert abort is None
            if run is None:
                self.reference.waiting.remove(ticket)
                self.reference.end(ticket, Outcome.CANCELLED)
            elif run in self.reference.lost:
                self.reference.lost.remove(run)
                self.reference.end(ticket, Outcome.CANCELLED)
        self.turned = False  # who waited behind it may go now

    # --- what instances do ---------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        model=st.sampled_from("mmn"),
        sequences=st.integers(1, 4),
        state=st.sampled_from(["up", "up", "stopped", "draining"]),
        fingerprint=st.sampled_from("ffg"),
    )
    def report(
        self, name: str, model: str, sequences: int, state: str, fingerprint: str = "f"
    ) -> None:
        report = a_report(
            name,
            model=model,
            fingerprint=fingerprint,
            sequences_max=sequences,
            serving=state != "stopped",
            draining=state == "draining",
            kv_tokens=self.kv_tokens,
            step_tokens_max=self.step_tokens,
        )
        assert self.scheduler.instances.report(report, self.now)
        known = self.reference.instances.setdefault(report.name, Known(report, self.now))
        known.report, known.at_s, known.reachable = report, self.now, True
        known.draining, known.paused_until_s = report.draining, 0.0
        self.turned = False

    @rule(name=st.sampled_from(NAMES), model=st.sampled_from("mmn"), sequences=st.integers(1, 4))
    def heal(self, name: str, model: str, sequences: int) -> None:
        self.report(name, model, sequences, "up")
        self._credit(InstanceName(name), sequences, self.kv_tokens)

    @precondition(lambda self: self.reference.instances)
    @rule(data=st.data(), sequences=st.integers(0, 5), share=st.sampled_from([1.0, 0.3]))
    def credit(self, data: st.DataObject, sequences: int, share: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.reference.instances)))
        self._credit(name, sequences, int(share * self.kv_tokens))

    def _credit(self, name: InstanceName, sequences: int, kv_tokens: int) -> None:
        self.scheduler.instances.credit(name, sequences, kv_tokens, self.now)
        known = self.reference.instances[name]
        known.credit, known.paused_until_s = (sequences, kv_tokens), 0.0
        self.turned = False

    @precondition(lambda self: self.reference.instances)
    @rule(data=st.data(), drain=st.booleans())
    def drain(self, data: st.DataObject, drain: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.reference.instances)))
        assert self.scheduler.instances.drain(name, drain, self.now)
        self.reference.instances[name].drained_by_hand = drain
        self.turned = False

    @precondition(lambda self: self.reference.instances)
    @rule(data=st.data(), fault=st.sampled_from(["unreachable", "lost", "removed"]))
    def fault(self, data: st.DataObject, fault: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.reference.instances)))
        if fault == "unreachable":
            self.scheduler.instances.unreachable(name, "test", self.now)
            self.reference.instances[name].reachable = False
        elif fault == "lost":
            self._lose(name)
        elif not self.reference.on(name):  # with something running it only stops serving
            self.scheduler.instances.remove(name, self.now)
            del self.reference.instances[name]
        self.turned = False  # who avoided another instance for this one may have it now

    def _lose(self, name: InstanceName) -> None:
        orphans = self.scheduler.instances.lost(name, self.now)
        here = self.reference.on(name)
        assert orphans == sorted(run.ticket.id for run in here if not run.aborting)
        for run in here:
            self.reference.running.remove(run)
            if run.aborting:
                self.reference.end(run.ticket, run.ticket.abort_outcome or Outcome.CANCELLED)
            else:
                self.reference.lost.append(run)
        self.reference.instances[name].credit = (0, 0)

    @precondition(lambda self: self.reference.running)
    @rule(data=st.data(), events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=4))
    def events_and_turn(self, data: st.DataObject, events: list[str | RejectKind]) -> None:
        for event in events:
            if self.reference.running:
                self._event(data, event, stale=data.draw(st.sampled_from([False] * 4 + [True])))
        self.turn()

    def _event(self, data: st.DataObject, event: str | RejectKind, *, stale: bool) -> None:
        run = data.draw(st.sampled_from(self.reference.running))
        ticket, attempt = run.ticket, run.attempt + (data.draw(st.sampled_from([-1, 1])) * stale)
        if event == "accepted":
            self.scheduler.attempts.accepted(
                ticket.id, attempt, data.draw(self.prompts), 0, self.now
            )
        elif event == "first_token":
            self.scheduler.attempts.first_token(ticket.id, attempt, self.now)
        elif event == "progressed":
            self.scheduler.attempts.progressed(ticket.id, attempt, data.draw(st.integers(0, 300)))
        elif event == "ended":
            self.scheduler.attempts.ended(ticket.id, attempt, self.now)
            if not stale:
                self._over(run, Outcome.FINISHED)
        elif event == "failed":
            self._failed(run, attempt, stale, delivered=data.draw(st.booleans()))
        elif event == "yielded":
            self._yielded(run, attempt, stale, data.draw(st.integers(1, 300)))
        else:
            assert isinstance(event, RejectKind)
            self.scheduler.attempts.rejected(ticket.id, attempt, event, self.now)
            if not stale:
                self._rejected(run, event)

    @precondition(lambda self: self.reference.lost)
    @rule(data=st.data(), end=st.booleans(), delivered=st.booleans())
    def decide_on_lost(self, data: st.DataObject, end: bool, delivered: bool) -> None:
        run = data.draw(st.sampled_from(self.reference.lost))
        if end:
            self.scheduler.attempts.ended(run.ticket.id, run.attempt, self.now)
            self.reference.lost.remove(run)
            self.reference.end(run.ticket, Outcome.FINISHED)
        else:
            self._failed(run, run.attempt, stale=False, delivered=delivered)
        self.turned = False

    # --- time and turns ------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.turned = False

    @rule()
    def wait_until_the_next_wakeup(self) -> None:
        at = self.scheduler.next_wakeup(self.now)
        if at is not None:
            assert at >= self.now
            self.now = at
            self.turn()
            again = self.scheduler.next_wakeup(self.now)
            assert again is None or again > self.now, "the owner would spin"

    @rule()
    def turn(self) -> None:
        effects = self.scheduler.turn(self.now)
        leaving = {effect.ticket.id for effect in effects if isinstance(effect, Dispatch)}
        for effect in effects:
            ticket = effect.ticket
            if isinstance(effect, Dispatch):
                assert effect.instance in self.reference.usable(ticket)
                assert self.reference.has_sequence(effect.instance, self.now)
                assert self.reference.has_memory(effect.instance, ticket)
                assert ticket.due_s > self.now
                self.reference.waiting.remove(ticket)
                self.reference.running.append(Run(ticket, effect.instance, effect.attempt))
                self._no_better_one_waits(ticket, effect.instance, leaving)
            elif isinstance(effect, Abort):
                (run,) = [r for r in self.reference.running if r.ticket is ticket]
                assert not run.aborting
                assert (effect.instance, effect.attempt) == (run.instance, run.attempt)
                assert ticket.due_s <= self.now or ticket.deadline_s <= self.now
                run.aborting = True
            elif isinstance(effect, Yield):
                self._asked_to_yield(effect)
            else:
                self._refused(ticket, effect.outcome)
        self.turned = True

    @invariant()
    def counts_agree(self) -> None:
        self.scheduler.check_invariants()
        reference, state = self.reference, self.scheduler.snapshot()
        assert sum(state.waiting.values()) == len(reference.waiting)
        assert state.running == len(reference.running)
        assert set(state.instances) == set(reference.instances)
        for name, status in state.instances.items():
            assert status.running == len(reference.on(name))
        assert state.submitted == reference.submitted
        for outcome in Outcome:
            expected = sum(ended is outcome for ended in reference.ended.values())
            assert state.outcomes.get(outcome, 0) == expected
        alive = len(reference.waiting) + len(reference.running) + len(reference.lost)
        assert alive + len(reference.ended) == reference.submitted

    @invariant()
    def nothing_waits_that_could_run(self) -> None:
        """Work-conserving: right after a turn no ticket waits while an instance it may use has room
        for it, unless a higher class waits for that instance."""
        if not self.turned or self._any_held():
            return
        for ticket in self.reference.waiting:
            for name in self.reference.usable(ticket):
                assert not self._fits(name, ticket) or any(
                    other.priority_class < ticket.priority_class
                    and other.line == ticket.line
                    and name in self.reference.usable(other)
                    for other in self.reference.waiting
                ), f"{ticket.id} waits for nothing"

    def teardown(self) -> None:
        """Liveness: once faults stop, everything ends and every counter returns to zero."""
        if not hasattr(self, "scheduler"):
            return
        for run in list(self.reference.lost):
            self._failed(run, run.attempt, stale=False, delivered=False)
        for _ in range(200):
            for name in NAMES:
                self.heal(name, "n" if name == "c" else "m", 4)
                self.scheduler.instances.drain(InstanceName(name), False, self.now)
                self.reference.instances[InstanceName(name)].drained_by_hand = False
            self.turn()
            for run in list(self.reference.running):
                self.scheduler.attempts.ended(run.ticket.id, run.attempt, self.now)
                self._over(run, Outcome.FINISHED)
            if not self.reference.waiting:
                break
            self.now += 0.1  # what nobody can go on with any more is given up
        assert not self.reference.waiting, "a ticket waits for ever"
        self.now += 1.0
        assert self.scheduler.turn(self.now) == []
        self.counts_agree()
        assert len(self.reference.ended) == self.reference.submitted
        assert self.scheduler.next_wakeup(self.now) is None

    # --- the reference's side of events --------------------------------------------------------

    def _any_held(self) -> bool:
        """Whether a ticket waits for the one instance that has its prefix: then order and idle
        room are not what they are without. Nobody is held beyond a bound."""
        held = [ticket for ticket in self.reference.waiting if ticket.held_row >= 0]
        for ticket in held:
            assert ticket.held_until_s is not None
            assert ticket.held_until_s <= self.now + self.limits.hold_max_s
        return bool(held)

    def _fits(self, name: InstanceName, ticket: Ticket) -> bool:
        return self.reference.has_sequence(name, self.now) and self.reference.has_memory(
            name, ticket
        )

    def _no_better_one_waits(
        self, ticket: Ticket, name: InstanceName, leaving: Set[TicketId]
    ) -> None:
        """Order: no ticket of a higher class, none of its class that came back while this one did
        not, and none of its tenant due earlier stays behind and could have gone there instead."""
        if self._any_held():
            self.reference.paid.add(ticket.id)
            return
        run = self.reference.running.pop()  # as it was just before the dispatch
        for other in self.reference.waiting:
            if other.line != ticket.line or name not in self.reference.usable(other):
                continue
            if other.id in leaving:
                continue  # in this turn too: arranged by instance and prefix
            higher = other.priority_class < ticket.priority_class
            same = other.priority_class == ticket.priority_class
            paid = other.id in self.reference.paid, ticket.id in self.reference.paid
            earlier = same and paid == (True, False)
            if same and (other.tenant == ticket.tenant or paid == (True, True)):
                due = (other.due_s, other.deadline_s) < (ticket.due_s, ticket.deadline_s)
                earlier = paid != (False, True) and (earlier or due)
            assert not higher, "a lower class went first"
            assert not earlier or not self._fits(name, other), "a later one went first"
        self.reference.running.append(run)
        self.reference.paid.add(ticket.id)

    def _over(self, run: Run, outcome: Outcome) -> None:
        self._freed(run)
        aborted = run.ticket.abort_outcome or Outcome.CANCELLED
        self.reference.end(run.ticket, aborted if run.aborting else outcome)

    def _freed(self, run: Run) -> None:
        self.reference.running.remove(run)
        self.reference.instances[run.instance].paused_until_s = 0.0

    def _failed(self, run: Run, attempt: int, stale: bool, *, delivered: bool) -> None:
        ticket, before = run.ticket, run.ticket.attempts
        known = ticket.resumed_tokens
        tokens = known + max(1, ticket.generated_tokens) if delivered else known
        goes_on = (
            ticket.continuable
            and ticket.migrations < MIGRATIONS
            and any(
                name != run.instance
                and other.report.model == ticket.model
                and other.report.fingerprint == ticket.fingerprint
                for name, other in self.reference.instances.items()
            )
        )
        result = self.scheduler.attempts.failed(
            ticket.id, attempt, FaultKind.ENGINE_ERROR, self.now, tokens
        )
        if stale:
            assert result == "ended"
            return
        if run in self.reference.lost:
            self.reference.lost.remove(run)
        else:
            self._freed(run)
        if run.aborting:
            assert result == "ended"
            self.reference.end(ticket, ticket.abort_outcome or Outcome.CANCELLED)
        elif not goes_on if tokens else before + 1 >= ATTEMPTS:
            assert isinstance(result, Refusal)
            self.reference.end(ticket, result.outcome)
        else:
            assert result == "requeued"
            assert run.instance in ticket.excluded
            assert ticket.resumed_tokens == tokens
            self.reference.waiting.append(ticket)

    def _asked_to_yield(self, effect: Yield) -> None:
        """Only what may go on yields, and only for one of three reasons."""
        ticket = effect.ticket
        (run,) = [r for r in self.reference.running if r.ticket is ticket]
        assert not run.aborting
        assert not run.yielding
        assert (effect.instance, effect.attempt) == (run.instance, run.attempt)
        assert ticket.continuable
        assert ticket.first_token
        known = self.reference.instances[run.instance]
        drains = known.draining or known.drained_by_hand
        sequences, kv_tokens = known.credit or (0, 0)
        on_here = [r.ticket for r in self.reference.on(run.instance) if not r.yielding]
        block = known.report.kv_block_tokens
        held = sum(blocks(t.read_tokens + t.generated_tokens, block) for t in on_here)
        preempted = ticket.priority_class is PriorityClass.BATCH and any(
            other.priority_class <= PriorityClass.INTERACTIVE and other.line == ticket.line
            for other in self.reference.waiting
        )
        assert drains or len(on_here) > sequences or held > kv_tokens or preempted
        assert drains or ticket.yields <= YIELDS
        run.yielding = True

    def _yielded(self, run: Run, attempt: int, stale: bool, tokens: int) -> None:
        ticket = run.ticket
        tokens += ticket.resumed_tokens
        result = self.scheduler.attempts.yielded(ticket.id, attempt, self.now, tokens)
        if stale or run.aborting:
            assert result == "ended"
            if not stale:
                self._over(run, Outcome.FINISHED)
        elif not run.yielding:
            assert result == "unasked"
        else:
            assert result == "requeued"
            assert ticket.resumed_tokens == tokens
            self._freed(run)
            self.reference.waiting.append(ticket)

    def _rejected(self, run: Run, kind: RejectKind) -> None:
        self._freed(run)
        known = self.reference.instances[run.instance]
        if kind is RejectKind.NO_ROOM:
            known.paused_until_s = self.now + PAUSE_S
        elif kind is RejectKind.DRAINING:
            known.draining = True
        if run.aborting:
            self.reference.end(run.ticket, run.ticket.abort_outcome or Outcome.CANCELLED)
        else:
            self.reference.waiting.append(run.ticket)

    def _refused(self, ticket: Ticket, outcome: Outcome) -> None:
        lost = [run for run in self.reference.lost if run.ticket is ticket]
        if lost:
            self.reference.lost.remove(lost[0])
        else:
            self.reference.waiting.remove(ticket)
        if outcome is Outcome.DEADLINE_EXCEEDED:
            assert ticket.deadline_s <= self.now
        elif outcome is Outcome.HOPELESS:
            likely_s = FIRST_TOKEN_SHARE * (ticket.due_s - ticket.arrival_s)
            assert ticket.due_s - likely_s <= self.now
        elif outcome is Outcome.INSTANCE_FAILED:
            assert ticket.resumed_tokens
            assert not self.reference.usable(ticket)
        else:
            assert outcome is Outcome.NO_INSTANCE
            up = self.reference.usable(ticket)
            assert not up, "there was an instance"
        self.reference.end(ticket, outcome)


class TightSchedulerMachine(SchedulerMachine):
    """KV memory and the bound on prompts outstanding bind before sequences do."""

    kv_tokens = 1_000
    step_tokens = STEP_TOKENS // 2
    prompts = st.sampled_from([1, 50, 200, 500, 900, 1_500])


class YieldingSchedulerMachine(SchedulerMachine):
    """Much batch work that has begun, few places: yields happen, are confirmed, and go on."""

    @rule(count=st.integers(1, 4), urgent=st.integers(0, 2))
    def fill(self, count: int, urgent: int) -> None:
        for number in range(count + urgent):
            cls = PriorityClass.BATCH if number < count else PriorityClass.CRITICAL
            self._submit(
                a_ticket(
                    priority_class=cls,
                    arrival_s=self.now,
                    first_token_limit_s=self.now + 50.0,
                    deadline_s=self.now + 100.0,
                    continuable=True,
                )
            )
        self.turn()

    @rule(tokens=st.integers(1, 60))
    def run_on(self, tokens: int) -> None:
        for run in self.reference.running:
            ticket = run.ticket
            self.scheduler.attempts.first_token(ticket.id, run.attempt, self.now)
            self.scheduler.attempts.progressed(
                ticket.id, run.attempt, max(tokens, ticket.generated_tokens)
            )
        self.now += 0.2
        self.turn()

    @precondition(lambda self: any(run.ticket.first_token for run in self.reference.running))
    @rule(data=st.data())
    def fail_what_has_begun(self, data: st.DataObject) -> None:
        begun = [run for run in self.reference.running if run.ticket.first_token]
        run = data.draw(st.sampled_from(begun))
        self._failed(run, run.attempt, stale=False, delivered=True)
        self.turn()

    @precondition(lambda self: any(run.yielding for run in self.reference.running))
    @rule(tokens=st.integers(1, 60))
    def stop_who_yields(self, tokens: int) -> None:
        for run in [run for run in self.reference.running if run.yielding]:
            self._yielded(run, run.attempt, False, tokens)
        self.turn()


class PrefixSchedulerMachine(SchedulerMachine):
    """A policy that reads prefixes, without holding."""

    policy: Callable[[int], PlacementPolicy] = Weighted

    def _prefix(self, data: st.DataObject) -> Prefix | None:
        blocks = data.draw(st.lists(st.integers(0, 1), max_size=5))
        hashes = HASHER.hashes(np.array(blocks, dtype=np.uint64).tobytes(), 8, [])
        return Prefix(hashes, len(blocks) + 0.5) if blocks else None


class HoldingSchedulerMachine(PrefixSchedulerMachine):
    """Tickets wait for the instance with their prefix."""

    policy: Callable[[int], PlacementPolicy] = PrefixAffinity
    holds_max = 2


@pytest.mark.timeout(SEARCH_TIMEOUT_S)
@pytest.mark.parametrize(
    "machine",
    [
        SchedulerMachine,
        TightSchedulerMachine,
        YieldingSchedulerMachine,
        PrefixSchedulerMachine,
        HoldingSchedulerMachine,
    ],
)
def test_the_scheduler_agrees_with_plain_lists_under_random_histories(
    machine: type[SchedulerMachine],
) -> None:
    """Goal: every ticket ends exactly once; nothing runs beyond credit, memory or a stop; order
    holds; no room is left idle; counters return to zero; the owner never spins. Method: random
    calls on three instances and two models, then a phase without faults. Oracle: ``Reference``.
    Seed: derandomised; ``SLUICE_TEST_THOROUGH=1`` searches at random and prints a blob to repeat.
    Mutants seen to fail: a credit, KV memory or bound on prompts not asked; a cancel that frees at
    once; a loss that keeps room or credit; a stale attempt heard; an exclusion, a drain or a broken
    watch ignored; a row not refreshed; first in first out; an end without its room; a head that
    blocks all; a wakeup too early; a yield that is an end; another model that goes on."""
    run_state_machine_as_test(machine, settings=SEARCH)
