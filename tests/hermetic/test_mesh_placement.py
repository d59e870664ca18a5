"""Where requests go: more to the faster instance, to none beyond its room, and for as long as it
takes.

Goal: least expected work sends a faster instance its larger share; an engine is never given more
than it can run at once, also by two schedulers that know nothing of each other, so that it never
holds a queue of its own; a long stream is cut by no timeout that somebody forgot.
Method: two schedulers, two instances of which one is four times as fast, sequences limited to 4;
the engines' own counts sampled while requests outnumber the room. Oracle: who answered; running
and waiting as each engine reports them.

Seen to fail on the mutants in tests/mutants: credit_not_divided, route_timeout, work_not_weighed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sluice.common.v1 import policy_pb2
from sluice.errors import Code
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually, sim

INTERACTIVE = policy_pb2.PRIORITY_CLASS_INTERACTIVE
ROOM = 4
LONG_S = 17.0  # longer than the 15 s that proxies cut a route at by default


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(
        instances={
            "quick": {"sequences_max": ROOM, "decode_step_ms": 5.0},
            "slow": {"sequences_max": ROOM, "decode_step_ms": 20.0},
        },
        schedulers=2,
        envoy={"silence_limit_s": 3.0},
    )
    with mesh(tmp_path_factory.mktemp("placement"), shape) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made
    running.until_idle()


async def test_no_engine_is_given_more_than_its_room(client: MeshClient, running: Mesh) -> None:
    """40 requests at once, by way of two schedulers, where 8 have room."""
    seen: list[tuple[int, int]] = []
    stop = asyncio.Event()

    async def watch() -> None:
        while not stop.is_set():
            for name in running.shape.instances:
                load = (await asyncio.to_thread(running.load, name)).engine
                seen.append((load.running, load.waiting))

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(
        *(client.generate(str(number), sampling={"max_tokens": 40}) for number in range(40))
    )
    stop.set()
    await watching
    assert all(answer.ok.finished.usage.completion_tokens == 40 for answer in answers)
    assert len(seen) > 20
    # What waits in an engine waits for its next step; it has room for all that it holds.
    assert max(sum(both) for both in seen) == ROOM, "the room was used, and no more"


async def test_a_faster_instance_gets_the_larger_share(client: MeshClient, running: Mesh) -> None:
    """Six clients, one request after the other: fewer than there is room, so that who is busy does
    not decide."""
    await asyncio.gather(*(client.text(sampling={"max_tokens": 60}) for _ in range(8)))
    await asyncio.sleep(0.6)  # two reports: how fast the instances are is known
    where: Counter[str] = Counter()

    async def one() -> None:
        for _ in range(12):
            where[(await client.text(sampling={"max_tokens": 12})).instance] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(one())
    assert where.total() == 72
    assert where["quick"] > 2 * where["slow"], where


async def test_a_long_steady_stream_is_cut_by_nobody(client: MeshClient) -> None:
    """A token every half second: more often than the edge's limit on silence, 3 s here, and for
    longer than the 15 s of a default route timeout."""
    prompt = sim("", pace_ms=500.0)
    begin = time.monotonic()
    answer = await client.generate(prompt, sampling={"max_tokens": 35}, timeout=60.0)
    assert answer.ok.finished.usage.completion_tokens == 35
    assert time.monotonic() - begin > LONG_S


async def test_a_stream_that_falls_silent_ends_with_an_error(client: MeshClient) -> None:
    answer = await client.generate(sim("", hang_after=2), sampling={"max_tokens": 9}, timeout=20.0)
    assert answer.error is not None
    assert answer.error.code is not Code.OK
    assert answer.times[-1] - answer.times[0] < 5.0


async def test_streams_beyond_what_can_be_written_are_refused(tmp_path: Path) -> None:
    """A write is declared to cost 10 ms, so that three interactive streams fill the process."""
    with mesh(tmp_path, Shape(scheduler={"write_cost_us": 10_000.0})) as running:
        async with client_of(running) as client:
            fields: dict[str, Any] = {
                "priority_class": INTERACTIVE,
                "sampling": {"max_tokens": 5_000},
            }
            calls = [client.start(**fields) for _ in range(3)]
            for call in calls:
                await call.read()
            error = (await client.generate(**fields)).refused
            assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
            assert error.retry_after_s
            body = {"prompt": "x", "priority_class": "PRIORITY_CLASS_INTERACTIVE"}
            response = await client.http.post("/chat", json=body)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            calls.pop().cancel()
            await eventually(lambda: running.status().open_streams == 2, "a place is free")
            answer = await client.generate(priority_class=INTERACTIVE, sampling={"max_tokens": 2})
            assert answer.ok.messages
            for call in calls:
                call.cancel()
            running.until_idle()
