"""``GenerateFrames`` and the plain calls of an instance through real gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from inference_svc.adapters import servicer as servicer_module
from inference_svc.ports import FinishReason
from sluice.common.v1 import grant_pb2, result_pb2
from sluice.errors import Code, SluiceError
from sluice.frames import LossKind
from sluice.grants import GrantSigner, GrantVerifier, ensure_keys
from sluice.inference.v1 import inference_pb2
from sluice.status import from_rpc_error
from tests.fakes import FakeEngine
from tests.frame_peer import Peer, make_start
from tests.hermetic.frames_harness import InstanceServer, instance, start_instance

CANCEL_S = 0.1  # from a cancel to the engine's abort


async def error_of(call: object) -> SluiceError:
    """The typed error with which a call ended."""
    try:
        async for _ in call:  # type: ignore[attr-defined]
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call did not fail")


def generate_request(
    request_id: str = "r1", text: str = "hello", max_tokens: int = 4
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.work.request_id = request_id
    request.work.input.text = text
    request.work.sampling.max_tokens = max_tokens
    return request


async def until(met: Callable[[], object], within_s: float = 2.0) -> float:
    """Waits; returns how long it took."""
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while not met():
            await asyncio.sleep(0.002)
    return time.monotonic() - began


async def stopped(*peers: Peer) -> None:
    for peer in peers:
        await peer.stop()


async def test_a_cancel_reaches_the_engine_in_prefill_and_in_mid_stream() -> None:
    """Goal: a cancel frees the engine within 100 ms wherever the request is. Method: one request
    held in rendering, one that streams; cancel both. Oracle: the engine's own record. Seen to fail
    when ``FrameStream._abort`` does not cancel the rendering task."""
    engine = FakeEngine(step_s=0.01)
    async with instance(engine=engine) as server:
        peer = server.open()
        await peer.send(make_start(1, max_tokens=1000))
        await peer.until(lambda: len(peer.deltas) > 3)
        engine.render = asyncio.Event()
        await peer.send(make_start(2))
        await until(lambda: engine.rendering == 1)
        await peer.send(cancels=((1, 1), (2, 1)))
        assert await until(lambda: engine.aborted and engine.rendering == 0) < CANCEL_S
        assert engine.aborted == [("r1-1", FinishReason.CANCELLED)]
        await peer.over(1)
        await peer.over(2)
        await stopped(peer)


async def test_a_client_that_vanishes_aborts_everything_that_it_started() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance(engine=engine) as server:
        peer = server.open()
        await peer.send(*(make_start(slot, max_tokens=1000) for slot in range(6)))
        await peer.until(lambda: len(peer.deltas) > 12)
        peer.connection.cancel()
        assert await until(lambda: not engine.running) < CANCEL_S
        assert len(engine.aborted) == 6
        again = server.open()
        await again.send(*(make_start(slot) for slot in range(8)))
        for slot in range(8):
            await again.over(slot)
        await stopped(peer, again)


async def test_a_frame_of_the_engine_is_cut_at_256_kib() -> None:
    class Wide(FakeEngine):
        def step(self) -> None:
            for request in list(self.running):
                self.running.remove(request)
                request.sink.delta(0, "x" * 50_000, (1,), 0)
                request.end()

    engine = Wide(sequences_max=32)
    async with instance(engine=engine) as server:
        engine.paused = True
        peer = server.open()
        await peer.send(*(make_start(slot) for slot in range(20)))
        for slot in range(20):
            await peer.accepted(slot)
        engine.step()
        for slot in range(20):
            await peer.over(slot)
        assert max(frame.ByteSize() for frame in peer.frames) <= 256 * 1024 + 4096
        assert all(len(peer.text(slot)) == 50_000 for slot in range(20))
        await stopped(peer)


async def test_a_start_of_several_mebibytes_arrives() -> None:
    engine = FakeEngine(context_tokens=10_000_000, kv_tokens=20_000_000)
    async with instance(engine=engine) as server:
        peer = server.open()
        await peer.send(make_start(1, text="x" * (5 * 1024 * 1024)))
        assert (await peer.accepted(1)).prompt_tokens == 5 * 1024 * 1024
        await peer.over(1)
        await stopped(peer)


def grants(folder: Path) -> tuple[GrantSigner, GrantVerifier]:
    ensure_keys(folder)
    return GrantSigner.load(folder, "s0"), GrantVerifier.load(folder / "grant-public")


async def test_each_kind_of_wrong_grant_is_refused_and_tells_nothing_else(tmp_path: Path) -> None:
    signer, verifier = grants(tmp_path / "own")
    stranger, _ = grants(tmp_path / "other")
    now = time.time()
    forged = signer.sign("r5-1", "i0", now_unix_s=now)
    forged.payload = signer.sign("r5-1", "*", now_unix_s=now).payload
    wrong: dict[int, tuple[grant_pb2.SignedGrant | None, str]] = {
        1: (None, "GRANT_MISSING"),
        2: (signer.sign("another", "i0", now_unix_s=now), "GRANT_REQUEST"),
        3: (signer.sign("r3-1", "i9", now_unix_s=now), "GRANT_AUDIENCE"),
        4: (signer.sign("r4-1", "i0", now_unix_s=now - 100.0), "GRANT_EXPIRED"),
        5: (forged, "GRANT_SIGNATURE"),
        6: (stranger.sign("r6-1", "i0", now_unix_s=now), "GRANT_UNKNOWN_KEY"),
    }
    engine = FakeEngine()
    async with instance(engine=engine, verifier=verifier) as server:
        peer = server.open()
        # Invalid work too: without a grant nobody learns that it is.
        await peer.send(
            *(make_start(slot, grant=grant, text="") for slot, (grant, _) in wrong.items())
        )
        for slot, (_, reason) in wrong.items():
            refused = await peer.rejected(slot)
            assert refused.reason == inference_pb2.REJECT_REASON_NO_GRANT
            assert refused.status.code == Code.PERMISSION_DENIED
            assert reason in str(refused.status.details[0])
        assert engine.submitted == []
        await peer.send(make_start(9, grant=signer.sign("r9-1", "i0", now_unix_s=now)))
        await peer.over(9)
        plain = await error_of(server.stub.Generate(generate_request()))
        assert (plain.code, plain.reason) == (Code.PERMISSION_DENIED, "GRANT_MISSING")
        granted = generate_request()
        granted.grant.CopyFrom(signer.sign("r1", "i0", now_unix_s=now))
        assert [m async for m in server.stub.Generate(granted)]
        embed = inference_pb2.EmbedRequest(request_id="e")
        embed.inputs.add(text="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Embed(embed)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await stopped(peer)


async def test_two_streams_share_the_room_and_give_it_back() -> None:
    engine = FakeEngine(sequences_max=8, step_s=0.01)
    async with instance(engine=engine) as server:
        first = server.open()
        await first.until(lambda: first.credit)
        await first.send(
            *(make_start(slot, max_tokens=1000) for slot in range(8)), demand=(20, 2000)
        )
        for slot in range(8):
            await first.accepted(slot)
        second = server.open()
        await second.send(demand=(20, 2000))
        # Negative credit: 4 where 8 are held; nothing for the newcomer yet.
        await first.until(lambda: first.credit and first.credit.sequences == 4)
        assert not second.credit or second.credit.sequences == 0
        await second.send(make_start(0))
        assert (await second.rejected(0)).reason == inference_pb2.REJECT_REASON_NO_ROOM
        await first.send(cancels=tuple((slot, 1) for slot in range(4)))
        await second.until(lambda: second.credit and second.credit.sequences == 4)
        await second.send(*(make_start(slot, 2) for slot in range(4)))
        for slot in range(4):
            await second.over(slot, 2)
        await second.stop()
        await first.until(lambda: first.credit and first.credit.sequences == 8)
        await stopped(first)


async def test_a_drain_lets_slots_end_and_the_peer_close_the_stream() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance(engine=engine) as server:
        peer = server.open()
        await peer.send(make_start(1, max_tokens=30))
        await peer.until(lambda: peer.deltas)
        draining = asyncio.create_task(server.servicer.drain())
        await peer.until(lambda: peer.frames[-1].draining)
        await peer.send(make_start(2))
        assert (await peer.rejected(2)).reason == inference_pb2.REJECT_REASON_DRAINING
        await peer.over(1)
        assert len(peer.text(1).split()) == 30
        assert not draining.done()
        await peer.half_close()
        await peer.until_over()
        assert peer.ended
        await asyncio.wait_for(draining, 1.0)
        plain = await error_of(server.stub.Generate(generate_request()))
        assert (plain.code, plain.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_a_silent_peer_is_dropped_after_three_seconds() -> None:
    engine = FakeEngine(step_s=0.02)
    async with instance(engine=engine) as server:
        peer = server.open(heartbeats=False)
        await peer.send(make_start(1, max_tokens=10_000))
        began = time.monotonic()
        await peer.until_over()
        assert 2.5 < time.monotonic() - began < 4.5
        assert peer.broken is not None
        assert peer.broken.reason is LossKind.DISCONNECTED
        await until(lambda: not engine.running)


async def test_a_sequence_gap_ends_the_stream_with_invalid_argument() -> None:
    engine = FakeEngine()
    async with instance(engine=engine) as server:
        peer = server.open()
        await peer.send(make_start(1, max_tokens=1000))
        await peer.accepted(1)
        await peer.send(sequence=7)
        await peer.until_over()
        assert peer.broken is not None
        assert peer.broken.reason is LossKind.PROTOCOL
        assert peer.broken.error is not None
        assert peer.broken.error.fields[0].field == "sequence"
        await until(lambda: not engine.running)
        await stopped(peer)


async def test_a_new_engine_ends_the_stream_and_the_next_has_its_epoch() -> None:
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    server = await start_instance(make=make)
    try:
        peer = server.open()
        await peer.until(lambda: peer.frames)
        await peer.send(make_start(1, max_tokens=1000))
        await peer.until(lambda: peer.deltas)
        engines[0].crash()
        assert (await peer.over(1)).outputs[0].finish_reason == result_pb2.FINISH_REASON_ERROR
        await peer.until_over()
        assert peer.broken is not None
        assert peer.broken.error is not None
        assert peer.broken.error.reason == "ENGINE_RESTARTED"
        again = server.open()
        await again.until(lambda: again.frames)
        assert again.frames[0].epoch != peer.frames[0].epoch
        assert len({frame.epoch for frame in peer.frames}) == 1
        await again.send(make_start(1))
        await again.over(1)
        await stopped(again)
    finally:
        await server.close()


async def test_frame_streams_are_bounded() -> None:
    async with instance() as server:
        limit, servicer_module.FRAME_STREAMS_MAX = servicer_module.FRAME_STREAMS_MAX, 2
        try:
            peers = [server.open(), server.open()]
            for peer in peers:
                await peer.until(lambda p=peer: p.frames)  # type: ignore[misc]
            third = server.open()
            await third.until_over()
            assert third.broken is not None
            assert third.broken.error is not None
            assert third.broken.error.code is Code.RESOURCE_EXHAUSTED
            await stopped(*peers, third)
        finally:
            servicer_module.FRAME_STREAMS_MAX = limit


# The plain calls.


async def messages(server: InstanceServer, request: inference_pb2.GenerateRequest) -> list[str]:
    kinds = []
    sequence = 0
    async for message in server.stub.Generate(request):
        sequence += 1
        assert message.sequence == sequence
        kinds.append(str(message.WhichOneof("event")))
    return kinds


async def test_plain_generate_is_accepted_then_deltas_then_ended() -> None:
    async with instance() as server:
        assert await messages(server, generate_request(max_tokens=3)) == [
            "accepted",
            "delta",
            "delta",
            "delta",
            "ended",
        ]


async def test_plain_generate_that_is_cancelled_aborts_the_engine_at_once() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance(engine=engine) as server:
        call = server.stub.Generate(generate_request(max_tokens=10_000))
        async for message in call:
            if message.sequence == 4:
                break
        call.cancel()
        assert await until(lambda: engine.aborted) < CANCEL_S
        engine.render = asyncio.Event()
        call = server.stub.Generate(generate_request())
        await until(lambda: engine.rendering)
        call.cancel()
        assert await until(lambda: not engine.rendering) < CANCEL_S
        engine.render = None
        assert len(await messages(server, generate_request(max_tokens=1))) == 3


async def test_plain_generate_ends_at_its_deadline_with_the_reason() -> None:
    engine = FakeEngine(step_s=0.01)
    async with instance(engine=engine) as server:
        call = server.stub.Generate(generate_request(max_tokens=10_000), timeout=0.3)
        ends = []
        # The caller's own timer may be the first.
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                ends += [output.finish_reason for output in message.ended.outputs]
        assert ends in ([], [result_pb2.FINISH_REASON_DEADLINE])
        await until(lambda: not engine.running)
        assert engine.aborted[0][1] in (FinishReason.DEADLINE, FinishReason.CANCELLED)


async def test_plain_calls_hold_a_small_share_of_the_room() -> None:
    engine = FakeEngine(sequences_max=8, step_s=0.01)
    async with instance(engine=engine) as server:
        peer = server.open()
        await peer.until(lambda: peer.credit and peer.credit.sequences == 8)
        call = server.stub.Generate(generate_request(max_tokens=10_000))
        await until(lambda: len(engine.running) == 1)
        await peer.until(lambda: peer.credit and peer.credit.sequences == 7)
        second = await error_of(server.stub.Generate(generate_request("r2")))
        assert (second.code, second.reason) == (Code.RESOURCE_EXHAUSTED, "NO_ROOM")
        assert second.retry_after_s is not None
        call.cancel()
        await peer.until(lambda: peer.credit and peer.credit.sequences == 8)
        await peer.send(*(make_start(slot, max_tokens=10_000) for slot in range(8)))
        await until(lambda: len(engine.running) == 8)
        full = await error_of(server.stub.Generate(generate_request("r3")))
        assert full.reason == "NO_ROOM"
        await stopped(peer)


async def test_wrong_work_is_a_typed_status_and_the_engine_survives() -> None:
    async with instance() as server:
        nan = generate_request()
        nan.work.sampling.top_p = float("nan")
        long = generate_request(text="x" * 5000)
        other = generate_request()
        other.work.model = "other"
        for request, code, field in (
            (nan, Code.INVALID_ARGUMENT, "sampling.top_p"),
            (long, Code.INVALID_ARGUMENT, "input"),
            (other, Code.NOT_FOUND, ""),
            (inference_pb2.GenerateRequest(), Code.INVALID_ARGUMENT, "request_id"),
        ):
            error = await error_of(server.stub.Generate(request))
            assert error.code is code
            assert [violation.field for violation in error.fields] == ([field] if field else [])
        assert len(await messages(server, generate_request())) == 6


async def test_embeddings_come_in_order_and_need_a_model_that_embeds() -> None:
    request = inference_pb2.EmbedRequest(request_id="e")
    for text in ("a", "abc"):
        request.inputs.add(text=text)
    async with instance() as server:
        response = await server.stub.Embed(request)
        assert [e.values[0] for e in response.embeddings] == [1.0, 3.0]
        assert response.usage.prompt_tokens == 4
        assert response.simulated
    async with instance(engine=FakeEngine(embeds=False)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Embed(request)
        assert from_rpc_error(caught.value).reason == "CANNOT_EMBED"


async def test_while_the_model_loads_the_server_says_so() -> None:
    class Slow(FakeEngine):
        async def start(self) -> None:
            await asyncio.sleep(0.3)
            await super().start()

    server = await start_instance(engine=Slow(), wait=False)
    try:
        reports = server.stub.WatchLoad(inference_pb2.WatchLoadRequest())
        served = []
        async for report in reports:
            served.append(report.serving)
            if report.serving:
                break
            error = await error_of(server.stub.Generate(generate_request()))
            assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_NOT_SERVING")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.stub.GetModel(inference_pb2.GetModelRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served[0] is False
        assert served[-1] is True
        model = await server.stub.GetModel(inference_pb2.GetModelRequest())
        assert (model.instance, model.model, model.epoch) == ("i0", "fake", server.host.epoch)
    finally:
        await server.close()
