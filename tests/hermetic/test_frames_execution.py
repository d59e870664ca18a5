"""``ExecuteFrames`` through real gRPC servers on loopback: between a scheduler by hand and
instances with fake engines."""

from __future__ import annotations

from sluice.execution.v1 import execution_pb2
from tests.frame_peer import make_start
from tests.hermetic.frames_harness import execution, instance, part


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


async def test_an_instance_that_is_not_there_is_lost_as_unreachable() -> None:
    async with execution() as relay:
        scheduler = relay.open()
        await scheduler.send(part("gone", "127.0.0.1:1", make_start(0, 1)))
        await scheduler.until(lambda: scheduler.lost)
        assert scheduler.lost == [("gone", execution_pb2.LOSS_REASON_UNREACHABLE)]
        await scheduler.stop()
