"""What callers of RunService and SessionService see, over gRPC.

Goal: the protos' own words, errors included; what follows a run gets all of it whatever becomes of
hints. Method: the servicers on a real server, each test on the stores in memory and on Valkey.
Oracle: answers, codes and reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from sluice.channels import open_channel
from sluice.server import Health, MeshServer
from sluice.state.v1 import runs_pb2, sessions_pb2
from sluice.state.v1.runs_pb2_grpc import RunServiceStub, add_RunServiceServicer_to_server
from sluice.state.v1.sessions_pb2_grpc import (
    SessionServiceStub,
    add_SessionServiceServicer_to_server,
)
from sluice.status import from_rpc_error
from state_svc.adapters.run_servicer import RunServicer
from state_svc.adapters.session_servicer import SessionServicer
from state_svc.adapters.valkey_feed import ValkeyFeed
from tests.contract.state_rig import KINDS, Stores, new_id, stores_of
from tests.valkey import ValkeyProcess, valkey

LEASE = Duration(seconds=5)
REUSED = ("INVALID_ARGUMENT", "INVALID_FIELD")
SOON_S = 1.0  # well below the slow poll of those that follow


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@dataclass
class Service:
    stores: Stores
    runs: Any
    sessions: Any


@pytest.fixture(params=KINDS)
async def service(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Service]:
    async with stores_of(request.param, server.url) as stores:
        grpc_server = MeshServer("state", ["127.0.0.1:0"], Health())
        runs = RunServicer(stores.runs, stores.texts, stores.feed)
        add_RunServiceServicer_to_server(runs, grpc_server.grpc)
        add_SessionServiceServicer_to_server(SessionServicer(stores.sessions), grpc_server.grpc)
        await grpc_server.start()
        feed = stores.feed
        running = asyncio.create_task(feed.run_forever()) if isinstance(feed, ValkeyFeed) else None
        channel = open_channel(f"127.0.0.1:{grpc_server.ports[0]}")
        await channel.channel_ready()
        yield Service(stores, RunServiceStub(channel), SessionServiceStub(channel))
        await channel.close()
        feed.close()  # type: ignore[attr-defined]
        await grpc_server.stop(0)
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def refusal(call: Any) -> tuple[str, str]:
    """Code and reason of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    error = from_rpc_error(raised.value)
    return error.code.name, error.reason


def create(tenant: str = "a", **more: Any) -> runs_pb2.CreateRunRequest:
    fields = {
        "tenant": tenant,
        "run_id": new_id(),
        "request_id": new_id(),
        "spec": b"spec",
        "summary": b"new",
        "events": [b"queued"],
        "priority": 2,
        "active_max": 10,
        **more,
    }
    return runs_pb2.CreateRunRequest(**fields)


async def claim(service: Service, most: int = 8) -> Any:
    service.stores.wait(1)
    request = runs_pb2.ClaimRunsRequest(holder="agent:1", runs_max=most, lease=LEASE)
    return await service.runs.ClaimRuns(request)


async def claim_one(service: Service) -> tuple[runs_pb2.StoredRun, runs_pb2.Lease]:
    (claimed,) = (await claim(service)).runs
    run = claimed.run
    return run, runs_pb2.Lease(tenant=run.tenant, run_id=run.run_id, token=claimed.token)


def append(lease: runs_pb2.Lease, last: int, *events: bytes, **more: Any) -> Any:
    return runs_pb2.AppendRunRequest(
        lease=lease, expected_sequence=last, append_id=new_id(), events=events, **more
    )


def watch(service: Service, run_id: str, first: int = 0) -> Any:
    return service.runs.WatchRun(
        runs_pb2.WatchRunRequest(tenant="a", run_id=run_id, from_sequence=first)
    )


async def soon(call: Any) -> Any:
    """The next message, by a hint."""
    async with asyncio.timeout(SOON_S):
        return await call.read()


