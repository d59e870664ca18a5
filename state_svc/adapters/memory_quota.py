"""Quotas in this process's memory: the twin of the real store, for tests and simulation.

Its clock is the event loop's, so that it runs in virtual time. Nothing is evicted: one small book
per tenant ever seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sluice.quota.exchange import (
    BUCKET_MS,
    WINDOW_MS,
    Answer,
    Exchange,
    QuotaUse,
    StaleExchangeError,
)
from state_svc.domain.quota_book import QuotaBook, TooManyHoldersError


class MemoryQuotaStore:
    """A :class:`state_svc.ports.QuotaStore`."""

    def __init__(
        self,
        window_ms: int = WINDOW_MS,
        bucket_ms: int = BUCKET_MS,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self._window_ms, self._bucket_ms = window_ms, bucket_ms
        self._clock_ms = clock_ms or _loop_ms
        self._books: dict[str, QuotaBook] = {}

    async def exchange(self, parts: Sequence[tuple[str, Exchange]]) -> list[Answer | Exception]:
        """See :class:`state_svc.ports.QuotaStore`."""
        return [self._one(tenant, exchange) for tenant, exchange in parts]

    def _one(self, tenant: str, exchange: Exchange) -> Answer | Exception:
        book = self._books.get(tenant)
        if book is None:
            book = self._books[tenant] = QuotaBook(self._window_ms, self._bucket_ms)
        try:
            return book.exchange(exchange, self._clock_ms())
        except (StaleExchangeError, TooManyHoldersError) as error:
            return error

    async def use(self, tenant: str) -> QuotaUse:
        """See :class:`state_svc.ports.QuotaStore`."""
        book = self._books.get(tenant)
        return QuotaUse() if book is None else book.use(self._clock_ms())


def _loop_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)
