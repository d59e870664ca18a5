"""One ``GenerateFrames`` stream over the transport's twin in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.frame_stream import FrameStream
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.room import RoomKeeper
from inference_svc.ports import FinishReason
from sluice.clock import run_virtual
from sluice.common.v1 import result_pb2
from sluice.errors import Code, SluiceError
from sluice.frames import LossKind
from sluice.frames_memory import MemoryConnection, memory_pair
from sluice.inference.v1 import inference_pb2
from sluice.telemetry import Telemetry
from tests.fakes import FakeEngine, FakeTelemetry
from tests.frame_peer import Peer, make_start

SAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
UNSAMPLED = SAMPLED[:-2] + "00"

Request = inference_pb2.GenerateFramesRequest
Response = inference_pb2.GenerateFramesResponse


class Bench:
    """An instance with one engine and any number of streams to it."""

    def __init__(self, engine: FakeEngine, telemetry: Telemetry | None = None) -> None:
        self.engine = engine
        self.engines = [engine]
        self.host = EngineHost(lambda: self.engines[-1])
        self.room = RoomKeeper(self.host.capacity)
        self.instance = Instance("i0", self.host, self.room, None, telemetry or Telemetry.off())
        self.servers: list[asyncio.Task[None]] = []
        self.peers: list[Peer] = []

    def open(self, *, capacity: int = 16, heartbeats: bool = True) -> Peer:
        """A new stream."""
        client: MemoryConnection[Request, Response]
        server: MemoryConnection[Response, Request]
        client, server = memory_pair(capacity)
        self.servers.append(asyncio.create_task(self._serve(server)))
        peer = Peer(client).begin(heartbeats=heartbeats)
        self.peers.append(peer)
        return peer

    async def _serve(self, server: MemoryConnection[Response, Request]) -> None:
        try:
            await FrameStream(server, self.instance).run()
            await server.half_close()
        except* SluiceError as group:
            error = group.exceptions[0]
            assert isinstance(error, SluiceError)
            server.abort(error)


@asynccontextmanager
async def bench(
    engine: FakeEngine | None = None, telemetry: Telemetry | None = None
) -> AsyncIterator[Bench]:
    """A bench whose engine is up; nothing may be left on the engine afterwards."""
    made = Bench(engine or FakeEngine(), telemetry)
    host = asyncio.create_task(made.host.run())
    up = asyncio.Event()
    made.host.watch(up.set)
    await up.wait()
    yield made
    for peer in made.peers:
        await peer.stop()
    await asyncio.gather(*made.servers, return_exceptions=True)
    assert made.engines[-1].running == []
    assert made.room.sequences_held() == 0
    host.cancel()
    await asyncio.gather(host, return_exceptions=True)
    await made.host.close()


def scenario(
    body: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Runs a coroutine in virtual time."""

    def run() -> None:
        run_virtual(body())

    run.__name__ = body.__name__
    run.__doc__ = body.__doc__
    return run


@scenario
async def test_a_generation_is_accepted_then_streamed_then_ended() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(make_start(7, 3, text="hello", max_tokens=5))
        ended = await peer.over(7, 3)
        assert (await peer.accepted(7, 3)).prompt_tokens == 5
        assert (await peer.accepted(7, 3)).simulated
        assert peer.text(7, 3) == "0 1 2 3 4 "
        assert [delta.position for delta in peer.deltas] == [0, 1, 2, 3, 4]
        assert ended.usage.completion_tokens == 5
        assert ended.usage.prompt_tokens == 5
        assert [o.finish_reason for o in ended.outputs] == [result_pb2.FINISH_REASON_LENGTH]
        assert 0 < ended.first_token.nanos < ended.total.nanos
        assert [frame.sequence for frame in peer.frames] == list(range(1, len(peer.frames) + 1))
        assert {frame.epoch for frame in peer.frames} == {b.host.epoch} != {0}


