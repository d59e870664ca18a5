"""Tenants, keys, aliases, drains and tools, as operators change them: calls of the state service.

Stateless. What the state service refuses passes through with the field that is wrong, under the
name that the field has here. Nothing is kept: the watch brings every change to every scheduler.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import grpc.aio

from scheduler_svc.adapters.state_calls import CALL_TIMEOUT_S, answered
from sluice.errors import Code, SluiceError, invalid
from sluice.scheduler.v1 import admin_pb2
from sluice.state.v1 import (
    aliases_pb2,
    aliases_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    quota_pb2,
    tenants_pb2,
    tenants_pb2_grpc,
    tools_pb2,
    tools_pb2_grpc,
)
from sluice.timestamps import unix_seconds

T = TypeVar("T")

KEY_BYTES: Final = 24
KEY_ID_BYTES: Final = 6
LABEL_CHARS_MAX: Final = 128
_LIMITS: Final = ("requests_per_min", "tokens_per_min", "concurrent_requests", "tokens_per_day")
# Fields of the state service that have another name here.
_RENAMED: Final = {"tenant.limits": "tenant.quota", "key.tenant": "tenant", "key.label": "label"}


class StateAdmin:
    """See the module's docstring. Every method raises SluiceError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._tenants: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        self._aliases: Any = aliases_pb2_grpc.AliasServiceStub(channel)
        self._fleet: Any = fleet_pb2_grpc.FleetServiceStub(channel)
        self._tools: Any = tools_pb2_grpc.ToolServiceStub(channel)

    async def put_tenant(self, request: admin_pb2.PutTenantRequest) -> admin_pb2.PutTenantResponse:
        """Creates or changes a tenant as a whole."""
        message = tenants_pb2.PutTenantRequest(tenant=_stored(request.tenant))
        if request.HasField("expected_version"):
            message.expected_version = request.expected_version
        stored = await _call(self._tenants.PutTenant(message, timeout=CALL_TIMEOUT_S))
        return admin_pb2.PutTenantResponse(tenant=_shown(stored.tenant))

    async def list_tenants(self) -> admin_pb2.ListTenantsResponse:
        """All tenants and what may be shown of their keys."""
        request = tenants_pb2.ListTenantsRequest()
        found = await _call(self._tenants.ListTenants(request, timeout=CALL_TIMEOUT_S))
        return admin_pb2.ListTenantsResponse(
            tenants=[_shown(tenant) for tenant in found.tenants],
            keys=[_key(key) for key in found.keys],
        )

    async def delete_tenant(self, name: str) -> None:
        """Deletes a tenant and its keys."""
        request = tenants_pb2.DeleteTenantRequest(tenant=name)
        await _call(self._tenants.DeleteTenant(request, timeout=CALL_TIMEOUT_S))

    async def create_key(self, request: admin_pb2.CreateKeyRequest) -> admin_pb2.CreateKeyResponse:
        """Makes a key; only its hash leaves this process other than in the answer."""
        if len(request.label) > LABEL_CHARS_MAX:
            raise invalid("label", f"at most {LABEL_CHARS_MAX} characters")
        secret = f"sk-{request.tenant}-{secrets.token_urlsafe(KEY_BYTES)}"
        key = tenants_pb2.TenantKey(
            key_id=f"k-{secrets.token_hex(KEY_ID_BYTES)}",
            tenant=request.tenant,
            sha256=hashlib.sha256(secret.encode()).digest(),
            label=request.label,
        )
        key.create_time.GetCurrentTime()
        if request.HasField("expire_time"):
            if unix_seconds(request.expire_time, "expire_time") <= time.time():
                raise invalid("expire_time", "must be in the future")
            key.expire_time.CopyFrom(request.expire_time)
        await _call(
            self._tenants.PutKey(tenants_pb2.PutKeyRequest(key=key), timeout=CALL_TIMEOUT_S)
        )
        return admin_pb2.CreateKeyResponse(key_id=key.key_id, key=secret)

    async def revoke_key(self, key_id: str) -> None:
        """Deletes a key."""
        request = tenants_pb2.DeleteKeyRequest(key_id=key_id)
        await _call(self._tenants.DeleteKey(request, timeout=CALL_TIMEOUT_S))

    async def set_alias(
        self, request: admin_pb2.SetAliasRequest, configured: str | None
    ) -> admin_pb2.SetAliasResponse:
        """Points an alias. ``configured``: the model that the configuration gives it; stored first,
        so that the change can be taken back."""
        if configured is not None:
            base = aliases_pb2.SetAliasRequest(alias=request.alias, expected_version=0)
            base.targets.add(model=configured, weight=1)
            try:
                await _call(self._aliases.SetAlias(base, timeout=CALL_TIMEOUT_S))
            except SluiceError as error:
                if error.code is not Code.ABORTED:  # somebody was faster
                    raise
        message = aliases_pb2.SetAliasRequest(
            alias=request.alias,
            targets=[
                aliases_pb2.AliasTarget(model=target.model, weight=target.weight)
                for target in request.targets
            ],
        )
        done = await _call(self._aliases.SetAlias(message, timeout=CALL_TIMEOUT_S))
        return admin_pb2.SetAliasResponse(version=done.alias.version)

    async def rollback_alias(self, alias: str) -> admin_pb2.RollbackAliasResponse:
        """Takes the last change of an alias back."""
        request = aliases_pb2.RollbackAliasRequest(alias=alias)
        done = await _call(self._aliases.RollbackAlias(request, timeout=CALL_TIMEOUT_S))
        return admin_pb2.RollbackAliasResponse(
            targets=[
                admin_pb2.AliasTarget(model=target.model, weight=target.weight)
                for target in done.alias.targets
            ],
            version=done.alias.version,
        )

    async def delete_alias(self, alias: str) -> None:
        """Deletes an alias and its history."""
        request = aliases_pb2.DeleteAliasRequest(alias=alias)
        await _call(self._aliases.DeleteAlias(request, timeout=CALL_TIMEOUT_S))

    async def set_drain(self, instance: str, *, drained: bool) -> None:
        """Marks an instance for every scheduler."""
        request = fleet_pb2.SetDrainRequest(instance=instance, drained=drained)
        await _call(self._fleet.SetDrain(request, timeout=CALL_TIMEOUT_S))

    async def put_tool(self, request: admin_pb2.PutToolRequest) -> admin_pb2.PutToolResponse:
        """Creates or changes a tool of a tenant."""
        message = tools_pb2.PutToolRequest(tenant=request.tenant, tool=request.tool)
        done = await _call(self._tools.PutTool(message, timeout=CALL_TIMEOUT_S))
        return admin_pb2.PutToolResponse(version=done.version)

    async def delete_tool(self, tenant: str, name: str) -> None:
        """Deletes a tool of a tenant."""
        message = tools_pb2.DeleteToolRequest(tenant=tenant, name=name)
        await _call(self._tools.DeleteTool(message, timeout=CALL_TIMEOUT_S))

    async def list_tools(self, tenant: str) -> admin_pb2.ListTenantToolsResponse:
        """The tools that were registered for a tenant."""
        message = tools_pb2.ListToolsRequest(tenant=tenant)
        found = await _call(self._tools.ListTools(message, timeout=CALL_TIMEOUT_S))
        return admin_pb2.ListTenantToolsResponse(tools=found.tools)


