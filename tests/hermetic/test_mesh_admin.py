"""The administration service at the edge, of a mesh without a state service.

Goal: only an admin key gets anywhere, whatever the method; without a state service its methods say
what to set. Method: every method of the descriptor, under a tenant's key, an unknown one and none.
Oracle: code and reason. Seed: none.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import message_factory

from sluice.errors import Code
from sluice.scheduler.v1 import admin_pb2
from sluice.status import from_rpc_error
from tests.hermetic.admin_client import AdminClient, refused
from tests.hermetic.mesh import Mesh

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["SchedulerAdminService"]
STORED = (
    *("PutTenant", "ListTenants", "DeleteTenant", "CreateKey", "RevokeKey"),
    *("SetAlias", "DeleteAlias", "PutTool", "DeleteTool", "ListTenantTools"),
)


def outcome(mesh: Mesh, method: str, key: str) -> tuple[str, str]:
    """Code and reason of a call."""
    found = SERVICE.methods_by_name[method]
    kind = message_factory.GetMessageClass(found.input_type)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(mesh.target) as channel:
        make: Any = channel.unary_stream if found.server_streaming else channel.unary_unary
        call = make(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=kind.SerializeToString,
            response_deserializer=bytes,
        )
        try:
            answer = call(kind(), metadata=metadata, timeout=10)
            if found.server_streaming:
                next(answer)
                answer.cancel()
        except grpc.RpcError as error:
            typed = from_rpc_error(error)  # type: ignore[arg-type]
            return typed.code.name, typed.reason
    return "OK", ""


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_only_an_admin_key_gets_anywhere(shared_mesh: Mesh, method: str) -> None:
    wrong = {
        shared_mesh.api_key: ("PERMISSION_DENIED", "ADMIN_ONLY"),
        "unknown": ("UNAUTHENTICATED", "KEY_UNKNOWN"),
        "": ("UNAUTHENTICATED", "KEY_MISSING"),
    }
    for key, expected in wrong.items():
        assert outcome(shared_mesh, method, key) == expected


@pytest.mark.parametrize("method", STORED)
def test_without_a_state_service_a_change_says_what_to_set(shared_mesh: Mesh, method: str) -> None:
    expected = ("FAILED_PRECONDITION", "STATE_NOT_CONFIGURED")
    assert outcome(shared_mesh, method, shared_mesh.admin_key) == expected


async def test_the_configurations_aliases_are_listed(shared_mesh: Mesh) -> None:
    admin = AdminClient(shared_mesh)
    listed = await admin.call("ListAliases", admin_pb2.ListAliasesRequest())
    (alias,) = listed.aliases
    assert (alias.name, alias.version) == ("fast", 0)
    assert [(one.model, one.weight) for one in alias.targets] == [("sim", 1)]
    error = await refused(
        admin.call("DrainInstance", admin_pb2.DrainInstanceRequest(instance="no", drain=True))
    )
    assert (error.code, error.reason) == (Code.NOT_FOUND, "INSTANCE_UNKNOWN")
    await admin.close()