@scenario
async def test_one_engine_step_of_all_slots_is_one_frame() -> None:
    async with bench(FakeEngine(sequences_max=64, step_s=0.02)) as b:
        peer = b.open()
        await peer.send(*(make_start(slot, max_tokens=10) for slot in range(1, 41)))
        for slot in range(1, 41):
            await peer.over(slot)
        sizes = [
            len(inference_pb2.DeltaBatch.FromString(frame.deltas).deltas) for frame in peer.frames
        ]
        assert [size for size in sizes if size] == [40] * 10


@scenario
async def test_the_first_frame_comes_at_once_with_epoch_and_credit() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.until(lambda: peer.frames, within_s=0.05)
        assert peer.frames[0].epoch == b.host.epoch
        assert peer.frames[0].credit.sequences == 8
        assert peer.frames[0].credit.kv_tokens == 8192


@scenario
async def test_a_cancel_aborts_the_engine_at_once_and_a_stale_one_does_nothing() -> None:
    async with bench(FakeEngine(step_s=0.02)) as b:
        peer = b.open()
        await peer.send(make_start(1, 5, max_tokens=500))
        await peer.until(lambda: len(peer.deltas) >= 3)
        await peer.send(cancels=((1, 4), (2, 5), (1, 6)))
        await asyncio.sleep(0.2)
        assert b.engine.aborted == []
        began = asyncio.get_running_loop().time()
        await peer.send(cancels=((1, 5),))
        ended = await peer.over(1, 5)
        assert asyncio.get_running_loop().time() - began < 0.1
        assert b.engine.aborted == [("r1-5", FinishReason.CANCELLED)]
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_CANCELLED
        await peer.send(cancels=((1, 5),))
        await asyncio.sleep(0.1)
        assert len(peer.events) == 2


@scenario
async def test_cancels_of_a_frame_take_effect_before_its_starts() -> None:
    async with bench() as b:
        b.engine.paused = True
        peer = b.open()
        await peer.send(make_start(1, 1))
        await peer.accepted(1, 1)
        # The slot is still in use when the start comes: its `ended` has not even been sent.
        await peer.send(make_start(1, 2), cancels=((1, 1),))
        assert (await peer.rejected(1, 2)).reason == inference_pb2.REJECT_REASON_SLOT_BUSY
        await peer.over(1, 1)


@scenario
async def test_a_cancel_with_an_unknown_reason_is_a_cancel() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(*(make_start(slot, max_tokens=500) for slot in (1, 2)))
        await peer.until(lambda: peer.deltas)
        await peer.send(cancels=((1, 1),), reason=99)  # type: ignore[arg-type]
        await peer.send(cancels=((2, 1),), reason=result_pb2.FINISH_REASON_STOP)
        for slot in (1, 2):
            ended = await peer.over(slot)
            assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_CANCELLED


@scenario
async def test_a_model_that_only_embeds_refuses_to_generate() -> None:
    async with bench(FakeEngine(generates=False)) as b:
        peer = b.open()
        await peer.send(make_start(1))
        refused = await peer.rejected(1)
        assert refused.reason == inference_pb2.REJECT_REASON_INVALID
        assert refused.status.code == Code.FAILED_PRECONDITION


@scenario
async def test_spans_and_timers_end_with_the_stream() -> None:
    telemetry = FakeTelemetry()
    async with bench(telemetry=telemetry) as b:
        b.engine.paused = True
        peer = b.open()
        await peer.send(make_start(1, traceparent=SAMPLED, remaining_s=5000.0))
        await peer.accepted(1)
        peer.connection.cancel()
        await asyncio.sleep(0.1)
        assert [span.ends for span in telemetry.spans] == [1]
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
        assert [t for t in timers if not t.cancelled() and t.when() > loop.time() + 100.0] == []


@scenario
async def test_a_yield_ends_with_an_unspecified_reason() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(make_start(1, max_tokens=500))
        await peer.until(lambda: peer.deltas)
        await peer.send(cancels=((1, 1),), reason=result_pb2.FINISH_REASON_UNSPECIFIED)
        ended = await peer.over(1)
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_UNSPECIFIED
        assert ended.usage.completion_tokens == len(peer.deltas)
        assert b.engine.aborted == [("r1-1", FinishReason.CANCELLED)]