async def test_a_run_from_its_creation_to_its_end(service: Service) -> None:
    request = create(request_digest=b"\xffasked")
    made = await service.runs.CreateRun(request)
    assert not made.repeated_request
    assert (await service.runs.CreateRun(request)).repeated_request
    run, lease = await claim_one(service)
    assert (run.run_id, run.spec, run.phase) == (request.run_id, b"spec", 2)
    renew = runs_pb2.RenewLeasesRequest(leases=[lease], lease=LEASE)
    assert (await service.runs.RenewLeases(renew)).states[0].held
    assert (await service.runs.AppendRun(append(lease, 1, b"step"))).last_sequence == 2
    await service.runs.AppendRun(append(lease, 2, b"w", phase=4, waiting_step=2))
    resume = runs_pb2.ResumeRunRequest(
        tenant="a", run_id=run.run_id, step=2, decision=b"yes", request_id=new_id()
    )
    assert (await service.runs.ResumeRun(resume)).run.phase == 1
    resume.decision = b"no"
    assert await refusal(service.runs.ResumeRun(resume)) == REUSED
    run, lease = await claim_one(service)
    assert (run.decision, run.decision_step) == (b"yes", 2)
    await service.runs.AppendRun(append(lease, 3, b"end", phase=5, summary=b"done"))
    got = (await service.runs.GetRun(runs_pb2.GetRunRequest(tenant="a", run_id=run.run_id))).run
    assert (got.phase, got.summary, got.last_sequence) == (5, b"done", 4)
    assert got.request_digest == b"\xffasked"
    assert got.end_time.ToMilliseconds() == service.stores.now_ms
    read = await service.runs.ReadRun(runs_pb2.ReadRunRequest(tenant="a", run_id=run.run_id))
    assert [(one.sequence, one.event) for one in read.entries] == [
        (1, b"queued"),
        (2, b"step"),
        (3, b"w"),
        (4, b"end"),
    ]
    listed = await service.runs.ListRuns(runs_pb2.ListRunsRequest(tenant="a", page_size=5))
    assert [one.run_id for one in listed.runs] == [run.run_id] and not listed.next_page_token


async def test_refusals_say_what_is_wrong(service: Service) -> None:
    runs, run_id = service.runs, new_id()
    for call in (
        runs.GetRun(runs_pb2.GetRunRequest(tenant="a", run_id=run_id)),
        runs.ReadRun(runs_pb2.ReadRunRequest(tenant="a", run_id=run_id)),
        watch(service, run_id).read(),
        runs.CancelRun(runs_pb2.CancelRunRequest(tenant="a", run_id=run_id, request_id="r")),
    ):
        assert await refusal(call) == ("NOT_FOUND", "RUN_UNKNOWN")
    missing = runs.CreateRun(create(session_id=new_id()))
    assert await refusal(missing) == ("NOT_FOUND", "SESSION_UNKNOWN")
    await runs.CreateRun(create(open_max=1))
    assert await refusal(runs.CreateRun(create(open_max=1))) == (
        "RESOURCE_EXHAUSTED",
        "TOO_MANY_RUNS",
    )
    run, lease = await claim_one(service)
    assert await refusal(runs.AppendRun(append(lease, 7, b"x"))) == ("ABORTED", "VERSION_CONFLICT")
    lease.token += 1
    assert await refusal(runs.AppendRun(append(lease, 1, b"x"))) == ("ABORTED", "LEASE_LOST")
    publish = runs_pb2.PublishTextRequest(lease=lease, text=runs_pb2.LiveText(text="x"))
    assert await refusal(runs.PublishText(publish)) == ("ABORTED", "LEASE_LOST")
    resume = runs_pb2.ResumeRunRequest(tenant="a", run_id=run.run_id, request_id="r")
    assert await refusal(runs.ResumeRun(resume)) == ("FAILED_PRECONDITION", "NOT_WAITING")


