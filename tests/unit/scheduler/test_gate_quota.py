"""The gate with quotas: permits at dispatch, lapses, and what is paid.

Goal: nothing starts under a registration that lapsed, what lapsed is reserved anew or refused, and
every reservation ends exactly once. Method: the gate against a scripted execution service and a
scripted port of quotas, in virtual time. Oracle: the port's own record of calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler_svc.adapters.attempt_events import LAPSES_MAX
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.quota_keeper import NOTHING_USED, QuotaKeeper, consumption
from scheduler_svc.domain.model import Outcome, TicketState, Yield
from scheduler_svc.domain.quota import Reservation
from scheduler_svc.domain.quota_errors import refused
from sluice.common.v1 import grant_pb2, result_pb2
from sluice.errors import Code, SluiceError, permission_denied
from sluice.grants import GRANT_LAPSED
from sluice.inference.v1 import inference_pb2
from sluice.quota.exchange import Limits, QuotaKind
from sluice.status import to_status
from tests.unit.scheduler.gate_rig import Rig, rig

Run = Callable[[Coroutine[object, object, None]], None]
Body = Callable[[Rig, "ScriptedQuota"], Coroutine[object, object, None]]


@dataclass
class ScriptedQuota:
    """A port that grants what the test lets it, and keeps what became of each reservation."""

    may: list[float] = field(default_factory=list)
    """Answers of ``may_start`` in order; afterwards 2.5 s."""
    answer_s: float = 0.2
    refusal: SluiceError | None = None
    made: list[Reservation] = field(default_factory=list)
    ends: list[tuple[int, str, int]] = field(default_factory=list)
    """Number of the reservation, how it ended, tokens."""
    reports: list[tuple[float, int]] = field(default_factory=list)

    def try_reserve(self, tenant: str, tokens: int) -> Reservation | None:
        made = Reservation(tenant, tokens, counted=True)
        self.made.append(made)
        return made

    async def reserve(self, tenant: str, tokens: int) -> Reservation:
        await asyncio.sleep(self.answer_s)
        if self.refusal is not None:
            raise self.refusal
        made = self.try_reserve(tenant, tokens)
        assert made is not None
        return made

    def may_start(self, reservation: Reservation) -> float:
        assert reservation.open
        return self.may.pop(0) if self.may else 2.5

    def started(self, reservation: Reservation) -> None:
        reservation.started = True

    def progressed(self, reservation: Reservation, used_tokens: int) -> None:
        assert reservation.open
        self.reports.append((asyncio.get_running_loop().time(), used_tokens))

    def settle(self, reservation: Reservation, used_tokens: int) -> None:
        self._end(reservation, "settled", used_tokens)

    def release(self, reservation: Reservation) -> None:
        self._end(reservation, "released", 0)

    def _end(self, reservation: Reservation, how: str, tokens: int) -> None:
        assert reservation.open, "ended twice"
        reservation.open = False
        number = next(n for n, one in enumerate(self.made) if one is reservation)
        self.ends.append((number, how, tokens))

    def set_tenant(self, tenant: str, limits: Limits, *, fail_open: bool) -> None:
        raise AssertionError("not by the gate")

    def remove_tenant(self, tenant: str) -> None:
        raise AssertionError("not by the gate")


@pytest.fixture
def scenario(run_virtual: Run, tmp_path: Path) -> Callable[..., None]:
    """Runs ``body(rig, quota)``; afterwards no reservation may be open and nothing left."""

    def play(body: Body, **options: int) -> None:
        async def main() -> None:
            quota = ScriptedQuota()
            async with rig(tmp_path, quota=QuotaKeeper(quota), **options) as running:
                running.report()
                await body(running, quota)
                await running.idle()
                assert not [one for one in quota.made if one.open]

        run_virtual(main())

    return play


Play = Callable[..., None]


async def submit(r: Rig) -> LiveRequest:
    """A request whose handler reserved first."""
    live = r.prepare()
    live.quota = r.gate.quota.try_reserve(live.ticket)
    r.gate.admit(live)
    await r.settle()
    return live


def leave(r: Rig, live: LiveRequest, outcome: Outcome) -> None:
    """What the handler does at the end."""
    r.gate.leave(live, outcome)
    r.gate.quota.close(live, consumption(live, outcome))


def start_by(start: inference_pb2.Start) -> float:
    grant = grant_pb2.DispatchGrant.FromString(start.grant.payload)
    assert grant.HasField("start_by_time")
    return grant.start_by_time.seconds + grant.start_by_time.nanos / 1e9


def test_a_start_carries_the_time_by_which_it_must_start_and_is_paid_at_its_end(
    scenario: Play,
) -> None:
    """Mutant: the grant does not say so."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        before = time.time()
        live = await submit(r)
        ((_, start),) = r.execution.starts
        assert before + 2.5 <= start_by(start) <= time.time() + 2.5
        assert quota.made[0].tokens == 13 and quota.made[0].started
        await r.execution.accept()
        await r.execution.delta("Paris", 0, tokens=4)
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)
        assert quota.ends == [(0, "settled", 3 + 4)]

    scenario(body)


