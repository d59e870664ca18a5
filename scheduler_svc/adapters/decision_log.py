"""Keeps decision records: a ring in memory, and batches for the state service.

The ring holds the newest records, bounded in bytes. What is put also waits to be sent, bounded in
records; beyond that it is dropped and counted, since a request never waits for its record. One
batch is under way at a time. A batch that fails is dropped and counted too: the store is volatile,
and what stands in line behind it is newer. One event loop, no locks.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict, deque
from typing import Any, Final

import grpc.aio

from scheduler_svc.adapters.decision_records import RECORD_BYTES_MAX
from sluice import logs
from sluice import telemetry_names as names
from sluice.errors import Code, SluiceError, not_found, unavailable
from sluice.scheduler.v1 import records_pb2
from sluice.state.v1 import decisions_pb2
from sluice.state.v1.decisions_pb2_grpc import DecisionServiceStub
from sluice.status import from_rpc_error
from sluice.telemetry import Telemetry

WAITING_MAX: Final = 8_192
BATCH_RECORDS_MAX: Final = 256
BATCH_BYTES_MAX: Final = 1 << 20
SEND_INTERVAL_S: Final = 0.5
"""The longest that a record waits for others that go with it."""

CALL_LIMIT_S: Final = 2.0
ENTRY_BYTES: Final = 200
"""What an entry of the ring costs beside its record."""

_STORABLE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

log = logs.get(__name__)
_Key = tuple[str, str]


class DecisionLog:
    """See the module's docstring. ``stub`` ``None``: no state service, the ring is all there is."""

    def __init__(self, ring_bytes: int, stub: Any | None = None) -> None:
        self.dropped = 0  # records that were not sent: too many waited, or their call failed
        self.kept = 0
        self.failures = 0  # calls that failed
        self._ring_bytes = ring_bytes
        self._stub = stub
        self._ring: OrderedDict[_Key, bytes] = OrderedDict()
        self._bytes = 0
        self._waiting: deque[tuple[_Key, bytes]] = deque()

    @classmethod
    def over(cls, channel: grpc.aio.Channel | None, ring_bytes: int) -> DecisionLog:
        """With a channel to the state service, if there is one."""
        return cls(ring_bytes, None if channel is None else DecisionServiceStub(channel))

    def export(self, telemetry: Telemetry) -> None:
        """Exports the counts."""
        telemetry.counter(names.DECISIONS_KEPT, lambda: self.kept)
        telemetry.counter(names.DECISIONS_DROPPED, lambda: self.dropped)
        telemetry.gauge(names.DECISIONS_BYTES, lambda: self._bytes)

    @property
    def ring_bytes(self) -> int:
        """What the ring holds."""
        return self._bytes

    @property
    def waiting(self) -> int:
        """Records that wait to be sent."""
        return len(self._waiting)

    def put(self, record: records_pb2.DecisionRecord) -> None:
        """Keeps a record; an older one of the same request is replaced."""
        key = record.tenant, record.request_id
        data = record.SerializeToString()
        assert len(data) <= RECORD_BYTES_MAX
        self.kept += 1
        self._forget(key)
        self._ring[key] = data
        self._bytes += len(data) + ENTRY_BYTES
        while self._bytes > self._ring_bytes and self._ring:
            self._forget(next(iter(self._ring)))
        if self._stub is None:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append((key, data))

    def _forget(self, key: _Key) -> None:
        data = self._ring.pop(key, None)
        if data is not None:
            self._bytes -= len(data) + ENTRY_BYTES

    async def get(self, tenant: str, request_id: str) -> records_pb2.DecisionRecord:
        """The record of a tenant's request. NOT_FOUND when there is none, or it is another
        tenant's; UNAVAILABLE when it is not here and the state service does not answer."""
        data = self._ring.get((tenant, request_id))
        if data is None:
            data = await self._stored(tenant, request_id)
        return records_pb2.DecisionRecord.FromString(data)

    async def _stored(self, tenant: str, request_id: str) -> bytes:
        if self._stub is None:
            raise _unknown()
        request = decisions_pb2.GetDecisionRequest(tenant=tenant, request_id=storable(request_id))
        try:
            response = await self._stub.GetDecision(request, timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            if error.code is Code.NOT_FOUND:
                raise _unknown() from None
            raise unavailable(
                "DECISIONS_UNREACHABLE", "decision records cannot be read now", 1.0
            ) from failure
        record: bytes = response.decision.record
        return record

    async def run(self) -> None:
        """Sends what gathers, until cancelled."""
        while True:
            await asyncio.sleep(SEND_INTERVAL_S)
            while self._waiting and await self._send_batch():
                pass

    async def drain(self, within_s: float) -> None:
        """For the end of the process: sends what waits, as long as that takes no longer."""
        try:
            async with asyncio.timeout(within_s):
                while self._waiting and self._stub is not None:
                    await self._send_batch()
        except TimeoutError:
            self.dropped += len(self._waiting)
            self._waiting.clear()

    async def _send_batch(self) -> bool:
        """Sends the first that wait, a call per tenant; False when a call failed."""
        batches: dict[str, decisions_pb2.PutDecisionsRequest] = {}
        count = size = 0
        while self._waiting and count < BATCH_RECORDS_MAX and size < BATCH_BYTES_MAX:
            (tenant, request_id), data = self._waiting.popleft()
            batch = batches.setdefault(tenant, decisions_pb2.PutDecisionsRequest(tenant=tenant))
            batch.decisions.add(request_id=storable(request_id), record=data)
            count += 1
            size += len(data)
        assert self._stub is not None
        failures = self.failures
        for batch in batches.values():
            try:
                await self._stub.PutDecisions(batch, timeout=CALL_LIMIT_S)
            except grpc.aio.AioRpcError:
                if not self.failures:
                    log.warning("decision records cannot be kept; further failures are counted")
                self.failures += 1
                self.dropped += len(batch.decisions)
        return failures == self.failures


def storable(request_id: str) -> str:
    """The request's name in the store, which takes fewer characters than a client may use."""
    if _STORABLE.fullmatch(request_id):
        return request_id
    return "sha256:" + hashlib.sha256(request_id.encode()).hexdigest()


def _unknown() -> SluiceError:
    return not_found(
        "DECISION_UNKNOWN",
        "no decision record of such a request is kept; of those that went well only a sample is",
    )
