"""What the state service needs from a store.

Every method is atomic for one tenant, may block on the network, and raises
:class:`StoreUnavailableError` within the store's own bounded time when the store is slow, frozen or
gone; what was asked may then have happened or not. Keys carry the tenant, so that one tenant's call
cannot reach another's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sluice.quota.exchange import Answer, Exchange, QuotaUse


class StoreUnavailableError(Exception):
    """The store did not answer in time, or refused the connection. The text is for logs."""


class QuotaStore(Protocol):
    """Quotas; volatile store. Rules: ``state_svc/domain/quota_book.py``."""

    async def exchange(self, parts: Sequence[tuple[str, Exchange]]) -> list[Answer | Exception]:
        """Carries out exchanges of different tenants, each atomically and by itself. A failed one
        is an exception in its place: StaleExchangeError, TooManyHoldersError,
        StoreUnavailableError. Repeating an exchange with its sequence is safe."""

    async def use(self, tenant: str) -> QuotaUse:
        """What is reserved now; all zero for an unknown tenant."""
