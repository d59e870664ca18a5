"""What the gate needs to hold tenants to their quotas.

One owner task. Order of calls for a request: :meth:`QuotaPort.try_reserve`, or where that is
``None`` ``await reserve``; before each dispatch :meth:`QuotaPort.may_start`, whose seconds cap the
dispatch grant's expiry; :meth:`QuotaPort.started` once it was sent; then exactly one of
:meth:`QuotaPort.settle` (it ran) and :meth:`QuotaPort.release` (it never did), on every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.domain.quota import Reservation
from sluice.quota.exchange import Answer, Exchange, Limits


class QuotaPort(Protocol):
    """Quotas of all tenants, as one holder."""

    def set_tenant(self, tenant: str, limits: Limits, *, fail_open: bool) -> None:
        """Tells a tenant's limits, and whether its requests go on, uncounted, while the state
        service is unreachable. Takes effect for the next reservation."""

    def remove_tenant(self, tenant: str) -> None:
        """Forgets a tenant; what it holds still settles."""

    def try_reserve(self, tenant: str, tokens: int) -> Reservation | None:
        """Reserves one request, one slot and ``tokens`` (prompt and expected output) without
        waiting: where nothing limits, or a lease has room. ``None``: call :meth:`reserve`."""

    async def reserve(self, tenant: str, tokens: int) -> Reservation:
        """The same, asking the state service. Waits at most for its answer (250 ms), and before a
        refusal for unspent leases of other schedulers (1.25 s). Raises RESOURCE_EXHAUSTED
        (QUOTA_EXCEEDED with a delay, QUOTA_TOO_SMALL without, QUOTA_QUEUE_FULL) or, for a tenant
        that fails closed, UNAVAILABLE (QUOTA_UNREACHABLE); nothing is charged then. Cancelling
        it gives back what it may have been granted."""

    def may_start(self, reservation: Reservation) -> float:
        """Seconds, from now, until which work under it may start; infinite when uncounted. 0 or
        less: the registration lapsed (this process stood still, or the state service was
        unreachable too long): release it and reserve anew, or refuse."""

    def started(self, reservation: Reservation) -> None:
        """Work under it was dispatched."""

    def progressed(self, reservation: Reservation, used_tokens: int) -> None:
        """It has used so many tokens so far. Optional, at most a few times a second: it is what
        the tenant pays for if this process is killed."""

    def settle(self, reservation: Reservation, used_tokens: int) -> None:
        """It ended, having used so many tokens. Idempotent."""

    def release(self, reservation: Reservation) -> None:
        """It never ran; nothing is charged. Idempotent."""


class QuotaTransport(Protocol):
    """The way to the state service."""

    async def exchange(
        self, holder: str, parts: Sequence[tuple[str, Exchange]], timeout_s: float
    ) -> list[Answer | None]:
        """Carries out exchanges of different tenants. ``None`` in place of an answer: that one
        failed, or it is not known. Raises SluiceError or TimeoutError when all did."""
