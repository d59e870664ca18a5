"""Breakers, retries and poison through a whole mesh.

Goal: an instance that fails takes nothing until it has proven itself; errors of clients count as
neither fault nor success; with everything down there is no storm of attempts, and one layer alone
makes them; an input that kills engines is stopped after at most three, and nobody else notices;
instances that come, go and drain under load cost no request.
Method: three instances of the simulated engine, which fails as its file of faults says. Oracle: the
breaker in the scheduler's status, the instance of each answer, attempts in answers and errors, the
epochs of the engines, the edge's counter of retries.

Seen to fail on the mutants in tests/mutants: breaker_never_opens, breaker_never_closes,
client_errors_are_faults, poison_is_not_refused.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from sluice.errors import Code
from sluice.scheduler.v1 import generate_pb2
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import Answer, MeshClient, client_of, eventually, fresh_id, sim

COOLDOWN_S = 2.0
INSTANCES = ("sim-0", "sim-1", "sim-2")
SHORT = {"max_tokens": 2}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    scheduler = {
        "breaker_faults": 3,
        "breaker_volume": 1000,
        "breaker_cooldown_s": COOLDOWN_S,
        "breaker_cooldown_max_s": COOLDOWN_S,
    }
    shape = Shape({name: {"embedding_dimensions": 8} for name in INSTANCES}, scheduler=scheduler)
    with mesh(tmp_path_factory.mktemp("faults"), shape) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    """A client; afterwards nothing fails any more, and every breaker is closed."""
    async with client_of(running) as made:
        yield made
        running.faults(on=INSTANCES)
        running.recover()
        await closed(made, running)


def breakers(running: Mesh) -> dict[str, str]:
    """States by instance, as the scheduler tells them."""
    return {entry.name: entry.breaker for entry in running.status().instances}


async def closed(client: MeshClient, running: Mesh) -> float:
    """Sends what is needed to close every breaker; the seconds it took."""
    begin = time.monotonic()
    while set((await asyncio.to_thread(breakers, running)).values()) != {"closed"}:
        assert time.monotonic() - begin < 10.0, breakers(running)
        await asyncio.gather(*(client.generate(sampling=SHORT) for _ in range(4)))
        await asyncio.sleep(0.02)
    return time.monotonic() - begin


async def embed(client: MeshClient, text: str = "Hello") -> generate_pb2.EmbedResponse:
    return await client.stub.Embed(
        generate_pb2.EmbedRequest(texts=[text]), metadata=client.metadata, timeout=10
    )


async def break_all(client: MeshClient, running: Mesh, *, on: tuple[str, ...]) -> None:
    """Lets these fail every attempt until their breakers are open."""
    running.faults({"fail_after": 0, "status": "INTERNAL"}, on=on)

    def are_open() -> bool:
        states = breakers(running)
        return all(states[name] == "open" for name in on)

    for _ in range(60):
        await asyncio.gather(*(client.generate(sampling=SHORT) for _ in range(3)))
        if await asyncio.to_thread(are_open):
            return
    raise AssertionError(breakers(running))


@pytest.mark.parametrize("unary", [False, True])
async def test_a_breaker_that_opened_takes_nothing_and_closes_again(
    client: MeshClient, running: Mesh, unary: bool
) -> None:
    await break_all(client, running, on=("sim-0",))
    begin = time.monotonic()
    while time.monotonic() - begin < COOLDOWN_S / 3:  # well within the cool-down, on every path
        answer = (await client.generate(sampling=SHORT)).ok
        assert answer.finished.instance != "sim-0"
        assert answer.finished.attempts == 1
        assert (await embed(client)).instance != "sim-0"
    assert breakers(running)["sim-0"] == "open"
    running.faults(on=("sim-0",))
    begin = time.monotonic()
    while breakers(running)["sim-0"] != "closed":
        assert time.monotonic() - begin < 2 * COOLDOWN_S, breakers(running)
        calls = (embed(client) if unary else client.generate(sampling=SHORT) for _ in range(3))
        await asyncio.gather(*calls)
        await asyncio.sleep(0.05)


async def test_errors_of_clients_neither_open_a_breaker_nor_close_one(
    client: MeshClient, running: Mesh
) -> None:
    bad = {"request_id": "bad-*", "refuse": True, "status": "INVALID_ARGUMENT"}
    running.faults(bad, on=INSTANCES)
    for _ in range(30):
        answer = await client.generate(request_id=fresh_id("bad"), sampling=SHORT)
        assert answer.refused.code is Code.INVALID_ARGUMENT
    assert set(breakers(running).values()) == {"closed"}
    assert (await client.generate(sampling=SHORT)).ok.messages
    await break_all(client, running, on=("sim-0",))
    running.faults(bad, on=("sim-0",))
    await eventually(lambda: breakers(running)["sim-0"] == "half_open", "it is tried again", 5.0)
    for _ in range(12):
        await client.generate(request_id=fresh_id("bad"), sampling=SHORT)
        assert breakers(running)["sim-0"] == "half_open"


async def test_one_that_is_back_on_its_address_is_tried_at_once(
    client: MeshClient, running: Mesh
) -> None:
    await break_all(client, running, on=("sim-0",))
    running["sim-0"].kill()
    running.faults(on=INSTANCES)
    running["sim-0"].start()
    await eventually(lambda: running.reachable("scheduler-0", ["sim-0"]), "it is back", 20.0)
    assert await closed(client, running) < 2 * COOLDOWN_S


async def test_with_everything_down_there_is_no_storm_and_then_it_serves_again(
    client: MeshClient, running: Mesh
) -> None:
    """1,000 calls. Attempts are counted where they are made, in the scheduler, and the edge
    makes none."""
    running.faults({"fail_after": 0, "status": "UNAVAILABLE"}, on=INSTANCES)
    retries = await asyncio.to_thread(running.edge_stat, "upstream_rq_retry")
    answers: list[Answer] = []

    async def caller(count: int) -> None:
        for _ in range(count):
            answer = await client.generate(sampling=SHORT, timeout=0.3)
            answers.append(answer)

    await asyncio.gather(*(caller(10) for _ in range(100)))
    attempts = sum(int(answer.refused.metadata.get("attempts", 0)) for answer in answers)
    assert len(answers) == 1_000
    assert attempts <= 1_010
    assert await asyncio.to_thread(running.edge_stat, "upstream_rq_retry") == retries
    running.faults(on=INSTANCES)
    assert await closed(client, running) < 2 * COOLDOWN_S + 1.0


async def test_with_a_twentieth_of_attempts_failing_nearly_every_call_succeeds(
    client: MeshClient, running: Mesh
) -> None:
    """Every twentieth request fails on two of the three instances, and is done on the third."""
    running.faults({"request_id": "flaky-*", "fail_after": 0}, on=("sim-0",))
    good = attempts = 0
    for begin in range(0, 600, 20):
        ids = [fresh_id("flaky" if number == 0 else "steady") for number in range(20)]
        calls = (client.generate(request_id=one, sampling=SHORT) for one in ids)
        for answer in await asyncio.gather(*calls):
            if answer.error is None:
                good += 1
                attempts += answer.finished.attempts
            else:
                attempts += int(answer.error.metadata.get("attempts", 0))
        assert begin < 600
    assert good >= 594
    assert attempts <= 660


async def test_one_layer_alone_tries_again(client: MeshClient, running: Mesh) -> None:
    """A request that each instance fails once: were it made again below the scheduler, it would
    succeed; above it, there would be a second call."""
    one = fresh_id("once")
    running.faults({"request_id": one, "fail_after": 0, "times": 1}, on=INSTANCES)
    retries = await asyncio.to_thread(running.edge_stat, "upstream_rq_retry")
    calls = await asyncio.to_thread(running.edge_stat, "upstream_rq_total")
    answer = await client.generate(request_id=one, sampling=SHORT)
    assert answer.refused.metadata["attempts"] == "3"
    assert await asyncio.to_thread(running.edge_stat, "upstream_rq_retry") == retries
    assert await asyncio.to_thread(running.edge_stat, "upstream_rq_total") == calls + 1
    assert (await client.generate(request_id=one, sampling=SHORT)).ok.finished.attempts == 1


async def test_an_input_that_kills_engines_meets_three_at_most_and_nobody_else_is_harmed(
    client: MeshClient, running: Mesh
) -> None:
    """It is sent five times, among others that go on."""
    prompt = sim("poison", crash_after=3)
    epochs = {name: running.load(name).epoch for name in INSTANCES}
    others: list[Answer] = []

    async def steady() -> None:
        while not done.is_set():
            fields: dict[str, Any] = {"sampling": {"max_tokens": 20, "temperature": 0.0}}
            others.append(await client.generate("innocent", **fields))

    done = asyncio.Event()
    tasks = [asyncio.create_task(steady()) for _ in range(4)]
    reasons = []
    for _ in range(5):
        answer = await client.generate(prompt, sampling={"temperature": 0.0}, timeout=20)
        reasons.append(answer.refused.reason)
        await asyncio.sleep(0.2)
    await eventually(lambda: running.reachable("scheduler-0"), "the engines are back", 20.0)
    done.set()
    await asyncio.gather(*tasks)
    touched = [name for name in INSTANCES if running.load(name).epoch != epochs[name]]
    assert 2 <= len(touched) <= 3
    assert reasons[-3:] == ["POISON"] * 3
    assert len({answer.ok.text() for answer in others}) == 1
    assert len(others) > 20


async def test_instances_that_drain_and_come_back_under_load_cost_no_request(
    client: MeshClient, running: Mesh
) -> None:
    """Each is replaced in turn while requests go on; a stream that runs on it ends."""
    answers: list[Answer] = []

    async def steady() -> None:
        while not done.is_set():
            answers.append(await client.generate(sampling={"max_tokens": 10, "temperature": 0.0}))

    done = asyncio.Event()
    tasks = [asyncio.create_task(steady()) for _ in range(4)]
    for name in INSTANCES[:2]:
        streams = [
            asyncio.create_task(client.generate("long", sampling={"max_tokens": 150}))
            for _ in range(6)
        ]
        await asyncio.sleep(0.2)
        running[name].send(signal.SIGTERM)
        assert await asyncio.to_thread(running[name].ended, 30.0) == 0
        running[name].start()
        for stream in streams:
            assert (await stream).ok.messages
        await eventually(lambda: running.reachable("scheduler-0"), "it is back", 20.0)
    done.set()
    await asyncio.gather(*tasks)
    assert all(answer.error is None for answer in answers), {
        answer.error.reason for answer in answers if answer.error is not None
    }
