"""What quota costs: the script in the store, an exchange through gRPC, and a lease.

``python -m bench.quota_micro``: starts Valkey and the state service on free ports, measures one
after the other, prints JSON. On a busy machine compare ratios, not microseconds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import grpc.aio

from scheduler_svc.adapters.quota_client import GrpcQuotaTransport, QuotaClient
from scheduler_svc.domain.quota import QuotaAccount, QuotaTimes
from sluice.quota.exchange import NOTHING, Answer, Exchange, Limits, Need
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_quota import ValkeyQuotaStore
from tests.robustness.state_process import state_service
from tests.valkey import valkey

ROUNDS = 400
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


async def main() -> None:
    with valkey() as store:
        figures = {"script": await script(store.url)}
        async with state_service(store.url) as (_, channel):
            figures["grpc"] = await through_grpc(channel)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
