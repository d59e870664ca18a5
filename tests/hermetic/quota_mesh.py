"""What tests of quotas ask of a mesh with a state service."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.common.v1 import policy_pb2
from sluice.scheduler.v1 import generate_pb2, records_pb2, scheduler_pb2_grpc
from sluice.state.v1 import quota_pb2, quota_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from tests.hermetic.mesh import Mesh

_numbers = itertools.count(1)


@dataclass(frozen=True)
class TestTenant:
    """A tenant of one test."""

    name: str
    key: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What its client sends."""
        return (("authorization", f"Bearer {self.key}"),)


def tenant(mesh: Mesh, *, fail_open: bool = False, **limits: int) -> TestTenant:
    """Makes a tenant with these limits and waits until every scheduler knows it."""
    number = next(_numbers)
    made = TestTenant(f"t-{number}", f"key-of-test-{number}")
    stub: Any = tenants_pb2_grpc.TenantServiceStub(mesh.channel("state-0"))
    record = tenants_pb2.Tenant(
        name=made.name,
        ceiling=policy_pb2.PRIORITY_CLASS_CRITICAL,
        limits=quota_pb2.QuotaLimits(**limits),
        quota_fail_open=fail_open,
    )
    stub.PutTenant(tenants_pb2.PutTenantRequest(tenant=record), timeout=5)
    key = tenants_pb2.TenantKey(
        key_id=made.name, tenant=made.name, sha256=hashlib.sha256(made.key.encode()).digest()
    )
    stub.PutKey(tenants_pb2.PutKeyRequest(key=key), timeout=5)
    for name in mesh.schedulers:
        mesh.until(partial(knows, mesh, name, made), f"{name} knows the tenant")
    return made


def knows(mesh: Mesh, scheduler: str, who: TestTenant) -> bool:
    """Whether a scheduler knows the tenant's key."""
    stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(mesh.channel(scheduler))
    try:
        stub.ListModels(generate_pb2.ListModelsRequest(), metadata=who.metadata, timeout=2)
    except grpc.RpcError:
        return False
    return True


def use(mesh: Mesh, who: TestTenant) -> quota_pb2.GetQuotaUseResponse:
    """What is reserved of the tenant's quotas now, by the state service."""
    stub: Any = quota_pb2_grpc.QuotaServiceStub(mesh.channel("state-0"))
    answer: quota_pb2.GetQuotaUseResponse = stub.GetQuotaUse(
        quota_pb2.GetQuotaUseRequest(tenant=who.name), timeout=5
    )
    return answer


def usage(mesh: Mesh, who: TestTenant) -> records_pb2.UsageRecord:
    """What the tenant used today, over hours and models, as it is told itself."""
    stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(mesh.channel(mesh.schedulers[0]))
    answer = stub.GetUsage(records_pb2.GetUsageRequest(), metadata=who.metadata, timeout=5)
    total = records_pb2.UsageRecord(begin_time=Timestamp())
    for record in answer.records:
        total.prompt_tokens += record.prompt_tokens
        total.completion_tokens += record.completion_tokens
        total.cost += record.cost
        total.gpu_seconds += record.gpu_seconds
        for outcome, count in record.requests.items():
            total.requests[outcome] += count
    return total
