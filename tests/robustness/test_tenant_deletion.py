"""A crash of the state service at every step of a tenant's deletion and of its name's next use.

Goal: wherever it dies, the name is refused until nothing is left of the old tenant, and then the
new one can use it. Method: the state service as a real process over Valkey, a database for each
point, killed when it passes the point; the client repeats what was not answered. Oracle: what the
new tenant reads. Seed: none. A point that is never passed fails.

Seen to fail on mutants: tenant_deletion_is_not_marked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc.aio
import pytest

from sluice import fault_points
from sluice.channels import ChannelLimits, open_channel
from sluice.common.v1 import policy_pb2
from sluice.errors import Code, SluiceError
from sluice.state.v1 import tenants_pb2, values_pb2
from sluice.state.v1.tenants_pb2_grpc import TenantServiceStub
from sluice.state.v1.values_pb2_grpc import KeyValueServiceStub
from sluice.status import from_rpc_error
from tests.robustness.state_process import StateProcess
from tests.valkey import ValkeyProcess, valkey

POINTS = sorted(name for name in fault_points.POINTS if name.startswith("tenants."))
TIMES = {"tenants.after_create": 2}  # the first is the old tenant's
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def store() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


class Life:
    """A state service that dies once and is started again."""

    def __init__(self, url: str, point: str) -> None:
        self.process = StateProcess(url, timeout_s=1.0)
        self.deaths = 0
        self.process.start(f"{point}:{TIMES.get(point, 1)}")
        self.channel = open_channel(self.process.address, limits=ChannelLimits(reconnect_max_s=0.2))
        self.tenants: Any = TenantServiceStub(self.channel)
        self.values: Any = KeyValueServiceStub(self.channel)

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.process.status is not None:
                assert self.process.status == fault_points.EXIT_STATUS
                self.deaths += 1
                self.process.start()

    async def answer(self, call: Callable[[], Awaitable[Any]], *reasons: str) -> SluiceError | None:
        """Calls until there is an answer: nothing, or a refusal that is not one of ``reasons``."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    await call()
                except grpc.aio.AioRpcError as error:
                    refusal = from_rpc_error(error)
                    if refusal.code is not Code.UNAVAILABLE and refusal.reason not in reasons:
                        return refusal
                else:
                    return None
                await asyncio.sleep(0.1)

    async def play(self) -> None:
        put = tenants_pb2.PutTenantRequest(
            tenant=tenants_pb2.Tenant(name="a", ceiling=policy_pb2.PRIORITY_CLASS_STANDARD)
        )
        secret = values_pb2.PutValueRequest(tenant="a", key="k", value=b"secret")
        secret.ttl.seconds = 600
        get = values_pb2.GetValueRequest(tenant="a", key="k")
        gone = tenants_pb2.DeleteTenantRequest(tenant="a")
        assert await self.answer(lambda: self.tenants.PutTenant(put)) is None
        assert await self.answer(lambda: self.values.PutValue(secret)) is None
        refusal = await self.answer(lambda: self.tenants.DeleteTenant(gone))
        # It may have been deleted by the call that was not answered.
        assert refusal is None or refusal.reason == "TENANT_UNKNOWN"
        again = await self.answer(lambda: self.tenants.PutTenant(put), "TENANT_BEING_DELETED")
        assert again is None
        missing = await self.answer(lambda: self.values.GetValue(get))
        assert missing is not None and missing.code is Code.NOT_FOUND
        # Where the service died in the creation, the fences open soon after.
        assert await self.answer(lambda: self.values.PutValue(secret), "TENANT_UNKNOWN") is None
        found = await self.values.GetValue(get, timeout=5.0)
        assert found.value == b"secret"
        listed = await self.tenants.ListTenants(tenants_pb2.ListTenantsRequest(), timeout=5.0)
        assert [one.name for one in listed.tenants] == ["a"]


async def test_a_name_is_free_when_nothing_is_left_wherever_the_service_dies(
    store: ValkeyProcess,
) -> None:
    """All at once: each waits 10 s for calls that began before the deletion."""

    async def live(number: int, point: str) -> None:
        life = Life(store.url.removesuffix("0") + str(number + 1), point)
        keeping = asyncio.create_task(life.keep())
        try:
            await life.play()
            assert life.deaths == 1, f"{point} is never passed"
        finally:
            keeping.cancel()
            await life.channel.close()
            life.process.kill()

    async with asyncio.TaskGroup() as group:
        for number, point in enumerate(POINTS):
            group.create_task(live(number, point))
