"""Quotas in Redis or Valkey: one script per tenant and exchange, on the server's own time.

One hash per tenant, ``sluice:{<tenant>}:quota``, owned here, kept for two days after the last
exchange. A crash of this process before or after a script leaves nothing half done; an exchange
whose answer was lost is repeated with its sequence and answered as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redis.asyncio import Redis

from sluice.quota.exchange import (
    BUCKET_MS,
    WINDOW_MS,
    Amounts,
    Answer,
    Decision,
    Exchange,
    QuotaKind,
    QuotaUse,
    StaleExchangeError,
    Verdict,
)
from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.domain.quota_book import DAY_MS, TooManyHoldersError
from state_svc.ports import StoreUnavailableError

UNLIMITED: Final = -1
_SCRIPT: Final = Script("quota.lua")


def quota_key(tenant: str) -> str:
    """The hash of a tenant's quotas."""
    return f"sluice:{{{tenant}}}:quota"


class ValkeyQuotaStore:
    """A :class:`state_svc.ports.QuotaStore`."""

    def __init__(
        self,
        link: ValkeyLink,
        window_ms: int = WINDOW_MS,
        bucket_ms: int = BUCKET_MS,
    ) -> None:
        self._link = link
        self._window_ms, self._bucket_ms = window_ms, bucket_ms
        self.clock_ms = 0  # a test's own time; 0: the server's

    async def exchange(self, parts: Sequence[tuple[str, Exchange]]) -> list[Answer | Exception]:
        """See :class:`state_svc.ports.QuotaStore`."""
        calls = [([quota_key(tenant)], self._arguments(exchange)) for tenant, exchange in parts]
        try:
            replies = await self._link.scripts(_SCRIPT, calls)
        except StoreUnavailableError as error:
            return [error] * len(parts)
        return [_answer(reply) for reply in replies]

    async def use(self, tenant: str) -> QuotaUse:
        """See :class:`state_svc.ports.QuotaStore`."""

        async def read(client: Redis) -> tuple[dict[str, str], int]:
            fields = await client.hgetall(quota_key(tenant))
            seconds, micros = await client.time()
            known = {text(name): text(value) for name, value in fields.items()}
            return known, self.clock_ms or seconds * 1000 + micros // 1000

        known, clock_ms = await self._link.run(read)
        return _use(known, clock_ms, self._window_ms, self._bucket_ms)

    def _arguments(self, exchange: Exchange) -> list[Argument]:
        limits, lease = exchange.limits, exchange.lease
        arguments: list[Argument] = [
            exchange.holder,
            exchange.sequence,
            exchange.running,
            exchange.holder_ttl_ms,
            self.clock_ms,
            self._window_ms,
            self._bucket_ms,
            *(
                UNLIMITED if limit is None else limit
                for limit in (
                    limits.requests_per_min,
                    limits.tokens_per_min,
                    limits.concurrent_requests,
                    limits.tokens_per_day,
                )
            ),
            exchange.lease_ms,
            lease.requests,
            lease.tokens,
            lease.slots,
            exchange.overuse_tokens,
            len(exchange.settlements),
        ]
        for one in exchange.settlements:
            arguments += (one.epoch, one.bucket, one.day)
            arguments += (one.reserved.requests, one.reserved.tokens, one.reserved.slots)
            arguments += (one.requests_refund, one.tokens_refund)
        arguments.append(len(exchange.needs))
        for need in exchange.needs:
            arguments += (need.tokens, int(need.final))
        return arguments


def _answer(reply: bytes) -> Answer | Exception:
    if reply == b"STALE":
        return StaleExchangeError()
    if reply == b"FULL":
        return TooManyHoldersError()
    numbers = [int(word) for word in reply.split()]
    epoch, bucket, day, requests, tokens, slots, lease_ms, contended = numbers[:8]
    verdicts = zip(numbers[8::3], numbers[9::3], numbers[10::3], strict=True)
    return Answer(
        epoch=epoch,
        bucket=bucket,
        day=day,
        lease=Amounts(requests, tokens, slots),
        lease_ms=lease_ms,
        contended=bool(contended),
        verdicts=tuple(Verdict(Decision(d), delay, QuotaKind(q)) for d, delay, q in verdicts),
    )


def _use(known: dict[str, str], clock_ms: int, window_ms: int, bucket_ms: int) -> QuotaUse:
    now = max(clock_ms + int(known.get("o", 0)), int(known.get("t", 0)))
    tail = (now - window_ms) // bucket_ms
    sums = {"r": 0, "k": 0}
    for name, value in known.items():
        if name[0] in sums and name[1:].isdigit() and int(name[1:]) >= tail:
            sums[name[0]] += int(value)
    same_day = clock_ms // DAY_MS <= int(known.get("d", 0))
    return QuotaUse(
        requests=sums["r"],
        tokens=sums["k"],
        slots=int(known.get("c", 0)),
        day_tokens=int(known.get("dk", 0)) if same_day else 0,
        holders=sum(1 for name in known if name.startswith("n:")),
    )
