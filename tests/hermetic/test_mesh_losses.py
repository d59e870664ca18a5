"""Processes that die, stop or fail under requests.

Goal: a request whose instance is lost goes on elsewhere and its client sees nothing, before its
first token or after it; what cannot go on ends with one typed error that says how far it came, and
no token twice. Whatever was lost serves again within seconds of coming back on its address.
Stale attempts are dropped.
Method: two instances, two executions, one scheduler; SIGKILL, SIGSTOP and crashes of the engine at
scripted points. Oracle: the text without a fault, which is a function of the whole token prefix,
and the positions in the stream.

Seen to fail on the mutants in tests/mutants: attempts_used_up_on_a_dead_engine,
dead_replica_is_chosen, delivered_is_placed_again, delivered_text_sent_again, watch_gives_up.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from sluice.errors import Code
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import (
    Answer,
    MeshClient,
    client_of,
    collect,
    eventually,
    fresh_id,
    sim,
)

TOKENS = 150  # 1.5 s: long enough to be killed midway on a busy machine
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}
# A seeded generator's state cannot be rebuilt elsewhere.
SEEDED = {**GREEDY, "seed": 1}
# An instance that comes back: its process starts, then it is found by a watch that retries each
# second at least. Most of it is the start of Python on a busy machine.
BACK_LIMIT_S = 20.0
INSTANCES = ("sim-0", "sim-1")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape({name: {"decode_step_ms": 10.0} for name in INSTANCES}, executions=2)
    with mesh(tmp_path_factory.mktemp("losses"), shape) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    """A client of the whole mesh; afterwards all of it runs again and nothing is left."""
    async with client_of(running) as made:
        yield made
    running.recover()


async def begun(client: MeshClient, prompt: str, **fields: Any) -> tuple[asyncio.Task[Answer], str]:
    """A streamed request that an instance has accepted, and that instance."""
    answer = Answer()
    fields = {"sampling": GREEDY, **fields}
    call = client.start(prompt, return_token_ids=True, **fields)
    task = asyncio.create_task(collect(call, answer))
    await eventually(lambda: bool(answer.messages) or task.done(), "an instance takes it")
    assert answer.messages, answer.error
    return task, answer.started.instance


def other(instance: str) -> str:
    """The other instance."""
    return INSTANCES[1 - INSTANCES.index(instance)]


async def reference(
    client: MeshClient, prompt: str, sampling: dict[str, Any] | None = None
) -> Answer:
    """What the request gives without a fault."""
    sampling = sampling or GREEDY
    return (await client.generate(prompt, return_token_ids=True, sampling=sampling)).ok


async def test_an_instance_killed_before_the_first_token_is_not_noticed(
    client: MeshClient, running: Mesh
) -> None:
    want = await reference(client, "before")
    ids = [fresh_id("before") for _ in range(4)]
    running.faults(*({"request_id": one, "hang_after": 0} for one in ids), on=INSTANCES)
    first, instance = await begun(client, "before", request_id=ids[0])
    # The others may lie on either instance; those that lie elsewhere must go on undisturbed.
    running.faults(on=[other(instance)])
    rest = [(await begun(client, "before", request_id=one))[0] for one in ids[1:]]
    running[instance].kill()
    for task in (first, *rest):
        answer = (await task).ok
        assert answer.tokens() == want.tokens()
        assert answer.text() == want.text()
        assert answer.finished.instance == other(instance)
    assert first.result().finished.attempts == 2


async def test_an_instance_killed_midway_is_not_noticed_either(
    client: MeshClient, running: Mesh
) -> None:
    """The streams go on on the other instance: the same tokens and text, counted once."""
    want = await reference(client, "midway")
    begun_ones = [await begun(client, "midway") for _ in range(6)]
    await asyncio.sleep(0.1)
    instance = begun_ones[0][1]
    running[instance].kill()
    for task, where in begun_ones:
        answer = (await task).ok
        assert answer.tokens() == want.tokens()
        assert answer.text() == want.text()
        assert answer.finished.outputs == want.finished.outputs
        assert answer.finished.usage.prompt_tokens == want.finished.usage.prompt_tokens
        assert answer.finished.usage.completion_tokens == len(want.tokens())
        assert [message.WhichOneof("event") for message in answer.messages].count("started") == 1
        if where == instance:
            assert answer.finished.instance == other(instance)
            assert answer.finished.attempts == 2


async def test_what_cannot_go_on_ends_midway_with_one_typed_error(
    client: MeshClient, running: Mesh
) -> None:
    want = await reference(client, "midway", SEEDED)
    begun_ones = [await begun(client, "midway", sampling=SEEDED) for _ in range(6)]
    await asyncio.sleep(0.1)
    instance = begun_ones[0][1]
    running[instance].kill()
    for task, where in begun_ones:
        answer = await task
        if where != instance:
            assert answer.ok.tokens() == want.tokens()
            continue
        error = answer.refused
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "INSTANCE_LOST")
        assert error.metadata["delivered_tokens"] == str(len(answer.tokens()))
        assert error.metadata["last_sequence"] == str(answer.messages[-1].sequence)
        assert 0 < len(answer.tokens()) < TOKENS
        assert answer.tokens() == want.tokens()[: len(answer.tokens())]
        assert want.text().startswith(answer.text())


async def test_what_is_not_streamed_is_answered_whole_or_not_at_all(
    client: MeshClient, running: Mesh
) -> None:
    body: dict[str, Any] = {"prompt": "whole", "sampling": {"max_tokens": 100, "seed": 1}}
    calls = [asyncio.create_task(client.http.post("/chat", json=body)) for _ in range(4)]
    await eventually(lambda: running.in_engine() == 4, "all run")
    await asyncio.sleep(0.1)
    running["sim-0"].kill()
    statuses = [(await call).status_code for call in calls]
    assert sorted(set(statuses)) == [200, 503]
    running["sim-0"].start()
    await eventually(lambda: running.reachable("scheduler-0"), "it is back", BACK_LIMIT_S)
    del body["sampling"]["seed"]
    calls = [asyncio.create_task(client.http.post("/chat", json=body)) for _ in range(4)]
    await eventually(lambda: running.in_engine() == 4, "all run")
    await asyncio.sleep(0.1)
    running["sim-0"].kill()
    answers = [(await call).json() for call in calls]
    assert len({answer["text"] for answer in answers}) == 1
    assert {answer["attempts"] for answer in answers} == {1, 2}, "half went on elsewhere"


async def test_an_instance_that_comes_back_serves_again(client: MeshClient, running: Mesh) -> None:
    running["sim-0"].kill()
    await eventually(
        lambda: running.status().instances[0].state == "down", "it is found to be down"
    )
    for _ in range(5):
        assert (await client.generate(sampling={"max_tokens": 2})).ok.finished.instance == "sim-1"
    running["sim-0"].start()
    await eventually(lambda: running.serving("sim-0"), "the process serves", BACK_LIMIT_S)
    took_s = await eventually(lambda: running.reachable("scheduler-0"), "it is back", 5.0)
    assert took_s < 3.0
    answers = await asyncio.gather(*(client.generate(sampling=GREEDY) for _ in range(10)))
    assert {answer.ok.finished.instance for answer in answers} == set(INSTANCES)


async def test_an_engine_that_crashes_is_replaced_in_its_process(
    client: MeshClient, running: Mesh
) -> None:
    epoch = running.load("sim-0").epoch
    pid = running["sim-0"].pid
    crash, one = fresh_id("crash"), fresh_id("beside")
    running.faults(
        {"request_id": crash, "crash_after": 5, "times": 1},
        {"request_id": one, "hang_after": 0},
        on=["sim-0"],
    )
    running["sim-1"].send(signal.SIGSTOP)  # so that both go to sim-0
    try:
        await eventually(
            lambda: running_state(running, "sim-1") == "down", "sim-1 is found to be silent"
        )
        beside, where = await begun(client, "beside", request_id=one)
        assert where == "sim-0"
        answer = await client.generate(
            "crash", request_id=crash, return_token_ids=True, sampling=SEEDED
        )
    finally:
        running["sim-1"].send(signal.SIGCONT)
    error = answer.refused
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "INSTANCE_LOST")
    assert len(answer.tokens()) == 5
    # The one that had no token yet runs on sim-1, or on the new engine, and its attempts were not
    # used up on the dead one.
    assert (await beside).ok.finished.attempts in (2, 3)
    await eventually(lambda: running.load("sim-0").epoch not in (0, epoch), "a new epoch", 10.0)
    assert running["sim-0"].pid == pid
    assert running["sim-0"].alive


def running_state(running: Mesh, name: str) -> str:
    """What the scheduler thinks of an instance."""
    return next(entry.state for entry in running.status().instances if entry.name == name)


async def test_a_frozen_instance_loses_its_requests_and_its_late_output_is_stale(
    client: MeshClient, running: Mesh
) -> None:
    """SIGSTOP: nothing is closed, nothing answers. 3 s of silence end the stream; what it sends
    when it wakes up belongs to attempts that are over."""
    want = await reference(client, "frozen")
    one = fresh_id("frozen")
    running.faults({"request_id": one, "hang_after": 0, "hang_ms": 1500}, on=INSTANCES)
    task, instance = await begun(client, "frozen", request_id=one)
    running.faults()
    running[instance].send(signal.SIGSTOP)
    try:
        answer = (await task).ok
        assert (answer.finished.instance, answer.finished.attempts) == (other(instance), 2)
        assert answer.tokens() == want.tokens()
    finally:
        running[instance].send(signal.SIGCONT)
    await eventually(lambda: running.reachable("scheduler-0"), "it is back", 10.0)
    await eventually(lambda: running.in_engine(instance) == 0, "what it still ran was aborted")
    for _ in range(4):
        again = (await client.generate("frozen", return_token_ids=True, sampling=GREEDY)).ok
        assert again.tokens() == want.tokens()


@pytest.mark.parametrize("name", ["execution-0", "execution-1"])
async def test_an_execution_that_dies_costs_no_stream(
    client: MeshClient, running: Mesh, name: str
) -> None:
    """Its instances move to the other replica; what ran there is placed again, or goes on."""
    want = await reference(client, "relay")
    ids = [fresh_id("relay") for _ in range(4)]
    running.faults(*({"request_id": one, "hang_after": 0, "hang_ms": 1000} for one in ids))
    waiting = [(await begun(client, "relay", request_id=one))[0] for one in ids]
    streaming = [(await begun(client, "relay"))[0] for _ in range(4)]
    await asyncio.sleep(0.1)
    running[name].kill()
    for task in waiting:
        assert (await task).ok.tokens() == want.tokens()
    for task in streaming:
        answer = (await task).ok
        assert answer.tokens() == want.tokens()
        assert answer.text() == want.text()
    await eventually(lambda: running.reachable("scheduler-0"), "both go by the other replica", 3.0)
    assert (await client.generate(sampling={"max_tokens": 2})).ok.messages


async def test_without_any_execution_requests_wait_and_then_run(
    client: MeshClient, running: Mesh
) -> None:
    for name in ("execution-0", "execution-1"):
        running[name].kill()
    await eventually(lambda: not running.serving("scheduler-0"), "the scheduler is not ready")
    # Straight to the scheduler: the edge sends nothing to one that is not ready.
    async with client_of(running, running["scheduler-0"].address) as direct:
        task = asyncio.create_task(direct.generate(sampling={"max_tokens": 2}))
        await eventually(lambda: running.waiting() == 1, "it waits")
        running["execution-1"].start()
        answer = (await task).ok
        assert answer.finished.attempts == 1
    await eventually(lambda: running.serving("scheduler-0"), "the scheduler is ready")


async def test_a_scheduler_that_dies_gives_unavailable_and_its_work_stops(
    client: MeshClient, running: Mesh
) -> None:
    tasks = [(await begun(client, "scheduler"))[0] for _ in range(4)]
    call = asyncio.create_task(client.http.post("/chat", json={"prompt": sim(hang_after=0)}))
    await eventually(lambda: running.in_engine() == 5, "all run")
    running["scheduler-0"].kill()
    for task in tasks:
        answer = await task
        assert answer.error is not None
        # Once a stream has begun, Envoy can only reset it, which gRPC reads as INTERNAL.
        assert answer.error.code in (Code.UNAVAILABLE, Code.INTERNAL)
    assert (await call).status_code == 503
    await eventually(lambda: running.in_engine() == 0, "the engines stopped", 5.0)
    refused = await client.generate(timeout=5)
    assert refused.error is not None
    assert refused.error.code is Code.UNAVAILABLE
    running.recover()
    assert (await client.generate(sampling={"max_tokens": 2}, timeout=10)).ok.messages
