"""The administration of a mesh, as a test uses it: through the edge, under the admin key."""

from __future__ import annotations

from typing import Any

import grpc

from sluice.channels import open_channel
from sluice.common.v1 import policy_pb2, sampling_pb2
from sluice.errors import SluiceError
from sluice.scheduler.v1 import admin_pb2, admin_pb2_grpc, generate_pb2
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh
from tests.hermetic.mesh_client import MeshClient, connected


class AdminClient:
    """One operator. Every method raises SluiceError."""

    def __init__(self, mesh: Mesh, target: str = "") -> None:
        self._channel = open_channel(target or mesh.target)
        self._stub: Any = admin_pb2_grpc.SchedulerAdminServiceStub(self._channel)
        self._connected = False
        self._metadata = (("authorization", f"Bearer {mesh.admin_key}"),)

    async def close(self) -> None:
        await self._channel.close()

    async def call(self, method: str, request: Any) -> Any:
        """A method by its name."""
        if not self._connected:
            await connected(self._channel)
            self._connected = True
        try:
            return await getattr(self._stub, method)(request, metadata=self._metadata, timeout=10)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def tenant(self, name: str, **fields: Any) -> admin_pb2.Tenant:
        """Creates or changes a tenant."""
        fields = {"ceiling": policy_pb2.PRIORITY_CLASS_CRITICAL, **fields}
        request = admin_pb2.PutTenantRequest(tenant=admin_pb2.Tenant(name=name, **fields))
        done: admin_pb2.PutTenantResponse = await self.call("PutTenant", request)
        return done.tenant

    async def key(self, tenant: str) -> admin_pb2.CreateKeyResponse:
        """Makes a key."""
        made: admin_pb2.CreateKeyResponse = await self.call(
            "CreateKey", admin_pb2.CreateKeyRequest(tenant=tenant)
        )
        return made

    async def names(self) -> set[str]:
        """The tenants that are stored."""
        listed = await self.call("ListTenants", admin_pb2.ListTenantsRequest())
        return {tenant.name for tenant in listed.tenants}


async def who(client: MeshClient, key: str) -> str:
    """Empty when a request under the key finishes, else the reason of its refusal."""
    metadata = (("authorization", f"Bearer {key}"),)
    sampling = sampling_pb2.SamplingParams(max_tokens=2)
    request = generate_pb2.GenerateTextRequest(prompt="Hello", sampling=sampling)
    try:
        await client.stub.GenerateText(request, metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return ""


async def refused(call: Any) -> SluiceError:
    """The typed error with which a call ends."""
    try:
        await call
    except SluiceError as error:
        return error
    raise AssertionError("it was not refused")
