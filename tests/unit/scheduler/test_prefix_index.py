"""The prefix index: against a plain dictionary, at its bound, and what it forgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler_svc.domain.canonical import Hashes, PrefixHasher
from scheduler_svc.domain.prefix_index import MATCH_BLOCKS_MIN, PrefixIndex
from tests.unit.scheduler.scheduling import SEARCH

ROWS = 5
HASHER = PrefixHasher(b"test")
TTL_S = 100.0


def hashes(blocks: Sequence[int], salt: str = "") -> Hashes:
    return HASHER.hashes(np.array(blocks, dtype=np.uint64).tobytes(), 8, [salt])


def matched(index: PrefixIndex, blocks: Sequence[int], now: float = 0.0) -> list[int]:
    found = index.match(hashes(blocks), ROWS, now)
    return [0] * ROWS if found is None else [int(count) for count in found]


def an_index(bytes_max: int = 1 << 20) -> PrefixIndex:
    return PrefixIndex(ROWS, bytes_max, TTL_S)


def some(number: int, length: int = 8) -> list[int]:
    """A prompt of its own."""
    return [number * 1_000 + block for block in range(length)]


class IndexAgainstDictionary(RuleBasedStateMachine):
    """Goal: the index says of each row what a dictionary of everything sent says, while it has
    room. Method: random prompts over a few blocks, so that beginnings are shared, sent, forgotten,
    and aged. Oracle: the dictionary. Mutants seen to fail: the generation not compared; the TTL
    compared the wrong way round."""

    def __init__(self) -> None:
        super().__init__()
        self.index = an_index()
        self.now = 0.0
        self.used: dict[tuple[int, ...], float] = {}
        self.held: dict[tuple[int, ...], dict[int, int]] = {}  # row to its count when sent
        self.sent = [0] * ROWS
        self.capacity = [10**9] * ROWS

    prompts = st.lists(st.integers(0, 2), max_size=7)
    rows = st.integers(0, ROWS - 1)

    @rule(blocks=prompts, row=rows)
    def send(self, blocks: list[int], row: int) -> None:
        self.index.note(hashes(blocks), row, self.now)
        prefixes = [tuple(blocks[: n + 1]) for n in range(len(blocks))]
        new = sum(row not in self.held.get(prefix, {}) for prefix in prefixes)
        for prefix in prefixes:
            self.held.setdefault(prefix, {})[row] = self.sent[row]
            self.used[prefix] = self.now
        self.sent[row] += new

    @rule(row=rows)
    def forget(self, row: int) -> None:
        self.index.forget(row)
        self.sent[row] = 0
        for rows in self.held.values():
            rows.pop(row, None)

    @rule(row=rows, blocks=st.integers(0, 20))
    def resize(self, row: int, blocks: int) -> None:
        self.index.set_capacity(row, blocks)
        self.capacity[row] = blocks or 10**9

    @rule(seconds=st.integers(0, 60))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(blocks=prompts)
    def ask(self, blocks: list[int]) -> None:
        assert matched(self.index, blocks, self.now) == [
            self.expected(blocks, row) for row in range(ROWS)
        ]

    def expected(self, blocks: list[int], row: int) -> int:
        for length in range(len(blocks), MATCH_BLOCKS_MIN - 1, -1):
            prefix = tuple(blocks[:length])
            at = self.held.get(prefix, {}).get(row)
            fresh = self.now - self.used.get(prefix, 0.0) <= TTL_S
            if at is not None and fresh and self.sent[row] - at <= self.capacity[row]:
                return length
        return 0

    @invariant()
    def is_what_it_was_told(self) -> None:
        assert len(self.index) == len(self.used)
        assert self.index.evictions == 0


IndexAgainstDictionary.TestCase.settings = SEARCH
TestIndexAgainstDictionary = IndexAgainstDictionary.TestCase


def test_each_row_is_matched_as_far_as_it_was_sent_the_prompt() -> None:
    index = an_index()
    index.note(hashes([1, 2, 3, 4]), 0, 0.0)
    index.note(hashes([1, 2, 3, 9, 9, 9]), 1, 0.0)
    assert matched(index, [1, 2, 3, 4, 5]) == [4, 3, 0, 0, 0]
    assert matched(index, [2, 3, 4]) == [0] * ROWS


def test_one_common_block_is_no_match() -> None:
    index = an_index()
    index.note(hashes([1, 2, 3]), 0, 0.0)
    assert index.match(hashes([1, 8, 9]), ROWS, 0.0) is None
    assert matched(index, [1, 2, 9])[0] == 2


def test_memory_never_exceeds_its_bound_and_is_used() -> None:
    for bytes_max in (10_000, 1 << 20):
        index = an_index(bytes_max)
        assert bytes_max * 0.9 < index.nbytes <= bytes_max
        for number in range(3 * index.capacity // 8):
            index.note(hashes(some(number)), number % ROWS, 0.0)
        assert index.nbytes <= bytes_max
        assert index.capacity * 0.8 < len(index) <= index.capacity
        assert index.evictions > index.capacity


def test_prompts_in_use_outlive_a_scan_of_prompts_that_never_come_again() -> None:
    """Mutant seen to fail: the most recently used place given up."""
    index = an_index(1 << 18)
    hot = [some(number) for number in range(20)]
    for number in range(20_000):
        index.note(hashes(some(100 + number)), number % ROWS, number / 10)
        if number % 50 == 0:
            for row, blocks in enumerate(hot):
                index.note(hashes(blocks), row % ROWS, number / 10)
    found = [matched(index, blocks, 2_000.0)[row % ROWS] for row, blocks in enumerate(hot)]
    assert sum(found) > 0.95 * sum(map(len, hot))
    assert index.evictions > 100_000


def test_the_least_recently_used_prompts_go_first() -> None:
    index = an_index(1 << 18)
    count = index.capacity // 8 * 2
    for number in range(count):
        index.note(hashes(some(number)), 0, float(number) / count)
    late = [matched(index, some(n))[0] for n in range(count - 100, count)]
    early = [matched(index, some(n))[0] for n in range(100)]
    assert sum(late) > 0.9 * 8 * 100
    assert sum(early) < 0.1 * 8 * 100


def test_a_lost_instance_is_forgotten_at_once_and_its_row_begins_anew() -> None:
    index = an_index()
    index.note(hashes([1, 2, 3]), 0, 0.0)
    index.note(hashes([1, 2, 3]), 1, 0.0)
    index.forget(0)
    assert matched(index, [1, 2, 3]) == [0, 3, 0, 0, 0]
    index.note(hashes([1, 2]), 0, 0.0)
    assert matched(index, [1, 2, 3]) == [2, 3, 0, 0, 0]


def test_an_instance_is_taken_to_have_evicted_what_no_longer_fits_it() -> None:
    index = an_index()
    index.set_capacity(0, 20)
    for number in range(3):
        index.note(hashes(some(number)), 0, 0.0)
    assert [matched(index, some(number))[0] for number in range(3)] == [0, 8, 8]
    index.note(hashes(some(1)), 0, 0.0)  # used again: the other one goes first
    index.note(hashes(some(3)), 0, 0.0)
    index.note(hashes(some(4, 5)), 0, 0.0)
    assert [matched(index, some(number))[0] for number in range(4)] == [0, 8, 0, 8]


def test_of_many_instances_with_one_prefix_those_sent_it_last_are_kept() -> None:
    index = PrefixIndex(100, 1 << 20, TTL_S)
    prompt = hashes(some(1))
    for row in range(100):
        index.note(prompt, row, 0.0)
    found = index.match(prompt, 100, 0.0)
    assert found is not None
    assert np.count_nonzero(found) == 8
    assert found[99] == 8


def test_more_blocks_in_one_prompt_than_the_index_holds_do_no_harm() -> None:
    index = an_index(10_000)
    prompt = some(0, 4 * index.capacity)
    index.note(hashes(prompt), 0, 0.0)
    assert len(index) <= index.capacity
    assert matched(index, prompt)[0] > 0
    index.note(hashes([]), 0, 0.0)
    assert matched(index, []) == [0] * ROWS


def test_a_long_prompt_is_found_whole_and_a_long_beginning_of_it_within_three_blocks() -> None:
    index = an_index()
    prompt = some(1, 200)
    index.note(hashes(prompt), 0, 0.0)
    for length in range(2, 201):
        found = matched(index, prompt[:length] + [7] * (length % 13))[0]
        assert length - 3 <= found <= length
        assert length > 32 or found == length
    assert matched(index, prompt)[0] == 200