def test_what_lapsed_while_it_waited_is_reserved_anew_before_it_starts(scenario: Play) -> None:
    """Mutant: the answer of may_start is not looked at."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        quota.may = [0.0]
        live = await submit(r)
        assert r.execution.starts == []
        assert quota.ends == [(0, "released", 0)]
        await asyncio.sleep(quota.answer_s)
        assert len(r.execution.starts) == 1
        assert live.quota is quota.made[1] and live.quota.started
        await r.execution.accept()
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)
        assert quota.ends[1:] == [(1, "settled", 3 + 1)]

    scenario(body)


def test_what_lapsed_and_finds_no_quota_is_refused_and_its_room_is_free(scenario: Play) -> None:
    async def body(r: Rig, quota: ScriptedQuota) -> None:
        quota.may = [-1.0]
        quota.refusal = refused(QuotaKind.REQUESTS_PER_MIN, 7.0, "t", Limits(1))
        live = await submit(r)
        await asyncio.sleep(quota.answer_s)
        assert live.error is quota.refusal and live.outcome is Outcome.QUOTA_EXCEEDED
        assert r.gate.domain.snapshot().running == 0
        leave(r, live, Outcome.QUOTA_EXCEEDED)
        assert quota.ends == [(0, "released", 0)]
        assert r.execution.starts == []

    scenario(body)


@pytest.mark.parametrize("after_s", [0.1, 0.3])
def test_a_client_that_leaves_while_quota_is_reserved_anew_leaves_nothing(
    scenario: Play, after_s: float
) -> None:
    """Mutant: what is granted to one that is gone stays held."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        quota.may = [0.0]
        live = await submit(r)
        await asyncio.sleep(after_s - 0.05)
        leave(r, live, Outcome.CANCELLED)
        await asyncio.sleep(1.0)
        assert [end[1] for end in quota.ends] == ["released", "released"]
        assert len(r.execution.cancels) == len(r.execution.starts)
        if r.execution.starts:
            await r.execution.end(reason=result_pb2.FINISH_REASON_CANCELLED)

    scenario(body)


def test_an_instance_lost_while_quota_is_reserved_anew_costs_no_request(scenario: Play) -> None:
    """Mutant: nobody tells the domain that the attempt failed."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        quota.may = [0.0]
        live = await submit(r)
        await r.execution.lose("chat-0")
        await asyncio.sleep(quota.answer_s)
        r.report()
        await asyncio.sleep(1.0)
        assert len(r.execution.starts) == 1
        await r.execution.accept()
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)

    scenario(body)


def test_a_request_that_yields_while_quota_is_reserved_anew_starts_once_and_counted(
    scenario: Play,
) -> None:
    """Mutants: the second attempt starts uncounted; the first one starts too."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        quota.may = [0.0]
        live = await submit(r)
        ticket = live.ticket
        assert ticket.instance is not None
        ticket.state = TicketState.YIELDING
        r.gate._yield(Yield(ticket, ticket.instance, ticket.attempt), 0.0)
        r.gate.post(lambda now: None)
        await r.settle()
        assert ticket.attempt == 2 and r.execution.starts == []
        await asyncio.sleep(quota.answer_s)
        assert len(r.execution.starts) == 1 and live.attempt == 2
        assert quota.made[1].started
        await r.execution.accept()
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)

    scenario(body)


async def _reject_lapsed(r: Rig) -> None:
    name, start = r.execution.starts[-1]
    frame = inference_pb2.GenerateFramesResponse()
    event = frame.events.add(slot=start.slot, attempt=start.attempt)
    event.rejected.reason = inference_pb2.REJECT_REASON_INVALID
    event.rejected.status.CopyFrom(to_status(permission_denied(GRANT_LAPSED, "late")))
    await r.execution.send(name, frame)
    await r.settle()


def test_a_start_that_came_too_late_for_its_quota_is_placed_again(scenario: Play) -> None:
    """Mutant: it ends as a refusal of the instance."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        live = await submit(r)
        await _reject_lapsed(r)
        assert len(r.execution.starts) == 2 and not live.over
        assert live.ticket.attempts == 0
        await r.execution.accept()
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)

    scenario(body)


def test_a_clock_that_is_ahead_ends_in_a_typed_error_and_not_in_a_loop(scenario: Play) -> None:
    async def body(r: Rig, quota: ScriptedQuota) -> None:
        live = await submit(r)
        for _ in range(LAPSES_MAX + 1):
            await _reject_lapsed(r)
        assert len(r.execution.starts) == LAPSES_MAX + 1
        assert live.error is not None and live.error.reason == "CLOCKS_DIFFER"
        assert live.error.code is Code.UNAVAILABLE
        leave(r, live, Outcome.INSTANCE_FAILED)
        assert quota.ends == [(0, "released", 0)]

    scenario(body)


def test_use_is_reported_now_and_then_while_it_runs(scenario: Play) -> None:
    async def body(r: Rig, quota: ScriptedQuota) -> None:
        live = await submit(r)
        await r.execution.accept()
        for token in range(30):
            await r.execution.delta("a", token)
            await asyncio.sleep(0.1)
        assert 5 <= len(quota.reports) <= 7
        gaps = [b[0] - a[0] for a, b in zip(quota.reports, quota.reports[1:], strict=False)]
        assert min(gaps) >= 0.5 - 1e-6
        assert [tokens for _, tokens in quota.reports] == sorted(t for _, t in quota.reports)
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)
        assert quota.ends == [(0, "settled", 33)]

    scenario(body)


def test_a_request_moved_after_a_lapse_pays_its_output_once(scenario: Play) -> None:
    async def body(r: Rig, quota: ScriptedQuota) -> None:
        live = await submit(r)
        await r.execution.accept()
        await r.execution.delta("abcde", 0, tokens=5)
        await r.settle()
        await r.gate.quota.renew(live)
        assert quota.ends == [(0, "settled", 8)]
        assert quota.made[1].tokens == 13 - 8
        await r.execution.delta("fg", 5, tokens=2)
        await r.execution.end()
        await r.settle()
        leave(r, live, Outcome.FINISHED)
        assert quota.ends[1] == (1, "settled", 2)

    scenario(body)


@pytest.mark.parametrize(
    ("accepted", "tokens", "outcome", "paid"),
    [
        (False, 0, Outcome.CANCELLED, None),
        (False, 0, Outcome.QUEUE_FULL, None),
        (True, 0, Outcome.CANCELLED, 3),
        (True, 0, Outcome.DEADLINE_EXCEEDED, 3),
        (True, 0, Outcome.INSTANCE_FAILED, None),
        (True, 0, Outcome.FIRST_TOKEN_TIMEOUT, None),
        (True, 2, Outcome.INSTANCE_FAILED, 5),
        (True, 2, Outcome.SLOW_CONSUMER, 5),
    ],
)
def test_what_is_paid(
    scenario: Play, accepted: bool, tokens: int, outcome: Outcome, paid: int | None
) -> None:
    """Mutants: nothing is paid after a failure; a prompt that the engine never took is paid."""

    async def body(r: Rig, quota: ScriptedQuota) -> None:
        live = await submit(r)
        if accepted:
            await r.execution.accept()
        if tokens:
            await r.execution.delta("a", 0, tokens=tokens)
        await r.settle()
        leave(r, live, outcome)
        await r.settle()
        await r.execution.end(reason=result_pb2.FINISH_REASON_CANCELLED)
        expected = (0, "released", 0) if paid is None else (0, "settled", paid)
        assert quota.ends == [expected]
        r.gate.quota.close(live, NOTHING_USED)  # nothing is open any more

    scenario(body)
