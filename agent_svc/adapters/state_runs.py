"""Runs in the state service: the ports Runs, Sessions and Usage over one connection.

Stateless. Events, specs and decisions are opaque there; what cannot be read here was written by
another version: such a run is passed on without its spec, or ``read`` raises UnreadableError.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from agent_svc.adapters import translate
from agent_svc.adapters.state_calls import answered, told
from agent_svc.domain.ending import run_too_long
from agent_svc.domain.model import Event, Message, Resumed, RunId
from agent_svc.domain.slots import Room
from agent_svc.run_ports import (
    Append,
    Claimed,
    Claims,
    LeaseKey,
    LeaseState,
    Order,
    Phase,
    Spec,
    StoredEvents,
    UnreadableError,
)
from sluice import logs
from sluice.channels import ending
from sluice.common.v1 import input_pb2
from sluice.state.v1 import (
    runs_pb2,
    runs_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
)

SESSION_PAGE: Final = 1000
POLL_MIN_S: Final = 0.05

_PHASES: Final = {
    Phase.RUNNING: runs_pb2.RUN_PHASE_RUNNING,
    Phase.QUEUED: runs_pb2.RUN_PHASE_QUEUED,
    Phase.PAUSED: runs_pb2.RUN_PHASE_PAUSED,
    Phase.WAITING: runs_pb2.RUN_PHASE_WAITING,
    Phase.SUCCEEDED: runs_pb2.RUN_PHASE_SUCCEEDED,
    Phase.FAILED: runs_pb2.RUN_PHASE_FAILED,
    Phase.CANCELLED: runs_pb2.RUN_PHASE_CANCELLED,
}

log = logs.get(__name__)


class StateRuns:
    """See the module's docstring. ``timeout_s``: of every call but the watch, which goes on."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub: Any = runs_pb2_grpc.RunServiceStub(channel)
        self._sessions: Any = sessions_pb2_grpc.SessionServiceStub(channel)
        self._usage: Any = usage_pb2_grpc.UsageServiceStub(channel)
        self._timeout_s = timeout_s

    async def claim(self, holder: str, room: Room, lease_s: float) -> Claims:
        """See :class:`agent_svc.run_ports.Runs`."""
        request = runs_pb2.ClaimRunsRequest(
            holder=holder,
            runs_max=room.runs,
            lease=_duration(lease_s),
            later_runs_max=room.later,
            tenant_runs_max=room.tenant,
            tenants=[
                runs_pb2.TenantRoom(tenant=tenant, runs_max=most)
                for tenant, most in room.tenants.items()
            ],
            endings_max=room.endings,
        )
        response = await answered(self._stub.ClaimRuns(request, timeout=self._timeout_s))
        poll_s = max(POLL_MIN_S, response.poll_delay.ToMicroseconds() / 1e6)
        return Claims(tuple(map(_claimed, response.runs)), poll_s)

    async def read(self, lease: LeaseKey, bytes_max: int) -> StoredEvents:
        """See :class:`agent_svc.run_ports.Runs`."""
        events: list[Event] = []
        size = 0
        request = runs_pb2.ReadRunRequest(tenant=lease.tenant, run_id=lease.run_id)
        while True:
            request.from_sequence = len(events) + 1
            page = await answered(self._stub.ReadRun(request, timeout=self._timeout_s))
            try:
                events += [translate.read_event(one.sequence, one.event) for one in page.entries]
            except ValueError:
                raise UnreadableError from None
            size += sum(len(one.event) for one in page.entries)
            if size > bytes_max:
                raise run_too_long()
            if not page.more:
                return StoredEvents(events, size)

    async def renew(self, leases: Sequence[LeaseKey], lease_s: float) -> list[LeaseState]:
        """See :class:`agent_svc.run_ports.Runs`."""
        request = runs_pb2.RenewLeasesRequest(leases=map(_lease, leases), lease=_duration(lease_s))
        response = await answered(self._stub.RenewLeases(request, timeout=self._timeout_s))
        return [LeaseState(one.held, one.cancelled) for one in response.states]

    async def append(self, lease: LeaseKey, append: Append) -> int:
        """See :class:`agent_svc.run_ports.Runs`."""
        events = [translate.event_bytes(lease.run_id, event) for event in append.events]
        request = runs_pb2.AppendRunRequest(
            lease=_lease(lease),
            expected_sequence=append.expected_sequence,
            append_id=append.append_id,
            events=events,
            summary=translate.summary_bytes(append.summary) if append.summary else b"",
            phase=_PHASES[append.phase],
            waiting_step=append.waiting_step,
            session_messages=translate.session_messages(append.session_messages),
        )
        if append.phase is Phase.PAUSED:
            request.ready_time.CopyFrom(_timestamp(append.ready_s))
        await answered(self._stub.AppendRun(request, timeout=self._timeout_s))
        return sum(map(len, events))

    async def publish(self, lease: LeaseKey, step: int, text: str, *, replaces: bool) -> bool:
        """See :class:`agent_svc.run_ports.Runs`."""
        request = runs_pb2.PublishTextRequest(
            lease=_lease(lease),
            text=runs_pb2.LiveText(step=step, text=text, replaces=replaces),
        )
        response = await answered(self._stub.PublishText(request, timeout=self._timeout_s))
        return bool(response.whole_wanted)

    async def orders(self, holder: str) -> AsyncIterator[Order | None]:
        """See :class:`agent_svc.run_ports.Runs`."""
        # No deadline: it goes on while the process lives; keepalive finds a dead connection.
        call = self._stub.WatchOrders(runs_pb2.WatchOrdersRequest(holder=holder))
        with ending(call):
            try:
                async for message in call:
                    yield _order(message)
            except grpc.aio.AioRpcError as error:
                raise told(error) from None

    async def messages(self, tenant: str, session_id: str) -> Sequence[Message]:
        """See :class:`agent_svc.run_ports.Sessions`."""
        messages: list[Message] = []
        request = sessions_pb2.GetSessionRequest(
            tenant=tenant, session_id=session_id, page_size=SESSION_PAGE
        )
        while True:
            request.from_message = len(messages)
            page = await answered(self._sessions.GetSession(request, timeout=self._timeout_s))
            messages += [
                translate.read_message(input_pb2.ChatMessage.FromString(one))
                for one in page.messages
            ]
            if not page.messages or len(messages) >= page.session.message_count:
                return messages

    async def agent_not_needed(self, tenant: str, run_id: RunId, model: str) -> None:
        """See :class:`agent_svc.run_ports.Usage`."""
        record = usage_pb2.UsageRecord(model=model, agent_not_needed=1)
        record.begin_time.FromMilliseconds(round(time.time() * 1000))
        request = usage_pb2.AppendUsageRequest(
            tenant=tenant, batch_id=f"run:{run_id}", records=[record]
        )
        await answered(self._usage.AppendUsage(request, timeout=self._timeout_s))


def _claimed(message: runs_pb2.ClaimedRun) -> Claimed:
    run = message.run
    spec: Spec | None = None
    decision: Resumed | None = None
    try:
        spec = translate.read_spec(run.spec)
        decision = translate.read_decision(run.decision)
    except ValueError:
        log.error("a run's spec or decision is not understood here", run_id=run.run_id)
        spec = None
    return Claimed(
        lease=LeaseKey(run.tenant, RunId(run.run_id), message.token),
        spec=spec,
        create_s=run.create_time.ToMicroseconds() / 1e6,
        last_sequence=run.last_sequence,
        cancelled=run.cancelled,
        decision=decision,
        session_id=run.session_id,
        to_end=message.to_end,
        losses=message.losses,
    )


def _order(message: runs_pb2.WatchOrdersResponse) -> Order | None:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    named = message.cancelled if kind == "cancelled" else message.ready
    return Order(named.tenant, RunId(named.run_id), kind == "cancelled")


def _lease(lease: LeaseKey) -> runs_pb2.Lease:
    return runs_pb2.Lease(tenant=lease.tenant, run_id=lease.run_id, token=lease.token)


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def _timestamp(seconds: float) -> Timestamp:
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message
