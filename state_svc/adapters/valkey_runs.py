"""Runs in Redis or Valkey: one script per operation and tenant, on the server's own time.

Keys: ``runs.lua``. A crash of this process before or after a script leaves nothing half done;
``valkey_run_index.py`` says why what lies between two scripts strands no run. An operation without
an answer may have happened: it is repeated with its ids and answers as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sluice.fault_points import fault_point
from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.adapters.valkey_run_index import Look, ValkeyRunIndex
from state_svc.domain.asked import asked_to_resume
from state_svc.domain.claim_order import Allowance, ClaimOrder, ClaimRoom, shares
from state_svc.domain.run_values import (
    PRIORITIES,
    Append,
    Claimed,
    EventPage,
    Lease,
    LeaseLostError,
    LeaseState,
    NewRun,
    NotWaitingError,
    Phase,
    Position,
    RunFullError,
    RunLimits,
    RunPage,
    RunRecord,
    RunsFullError,
    RunUnknownError,
    SessionBusyError,
    SessionFullError,
    SessionLimits,
    SessionsFullError,
    SessionUnknownError,
    TooManyRunsError,
)
from state_svc.domain.session_book import PAGE_BYTES
from state_svc.ports import (
    RequestIdReusedError,
    StoreUnavailableError,
    TenantDeletedError,
    VersionConflictError,
)
from state_svc.run_ports import ClaimBatch

NOTHING_DUE_MS: Final = 60_000
_NOTHING_DUE: Final = -1  # as the script says it
_FILES: Final = ("tenant_guard.lua", "session_rules.lua", "runs.lua")
_SCRIPT: Final = Script(*_FILES)
# A full store must not keep runs open: claims, renewals, cancels and appends that give a run back
# write little, and end what fills it.
_FREEING: Final = Script(*_FILES, frees=True)
_CHANGES: Final = frozenset({"create", "append", "resume", "cancel"})
_ERRORS: Final[Mapping[str, Callable[..., Exception]]] = {
    "RUN_UNKNOWN": RunUnknownError,
    "RUN_FULL": RunFullError,
    "RUNS_FULL": RunsFullError,
    "SESSION_UNKNOWN": SessionUnknownError,
    "SESSION_BUSY": SessionBusyError,
    "SESSION_FULL": SessionFullError,
    "SESSIONS_FULL": SessionsFullError,
    "LEASE_LOST": LeaseLostError,
    "NOT_WAITING": NotWaitingError,
    "TOO_MANY": TooManyRunsError,
    "VERSION": VersionConflictError,
    "REUSED": RequestIdReusedError,
}


def checked(reply: Sequence[Any]) -> Sequence[Any]:
    """What follows the status of a script's answer. Raises what the status stands for."""
    status = text(reply[0])
    if status == "OK":
        return reply[1:]
    if status == "LATE":
        raise StoreUnavailableError("the store came to it too late to do it")
    raise _ERRORS[status](*map(text, reply[1:]))


