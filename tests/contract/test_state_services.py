"""What callers of the state service see: over gRPC, with the stores in memory.

Oracle: the protos' own words. Where a call takes a tenant's id, another tenant's and an unknown one
answer alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.channels import open_channel
from sluice.common.v1 import policy_pb2
from sluice.scheduler.v1 import runs_pb2
from sluice.server import Health, MeshServer
from sluice.state.v1 import aliases_pb2, decisions_pb2, quota_pb2, tenants_pb2, usage_pb2
from sluice.state.v1.aliases_pb2_grpc import (
    AliasServiceStub,
    add_AliasServiceServicer_to_server,
)
from sluice.state.v1.decisions_pb2_grpc import (
    DecisionServiceStub,
    add_DecisionServiceServicer_to_server,
)
from sluice.state.v1.quota_pb2_grpc import QuotaServiceStub, add_QuotaServiceServicer_to_server
from sluice.state.v1.tenants_pb2_grpc import (
    TenantServiceStub,
    add_TenantServiceServicer_to_server,
)
from sluice.state.v1.usage_pb2_grpc import UsageServiceStub, add_UsageServiceServicer_to_server
from sluice.status import from_rpc_error
from state_svc.adapters.alias_servicer import EARLIER_MAX, AliasServicer
from state_svc.adapters.ledger_servicers import DecisionServicer, UsageServicer
from state_svc.adapters.memory_quota import MemoryQuotaStore
from state_svc.adapters.memory_stores import MemoryDecisions, MemoryRegistry, MemoryUsage
from state_svc.adapters.quota_servicer import QuotaServicer
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.tenant_servicer import TenantServicer
from state_svc.ports import Kind

HOUR = 1_800_000_000 // 3600 * 3600


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry()


@pytest.fixture
async def channel(registry: MemoryRegistry) -> AsyncIterator[grpc.aio.Channel]:
    watch = RegistryWatch(registry)
    server = MeshServer("state", ["127.0.0.1:0"], Health())
    add_TenantServiceServicer_to_server(TenantServicer(registry, watch), server.grpc)
    add_AliasServiceServicer_to_server(AliasServicer(registry, watch), server.grpc)
    add_UsageServiceServicer_to_server(UsageServicer(MemoryUsage()), server.grpc)
    add_DecisionServiceServicer_to_server(DecisionServicer(MemoryDecisions()), server.grpc)
    add_QuotaServiceServicer_to_server(QuotaServicer(MemoryQuotaStore()), server.grpc)
    await server.start()
    running = asyncio.create_task(watch.run())
    opened = open_channel(f"127.0.0.1:{server.ports[0]}")
    await opened.channel_ready()
    yield opened
    await opened.close()
    watch.close()
    running.cancel()
    await server.stop(0)


async def refusal(call: Any) -> tuple[str, str]:
    """Code and reason of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    error = from_rpc_error(raised.value)
    return error.code.name, error.reason


def a_tenant(name: str = "a", **more: Any) -> tenants_pb2.Tenant:
    return tenants_pb2.Tenant(
        **{"name": name, "ceiling": policy_pb2.PRIORITY_CLASS_INTERACTIVE, **more}
    )


async def test_a_tenant_is_created_changed_and_deleted(channel: grpc.aio.Channel) -> None:
    stub: Any = TenantServiceStub(channel)
    put = tenants_pb2.PutTenantRequest
    made = (await stub.PutTenant(put(tenant=a_tenant(), expected_version=0))).tenant
    assert made.default_class == policy_pb2.PRIORITY_CLASS_STANDARD
    assert await refusal(stub.PutTenant(put(tenant=a_tenant(), expected_version=0))) == (
        "ABORTED",
        "VERSION_CONFLICT",
    )
    limits = quota_pb2.QuotaLimits(requests_per_min=0)
    changed = a_tenant(limits=limits, run_budget=runs_pb2.RunBudget(tool_calls_max=0))
    await stub.PutTenant(put(tenant=changed, expected_version=made.version))
    listed = await stub.ListTenants(tenants_pb2.ListTenantsRequest())
    assert listed.tenants[0].limits.HasField("requests_per_min")
    assert not listed.tenants[0].limits.HasField("tokens_per_min")
    assert listed.tenants[0].run_budget == runs_pb2.RunBudget(tool_calls_max=0)
    await stub.DeleteTenant(tenants_pb2.DeleteTenantRequest(tenant="a"))
    gone = stub.DeleteTenant(tenants_pb2.DeleteTenantRequest(tenant="a"))
    assert await refusal(gone) == ("NOT_FOUND", "TENANT_UNKNOWN")


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "A b"},
        {"name": "a}:quota{b"},
        {"name": "registry"},
        {"ceiling": policy_pb2.PRIORITY_CLASS_UNSPECIFIED},
        {"default_class": policy_pb2.PRIORITY_CLASS_CRITICAL},
        {"models": ["x"] * 257},
        {"limits": quota_pb2.QuotaLimits(tokens_per_day=10**13)},
        {"run_budget": runs_pb2.RunBudget(steps_max=0)},
        {"run_budget": runs_pb2.RunBudget(cost_max=float("nan"))},
    ],
    ids=str,
)
async def test_a_bad_tenant_is_refused_whole(channel: grpc.aio.Channel, bad: Any) -> None:
    stub: Any = TenantServiceStub(channel)
    call = stub.PutTenant(tenants_pb2.PutTenantRequest(tenant=a_tenant(**bad)))
    assert (await refusal(call))[0] == "INVALID_ARGUMENT"
    assert not (await stub.ListTenants(tenants_pb2.ListTenantsRequest())).tenants


