"""The contract of the frame transport, for the gRPC adapter and its in-memory twin alike.

Goal: order, half-close, cancel, loss with the right kind, silence, heartbeat and backpressure mean
the same on both. Method: each scenario runs on every transport of ``frame_transports``; memory in
virtual time, gRPC on loopback. Oracle: the port's docstrings in ``sluice/frames.py``. No seed: no
randomness. Each test names the mutant of the runtime on which it was seen to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import pairwise
from typing import cast

import pytest

from sluice.clock import VirtualTimeLoop, run_virtual
from sluice.errors import Code, SluiceError, invalid, unavailable
from sluice.frames import FrameBroken, FrameWriter, LossKind, read_frames
from sluice.frames_memory import MemoryConnection, memory_pair
from tests.contract.frame_transports import TRANSPORTS, End, Transport


@pytest.fixture(params=TRANSPORTS, ids=lambda transport: transport.name)
def transport(request: pytest.FixtureRequest) -> Transport:
    return cast("Transport", request.param)


async def _broken(call: Awaitable[object]) -> FrameBroken:
    with pytest.raises(FrameBroken) as caught:
        await call
    return caught.value


async def _read_all(end: End) -> list[bytes]:
    frames = []
    while (frame := await end.read()) is not None:
        frames.append(frame)
    return frames


async def _read_watched(end: End, silence_limit_s: float, into: list[bytes]) -> None:
    async for frame in read_frames(end, silence_limit_s=silence_limit_s):
        into.append(frame)  # noqa: PERF401 - what came before a loss counts


def test_frames_arrive_whole_and_in_order_both_ways(transport: Transport) -> None:
    """Mutant: ``Way.pop`` takes from the right; the adapter's ``read`` drops its first frame."""

    async def scenario() -> None:
        async with transport.open() as pair:
            frames = [bytes([n]) * (1 + n * 700) for n in range(100)]

            async def send(end: End) -> None:
                for frame in frames:
                    await end.write(frame)
                await end.half_close()

            async with asyncio.TaskGroup() as group:
                to_server = group.create_task(_read_all(pair.server))
                to_client = group.create_task(_read_all(pair.client))
                group.create_task(send(pair.client))
                await to_server
                group.create_task(send(pair.server))
            assert to_server.result() == frames
            assert to_client.result() == frames

    transport.run(scenario())


def test_a_half_close_arrives_after_all_frames_and_leaves_the_other_way_open(
    transport: Transport,
) -> None:
    """Mutant: ``half_close`` also cancels."""

    async def scenario() -> None:
        async with transport.open() as pair:
            await pair.client.write(b"last")
            await pair.client.half_close()
            await pair.client.half_close()
            assert await _read_all(pair.server) == [b"last"]
            assert await pair.server.read() is None
            await pair.server.write(b"still")
            assert await pair.client.read() == b"still"
            await pair.server.half_close()
            assert await pair.client.read() is None
            assert await pair.client.read() is None

    transport.run(scenario())


def test_writing_after_a_half_close_is_a_fault_of_the_caller(transport: Transport) -> None:
    """Mutant: the assertion is taken out."""

    async def scenario() -> None:
        async with transport.open() as pair:
            await pair.client.half_close()
            with pytest.raises(AssertionError):
                await pair.client.write(b"late")

    transport.run(scenario())


def test_a_client_that_cancels_is_a_loss_to_the_server_and_closed_to_itself(
    transport: Transport,
) -> None:
    """Mutant: the server adapter takes the end of the stream for a half-close (no settle)."""

    async def scenario() -> None:
        async with transport.open() as pair:
            await pair.client.write(b"1")
            assert await pair.server.read() == b"1"
            waiting = asyncio.create_task(_broken(pair.client.read()))
            serving = asyncio.create_task(_broken(pair.server.read()))
            await asyncio.sleep(transport.step_s)
            pair.client.cancel()
            pair.client.cancel()
            assert (await waiting).kind is LossKind.CLOSED
            assert (await serving).kind is LossKind.DISCONNECTED
            assert (await _broken(pair.client.read())).kind is LossKind.CLOSED
            assert (await _broken(pair.client.write(b"2"))).kind is LossKind.CLOSED
            assert (await _broken(pair.server.read())).kind is LossKind.DISCONNECTED

    transport.run(scenario())