@scenario
async def test_a_cancel_while_the_prompt_is_rendered_never_reaches_a_sequence() -> None:
    async with bench() as b:
        b.engine.render = asyncio.Event()
        peer = b.open()
        await peer.send(make_start(1))
        await asyncio.sleep(0.01)
        assert b.engine.rendering == 1
        await peer.send(cancels=((1, 1),))
        ended = await peer.over(1)
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_CANCELLED
        assert b.engine.rendering == 0
        assert b.engine.submitted == []
        assert peer.event("accepted", 1) is None


@scenario
async def test_a_slot_is_reused_after_its_end_with_another_attempt() -> None:
    async with bench() as b:
        peer = b.open()
        for attempt in (1, 2, 9):
            await peer.send(make_start(3, attempt, max_tokens=2))
            await peer.over(3, attempt)
            assert peer.text(3, attempt) == "0 1 "
        assert len(b.engine.submitted) == 3


@scenario
async def test_a_start_in_a_busy_slot_is_rejected_and_the_running_one_goes_on() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(make_start(1, 1, max_tokens=20))
        await peer.accepted(1, 1)
        await peer.send(make_start(1, 2))
        assert (await peer.rejected(1, 2)).reason == inference_pb2.REJECT_REASON_SLOT_BUSY
        await peer.over(1, 1)
        assert len(peer.text(1, 1).split()) == 20


@scenario
async def test_a_start_beyond_the_credit_is_rejected_at_once() -> None:
    async with bench(FakeEngine(sequences_max=2)) as b:
        b.engine.paused = True
        peer = b.open()
        await peer.send(*(make_start(slot) for slot in (1, 2, 3)))
        began = asyncio.get_running_loop().time()
        assert (await peer.rejected(3)).reason == inference_pb2.REJECT_REASON_NO_ROOM
        assert asyncio.get_running_loop().time() - began < 0.01
        assert not (await peer.rejected(3)).HasField("status")
        b.engine.paused = False
        await peer.over(1)
        await peer.over(2)
        await peer.send(make_start(3, 2))
        await peer.over(3, 2)


@scenario
async def test_a_prompt_beyond_the_kv_memory_waits_but_a_lone_large_one_runs() -> None:
    async with bench(FakeEngine(kv_tokens=400)) as b:
        b.engine.paused = True
        peer = b.open()
        await peer.send(make_start(1, text="x" * 300))
        await peer.accepted(1)
        await peer.send(make_start(2, text="x" * 200))
        assert (await peer.rejected(2)).reason == inference_pb2.REJECT_REASON_NO_ROOM
        await peer.send(make_start(3, text="x" * 90))
        await peer.accepted(3)
        other = b.open()  # its credit is small, but it holds nothing
        await peer.send(cancels=((1, 1), (3, 1)))
        await peer.over(1)
        await peer.over(3)
        await other.send(make_start(1, text="x" * 380))
        await other.accepted(1)


@scenario
async def test_the_deadline_aborts_the_engine_with_its_reason() -> None:
    async with bench(FakeEngine(step_s=0.05)) as b:
        peer = b.open()
        began = asyncio.get_running_loop().time()
        await peer.send(make_start(1, max_tokens=1000, remaining_s=1.0))
        ended = await peer.over(1)
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.06)
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_DEADLINE
        assert b.engine.aborted == [("r1-1", FinishReason.DEADLINE)]


@scenario
async def test_work_that_is_late_or_says_no_deadline_is_rejected() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(make_start(1, remaining_s=0.0), make_start(2, remaining_s=None))
        assert (await peer.rejected(1)).reason == inference_pb2.REJECT_REASON_EXPIRED
        refused = await peer.rejected(2)
        assert refused.reason == inference_pb2.REJECT_REASON_INVALID
        assert "remaining" in refused.status.message
        assert b.engine.submitted == []


