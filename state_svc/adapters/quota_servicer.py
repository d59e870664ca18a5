"""``QuotaService``: checks what comes in and hands it to the store. Stateless."""

from __future__ import annotations

import re
from typing import Any, Final

from sluice.errors import invalid
from sluice.quota.exchange import TENANTS_MAX, Answer, StaleExchangeError
from sluice.quota.wire import answer_message, read_exchange
from sluice.state.v1 import quota_pb2, quota_pb2_grpc
from state_svc.adapters.store_errors import store_unavailable
from state_svc.domain.names import check_tenant
from state_svc.domain.quota_book import TooManyHoldersError
from state_svc.ports import QuotaStore, StoreUnavailableError

_HOLDER: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,96}")


class QuotaServicer(quota_pb2_grpc.QuotaServiceServicer):
    """See the proto."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store

    async def Exchange(
        self, request: quota_pb2.ExchangeRequest, context: Any
    ) -> quota_pb2.ExchangeResponse:
        """Carries out exchanges, each by itself."""
        if not _HOLDER.fullmatch(request.holder):
            raise invalid("holder", f"must match {_HOLDER.pattern}")
        if len(request.tenants) > TENANTS_MAX:
            raise invalid("tenants", f"at most {TENANTS_MAX}")
        names = [part.tenant for part in request.tenants]
        if len(set(names)) < len(names):
            raise invalid("tenants", "a tenant occurs twice")
        parts = []
        for number, part in enumerate(request.tenants):
            check_tenant(part.tenant, f"tenants[{number}].tenant")
            parts.append((part.tenant, read_exchange(request.holder, part, f"tenants[{number}]")))
        answers = await self._store.exchange(parts)
        if answers and all(isinstance(answer, StoreUnavailableError) for answer in answers):
            raise store_unavailable()
        return quota_pb2.ExchangeResponse(
            results=[_result(name, answer) for name, answer in zip(names, answers, strict=True)]
        )

    async def GetQuotaUse(
        self, request: quota_pb2.GetQuotaUseRequest, context: Any
    ) -> quota_pb2.GetQuotaUseResponse:
        """Reads what is reserved now."""
        check_tenant(request.tenant, "tenant")
        try:
            use = await self._store.use(request.tenant)
        except StoreUnavailableError as error:
            raise store_unavailable() from error
        return quota_pb2.GetQuotaUseResponse(
            requests=use.requests,
            tokens=max(use.tokens, 0),
            slots=use.slots,
            day_tokens=max(use.day_tokens, 0),
            holders=use.holders,
        )


def _result(tenant: str, answer: Answer | Exception) -> quota_pb2.TenantExchangeResult:
    if isinstance(answer, Answer):
        return answer_message(tenant, answer)
    if isinstance(answer, StaleExchangeError):
        reason = "EXCHANGE_STALE"
    elif isinstance(answer, TooManyHoldersError):
        reason = "TOO_MANY_HOLDERS"
    elif isinstance(answer, StoreUnavailableError):
        reason = "STORE_UNAVAILABLE"
    else:
        raise answer
    return quota_pb2.TenantExchangeResult(tenant=tenant, error_reason=reason)
