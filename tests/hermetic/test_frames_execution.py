"""``ExecuteFrames`` through real gRPC servers on loopback: between a scheduler by hand and
instances with fake engines."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from execution_svc.adapters import relay as relay_module
from inference_svc.ports import FinishReason
from sluice.common.v1 import result_pb2
from sluice.errors import Code
from sluice.execution.v1 import execution_pb2
from sluice.frames import LossKind
from sluice.inference.v1 import inference_pb2
from sluice.status import from_rpc_error
from tests.fakes import FakeEngine, FakeTelemetry
from tests.frame_peer import make_start
from tests.hermetic.frames_harness import (
    execution,
    instance,
    part,
    start_instance,
)

CANCEL_S = 0.1
SAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


async def until(met: Callable[[], object], within_s: float = 3.0) -> float:
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while not met():
            await asyncio.sleep(0.002)
    return time.monotonic() - began


async def test_two_requests_run_on_two_instances_through_one_stream() -> None:
    async with instance("a") as a, instance("b") as b, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(
            part("a", a.address, make_start(0, 1), demand=(1, 100)),
            part("b", b.address, make_start(0, 2, max_tokens=6)),
        )
        await scheduler.until(lambda: len(scheduler.of) == 2)
        assert (await scheduler.peer("a").over(0, 1)).usage.completion_tokens == 4
        assert (await scheduler.peer("b").over(0, 2)).usage.completion_tokens == 6
        assert scheduler.peer("a").text(0, 1) == "0 1 2 3 "
        assert scheduler.peer("a").credit is not None
        assert {f.epoch for f in scheduler.peer("b").frames} == {b.host.epoch}
        await scheduler.half_close()
        await scheduler.until(lambda: scheduler.ended)
        assert scheduler.lost == []
        assert [m.sequence for m in scheduler.messages] == list(
            range(1, len(scheduler.messages) + 1)
        )


async def test_an_empty_part_opens_the_stream_of_an_instance_so_that_credit_comes() -> None:
    async with instance("a") as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address))
        await scheduler.until(lambda: scheduler.peer("a").credit)
        await scheduler.stop()


async def test_frames_of_an_instance_pass_byte_for_byte() -> None:
    """Goal: execution neither opens nor changes what an instance sends. Method: an engine whose
    output is odd (several deltas of a slot in a step, wide text), the same frames taken before and
    after execution. Oracle: equality of the frames, and of `deltas` as bytes."""
    async with instance("a", FakeEngine(step_s=0.002)) as a, execution() as relay:
        sent: list[inference_pb2.GenerateFramesResponse] = []
        scheduler = relay.open()
        await scheduler.send(part("a", a.address))
        await scheduler.until(lambda: scheduler.peer("a").frames)
        [stream] = a.servicer._streams
        compose = stream._writer._compose

        def spy(due: bool) -> inference_pb2.GenerateFramesResponse | None:
            frame = compose(due)
            if frame is not None:
                sent.append(frame)
            return frame

        stream._writer._compose = spy
        await scheduler.send(
            part("a", a.address, *(make_start(slot, text="é" * 9) for slot in range(5)))
        )
        for slot in range(5):
            await scheduler.peer("a").over(slot)
        received = scheduler.peer("a").frames[-len(sent) :]
        assert [f.SerializeToString() for f in received] == [f.SerializeToString() for f in sent]
        assert [f.deltas for f in received] == [f.deltas for f in sent]
        await scheduler.stop()


async def test_what_several_instances_sent_meanwhile_is_joined_in_one_message() -> None:
    """A scheduler that reads late gets what gathered, many parts in few messages, each instance's
    frames in order."""
    engines = [FakeEngine(step_s=0.001, context_tokens=100_000) for _ in range(2)]
    async with (
        instance("a", engines[0]) as a,
        instance("b", engines[1]) as b,
        execution() as relay,
    ):
        scheduler = relay.open()
        await scheduler.send(
            part("a", a.address, make_start(0, max_tokens=300)),
            part("b", b.address, make_start(0, max_tokens=300)),
        )
        await scheduler.peer("a").over(0)
        await scheduler.peer("b").over(0)
        joined = [
            message
            for message in scheduler.messages
            if {part.instance for part in message.parts} == {"a", "b"}
        ]
        assert joined
        for name in ("a", "b"):
            sequences = [frame.sequence for frame in scheduler.peer(name).frames]
            assert sequences == list(range(1, len(sequences) + 1))
            assert len(scheduler.peer(name).text(0).split()) == 300
        await scheduler.stop()


async def test_a_cancel_crosses_both_hops_within_100_ms_in_prefill_and_mid_stream() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(1, max_tokens=1000)))
        await until(lambda: engine.running)
        engine.render = asyncio.Event()
        await scheduler.send(part("a", a.address, make_start(2)))
        await until(lambda: engine.rendering)
        await scheduler.send(part("a", a.address, cancels=((1, 9), (1, 1), (2, 1))))
        took = await until(lambda: engine.aborted and not engine.rendering)
        assert took < CANCEL_S
        assert engine.aborted == [("r1-1", FinishReason.CANCELLED)]
        await scheduler.peer("a").over(1)
        await scheduler.peer("a").over(2)
        await scheduler.stop()


async def test_the_end_of_the_scheduler_stream_aborts_all_that_it_ran_and_nothing_else() -> None:
    for end in ("cancel", "half_close"):
        engines = [FakeEngine(step_s=0.01) for _ in range(2)]
        async with (
            instance("a", engines[0]) as a,
            instance("b", engines[1]) as b,
            execution() as relay,
        ):
            first, second = relay.open(), relay.open()
            await first.send(part("a", a.address), part("b", b.address))
            await second.send(part("a", a.address, make_start(0, max_tokens=60), demand=(1, 100)))
            await first.until(lambda f=first: len(f.of) == 2)  # type: ignore[misc]
            await first.send(
                part("a", a.address, make_start(0, max_tokens=1000, request_id="mine")),
                part("b", b.address, make_start(0, max_tokens=1000, request_id="mine")),
            )
            await until(lambda e=engines: len(e[0].running) == 2 and e[1].running)  # type: ignore[misc]
            if end == "cancel":
                first.connection.cancel()
            else:
                await first.half_close()
            await until(lambda e=engines: not e[1].running)  # type: ignore[misc]
            await until(lambda e=engines: len(e[0].running) == 1)  # type: ignore[misc]
            assert {name for engine in engines for name, _ in engine.aborted} == {"mine"}
            await second.peer("a").over(0)
            assert len(second.peer("a").text(0).split()) == 60
            await first.stop()
            await second.stop()
            await until(lambda r=relay: r.servicer.scheduler_streams == 0)  # type: ignore[misc]
            assert relay.counts.links_open == 0


async def test_an_instance_that_is_not_there_is_lost_as_unreachable_and_may_come_later() -> None:
    async with execution() as relay:
        scheduler = relay.open()
        gone = await start_instance("gone")
        port = gone.server.ports[0]
        await gone.close()
        address = f"127.0.0.1:{port}"
        await scheduler.send(part("gone", address, make_start(0, 1)))
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("gone", execution_pb2.LOSS_REASON_UNREACHABLE)]
        back = await start_instance("gone", port=port)
        attempt = 1
        while not scheduler.of:  # the channel's backoff is 100 ms to 2 s
            attempt += 1
            losses = len(scheduler.lost)
            await scheduler.send(part("gone", address, make_start(0, attempt)))
            await scheduler.until(lambda n=losses: scheduler.of or len(scheduler.lost) > n)  # type: ignore[misc]
            await asyncio.sleep(0.05)
        await scheduler.peer("gone").over(0, attempt)
        await scheduler.stop()
        await back.close()


async def test_an_instance_that_dies_is_lost_as_disconnected_while_others_go_on() -> None:
    doomed = await start_instance("a", FakeEngine(step_s=0.01))
    async with instance("b", FakeEngine(step_s=0.01)) as b, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(
            part("a", doomed.address, make_start(0, max_tokens=1000)),
            part("b", b.address, make_start(0, max_tokens=50)),
        )
        await scheduler.until(lambda: "a" in scheduler.of)
        await doomed.kill()
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("a", execution_pb2.LOSS_REASON_DISCONNECTED)]
        await scheduler.peer("b").over(0)
        assert len(scheduler.peer("b").text(0).split()) == 50
        await scheduler.stop()
    await doomed.close()


async def test_an_instance_that_falls_silent_is_lost_as_silent() -> None:
    async with instance("a") as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address))
        await scheduler.until(lambda: scheduler.of)
        [stream] = a.servicer._streams
        stream._writer._compose = lambda due: None
        began = time.monotonic()
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("a", execution_pb2.LOSS_REASON_SILENT)]
        assert 2.5 < time.monotonic() - began < 4.5
        await scheduler.stop()


async def test_an_instance_that_misnumbers_its_frames_is_lost_for_its_protocol() -> None:
    async with instance("a", FakeEngine(step_s=0.01)) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(0, max_tokens=1000)))
        await scheduler.until(lambda: scheduler.of)
        [stream] = a.servicer._streams
        stream._sent += 1
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("a", execution_pb2.LOSS_REASON_PROTOCOL)]
        await scheduler.stop()


async def test_an_instance_that_drains_ends_its_slots_and_is_then_closed() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(0, max_tokens=30)))
        await scheduler.until(lambda: scheduler.of and scheduler.peer("a").deltas)
        draining = asyncio.create_task(a.servicer.drain())
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("a", execution_pb2.LOSS_REASON_CLOSED)]
        peer = scheduler.peer("a")
        assert peer.event("ended", 0) is not None
        assert peer.frames[-1].draining
        assert len(peer.text(0).split()) == 30
        await asyncio.wait_for(draining, 1.0)
        await scheduler.stop()


async def test_a_replica_that_drains_says_so_and_lets_work_end() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(0, max_tokens=30)))
        await scheduler.until(lambda: scheduler.of)
        draining = asyncio.create_task(relay.servicer.drain())
        await scheduler.until(lambda: scheduler.messages[-1].draining)
        await scheduler.peer("a").over(0)
        assert len(scheduler.peer("a").text(0).split()) == 30
        assert not draining.done()
        refused = relay.open()
        await refused.until(lambda: refused.broken)
        assert refused.broken is not None
        assert refused.broken.error is not None
        assert refused.broken.error.reason == "DRAINING"
        await scheduler.send(draining=True)
        await until(lambda: not a.host.draining)
        await scheduler.half_close()
        await scheduler.until(lambda: scheduler.ended)
        await asyncio.wait_for(draining, 3.0)
        await refused.stop()


async def test_a_drain_does_not_wait_for_a_scheduler_that_does_not_close() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(0, max_tokens=150)))
        await scheduler.until(lambda: scheduler.of)
        draining = asyncio.create_task(relay.servicer.drain())
        await scheduler.peer("a").over(0)
        assert len(scheduler.peer("a").text(0).split()) == 150
        await asyncio.wait_for(draining, 3.0)
        await scheduler.until(lambda: scheduler.broken)
        assert scheduler.broken is not None
        assert scheduler.broken.error is not None
        assert scheduler.broken.error.reason == "DRAINING"


async def test_close_fences_an_instance_stream_without_a_loss() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(0, 1, max_tokens=1000)))
        await until(lambda: engine.running)
        await scheduler.send(part("a", a.address, close=True))
        await until(lambda: not engine.running)
        # The slot number is free at once: it is another stream.
        await scheduler.send(part("a", a.address, make_start(0, 2)))
        await scheduler.peer("a").over(0, 2)
        assert scheduler.lost == []
        assert scheduler.peer("a").event("ended", 0, 1) is None
        await scheduler.stop()


async def test_a_gap_in_the_scheduler_s_sequence_ends_the_stream() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(0, max_tokens=1000)))
        await until(lambda: engine.running)
        await scheduler.send(sequence=9)
        await scheduler.until(lambda: scheduler.broken)
        assert scheduler.broken is not None
        assert scheduler.broken.reason is LossKind.PROTOCOL
        await until(lambda: not engine.running)


async def test_a_start_larger_than_a_frame_travels_alone_and_the_others_with_it() -> None:
    engine = FakeEngine(context_tokens=10_000_000, kv_tokens=100_000_000, sequences_max=64)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address))
        await scheduler.until(lambda: scheduler.of)
        seen: list[tuple[int, int]] = []
        [stream] = a.servicer._streams
        take = stream._take

        async def spy(frame: inference_pb2.GenerateFramesRequest) -> None:
            seen.append((len(frame.starts), frame.ByteSize()))
            await take(frame)

        stream._take = spy  # type: ignore[method-assign]
        small = [make_start(slot, text="x" * 20_000) for slot in range(20)]
        large = make_start(30, text="x" * 3_000_000)
        await scheduler.send(part("a", a.address, *small[:10], large, *small[10:]))
        for slot in (*range(20), 30):
            await scheduler.peer("a").over(slot)
        for starts, size in seen:
            assert size <= 256 * 1024 + 4096 or starts == 1
        assert max(size for _, size in seen) > 3_000_000
        await scheduler.stop()


async def test_the_deadline_shrinks_by_what_a_start_waits_here() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        scheduler = relay.open()
        began = time.monotonic()
        await scheduler.send(
            part("a", a.address, make_start(0, max_tokens=10_000, remaining_s=0.5)),
        )
        ended = await scheduler.peer("a").over(0)
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_DEADLINE
        assert time.monotonic() - began < 0.5 + 2.0  # of the 100 s that it wants
        await scheduler.stop()


async def test_a_scheduler_that_does_not_read_costs_bounded_memory_and_nobody_else() -> None:
    """Goal: the replica's memory stays bounded while a scheduler does not read, and another
    scheduler is served as before. Method: an engine with wide text, one scheduler that writes
    heartbeats and reads nothing, one that reads; then the first reads. Oracle: bytes pending in the
    relay, the instance's own backlog, the text in the end. Seen to fail when ``InstanceLink._read``
    does not wait for room."""

    class Wide(FakeEngine):
        def step(self) -> None:
            for request in list(self.running):
                token = request.position
                request.position += 1
                request.output_tokens += 1
                request.left -= 1
                request.sink.delta(0, "x" * 20_000, (token,), token)
                if request.left == 0:
                    self.running.remove(request)
                    request.end()

    tokens = 1200  # 24 MB in all: several times what transport and relay hold
    wide = Wide(step_s=0.001, context_tokens=100_000, kv_tokens=1_000_000)
    async with instance("a", wide) as a, instance("b") as b, execution() as relay:
        slow, fast = relay.open(reading=False), relay.open()
        await slow.send(part("a", a.address, make_start(0, max_tokens=tokens)))
        await until(lambda: relay.counts.limit_hits["relay_pending_bytes"], within_s=20.0)
        [stream] = [s for s in relay.servicer._streams if s.relay._pending_bytes]
        for round_ in range(3):
            await asyncio.sleep(0.2)
            assert stream.relay._pending_bytes < relay_module.PENDING_BYTES_MAX + 512 * 1024
            await fast.send(part("b", b.address, make_start(0, round_ + 1)))
            await fast.peer("b").over(0, round_ + 1)
        slow.read()
        await slow.until(lambda: slow.of)
        async with asyncio.timeout(20.0):
            await slow.peer("a").until(lambda: slow.peer("a").event("ended", 0), within_s=20.0)
        positions = [delta.position for delta in slow.peer("a").deltas]
        assert positions == list(range(tokens))
        assert slow.lost == []
        await slow.stop()
        await fast.stop()


async def test_a_sampled_start_has_one_span_here_that_is_the_instance_s_parent() -> None:
    here, there = FakeTelemetry(), FakeTelemetry()
    async with instance("a", telemetry=there) as a, execution(here) as relay:
        scheduler = relay.open()
        await scheduler.send(
            part(
                "a",
                a.address,
                make_start(0, traceparent=SAMPLED),
                make_start(1, traceparent=SAMPLED[:-1] + "0"),
                make_start(2, traceparent=SAMPLED),
            )
        )
        for slot in range(3):
            await scheduler.peer("a").over(slot)
        await until(lambda: all(span.ends for span in here.spans))
        assert [span.parent for span in here.spans] == [SAMPLED, SAMPLED]
        assert [span.parent for span in there.spans] == [span.traceparent for span in here.spans]
        assert [span.ends for span in here.spans + there.spans] == [1, 1, 1, 1]
        assert {span.error for span in here.spans} == {None}
        await scheduler.send(
            part("a", a.address, make_start(0, 2, max_tokens=10_000, traceparent=SAMPLED))
        )
        await until(lambda: len(there.spans) == 3)
        await scheduler.send(part("a", a.address, close=True))
        await until(lambda: here.spans[2].ends)
        assert here.spans[2].error == "INSTANCE_LOST"
        await scheduler.stop()


async def test_streams_leave_no_tasks_behind() -> None:
    async with instance("a", FakeEngine(step_s=0.005)) as a, execution() as relay:
        await asyncio.sleep(0.05)
        before = len(asyncio.all_tasks())
        for _ in range(20):
            scheduler = relay.open()
            await scheduler.send(part("a", a.address, make_start(0, max_tokens=1000)))
            await scheduler.until(lambda s=scheduler: s.of)  # type: ignore[misc]
            await scheduler.stop()
        await until(lambda: len(asyncio.all_tasks()) <= before)
        gc.collect()


# The plain calls.


def execute_request(address: str, max_tokens: int = 3) -> execution_pb2.ExecuteRequest:
    request = execution_pb2.ExecuteRequest()
    request.instance.name = "a"
    request.instance.address = address
    request.work.request_id = "r"
    request.work.input.text = "hello"
    request.work.sampling.max_tokens = max_tokens
    return request


async def test_execute_relays_one_request_and_its_cancel() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance("a", engine) as a, execution() as relay:
        kinds = []
        async for message in relay.stub.Execute(execute_request(a.address)):
            assert message.instance == "a"
            kinds.append(message.response.WhichOneof("event"))
        assert kinds == ["accepted", "delta", "delta", "delta", "ended"]
        call = relay.stub.Execute(execute_request(a.address, 10_000))
        async for message in call:
            if message.response.sequence == 3:
                break
        call.cancel()
        assert await until(lambda: engine.aborted) < CANCEL_S


async def test_plain_calls_carry_the_trace_on() -> None:
    here, there = FakeTelemetry(), FakeTelemetry()
    async with instance("a", telemetry=there) as a, execution(here) as relay:
        metadata = (("traceparent", SAMPLED), ("x-request-id", "r"))
        async for _ in relay.stub.Execute(execute_request(a.address), metadata=metadata):
            pass
        embed = execution_pb2.ExecuteEmbedRequest()
        embed.instance.CopyFrom(execute_request(a.address).instance)
        embed.request.request_id = "e"
        embed.request.inputs.add(text="abc")
        await relay.stub.ExecuteEmbed(embed, metadata=metadata)
        await until(lambda: len(there.spans) == 2 and all(s.ends for s in here.spans))
        assert [span.parent for span in here.spans] == [SAMPLED, SAMPLED]
        assert [span.parent for span in there.spans] == [s.traceparent for s in here.spans]
        assert {span.error for span in here.spans + there.spans} == {None}


async def test_errors_of_plain_calls_are_the_instance_s_or_say_that_it_is_unreachable() -> None:
    async with instance("a") as a, execution() as relay:
        bad = execute_request(a.address)
        bad.work.sampling.temperature = 9.0
        nowhere = execute_request("127.0.0.1:1")
        nameless = execute_request(a.address)
        nameless.instance.name = ""
        for request, code, reason in (
            (bad, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
            (nowhere, Code.UNAVAILABLE, "INSTANCE_UNREACHABLE"),
            (nameless, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in relay.stub.Execute(request):
                    pass
            error = from_rpc_error(caught.value)
            assert (error.code, error.reason) == (code, reason)


async def test_execute_embed_relays() -> None:
    async with instance("a") as a, execution() as relay:
        request = execution_pb2.ExecuteEmbedRequest()
        request.instance.name = "a"
        request.instance.address = a.address
        request.request.request_id = "e"
        request.request.inputs.add(text="abc")
        answer = await relay.stub.ExecuteEmbed(request)
        assert answer.instance == "a"
        assert list(answer.response.embeddings[0].values) == [3.0, 0.0, 0.0, 1.0]
