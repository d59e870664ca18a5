"""A client that leaves frees everything at once, wherever its request is.

Goal: a cancelled request stops its engine within 1 s (about 20 ms here), never reaches it when it
still waited, and leaves nothing behind: no room, no task, no thread, no file.
Method: a mesh whose engine runs 4 sequences and reads prompts slowly; clients over gRPC and HTTP
leave in the queue, in prefill, in the stream; then 300 leave at seeded times. Oracle: the engine's
own counts, the scheduler's status, the processes' threads and files; a scripted fault ends the
engine's process if a request that was cancelled in the queue ever runs.

Seen to fail on the mutants in tests/mutants: instance_ignores_cancels, leave_does_not_cancel,
waiting_is_not_cancelled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from sluice.channels import ending
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually, fresh_id

SEED = 20_260_301
ABORT_LIMIT_S = 1.0
SLOTS = 4
LONG = {"max_tokens": 1500}
# 2,000 tokens at 4,000 a second, 64 a step: about half a second of steps.
PROMPT = "a" * 2_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    profile = {
        "decode_step_ms": 10.0,
        "sequences_max": SLOTS,
        "step_tokens_max": 64,
        "prefill_tokens_per_s": 4_000.0,
        "prefix_cache": False,
    }
    with mesh(tmp_path_factory.mktemp("cancel"), Shape({"sim-0": profile})) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made
    running.until_idle()


async def hold(client: MeshClient, count: int) -> list[Any]:
    """Streams that run in the engine until they are cancelled."""
    calls = [client.start("busy", sampling=LONG) for _ in range(count)]
    for call in calls:
        await call.read()
        await call.read()
    return calls


def leave(client: MeshClient, how: str, prompt: str, **fields: Any) -> asyncio.Task[Any]:
    """A request whose client leaves when the task is cancelled."""

    async def stream() -> None:
        call = client.start(prompt, **fields)
        with ending(call):
            async for _ in call:
                pass

    async def http() -> None:
        body = {"prompt": prompt} | fields
        async with client.http.stream("POST", "/chat", json=body) as response:
            await response.aread()

    ways = {"stream": stream, "text": lambda: client.text(prompt, **fields), "http": http}
    return asyncio.get_running_loop().create_task(ways[how]())


async def gone(task: asyncio.Task[Any]) -> None:
    """The client leaves."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


WAYS = pytest.mark.parametrize("how", ["stream", "text", "http"])


@WAYS
async def test_one_that_waits_never_reaches_the_engine(
    client: MeshClient, running: Mesh, how: str
) -> None:
    request_id = fresh_id("queued")
    running.faults({"request_id": request_id, "exit_after": 0, "exit_code": 99})
    calls = await hold(client, SLOTS)
    task = leave(client, how, "never", request_id=request_id)
    await eventually(lambda: running.waiting() == 1, "it waits")
    await gone(task)
    await eventually(lambda: running.waiting() == 0, "it left the queue", ABORT_LIMIT_S)
    for call in calls:
        call.cancel()
    running.until_idle()
    # What comes next runs, so the queue has moved on past the place of the cancelled one.
    assert (await client.generate(sampling={"max_tokens": 2})).ok.messages
    assert running["sim-0"].alive


@WAYS
async def test_one_in_prefill_stops_the_engine(client: MeshClient, running: Mesh, how: str) -> None:
    task = leave(client, how, PROMPT, sampling={"max_tokens": 500})
    await eventually(lambda: running.in_engine() == 1, "the engine reads its prompt")
    await gone(task)
    await eventually(lambda: running.in_engine() == 0, "the engine stopped", ABORT_LIMIT_S)


@WAYS
async def test_one_that_streams_stops_the_engine(
    client: MeshClient, running: Mesh, how: str
) -> None:
    task = leave(client, how, "go", sampling=LONG)
    await eventually(lambda: running.load("sim-0").engine.running == 1, "the engine writes")
    await asyncio.sleep(0.1)
    await gone(task)
    await eventually(lambda: running.in_engine() == 0, "the engine stopped", ABORT_LIMIT_S)


async def test_one_whose_connection_breaks_stops_the_engine(running: Mesh) -> None:
    async with client_of(running) as other:
        await hold(other, 2)
        assert running.in_engine() == 2
    await eventually(lambda: running.in_engine() == 0, "the engine stopped", ABORT_LIMIT_S)


async def test_room_is_free_again_after_every_cancel(client: MeshClient, running: Mesh) -> None:
    """A slot that was lost with each cancel would soon let nothing through."""
    for _ in range(12):
        for call in await hold(client, SLOTS):
            call.cancel()
        answers = [client.generate(sampling={"max_tokens": 2}, timeout=10) for _ in range(SLOTS)]
        for answer in await asyncio.gather(*answers):
            assert answer.ok.messages


def held(running: Mesh) -> dict[str, tuple[int, int]]:
    """Threads and open files of each service."""
    found = {}
    for name, process in running.processes.items():
        if name != "envoy":
            seen = psutil.Process(process.pid)
            found[name] = (seen.num_threads(), seen.num_fds())
    return found


@pytest.mark.timeout(120)
async def test_300_that_leave_at_any_time_leave_nothing(running: Mesh) -> None:
    """With seed 20260301: a third of the clients waits, a third reads, a third streams when
    they leave, and some have had their last token."""
    dice = random.Random(SEED)
    async with client_of(running) as client:
        await asyncio.gather(*(client.text(sampling={"max_tokens": 2}) for _ in range(8)))
        running.until_idle()
        before, free = held(running), running.load("sim-0").engine.kv_tokens_free

        async def one() -> str:
            how = dice.choice(("stream", "text", "http"))
            size, tokens = dice.choice((4, 40, 400)), dice.choice((1, 5, 60, 400))
            task = leave(client, how, "a" * size, sampling={"max_tokens": tokens})
            await asyncio.sleep(dice.random() ** 2 * 0.4)
            ended = task.done()
            await gone(task)
            return "ended" if ended else "left"

        async def lane(count: int) -> list[str]:
            return [await one() for _ in range(count)]

        results = await asyncio.gather(*(lane(15) for _ in range(20)))
        kinds = [kind for lane_results in results for kind in lane_results]
        assert len(kinds) == 300
        assert kinds.count("left") > 150
        # Each stops as soon as it is seen: what is left then is the time of the last one.
        await eventually(lambda: not running.leftovers(), "all is free", 2.0)
        assert running.load("sim-0").engine.kv_tokens_free == free
        assert (await client.generate(sampling={"max_tokens": 2})).ok.messages
    await eventually(
        lambda: all(
            threads <= before[name][0] + 2 and files <= before[name][1] + 4
            for name, (threads, files) in held(running).items()
        ),
        f"threads and files are as before: {before}",
    )


async def test_a_cancelled_call_says_cancelled_to_its_client(client: MeshClient) -> None:
    (call,) = await hold(client, 1)
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED
