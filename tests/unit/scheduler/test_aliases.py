"""Weighted versions of an alias."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.domain.aliases import Alias, Target, pick


def an_alias(**weights: int) -> Alias:
    return Alias("chat", tuple(Target(model, weight) for model, weight in weights.items()))


def test_every_tenth_request_goes_to_a_version_with_a_tenth_of_the_weight() -> None:
    alias = an_alias(old=90, new=10)
    picks = [pick(alias, number) for number in range(1_000)]
    assert picks == [pick(alias, number) for number in range(1_000)]
    places = [number for number, model in enumerate(picks) if model == "new"]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert len(places) == 100
    assert max(gaps) <= 20


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 10**12))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_in_any_round_of_requests_every_version_gets_exactly_its_weight(
    weights: list[int], start: int
) -> None:
    alias = Alias("a", tuple(Target(f"m{n}", weight) for n, weight in enumerate(weights)))
    counts = Counter(pick(alias, start + n) for n in range(sum(weights)))
    assert [counts[f"m{n}"] for n in range(len(weights))] == weights
