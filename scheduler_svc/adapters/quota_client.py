"""Quotas through the state service: keeps an account per tenant and its exchanges going.

One event loop. :meth:`QuotaClient.run` is the only sender: it gathers the accounts that are due
into one call of at most 64 tenants, with at most ``CALLS_MAX`` calls under way and never two for
one account. Requests that come while an account's exchange is under way leave together in the next.

The clock is read anew at every use and counts while the process is stopped (CLOCK_MONOTONIC); the
event loop's own time stands still within a turn, which a stopped process would carry into its next
life. It does not count while a whole machine sleeps: there the grant's wall-clock expiry holds.

Failure: while the service does not answer, each tenant's policy decides at once (open: go on,
uncounted; closed: QUOTA_UNREACHABLE), one exchange per account is repeated every ``retry_s``,
settlements gather in sums, and the first answer ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc.aio

from scheduler_svc.domain.quota import (
    AccountCounts,
    Outcome,
    QuotaAccount,
    QuotaTimes,
    Reservation,
    Waiter,
)
from scheduler_svc.quota_ports import QuotaTransport
from sluice import logs
from sluice.errors import SluiceError
from sluice.quota.exchange import TENANTS_MAX, Answer, Exchange, Limits
from sluice.quota.wire import exchange_message, read_answer
from sluice.state.v1 import quota_pb2
from sluice.state.v1.quota_pb2_grpc import QuotaServiceStub
from sluice.status import from_rpc_error

CALLS_MAX: Final = 4
DRAIN_POLL_S: Final = 0.01
STANDSTILL_S: Final = 0.1  # later than that: this process stood still
IDLE_S: Final = 60.0  # an account that holds nothing is forgotten after this
FORGET_INTERVAL_S: Final = 1.0

log = logs.get(__name__)


class GrpcQuotaTransport:
    """A :class:`scheduler_svc.quota_ports.QuotaTransport` over a channel to the service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = QuotaServiceStub(channel)

    async def exchange(
        self, holder: str, parts: Sequence[tuple[str, Exchange]], timeout_s: float
    ) -> list[Answer | None]:
        """See :class:`scheduler_svc.quota_ports.QuotaTransport`."""
        request = quota_pb2.ExchangeRequest(
            holder=holder, tenants=[exchange_message(tenant, one) for tenant, one in parts]
        )
        try:
            response = await self._stub.Exchange(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        answers: list[Answer | None] = []
        for result in response.results:
            if result.error_reason:
                log.warning("exchange of quota failed", reason=result.error_reason)
            answers.append(None if result.error_reason else read_answer(result))
        return answers


class QuotaClient:
    """A :class:`scheduler_svc.quota_ports.QuotaPort`. ``holder`` names this process's life: its
    name and an incarnation that no other start shares."""

    def __init__(
        self,
        holder: str,
        transport: QuotaTransport,
        clock: Callable[[], float],
        times: QuotaTimes | None = None,
    ) -> None:
        self.exchanges = 0
        self.exchanges_failed = 0
        self.slowest_s = 0.0
        self.counts = AccountCounts()
        self._holder = holder
        self._transport = transport
        self._clock = clock
        self._times = times or QuotaTimes()
        self._tenants: dict[str, tuple[Limits, bool]] = {}
        self._accounts: dict[str, QuotaAccount] = {}
        # Those that are not idle, and some that are since the last look: all that is ever due.
        self._busy: dict[str, QuotaAccount] = {}
        self._used_at: dict[str, float] = {}
        self._forget_at = 0.0
        self._futures: dict[Waiter, asyncio.Future[Reservation]] = {}
        self._wake = asyncio.Event()
        self._asleep_until = 0.0  # not asleep
        self._calls = 0
        self._sequence = 0

    # --- the port ------------------------------------------------------------------------------

    def set_tenant(self, tenant: str, limits: Limits, *, fail_open: bool) -> None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        self._tenants[tenant] = (limits, fail_open)
        if (account := self._accounts.get(tenant)) is not None:
            account.set_limits(limits, fail_open=fail_open)

    def remove_tenant(self, tenant: str) -> None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        self._tenants.pop(tenant, None)

    def try_reserve(self, tenant: str, tokens: int) -> Reservation | None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        account = self._account(tenant)
        if account is None:
            return Reservation(tenant, tokens)
        made = account.reserve(tokens, self._clock())
        if made is not None and account.lease_low:
            self._nudge(account)
        return made

    async def reserve(self, tenant: str, tokens: int) -> Reservation:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        if (made := self.try_reserve(tenant, tokens)) is not None:
            return made
        account = self._account(tenant)
        assert account is not None, "an account's tenant was removed without a wait"
        asked = account.ask(tokens, self._clock())
        if isinstance(asked, Reservation):
            return asked
        if isinstance(asked, SluiceError):
            raise asked
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._futures[asked] = future
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            account.give_up(asked)
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            self._futures.pop(asked, None)

    def may_start(self, reservation: Reservation) -> float:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        if not reservation.counted:
            return float("inf")
        return self._held(reservation).may_start(reservation, self._clock())

    def started(self, reservation: Reservation) -> None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        reservation.started = True

    def progressed(self, reservation: Reservation, used_tokens: int) -> None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        if reservation.counted:
            account = self._held(reservation)
            account.progressed(reservation, used_tokens, self._clock())
            self._nudge(account)

    def settle(self, reservation: Reservation, used_tokens: int) -> None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        if reservation.counted and reservation.open:
            account = self._held(reservation)
            account.settle(reservation, used_tokens, self._clock())
            self._nudge(account)
        reservation.open = False

    def release(self, reservation: Reservation) -> None:
        """See :class:`scheduler_svc.quota_ports.QuotaPort`."""
        if reservation.counted and reservation.open:
            account = self._held(reservation)
            account.release(reservation, self._clock())
            self._nudge(account)
        reservation.open = False

    def _nudge(self, account: QuotaAccount) -> None:
        """Wakes :meth:`run` when the account has something due before it would wake by itself."""
        due = account.due_at()
        if due is not None and due < self._asleep_until:
            self._wake.set()

    # --- accounts ------------------------------------------------------------------------------

    def take_slowest_s(self) -> float:
        """The longest exchange since this was last asked, in seconds."""
        slowest_s, self.slowest_s = self.slowest_s, 0.0
        return slowest_s

    @property
    def accounts(self) -> Sequence[QuotaAccount]:
        """The accounts, for metrics and tests."""
        return tuple(self._accounts.values())

    def _account(self, tenant: str) -> QuotaAccount | None:
        known = self._tenants.get(tenant)
        if known is None or known[0].unlimited:
            return None
        now = self._clock()
        self._used_at[tenant] = now
        account = self._accounts.get(tenant)
        if account is None:
            limits, fail_open = known
            account = QuotaAccount(
                tenant, self._holder, self._times, limits, fail_open, now, self.counts
            )
            self._accounts[tenant] = account
        self._busy[tenant] = account
        return account

    def _held(self, reservation: Reservation) -> QuotaAccount:
        # An account with a live reservation is never forgotten.
        return self._accounts[reservation.tenant]

    def _forget_idle(self, now: float) -> None:
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_INTERVAL_S
        idle = [
            tenant
            for tenant, account in self._accounts.items()
            if account.idle and self._used_at[tenant] + IDLE_S <= now
        ]
        for tenant in idle:
            del self._accounts[tenant], self._used_at[tenant]

    # --- exchanges -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the exchanges going until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = self._clock()
                for account in self._busy.values():
                    self._resolve(account.expire(now))
                while self._calls < CALLS_MAX and (parts := self._due(now)):
                    self._calls += 1
                    group.create_task(self._exchange(parts))
                self._forget_idle(now)
                await self._pause(now)

    async def drain(self, within_s: float) -> bool:
        """For the end of the process, after its last request: gives leases back and tells what is
        not told yet, while :meth:`run` still runs. False when that took longer than ``within_s``;
        then it comes back by itself, after the registration's time to live."""
        for account in self._accounts.values():
            account.draining = True
        self._wake.set()
        until = self._clock() + within_s
        while not all(account.idle for account in self._accounts.values()):
            if self._clock() >= until:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True

    async def _pause(self, now: float) -> None:
        times = [now + IDLE_S]
        for tenant in [tenant for tenant, account in self._busy.items() if account.idle]:
            del self._busy[tenant]  # every use brings it back
        for account in self._busy.values():
            if (late := account.expires_at()) is not None:
                times.append(late)
            if self._calls < CALLS_MAX and (due := account.due_at()) is not None:
                times.append(due)
        self._asleep_until = min(times)
        try:
            async with asyncio.timeout(max(min(times) - now, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._asleep_until = 0.0
        self._wake.clear()
        late = self._clock() - max(min(times), now)
        if late > STANDSTILL_S:
            for account in self._busy.values():
                account.stood_still(late)

    def _due(self, now: float) -> list[tuple[QuotaAccount, Exchange]]:
        parts: list[tuple[QuotaAccount, Exchange]] = []
        for account in self._busy.values():
            if len(parts) == TENANTS_MAX:
                break
            made = account.compose(self._sequence + 1, now)
            if made is not None:
                self._sequence = max(self._sequence, made.sequence)
                parts.append((account, made))
        return parts

    async def _exchange(self, parts: list[tuple[QuotaAccount, Exchange]]) -> None:
        self.exchanges += 1
        began = self._clock()
        answers: list[Answer | None] = [None] * len(parts)
        try:
            sent = [(account.tenant, exchange) for account, exchange in parts]
            got = await self._transport.exchange(self._holder, sent, self._times.wait_s)
            if len(got) == len(parts):
                answers = got
        except (SluiceError, TimeoutError):
            pass  # counted below; what failed is sent again
        finally:
            self._calls -= 1
        if None in answers:
            self.exchanges_failed += 1
        now = self._clock()
        self.slowest_s = max(self.slowest_s, now - began)
        if now - began > self._times.wait_s + STANDSTILL_S:
            log.warning("this process stood still", seconds=round(now - began, 3))
            for (account, _), answer in zip(parts, answers, strict=True):
                if answer is None:
                    account.again(now)
            parts = [part for part, answer in zip(parts, answers, strict=True) if answer]
            answers = [answer for answer in answers if answer]
        for (account, _), answer in zip(parts, answers, strict=True):
            was = account.reachable
            outcomes = account.failed(now) if answer is None else account.apply(answer, now)
            self._resolve(outcomes)
            if was != account.reachable:
                log.info("quota service", tenant=account.tenant, reachable=account.reachable)
        self._wake.set()

    def _resolve(self, outcomes: list[Outcome]) -> None:
        for waiter, outcome in outcomes:
            future = self._futures.get(waiter)
            if future is None or future.done():
                if isinstance(outcome, Reservation):
                    self.release(outcome)  # whoever asked is gone
            elif isinstance(outcome, Reservation):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