def test_a_server_that_cancels_is_a_loss_to_the_client(transport: Transport) -> None:
    """Mutant: the error interceptor does not tell the client (it would wait for ever)."""

    async def scenario() -> None:
        async with transport.open() as pair:
            await pair.server.write(b"1")
            assert await pair.client.read() == b"1"
            pair.server.cancel()
            assert (await _broken(pair.client.read())).kind is LossKind.DISCONNECTED
            assert (await _broken(pair.client.write(b"2"))).kind is LossKind.DISCONNECTED
            assert (await _broken(pair.server.read())).kind is LossKind.CLOSED

    transport.run(scenario())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (unavailable("DRAINING", "Draining."), LossKind.DISCONNECTED),
        (invalid("sequence", "has a gap"), LossKind.PROTOCOL),
        (SluiceError(Code.PERMISSION_DENIED, "NO", "No."), LossKind.PROTOCOL),
        (SluiceError(Code.INTERNAL, "INTERNAL", "Fault."), LossKind.DISCONNECTED),
    ],
    ids=lambda value: value.reason if isinstance(value, SluiceError) else value.name,
)
def test_a_peers_error_ends_the_stream_with_its_kind_and_its_typed_reason(
    transport: Transport, error: SluiceError, kind: LossKind
) -> None:
    """Mutants: ``loss_kind`` always DISCONNECTED; the adapter drops the typed error."""

    async def scenario() -> None:
        async with transport.open() as pair:
            await pair.server.write(b"1")
            assert await pair.client.read() == b"1"
            pair.abort(error)
            broken = await _broken(pair.client.read())
            assert (broken.kind, broken.error and broken.error.reason) == (kind, error.reason)
            late = await _broken(pair.client.write(b"2"))
            assert (late.kind, late.error and late.error.reason) == (kind, error.reason)

    transport.run(scenario())


def test_a_server_that_is_not_there_is_unreachable(transport: Transport) -> None:
    """Mutant: ``loss_kind`` ignores ``connected``."""

    async def scenario() -> None:
        async with transport.unreachable() as client:
            assert (await _broken(client.read())).kind is LossKind.UNREACHABLE
            assert (await _broken(client.write(b"1"))).kind is LossKind.UNREACHABLE

    transport.run(scenario())


def test_a_severed_connection_is_a_loss_to_both(transport: Transport) -> None:
    """Mutant: the adapter never notes that the peer answered (it would say UNREACHABLE)."""

    async def scenario() -> None:
        async with transport.open() as pair:
            await pair.server.write(b"1")
            assert await pair.client.read() == b"1"
            reading = asyncio.create_task(_broken(pair.client.read()))
            await pair.sever()
            assert (await reading).kind is LossKind.DISCONNECTED
            assert (await _broken(pair.server.read())).kind is LossKind.DISCONNECTED

    transport.run(scenario())


def test_silence_beyond_the_limit_breaks_the_stream_for_both(transport: Transport) -> None:
    """Mutant: the watch never fires."""

    async def scenario() -> None:
        async with transport.open() as pair:
            loop = asyncio.get_running_loop()
            await pair.server.write(b"1")
            began = loop.time()
            got: list[bytes] = []
            broken = await _broken(_read_watched(pair.client, 4 * transport.step_s, got))
            assert broken.kind is LossKind.SILENT
            assert got == [b"1"]
            # uvloop's clock counts milliseconds.
            assert 4 * transport.step_s - 0.002 <= loop.time() - began < 40 * transport.step_s
            assert asyncio.current_task() is not None
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
            assert (await _broken(pair.server.read())).kind is LossKind.DISCONNECTED

    transport.run(scenario())