async def test_a_record_that_cannot_be_read_hides_no_other(
    channel: grpc.aio.Channel, registry: MemoryRegistry
) -> None:
    stub: Any = TenantServiceStub(channel)
    aliases: Any = AliasServiceStub(channel)
    target = aliases_pb2.AliasTarget(model="m", weight=1)
    await stub.PutTenant(tenants_pb2.PutTenantRequest(tenant=a_tenant()))
    await aliases.SetAlias(aliases_pb2.SetAliasRequest(alias="a", targets=[target]))
    for kind, name in ((Kind.TENANTS, "b"), (Kind.KEYS, "a/k"), (Kind.ALIASES, "b")):
        await registry.put(kind, name, b"\xff\xff")
    listed = await stub.ListTenants(tenants_pb2.ListTenantsRequest())
    assert [tenant.name for tenant in listed.tenants] == ["a"]
    assert not listed.keys
    first = await anext(aiter(stub.WatchTenants(tenants_pb2.WatchTenantsRequest())))
    assert [tenant.name for tenant in first.tenants] == ["a"]
    told = await anext(aiter(aliases.WatchAliases(aliases_pb2.WatchAliasesRequest())))
    assert [alias.name for alias in told.aliases] == ["a"]
    await aliases.SetAlias(aliases_pb2.SetAliasRequest(alias="b", targets=[target]))  # mended


async def test_keys_are_unique_over_tenants_and_need_one(channel: grpc.aio.Channel) -> None:
    stub: Any = TenantServiceStub(channel)
    for name in ("a", "b"):
        await stub.PutTenant(tenants_pb2.PutTenantRequest(tenant=a_tenant(name)))

    def put(key_id: str, tenant: str, sha256: bytes) -> Any:
        key = tenants_pb2.TenantKey(key_id=key_id, tenant=tenant, sha256=sha256)
        return stub.PutKey(tenants_pb2.PutKeyRequest(key=key))

    await put("k1", "a", b"1" * 32)
    assert await refusal(put("k1", "b", b"2" * 32)) == ("ALREADY_EXISTS", "ALREADY_EXISTS")
    assert await refusal(put("k2", "b", b"1" * 32)) == ("ALREADY_EXISTS", "ALREADY_EXISTS")
    assert await refusal(put("k2", "c", b"2" * 32)) == ("NOT_FOUND", "TENANT_UNKNOWN")
    assert (await refusal(put("k2", "a", b"2" * 31)))[0] == "INVALID_ARGUMENT"
    endless = tenants_pb2.TenantKey(key_id="k3", tenant="a", sha256=b"3" * 32)
    endless.expire_time.seconds = 2**62
    call = stub.PutKey(tenants_pb2.PutKeyRequest(key=endless))
    assert (await refusal(call))[0] == "INVALID_ARGUMENT"
    await stub.DeleteKey(tenants_pb2.DeleteKeyRequest(key_id="k1"))
    again = stub.DeleteKey(tenants_pb2.DeleteKeyRequest(key_id="k1"))
    assert await refusal(again) == ("NOT_FOUND", "KEY_UNKNOWN")
    await put("k1", "b", b"1" * 32)


