"""A process that is told to end ends nobody's stream, and a rolling restart is not noticed.

Goal: at SIGTERM health flips first, open streams all complete, the process ends with 0; each
process of a mesh with two of each can be restarted, one after the other, under load, without one
error at a client. Method: two schedulers, two executions, two instances behind Envoy. 50 streams of
2 s, then SIGTERM to one process of a kind; then closed-loop clients, half of them streaming,
through restarts of all six. Oracle: every answer is complete and has the tokens that were asked
for, and the text that it has without a restart; exit statuses; the processes' own health. Seed:
20260302 for the lengths of the load's requests.

Seen to fail on the mutants in tests/mutants: drain_does_not_wait, health_does_not_flip,
no_probe_lag.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from sluice.errors import Code, SluiceError
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import Answer, MeshClient, client_of, collect, eventually

SEED = 20_260_302
STREAMS = 50
CLIENTS = 12
DRAIN_LIMIT_S = 20.0
BACK_LIMIT_S = 30.0
TWO_SECONDS = {"temperature": 0.0, "max_tokens": 200}
REPLICATED = ("scheduler-0", "execution-0", "sim-0", "scheduler-1", "execution-1", "sim-1")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(
        {name: {"decode_step_ms": 10.0} for name in ("sim-0", "sim-1")},
        schedulers=2,
        executions=2,
    )
    with mesh(tmp_path_factory.mktemp("drain"), shape) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made
    running.recover()


async def streams(client: MeshClient, count: int) -> list[asyncio.Task[Answer]]:
    """Streams that have all begun."""
    calls = [client.start(str(number), sampling=TWO_SECONDS) for number in range(count)]
    answers = [Answer() for _ in calls]
    pairs = zip(calls, answers, strict=True)
    tasks = [asyncio.create_task(collect(call, answer)) for call, answer in pairs]
    await eventually(
        lambda: all(len(answer.messages) > 1 or answer.error for answer in answers), "all stream"
    )
    return tasks


@pytest.mark.parametrize("name", ["scheduler-0", "execution-0", "sim-0"])
async def test_streams_in_flight_complete_when_their_process_is_told_to_end(
    client: MeshClient, running: Mesh, name: str
) -> None:
    want = (await client.generate("7", sampling=TWO_SECONDS)).ok.text()
    tasks = await streams(client, STREAMS)
    process = running[name]
    process.send(signal.SIGTERM)
    await eventually(lambda: not running.serving(name), "health flips", 2.0)
    assert process.alive
    assert not any(task.done() for task in tasks), "health flipped after streams had ended"
    answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert answer.ok.finished.usage.completion_tokens == 200
        assert answer.finished.attempts == 1
    assert answers[7].text() == want
    assert await asyncio.to_thread(process.ended, DRAIN_LIMIT_S) == 0


async def test_a_draining_scheduler_refuses_what_still_reaches_it(
    client: MeshClient, running: Mesh
) -> None:
    """Straight to it; the edge sends it nothing any more."""
    async with client_of(running, running["scheduler-0"].address) as direct:
        open_one = asyncio.create_task(direct.generate(sampling=TWO_SECONDS))
        await eventually(lambda: running.status("scheduler-0").open_streams == 1, "it is open")
        running["scheduler-0"].send(signal.SIGTERM)
        await eventually(lambda: running.status("scheduler-0").draining, "it drains")
        error = (await direct.generate()).refused
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert error.retry_after_s
        # At the edge nobody notices.
        for _ in range(6):
            assert (await client.generate(sampling={"max_tokens": 2})).ok.messages
        assert (await open_one).ok.messages
    assert await asyncio.to_thread(running["scheduler-0"].ended, DRAIN_LIMIT_S) == 0


async def test_an_end_that_is_not_orderly_is_bounded(client: MeshClient, running: Mesh) -> None:
    """A second signal ends a process that drains at once."""
    tasks = await streams(client, 4)
    process = running["scheduler-1"]
    process.send(signal.SIGTERM)
    await eventually(lambda: not running.serving("scheduler-1"), "health flips", 2.0)
    process.send(signal.SIGTERM)
    await asyncio.to_thread(process.ended, 2.0)
    for task in tasks:
        answer = await task
        assert answer.error is None or answer.error.code in (Code.UNAVAILABLE, Code.INTERNAL)


async def load(client: MeshClient, number: int, stop: asyncio.Event, errors: list[Any]) -> int:
    """One client's requests, one after the other, until it is told to stop; how many."""
    dice = random.Random(SEED + number)
    count = 0
    while not stop.is_set():
        count += 1
        # Short ones that come often, and some long ones over which every drain has to wait.
        tokens = dice.choice((1, 2, 4, 4, 8, 80))
        fields: dict[str, Any] = {"sampling": {"max_tokens": tokens}, "model": "sim"}
        try:
            if dice.random() < 0.5:
                usage = (await client.generate(timeout=20, **fields)).ok.finished.usage
            else:
                usage = (await client.text(timeout=20, **fields)).usage
            assert usage.completion_tokens == tokens
        except (AssertionError, SluiceError) as error:
            errors.append((round(time.monotonic(), 2), error))
    return count


@pytest.mark.timeout(240)
async def test_a_rolling_restart_of_everything_is_not_noticed(
    client: MeshClient, running: Mesh
) -> None:
    stop = asyncio.Event()
    errors: list[Any] = []
    restarts: list[tuple[str, float]] = []
    tasks = [asyncio.create_task(load(client, number, stop, errors)) for number in range(CLIENTS)]
    for name in REPLICATED:
        process = running[name]
        restarts.append((name, round(time.monotonic(), 2)))
        process.send(signal.SIGTERM)
        assert await asyncio.to_thread(process.ended, DRAIN_LIMIT_S) == 0
        process.start()
        await eventually(partial(running.serving, name), "it serves", BACK_LIMIT_S)
        # As an orchestrator does: the next one only when this one is in use again.
        await eventually(
            lambda: (
                running.edge_members() == 2
                and all(running.reachable(one) for one in running.schedulers)
            ),
            "it is in use",
            BACK_LIMIT_S,
        )
    await asyncio.sleep(0.5)
    stop.set()
    counts = await asyncio.gather(*tasks)
    assert not errors, (restarts, errors, running.logs())
    assert min(counts) > 10
