"""Weighted versions of an alias, and the way back."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.domain.aliases import (
    HISTORY_MAX,
    Alias,
    Target,
    create,
    pick,
    rollback,
    set_targets,
)
from sluice.errors import Code, SluiceError


def an_alias(**weights: int) -> Alias:
    return create("chat", [Target(model, weight) for model, weight in weights.items()])


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
    alias = create("a", [Target(f"m{n}", weight) for n, weight in enumerate(weights)])
    counts = Counter(pick(alias, start + n) for n in range(sum(weights)))
    assert [counts[f"m{n}"] for n in range(len(weights))] == weights


def test_a_change_and_its_rollback_leave_the_targets_as_they_were_under_new_versions() -> None:
    first = an_alias(old=1)
    second = set_targets(first, [Target("old", 9), Target("new", 1)])
    third = set_targets(second, [Target("new", 1)])
    assert (first.version, second.version, third.version) == (1, 2, 3)
    back = rollback(third)
    assert (back.targets, back.version) == (second.targets, 4)
    back = rollback(back)
    assert (back.targets, back.version) == (first.targets, 5)
    with pytest.raises(SluiceError) as refused:
        rollback(back)
    assert refused.value.code is Code.FAILED_PRECONDITION
    assert first.targets == (Target("old", 1),)  # values never change


def test_setting_what_is_set_already_is_no_change_to_roll_back() -> None:
    alias = an_alias(old=1)
    assert set_targets(alias, [Target("old", 1)]) is alias


def test_history_is_bounded() -> None:
    alias = an_alias(m=1)
    for weight in range(2, 3 * HISTORY_MAX):
        alias = set_targets(alias, [Target("m", weight)])
    assert len(alias.history) == HISTORY_MAX


@pytest.mark.parametrize(
    ("name", "targets", "field"),
    [
        ("", [Target("m", 1)], "alias"),
        ("a", [], "targets"),
        ("a", [Target("m", 0)], "targets[0].weight"),
        ("a", [Target("m", 1), Target("m", 2)], "targets"),
        ("a", [Target("m", 1), Target("n", -1)], "targets[1].weight"),
        ("a", [Target("m", 10_001)], "targets[0].weight"),
        ("a", [Target("a", 1)], "targets[0].model"),
        ("a", [Target("", 1)], "targets[0].model"),
        ("a", [Target(f"m{n}", 1) for n in range(17)], "targets"),
    ],
)
def test_a_wrong_alias_is_refused_by_field(name: str, targets: list[Target], field: str) -> None:
    with pytest.raises(SluiceError) as refused:
        create(name, targets)
    assert refused.value.fields[0].field == field
