"""Usage of tenants, gathered and told to the state service.

Every request that ended is added at once to sums per tenant, model and hour (about 2 µs; nothing
waits). A background task sends the sums once a second, one call per tenant, each under an id by
which the service adds it once however often it is repeated. Orderly stop: :meth:`UsageLog.drain`
sends the rest. A crash loses at most what ended in the last second and what was not answered yet.
While the service does not answer, sums grow: they are bounded by tenants, models and hours, and
past ``SUMS_MAX`` of them what ends is counted as lost.

One event loop; no locks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from scheduler_svc.adapters.quota_keeper import Consumption
from scheduler_svc.domain.model import Outcome, Ticket
from sluice import logs
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import records_pb2
from sluice.state.v1 import usage_pb2
from sluice.state.v1.usage_pb2_grpc import UsageServiceStub
from sluice.status import from_rpc_error

SEND_INTERVAL_S: Final = 1.0
CALL_LIMIT_S: Final = 2.0
CALLS_MAX: Final = 8
RECORDS_MAX: Final = 256  # of one call, by the service's contract
SUMS_MAX: Final = 20_000
HOUR_S: Final = 3600

log = logs.get(__name__)

_Key = tuple[str, int]  # model, hour


@dataclass(slots=True)
class _Sums:
    outcomes: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    engine_s: float = 0.0

    def record(self, key: _Key) -> usage_pb2.UsageRecord:
        """As a message."""
        model, hour = key
        return usage_pb2.UsageRecord(
            begin_time=Timestamp(seconds=hour * HOUR_S),
            model=model,
            requests=self.outcomes,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.output_tokens,
            cost=self.cost,
            gpu_seconds=self.engine_s,
        )


class UsageLog:
    """See the module's docstring. ``stub`` ``None``: no state service, nothing is kept."""

    def __init__(
        self, writer: str, stub: Any | None, clock: Callable[[], float] = time.time
    ) -> None:
        """``writer`` names this process's life; ``clock`` is Unix time, for the hour."""
        self.lost = 0  # requests whose usage was not kept
        self.failures = 0  # calls that failed
        self._writer = writer
        self._stub = stub
        self._clock = clock
        self._sums: dict[str, dict[_Key, _Sums]] = {}
        self._count = 0
        self._sending: dict[str, usage_pb2.AppendUsageRequest] = {}
        self._batches = 0

    @classmethod
    def over(cls, channel: grpc.aio.Channel | None, writer: str) -> UsageLog:
        """With a channel to the state service, if there is one."""
        return cls(writer, None if channel is None else UsageServiceStub(channel))

    @property
    def waiting(self) -> int:
        """Sums that are not told yet."""
        return self._count + len(self._sending)

    def ended(
        self,
        ticket: Ticket,
        outcome: Outcome,
        used: Consumption,
        cost: float = 0.0,
        engine_s: float = 0.0,
    ) -> None:
        """A request is over."""
        sums = self._sums_of(ticket.tenant, ticket.model)
        if sums is None:
            return
        name = outcome.value
        sums.outcomes[name] = sums.outcomes.get(name, 0) + 1
        sums.prompt_tokens += used.prompt_tokens
        sums.cached_tokens += used.cached_tokens
        sums.output_tokens += used.output_tokens
        sums.cost += cost
        sums.engine_s += engine_s

    def _sums_of(self, tenant: str, model: str) -> _Sums | None:
        """Where to add; ``None``: nowhere, counted as lost if there should be a place."""
        if self._stub is None:
            return None
        of_tenant = self._sums.setdefault(tenant, {})
        key = (model, int(self._clock()) // HOUR_S)
        sums = of_tenant.get(key)
        if sums is None:
            if self._count >= SUMS_MAX:
                self.lost += 1
                return None
            self._count += 1
            sums = of_tenant[key] = _Sums()
        return sums

    async def query(
        self, tenant: str, begin_s: float, end_s: float
    ) -> list[records_pb2.UsageRecord]:
        """What a tenant used in the hours that meet [begin, end), Unix times; by hour, then model.
        Raises FAILED_PRECONDITION without a state service, else what that says."""
        if self._stub is None:
            raise SluiceError(
                Code.FAILED_PRECONDITION, "NO_STATE_SERVICE", "this mesh keeps no usage"
            )
        request = usage_pb2.QueryUsageRequest(
            tenant=tenant,
            begin_time=Timestamp(seconds=int(begin_s)),
            end_time=Timestamp(seconds=math.ceil(end_s)),
        )
        try:
            response = await self._stub.QueryUsage(request, timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        # The two messages have the same fields, by number.
        return [
            records_pb2.UsageRecord.FromString(record.SerializeToString())
            for record in response.records
        ]

    async def run(self) -> None:
        """Sends what was gathered, until cancelled."""
        while True:
            await asyncio.sleep(SEND_INTERVAL_S)
            await self.send()

    async def send(self) -> None:
        """Tells everything once; what fails stays for the next time."""
        tenants = sorted(self._sums.keys() | self._sending.keys())
        for begin in range(0, len(tenants), CALLS_MAX):
            await asyncio.gather(*map(self._tell, tenants[begin : begin + CALLS_MAX]))

    async def drain(self, within_s: float) -> bool:
        """For the end of the process, after its last request and after :meth:`run`. Returns whether
        everything was told."""
        try:
            async with asyncio.timeout(within_s):
                while self.waiting:
                    failures = self.failures
                    await self.send()
                    if self.failures > failures:
                        await asyncio.sleep(0.1)
        except TimeoutError:
            log.error("usage was not told", sums=self.waiting)
            return False
        return True

    async def _tell(self, tenant: str) -> None:
        request = self._sending.get(tenant) or self._next(tenant)
        if request is None:
            return
        assert self._stub is not None
        self._sending[tenant] = request
        try:
            await self._stub.AppendUsage(request, timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            self.failures += 1
            failure = from_rpc_error(error)
            if failure.code is not Code.INVALID_ARGUMENT:
                return  # repeated under its id until it is answered: it may have been added
            log.error("usage was refused", tenant=tenant, problem=failure.message)
            self.lost += sum(sum(record.requests.values()) for record in request.records)
        if self._sending.get(tenant) is request:
            del self._sending[tenant]

    def _next(self, tenant: str) -> usage_pb2.AppendUsageRequest | None:
        of_tenant = self._sums.pop(tenant, None)
        if not of_tenant:
            return None
        keys = list(of_tenant)[:RECORDS_MAX]
        records = [of_tenant.pop(key).record(key) for key in keys]
        if of_tenant:
            self._sums[tenant] = of_tenant
        self._count -= len(keys)
        self._batches += 1
        return usage_pb2.AppendUsageRequest(
            tenant=tenant, batch_id=f"{self._writer}:{self._batches}", records=records
        )
