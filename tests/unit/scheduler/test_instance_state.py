"""What an operator is told of an instance in one word."""

from __future__ import annotations

import pytest

from scheduler_svc.adapters.admin_api import state_of
from scheduler_svc.domain.model import GpuState, InstanceName
from tests.unit.scheduler.scheduling import Bench


@pytest.mark.parametrize(
    ("reported", "word"),
    [
        ({}, "serving"),
        ({"serving": False}, "starting"),
        ({"draining": True}, "draining"),
        ({"gpus": GpuState(xid_errors=0)}, "serving"),
        ({"gpus": GpuState(xid_errors=1)}, "excluded"),
        ({"gpus": GpuState(xid_errors=1), "draining": True}, "excluded"),
        ({"gpus": GpuState(xid_errors=1), "serving": False}, "starting"),
    ],
)
def test_one_word_says_why_an_instance_takes_nothing(
    reported: dict[str, object], word: str
) -> None:
    bench = Bench()
    bench.up("a", **reported)
    assert state_of(bench.scheduler.snapshot().instances[InstanceName("a")]) == word
    bench.scheduler.instances.unreachable(InstanceName("a"), "silent", bench.now)
    assert state_of(bench.scheduler.snapshot().instances[InstanceName("a")]) == "down"
