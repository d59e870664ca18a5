"""What gathers for a scheduler: joined, in order, bounded."""

from __future__ import annotations

import asyncio

from execution_svc.adapters.counts import Counts
from execution_svc.adapters.relay import MESSAGE_BYTES_MAX, PENDING_BYTES_MAX, Relay
from sluice.clock import run_virtual
from sluice.execution.v1 import execution_pb2
from sluice.frames import LossKind
from sluice.inference.v1 import inference_pb2


def frame(sequence: int, size: int = 0) -> inference_pb2.GenerateFramesResponse:
    return inference_pb2.GenerateFramesResponse(sequence=sequence, deltas=b"\xff" * size)


def test_frames_of_all_instances_leave_in_one_message_in_their_order() -> None:
    wakes: list[int] = []
    relay = Relay(lambda: wakes.append(1), Counts())
    relay.add("a", frame(1))
    relay.add("b", frame(1, 10))
    relay.add("a", frame(2))
    relay.lost("a", LossKind.SILENT, "detail")
    message = relay.take()
    assert message is not None
    assert [part.instance for part in message.parts] == ["a", "b", "a", "a"]
    assert [part.frame.sequence for part in message.parts] == [1, 1, 2, 0]
    # Not a valid batch: nobody here looks into it.
    assert message.parts[1].frame.deltas == b"\xff" * 10
    assert message.parts[3].lost.reason == execution_pb2.LOSS_REASON_SILENT
    assert relay.take() is None
    assert len(wakes) == 4


def test_a_message_is_cut_and_readers_wait_while_too_much_is_pending() -> None:
    async def body() -> None:
        counts = Counts()
        relay = Relay(lambda: None, counts)
        sent = 0
        while relay.has_room:
            sent += 1
            relay.add("a", frame(sent, 200_000))
        assert sent * 200_000 <= PENDING_BYTES_MAX + 200_000
        assert counts.limit_hits == {"relay_pending_bytes": 1}
        waiting = asyncio.create_task(relay.room())
        sequences = []
        while (message := relay.take()) is not None:
            assert message.ByteSize() <= MESSAGE_BYTES_MAX
            sequences += [part.frame.sequence for part in message.parts]
        await asyncio.wait_for(waiting, 1.0)
        assert sequences == list(range(1, sent + 1))
        assert relay.has_room

    run_virtual(body())
