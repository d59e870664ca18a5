"""Quotas while schedulers stop and die, and while the store is slow, frozen or gone.

Goal: what lapsed starts nothing, what a killed scheduler held comes
back within seconds, and without the store each tenant's own policy holds in bounded time and ends
by itself. Method: two schedulers with Envoy, state service and Valkey as processes; signals.
Oracle: what runs in the engine by its own report, the answers, the state service's count.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from sluice.errors import SluiceError
from tests.hermetic import quota_mesh
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, collect, eventually

PROMPT: dict[str, Any] = {"token_ids": [7] * 10}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}  # 7.5 s
SHORT: dict[str, Any] = {"max_tokens": 1}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(schedulers=2, state={"store_timeout_s": 0.2})
    with mesh(tmp_path_factory.mktemp("quota-faults"), shape) as made:
        yield made


@pytest_asyncio.fixture(autouse=True)
async def _as_before(running: Mesh) -> AsyncIterator[None]:
    yield
    for process in running.processes.values():
        if process.alive:
            process.send(signal.SIGCONT)
    await asyncio.to_thread(running.recover)


async def ask(client: MeshClient) -> tuple[str, float]:
    """One short request: "OK" or the reason of its error, and how long it took."""
    began = time.monotonic()
    try:
        await client.text(**PROMPT, sampling=SHORT)
    except SluiceError as error:
        return error.reason, time.monotonic() - began
    return "OK", time.monotonic() - began


async def test_a_start_signed_before_a_stop_does_not_start_after_it(
    running: Mesh, tmp_path: Path
) -> None:
    """Mutants: the instance allows a difference of clocks for it; the grant does not say so."""
    who = quota_mesh.tenant(running, concurrent_requests=1)
    stop = tmp_path / "stop"
    stopping, other = running["scheduler-0"], running["scheduler-1"]
    usual = stopping.command, stopping.environ
    stopping.kill()
    stopping.command = [sys.executable, "-m", "tests.robustness.stopping_scheduler"]
    stopping.environ = {**stopping.environ, "STOP_FILE": str(stop)}
    stopping.start()
    await asyncio.to_thread(running.until_ready)
    at_once: list[int] = []
    over = asyncio.Event()

    async def look() -> None:
        while not over.is_set():
            at_once.append(await asyncio.to_thread(running.in_engine))
            await asyncio.sleep(0.01)

    try:
        async with (
            client_of(running, stopping.address, who.key) as stopped,
            client_of(running, other.address, who.key) as client,
        ):
            await eventually(lambda: quota_mesh.knows(running, "scheduler-0", who), "it is known")
            assert (await ask(stopped))[0] == "OK"
            stop.touch()
            first = asyncio.create_task(collect(stopped.start(**PROMPT, sampling=LONG)))
            await eventually(lambda: not stop.exists(), "it stopped itself")
            looking = asyncio.create_task(look())
            # The other one gets the slot as soon as the registration has ended, 1.5 s at most.
            second = await begun(client)
            stopping.send(signal.SIGCONT)
            assert (await first).refused.reason == "QUOTA_EXCEEDED"
            second.cancel()
            over.set()
            await looking
        assert max(at_once) == 1
    finally:
        stopping.kill()
        stopping.command, stopping.environ = usual


async def begun(client: MeshClient) -> Any:
    """A long stream that was started; asked for again while it is refused, for a busy machine
    may be slower than the 0.25 s that a scheduler waits for its answer."""
    while True:
        call = client.start(**PROMPT, sampling=LONG)
        try:
            await call.read()
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.02)
        else:
            return call


async def test_the_limit_is_reached_exactly_although_a_scheduler_is_stopped_and_goes_on(
    running: Mesh,
) -> None:
    """Mutant: every scheduler counts for itself."""
    limit = 150
    who = quota_mesh.tenant(running, requests_per_min=limit)
    told: Counter[str] = Counter()
    until = time.monotonic() + 5.0

    async def caller(client: MeshClient) -> None:
        while time.monotonic() < until:
            told[(await ask(client))[0]] += 1
            await asyncio.sleep(0.02)

    async with (
        client_of(running, running["scheduler-0"].address, who.key) as stopped,
        client_of(running, running["scheduler-1"].address, who.key) as other,
    ):
        callers = [asyncio.create_task(caller(c)) for c in (stopped, other) for _ in range(2)]
        await asyncio.sleep(0.7)
        running["scheduler-0"].send(signal.SIGSTOP)
        await asyncio.sleep(1.6)
        running["scheduler-0"].send(signal.SIGCONT)
        await asyncio.gather(*callers)
        # A slow machine has not asked for all of it by now.
        while (reason := (await ask(other))[0]) != "QUOTA_EXCEEDED":
            told[reason] += 1
    assert told["OK"] == limit, told


async def test_what_a_killed_scheduler_held_is_free_within_seconds(running: Mesh) -> None:
    """Mutant: holders without a heartbeat keep what they hold."""
    who = quota_mesh.tenant(running, concurrent_requests=3)
    async with (
        client_of(running, running["scheduler-0"].address, who.key) as killed,
        client_of(running, running["scheduler-1"].address, who.key) as client,
    ):
        calls = [await begun(killed) for _ in range(3)]
        assert (await ask(client))[0] == "QUOTA_EXCEEDED"
        running["scheduler-0"].kill()
        killed_at = time.monotonic()
        while (await ask(client))[0] != "OK":
            await asyncio.sleep(0.05)
        took_s = time.monotonic() - killed_at
        for call in calls:
            call.cancel()
    assert 0.5 < took_s < 5.0


async def test_a_slow_store_delays_within_its_bound_and_refuses_nobody(running: Mesh) -> None:
    """Mutant: the wait for the service is shorter than it may be slow."""
    who = quota_mesh.tenant(running, requests_per_min=10_000, concurrent_requests=100)
    address = running["valkey"].address
    over = asyncio.Event()

    async def slow() -> None:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        while not over.is_set():
            writer.write(b"CLIENT PAUSE 80 ALL\r\n")
            await reader.readline()
            # Those it holds up are let go by a timer of 100 ms: sooner, two pauses would join.
            await asyncio.sleep(0.3)
        writer.close()

    slowing = asyncio.create_task(slow())
    async with client_of(running, key=who.key) as client:
        told = [await ask(client) for _ in range(30)]
    over.set()
    await slowing
    assert {reason for reason, _ in told} == {"OK"}
    assert statistics.median(took_s for _, took_s in told) < 0.35


@pytest.mark.parametrize("fault", ["frozen", "killed", "no service"])
async def test_without_the_store_each_tenants_policy_holds_and_ends_by_itself(
    running: Mesh, fault: str
) -> None:
    """Mutants: a request waits while the service is known to be unreachable; an open tenant is
    treated as a closed one."""
    limits: dict[str, Any] = {"requests_per_min": 10_000, "tokens_per_min": 10**7}
    closed = quota_mesh.tenant(running, **limits)
    opened = quota_mesh.tenant(running, fail_open=True, **limits)
    lost = running["state-0" if fault == "no service" else "valkey"]
    async with (
        client_of(running, key=closed.key) as strict,
        client_of(running, key=opened.key) as lax,
    ):
        assert (await ask(strict))[0] == (await ask(lax))[0] == "OK"
        if fault == "frozen":
            lost.send(signal.SIGSTOP)
        else:
            lost.kill()
        await asyncio.sleep(1.2)  # leases end
        told: dict[str, Counter[str]] = {"closed": Counter(), "open": Counter()}
        took: list[float] = []
        for _ in range(20):
            for name, client in (("closed", strict), ("open", lax)):
                reason, took_s = await ask(client)
                told[name][reason] += 1
                took.append(took_s)
        assert told == {"closed": {"QUOTA_UNREACHABLE": 20}, "open": {"OK": 20}}
        # One of each waits for an answer, 0.25 s; then nobody does.
        assert max(took) < 1.0 and statistics.median(took) < 0.15
        if fault == "frozen":
            lost.send(signal.SIGCONT)
        else:
            lost.start()
        back_at = time.monotonic()
        while (await ask(strict))[0] != "OK":
            assert time.monotonic() - back_at < 15.0
            await asyncio.sleep(0.1)
        assert (await ask(lax))[0] == "OK"