@scenario
async def test_invalid_work_names_its_field_and_harms_no_other() -> None:
    async with bench() as b:
        peer = b.open()
        wrong = make_start(1)
        wrong.work.sampling.temperature = 3.0
        long = make_start(2, text="x" * 2000)
        nameless = make_start(3)
        nameless.work.request_id = ""
        elsewhere = make_start(4)
        elsewhere.work.model = "another"
        await peer.send(wrong, long, nameless, elsewhere, make_start(5))
        for slot, word in ((1, "sampling.temperature"), (2, "1024"), (3, "request_id")):
            refused = await peer.rejected(slot)
            assert refused.reason == inference_pb2.REJECT_REASON_INVALID
            assert refused.status.code == Code.INVALID_ARGUMENT
            assert word in refused.status.message
        assert (await peer.rejected(4)).status.code == Code.NOT_FOUND
        await peer.over(5)


@scenario
async def test_a_continuation_of_another_model_is_told_from_invalid_work() -> None:
    async with bench() as b:
        peer = b.open()
        start = make_start(1)
        start.work.continuation.output_token_ids.extend([0, 1])
        start.work.continuation.model_fingerprint = "another"
        fits = make_start(2)
        fits.work.continuation.CopyFrom(start.work.continuation)
        fits.work.continuation.model_fingerprint = b.engine.fingerprint
        await peer.send(start, fits)
        assert (await peer.rejected(1)).reason == inference_pb2.REJECT_REASON_FINGERPRINT
        await peer.over(2)
        assert peer.text(2).startswith("2 3 ")


@scenario
async def test_an_unexpected_failure_of_the_engine_tells_no_text() -> None:
    class Broken(FakeEngine):
        async def prepare(self, spec: object) -> Any:
            raise RuntimeError("secret path")

    async with bench(Broken()) as b:
        peer = b.open()
        await peer.send(make_start(1))
        refused = await peer.rejected(1)
        assert refused.reason == inference_pb2.REJECT_REASON_UNSPECIFIED
        assert refused.status.code == Code.INTERNAL
        assert "secret" not in str(refused)


@scenario
async def test_the_end_of_the_stream_aborts_all_that_was_started_on_it() -> None:
    for end in ("half_close", "cancel"):
        async with bench(FakeEngine(step_s=0.05)) as b:
            peer, other = b.open(), b.open()
            await asyncio.sleep(0.01)
            await other.send(make_start(1, max_tokens=40), demand=(1, 100))
            await peer.send(*(make_start(slot, max_tokens=500) for slot in (1, 2)))
            await peer.until(partial(_has_deltas, peer, 4))
            if end == "half_close":
                await peer.half_close()
            else:
                peer.connection.cancel()
            await asyncio.sleep(0.06)
            assert [name for name, _ in b.engine.aborted] == ["r1-1", "r2-1"]
            await other.over(1)
            assert len(other.text(1).split()) == 40


@scenario
async def test_silence_of_three_seconds_breaks_the_stream_and_frees_its_room() -> None:
    async with bench(FakeEngine(step_s=0.05)) as b:
        peer = b.open(heartbeats=False)
        await peer.send(make_start(1, max_tokens=1000))
        await asyncio.sleep(2.9)
        assert b.engine.aborted == []
        await asyncio.sleep(0.2)
        assert b.engine.aborted == [("r1-1", FinishReason.CANCELLED)]
        assert b.room.sequences_held() == 0


@scenario
async def test_an_idle_stream_hears_a_frame_every_second() -> None:
    async with bench() as b:
        peer = b.open()
        await asyncio.sleep(10.5)
        assert 10 <= len(peer.frames) <= 12


@scenario
async def test_a_gap_or_repetition_in_the_sequence_ends_the_stream() -> None:
    for wrong in (1, 3, 0):
        async with bench() as b:
            peer = b.open(heartbeats=False)
            await peer.send(make_start(1, max_tokens=500))
            await peer.accepted(1)
            await peer.send(sequence=wrong)
            await peer.until_over()
            assert peer.broken is not None
            assert peer.broken.error is not None
            assert peer.broken.error.code is Code.INVALID_ARGUMENT
            assert peer.broken.reason is LossKind.PROTOCOL
            assert b.engine.running == []


