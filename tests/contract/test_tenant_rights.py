"""What an agent service knows of its tenants' tools, from the state service over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from agent_svc.adapters.tenant_rights import TenantRights
from sluice.channels import open_channel
from sluice.common.v1 import policy_pb2
from sluice.server import Health, MeshServer
from sluice.state.v1 import tenants_pb2
from sluice.state.v1.tenants_pb2_grpc import (
    TenantServiceStub,
    add_TenantServiceServicer_to_server,
)
from state_svc.adapters.memory_stores import MemoryRegistry
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.tenant_servicer import TenantServicer

WAIT_S = 10.0


@asynccontextmanager
async def state(registry: MemoryRegistry, bind: str) -> AsyncIterator[str]:
    """A state service that knows tenants; its address."""
    watch = RegistryWatch(registry)
    server = MeshServer("state", [bind], Health())
    add_TenantServiceServicer_to_server(TenantServicer(registry, watch), server.grpc)
    await server.start()
    watching = asyncio.create_task(watch.run())
    try:
        yield f"127.0.0.1:{server.ports[0]}"
    finally:
        watch.close()
        watching.cancel()
        await server.stop(0)


@asynccontextmanager
async def rights(channel: grpc.aio.Channel) -> AsyncIterator[TenantRights]:
    """What an agent service knows, as long as it follows."""
    known = TenantRights(channel)
    following = asyncio.create_task(known.run())
    try:
        yield known
    finally:
        following.cancel()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


async def put(channel: grpc.aio.Channel, name: str, **fields: Any) -> None:
    stub: Any = TenantServiceStub(channel)
    ceiling = policy_pb2.PRIORITY_CLASS_INTERACTIVE
    tenant = tenants_pb2.Tenant(name=name, ceiling=ceiling, **fields)
    request = tenants_pb2.PutTenantRequest(tenant=tenant)
    await stub.PutTenant(request, timeout=WAIT_S, wait_for_ready=True)


async def test_a_tenants_list_is_followed_through_changes_and_restarts() -> None:
    """Oracle: what was put last. A tenant without the right to agents has no tools; one that is
    gone or was never there has none; before the first word nothing is known."""
    registry = MemoryRegistry()
    async with state(registry, "127.0.0.1:0") as target:
        channel = open_channel(target)
        await put(channel, "a", agents=True, tools=["search", "mail"])
        await put(channel, "b", agents=False, tools=["search"])
        async with rights(channel) as known:
            assert known.tools("a") is None
            await until(lambda: known.tools("a") == {"search", "mail"})
            assert known.tools("b") == set()
            assert known.tools("nobody") == set()
            await put(channel, "a", agents=True, tools=["search"])
            await until(lambda: known.tools("a") == {"search"})
            stub: Any = TenantServiceStub(channel)
            await stub.DeleteTenant(tenants_pb2.DeleteTenantRequest(tenant="a"))
            await until(lambda: known.tools("a") == set())
        await channel.close()


async def test_a_tenant_that_is_made_again_has_another_version() -> None:
    registry = MemoryRegistry()
    async with state(registry, "127.0.0.1:0") as target:
        channel = open_channel(target)
        async with rights(channel) as known:
            assert known.version("a") == 0
            await put(channel, "a", agents=True)
            await until(lambda: known.version("a") > 0)
            first = known.version("a")
            stub: Any = TenantServiceStub(channel)
            await stub.DeleteTenant(tenants_pb2.DeleteTenantRequest(tenant="a"))
            await until(lambda: known.version("a") == 0)
            _, marks = await registry.deletions()
            assert await registry.mark("a", marks["a"], None)  # what it stored is gone
            await put(channel, "a", agents=True)
            await until(lambda: known.version("a") > first)
        await channel.close()


async def test_what_was_last_said_stays_while_the_state_service_is_away() -> None:
    registry = MemoryRegistry()
    async with state(registry, "127.0.0.1:0") as target:
        channel = open_channel(target)
        await put(channel, "a", agents=True, tools=["search"])
        following = rights(channel)
        known = await following.__aenter__()
        await until(lambda: known.tools("a") == {"search"})
    await asyncio.sleep(0.1)
    assert known.tools("a") == {"search"}
    async with state(registry, target):
        await put(channel, "a", agents=True, tools=["mail"])
        await until(lambda: known.tools("a") == {"mail"})
    await following.__aexit__(None, None, None)
    await channel.close()
