"""The queue: order, shares, bounds; and the heap under it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.domain.heap import DEAD_MAX, LazyHeap
from scheduler_svc.domain.limits import ClassLimits
from scheduler_svc.domain.model import PriorityClass, Ticket
from scheduler_svc.domain.queue import TicketQueue
from tests.unit.scheduler.scheduling import NO_SHARE, SEARCH, SEARCH_TIMEOUT_S, a_ticket

LINE = a_ticket().line


def a_queue(
    bounds: Mapping[PriorityClass, ClassLimits] = NO_SHARE,
    weights: Mapping[str, float] | None = None,
    tenants_idle_max: int = 100,
    put_off: int = 0,
) -> TicketQueue:
    return TicketQueue(bounds, weights or {}, tenants_idle_max, put_off)


def drain(queue: TicketQueue, count: int = 1_000_000) -> list[Ticket]:
    """Takes up to ``count`` tickets as if each were dispatched."""
    taken: list[Ticket] = []
    while len(taken) < count and (ticket := queue.take(LINE, {}, 1)) is not None:
        queue.leave(ticket, served=True)
        taken.append(ticket)
    return taken


def test_the_ticket_that_is_due_first_goes_first_whatever_came_first() -> None:
    queue = a_queue()
    late = a_ticket(deadline_s=60.0, first_token_limit_s=60.0)
    soon = a_ticket(deadline_s=1.0, first_token_limit_s=60.0)
    queue.push(late)
    queue.push(soon)
    assert drain(queue) == [soon, late]


def test_equal_due_times_fall_back_to_the_deadline_and_then_to_arrival() -> None:
    queue = a_queue()
    tickets = [a_ticket(deadline_s=deadline) for deadline in (60.0, 60.0, 40.0)]
    for ticket in tickets:
        queue.push(ticket)
    assert drain(queue) == [tickets[2], tickets[0], tickets[1]]


def test_a_ticket_that_came_back_goes_first_in_its_class_but_not_before_a_higher_one() -> None:
    queue = a_queue()
    urgent, back = a_ticket(first_token_limit_s=1.0), a_ticket()
    higher = a_ticket(priority_class=PriorityClass.CRITICAL)
    queue.push(back)
    assert drain(queue) == [back]
    for ticket in (urgent, back, higher):
        queue.push(ticket)
    assert drain(queue) == [higher, back, urgent]


def test_classes_go_strictly_in_order_when_no_share_is_owed() -> None:
    queue = a_queue()
    tickets = [a_ticket(priority_class=cls) for cls in reversed(PriorityClass) for _ in range(3)]
    for ticket in tickets:
        queue.push(ticket)
    assert drain(queue) == sorted(tickets, key=lambda t: (t.priority_class, t.id))


@pytest.mark.parametrize("put_off", [0, 4])
def test_each_class_gets_its_named_share_of_the_work_while_critical_work_never_ends(
    put_off: int,
) -> None:
    """Goal: no starvation, by work and not by requests. Method: all classes always wait, tickets of
    lower ones are larger. Oracle: shares of the tokens of 3,000 dispatches. Mutants seen to fail:
    ``served`` adds nothing to what is owed; it adds the same for every ticket."""
    shares = {
        PriorityClass.CRITICAL: 0.0,
        PriorityClass.INTERACTIVE: 0.10,
        PriorityClass.STANDARD: 0.05,
        PriorityClass.BATCH: 0.02,
    }
    bounds = {cls: ClassLimits(5_000, 10**9, 5_000, 10**9, share) for cls, share in shares.items()}
    queue = a_queue(bounds, put_off=put_off)
    for _ in range(3_000):
        for cls in PriorityClass:
            queue.push(a_ticket(priority_class=cls, prompt_tokens=100 * (1 + 3 * cls)))
    served: Counter[PriorityClass] = Counter()
    for ticket in drain(queue, 3_000):
        served[ticket.priority_class] += ticket.work_tokens
    for cls, share in shares.items():
        if share:
            # Owed for the dispatches of higher classes.
            higher = sum(served[other] for other in PriorityClass if other < cls)
            assert abs(served[cls] - share * higher) <= (2 + put_off) * 1_100


@pytest.mark.parametrize("put_off", [0, 3])
def test_a_ticket_of_a_lower_class_waits_for_a_bounded_amount_of_higher_work(put_off: int) -> None:
    """Mutant seen to fail: ``order`` that never lets an owed class go first."""
    bounds = {cls: ClassLimits(5_000, 10**9, 5_000, 10**9, 0.02) for cls in PriorityClass}
    for prompt_tokens in (1, 500, 5_000):
        queue = a_queue(bounds, put_off=put_off)
        large = a_ticket(priority_class=PriorityClass.BATCH, prompt_tokens=prompt_tokens)
        queue.push(large)
        passed = 0
        while True:
            queue.push(a_ticket(priority_class=PriorityClass.CRITICAL))
            (ticket,) = drain(queue, 1)
            if ticket is large:
                break
            passed += ticket.work_tokens
            assert passed <= (1 + put_off) * large.work_tokens / 0.02 + ticket.work_tokens


def test_what_is_owed_is_put_off_while_critical_work_waits_and_paid_in_the_next_gap() -> None:
    """Goal: a few urgent requests in a row wait for nobody below them, and nobody below loses by
    it. Method: critical ones in bursts of 30, interactive ones always wait, each standard one is
    owed after 10. Oracle: nothing goes before a critical one; in the gap after each burst the
    standard class gets, before interactive ones, what it was owed."""
    bounds = {
        cls: ClassLimits(5_000, 10**9, 5_000, 10**9, 0.1 if cls is PriorityClass.STANDARD else 0.0)
        for cls in PriorityClass
    }
    queue = a_queue(bounds, put_off=4)
    for _ in range(100):
        queue.push(a_ticket(priority_class=PriorityClass.INTERACTIVE))
        queue.push(a_ticket(priority_class=PriorityClass.STANDARD))
    for _ in range(5):
        for _ in range(30):
            queue.push(a_ticket(priority_class=PriorityClass.CRITICAL))
        served = [t.priority_class for t in drain(queue, 34)]
        assert served[:30] == [PriorityClass.CRITICAL] * 30
        assert served[30:] == [PriorityClass.STANDARD] * 3 + [PriorityClass.INTERACTIVE]
        queue.push(a_ticket(priority_class=PriorityClass.INTERACTIVE))


def test_nothing_is_owed_for_a_time_in_which_a_class_had_nothing_waiting() -> None:
    bounds = {cls: ClassLimits(5_000, 10**9, 5_000, 10**9, 0.5) for cls in PriorityClass}
    queue = a_queue(bounds)
    for _ in range(100):
        queue.push(a_ticket(priority_class=PriorityClass.CRITICAL))
    drain(queue, 50)
    for _ in range(3):
        queue.push(a_ticket(priority_class=PriorityClass.BATCH))
    assert [t.priority_class for t in drain(queue, 2)] == [PriorityClass.CRITICAL] * 2


def test_an_owed_class_offers_one_ticket_ahead_of_its_rank_and_no_second_one() -> None:
    """Mutant seen to fail: ``order`` that does not ask what was tried."""
    bounds = {cls: ClassLimits(50, 10**9, 50, 10**9, 1.0) for cls in PriorityClass}
    queue = a_queue(bounds)
    for cls in (PriorityClass.CRITICAL, PriorityClass.BATCH):
        for _ in range(3):
            queue.push(a_ticket(priority_class=cls))
    assert [t.priority_class for t in drain(queue, 1)] == [PriorityClass.CRITICAL]
    first = queue.take(LINE, {}, 4)
    second = queue.take(LINE, {PriorityClass.BATCH: 1}, 4)
    assert first is not None
    assert second is not None
    assert first.priority_class is PriorityClass.BATCH
    assert second.priority_class is PriorityClass.CRITICAL


@pytest.mark.parametrize(
    ("bounds", "size_bytes", "scope"),
    [
        (ClassLimits(2, 10**6, 9, 10**6, 0.0), 1, "class"),
        (ClassLimits(9, 1_000, 9, 10**6, 0.0), 400, "class"),
        (ClassLimits(9, 10**6, 2, 10**6, 0.0), 1, "tenant"),
        (ClassLimits(9, 10**6, 9, 1_000, 0.0), 400, "tenant"),
    ],
)
def test_each_bound_holds_exactly_and_says_whose_it_is(
    bounds: ClassLimits, size_bytes: int, scope: str
) -> None:
    queue = a_queue(dict.fromkeys(PriorityClass, bounds))
    tenants = ("t", "u") if scope == "class" else ("t", "t")
    for tenant in tenants:
        ticket = a_ticket(size_bytes=size_bytes, tenant=tenant)
        assert queue.full_for(ticket) is None
        queue.push(ticket)
    assert queue.full_for(a_ticket(size_bytes=size_bytes)) == scope
    other_tenant = a_ticket(size_bytes=size_bytes, tenant="other")
    assert queue.full_for(other_tenant) == (scope if scope == "class" else None)
    other_class = a_ticket(size_bytes=size_bytes, priority_class=PriorityClass.BATCH)
    assert queue.full_for(other_class) is None


@pytest.mark.parametrize("greedy", [1, 2, 5])
def test_tenants_that_fill_a_class_leave_room_for_one_more(greedy: int) -> None:
    """Mutant seen to fail: ``full_for`` without the rule that a tenant may have what is free."""
    queue = a_queue(dict.fromkeys(PriorityClass, ClassLimits(600, 10**6, 600, 10**6, 0.0)))
    for _ in range(600):
        for number in range(greedy):
            ticket = a_ticket(tenant=f"greedy-{number}")
            if queue.full_for(ticket) is None:
                queue.push(ticket)
    part = 600 // (greedy + 1)
    assert queue.usage(PriorityClass.STANDARD).requests == greedy * part
    for _ in range(part // 2):
        late = a_ticket(tenant="late")
        assert queue.full_for(late) is None
        queue.push(late)


def test_a_line_does_not_see_the_tickets_of_another_model() -> None:
    queue = a_queue()
    first = a_ticket(model="full", first_token_limit_s=1.0)
    other = a_ticket()
    queue.push(first)
    queue.push(other)
    assert queue.take(LINE, {}, 1) is other
    queue.restore(other)
    assert queue.waiting(first.line) == (1, first.kv_tokens)


def test_a_restored_ticket_is_where_it_was() -> None:
    queue = a_queue()
    tickets = [a_ticket() for _ in range(4)]
    for ticket in tickets:
        queue.push(ticket)
    taken = [queue.take(LINE, {}, 9) for _ in range(3)]
    for restored in reversed(taken):
        assert restored is not None
        queue.restore(restored)
    queue.check()
    assert drain(queue) == tickets


def test_the_place_in_the_queue_of_a_lone_tenant_is_exact_at_both_ends() -> None:
    queue = a_queue()
    for due_s in range(10, 20):
        queue.push(a_ticket(first_token_limit_s=float(due_s)))
    queue.push(a_ticket(priority_class=PriorityClass.CRITICAL))
    one = a_ticket().work_tokens
    assert queue.ahead_of(a_ticket(first_token_limit_s=1.0)) == 1 * one
    assert queue.ahead_of(a_ticket(first_token_limit_s=25.0)) == 11 * one
    assert 4 * one <= queue.ahead_of(a_ticket(first_token_limit_s=14.5)) <= 7 * one


def test_dead_entries_of_a_heap_are_bounded_by_the_live_ones() -> None:
    heap: LazyHeap[int] = LazyHeap()
    for number in range(10_000):
        heap.push(number, (float(number),), number)
    for number in range(9_990):
        heap.remove(number)
    heap.check()
    for _ in range(10_000):
        heap.push(9_995, (1.0,), 9_995)  # moved again and again
    heap.check()
    assert len(heap._heap) <= 2 * 10 + DEAD_MAX


WEIGHTS = {"u": 2.0, "v": 0.5}  # of other tenants: 1


@dataclass(eq=False)
class Standing:
    """A tenant in a class of a line, for the reference."""

    counter: float = 0.0
    lifted: float = 0.0
    since: int = 0


@dataclass(eq=False)
class Start:
    """Where the last dispatch of a class of a line was made, and of whom."""

    tenant: str = ""
    counter: float = 0.0


class QueueMachine(RuleBasedStateMachine):
    """The queue against lists that are sorted anew for every question, and counters that are never
    forgotten while their line lives."""

    @initialize(share=st.sampled_from([0.0, 0.05, 0.34]), put_off=st.sampled_from([0, 2]))
    def start(self, share: float, put_off: int) -> None:
        self.put_off = put_off
        self.bounds = {cls: ClassLimits(12, 5_000, 8, 3_000, share) for cls in PriorityClass}
        self.queue = a_queue(self.bounds, WEIGHTS, put_off=put_off)
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []
        self.order: dict[int, int] = {}
        self.owed = {(m, cls): 0.0 for m in "mn" for cls in PriorityClass}
        self.standings: defaultdict[tuple[str, PriorityClass, str], Standing]
        self.standings = defaultdict(Standing)
        self.starts: defaultdict[tuple[str, PriorityClass], Start] = defaultdict(Start)
        self.pushes = 0
        self.moves = 0

    @rule(
        cls=st.sampled_from(PriorityClass),
        due_s=st.integers(1, 5),
        tenant=st.sampled_from("tuvw"),
        model=st.sampled_from("mmn"),
        size_bytes=st.integers(0, 900),
        prompt_tokens=st.sampled_from([10, 20, 300]),
    )
    def push(
        self,
        cls: PriorityClass,
        due_s: int,
        tenant: str,
        model: str,
        size_bytes: int,
        prompt_tokens: int,
    ) -> None:
        ticket = a_ticket(
            priority_class=cls,
            first_token_limit_s=float(due_s),
            tenant=tenant,
            model=model,
            size_bytes=size_bytes,
            prompt_tokens=prompt_tokens,
            output_tokens=5,
        )
        same = [t for t in self.waiting if t.priority_class == cls]
        mine = [t for t in same if t.tenant == tenant]
        bounds, full = self.bounds[cls], None
        requests_free = bounds.requests_max - len(same)
        bytes_free = bounds.bytes_max - sum(t.size_bytes for t in same)
        if len(mine) >= min(bounds.tenant_requests_max, requests_free) or (
            sum(t.size_bytes for t in mine) + size_bytes > min(bounds.tenant_bytes_max, bytes_free)
        ):
            full = "tenant"
        if not requests_free or size_bytes > bytes_free:
            full = "class"
        assert self.queue.full_for(ticket) == full
        if full is None:
            self._push(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self._push(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([0, 10, 30, 1_000]))
    def end(self, data: st.DataObject, tokens: int) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self._settle(ticket, tokens)

    @rule(model=st.sampled_from("mmn"), served=st.booleans(), aside=st.integers(0, 3))
    def take(self, model: str, served: bool, aside: int) -> None:
        """Sets some tickets aside, then takes the next."""
        line = a_ticket(model=model).line
        tried: Counter[PriorityClass] = Counter()
        hand: list[Ticket] = []
        for step in range(aside + 1):
            ticket = self.queue.take(line, tried, 3)
            assert ticket is self._expected(model, tried, hand)
            if ticket is None:
                break
            hand.append(ticket)
            tried[ticket.priority_class] += 1
            if step == aside:
                hand.remove(ticket)
                self._leave(ticket, served=served)
        for ticket in hand:
            self.queue.restore(ticket)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from(self.waiting)), served=False)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.waiting)
        assert {t.line for t in self.waiting} == set(self.queue.lines())
        for ticket in self.waiting[:1]:
            assert self.queue.ahead_of(ticket) >= 0.0

    def teardown(self) -> None:
        """When all is over nothing is left."""
        if not hasattr(self, "queue"):
            return
        for ticket in list(self.waiting):
            self._leave(ticket, served=False)
        for ticket in self.running:
            self._settle(ticket, 0)
        assert not self.queue._lines
        assert not any(self.queue._tenants)

    # --- the reference -------------------------------------------------------------------------

    def _push(self, ticket: Ticket) -> None:
        self.pushes += 1
        self.order[ticket.id] = self.pushes
        model, cls, tenant = ticket.model, ticket.priority_class, ticket.tenant
        if not ticket.charged_tokens and not self._fresh(model, cls, tenant):
            standing = self.standings[model, cls, tenant]
            waiting = [
                self.standings[model, cls, t.tenant].counter for t in self._fresh(model, cls)
            ]
            standing.lifted = max(
                [self.starts[model, cls].counter, *([min(waiting)] if waiting else [])]
            )
            standing.counter = max(standing.counter, standing.lifted)
            self._moved(standing)
        self.queue.push(ticket)
        self.waiting.append(ticket)

    def _leave(self, ticket: Ticket, *, served: bool) -> None:
        charged = ticket.charged_tokens
        self.queue.leave(ticket, served=served)
        self.waiting.remove(ticket)
        model = ticket.model
        if served:
            self.running.append(ticket)
            assert ticket.charged_tokens == charged or ticket.work_tokens
            if not charged:
                self._charge(ticket)
        elif charged:
            self._settle(ticket, 0)
        for each in PriorityClass:
            if not self._class(model, each):
                self.owed[model, each] = 0.0
        self._forget(model)

    def _charge(self, ticket: Ticket) -> None:
        model, cls, tokens = ticket.model, ticket.priority_class, ticket.work_tokens
        standing = self.standings[model, cls, ticket.tenant]
        self.starts[model, cls] = Start(ticket.tenant, standing.counter)
        standing.counter += tokens / WEIGHTS.get(ticket.tenant, 1.0)
        self._moved(standing)
        self.owed[model, cls] = max(0.0, self.owed[model, cls] - tokens)
        for lower in PriorityClass:
            if lower > cls and self._class(model, lower):
                self.owed[model, lower] += self.bounds[lower].share * tokens

    def _settle(self, ticket: Ticket, tokens: int) -> None:
        model, cls = ticket.model, ticket.priority_class
        standing, start = self.standings[model, cls, ticket.tenant], self.starts[model, cls]
        change = (tokens - ticket.charged_tokens) / WEIGHTS.get(ticket.tenant, 1.0)
        before = standing.counter
        standing.counter = max(standing.lifted, before + change)
        if start.tenant == ticket.tenant:
            start.counter += standing.counter - before
        self.queue.settle(ticket, tokens)
        self._forget(model)

    def _forget(self, model: str) -> None:
        """A line with nothing waiting or running is forgotten."""
        if not any(t.model == model for t in [*self.waiting, *self.running]):
            for cls in PriorityClass:
                self.starts.pop((model, cls), None)
                for tenant in "tuvw":
                    self.standings.pop((model, cls, tenant), None)

    def _moved(self, standing: Standing) -> None:
        self.moves += 1
        standing.since = self.moves

    def _class(self, model: str, cls: PriorityClass) -> list[Ticket]:
        return [t for t in self.waiting if t.model == model and t.priority_class == cls]

    def _fresh(self, model: str, cls: PriorityClass, tenant: str = "") -> list[Ticket]:
        """Those that wait for their first dispatch."""
        here = [t for t in self._class(model, cls) if not t.charged_tokens]
        return [t for t in here if not tenant or t.tenant == tenant]

    def _next(self, model: str, cls: PriorityClass, hand: list[Ticket]) -> Ticket | None:
        def place(ticket: Ticket) -> tuple[float, ...]:
            due = ticket.due_s, ticket.deadline_s, self.order[ticket.id]
            if ticket.charged_tokens:
                return 0, *due
            standing = self.standings[model, cls, ticket.tenant]
            aside = sum(
                t.tenant == ticket.tenant and t.priority_class == cls and not t.charged_tokens
                for t in hand
            )
            return 1, aside, standing.counter, standing.since, *due

        left = [t for t in self._class(model, cls) if t not in hand]
        return min(left, key=place, default=None)

    def _expected(
        self, model: str, tried: Counter[PriorityClass], hand: list[Ticket]
    ) -> Ticket | None:
        heads = {cls: self._next(model, cls, hand) for cls in PriorityClass}
        urgent = heads[PriorityClass.CRITICAL] is not None and tried[PriorityClass.CRITICAL] < 3
        for cls, head in heads.items():
            if head is not None and not tried[cls]:
                cost, most = head.work_tokens, head.work_tokens * (1 + self.put_off)
                if self.owed[model, cls] >= (most if urgent else cost) * (1.0 - 1e-9):
                    self.owed[model, cls] = min(self.owed[model, cls], float(most))
                    return head
        for cls, head in heads.items():
            if head is not None and tried[cls] < 3:
                return head
        return None


@pytest.mark.timeout(SEARCH_TIMEOUT_S)
def test_the_queue_agrees_with_a_sorted_list() -> None:
    """Goal: order and bounds. Method: random pushes, takes, restores, removals. Oracle: a list.
    Mutants seen to fail: ``restore`` with a new stamp; ``leave`` that keeps the bytes; no lift; a
    refund below the lift; a second charge for one that came back; a charge not weighted; equal
    counters by the last that moved."""
    run_state_machine_as_test(QueueMachine, settings=SEARCH)
