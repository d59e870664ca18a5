"""Lanes: slots, attempts and frames, without a network."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_svc.adapters.lane import FRAME_BYTES_MAX, Lane
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.model import InstanceName, PriorityClass, Ticket, TicketId
from sluice.common.v1 import result_pb2
from sluice.execution.v1 import execution_pb2
from sluice.inference.v1 import inference_pb2

NAME = InstanceName("chat-0")


def ticket(number: int, deadline_s: float = 100.0) -> Ticket:
    return Ticket(
        id=TicketId(number),
        request_id=f"r{number}",
        tenant="dev",
        model="m",
        priority_class=PriorityClass.STANDARD,
        arrival_s=0.0,
        deadline_s=deadline_s,
        first_token_limit_s=deadline_s,
        prompt_tokens=1,
        output_tokens=1,
        size_bytes=1,
    )


class Setup:
    """A lane and what it composes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wakes = 0
        self.lane = Lane(NAME, "127.0.0.1:1", self._wake)
        self.loop = loop

    def _wake(self, lane: Lane) -> None:
        assert lane is self.lane
        self.wakes += 1

    def live(self, number: int, text: str = "x") -> LiveRequest:
        work = inference_pb2.Work(request_id=f"r{number}")
        work.input.text = text
        return LiveRequest(ticket(number), work, FlushBudget(), loop=self.loop)

    def start(self, number: int, text: str = "x", attempt: int = 1) -> LiveRequest:
        live = self.live(number, text)
        self.lane.start(live, attempt, inference_pb2.Start(work=live.work))
        return live

    def compose(self, now: float = 0.0) -> inference_pb2.GenerateFramesRequest | None:
        part = execution_pb2.InstanceRequest()
        written = self.lane.compose(part, FRAME_BYTES_MAX, now)
        return None if written is None else part.frame


@pytest.fixture
def setup(virtual_loop: asyncio.AbstractEventLoop) -> Setup:
    return Setup(virtual_loop)


def test_a_lane_with_nothing_due_composes_nothing(setup: Setup) -> None:
    assert setup.compose() is None


def test_opening_a_stream_sends_an_empty_frame_once(setup: Setup) -> None:
    setup.lane.open_stream()
    frame = setup.compose()
    assert frame is not None
    assert not frame.starts
    assert setup.compose() is None


def test_starts_leave_in_order_with_the_time_left_when_they_are_written(setup: Setup) -> None:
    setup.start(1)
    setup.start(2)
    frame = setup.compose(now=40.0)
    assert frame is not None
    assert [start.work.request_id for start in frame.starts] == ["r1", "r2"]
    assert {start.remaining.seconds for start in frame.starts} == {60}
    assert len({start.slot for start in frame.starts}) == 2


def test_a_start_whose_deadline_passed_is_sent_with_the_least_time(setup: Setup) -> None:
    setup.start(1)
    frame = setup.compose(now=1000.0)
    assert frame is not None
    assert frame.starts[0].remaining.nanos == 1_000_000


def test_a_cancel_of_a_start_that_was_not_written_frees_the_slot_at_once(setup: Setup) -> None:
    setup.start(1)
    assert not setup.lane.cancel(TicketId(1), 1, result_pb2.FINISH_REASON_CANCELLED)
    assert len(setup.lane) == 0
    assert setup.compose() is None


def test_a_cancel_of_a_running_slot_keeps_it_taken_until_its_end(setup: Setup) -> None:
    setup.start(1)
    frame = setup.compose()
    assert frame is not None
    started = frame.starts[0]
    assert setup.lane.cancel(TicketId(1), 1, result_pb2.FINISH_REASON_CANCELLED)
    cancelled = setup.compose()
    assert cancelled is not None
    assert [(c.slot, c.attempt) for c in cancelled.cancels] == [(started.slot, started.attempt)]
    assert len(setup.lane) == 1
    setup.lane.free(started.slot)
    assert len(setup.lane) == 0


def test_a_cancel_of_another_attempt_is_not_sent(setup: Setup) -> None:
    setup.start(1, attempt=2)
    setup.compose()
    assert not setup.lane.cancel(TicketId(1), 1, result_pb2.FINISH_REASON_CANCELLED)
    assert setup.compose() is None


def test_a_slot_that_is_used_again_has_another_attempt(setup: Setup) -> None:
    setup.start(1)
    first = setup.compose()
    assert first is not None
    setup.lane.free(first.starts[0].slot)
    setup.start(2)
    second = setup.compose()
    assert second is not None
    assert second.starts[0].slot == first.starts[0].slot
    assert second.starts[0].attempt > first.starts[0].attempt
    assert setup.lane.slot(first.starts[0].slot, first.starts[0].attempt) is None


def test_after_a_loss_slot_numbers_are_not_used_again(setup: Setup) -> None:
    setup.start(1)
    before = setup.compose()
    assert before is not None
    assert [slot.ticket_id for slot in setup.lane.take_all()] == [1]
    setup.start(2)
    after = setup.compose()
    assert after is not None
    assert after.starts[0].slot != before.starts[0].slot


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_frame_is_cut_at_the_limit(setup: Setup, excess: int) -> None:
    half = FRAME_BYTES_MAX // 2
    setup.start(1, "x" * half)
    first = setup.lane.slots()[0].start_bytes
    slot_field = 2  # slot 0 is not on the wire, slot 1 is
    fill = FRAME_BYTES_MAX - first - (first - half) - slot_field + excess
    setup.start(2, "x" * fill)
    assert setup.lane.slots()[1].start_bytes == FRAME_BYTES_MAX - first + excess
    frame = setup.compose()
    assert frame is not None
    assert len(frame.starts) == (2 if excess <= 0 else 1)
    if excess > 0:
        rest = setup.compose()
        assert rest is not None
        assert len(rest.starts) == 1


def test_a_start_larger_than_a_frame_travels_alone(setup: Setup) -> None:
    setup.start(1, "x" * (2 * FRAME_BYTES_MAX))
    setup.start(2)
    first, second = setup.compose(), setup.compose()
    assert first is not None and second is not None
    assert [len(first.starts), len(second.starts)] == [1, 1]


def test_a_large_start_waits_for_a_frame_of_its_own(setup: Setup) -> None:
    setup.start(1, "x" * (2 * FRAME_BYTES_MAX))
    part = execution_pb2.InstanceRequest()
    assert setup.lane.compose(part, FRAME_BYTES_MAX - 1, 0.0) == 0
    assert not part.frame.starts
    assert setup.wakes >= 2, "the lane asks to be composed again"
