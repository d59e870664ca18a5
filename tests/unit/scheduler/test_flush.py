"""The budget of client writes."""

from __future__ import annotations

import pytest

from scheduler_svc.domain.flush import FLUSH_CAP_S, FlushBudget
from scheduler_svc.domain.model import PriorityClass


def test_the_interval_grows_with_the_open_streams_up_to_the_cap_of_the_class() -> None:
    budget = FlushBudget(write_cost_s=100e-6, write_share=0.3)
    assert budget.interval_s(PriorityClass.STANDARD) == 0
    for _ in range(128):
        budget.begin(PriorityClass.STANDARD)
    assert budget.interval_s(PriorityClass.STANDARD) == pytest.approx(128 * 100e-6 / 0.3)
    assert budget.interval_s(PriorityClass.CRITICAL) == FLUSH_CAP_S[PriorityClass.CRITICAL]
    for _ in range(128):
        budget.end(PriorityClass.STANDARD)
    assert budget.interval_s(PriorityClass.STANDARD) == 0


def test_streams_beyond_the_write_capacity_are_refused() -> None:
    budget = FlushBudget(write_cost_s=100e-6, write_share=0.3, capacity_share=0.6)
    opened = 0
    while budget.can_open(PriorityClass.CRITICAL):
        budget.open(PriorityClass.CRITICAL)
        budget.begin(PriorityClass.CRITICAL)
        opened += 1
    # n streams each 20 ms: n * 100 us / 20 ms <= 0.6
    assert opened == 120
    assert budget.open_streams == 120


def test_lazier_classes_fit_more_streams() -> None:
    budget = FlushBudget(write_cost_s=100e-6, write_share=0.3, capacity_share=0.6)
    opened = 0
    while opened < 10_000 and budget.can_open(PriorityClass.STANDARD):
        budget.begin(PriorityClass.STANDARD)
        opened += 1
    assert opened == 1500


def test_streams_that_wait_in_the_queue_refuse_nobody() -> None:
    budget = FlushBudget(write_cost_s=100e-6, write_share=0.3, capacity_share=0.6)
    for _ in range(10_000):
        budget.open(PriorityClass.INTERACTIVE)
    assert budget.can_open(PriorityClass.CRITICAL)
    assert budget.interval_s(PriorityClass.INTERACTIVE) == 0
    assert budget.open_streams == 10_000


def test_closing_more_than_was_opened_is_a_fault() -> None:
    budget = FlushBudget()
    with pytest.raises(AssertionError):
        budget.close(PriorityClass.BATCH)
    with pytest.raises(AssertionError):
        budget.end(PriorityClass.BATCH)
