"""Both hops with the simulated engine: what arrives is what the engine made."""

from __future__ import annotations

import asyncio

from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.faults import Fault
from inference_svc.adapters.simulated.profile import SimulatedProfile
from sluice.common.v1 import result_pb2
from sluice.inference.v1 import inference_pb2
from tests.frame_peer import make_start
from tests.hermetic.frames_harness import InstanceServer, execution, instance, part

TOKENS = 60


def engine() -> SimulatedEngine:
    return SimulatedEngine(
        SimulatedProfile.from_table("sim", {"decode_step_ms": 2.0, "sequences_max": 64})
    )


async def directly(server: InstanceServer, prompt: str) -> tuple[str, list[int]]:
    """The answer of the plain call."""
    request = inference_pb2.GenerateRequest()
    request.work.request_id = "direct"
    request.work.input.text = prompt
    request.work.sampling.max_tokens = TOKENS
    request.work.sampling.temperature = 0.0
    request.work.sampling.ignore_eos = True
    text = ""
    ids: list[int] = []
    async for message in server.stub.Generate(request):
        text += message.delta.text
        ids += message.delta.token_ids
    return text, ids


async def test_forty_answers_in_shared_frames_equal_those_of_single_calls() -> None:
    """Goal: nothing is lost, repeated or mixed up between slots. Method: the engine's next token
    depends on all before it, so one wrong token changes the rest; 40 prompts in one stream, the
    same one by one. Oracle: equality of text, ids and positions."""
    prompts = [f"prompt number {number} ✓" for number in range(40)]
    async with instance("a", engine()) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address))
        await scheduler.until(lambda: scheduler.of and scheduler.peer("a").credit)
        starts = [
            make_start(slot, slot + 7, text=prompt, max_tokens=TOKENS)
            for slot, prompt in enumerate(prompts)
        ]
        for start in starts:
            start.work.sampling.temperature = 0.0
            start.work.sampling.ignore_eos = True
        await scheduler.send(part("a", a.address, *starts))
        peer = scheduler.peer("a")
        for slot, prompt in enumerate(prompts):
            ended = await peer.over(slot, slot + 7)
            assert ended.usage.completion_tokens == TOKENS
            mine = [delta for delta in peer.deltas if delta.slot == slot]
            ids = [token for delta in mine for token in delta.token_ids]
            position = 0
            for delta in mine:
                assert delta.position == position
                position += len(delta.token_ids)
            if slot % 8 == 0:
                assert (peer.text(slot, slot + 7), ids) == await directly(a, prompt)
        await scheduler.stop()


async def test_an_engine_that_fails_one_request_ends_it_with_a_typed_error() -> None:
    made = engine()
    made.faults.add(Fault(request_id="r1-*", fail_after=5))
    async with instance("a", made) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(
            part("a", a.address, make_start(1, max_tokens=50), make_start(2, max_tokens=20))
        )
        await scheduler.until(lambda: scheduler.of)
        failed = await scheduler.peer("a").over(1)
        assert failed.outputs[0].finish_reason == result_pb2.FINISH_REASON_ERROR
        assert failed.status.code != 0
        assert failed.usage.completion_tokens == 5
        whole = await scheduler.peer("a").over(2)
        assert whole.usage.completion_tokens in range(1, 21)
        await scheduler.stop()


async def test_an_engine_that_hangs_is_freed_by_a_cancel() -> None:
    made = engine()
    made.faults.add(Fault(request_id="r1-*", hang_after=3))
    async with instance("a", made) as a, execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("a", a.address, make_start(1, max_tokens=50)))
        await scheduler.until(lambda: scheduler.of)
        await asyncio.sleep(0.2)
        assert scheduler.peer("a").event("ended", 1) is None
        await scheduler.send(part("a", a.address, cancels=((1, 1),)))
        ended = await scheduler.peer("a").over(1)
        assert ended.outputs[0].finish_reason == result_pb2.FINISH_REASON_CANCELLED
        assert made.stats().running == 0
        await scheduler.stop()
