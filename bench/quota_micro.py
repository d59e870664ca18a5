"""What quota costs: the script in the store, an exchange through gRPC, a lease, a whole request.

``python -m bench.quota_micro``: starts Valkey and the state service on free ports, then a mesh with
one scheduler and the simulated engine, measures one after the other, prints JSON. On a busy machine
compare ratios, not microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import psutil

from scheduler_svc.adapters.quota_client import GrpcQuotaTransport, QuotaClient
from scheduler_svc.domain.quota import QuotaAccount, QuotaTimes, _Lease
from sluice.errors import SluiceError
from sluice.quota.exchange import NOTHING, Amounts, Answer, Exchange, Limits, Need
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_quota import ValkeyQuotaStore
from tests.hermetic import quota_mesh
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import client_of
from tests.robustness.state_process import state_service
from tests.valkey import valkey

ROUNDS = 400
MANY = 20_000
REQUESTS = 1600
LIMITS = Limits(
    requests_per_min=10**6, tokens_per_min=10**9, concurrent_requests=10**5, tokens_per_day=10**11
)


async def timed(rounds: int, call: Callable[[int], Awaitable[object]]) -> dict[str, float]:
    """Microseconds per call, one after the other."""
    taken = []
    for number in range(rounds):
        began = time.perf_counter()
        await call(number)
        taken.append((time.perf_counter() - began) * 1e6)
    cuts = statistics.quantiles(taken, n=100)
    return {"p50_us": round(statistics.median(taken), 1), "p99_us": round(cuts[98], 1)}


async def script(url: str) -> dict[str, Any]:
    """An exchange with one need in the store alone, and its time by the server's own count."""
    link = ValkeyLink(url)
    store = ValkeyQuotaStore(link)

    async def one(number: int) -> None:
        exchange = Exchange("bench", number + 1, LIMITS, needs=(Need(100),))
        (answer,) = await store.exchange([("script", exchange)])
        assert isinstance(answer, Answer)

    await one(0)
    await link.run(lambda client: client.config_resetstat())
    figures: dict[str, Any] = await timed(ROUNDS, lambda number: one(number + 1))
    stats: Any = await link.run(lambda client: client.info("commandstats"))
    figures["in_store_us"] = stats["cmdstat_evalsha"]["usec_per_call"]
    await link.close()
    return figures


async def through_grpc(channel: grpc.aio.Channel) -> dict[str, Any]:
    """A reservation by asking, one caller; then as fast as 64 callers can; then from leases."""
    figures: dict[str, Any] = {}
    transport = GrpcQuotaTransport(channel)
    times = QuotaTimes(wait_s=2.0)
    client = QuotaClient("bench:1", transport, time.monotonic, times)
    client.set_tenant("asked", LIMITS, fail_open=False)
    running = asyncio.create_task(client.run())

    async def ask(_: int) -> None:
        made = await client.reserve("asked", 100)
        client.settle(made, 90)

    with mock.patch.object(QuotaAccount, "_wanted", return_value=NOTHING):
        await ask(0)
        figures["asked"] = await timed(ROUNDS, ask)

        async def caller() -> None:
            for number in range(ROUNDS // 4):
                await ask(number)

        began, before = time.perf_counter(), client.exchanges
        await asyncio.gather(*(caller() for _ in range(64)))
        figures["asked_64_callers_per_s"] = round(16 * ROUNDS / (time.perf_counter() - began))
        figures["reservations_per_exchange"] = round(16 * ROUNDS / (client.exchanges - before), 1)

    client.set_tenant("leased", LIMITS, fail_open=False)
    taken: list[float] = []
    waited = 0
    until = time.perf_counter() + 4.0
    while time.perf_counter() < until:
        began = time.perf_counter()
        made = client.try_reserve("leased", 100)
        if made is None:
            waited += 1
            made = await client.reserve("leased", 100)
        taken.append((time.perf_counter() - began) * 1e6)
        client.settle(made, 90)
        await asyncio.sleep(0.002)
    warm = taken[len(taken) // 4 :]
    figures["leased"] = {
        "p50_us": round(statistics.median(warm), 1),
        "p99_us": round(statistics.quantiles(warm, n=100)[98], 1),
        "from_leases": round(1 - waited / len(taken), 3),
    }
    running.cancel()
    return figures


def hot_path() -> dict[str, float]:
    """CPU microseconds of the calls that a request makes when a lease serves it."""
    client = QuotaClient("bench:1", mock.Mock(), time.monotonic)
    client.set_tenant("t", LIMITS, fail_open=False)
    account = client._account("t")
    assert account is not None
    account.epoch, account.valid_until = 1, math.inf
    plenty = Amounts(10**9, 10**12, 10**9)
    account._leases.append(_Lease(1, 1, 1, plenty, math.inf, math.inf, Amounts(1, 1, 1)))
    figures = {}
    for _ in range(2):
        marks = [time.process_time()]
        made = [client.try_reserve("t", 20) for _ in range(MANY)]
        held = [one for one in made if one is not None]
        marks.append(time.process_time())
        for one in held:
            client.may_start(one)
            client.started(one)
        marks.append(time.process_time())
        for one in held:
            client.settle(one, 15)
        marks.append(time.process_time())
        names = ("reserve_us", "start_us", "settle_us")
        figures = {
            name: round((after - before) * 1e6 / MANY, 2)
            for name, before, after in zip(names, marks, marks[1:], strict=False)
        }
    return figures


async def requests(running: Mesh, who: quota_mesh.TestTenant) -> dict[str, float]:
    """CPU microseconds per request, by process, for 8 callers with requests of one token."""
    processes = {name: psutil.Process(process.pid) for name, process in running.processes.items()}
    async with client_of(running, key=who.key) as client:

        async def caller(count: int) -> None:
            for _ in range(count):
                with contextlib.suppress(SluiceError):
                    await client.text(token_ids=[7] * 10, sampling={"max_tokens": 1})

        await asyncio.gather(*(caller(20) for _ in range(8)))
        before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        await asyncio.gather(*(caller(REQUESTS // 8) for _ in range(8)))
        return {
            name: round((sum(process.cpu_times()[:2]) - before[name]) * 1e6 / REQUESTS)
            for name, process in processes.items()
        }


async def through_a_mesh() -> dict[str, Any]:
    """A tenant without limits, one with limits that it never reaches, one far over its limit."""
    with tempfile.TemporaryDirectory() as folder:
        shape = Shape({"sim-0": {"decode_step_ms": 1.0}}, state={})
        with mesh(Path(folder), shape) as running:
            plenty = {"requests_per_min": 10**6, "tokens_per_min": 10**9}
            limits: dict[str, dict[str, Any]] = {
                "unlimited": {},
                "limited": {**plenty, "concurrent_requests": 10**4},
                "refused": {"requests_per_min": 1},
            }
            return {
                name: await requests(running, quota_mesh.tenant(running, **one))
                for name, one in limits.items()
            }


async def main() -> None:
    figures: dict[str, Any] = {"hot_path": hot_path()}
    with valkey() as store:
        figures["script"] = await script(store.url)
        async with state_service(store.url) as (_, channel):
            figures["grpc"] = await through_grpc(channel)
    figures["cpu_us_per_request"] = await through_a_mesh()
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