@scenario
async def test_draining_is_told_in_band_and_open_slots_end() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(make_start(1, max_tokens=20))
        await peer.accepted(1)
        b.host.drain()
        await peer.until(lambda: peer.frames[-1].draining)
        await peer.send(make_start(2))
        assert (await peer.rejected(2)).reason == inference_pb2.REJECT_REASON_DRAINING
        await peer.over(1)
        assert len(peer.text(1).split()) == 20
        await peer.half_close()
        await peer.until_over()
        assert peer.ended


@scenario
async def test_a_new_engine_has_a_new_epoch_and_ends_the_streams_of_the_old_one() -> None:
    async with bench() as b:
        peer = b.open()
        await peer.send(make_start(1, max_tokens=500))
        await peer.until(lambda: peer.deltas)
        first = b.host.epoch
        b.engines.append(FakeEngine())
        b.engine.crash()
        ended = await peer.over(1)
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_ERROR
        await peer.send(make_start(2))
        assert (await peer.rejected(2)).reason == inference_pb2.REJECT_REASON_ENGINE_DOWN
        await peer.until_over()
        assert peer.broken is not None
        again = b.open()
        await again.until(lambda: again.frames)
        assert again.frames[0].epoch not in (0, first)
        await again.send(make_start(1))
        await again.over(1)


@scenario
async def test_accepted_leaves_before_the_first_delta_also_when_the_peer_does_not_read() -> None:
    """Seen to fail when the first delta does not seal the frame with its slot's `accepted`."""
    async with bench(FakeEngine(step_s=0.001)) as b:
        client: MemoryConnection[Request, Response]
        server: MemoryConnection[Response, Request]
        client, server = memory_pair(1)
        b.servers.append(asyncio.create_task(b._serve(server)))
        peer = Peer(client)
        b.peers.append(peer)
        # One frame fills the way, and the next heartbeat waits for room in it.
        await asyncio.sleep(1.5)
        await peer.send(*(make_start(slot, max_tokens=3) for slot in (1, 2, 3)))
        await asyncio.sleep(0.5)  # all have ended before anything is read
        peer.begin()
        for slot in (1, 2, 3):
            await peer.over(slot)
            told = _frame_of(peer, "accepted", slot)
            deltas = [
                at
                for at, frame in enumerate(peer.frames)
                if any(
                    delta.slot == slot
                    for delta in inference_pb2.DeltaBatch.FromString(frame.deltas).deltas
                )
            ]
            assert told < deltas[0]
            assert deltas[-1] <= _frame_of(peer, "ended", slot)
            assert peer.text(slot) == "0 1 2 "


def _has_deltas(peer: Peer, count: int) -> bool:
    return len(peer.deltas) >= count


def _frame_of(peer: Peer, kind: str, slot: int) -> int:
    for at, frame in enumerate(peer.frames):
        for event in frame.events:
            if event.slot == slot and event.WhichOneof("kind") == kind:
                return at
    raise AssertionError(f"no {kind} for slot {slot}")


@scenario
async def test_one_span_is_made_for_a_sampled_start_and_none_for_others() -> None:
    telemetry = FakeTelemetry()
    async with bench(telemetry=telemetry) as b:
        peer = b.open()
        await peer.send(
            make_start(1, traceparent=SAMPLED),
            make_start(2, traceparent=UNSAMPLED),
            make_start(3),
            make_start(4, traceparent="garbage-01"),
        )
        for slot in (1, 2, 3, 4):
            await peer.over(slot)
        [span] = telemetry.spans
        assert span.parent == SAMPLED
        assert span.ends == 1
        assert span.error is None
        assert span.attributes["gen_ai.usage.output_tokens"] == 4
        assert span.attributes["gen_ai.response.finish_reasons"] == "length"
        assert span.attributes["sluice.request_id"] == "r1-1"