async def _call(call: Awaitable[T]) -> T:
    return await answered(call, _RENAMED)


def _stored(tenant: admin_pb2.Tenant) -> tenants_pb2.Tenant:
    message = tenants_pb2.Tenant(
        name=tenant.name,
        ceiling=tenant.ceiling,
        default_class=tenant.default_class,
        models=tenant.models,
        agents=tenant.agents,
        sessions=tenant.sessions,
        tools=tenant.tools,
        quota_fail_open=tenant.quota_fail_open,
    )
    for name in _LIMITS:
        if tenant.quota.HasField(name):
            setattr(message.limits, name, getattr(tenant.quota, name))
    if tenant.quota.HasField("concurrent_runs"):
        message.concurrent_runs = tenant.quota.concurrent_runs
    if tenant.HasField("run_budget"):
        message.run_budget.CopyFrom(tenant.run_budget)
    return message


def _shown(tenant: tenants_pb2.Tenant) -> admin_pb2.Tenant:
    message = admin_pb2.Tenant(
        name=tenant.name,
        ceiling=tenant.ceiling,
        default_class=tenant.default_class,
        models=tenant.models,
        agents=tenant.agents,
        sessions=tenant.sessions,
        tools=tenant.tools,
        version=tenant.version,
        quota_fail_open=tenant.quota_fail_open,
    )
    limits: quota_pb2.QuotaLimits = tenant.limits
    for name in _LIMITS:
        if limits.HasField(name):
            setattr(message.quota, name, getattr(limits, name))
    if tenant.HasField("concurrent_runs"):
        message.quota.concurrent_runs = tenant.concurrent_runs
    if tenant.HasField("run_budget"):
        message.run_budget.CopyFrom(tenant.run_budget)
    return message


def _key(key: tenants_pb2.TenantKey) -> admin_pb2.TenantKey:
    shown = admin_pb2.TenantKey(key_id=key.key_id, tenant=key.tenant, label=key.label)
    if key.HasField("create_time"):
        shown.create_time.CopyFrom(key.create_time)
    if key.HasField("expire_time"):
        shown.expire_time.CopyFrom(key.expire_time)
    return shown
