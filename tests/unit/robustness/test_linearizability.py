"""The checker of histories finds what is wrong and accepts what is right.

Goal: a checker that cannot fail proves nothing. Method: small histories judged by hand; random ones
that are right by construction; the same with one answer changed. Oracle: their construction. Seed:
the parameter.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.robustness.linearizability import (
    UNKNOWN,
    Operation,
    is_linearizable,
    run_model,
    session_model,
)


def append(message: str, result: Any, called: float, returned: float, expected: Any = None) -> Any:
    return Operation(("append", message, expected), result, called, returned)


def read(result: Any, called: float, returned: float) -> Operation:
    return Operation(("read",), result, called, returned)


def judged(*history: Operation) -> bool:
    return is_linearizable(history, (), session_model)


def test_small_histories() -> None:
    assert judged()
    assert judged(append("a", 2, 0, 1), read(("a",), 2, 3))
    # A read during an append sees it or not, one after it sees it.
    assert judged(append("a", 2, 0, 3), read((), 1, 2)) and judged(
        append("a", 2, 0, 3), read(("a",), 1, 2)
    )
    assert not judged(append("a", 2, 0, 1), read((), 2, 3))
    # Seen, then not seen any more.
    assert not judged(append("a", 2, 0, 9), read(("a",), 1, 2), read((), 3, 4))
    # Two that expect the same version: one of them is refused.
    assert judged(append("a", 2, 0, 9, 1), append("b", "conflict", 0, 9, 1))
    assert not judged(append("a", 2, 0, 9, 1), append("b", 2, 0, 9, 1))
    assert not judged(append("a", 2, 0, 9, 1), append("b", 3, 0, 9, 1))
    # Lost although acknowledged; twice although once.
    assert not judged(append("a", 2, 0, 1), append("b", 2, 2, 3))
    assert not judged(append("a", 2, 0, 1), read(("a", "a"), 2, 3))


def test_an_operation_without_an_answer_happened_later_or_never() -> None:
    lost = Operation(("append", "a", None), UNKNOWN, 0)
    assert judged(lost) and judged(lost, read((), 1, 2)) and judged(lost, read(("a",), 1, 2))
    assert judged(lost, read((), 1, 2), read(("a",), 3, 4))
    assert not judged(lost, read(("a",), 1, 2), read((), 3, 4))
    late = Operation(("append", "a", None), UNKNOWN, 5)
    assert not judged(late, read(("a",), 1, 2))


def test_a_run_has_one_owner() -> None:
    def run(*history: Any) -> bool:
        done = [
            Operation(asked, result, n, n + 0.5 if result != UNKNOWN else float("inf"))
            for n, (asked, result) in enumerate(history)
        ]
        return is_linearizable(done, (None, 0, 1), run_model)

    claim = ("claim",)
    first, second = ("append", 10, 1, "hold"), ("append", 20, 2, "hold")
    assert run((claim, 10), (first, 2), (claim, 20), (second, 3))
    assert run((claim, 10), (first, 2), (claim, 20), (("append", 10, 2, "hold"), "lost"))
    assert not run((claim, 10), (first, 2), (claim, 20), (("append", 10, 2, "hold"), 3))
    assert not run((claim, 20), (claim, 10))
    assert run((claim, 10), (claim, UNKNOWN), (first, "lost"))
    assert run((claim, 10), (first, UNKNOWN), (("append", 10, 1, "hold"), "conflict"))
    assert not run((claim, 10), (first, 2), (("append", 10, 1, "hold"), 2))


def a_history(rng: random.Random, length: int = 60) -> list[Operation]:
    """Right by construction: each operation takes effect at a time between call and return; of
    some the answer is lost."""
    state: tuple[str, ...] = ()
    history, now = [], 0.0
    for n in range(length):
        now += rng.random()
        called, returned = now - 4 * rng.random(), now + 4 * rng.random()
        if rng.random() < 0.4:
            history.append(read(state, called, returned))
            continue
        expected = rng.choice((None, len(state) + 1, len(state)))
        fits = expected in (None, len(state) + 1)
        if fits:
            state = (*state, f"m{n}")
        result = len(state) + 1 if fits else "conflict"
        one = append(f"m{n}", result, called, returned, expected)
        if rng.random() < 0.1:
            one = Operation(one.asked, UNKNOWN, called)
        history.append(one)
    return history


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    history = a_history(rng)
    assert judged(*history)
    reads = [n for n, one in enumerate(history) if one.asked[0] == "read" and len(one.result) > 2]
    number = rng.choice(reads)
    wrong = history[number].result[:-2] + history[number].result[-1:]
    history[number] = replace(history[number], result=wrong)
    assert not judged(*history)
