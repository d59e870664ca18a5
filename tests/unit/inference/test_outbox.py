"""Frames in the making: cut at their size, in order, and woken once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.adapters import outbox as outbox_module
from inference_svc.adapters.outbox import FRAME_BYTES_MAX, Outbox, cut_batch
from sluice.inference.v1 import inference_pb2


def batch_of(sizes: list[int]) -> inference_pb2.DeltaBatch:
    batch = inference_pb2.DeltaBatch()
    for number, size in enumerate(sizes):
        batch.deltas.add(slot=number, attempt=1, text="x" * size)
    return batch


@given(st.lists(st.integers(0, 400), max_size=40), st.integers(1, 2000))
@settings(max_examples=300, deadline=None)
def test_a_cut_batch_is_the_same_batch_in_parts_below_the_limit(
    sizes: list[int], limit: int
) -> None:
    batch = batch_of(sizes)
    parts = list(cut_batch(batch.SerializeToString(), limit))
    joined = inference_pb2.DeltaBatch()
    for part in parts:
        read = inference_pb2.DeltaBatch.FromString(part)
        assert len(part) <= limit or len(read.deltas) == 1
        joined.deltas.extend(read.deltas)
    assert joined == batch


def take_all(outbox: Outbox) -> list[inference_pb2.GenerateFramesResponse]:
    frames = []
    while (frame := outbox.take()) is not None:
        frames.append(frame)
    return frames


def test_a_frame_of_more_than_256_kib_is_cut_and_events_follow_the_last_part() -> None:
    outbox = Outbox(lambda: None)
    for number in range(40):
        entry = outbox.add_delta()
        entry.slot = number
        entry.text = "x" * 20_000
    outbox.put(inference_pb2.Event(slot=39, ended=inference_pb2.Ended()))
    frames = take_all(outbox)
    assert len(frames) == 4
    assert all(len(frame.deltas) <= FRAME_BYTES_MAX for frame in frames)
    assert [len(frame.events) for frame in frames] == [0, 0, 0, 1]
    slots = [
        delta.slot
        for frame in frames
        for delta in inference_pb2.DeltaBatch.FromString(frame.deltas).deltas
    ]
    assert slots == list(range(40))


def test_events_are_cut_by_their_bytes_too() -> None:
    outbox = Outbox(lambda: None)
    event = inference_pb2.Event(slot=1)
    event.rejected.status.message = "x" * 4000
    for _ in range(200):
        outbox.put(event)
    frames = take_all(outbox)
    assert len(frames) == 4
    assert all(frame.ByteSize() <= FRAME_BYTES_MAX + 2048 for frame in frames)
    assert sum(len(frame.events) for frame in frames) == 200


def test_what_follows_a_seal_is_in_a_later_frame() -> None:
    outbox = Outbox(lambda: None)
    number = outbox.put(inference_pb2.Event(slot=1, accepted=inference_pb2.Accepted()))
    outbox.seal(number)
    outbox.add_delta().slot = 1
    outbox.seal(number)  # it is sealed already
    outbox.add_delta().slot = 1
    first, second = take_all(outbox)
    assert (len(first.events), first.deltas) == (1, b"")
    assert len(inference_pb2.DeltaBatch.FromString(second.deltas).deltas) == 2


def test_the_writer_is_woken_once_until_everything_was_taken() -> None:
    wakes: list[int] = []
    outbox = Outbox(lambda: wakes.append(1))
    for _ in range(5):
        outbox.add_delta().slot = 1
        if not outbox.awake:
            outbox.rouse()
    assert len(wakes) == 1
    assert outbox.take() is not None
    assert outbox.take() is None
    outbox.put(inference_pb2.Event(slot=1))
    assert len(wakes) == 2


def test_what_nobody_reads_is_noticed() -> None:
    outbox = Outbox(lambda: None)
    limit, outbox_module.DELTAS_PENDING_MAX = outbox_module.DELTAS_PENDING_MAX, 10
    try:
        for number in range(11):
            assert not outbox.overfull
            outbox.add_delta().slot = number
            if number == 4:
                outbox.seal(outbox.number)
        assert outbox.overfull
        take_all(outbox)
        assert not outbox.overfull
    finally:
        outbox_module.DELTAS_PENDING_MAX = limit
