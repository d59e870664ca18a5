"""Usage and decision records in Redis or Valkey.

Usage: one hash per hour, ``sluice:{<tenant>}:usage:<hour>``, fields ``<name>|<model>``, kept 100
days; ``...:usage:batch:<id>`` marks what was added, for a day. They outlast their tenant, as the
operator's; ``...:usage:since``, an hour, bounds what a later tenant of the name sees.
Decisions: one string each, ``sluice:{<tenant>}:decision:<request id>``, and
``sluice:{<tenant>}:decisions`` with their ids by age. All owned here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from redis.asyncio import Redis

from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.ports import TenantDeletedError, UsageKey

USAGE_KEPT_S: Final = 100 * 86_400
BATCH_KEPT_S: Final = 86_400
DECISION_KEPT_S: Final = 86_400
DECISIONS_MAX: Final = 10_000  # per tenant

_USAGE: Final = Script("usage.lua")
_DECISIONS: Final = Script("tenant_guard.lua", "decisions.lua")


class ValkeyUsage:
    """A :class:`state_svc.ports.UsageStore`."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link

    async def append(
        self, tenant: str, batch_id: str, amounts: Mapping[UsageKey, Mapping[str, float]]
    ) -> bool:
        """See :class:`state_svc.ports.UsageStore`."""
        hours = sorted({key.hour for key in amounts})
        keys = [f"{usage_prefix(tenant)}batch:{batch_id}"]
        keys += [_hour_key(tenant, hour) for hour in hours]
        arguments: list[Argument] = [BATCH_KEPT_S, USAGE_KEPT_S]
        for key, names in amounts.items():
            for name, amount in names.items():
                arguments += (hours.index(key.hour) + 1, f"{name}|{key.model}", amount)
        return bool(await self._link.script(_USAGE, keys, arguments))

    async def query(
        self, tenant: str, begin_hour: int, end_hour: int, *, earlier: bool = False
    ) -> Mapping[UsageKey, Mapping[str, float]]:
        """See :class:`state_svc.ports.UsageStore`."""
        hours = range(begin_hour, end_hour)

        async def read(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.get(usage_since_key(tenant))
                for hour in hours:
                    pipeline.hgetall(_hour_key(tenant, hour))
                return await pipeline.execute()

        since, *replies = await self._link.run(read)
        first = 0 if earlier or since is None else int(since)
        found: dict[UsageKey, dict[str, float]] = {}
        for hour, fields in zip(hours, replies, strict=True):
            if hour < first:
                continue
            for field, amount in fields.items():
                name, _, model = text(field).partition("|")
                found.setdefault(UsageKey(hour, model), {})[name] = float(amount)
        return found


class ValkeyDecisions:
    """A :class:`state_svc.ports.DecisionStore`."""

    def __init__(
        self, link: ValkeyLink, kept_s: int = DECISION_KEPT_S, decisions_max: int = DECISIONS_MAX
    ) -> None:
        self._link = link
        self._kept_s, self._max = kept_s, decisions_max

    async def put(self, tenant: str, decisions: Mapping[str, bytes]) -> None:
        """See :class:`state_svc.ports.DecisionStore`."""
        prefix = f"sluice:{{{tenant}}}:decision:"
        keys = [f"sluice:{{{tenant}}}:decisions", *(prefix + one for one in decisions)]
        arguments: list[Argument] = [self._kept_s, self._max, prefix]
        for request_id, record in decisions.items():
            arguments += (request_id, record)
        with suppress(TenantDeletedError):  # nobody may read them any more
            await self._link.script(_DECISIONS, keys, arguments)

    async def get(self, tenant: str, request_id: str) -> bytes | None:
        """See :class:`state_svc.ports.DecisionStore`."""
        key = f"sluice:{{{tenant}}}:decision:{request_id}"
        record = await self._link.run(lambda client: client.get(key))
        return record.encode() if isinstance(record, str) else record


def usage_prefix(tenant: str) -> str:
    """How the keys of a tenant's ledger begin."""
    return f"sluice:{{{tenant}}}:usage:"


def usage_since_key(tenant: str) -> str:
    """The first hour that the tenant of today may see. Owned by ``tenant_fence.lua``."""
    return f"{usage_prefix(tenant)}since"


def _hour_key(tenant: str, hour: int) -> str:
    return f"{usage_prefix(tenant)}{hour}"
