"""Quotas and usage as observable instruments: plain counters, read when metrics are exported."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.adapters.quota_client import QuotaClient
from scheduler_svc.adapters.usage_log import UsageLog
from sluice import telemetry_names as names
from sluice.telemetry import Labels, Telemetry


class QuotaMetrics:
    """Of one scheduler; see the module's docstring."""

    def __init__(self, telemetry: Telemetry, client: QuotaClient, usage: UsageLog) -> None:
        self._client = client
        telemetry.counter(names.QUOTA_RESERVATIONS, self._read_reservations)
        telemetry.counter(names.QUOTA_REFUSALS, self._read_refusals)
        telemetry.gauge(names.QUOTA_LEASED, self._read_leased)
        telemetry.counter(names.QUOTA_EXCHANGES, self._read_exchanges)
        telemetry.gauge(names.QUOTA_EXCHANGE_TIME, client.take_slowest_s)
        telemetry.gauge(names.USAGE_WAITING, lambda: usage.waiting)
        telemetry.counter(names.USAGE_LOST, lambda: usage.lost)

    def _read_reservations(self) -> Iterator[tuple[int, Labels]]:
        counts = self._client.counts
        yield counts.local, {"way": "leased"}
        yield counts.asked, {"way": "asked"}
        yield counts.failed_open, {"way": "uncounted"}

    def _read_refusals(self) -> Iterator[tuple[int, Labels]]:
        counts = self._client.counts
        for quota, count in list(counts.refused.items()):
            yield count, {"quota": quota.name.lower()}
        yield counts.failed_closed, {"quota": "unreachable"}

    def _read_leased(self) -> Iterator[tuple[int, Labels]]:
        leased = [account.leased for account in self._client.accounts]
        yield sum(one.requests for one in leased), {"amount": "requests"}
        yield sum(one.tokens for one in leased), {"amount": "tokens"}
        yield sum(one.slots for one in leased), {"amount": "slots"}

    def _read_exchanges(self) -> Iterator[tuple[int, Labels]]:
        failed = self._client.exchanges_failed
        yield self._client.exchanges - failed, {"result": "ok"}
        yield failed, {"result": "failed"}
