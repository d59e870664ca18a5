"""Work that gives its place away in a running mesh: to urgent work, and where an instance stops.

Goal: the client of the one that moves sees a pause and nothing else; urgent work does not wait for
batch work to end; an instance that is told to stop does not wait for long streams.
Method: two instances of one sequence each, real processes, SIGTERM. Oracle: the answer without a
fault, which is a function of the whole token prefix.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import Answer, MeshClient, client_of, collect, eventually

TOKENS = 500
LONG = {"temperature": 0.0, "max_tokens": TOKENS}
STEP_MS = 12.0
WHOLE_S = TOKENS * STEP_MS / 1e3
INSTANCES = ("sim-0", "sim-1")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    profile = {"decode_step_ms": STEP_MS, "sequences_max": 1}
    shape = Shape(dict.fromkeys(INSTANCES, profile), scheduler={"drain_run_max_s": 0.3})
    with mesh(tmp_path_factory.mktemp("moves"), shape) as made:
        yield made


@pytest.fixture(scope="module")
def known() -> list[Answer]:
    """Holds the answer without a fault, once a test has asked for it."""
    return []


@pytest_asyncio.fixture
async def want(client: MeshClient, known: list[Answer]) -> Answer:
    if not known:
        known.append((await client.generate("move", return_token_ids=True, sampling=LONG)).ok)
    return known[0]


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made
    running.recover()


async def begun(client: MeshClient, cls: str) -> tuple[asyncio.Task[Answer], Answer]:
    """Starts a long request and returns once some of its output is there."""
    answer = Answer()
    call = client.start("move", return_token_ids=True, sampling=LONG, priority_class=cls)
    task = asyncio.create_task(collect(call, answer))
    await eventually(lambda: bool(answer.deltas) or task.done(), "its output begins")
    return task, answer


def is_whole(answer: Answer, want: Answer) -> bool:
    """Whether it is the answer without a fault, in one piece."""
    kinds = [message.WhichOneof("event") for message in answer.messages]
    positions = [delta.position for delta in answer.deltas]
    return (
        answer.tokens() == want.tokens()
        and answer.text() == want.text()
        and answer.finished.usage.completion_tokens == TOKENS
        and kinds.count("started") == kinds.count("finished") == 1
        and positions == sorted(set(positions))
    )


async def test_urgent_work_does_not_wait_for_batch_work_which_loses_nothing(
    client: MeshClient, want: Answer
) -> None:
    """Every place is taken by batch work; it ends as if nothing had happened, but later."""
    loop = asyncio.get_running_loop()
    batch = [await begun(client, "PRIORITY_CLASS_BATCH") for _ in INSTANCES]
    await asyncio.sleep(1.2)  # who has just begun is left alone for a second
    began = loop.time()
    urgent = await client.generate(
        "now", sampling={"max_tokens": 5}, priority_class="PRIORITY_CLASS_CRITICAL"
    )
    assert urgent.ok.finished.attempts == 1
    assert loop.time() - began < WHOLE_S / 2
    assert not any(task.done() for task, _ in batch)
    attempts = []
    for task, _ in batch:
        answer = (await task).ok
        assert is_whole(answer, want)
        attempts.append(answer.finished.attempts)
    assert sorted(attempts) == [1, 2], "one place was needed, so one moved"


@pytest.mark.timeout(60)
async def test_an_instance_that_is_told_to_stop_hands_its_long_streams_over(
    client: MeshClient, running: Mesh, want: Answer
) -> None:
    loop = asyncio.get_running_loop()
    task, answer = await begun(client, "PRIORITY_CLASS_STANDARD")
    instance = answer.started.instance
    began = loop.time()
    running[instance].send(signal.SIGTERM)
    await eventually(lambda: not running[instance].alive, "its process ends", 20.0)
    took_s = loop.time() - began
    moved = (await task).ok
    assert is_whole(moved, want)
    assert moved.finished.instance != instance
    assert moved.finished.attempts == 2
    assert loop.time() - began > WHOLE_S / 2, "or it had ended before"
    assert took_s < WHOLE_S * 0.8, "it did not wait for the stream's end"
