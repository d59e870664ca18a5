"""What a watch of a run holds in a scheduler: the event that it writes, once, and no more.

Goal: watchers that do not read cost what the counted room allows. Oracle: the messages that are
alive in the process while the garbage collector is off; the state service here sends bytes.

Seen to fail on the mutants watch_holds_what_it_told and watch_by_the_librarys_iterator.
"""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from scheduler_svc.adapters.run_watch import WINDOW_BYTES, RunWatches
from sluice.channels import ChannelLimits, open_channel
from sluice.scheduler.v1 import runs_pb2
from sluice.state.v1 import runs_pb2 as stored_pb2
from tests.contract.scheduler_rig import until

EVENT_BYTES = 200_000
EVENTS = 2  # the room is a tenant's for one of them at a time
KINDS = (stored_pb2.WatchRunResponse, runs_pb2.WatchRunResponse)


def entries() -> list[bytes]:
    told = runs_pb2.RunEvent(
        tool_call_ended=runs_pb2.ToolCallEnded(result_json="x" * EVENT_BYTES)
    ).SerializeToString()
    return [
        stored_pb2.WatchRunResponse(
            entry=stored_pb2.RunEntry(sequence=1 + n, event=told)
        ).SerializeToString()
        for n in range(EVENTS)
    ]


class _State:
    """Sends a run's events from where it is asked to, and then nothing."""

    def __init__(self) -> None:
        self.sent = entries()
        self.calls = 0

    async def watch(self, request: bytes, _: Any) -> AsyncIterator[bytes]:
        self.calls += 1
        first = stored_pb2.WatchRunRequest.FromString(request).from_sequence
        for one in self.sent[first - 1 :]:
            yield one
        await asyncio.Event().wait()


@asynccontextmanager
async def watches(state: _State) -> AsyncIterator[RunWatches]:
    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(state.watch)
    name = stored_pb2.DESCRIPTOR.services_by_name["RunService"].full_name
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"WatchRun": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    limits = ChannelLimits(stream_window_bytes=WINDOW_BYTES)
    made = RunWatches(
        open_channel(f"127.0.0.1:{port}", limits=limits),
        write_limit_s=30.0,
        watches_max=64,
        bytes_max=1 << 20,
    )
    try:
        yield made
    finally:
        await made.disconnect()
        await server.stop(None)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> int:
    """Large messages in the process."""
    return sum(
        1 for one in gc.get_objects() if type(one) in KINDS and one.ByteSize() >= EVENT_BYTES
    )


@pytest.mark.usefixtures("uncollected")
async def test_a_watch_holds_nothing_of_what_it_has_told() -> None:
    """Mutant watch_holds_what_it_told."""
    told: list[int] = []

    async def write(message: runs_pb2.WatchRunResponse) -> None:
        told.append(message.event.sequence)

    async with watches(_State()) as made:
        watch = asyncio.create_task(
            made.forward("a", str(uuid.uuid4()), 1, runs_pb2.WatchRunResponse, write)
        )
        await until(lambda: len(told) == EVENTS, "all was told")
        await until(lambda: not made.held("a"), "all was written")
        await until(lambda: alive() == 0, "what was told is let go")
        watch.cancel()
        await asyncio.wait([watch])


@pytest.mark.usefixtures("uncollected")
async def test_watches_that_wait_for_room_hold_no_event() -> None:
    """Mutant watch_by_the_librarys_iterator: each that was let go keeps its message, also later."""
    may_end, waits = asyncio.Event(), asyncio.Event()
    written = 0

    async def write(message: runs_pb2.WatchRunResponse) -> None:
        nonlocal written
        if message.event.sequence == EVENTS:
            waits.set()
            await may_end.wait()  # a client that took the first and does not read on
        written += 1

    state = _State()
    async with watches(state) as made:
        run_id = str(uuid.uuid4())
        tasks = [
            asyncio.create_task(made.forward("a", run_id, 1, runs_pb2.WatchRunResponse, write))
            for _ in range(8)
        ]
        await until(lambda: state.calls >= 8, "all have asked")
        await until(waits.is_set, "one of them has room")
        await asyncio.sleep(0.3)
        assert alive() == 1
        may_end.set()
        await until(lambda: written == 8 * EVENTS, "all is told in the end")
        await until(lambda: not made.held("a"), "all was written")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: alive() == 0, "what was told is let go")
