"""Prefixes in the scheduler: noted, forgotten, waited for, and side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.placement_trace import Request, ideal_hit_rate, read_trace, replay
from scheduler_svc.domain.canonical import PrefixHasher
from scheduler_svc.domain.model import (
    Dispatch,
    GpuState,
    InstanceName,
    Prefix,
    PriorityClass,
    Ticket,
)
from scheduler_svc.domain.placement import LeastWork, Weighted
from scheduler_svc.domain.scheduler import Scheduler
from scheduler_svc.domain.turn import side_by_side
from tests.unit.scheduler.scheduling import Bench, a_ticket, limits

HASHER = PrefixHasher(b"test")
TRACE = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_trace.jsonl.gz"


def with_prefix(blocks: Sequence[int], **changes: object) -> Ticket:
    """A ticket whose prompt is these blocks of 100 tokens, and one token."""
    hashes = HASHER.hashes(np.array(blocks, dtype=np.uint64).tobytes(), 8, [])
    tokens = len(blocks) * 100 + 1
    prefix = Prefix(hashes, tokens / 100)
    return a_ticket(**({"prompt_tokens": tokens, "output_tokens": 10, "prefix": prefix} | changes))


class PrefixBench(Bench):
    """A scheduler that places by prefix."""

    def __init__(self, *names: str, report: dict[str, object] | None = None, **changes: object):
        super().__init__()
        self.scheduler = Scheduler(limits(**changes), Weighted())
        for name in names:
            self.up(name, **(report or {}))

    def end(self, dispatch: Dispatch) -> None:
        self.scheduler.attempts.ended(
            dispatch.ticket.id, dispatch.attempt, self.now, output_tokens=1
        )

    def at(self, blocks: Sequence[int]) -> str:
        """Where a prompt goes; it ends at once."""
        dispatch = self.dispatch(with_prefix(blocks))
        self.end(dispatch)
        return dispatch.instance


def test_a_conversation_goes_back_to_its_instance() -> None:
    bench = PrefixBench("a", "b", "c")
    homes = [bench.at([n, n + 10, n + 20]) for n in range(3)]
    assert sorted(homes) == ["a", "b", "c"]
    assert [bench.at([n, n + 10, n + 20, 99]) for n in (2, 0, 1)] == [homes[n] for n in (2, 0, 1)]
    assert bench.is_empty()


@pytest.mark.parametrize("how", ["lost", "removed", "restarted"])
def test_an_instance_that_lost_its_cache_is_expected_to_hold_nothing(how: str) -> None:
    """Mutant seen to fail: ``forget`` not called."""
    bench = PrefixBench("a", "b", "c")
    home = bench.at([1, 2, 3])
    if how == "lost":
        bench.scheduler.instances.lost(InstanceName(home), bench.now)
    elif how == "removed":
        bench.scheduler.instances.remove(InstanceName(home), bench.now)
    bench.up(home, epoch="2" if how == "restarted" else "")
    assert bench.scheduler.snapshot().prefix_tokens_expected == 0
    bench.at([1, 2, 3])
    assert bench.scheduler.snapshot().prefix_tokens_expected == 0
    bench.at([1, 2, 3])
    assert bench.scheduler.snapshot().prefix_tokens_expected == 300


def test_a_report_of_the_same_engine_forgets_nothing() -> None:
    bench = PrefixBench("a", "b", "c")
    home = bench.at([1, 2, 3])
    for name in "abc":
        bench.up(name)
    assert bench.at([1, 2, 3]) == home


def test_what_is_expected_in_a_cache_is_not_counted_as_work_until_the_engine_says_otherwise() -> (
    None
):
    bench = PrefixBench("a")
    bench.at(range(5))
    dispatch = bench.dispatch(with_prefix(range(5)))

    def outstanding() -> int:
        return bench.scheduler.snapshot().instances[InstanceName("a")].prefill_tokens

    assert outstanding() == 1
    bench.scheduler.attempts.accepted(dispatch.ticket.id, dispatch.attempt, 501, 96, bench.now)
    assert outstanding() == 405
    state = bench.scheduler.snapshot()
    assert (state.prefix_tokens_expected, state.prefix_tokens_cached) == (500, 96)
    bench.end(dispatch)
    assert bench.is_empty()


def test_a_policy_that_reads_no_prefixes_gets_none_and_keeps_no_index() -> None:
    scheduler = Scheduler(limits(), LeastWork())
    bench = Bench("a")
    assert scheduler.prefix_block("m") is None
    assert bench.scheduler.prefix_block("m") is None
    bench.dispatch(with_prefix([1, 2, 3]))
    assert bench.scheduler.snapshot().prefix_tokens_expected == 0


def test_the_block_in_which_prompts_are_hashed_follows_the_engine_and_the_learnt_ratio() -> None:
    bench = PrefixBench()
    assert bench.scheduler.prefix_block("m") is None
    bench.up("a", kv_block_tokens=16)
    block = bench.scheduler.prefix_block("m")
    assert block is not None and (block.tokens, block.text_bytes) == (32, 112)


# --- waiting for a prefix ---------------------------------------------------------------------


def busy_pair() -> tuple[PrefixBench, Dispatch]:
    """Two instances with one slot each; one has blocks 0 to 49 and runs something short."""
    bench = PrefixBench("a", "b", report={"sequences_max": 1})
    home = bench.at(range(50))
    other = bench.dispatch(with_prefix([500, 501]))
    filler = bench.dispatch(with_prefix([*range(50), 7]))
    assert filler.instance == home
    bench.end(other)
    return bench, filler


def test_a_ticket_waits_for_its_prefix_while_that_is_cheaper_than_reading_it_anew() -> None:
    """Mutant seen to fail: never held."""
    bench, filler = busy_pair()
    ticket = with_prefix([*range(50), 8])
    bench.submit(ticket)
    assert bench.turn() == []
    bench.now += 0.1
    bench.end(filler)
    (dispatch,) = bench.turn()
    assert (dispatch.ticket, dispatch.instance) == (ticket, filler.instance)


def test_it_waits_no_longer_than_what_it_saves_and_the_owner_is_woken_then() -> None:
    """Mutants seen to fail: held for ever; no wakeup at the end of a hold."""
    bench, filler = busy_pair()
    ticket = with_prefix([*range(50), 8])
    bench.submit(ticket)
    assert bench.turn() == []
    dispatches: list[Dispatch] = []
    while not dispatches:
        wakeup = bench.scheduler.next_wakeup(bench.now)
        assert wakeup is not None and wakeup > bench.now
        bench.now = wakeup
        dispatches = bench.turn()
    assert 1.0 < bench.now <= Weighted.REUSE * 5_000 / 8_000.0
    assert dispatches[0].instance != filler.instance


def test_a_ticket_that_waits_for_its_prefix_holds_nobody_else_up() -> None:
    bench, filler = busy_pair()
    bench.submit(with_prefix([*range(50), 8]))
    assert bench.turn() == []
    free = {"a", "b"} - {filler.instance}
    assert {bench.dispatch(with_prefix([900, 901])).instance} == free


def test_an_instance_that_stops_being_usable_ends_the_wait_for_it() -> None:
    bench, filler = busy_pair()
    bench.submit(with_prefix([*range(50), 8]))
    assert bench.turn() == []
    bench.up(filler.instance, sequences_max=1, gpus=GpuState(xid_errors=1))
    (dispatch,) = bench.turn()
    assert dispatch.instance != filler.instance


def test_only_so_many_tickets_wait_for_prefixes_at_once() -> None:
    bench = PrefixBench("a", "b", report={"sequences_max": 8}, holds_max=2)
    home = bench.at(range(50))
    bench.scheduler.instances.credit(InstanceName(home), 0, 0, bench.now)
    bench.submit(*(with_prefix([*range(50), n]) for n in range(5)))
    assert len(bench.turn()) == 3


# --- side by side -------------------------------------------------------------------------------


def a_dispatch(blocks: Sequence[int], instance: str = "a", **changes: object) -> Dispatch:
    return Dispatch(with_prefix(blocks, **changes), InstanceName(instance), 1)


def test_dispatches_of_one_instance_and_class_with_a_common_prefix_leave_side_by_side() -> None:
    """Mutant seen to fail: left as they came."""
    x, y = [1, 2], [8, 9]
    first = [a_dispatch([*blocks, n]) for n, blocks in enumerate([x, y, x, y, x])]
    ordered = side_by_side(first)
    assert ordered == [first[n] for n in (0, 2, 4, 1, 3)]


def test_the_order_between_classes_and_instances_stays() -> None:
    batch, plain = PriorityClass.BATCH, PriorityClass.STANDARD
    dispatches = [
        a_dispatch([1, 2, 3], priority_class=plain),
        a_dispatch([8, 9, 3], priority_class=plain),
        a_dispatch([1, 2, 4], "b", priority_class=plain),
        a_dispatch([1, 2, 5], priority_class=plain),
        a_dispatch([1, 2, 6], priority_class=batch),
        a_dispatch([8, 9, 6], priority_class=batch),
        a_dispatch([1, 2, 7], priority_class=batch),
        Dispatch(a_ticket(), InstanceName("a"), 1),
    ]
    ordered = side_by_side(dispatches)
    assert [(d.instance, d.ticket.priority_class) for d in ordered] == [
        (d.instance, d.ticket.priority_class) for d in dispatches
    ]
    assert ordered == [dispatches[n] for n in (0, 3, 2, 1, 4, 6, 5, 7)]


def test_longer_common_prefixes_are_nearer() -> None:
    head = list(range(8))
    one, two, three = [*head, 1], [0, 1, *range(50, 60)], [*head, 2]
    dispatches = [a_dispatch(blocks) for blocks in (one, two, three)]
    assert side_by_side(dispatches) == [dispatches[n] for n in (0, 2, 1)]


def test_a_prompt_of_one_token_has_nothing_to_be_cached() -> None:
    bench = PrefixBench("a", "b")
    bench.at([1, 2, 3])
    prefix = with_prefix([1, 2, 3]).prefix
    bench.dispatch(a_ticket(prompt_tokens=1, prefix=prefix))
    assert bench.scheduler.snapshot().prefix_tokens_expected == 0


def test_a_turn_sends_common_prefixes_together() -> None:
    bench = PrefixBench("a", report={"sequences_max": 8})
    bench.submit(*(with_prefix([n % 2, n % 2 + 10, n]) for n in range(6)))
    firsts = [int(d.ticket.prefix.hashes[0]) for d in bench.turn() if d.ticket.prefix is not None]
    assert len(firsts) == 6
    assert firsts == [firsts[0]] * 3 + [firsts[-1]] * 3


# --- a real trace ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversations() -> list[Request]:
    return read_trace(TRACE)[:2_000]


@pytest.mark.parametrize("policy", ["prefix_affinity", "weighted"])
def test_on_real_conversations_hits_are_near_the_ideal_and_load_is_even(
    policy: str, conversations: list[Request]
) -> None:
    """All requests share their first block; eight instances. The whole trace is
    measured by ``make bench-placement``."""
    result = replay(policy, conversations, [1.0] * 8)
    assert result.hit_rate > 0.95 * ideal_hit_rate(conversations)
    assert result.max_over_mean <= 1.25
    assert 0.8 < result.expected_over_found <= 1.01


def test_one_slow_worker_costs_the_others_no_hits(conversations: list[Request]) -> None:
    """With one worker at a third of the speed."""
    ideal = ideal_hit_rate(conversations)
    even = replay("weighted", conversations, [1.0] * 8)
    slow = replay("weighted", conversations, [1.0] * 7 + [0.33])
    assert slow.hit_rate > 0.9 * ideal
    assert slow.ttft_p50_s < 1.5 * even.ttft_p50_s
