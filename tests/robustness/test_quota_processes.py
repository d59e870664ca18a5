"""Quotas over real processes and a real store, with processes stopped, killed and frozen.

Goal: the limit holds over two schedulers also when one is stopped and goes on, is
reached exactly, and what a killed one held returns; a slow or lost store costs bounded time and
heals by itself. Method: the state service and holders as processes, Valkey as a process, signals.
Oracle: the holders' own lines, on the system-wide monotonic clock. No randomness but the system's.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from sluice.common.v1 import policy_pb2
from sluice.state.v1 import quota_pb2, tenants_pb2
from sluice.state.v1.quota_pb2_grpc import QuotaServiceStub
from sluice.state.v1.tenants_pb2_grpc import TenantServiceStub
from sluice.status import from_rpc_error
from tests.robustness.state_process import holders, state_service, until_health
from tests.valkey import ValkeyProcess, valkey

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CALL_S = 10.0  # deadline of a call
SEEN_S = 6.0
STORE_S = 1.0  # where no answer of the store is to be missing


@pytest.fixture
def store() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


def _load(name: str, **more: Any) -> dict[str, Any]:
    limits = {"requests_per_min": 400, "tokens_per_min": 8000}
    return {
        "name": name,
        "mode": "load",
        "rate_per_s": 100.0,
        "tokens": 10,
        "seconds": 6.0,
        "limits": limits,
        **more,
    }


async def test_two_schedulers_reach_the_limit_exactly_although_one_is_stopped(
    store: ValkeyProcess,
) -> None:
    """Mutant: a lease is spent without looking at its end."""
    async with state_service(store.url, STORE_S) as (service, _):
        # A busy machine answers late; only the store's word counts here.
        both = (_load("a", wait_s=2.0), _load("b", wait_s=2.0))
        with holders(service.address, *both) as (a, b):
            await a.line("reserved")
            await b.line("reserved")
            await asyncio.sleep(0.7)
            a.send(signal.SIGSTOP)
            await asyncio.sleep(1.6)
            a.send(signal.SIGCONT)
            lines = [
                *await asyncio.to_thread(a.finish),
                *await asyncio.to_thread(b.finish),
            ]
    counts = Counter(line["event"] for line in lines)
    # Less than 60 s in all, so every reservation counts; the two that were waited for are the
    # first of each holder, and what they said before was dropped with them.
    reserved = [line for line in lines if line["event"] == "reserved"]
    assert len(reserved) + 2 == 400, counts
    assert {line["reason"] for line in lines if line["event"] == "refused"} == {"QUOTA_EXCEEDED"}
    assert any(line["local"] for line in reserved)


async def test_what_a_killed_scheduler_held_returns_within_seconds(store: ValkeyProcess) -> None:
    """Mutant: a dead holder is only reaped when somebody registers."""
    limits = {"concurrent_requests": 5}
    async with state_service(store.url, STORE_S) as (service, _):
        held = {"mode": "hold", "count": 5, "tokens": 1, "limits": limits, "wait_s": 2.0}
        with holders(service.address, {"name": "a", **held}) as (a,):
            assert (await a.line("holding"))["count"] == 5
            a.send(signal.SIGKILL)
            killed_at = time.monotonic()
            load = _load("b", limits=limits, rate_per_s=20.0, seconds=8.0)
            with holders(service.address, load) as (b,):
                first = await b.line("reserved")
                assert 2.0 < first["at"] - killed_at < 4.5


async def test_a_stopped_scheduler_starts_nothing_that_others_were_given(
    store: ValkeyProcess,
) -> None:
    """Mutant: may_start trusts the epoch that it knows."""
    limits = {"concurrent_requests": 3}
    held = {"mode": "hold", "count": 3, "tokens": 1, "limits": limits, "wait_s": 2.0}
    async with state_service(store.url, STORE_S) as (service, _):
        with holders(service.address, {"name": "a", **held}) as (a,):
            assert (await a.line("holding"))["count"] == 3
            a.send(signal.SIGSTOP)
            await asyncio.sleep(3.3)
            with holders(service.address, {"name": "b", **held}) as (b,):
                assert (await b.line("holding"))["count"] == 3
                a.send(signal.SIGUSR1)
                a.send(signal.SIGCONT)
                assert max((await a.line("may_start"))["seconds"]) <= 0
                b.send(signal.SIGUSR1)
                assert min((await b.line("may_start"))["seconds"]) > 0


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_lost_store_gives_typed_errors_in_time_and_heals_by_itself(
    store: ValkeyProcess, fault: str
) -> None:
    """Mutant: no socket timeout (the call waits for its deadline)."""
    async with state_service(store.url) as (_, channel):
        stub: Any = QuotaServiceStub(channel)
        ask = quota_pb2.GetQuotaUseRequest(tenant="t")
        await stub.GetQuotaUse(ask, timeout=CALL_S)
        if fault == "frozen":
            store.send(signal.SIGSTOP)
        else:
            store.kill()
        began = time.monotonic()
        calls = [_failure(stub, ask) for _ in range(200)]
        reasons = Counter(await asyncio.gather(*calls))
        assert set(reasons) == {"STORE_UNAVAILABLE"}
        # 0.2 s for an answer, as much for one of 32 connections; the rest is a busy machine's.
        assert time.monotonic() - began < CALL_S / 2
        await until_health(channel, NOT_SERVING, SEEN_S)
        if fault == "frozen":
            store.send(signal.SIGCONT)
        else:
            store.start()
        await until_health(channel, SERVING, SEEN_S)
        await stub.GetQuotaUse(ask, timeout=CALL_S)


async def _failure(stub: Any, ask: quota_pb2.GetQuotaUseRequest) -> str:
    try:
        await stub.GetQuotaUse(ask, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "OK"


@pytest.mark.parametrize("fail_open", [True, False])
async def test_while_quotas_are_unreachable_the_tenants_policy_decides_in_bounded_time(
    store: ValkeyProcess, fail_open: bool
) -> None:
    """Mutant: a request waits while the service is known to be unreachable."""
    async with state_service(store.url) as (service, _):
        load = _load("a", seconds=5.0, rate_per_s=50.0, fail_open=fail_open)
        with holders(service.address, load) as (a,):
            await a.line("reserved")
            store.send(signal.SIGSTOP)
            stopped_at = time.monotonic()
            await asyncio.sleep(1.5)
            store.send(signal.SIGCONT)
            on_at = time.monotonic()
            lines = await asyncio.to_thread(a.finish)
    during = [x for x in lines if stopped_at + 0.8 < x["at"] < on_at]
    after = [x for x in lines if x["at"] > on_at + 1.0 and x["event"] != "ended"]
    assert {x["event"] for x in during} == {"reserved" if fail_open else "refused"}
    assert {x["event"] for x in after} == {"reserved"}
    assert max(x["waited"] for x in lines if "waited" in x) < 0.6
    if not fail_open:
        assert {x["reason"] for x in during} == {"QUOTA_UNREACHABLE"}


async def test_a_watch_sees_changes_survives_the_store_and_ends_with_the_service(
    store: ValkeyProcess,
) -> None:
    """Mutant: the watch ends when the store does."""
    async with state_service(store.url, STORE_S) as (service, channel):
        stub: Any = TenantServiceStub(channel)
        call = stub.WatchTenants(tenants_pb2.WatchTenantsRequest())
        first = await call.read()
        assert first.snapshot and not first.tenants
        tenant = tenants_pb2.Tenant(
            name="a", ceiling=policy_pb2.PRIORITY_CLASS_INTERACTIVE, sessions=True
        )
        put = await stub.PutTenant(tenants_pb2.PutTenantRequest(tenant=tenant), timeout=2.0)
        seen = await call.read()
        assert not seen.snapshot and list(seen.tenants) == [put.tenant]
        key = tenants_pb2.TenantKey(key_id="k", tenant="a", sha256=b"x" * 32)
        await stub.PutKey(tenants_pb2.PutKeyRequest(key=key), timeout=2.0)
        assert list((await call.read()).keys) == [key]
        store.send(signal.SIGSTOP)
        await until_health(channel, NOT_SERVING, SEEN_S)
        store.send(signal.SIGCONT)
        await until_health(channel, SERVING, SEEN_S)
        gone = tenants_pb2.DeleteTenantRequest(tenant="a")
        await stub.DeleteTenant(gone, timeout=2.0)
        deleted_tenants: list[str] = []
        deleted_keys: list[str] = []
        while not (deleted_tenants and deleted_keys):
            change = await call.read()
            deleted_tenants += change.deleted_tenants
            deleted_keys += change.deleted_keys
        assert (deleted_tenants, deleted_keys) == (["a"], ["k"])
        assert await asyncio.to_thread(service.end) == 0
        assert await call.read() is grpc.aio.EOF
