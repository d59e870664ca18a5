"""Runs and sessions while their holders and their store die.

Goal: a holder that was stopped beyond its lease changes nothing after another has taken over; what
was acknowledged outlives a SIGKILL of the store; whoever follows a run sees every event once, in
order, across the store's and the hints' loss; a store that does not answer gives typed errors in
time. Method: real processes, SIGSTOP, SIGKILL. Oracle: the stored events; the holders' own words.
Seed: none, nothing is drawn.

Seen to fail on the mutants zombie_holder_writes, durable_log_not_kept.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

from sluice.state.v1 import runs_pb2, sessions_pb2
from sluice.state.v1.runs_pb2_grpc import RunServiceStub
from sluice.state.v1.sessions_pb2_grpc import SessionServiceStub
from sluice.status import from_rpc_error
from tests.robustness.state_process import HolderProcess, state_service, until_health
from tests.valkey import ValkeyProcess, valkey

SERVING = health_pb2.HealthCheckResponse.SERVING
LOG = ("--appendonly", "yes", "--appendfsync")
STORE_S = 2.0  # longest wait for the store: a disk may take its time
SHORT_S = 0.5
REFUSAL_S = 3.0  # the short one twice, and the way there and back


@asynccontextmanager
async def running(
    fsync: str = "always", timeout_s: float = STORE_S
) -> AsyncIterator[tuple[ValkeyProcess, Any, Any, Any]]:
    """The store, the two services, and a channel to them."""
    with valkey(*LOG, fsync) as store:
        async with state_service(store.url, timeout_s) as (service, channel):
            yield (
                store,
                RunServiceStub(channel),
                SessionServiceStub(channel),
                (service, channel),
            )


async def a_run(runs: Any) -> str:
    run_id = str(uuid.uuid4())
    await runs.CreateRun(
        runs_pb2.CreateRunRequest(
            tenant="a", run_id=run_id, request_id=run_id, events=[b"first"], priority=1
        )
    )
    return run_id


async def claimed(runs: Any, seconds: int = 60) -> runs_pb2.Lease:
    request = runs_pb2.ClaimRunsRequest(holder="test", runs_max=1, lease=Duration(seconds=seconds))
    (one,) = (await runs.ClaimRuns(request)).runs
    return runs_pb2.Lease(tenant="a", run_id=one.run.run_id, token=one.token)


def an_append(lease: runs_pb2.Lease, last: int, **more: Any) -> runs_pb2.AppendRunRequest:
    return runs_pb2.AppendRunRequest(
        lease=lease,
        expected_sequence=last,
        append_id=str(uuid.uuid4()),
        events=[f"event {last + 1}".encode()],
        **more,
    )


async def events_of(runs: Any, run_id: str) -> list[bytes]:
    read = await runs.ReadRun(runs_pb2.ReadRunRequest(tenant="a", run_id=run_id))
    return [entry.event for entry in read.entries]


async def test_a_stopped_holder_cannot_write_after_another_took_over() -> None:
    async with running() as (_, runs, _, (service, _)):
        run_id = await a_run(runs)
        first = HolderProcess(service.address, script="run_holder.py", name="first")
        second = None
        try:
            old = await first.line("claimed")
            second = HolderProcess(service.address, script="run_holder.py", name="second")
            await first.line("appended")
            await asyncio.sleep(1.0)  # the second one asks by now, in vain: the lease is renewed
            await first.line("appended")
            first.send(signal.SIGSTOP)
            stopped_at = time.monotonic()
            new = await second.line("claimed")
            assert new["token"] > old["token"]
            assert new["at"] - stopped_at > 0.5  # not before the lease was over
            await second.line("appended")
            first.send(signal.SIGCONT)
            assert (await first.line("refused"))["reason"] == "LEASE_LOST"
            for _ in range(3):
                assert (await second.line("appended"))["held"]
        finally:
            first.kill()
            if second is not None:
                second.kill()
        writers = [event.split()[0] for event in await events_of(runs, run_id)]
        change = writers.index(b"second")
        assert set(writers[1:change]) == {b"first"} and set(writers[change:]) == {b"second"}


async def lost_by_a_kill(fsync: str) -> tuple[int, int]:
    """Acknowledged appends to a run and a session, and how many a SIGKILL of the store lost."""
    async with running(fsync) as (store, runs, sessions, (_, channel)):
        run_id = await a_run(runs)
        lease = await claimed(runs)
        made = await sessions.CreateSession(
            sessions_pb2.CreateSessionRequest(tenant="a", request_id="r")
        )
        session_id = made.session.session_id
        counts = {"run": 1, "session": 0}

        async def write_run() -> None:
            while True:
                answer = await runs.AppendRun(an_append(lease, counts["run"]))
                counts["run"] = answer.last_sequence

        async def write_session() -> None:
            while True:
                request = sessions_pb2.AppendSessionRequest(
                    tenant="a",
                    session_id=session_id,
                    messages=[b"m"],
                    request_id=str(uuid.uuid4()),
                )
                answer = await sessions.AppendSession(request)
                counts["session"] = answer.session.message_count

        writers = [asyncio.create_task(write_run()), asyncio.create_task(write_session())]
        await asyncio.sleep(1.5)
        store.kill()
        ends = await asyncio.gather(*writers, return_exceptions=True)
        assert all(isinstance(end, grpc.aio.AioRpcError) for end in ends)
        store.start()
        await until_health(channel, SERVING)
        kept = len(await events_of(runs, run_id))
        got = await sessions.GetSession(
            sessions_pb2.GetSessionRequest(tenant="a", session_id=session_id)
        )
        total = counts["run"] + counts["session"]
        lost = max(counts["run"] - kept, 0)
        return total, lost + max(counts["session"] - got.session.message_count, 0)


async def test_no_acknowledged_append_is_lost_when_the_store_is_killed() -> None:
    total, lost = await lost_by_a_kill("always")
    assert total > 20 and lost == 0


async def test_a_log_whose_last_words_are_cut_off_costs_them_and_nothing_else() -> None:
    with valkey(*LOG, "always") as store:
        async with state_service(store.url, STORE_S) as (_, channel):
            runs: Any = RunServiceStub(channel)
            run_id = await a_run(runs)
            lease = await claimed(runs, seconds=1)
            for last in range(1, 6):
                await runs.AppendRun(an_append(lease, last))
            store.kill()
            (log,) = store.folder.glob("appendonlydir/*.incr.aof")
            log.write_bytes(log.read_bytes()[:-7])
            store.start()
            await until_health(channel, SERVING)
            assert len(await events_of(runs, run_id)) == 5
            await asyncio.sleep(1.0)
            lease = await claimed(runs)  # found, held and written to as before
            assert (await runs.AppendRun(an_append(lease, 5))).last_sequence == 6


async def test_who_follows_sees_every_event_once_across_a_killed_store() -> None:
    async with running() as (store, runs, _, (_, channel)):
        run_id = await a_run(runs)
        lease = await claimed(runs)
        call = runs.WatchRun(runs_pb2.WatchRunRequest(tenant="a", run_id=run_id))
        seen = [(await call.read()).entry.sequence]
        last = 1
        for _ in range(2):
            for _ in range(3):
                last = (await runs.AppendRun(an_append(lease, last))).last_sequence
            store.kill()
            store.start()
            await until_health(channel, SERVING)
        end = an_append(lease, last, phase=runs_pb2.RUN_PHASE_SUCCEEDED)
        last = (await runs.AppendRun(end)).last_sequence
        async with asyncio.timeout(10.0):
            while (message := await call.read()) is not grpc.aio.EOF:
                seen.append(message.entry.sequence)
        assert seen == list(range(1, last + 1))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "gone"])
async def test_without_the_store_every_call_is_refused_in_time(number: signal.Signals) -> None:
    async with running(timeout_s=SHORT_S) as (store, runs, sessions, (_, channel)):
        run_id = await a_run(runs)
        lease = await claimed(runs)
        if number is signal.SIGKILL:
            store.kill()
        else:
            store.send(number)

        async def watched(request: runs_pb2.WatchRunRequest) -> None:
            await runs.WatchRun(request).read()

        calls = [
            (runs.GetRun, runs_pb2.GetRunRequest(tenant="a", run_id=run_id)),
            (watched, runs_pb2.WatchRunRequest(tenant="a", run_id=run_id)),
            (runs.AppendRun, an_append(lease, 1)),
            (
                runs.ClaimRuns,
                runs_pb2.ClaimRunsRequest(holder="h", runs_max=1, lease=Duration(seconds=5)),
            ),
            (
                sessions.CreateSession,
                sessions_pb2.CreateSessionRequest(tenant="a", request_id="r"),
            ),
        ]
        for method, request in calls:
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await method(request)
            assert from_rpc_error(raised.value).reason == "STORE_UNAVAILABLE"
            assert time.monotonic() - began < REFUSAL_S
        if number is signal.SIGKILL:
            store.start()
        else:
            store.send(signal.SIGCONT)
        await until_health(channel, SERVING)
        # The refused append may have happened; under its own id it is known either way.
        read = await events_of(runs, run_id)
        last = await runs.AppendRun(an_append(lease, len(read)))
        assert last.last_sequence == len(read) + 1