@pytest.mark.parametrize(
    "bad",
    [
        {"tenant": "A b"},
        {"tenant": "a}:x{b"},
        {"run_id": "x"},
        {"run_id": new_id() + ":events"},
        {"request_id": ""},
        {"request_id": "a b"},
        {"spec": b"x" * ((4 << 20) + 1)},
        {"summary": b"x" * ((64 << 10) + 1)},
        {"request_digest": b"x" * 65},
        {"events": []},
        {"events": [b"x"] * 65},
        {"priority": 0},
        {"priority": 5},
        {"session_id": "x"},
    ],
    ids=lambda bad: f"{next(iter(bad))}-{str(next(iter(bad.values())))[:12]}",
)
async def test_a_bad_run_is_refused_by_its_field(service: Service, bad: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.runs.CreateRun(create(**bad))
    error = from_rpc_error(raised.value)
    assert error.code.name == "INVALID_ARGUMENT"
    assert [one.field for one in error.fields] == list(bad)
    assert not (await claim(service)).runs


async def test_other_bad_requests_are_refused_by_field(service: Service) -> None:
    runs, sessions = service.runs, service.sessions
    lease = runs_pb2.Lease(tenant="a", run_id=new_id(), token=1)
    long = Duration(seconds=61)
    for call in (
        runs.ClaimRuns(runs_pb2.ClaimRunsRequest(holder="a b", runs_max=1, lease=LEASE)),
        runs.ClaimRuns(runs_pb2.ClaimRunsRequest(holder="a", runs_max=65, lease=LEASE)),
        runs.ClaimRuns(runs_pb2.ClaimRunsRequest(holder="a", runs_max=1, lease=long)),
        runs.RenewLeases(runs_pb2.RenewLeasesRequest(leases=[lease] * 1025, lease=LEASE)),
        runs.RenewLeases(runs_pb2.RenewLeasesRequest(leases=[lease])),
        runs.AppendRun(append(lease, 0, b"x", phase=99)),
        runs.AppendRun(append(lease, 0, b"x", session_messages=[b"m"])),
        runs.AppendRun(append(lease, 0, b"x" * ((4 << 20) + 1))),
        runs.ListRuns(runs_pb2.ListRunsRequest(tenant="a", page_size=101)),
        runs.ListRuns(runs_pb2.ListRunsRequest(tenant="a", page_size=1, page_token="x")),
        runs.WatchOrders(runs_pb2.WatchOrdersRequest(holder="")).read(),
        sessions.CreateSession(
            sessions_pb2.CreateSessionRequest(
                tenant="a", request_id="r", ttl=Duration(seconds=90 * 86_400 + 1)
            )
        ),
        sessions.CreateSession(
            sessions_pb2.CreateSessionRequest(tenant="a", request_id="r", messages=[b""] * 257)
        ),
        sessions.AppendSession(
            sessions_pb2.AppendSessionRequest(tenant="a", session_id=new_id(), request_id="r")
        ),
        sessions.GetSession(sessions_pb2.GetSessionRequest(tenant="a", session_id="x")),
        sessions.ListSessions(sessions_pb2.ListSessionsRequest(tenant="a", page_size=0)),
    ):
        assert (await refusal(call))[0] == "INVALID_ARGUMENT"
    far = runs_pb2.ReadRunRequest(tenant="a", run_id=new_id(), from_sequence=2**64 - 1)
    assert await refusal(runs.ReadRun(far)) == ("NOT_FOUND", "RUN_UNKNOWN")


async def test_a_watch_replays_follows_and_ends(service: Service) -> None:
    request = create(events=[b"1", b"2", b"3"])
    await service.runs.CreateRun(request)
    _, lease = await claim_one(service)
    call = watch(service, request.run_id, 2)
    assert [(await soon(call)).entry.sequence for _ in range(2)] == [2, 3]
    for n in range(4, 8):
        await service.runs.AppendRun(append(lease, n - 1, str(n).encode()))
        entry = (await soon(call)).entry
        assert (entry.sequence, entry.event) == (n, str(n).encode())
    await service.runs.AppendRun(append(lease, 7, b"end", phase=6))
    assert (await soon(call)).entry.sequence == 8
    assert await soon(call) is grpc.aio.EOF
    late = [one.entry.sequence async for one in watch(service, request.run_id)]
    assert late == list(range(1, 9))
    assert [one async for one in watch(service, request.run_id, 9)] == []


async def test_live_text_is_followed_and_a_newcomer_gets_it_whole(service: Service) -> None:
    request = create()
    await service.runs.CreateRun(request)
    _, lease = await claim_one(service)

    async def publish(text: str, step: int = 1, *, replaces: bool = False) -> None:
        live = runs_pb2.LiveText(step=step, text=text, replaces=replaces)
        await service.runs.PublishText(runs_pb2.PublishTextRequest(lease=lease, text=live))

    def seen(message: Any) -> tuple[int, str, bool]:
        assert message.WhichOneof("kind") == "text"
        return message.text.step, message.text.text, message.text.replaces

    first = watch(service, request.run_id)
    assert (await soon(first)).entry.sequence == 1
    await publish("grü")
    assert seen(await soon(first)) == (1, "grü", True)
    await publish("ße")
    assert seen(await soon(first)) == (1, "ße", False)
    second = watch(service, request.run_id)
    assert (await soon(second)).entry.sequence == 1
    assert seen(await soon(second)) == (1, "grüße", True)
    await publish("!")
    assert seen(await soon(first)) == seen(await soon(second)) == (1, "!", False)
    await publish("anew", replaces=True)
    assert seen(await soon(first)) == (1, "anew", True)
    # The event holds what its model call wrote: its text is not shown any more.
    await service.runs.AppendRun(append(lease, 1, b"step"))
    third = watch(service, request.run_id)
    assert [(await soon(third)).entry.sequence for _ in range(2)] == [1, 2]
    await publish("next", step=2)
    assert seen(await soon(third)) == (2, "next", True)
    for call in (first, second, third):
        call.cancel()


async def test_orders_reach_the_holder_and_ready_runs_are_told(service: Service) -> None:
    def orders(holder: str) -> Any:
        return service.runs.WatchOrders(runs_pb2.WatchOrdersRequest(holder=holder))

    mine, foreign = orders("agent:1"), orders("agent:2")
    for call in (mine, foreign):
        assert (await soon(call)).WhichOneof("kind") is None
        assert (await soon(call)).WhichOneof("kind") == "ready"  # what was before the watch
    request = create()
    await service.runs.CreateRun(request)
    for call in (mine, foreign):
        assert (await soon(call)).WhichOneof("kind") == "ready"
    await claim_one(service)
    await service.runs.CancelRun(
        runs_pb2.CancelRunRequest(tenant="a", run_id=request.run_id, request_id="r")
    )
    message = await soon(mine)
    while message.WhichOneof("kind") == "ready":
        message = await soon(mine)
    assert message.cancelled.run_id == request.run_id
    await service.runs.CreateRun(create())
    assert (await soon(foreign)).WhichOneof("kind") == "ready"  # and nothing before
    mine.cancel()
    foreign.cancel()


async def test_a_watch_ends_typed_when_the_service_goes_down(service: Service) -> None:
    request = create()
    await service.runs.CreateRun(request)
    call = watch(service, request.run_id)
    assert (await soon(call)).entry.sequence == 1
    service.stores.feed.close()  # type: ignore[attr-defined]
    assert await refusal(call.read()) == ("UNAVAILABLE", "DRAINING")


async def test_a_session_over_the_wire(service: Service) -> None:
    sessions = service.sessions
    made = (
        await sessions.CreateSession(
            sessions_pb2.CreateSessionRequest(tenant="a", request_id="r", messages=[b"hello"])
        )
    ).session
    week = made.expire_time.ToMilliseconds() - made.create_time.ToMilliseconds()
    assert (made.version, made.message_count, week) == (1, 1, 7 * 86_400_000)
    request = sessions_pb2.AppendSessionRequest(
        tenant="a",
        session_id=made.session_id,
        messages=[b"more"],
        expected_version=1,
        request_id="r1",
    )
    first = await sessions.AppendSession(request)
    assert first == await sessions.AppendSession(request)
    request.messages[0] = b"other"
    assert await refusal(sessions.AppendSession(request)) == REUSED
    another = sessions_pb2.CreateSessionRequest(tenant="a", request_id="r", messages=[b"other"])
    assert await refusal(sessions.CreateSession(another)) == REUSED
    request.request_id = "r2"
    assert await refusal(sessions.AppendSession(request)) == ("ABORTED", "VERSION_CONFLICT")
    await service.runs.CreateRun(create(session_id=made.session_id))
    delete = sessions_pb2.DeleteSessionRequest(tenant="a", session_id=made.session_id)
    assert await refusal(sessions.DeleteSession(delete)) == ("ABORTED", "SESSION_BUSY")
    _, lease = await claim_one(service)
    await service.runs.AppendRun(append(lease, 1, b"e", phase=5, session_messages=[b"u", b"a"]))
    get = sessions_pb2.GetSessionRequest(tenant="a", session_id=made.session_id, page_size=9)
    got = await sessions.GetSession(get)
    assert list(got.messages) == [b"hello", b"more", b"u", b"a"]
    listed = await sessions.ListSessions(sessions_pb2.ListSessionsRequest(tenant="a", page_size=5))
    assert [one.version for one in listed.sessions] == [3]
    await sessions.DeleteSession(delete)
    assert await refusal(sessions.GetSession(get)) == ("NOT_FOUND", "SESSION_UNKNOWN")


async def test_a_claim_brings_along_what_there_is_room_for(service: Service) -> None:
    for tenant in ("a", "a", "b"):
        await service.runs.CreateRun(create(tenant, active_max=0))
    service.stores.wait(1)
    asked = runs_pb2.ClaimRunsRequest(
        holder="agent:1",
        runs_max=8,
        lease=LEASE,
        tenant_runs_max=1,
        tenants=[runs_pb2.TenantRoom(tenant="b", runs_max=0)],
    )
    found = await service.runs.ClaimRuns(asked)
    assert [(one.run.tenant, one.to_end) for one in found.runs] == [("a", False)]
    made = (await service.runs.CreateRun(create("c"))).run
    await service.runs.CancelRun(
        runs_pb2.CancelRunRequest(tenant="c", run_id=made.run_id, request_id=new_id())
    )
    service.stores.wait(1)
    ending = runs_pb2.ClaimRunsRequest(holder="agent:1", lease=LEASE, endings_max=2)
    found = await service.runs.ClaimRuns(ending)
    assert [(one.run.run_id, one.to_end) for one in found.runs] == [(made.run_id, True)]


@pytest.mark.parametrize(
    "fields",
    [
        {"runs_max": 0},
        {"runs_max": 65},
        {"runs_max": 1, "endings_max": 65},
        {"runs_max": 1, "tenants": [{"tenant": "", "runs_max": 1}]},
        {"runs_max": 1, "tenants": [{"tenant": f"t{n}", "runs_max": 1} for n in range(1_025)]},
    ],
)
async def test_a_claim_out_of_its_ranges_is_refused(service: Service, fields: Any) -> None:
    request = runs_pb2.ClaimRunsRequest(holder="agent:1", lease=LEASE, **fields)
    assert await refusal(service.runs.ClaimRuns(request)) == ("INVALID_ARGUMENT", "INVALID_FIELD")