class ValkeyRuns:
    """A :class:`state_svc.run_ports.RunStore`. ``clock_ms`` is a test's own time."""

    def __init__(
        self,
        link: ValkeyLink,
        limits: RunLimits | None = None,
        session_limits: SessionLimits | None = None,
    ) -> None:
        self._link = link
        self._limits = limits or RunLimits()
        self._session_limits = session_limits or SessionLimits()
        self._index = ValkeyRunIndex(link)
        self._order = ClaimOrder()

    @property
    def clock_ms(self) -> int:
        """0: the server's."""
        return self._index.clock_ms

    @clock_ms.setter
    def clock_ms(self, value: int) -> None:
        self._index.clock_ms = value

    async def create(self, run: NewRun) -> tuple[RunRecord, bool]:
        """See :class:`state_svc.run_ports.RunStore`."""
        latest = await self._index.before_ready(run.tenant, run.priority)
        limits = self._limits
        repeated, run_id, fields = await self._run(
            run.tenant,
            "create",
            run.request_id,
            run.run_id,
            run.priority,
            run.active_max,
            run.open_max,
            run.session_id,
            run.wall_ms,
            run.spec,
            run.summary,
            run.request_digest,
            limits.open_max,
            *self._growth_limits(),
            *run.events,
            latest=latest,
        )
        if not repeated:
            await self._index.after_ready(run.tenant, run.priority, run.run_id)
        return _record(run.tenant, text(run_id), fields), bool(repeated)

    async def get(self, tenant: str, run_id: str) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        (fields,) = await self._run(tenant, "get", run_id)
        return _record(tenant, run_id, fields)

    async def page(
        self, tenant: str, size: int, *, before: int = 0, phase: Phase | None = None
    ) -> RunPage:
        """See :class:`state_svc.run_ports.RunStore`."""
        wanted = 0 if phase is None else int(phase)
        last, found = await self._run(tenant, "list", size, before, wanted)
        return RunPage(tuple(_record(tenant, text(name), fields) for name, fields in found), last)

    async def read(
        self, tenant: str, run_id: str, first: int, bytes_max: int = PAGE_BYTES
    ) -> EventPage:
        """See :class:`state_svc.run_ports.RunStore`."""
        reply = await self._run(tenant, "read", run_id, first, bytes_max)
        events, more, ended, last, first, created = reply
        return EventPage(first, tuple(events), bool(more), bool(ended), last, created)

    async def cancel(self, tenant: str, run_id: str) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        known = await self.get(tenant, run_id)
        latest = await self._index.before_ready(tenant, known.priority)
        (fields,) = await self._run(tenant, "cancel", run_id, latest=latest, script=_FREEING)
        record = _record(tenant, run_id, fields)
        if record.phase is Phase.QUEUED:
            await self._index.after_ready(tenant, record.priority, run_id)
        return record

    async def resume(
        self, tenant: str, run_id: str, step: int, decision: bytes, request_id: str
    ) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        known = await self.get(tenant, run_id)
        latest = await self._index.before_ready(tenant, known.priority)
        (fields,) = await self._run(
            tenant,
            "resume",
            run_id,
            step,
            decision,
            request_id,
            asked_to_resume(step, decision),
            *self._growth_limits(),
            latest=latest,
        )
        record = _record(tenant, run_id, fields)
        if record.phase is Phase.QUEUED:
            await self._index.after_ready(tenant, record.priority, run_id)
        return record

    async def claim(
        self, holder: str, runs_max: int, lease_ms: int, room: ClaimRoom | None = None
    ) -> ClaimBatch:
        """See :class:`state_svc.run_ports.RunStore`. One round trip when nothing is ready and no
        endings are asked for."""
        room = room or ClaimRoom()
        if room.endings_max:
            ending = await self._claim_endings(holder, lease_ms, room.endings_max)
            if ending:
                return ClaimBatch(tuple(ending), 0)
        if not runs_max:
            return ClaimBatch((), NOTHING_DUE_MS)
        # What this asker has no room for is left as it is: others look there.
        look = await self._index.look(later=room.later_max != 0, without=room.full())
        if not look.places:
            wait = NOTHING_DUE_MS if look.next_ms is None else look.next_ms - look.now_ms
            return ClaimBatch((), max(wait, 0))
        dues: dict[tuple[int, str], int | None] = dict.fromkeys(look.places, look.now_ms)
        allowance = Allowance(runs_max, room)
        claimed = await self._claim_places(holder, allowance, lease_ms, look, dues)
        left = [
            (priority, tenant) for (priority, tenant), due in dues.items() if _is_due(due, look)
        ]
        await self._index.found(
            [(priority, tenant, due) for (priority, tenant), due in dues.items()],
            looked_ms=look.now_ms,
            # Who looked meanwhile saw nothing of what is left. Who has claimed nothing has no room
            # for it, and would only call itself.
            nudge=(left[0][1], "-") if left and claimed else None,
        )
        times = [due for due in dues.values() if due is not None]
        wait = min(times, default=look.now_ms + NOTHING_DUE_MS) - look.now_ms
        return ClaimBatch(tuple(claimed), 0 if left else max(wait, 0))

    async def _claim_endings(self, holder: str, lease_ms: int, most: int) -> list[Claimed]:
        """Runs that have only to be ended, one of each tenant and class, for who has no room for
        more than that. Moves no place, so that others find there what they have room for."""
        look = await self._index.look(peeks=True)
        for priority in PRIORITIES:
            tenants = [tenant for one, tenant in look.places if one == priority]
            for begin in range(0, len(tenants), most):
                asked = [(tenant, 1) for tenant in tenants[begin : begin + most]]
                size = PAGE_BYTES // len(asked)
                answers = await self._ask(asked, priority, holder, lease_ms, size, endings=True)
                if claimed := [one for _, _, runs in answers for one in runs]:
                    return claimed
                large = [one for one, answer in zip(asked, answers, strict=True) if answer[1]]
                if large:
                    answers = await self._ask(
                        large[:1], priority, holder, lease_ms, 0, endings=True
                    )
                    return [one for _, _, runs in answers for one in runs]
        return []

    async def _claim_places(
        self,
        holder: str,
        allowance: Allowance,
        lease_ms: int,
        look: Look,
        dues: dict[tuple[int, str], int | None],
    ) -> list[Claimed]:
        """Asks the tenants in their turn; notes in ``dues`` what they say."""
        claimed: list[Claimed] = []
        bytes_left = PAGE_BYTES
        for priority in PRIORITIES:
            waiting = [
                tenant
                for one, tenant in look.places
                if one == priority and allowance.of_tenant(tenant, priority) > 0
            ]
            waiting = self._order.arrange(priority, waiting)
            alone = not claimed and waiting != [] and self._order.goes_alone(priority, waiting[0])
            while bytes_left > 0 and allowance.of_class(priority) > 0:
                waiting = [one for one in waiting if allowance.of_tenant(one, priority) > 0]
                if not waiting:
                    break
                asked = (
                    [(waiting[0], 1)] if alone else shares(waiting, allowance.of_class(priority))
                )
                asked = [(one, min(n, allowance.of_tenant(one, priority))) for one, n in asked]
                most = 0 if alone else max(1, bytes_left // len(asked))  # 0: whatever its size
                answers = await self._ask(asked, priority, holder, lease_ms, most)
                again, too_large = [], []
                for (tenant, share), (due, large, runs) in zip(asked, answers, strict=True):
                    dues[priority, tenant] = None if due < 0 else due
                    claimed += runs
                    allowance.take(tenant, priority, len(runs))
                    bytes_left -= sum(_size(one.run) for one in runs)
                    if runs:
                        self._order.served(priority, tenant)
                    if alone:
                        self._order.went_alone(priority, tenant)
                    if large:
                        too_large.append(tenant)
                        self._order.too_large(priority, tenant)
                    elif len(runs) == share and _is_due(dues[priority, tenant], look):
                        again.append(tenant)
                waiting = again + waiting[len(asked) :]
                alone = bool(too_large) and not claimed
                if alone:
                    waiting = too_large[:1]
        return claimed

    async def _ask(
        self,
        asked: Sequence[tuple[str, int]],
        priority: int,
        holder: str,
        lease_ms: int,
        bytes_max: int,
        *,
        endings: bool = False,
    ) -> Sequence[tuple[int, bool, Sequence[Claimed]]]:
        calls = [
            self._call(tenant, "claim", holder, priority, share, lease_ms, bytes_max, int(endings))
            for tenant, share in asked
        ]
        answers: list[tuple[int, bool, Sequence[Claimed]]] = []
        fault_point("state.before_claim")
        replies = await self._link.scripts(_FREEING, calls)
        fault_point("state.after_claim")
        for (tenant, _), reply in zip(asked, replies, strict=True):
            if isinstance(reply, TenantDeletedError):  # nothing waits there any more
                answers.append((_NOTHING_DUE, False, []))
                continue
            due, large, found = checked(reply)
            runs = [
                Claimed(_record(tenant, text(run_id), fields), token, bool(to_end), losses)
                for run_id, token, fields, to_end, losses in found
            ]
            answers.append((due, bool(large), runs))
        return answers

    async def renew(self, leases: Sequence[Lease], lease_ms: int) -> Sequence[LeaseState]:
        """See :class:`state_svc.run_ports.RunStore`."""
        by_tenant: dict[str, list[Lease]] = {}
        for lease in leases:
            by_tenant.setdefault(lease.tenant, []).append(lease)
        calls = []
        for tenant, own in by_tenant.items():
            pairs = [word for lease in own for word in (lease.run_id, lease.token)]
            calls.append(self._call(tenant, "renew", lease_ms, *pairs))
        replies = await self._link.scripts(_FREEING, calls)
        states: dict[Lease, LeaseState] = {}
        for own, reply in zip(by_tenant.values(), replies, strict=True):
            if isinstance(reply, TenantDeletedError):
                states.update(dict.fromkeys(own, LeaseState(held=False, cancelled=False)))
                continue
            (found,) = checked(reply)
            for lease, (held, cancelled) in zip(own, found, strict=True):
                states[lease] = LeaseState(held=bool(held), cancelled=bool(cancelled))
        return [states[lease] for lease in leases]

    async def append(self, append: Append) -> int:
        """See :class:`state_svc.run_ports.RunStore`."""
        lease, session = append.lease, self._session_limits
        last, dues, ready = await self._held(
            lease.tenant,
            "append",
            lease.run_id,
            lease.token,
            append.expected_sequence,
            append.append_id,
            append.summary,
            int(append.phase),
            append.ready_ms,
            append.waiting_step,
            *self._growth_limits(),
            session.messages_max,
            session.session_bytes_max,
            session.tenant_bytes_max,
            len(append.events),
            *append.events,
            *append.session_messages,
            script=_SCRIPT if append.phase is Phase.RUNNING else _FREEING,
        )
        if dues:  # the lease was given back: what it held up may be ready now
            await self._index.found(
                [(priority, lease.tenant, due) for priority, due in dues],
                nudge=(lease.tenant, "-") if ready else None,
            )
        return int(last)

    async def position(self, lease: Lease) -> Position:
        """See :class:`state_svc.run_ports.RunStore`."""
        last, created = await self._held(lease.tenant, "position", lease.run_id, lease.token)
        return Position(last, created)

    async def place(self, tenants: Sequence[str]) -> None:
        """Writes the places of these tenants anew, from what they hold."""
        replies = await self._link.scripts(_SCRIPT, [self._call(name, "dues") for name in tenants])
        dues = [
            (priority, tenant, due)
            for tenant, reply in zip(tenants, replies, strict=True)
            if not isinstance(reply, TenantDeletedError)
            for priority, due in checked(reply)[0]
        ]
        if dues:
            await self._index.found(dues)

    def _growth_limits(self) -> tuple[int, ...]:
        limits = self._limits
        return (
            limits.tenant_bytes_max,
            limits.events_max,
            limits.run_bytes_max,
            limits.kept_ms,
        )

    def _call(
        self, tenant: str, op: str, *arguments: Argument, latest: int = 0
    ) -> tuple[Sequence[str], Sequence[Argument]]:
        return [f"sluice:{{{tenant}}}:runs"], [op, self.clock_ms, latest, *arguments]

    async def _run(
        self, tenant: str, op: str, *arguments: Argument, latest: int = 0, script: Script = _SCRIPT
    ) -> Sequence[Any]:
        keys, words = self._call(tenant, op, *arguments, latest=latest)
        if op not in _CHANGES:
            return checked(await self._link.script(script, keys, words))
        fault_point(f"state.before_{op}")
        reply = await self._link.script(script, keys, words)
        fault_point(f"state.after_{op}")
        return checked(reply)

    async def _held(
        self, tenant: str, op: str, *arguments: Argument, script: Script = _SCRIPT
    ) -> Sequence[Any]:
        """As :meth:`_run`, for the holder of a lease: with its tenant it has lost that."""
        try:
            return await self._run(tenant, op, *arguments, script=script)
        except TenantDeletedError as error:
            raise LeaseLostError from error


def _is_due(due: int | None, look: Look) -> bool:
    return due is not None and due <= look.now_ms


def _size(run: RunRecord) -> int:
    return len(run.spec) + len(run.summary) + len(run.decision)


def _record(tenant: str, run_id: str, fields: Sequence[Any]) -> RunRecord:
    """From the fields of BRIEF or WHOLE in ``runs.lua``."""
    phase, summary, seq, create, end, cancelled, step, session, priority = fields[:9]
    decision, spec, digest = fields[9:] or (b"", b"", b"")
    return RunRecord(
        tenant=tenant,
        run_id=run_id,
        phase=Phase(int(phase)),
        spec=spec,
        summary=summary,
        last_sequence=int(seq),
        create_ms=int(create),
        end_ms=int(end),
        cancelled=bool(int(cancelled)),
        decision=decision,
        decision_step=int(step),
        session_id=text(session),
        priority=int(priority),
        request_digest=digest or b"",  # None: of an earlier release
    )
