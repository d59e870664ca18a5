"""``RunService``: checks what comes in, hands it to the stores, and follows runs. Stateless."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from sluice.errors import invalid, unavailable
from sluice.state.v1 import runs_pb2, runs_pb2_grpc
from sluice.timestamps import unix_seconds
from state_svc.adapters.run_messages import lease_of, milliseconds, page_number, stored_run
from state_svc.adapters.run_watch import Entry, FeedClosedError, RunWatch, WatchParts, watch_room
from state_svc.adapters.store_errors import store_errors
from state_svc.adapters.watch_reads import WatchReads
from state_svc.domain.claim_order import ClaimRoom
from state_svc.domain.names import check_holder, check_request_id, check_tenant, check_uuid
from state_svc.domain.run_values import PRIORITIES, SEQUENCE_MAX, Append, NewRun, Phase
from state_svc.domain.session_book import size_of
from state_svc.run_ports import RunFeed, RunStore, TextStore

SPEC_BYTES_MAX: Final = 4 << 20
SUMMARY_BYTES_MAX: Final = 64 << 10
DIGEST_BYTES_MAX: Final = 64
DECISION_BYTES_MAX: Final = 1 << 20
EVENTS_MAX: Final = 64
EVENTS_BYTES_MAX: Final = 4 << 20
TEXT_BYTES_MAX: Final = 256 << 10
LEASES_MAX: Final = 1_024
CLAIM_MAX: Final = 64
TENANTS_MAX: Final = 1_024
WALL_TIME_MS_MAX: Final = 60 * 86_400 * 1000
PAGE_MAX: Final = 100
LEASE_MS: Final = (1_000, 60_000)
POLL_MS: Final = (10, 1_000)  # between two claims when no nudge comes
RUNS_MAX: Final = 1_000_000  # of what a caller may permit
WATCH_BYTES_MAX: Final = 32 << 20


class RunServicer(runs_pb2_grpc.RunServiceServicer):
    """See the proto."""

    def __init__(
        self,
        store: RunStore,
        texts: TextStore,
        feed: RunFeed,
        watch_bytes_max: int = WATCH_BYTES_MAX,
    ) -> None:
        self._store, self._texts, self._feed = store, texts, feed
        self._watched = WatchParts(WatchReads(store), texts, watch_room(watch_bytes_max))

    async def CreateRun(
        self, request: runs_pb2.CreateRunRequest, context: Any
    ) -> runs_pb2.CreateRunResponse:
        """Stores a run."""
        check_tenant(request.tenant, "tenant")
        check_uuid(request.run_id, "run_id")
        check_request_id(request.request_id, "request_id")
        _check_bytes(request.spec, SPEC_BYTES_MAX, "spec")
        _check_bytes(request.summary, SUMMARY_BYTES_MAX, "summary")
        _check_bytes(request.request_digest, DIGEST_BYTES_MAX, "request_digest")
        _check_events(request.events)
        if not request.events:
            raise invalid("events", "at least one")
        if request.priority not in PRIORITIES:
            raise invalid("priority", "must be 1 to 4")
        for field in ("active_max", "open_max"):
            if getattr(request, field) > RUNS_MAX:
                raise invalid(field, f"at most {RUNS_MAX}")
        if request.session_id:
            check_uuid(request.session_id, "session_id")
        new = NewRun(
            tenant=request.tenant,
            run_id=request.run_id,
            request_id=request.request_id,
            spec=request.spec,
            summary=request.summary,
            events=tuple(request.events),
            priority=request.priority,
            active_max=request.active_max,
            open_max=request.open_max,
            session_id=request.session_id,
            wall_ms=_wall_ms(request.wall_time),
            request_digest=request.request_digest,
        )
        with store_errors():
            record, repeated = await self._store.create(new)
        return runs_pb2.CreateRunResponse(run=stored_run(record), repeated_request=repeated)

    async def GetRun(
        self, request: runs_pb2.GetRunRequest, context: Any
    ) -> runs_pb2.GetRunResponse:
        """Reads a run."""
        _check_run(request)
        with store_errors():
            record = await self._store.get(request.tenant, request.run_id)
        return runs_pb2.GetRunResponse(run=stored_run(record))

    async def ListRuns(
        self, request: runs_pb2.ListRunsRequest, context: Any
    ) -> runs_pb2.ListRunsResponse:
        """Lists runs."""
        check_tenant(request.tenant, "tenant")
        if not 1 <= request.page_size <= PAGE_MAX:
            raise invalid("page_size", f"must be 1 to {PAGE_MAX}")
        before = page_number(request.page_token)
        phase = _phase(request.phase)
        with store_errors():
            page = await self._store.page(
                request.tenant, request.page_size, before=before, phase=phase
            )
        return runs_pb2.ListRunsResponse(
            runs=[stored_run(record) for record in page.runs],
            next_page_token=str(page.next_number or ""),
        )

    async def ReadRun(
        self, request: runs_pb2.ReadRunRequest, context: Any
    ) -> runs_pb2.ReadRunResponse:
        """Reads events."""
        _check_run(request)
        first = _first(request.from_sequence)
        with store_errors():
            page = await self._store.read(request.tenant, request.run_id, first)
        return runs_pb2.ReadRunResponse(
            entries=[
                runs_pb2.RunEntry(sequence=page.first + n, event=event)
                for n, event in enumerate(page.events)
            ],
            more=page.more,
        )

    async def WatchRun(
        self, request: runs_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[runs_pb2.WatchRunResponse]:
        """Replays a run, then follows it."""
        _check_run(request)
        first = _first(request.from_sequence)
        watch = RunWatch(self._watched, request.tenant, request.run_id, first)
        with store_errors():
            try:
                async with aclosing(watch.follow(self._feed)) as following:
                    async for seen in following:
                        yield _watched(seen)
            except FeedClosedError:
                raise unavailable("DRAINING", "The service is going down.", 0.1) from None

    async def CancelRun(
        self, request: runs_pb2.CancelRunRequest, context: Any
    ) -> runs_pb2.CancelRunResponse:
        """Marks a run as cancelled. The mark is the same however often it is set."""
        _check_run(request)
        check_request_id(request.request_id, "request_id")
        with store_errors():
            record = await self._store.cancel(request.tenant, request.run_id)
        return runs_pb2.CancelRunResponse(run=stored_run(record))

    async def ResumeRun(
        self, request: runs_pb2.ResumeRunRequest, context: Any
    ) -> runs_pb2.ResumeRunResponse:
        """Stores a decision."""
        _check_run(request)
        check_request_id(request.request_id, "request_id")
        _check_bytes(request.decision, DECISION_BYTES_MAX, "decision")
        with store_errors():
            record = await self._store.resume(
                request.tenant, request.run_id, request.step, request.decision, request.request_id
            )
        return runs_pb2.ResumeRunResponse(run=stored_run(record))

    async def ClaimRuns(
        self, request: runs_pb2.ClaimRunsRequest, context: Any
    ) -> runs_pb2.ClaimRunsResponse:
        """Claims runs."""
        check_holder(request.holder, "holder")
        if request.endings_max > CLAIM_MAX:
            raise invalid("endings_max", f"at most {CLAIM_MAX}")
        if not (0 if request.endings_max else 1) <= request.runs_max <= CLAIM_MAX:
            raise invalid("runs_max", f"must be 1 to {CLAIM_MAX}")
        lease_ms, room = _lease_ms(request.lease), _room(request)
        with store_errors():
            batch = await self._store.claim(request.holder, request.runs_max, lease_ms, room)
        least, most = POLL_MS
        return runs_pb2.ClaimRunsResponse(
            runs=[
                runs_pb2.ClaimedRun(
                    run=stored_run(claimed.run),
                    token=claimed.token,
                    to_end=claimed.to_end,
                    losses=claimed.losses,
                )
                for claimed in batch.runs
            ],
            poll_delay=milliseconds(min(max(batch.next_ms, least), most)),
        )

    async def RenewLeases(
        self, request: runs_pb2.RenewLeasesRequest, context: Any
    ) -> runs_pb2.RenewLeasesResponse:
        """Extends leases."""
        if len(request.leases) > LEASES_MAX:
            raise invalid("leases", f"at most {LEASES_MAX}")
        leases = [lease_of(one, f"leases[{n}]") for n, one in enumerate(request.leases)]
        lease_ms = _lease_ms(request.lease)
        with store_errors():
            states = await self._store.renew(leases, lease_ms)
        return runs_pb2.RenewLeasesResponse(
            states=[
                runs_pb2.LeaseState(held=state.held, cancelled=state.cancelled) for state in states
            ]
        )

    async def AppendRun(
        self, request: runs_pb2.AppendRunRequest, context: Any
    ) -> runs_pb2.AppendRunResponse:
        """Appends events."""
        lease = lease_of(request.lease, "lease")
        check_request_id(request.append_id, "append_id")
        _check_bytes(request.summary, SUMMARY_BYTES_MAX, "summary")
        _check_events(request.events)
        phase = _phase(request.phase) or Phase.RUNNING
        if request.session_messages and phase is not Phase.SUCCEEDED:
            raise invalid("session_messages", "only with phase SUCCEEDED")
        size = sum(map(len, request.session_messages)) + sum(map(len, request.events))
        if size > EVENTS_BYTES_MAX or len(request.session_messages) > EVENTS_MAX:
            raise invalid(
                "session_messages", f"at most {EVENTS_MAX}, {EVENTS_BYTES_MAX} bytes with events"
            )
        ready_s = unix_seconds(request.ready_time, "ready_time")
        append = Append(
            lease=lease,
            expected_sequence=request.expected_sequence,
            append_id=request.append_id,
            events=tuple(request.events),
            summary=request.summary,
            phase=phase,
            ready_ms=round(ready_s * 1000),
            waiting_step=request.waiting_step,
            session_messages=tuple(request.session_messages),
        )
        with store_errors():
            last = await self._store.append(append)
        return runs_pb2.AppendRunResponse(last_sequence=last)

    async def PublishText(
        self, request: runs_pb2.PublishTextRequest, context: Any
    ) -> runs_pb2.PublishTextResponse:
        """Passes text on."""
        lease, text = lease_of(request.lease, "lease"), request.text
        _check_bytes(text.text.encode(), TEXT_BYTES_MAX, "text.text")
        with store_errors():
            at = await self._store.position(lease)
            is_whole = await self._texts.publish(
                lease, at, text.step, text.text, replaces=text.replaces
            )
        return runs_pb2.PublishTextResponse(whole_wanted=not is_whole)

    async def WatchOrders(
        self, request: runs_pb2.WatchOrdersRequest, context: Any
    ) -> AsyncIterator[runs_pb2.WatchOrdersResponse]:
        """Streams orders."""
        check_holder(request.holder, "holder")
        async with self._feed.orders() as orders:
            yield runs_pb2.WatchOrdersResponse()
            async for order in orders:
                name = runs_pb2.RunName(tenant=order.tenant, run_id=order.run_id)
                if not order.holder:
                    yield runs_pb2.WatchOrdersResponse(ready=name)
                elif order.holder == request.holder:
                    yield runs_pb2.WatchOrdersResponse(cancelled=name)


def _watched(seen: Any) -> runs_pb2.WatchRunResponse:
    if isinstance(seen, Entry):
        return runs_pb2.WatchRunResponse(
            entry=runs_pb2.RunEntry(sequence=seen.sequence, event=seen.event)
        )
    return runs_pb2.WatchRunResponse(
        text=runs_pb2.LiveText(step=seen.step, text=seen.text, replaces=seen.replaces)
    )


def _check_run(request: Any) -> None:
    check_tenant(request.tenant, "tenant")
    check_uuid(request.run_id, "run_id")


def _phase(number: int) -> Phase | None:
    """``None``: not said."""
    try:
        return Phase(number) if number else None
    except ValueError:
        raise invalid("phase", "is none") from None


def _first(sequence: int) -> int:
    return min(max(sequence, 1), SEQUENCE_MAX)


def _check_bytes(value: bytes, most: int, field: str) -> None:
    if len(value) > most:
        raise invalid(field, f"at most {most} bytes")


def _check_events(events: Any) -> None:
    if len(events) > EVENTS_MAX or size_of(events) > EVENTS_BYTES_MAX:
        raise invalid("events", f"at most {EVENTS_MAX}, {EVENTS_BYTES_MAX} bytes together")


def _room(request: runs_pb2.ClaimRunsRequest) -> ClaimRoom:
    if len(request.tenants) > TENANTS_MAX:
        raise invalid("tenants", f"at most {TENANTS_MAX}")
    for n, one in enumerate(request.tenants):
        check_tenant(one.tenant, f"tenants[{n}].tenant")
    return ClaimRoom(
        later_max=request.later_runs_max if request.HasField("later_runs_max") else None,
        tenant_max=request.tenant_runs_max if request.HasField("tenant_runs_max") else None,
        tenants={one.tenant: one.runs_max for one in request.tenants},
        endings_max=request.endings_max,
    )


def _wall_ms(wall_time: Any) -> int:
    wall_ms = int(wall_time.ToMilliseconds())
    if not 0 <= wall_ms <= WALL_TIME_MS_MAX:
        raise invalid("wall_time", "must be 0 to 60 days")
    return wall_ms


def _lease_ms(lease: Any) -> int:
    least, most = LEASE_MS
    if not least <= lease.ToMilliseconds() <= most:
        raise invalid("lease", f"must be {least // 1000} s to {most // 1000} s")
    return int(lease.ToMilliseconds())