def test_a_slow_consumer_is_not_a_silent_peer(transport: Transport) -> None:
    """Mutant: silence is counted from the last frame, whoever is at work."""

    async def scenario() -> None:
        async with transport.open() as pair:
            for n in range(3):
                await pair.server.write(bytes([n]))
            await pair.server.half_close()
            got = []
            async for frame in read_frames(pair.client, silence_limit_s=2 * transport.step_s):
                await asyncio.sleep(3 * transport.step_s)
                got.append(frame)
            assert got == [b"\0", b"\1", b"\2"]

    transport.run(scenario())


def test_the_writer_beats_when_idle_and_opens_the_stream_at_once(transport: Transport) -> None:
    """Mutants: no beat; the first compose is not due; a beat is due at an eighth of its time."""

    async def scenario() -> None:
        async with transport.open() as pair:
            loop = asyncio.get_running_loop()
            beat_s = 4 * transport.step_s
            due: list[bool] = []
            sent_at: list[float] = []
            payload: list[bytes] = []

            def compose(heartbeat_due: bool) -> bytes | None:
                due.append(heartbeat_due)
                if payload or heartbeat_due:
                    sent_at.append(loop.time())
                    return payload.pop() if payload else b""
                return None

            writer = FrameWriter(pair.client, compose, heartbeat_s=beat_s)
            task = asyncio.create_task(writer.run())
            assert await pair.server.read() == b""
            assert due[0]
            assert await pair.server.read() == b""
            await asyncio.sleep(beat_s / 2)
            payload.append(b"x")
            writer.wake()
            assert await pair.server.read() == b"x"
            await asyncio.sleep(beat_s / 4)
            writer.wake()  # for nothing
            assert await pair.server.read() == b""
            gaps = [round((b - a) / beat_s, 1) for a, b in pairwise(sent_at)]
            # On sockets the machine's load adds to a gap; in virtual time nothing does.
            assert all(gap <= (1.0 if transport.name == "memory" else 4.0) for gap in gaps)
            assert gaps[0] >= 1.0
            assert gaps[-1] >= 1.0  # a frame moves the beat
            writer.close()
            await task

    transport.run(scenario())


def test_a_reader_that_stops_makes_write_wait_and_frames_grow(transport: Transport) -> None:
    """Mutants: the memory queue has no bound; the writer writes in tasks instead of waiting."""

    async def scenario() -> None:
        async with transport.open() as pair:
            item = b"x" * 65536
            gathered: list[bytes] = []
            sizes: list[int] = []

            def compose(heartbeat_due: bool) -> bytes | None:
                if not gathered:
                    return b"" if heartbeat_due else None
                frame = b"".join(gathered)[: 4 * 1024 * 1024]
                sizes.append(len(gathered))
                gathered.clear()
                return frame

            writer = FrameWriter(pair.client, compose, heartbeat_s=60.0)
            task = asyncio.create_task(writer.run())
            produced = 0
            while writer.writing_since is None or len(gathered) < 8:
                gathered.append(item)
                produced += 1
                writer.wake()
                await asyncio.sleep(transport.step_s / 100)
                assert produced < 2000, "write never waited"
            written = writer.frames_written
            await asyncio.sleep(2 * transport.step_s)
            assert writer.frames_written == written
            assert len(gathered) >= 8
            writer.close()
            total = sum(map(len, await _read_all(pair.server)))
            await task
            assert total == produced * len(item)
            assert max(sizes) >= 8

    transport.run(scenario())


def test_close_sends_what_is_left_and_half_closes(transport: Transport) -> None:
    """Mutant: ``close`` returns from ``run`` at once."""

    async def scenario() -> None:
        async with transport.open() as pair:
            left = [b"a", b"b", b"c"]
            writer = FrameWriter(pair.client, lambda _: left.pop(0) if left else None)
            writer.close()
            writer.close()
            async with asyncio.TaskGroup() as group:
                group.create_task(writer.run())
                assert await _read_all(pair.server) == [b"a", b"b", b"c"]

    transport.run(scenario())


def test_a_writer_whose_peer_is_gone_ends_with_the_loss(transport: Transport) -> None:
    """Mutant: ``run`` swallows FrameBroken."""

    async def scenario() -> None:
        async with transport.open() as pair:
            writer = FrameWriter(pair.client, lambda due: b"" if due else None, heartbeat_s=0.01)
            task = asyncio.create_task(writer.run())
            await pair.server.write(b"1")
            assert await pair.client.read() == b"1"
            pair.server.cancel()
            assert (await _broken(task)).kind is LossKind.DISCONNECTED

    transport.run(scenario())


@pytest.mark.parametrize("side", ["read", "write"])
def test_cancelling_a_task_in_a_call_breaks_the_stream_and_stays_a_cancel(
    transport: Transport, side: str
) -> None:
    """Mutants: the adapters swallow CancelledError; they leave the stream open."""

    async def scenario() -> None:
        async with transport.open() as pair:

            async def work() -> None:
                if side == "read":
                    await pair.client.read()
                while True:
                    await pair.client.write(b"x" * 262144)

            await pair.server.write(b"1")
            assert await pair.client.read() == b"1"
            task = asyncio.create_task(work())
            await asyncio.sleep(3 * transport.step_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await _broken(_read_all(pair.server))).kind is LossKind.DISCONNECTED

    transport.run(scenario())


def test_a_cancel_from_outside_wins_over_the_silence_watch() -> None:
    """Mutant: ``read_frames`` turns every CancelledError into SILENT."""

    async def scenario() -> None:
        # Both at the same instant, in either order.
        for cancel_first in (True, False):
            client: MemoryConnection[bytes, bytes]
            client, _ = memory_pair()
            task = asyncio.create_task(_read_watched(client, 3.0, []))
            if not cancel_first:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_at(asyncio.get_running_loop().time() + 3.0, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task

    run_virtual(scenario())


def test_a_loop_that_stood_still_is_not_a_silent_peer() -> None:
    """A stopped process finds its timers late and its frames unread. Mutant: no stall grace."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        client: MemoryConnection[bytes, bytes]
        server: MemoryConnection[bytes, bytes]
        client, server = memory_pair(delay_s=0.1)
        got: list[bytes] = []
        task = asyncio.create_task(_read_watched(client, 3.0, got))
        await asyncio.sleep(2.9)
        loop.stall(10.0)
        await server.write(b"was on its way")
        await server.half_close()
        await task
        assert got == [b"was on its way"]

    run_virtual(scenario())


def test_a_beat_is_never_skipped_by_rounding() -> None:
    """Method: 500 beats of odd lengths. Oracle: every gap is one interval. Mutant: ``run`` asks
    ``now - written_at >= heartbeat_s`` where the timer asks ``now >= written_at + heartbeat_s``."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        for beat_s in (0.1, 0.3, 0.7, 1.0, 1.1):
            client: MemoryConnection[bytes, bytes]
            server: MemoryConnection[bytes, bytes]
            client, server = memory_pair()
            writer = FrameWriter(client, lambda due: b"" if due else None, heartbeat_s=beat_s)
            task = asyncio.create_task(writer.run())
            at = []
            for _ in range(100):
                await server.read()
                at.append(loop.time())
            assert max(b - a for a, b in pairwise(at)) < 1.5 * beat_s
            writer.close()
            await task

    run_virtual(scenario())


def test_frames_cost_no_task_and_no_timer_each() -> None:
    """Mutant: ``read_frames`` uses asyncio.timeout per frame (timers grow by one a frame)."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        client: MemoryConnection[bytes, bytes]
        server: MemoryConnection[bytes, bytes]
        client, server = memory_pair()
        left = list(range(2000))
        writer = FrameWriter(client, lambda _: bytes([left.pop() & 255]) if left else None)
        timers = 0
        call_at = loop.call_at

        def counted(*args: object, **kwargs: object) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return call_at(*args, **kwargs)  # type: ignore[arg-type]

        loop.call_at = counted  # type: ignore[method-assign]
        most_tasks = 0
        async with asyncio.TaskGroup() as group:
            group.create_task(writer.run())
            count = 0
            async for _ in read_frames(server):
                count += 1
                most_tasks = max(most_tasks, len(asyncio.all_tasks()))
                if count == 2000:
                    writer.close()
        assert count == 2000
        assert timers <= 4
        assert most_tasks <= 2

    run_virtual(scenario())
