"""A tenant's runs: their queue, leases, events and ends. The rules of ``runs.lua`` and the memory
store's implementation; a test holds both to equal answers.

Pure: the store's time comes in as milliseconds.

Rules:

* **Ready.** QUEUED, PAUSED and RUNNING runs wait in a line of their class by due time: when they
  were queued, when their pause ends, when their lease ends. WAITING and ended runs are in none.
* **Owner.** A claim gives a token larger than every earlier one of the run. Until the run is given
  back or claimed again, who shows that token owns it, also after the lease's end: nobody else has
  written meanwhile. Everything a holder does is checked against it.
* **Active.** Runs with ``active_max`` are claimed only while fewer of the tenant hold a living
  lease; one whose lease lapsed while others took all places is given back by its next renewal.
  Others (turns of sessions) go first and are not counted.
* **A cancel is never lost.** It marks the run, which has only to be ended from then on. A holder
  hears of it; a run that nobody holds becomes ready; one that is given back later, or whose holder
  is lost, becomes ready at once whatever it wanted to wait for.
* **Only to be ended** are cancelled runs, and queued and paused ones whose wall time is over (the
  time that they waited for people is added). They are claimed first, are not counted, and also by
  those who have room for nothing else.
* **Room.** Ended runs give theirs up: first those that no repeated request can ask for any more,
  then the events and specs of others, oldest first. What is left of these answers repeated requests
  for a day, and never holds up the growth of a run under way.
* **Ends are never refused** for lack of room.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from state_svc.domain.asked import asked_to_resume
from state_svc.domain.run_values import (
    DEDUP_MS,
    ENDED,
    RUN_OVERHEAD_BYTES,
    Append,
    Claimed,
    EventPage,
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
    TooManyRunsError,
)
from state_svc.domain.session_book import PAGE_BYTES, SessionBook, size_of
from state_svc.ports import RequestIdReusedError, VersionConflictError

SCAN_MAX: Final = 1_000  # runs looked at for one page
FREE, COUNTED, TO_END = 0, 1, 2
"""Kinds of runs: not counted among the active, counted, and those that have only to be ended."""
LOSS_WAIT_MS: Final = 2_000
LOSS_WAIT_MAX_MS: Final = 120_000
_KINDS: Final = (TO_END, FREE, COUNTED)
_NOT_HELD: Final = frozenset({Phase.QUEUED, Phase.PAUSED})
_WAITS_IN_LINE: Final = frozenset({Phase.QUEUED, Phase.PAUSED, Phase.RUNNING})


@dataclass(slots=True)
class _Run:
    new: NewRun
    number: int
    create_ms: int
    due_ms: int
    size: int
    summary: bytes
    kind: int
    wall_ms: int  # when its wall time is over; 0: never
    events: list[bytes] = field(default_factory=list)
    phase: Phase = Phase.QUEUED
    end_ms: int = 0
    cancelled: bool = False
    decision: bytes = b""
    decision_step: int = 0
    waiting_step: int = 0
    token: int = 0
    holder: str = ""
    append_id: str = ""
    resumed: dict[str, tuple[int, str]] = field(default_factory=dict)  # request ids: when, what
    active_ms: int = 0  # while it is held, until when it is counted among the active
    waits_ms: int = 0  # since when it waits for a person
    losses: int = 0  # of a holder, one after another, without an event in between
    gone: int = 0  # events that were given up
    whole: bool = True

    @property
    def last(self) -> int:
        """Sequence number of the last event."""
        return self.gone + len(self.events)

    def record(self, *, spec: bool = True) -> RunRecord:
        new = self.new
        return RunRecord(
            tenant=new.tenant,
            run_id=new.run_id,
            phase=self.phase,
            spec=new.spec if spec else b"",
            summary=self.summary,
            last_sequence=self.last,
            create_ms=self.create_ms,
            end_ms=self.end_ms,
            cancelled=self.cancelled,
            decision=self.decision if spec else b"",
            decision_step=self.decision_step,
            session_id=new.session_id,
            priority=new.priority,
            request_digest=new.request_digest if spec else b"",
        )

    def queue(self, now: int) -> None:
        """Nobody holds it: makes it ready now."""
        self.phase, self.due_ms = Phase.QUEUED, now
        if self.cancelled:
            self.kind = TO_END

    def trim(self) -> None:
        """Gives up all but the summary and the last event."""
        self.whole = False
        last = self.events[-1:]
        left = RUN_OVERHEAD_BYTES + len(self.summary) + size_of(last or [b""])
        if left < self.size:
            self.gone, self.events, self.size = self.last - 1, last, left
            self.new, self.decision = replace(self.new, spec=b""), b""


def loss_wait_ms(losses: int) -> int:
    """How long a run waits that lost so many holders in a row without an event: 0, then 2, 8, 32
    and 120 s. What it asks for may be what ends the process that holds it, and with it the runs of
    others. It is not given up before its wall time: a machine that stands still looks the same."""
    return 0 if losses < 2 else min(LOSS_WAIT_MS * 4 ** (losses - 2), LOSS_WAIT_MAX_MS)


@dataclass(frozen=True, slots=True)
class Claims:
    """``due_ms``: when the tenant's class may have a ready run next; ``None``: not by time alone.
    ``too_large``: one was left because of its size."""

    runs: tuple[Claimed, ...]
    due_ms: int | None
    too_large: bool


class RunBook:
    """See the module's text."""

    def __init__(self, limits: RunLimits, sessions: SessionBook) -> None:
        self._limits, self._sessions = limits, sessions
        self._runs: dict[str, _Run] = {}
        self._requests: dict[str, tuple[int, str]] = {}
        self._number = 0
        self._active_max = 0

    def create(self, new: NewRun, now: int) -> tuple[RunRecord, bool]:
        """See :class:`state_svc.run_ports.RunStore`."""
        at, known = self._requests.get(new.request_id, (0, ""))
        if now - at >= DEDUP_MS or known not in self._runs:
            known = new.run_id
        if known in self._runs:
            return self._runs[known].record(), True
        if new.session_id:
            self._sessions.check_turn(new.session_id, now)
        counted = sum(1 for run in self._runs.values() if _counts_open(run))
        if new.open_max and counted >= new.open_max:
            raise TooManyRunsError
        if sum(run.phase not in ENDED for run in self._runs.values()) >= self._limits.open_max:
            raise RunsFullError("runs_open_max")
        if len(new.events) > self._limits.events_max:
            raise RunFullError("run_events_max")
        size = RUN_OVERHEAD_BYTES + len(new.spec) + len(new.summary) + size_of(new.events)
        if size > self._limits.run_bytes_max:
            raise RunFullError("run_bytes_max")
        if not self._make_room(size, now, grows=False):
            raise RunsFullError("runs_bytes_max", self._room_in(size, now))
        if new.session_id:
            self._sessions.begin_turn(new.session_id, new.run_id, now)
        self._number += 1
        kind = COUNTED if new.active_max else FREE
        wall_ms = now + new.wall_ms if new.wall_ms else 0
        run = _Run(new, self._number, now, now, size, new.summary, kind, wall_ms)
        run.events.extend(new.events)
        if new.active_max:
            self._active_max = new.active_max
        self._runs[new.run_id] = run
        self._requests[new.request_id] = (now, new.run_id)
        return run.record(), False

    def get(self, run_id: str) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        return self._known(run_id).record()

    def page(self, size: int, before: int, phase: Phase | None) -> RunPage:
        """See :class:`state_svc.run_ports.RunStore`."""
        found: list[RunRecord] = []
        total, last, scanned = 0, 0, 0
        for run in sorted(self._runs.values(), key=lambda one: -one.number):
            if before and run.number >= before:
                continue
            if len(found) == size or scanned == SCAN_MAX or total >= PAGE_BYTES:
                return RunPage(tuple(found), last)
            scanned, last = scanned + 1, run.number
            if phase is None or run.phase is phase:
                found.append(run.record(spec=False))
                total += len(run.summary)
        return RunPage(tuple(found), 0)

    def read(self, run_id: str, first: int, bytes_max: int = PAGE_BYTES) -> EventPage:
        """See :class:`state_svc.run_ports.RunStore`."""
        run = self._known(run_id)
        first = max(first, run.gone + 1)
        page: list[bytes] = []
        total = 0
        for event in run.events[first - 1 - run.gone :]:
            total += len(event)
            if page and total > bytes_max:
                break
            page.append(event)
        more = first - 1 + len(page) < run.last
        ended = run.phase in ENDED
        return EventPage(first, tuple(page), more, ended, run.last, run.create_ms)

    def cancel(self, run_id: str, now: int) -> tuple[RunRecord, str]:
        """See :class:`state_svc.run_ports.RunStore`; also who holds the run now, if anybody."""
        run = self._known(run_id)
        if run.phase in ENDED:
            return run.record(), ""
        run.cancelled = True
        if run.phase is Phase.RUNNING:
            run.kind = TO_END  # should its holder be lost
            return run.record(), run.holder
        run.queue(now)
        return run.record(), ""

    def resume(
        self, run_id: str, step: int, decision: bytes, request_id: str, now: int
    ) -> RunRecord:
        """See :class:`state_svc.run_ports.RunStore`."""
        run = self._known(run_id)
        asked = asked_to_resume(step, decision)
        at, earlier = run.resumed.get(request_id, (0, ""))
        if earlier and now - at < DEDUP_MS:
            if earlier != asked:
                raise RequestIdReusedError
            return run.record()
        if run.phase is not Phase.WAITING or run.waiting_step != step:
            raise NotWaitingError
        self._check_growth(run, len(decision), 0, now)
        run.size += len(decision)
        run.decision, run.decision_step = decision, step
        run.resumed[request_id] = (now, asked)
        if run.wall_ms:
            run.wall_ms += now - run.waits_ms
        run.queue(now)
        return run.record()

    def claim(
        self,
        holder: str,
        priority: int,
        runs_max: int,
        lease_ms: int,
        bytes_max: int,
        now: int,
        *,
        only_to_end: bool = False,
    ) -> Claims:
        """Ready runs of a class, first those that have only to be ended, then uncounted ones, then
        by due time: at most ``bytes_max`` bytes together (0: whatever their size)."""
        self._find_overdue(now)
        claimed: list[Claimed] = []
        total, too_large = 0, False
        for kind in (TO_END,) if only_to_end else _KINDS:
            left = runs_max - len(claimed)
            if kind == COUNTED:
                left = min(left, self._room(now))
            for run in self._line(priority, kind)[: max(left, 0)]:
                if run.due_ms > now or too_large:
                    break
                losses = run.losses + (kind != TO_END and run.phase is Phase.RUNNING)
                wait_ms = loss_wait_ms(losses) if losses > run.losses else 0
                if wait_ms:
                    run.phase, run.losses, run.due_ms = Phase.PAUSED, losses, now + wait_ms
                    continue
                total += len(run.new.spec) + len(run.summary) + len(run.decision)
                if bytes_max and total > bytes_max:
                    too_large = True
                    break
                run.losses = losses  # not before: one that is left here is not lost again
                run.token = max(run.token + 1, now)
                run.phase, run.holder, run.due_ms = Phase.RUNNING, holder, now + lease_ms
                run.active_ms = run.due_ms if kind == COUNTED else 0
                claimed.append(Claimed(run.record(), run.token, kind == TO_END, run.losses))
        return Claims(tuple(claimed), self.due(priority, now), too_large)

    def due(self, priority: int, now: int) -> int | None:
        """When a run of a class may be ready next."""
        times = [run.due_ms for kind in (TO_END, FREE) for run in self._line(priority, kind)[:1]]
        for run in self._line(priority, COUNTED)[:1]:
            if run.due_ms <= now and self._room(now) <= 0:
                times.append(min(one.active_ms for one in self._active(now)))
            else:
                times.append(run.due_ms)
        return min(times, default=None)

    def renew(self, run_id: str, token: int, lease_ms: int, now: int) -> LeaseState:
        """See :class:`state_svc.run_ports.RunStore`."""
        run = self._runs.get(run_id)
        if run is None or run.phase is not Phase.RUNNING or run.token != token:
            return LeaseState(held=False, cancelled=run is not None and run.cancelled)
        if run.kind == COUNTED and run.due_ms <= now and self._room(now) <= 0:
            run.queue(now)  # its place among the active has gone to another
            return LeaseState(held=False, cancelled=run.cancelled)
        run.due_ms = now + lease_ms
        if run.kind == COUNTED:
            run.active_ms = run.due_ms
        return LeaseState(held=True, cancelled=run.cancelled)

    def append(self, append: Append, now: int) -> int:
        """See :class:`state_svc.run_ports.RunStore`."""
        run = self._known(append.lease.run_id)
        if run.append_id == append.append_id:
            return run.last
        if run.phase is not Phase.RUNNING or run.token != append.lease.token:
            raise LeaseLostError
        if append.expected_sequence != run.last:
            raise VersionConflictError
        growth = size_of(append.events)
        if append.summary:
            growth += len(append.summary) - len(run.summary)
        if append.events:
            growth -= len(run.decision)
        if append.phase not in ENDED:
            self._check_growth(run, growth, len(append.events), now)
        elif run.new.session_id:
            messages = append.session_messages if append.phase is Phase.SUCCEEDED else ()
            self._sessions.end_turn(run.new.session_id, run.new.run_id, messages, now)
        run.size += growth
        run.events.extend(append.events)
        run.summary = append.summary or run.summary
        run.append_id = append.append_id
        if append.events:
            run.decision, run.decision_step, run.losses = b"", 0, 0
        self._change_phase(run, append, now)
        return run.last

    def position(self, run_id: str, token: int) -> Position:
        """See :class:`state_svc.run_ports.RunStore`."""
        run = self._known(run_id)
        if run.phase is not Phase.RUNNING or run.token != token:
            raise LeaseLostError
        return Position(run.last, run.create_ms)

    def _change_phase(self, run: _Run, append: Append, now: int) -> None:
        phase = append.phase
        if phase is Phase.RUNNING:
            return
        if phase in ENDED:
            run.phase, run.end_ms = phase, now
            self._drop_old(now)
        elif run.cancelled or phase is Phase.QUEUED:
            run.queue(now)
        else:
            run.phase, run.waiting_step, run.waits_ms = phase, append.waiting_step, now
            run.due_ms = max(append.ready_ms, now)

    def _known(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            raise RunUnknownError
        return run

    def _find_overdue(self, now: int) -> None:
        """Runs that nobody holds and whose time is over have only to be ended."""
        for run in self._runs.values():
            if run.phase in _NOT_HELD and run.kind != TO_END and 0 < run.wall_ms <= now:
                run.kind, run.due_ms = TO_END, now

    def _line(self, priority: int, kind: int) -> list[_Run]:
        line = [
            run
            for run in self._runs.values()
            if run.phase in _WAITS_IN_LINE and run.new.priority == priority and run.kind == kind
        ]
        return sorted(line, key=lambda run: (run.due_ms, run.new.run_id))

    def _active(self, now: int) -> list[_Run]:
        return [
            run for run in self._runs.values() if run.phase is Phase.RUNNING and run.active_ms > now
        ]

    def _room(self, now: int) -> int:
        return self._active_max - len(self._active(now))

    def _check_growth(self, run: _Run, growth: int, events: int, now: int) -> None:
        if len(run.events) + events > self._limits.events_max:
            raise RunFullError("run_events_max")
        if growth <= 0:
            return
        if run.size + growth > self._limits.run_bytes_max:
            raise RunFullError("run_bytes_max")
        if not self._make_room(growth, now, grows=True):
            raise RunFullError("runs_bytes_max")

    def _make_room(self, growth: int, now: int, *, grows: bool) -> bool:
        """Whether so many more bytes fit. Drops ended runs: those that were kept long enough, then,
        while it is needed, those that no repeated request can ask for any more; then trims others.
        ``grows``: it is a run under way that needs them."""
        self._drop_old(now)
        most = self._limits.tenant_bytes_max
        old = self._ended_before(now - DEDUP_MS)
        while self._held() + growth > most and old:
            del self._runs[old.pop(0).new.run_id]
        whole = [run for run in self._ended_before(now) if run.whole]
        while self._held() + growth > most and whole:
            whole.pop(0).trim()
        if self._held() + growth <= most:
            return True
        return grows and self._held_open() + growth <= most

    def _room_in(self, growth: int, now: int) -> int:
        """Milliseconds until an ended run goes by itself, where that makes room; 0: room comes when
        a run ends."""
        ended = self._ended_before(now)
        if not ended or self._held_open() + growth > self._limits.tenant_bytes_max:
            return 0
        return max(ended[0].end_ms + DEDUP_MS - now, 1)

    def _drop_old(self, now: int) -> None:
        for run in self._ended_before(now - self._limits.kept_ms):
            del self._runs[run.new.run_id]

    def _ended_before(self, when: int) -> list[_Run]:
        ended = [run for run in self._runs.values() if run.phase in ENDED and run.end_ms <= when]
        return sorted(ended, key=lambda run: (run.end_ms, run.new.run_id))

    def _held(self) -> int:
        return sum(run.size for run in self._runs.values())

    def _held_open(self) -> int:
        return sum(run.size for run in self._runs.values() if run.phase not in ENDED)


def _counts_open(run: _Run) -> bool:
    return run.new.open_max > 0 and run.phase in _WAITS_IN_LINE