async def test_an_alias_is_set_rolled_back_and_watched(channel: grpc.aio.Channel) -> None:
    stub: Any = AliasServiceStub(channel)
    watched = stub.WatchAliases(aliases_pb2.WatchAliasesRequest())
    assert (await watched.read()).snapshot

    def targets(model: str) -> list[aliases_pb2.AliasTarget]:
        return [aliases_pb2.AliasTarget(model=model, weight=1)]

    for number in range(EARLIER_MAX + 3):
        request = aliases_pb2.SetAliasRequest(alias="x", targets=targets(f"m{number}"))
        alias = (await stub.SetAlias(request)).alias
    assert len(alias.earlier) == EARLIER_MAX
    back = (await stub.RollbackAlias(aliases_pb2.RollbackAliasRequest(alias="x"))).alias
    assert back.targets[0].model == f"m{EARLIER_MAX + 1}" and back.version > alias.version
    seen = await watched.read()
    while seen.aliases[0].version != back.version:
        seen = await watched.read()
    assert not seen.snapshot and seen.aliases[0] == back
    for _ in range(EARLIER_MAX - 1):
        await stub.RollbackAlias(aliases_pb2.RollbackAliasRequest(alias="x"))
    nothing = stub.RollbackAlias(aliases_pb2.RollbackAliasRequest(alias="x"))
    assert await refusal(nothing) == ("FAILED_PRECONDITION", "NOTHING_EARLIER")
    unknown = stub.RollbackAlias(aliases_pb2.RollbackAliasRequest(alias="y"))
    assert await refusal(unknown) == ("NOT_FOUND", "ALIAS_UNKNOWN")
    twice = aliases_pb2.SetAliasRequest(alias="x", targets=targets("m") * 2)
    assert (await refusal(stub.SetAlias(twice)))[0] == "INVALID_ARGUMENT"
    watched.cancel()


async def test_usage_comes_back_by_hour_and_model(channel: grpc.aio.Channel) -> None:
    stub: Any = UsageServiceStub(channel)
    record = usage_pb2.UsageRecord(
        begin_time=Timestamp(seconds=HOUR + 1800),
        model="m",
        requests={"finished": 2},
        prompt_tokens=10,
        cost=0.5,
    )
    request = usage_pb2.AppendUsageRequest(tenant="a", batch_id="b1", records=[record, record])
    assert not (await stub.AppendUsage(request)).repeated_batch
    assert (await stub.AppendUsage(request)).repeated_batch

    def query(tenant: str, seconds: int = 3600) -> Any:
        return stub.QueryUsage(
            usage_pb2.QueryUsageRequest(
                tenant=tenant,
                begin_time=Timestamp(seconds=HOUR),
                end_time=Timestamp(seconds=HOUR + seconds),
            )
        )

    (found,) = (await query("a")).records
    assert found.begin_time.seconds == HOUR and dict(found.requests) == {"finished": 4}
    assert (found.prompt_tokens, found.cost) == (20, 1.0)
    assert not (await query("b")).records
    assert (await refusal(query("a", 32 * 86_400)))[0] == "INVALID_ARGUMENT"
    record.cost = float("nan")
    bad = usage_pb2.AppendUsageRequest(tenant="a", batch_id="b2", records=[record])
    assert (await refusal(stub.AppendUsage(bad)))[0] == "INVALID_ARGUMENT"


async def test_another_tenants_decision_answers_like_an_unknown_one(
    channel: grpc.aio.Channel,
) -> None:
    stub: Any = DecisionServiceStub(channel)
    decision = decisions_pb2.Decision(request_id="r1", record=b"\x00why")
    put = decisions_pb2.PutDecisionsRequest(tenant="a", decisions=[decision])
    await stub.PutDecisions(put)

    def get(tenant: str, request_id: str) -> Any:
        return stub.GetDecision(
            decisions_pb2.GetDecisionRequest(tenant=tenant, request_id=request_id)
        )

    assert (await get("a", "r1")).decision == decision
    assert await refusal(get("b", "r1")) == await refusal(get("a", "r2"))
    decision.record = b"x" * 16_385
    too_long = decisions_pb2.PutDecisionsRequest(tenant="a", decisions=[decision])
    assert (await refusal(stub.PutDecisions(too_long)))[0] == "INVALID_ARGUMENT"


async def test_bad_exchanges_are_refused_by_field(channel: grpc.aio.Channel) -> None:
    stub: Any = QuotaServiceStub(channel)

    def exchange(holder: str = "h", **more: Any) -> Any:
        part = {"tenant": "a", "sequence": 1, "holder_ttl_ms": 3000, **more}
        return stub.Exchange(
            quota_pb2.ExchangeRequest(holder=holder, tenants=[quota_pb2.TenantExchange(**part)])
        )

    for bad in (
        {"holder": ""},
        {"holder": "h h"},
        {"tenant": "*"},
        {"sequence": 0},
        {"holder_ttl_ms": 0},
        {"lease_ms": 1001},
        {"overuse_tokens": 10**13},
        {"needs": [quota_pb2.QuotaNeed(tokens=1)] * 257},
    ):
        assert (await refusal(exchange(**bad)))[0] == "INVALID_ARGUMENT", bad
    assert (await exchange(sequence=5)).results[0].epoch > 0
    assert (await exchange(sequence=4)).results[0].error_reason == "EXCHANGE_STALE"
    twice = quota_pb2.TenantExchange(tenant="a", sequence=6, holder_ttl_ms=3000)
    both = quota_pb2.ExchangeRequest(holder="h", tenants=[twice, twice])
    assert (await refusal(stub.Exchange(both)))[0] == "INVALID_ARGUMENT"
