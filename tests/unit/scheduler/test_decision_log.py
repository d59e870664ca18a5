"""The ring of decision records and its batches, against a scripted store in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from scheduler_svc.adapters.decision_log import (
    BATCH_RECORDS_MAX,
    ENTRY_BYTES,
    WAITING_MAX,
    DecisionLog,
    storable,
)
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1.records_pb2 import DecisionRecord
from sluice.state.v1 import decisions_pb2

Run = Callable[[Coroutine[object, object, None]], None]
MIB = 1 << 20


class Store:
    """Keeps what it is sent; fails while told so."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}
        self.batches: list[int] = []
        self.code: grpc.StatusCode | None = None

    def _fail(self) -> None:
        if self.code is not None:
            raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def PutDecisions(self, request: Any, timeout: float) -> Any:
        self._fail()
        assert 1 <= len(request.decisions) <= 256
        self.batches.append(len(request.decisions))
        for one in request.decisions:
            self.kept[request.tenant, one.request_id] = one.record
        return decisions_pb2.PutDecisionsResponse()

    async def GetDecision(self, request: Any, timeout: float) -> Any:
        self._fail()
        record = self.kept.get((request.tenant, request.request_id))
        if record is None:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata()
            )
        return decisions_pb2.GetDecisionResponse(
            decision=decisions_pb2.Decision(request_id=request.request_id, record=record)
        )


def a_record(request_id: str, tenant: str = "t", size: int = 0) -> DecisionRecord:
    return DecisionRecord(request_id=request_id, tenant=tenant, model="m" * size)


async def reason_of(call: Coroutine[Any, Any, Any]) -> tuple[Code, str]:
    with pytest.raises(SluiceError) as caught:
        await call
    return caught.value.code, caught.value.reason


def test_the_ring_is_bounded_in_bytes_and_the_oldest_go_first(run_virtual: Run) -> None:
    async def body() -> None:
        log = DecisionLog(10 * (1_000 + ENTRY_BYTES + 20))
        for number in range(1_000):
            log.put(a_record(f"r{number}", size=1_000))
            assert log.ring_bytes <= 10 * (1_000 + ENTRY_BYTES + 20)
        assert (await log.get("t", "r999")).request_id == "r999"
        assert await reason_of(log.get("t", "r0")) == (Code.NOT_FOUND, "DECISION_UNKNOWN")
        log.put(a_record("r999"))
        assert (await log.get("t", "r999")).model == "", "the last one of a request counts"

    run_virtual(body())


def test_another_tenants_record_is_as_unknown_as_none(run_virtual: Run) -> None:
    async def body() -> None:
        store = Store()
        log = DecisionLog(MIB, store)
        log.put(a_record("r", "theirs"))
        store.kept["theirs", "old"] = a_record("old", "theirs").SerializeToString()
        unknown = await reason_of(log.get("t", "never"))
        assert unknown == (Code.NOT_FOUND, "DECISION_UNKNOWN")
        assert await reason_of(log.get("t", "r")) == unknown
        assert await reason_of(log.get("t", "old")) == unknown
        assert (await log.get("theirs", "old")).request_id == "old"

    run_virtual(body())


def test_records_leave_in_batches_by_tenant_and_are_found_where_the_ring_has_lost_them(
    run_virtual: Run,
) -> None:
    async def body() -> None:
        store = Store()
        log = DecisionLog(2 * (ENTRY_BYTES + 40), store)
        sending = asyncio.create_task(log.run())
        for number in range(600):
            log.put(a_record(f"r/{number}", "ab"[number % 2]))
        assert not store.batches, "nobody waits for the store"
        await asyncio.sleep(1.0)
        assert sum(store.batches) == 600
        assert max(store.batches) <= BATCH_RECORDS_MAX
        assert len(store.batches) <= 6
        assert log.waiting == log.dropped == 0
        assert (await log.get("a", "r/0")).request_id == "r/0"
        sending.cancel()

    run_virtual(body())


def test_a_store_that_fails_loses_records_that_are_counted_and_nothing_else(
    run_virtual: Run,
) -> None:
    async def body() -> None:
        store = Store()
        log = DecisionLog(MIB, store)
        sending = asyncio.create_task(log.run())
        store.code = grpc.StatusCode.UNAVAILABLE
        log.put(a_record("lost"))
        await asyncio.sleep(1.0)
        assert (log.dropped, log.failures) == (1, 1)
        assert (await log.get("t", "lost")).request_id == "lost", "the ring has it"
        assert await reason_of(log.get("t", "other")) == (
            Code.UNAVAILABLE,
            "DECISIONS_UNREACHABLE",
        )
        store.code = None
        log.put(a_record("kept"))
        await asyncio.sleep(1.0)
        assert list(store.kept) == [("t", "kept")]
        sending.cancel()

    run_virtual(body())


def test_what_waits_for_the_store_is_bounded(run_virtual: Run) -> None:
    async def body() -> None:
        log = DecisionLog(MIB, Store())
        for number in range(WAITING_MAX + 5):
            log.put(a_record(str(number)))
        assert (log.waiting, log.dropped) == (WAITING_MAX, 5)
        await log.drain(1.0)
        assert (log.waiting, log.dropped) == (0, 5)

    run_virtual(body())


def test_any_request_id_has_a_name_in_the_store() -> None:
    assert storable("a.b:C_-1") == "a.b:C_-1"
    assert storable("x" * 128) == "x" * 128
    odd = storable("!" * 128)
    assert odd.startswith("sha256:")
    assert storable(odd) == odd
    assert storable("a b") != storable("a/b")
