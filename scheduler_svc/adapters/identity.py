"""Who calls the public API: the tenant of the key, the identifier, the class and the deadline."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, cast

import grpc

from scheduler_svc.adapters import translate
from scheduler_svc.adapters.serving import Caller, Serving
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.tenants import Tenants
from sluice.common.v1 import policy_pb2
from sluice.errors import SluiceError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Request(Protocol):
    """A request that says how it wants to be known and served."""

    @property
    def request_id(self) -> str:
        """Its identifier."""

    @property
    def priority_class(self) -> policy_pb2.PriorityClass.ValueType:
        """The class that it wants."""


class Identity:
    """See the module's docstring. Refusals are counted."""

    def __init__(self, tenants: Tenants, serving: Serving) -> None:
        self._tenants = tenants
        self._serving = serving

    def tenant(self, context: Context) -> Tenant:
        """The tenant of a call."""
        return self._tenants.tenant(header(context, "authorization"))

    def caller(self, request: Request, context: Context) -> Caller:
        """Who calls, for a request that is served or refused as one."""
        try:
            tenant = self._tenants.tenant(header(context, "authorization"))
            identifier = request_id(context, request.request_id)
            wanted = translate.priority_class(request.priority_class)
        except SluiceError as refusal:
            self._serving.refused(None, None, refusal)
            raise
        return Caller(tenant, identifier, tenant.class_for(wanted), remaining_s(context))


def request_id(context: Context, given: str = "") -> str:
    """The identifier under which a call is recorded: the field, the header, or a new one."""
    return translate.request_id(given, header(context, "x-request-id"))


def header(context: Context, name: str) -> str | None:
    """The text of a header; ``None`` without one."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def remaining_s(context: Context) -> float | None:
    """Seconds to the deadline that the caller set; ``None``: it set none."""
    return cast("float | None", context.time_remaining())
