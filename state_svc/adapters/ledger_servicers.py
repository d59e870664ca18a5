"""``UsageService`` and ``DecisionService``: what was used, and why things went as they did."""

from __future__ import annotations

import math
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from sluice.errors import invalid, not_found
from sluice.quota.exchange import AMOUNT_MAX
from sluice.state.v1 import decisions_pb2, decisions_pb2_grpc, usage_pb2, usage_pb2_grpc
from state_svc.adapters.store_errors import store_errors
from state_svc.domain.names import check_model, check_request_id, check_tenant
from state_svc.ports import DecisionStore, UsageKey, UsageStore

RECORDS_MAX: Final = 256
RECORD_BYTES_MAX: Final = 16_384
OUTCOMES_MAX: Final = 32
QUERY_HOURS_MAX: Final = 31 * 24
HOUR_S: Final = 3600
_COUNTS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "agent_not_needed")
_SUMS: Final = ("cost", "gpu_seconds")
_OUTCOME: Final = "requests."


class UsageServicer(usage_pb2_grpc.UsageServiceServicer):
    """See the proto."""

    def __init__(self, store: UsageStore) -> None:
        self._store = store

    async def AppendUsage(
        self, request: usage_pb2.AppendUsageRequest, context: Any
    ) -> usage_pb2.AppendUsageResponse:
        """Adds usage."""
        check_tenant(request.tenant, "tenant")
        check_request_id(request.batch_id, "batch_id")
        if not 1 <= len(request.records) <= RECORDS_MAX:
            raise invalid("records", f"must be 1 to {RECORDS_MAX}")
        amounts: dict[UsageKey, dict[str, float]] = {}
        for number, record in enumerate(request.records):
            key, added = _read(record, f"records[{number}]")
            sums = amounts.setdefault(key, {})
            for name, amount in added.items():
                sums[name] = sums.get(name, 0.0) + amount
        with store_errors():
            fresh = await self._store.append(request.tenant, request.batch_id, amounts)
        return usage_pb2.AppendUsageResponse(repeated_batch=not fresh)

    async def QueryUsage(
        self, request: usage_pb2.QueryUsageRequest, context: Any
    ) -> usage_pb2.QueryUsageResponse:
        """Reads usage."""
        check_tenant(request.tenant, "tenant")
        begin = request.begin_time.seconds // HOUR_S
        end = math.ceil(request.end_time.seconds / HOUR_S)
        if not 0 <= end - begin <= QUERY_HOURS_MAX:
            raise invalid("end_time", f"must be at most {QUERY_HOURS_MAX} hours after begin_time")
        with store_errors():
            found = await self._store.query(request.tenant, begin, end, earlier=request.earlier)
        keys = sorted(found, key=lambda key: (key.hour, key.model))
        return usage_pb2.QueryUsageResponse(records=[_record(key, found[key]) for key in keys])


class DecisionServicer(decisions_pb2_grpc.DecisionServiceServicer):
    """See the proto."""

    def __init__(self, store: DecisionStore) -> None:
        self._store = store

    async def PutDecisions(
        self, request: decisions_pb2.PutDecisionsRequest, context: Any
    ) -> decisions_pb2.PutDecisionsResponse:
        """Keeps records."""
        check_tenant(request.tenant, "tenant")
        if not 1 <= len(request.decisions) <= RECORDS_MAX:
            raise invalid("decisions", f"must be 1 to {RECORDS_MAX}")
        for number, one in enumerate(request.decisions):
            check_request_id(one.request_id, f"decisions[{number}].request_id")
            if not 1 <= len(one.record) <= RECORD_BYTES_MAX:
                raise invalid(
                    f"decisions[{number}].record", f"must be 1 to {RECORD_BYTES_MAX} bytes"
                )
        with store_errors():
            await self._store.put(
                request.tenant, {one.request_id: one.record for one in request.decisions}
            )
        return decisions_pb2.PutDecisionsResponse()

    async def GetDecision(
        self, request: decisions_pb2.GetDecisionRequest, context: Any
    ) -> decisions_pb2.GetDecisionResponse:
        """Reads one record."""
        check_tenant(request.tenant, "tenant")
        check_request_id(request.request_id, "request_id")
        with store_errors():
            record = await self._store.get(request.tenant, request.request_id)
        if record is None:
            raise not_found("DECISION_UNKNOWN", "There is no record of such a request.")
        return decisions_pb2.GetDecisionResponse(
            decision=decisions_pb2.Decision(request_id=request.request_id, record=record)
        )


def _read(record: usage_pb2.UsageRecord, where: str) -> tuple[UsageKey, dict[str, float]]:
    check_model(record.model, f"{where}.model")
    if record.begin_time.seconds < HOUR_S:
        raise invalid(f"{where}.begin_time", "must be set")
    if len(record.requests) > OUTCOMES_MAX:
        raise invalid(f"{where}.requests", f"at most {OUTCOMES_MAX} outcomes")
    added: dict[str, float] = {name: getattr(record, name) for name in (*_COUNTS, *_SUMS)}
    for outcome, count in record.requests.items():
        check_request_id(outcome, f"{where}.requests")
        added[_OUTCOME + outcome] = count
    for name, amount in added.items():
        if not 0 <= amount <= AMOUNT_MAX:  # also refuses NaN
            raise invalid(f"{where}.{name}", f"must be 0 to {AMOUNT_MAX}")
    key = UsageKey(record.begin_time.seconds // HOUR_S, record.model)
    return key, {name: amount for name, amount in added.items() if amount}


def _record(key: UsageKey, sums: Any) -> usage_pb2.UsageRecord:
    record = usage_pb2.UsageRecord(begin_time=Timestamp(seconds=key.hour * HOUR_S), model=key.model)
    for name, amount in sums.items():
        if name.startswith(_OUTCOME):
            record.requests[name.removeprefix(_OUTCOME)] = round(amount)
        elif name in _COUNTS:
            setattr(record, name, round(amount))
        elif name in _SUMS:
            setattr(record, name, amount)
    return record
