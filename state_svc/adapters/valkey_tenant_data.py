"""All keys of a tenant in Redis or Valkey: closed to scripts, deleted, opened again.

The fence ``sluice:{<tenant>}:deletion`` is described in ``tenant_fence.lua``. Keys are found by
SCAN over the server, :data:`KEYS_AT_ONCE` looked at in a step, so that others are answered between
the steps; what is there when it begins and is not written meanwhile is found. In a cluster all keys
of a tenant are on the node of its hash tag: the scan is of that node.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis

from sluice import logs
from state_svc.adapters.valkey_ledger import USAGE_KEPT_S, usage_prefix, usage_since_key
from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.adapters.valkey_quota import quota_key
from state_svc.domain.names import RESERVED

KEYS_AT_ONCE: Final = 1_000
FENCE_KEPT_S: Final = USAGE_KEPT_S

_SCRIPT: Final = Script("tenant_fence.lua", frees=True)

log = logs.get(__name__)


class ValkeyTenantData:
    """A :class:`state_svc.deletion_ports.TenantData`. ``has_usage``: the ledger is here."""

    def __init__(self, link: ValkeyLink, *, has_usage: bool) -> None:
        self._link, self._has_usage = link, has_usage

    async def close(self, tenant: str, number: int) -> bool:
        """See :class:`state_svc.deletion_ports.TenantData`."""
        arguments: list[Argument] = ["close", number, FENCE_KEPT_S]
        return bool(await self._link.script(_SCRIPT, [fence_key(tenant)], arguments))

    async def purge(self, tenant: str, number: int) -> bool:
        """See :class:`state_svc.deletion_ports.TenantData`."""
        if tenant in RESERVED:  # made by an earlier release; these keys are not its own alone
            log.error("a deleted tenant had a reserved name: its data stays")
            return True
        fence, cursor = fence_key(tenant), 0
        while True:
            cursor, found = await self._look(tenant, cursor)
            keys = [key for key in found if key != fence and not _is_kept(tenant, key)]
            if not await self._link.script(_SCRIPT, [fence, *keys], ["purge", number]):
                return False
            if cursor == 0:
                return True

    async def open(self, tenant: str, number: int) -> None:
        """See :class:`state_svc.deletion_ports.TenantData`."""
        keys = [fence_key(tenant), usage_since_key(tenant), quota_key(tenant)]
        arguments: list[Argument] = ["open", number, FENCE_KEPT_S, int(self._has_usage)]
        await self._link.script(_SCRIPT, keys, arguments)

    async def _look(self, tenant: str, cursor: int) -> tuple[int, list[str]]:
        # Names of tenants hold no character that means something in a pattern.
        pattern = f"sluice:{{{tenant}}}:*"

        async def scan(client: Redis) -> Any:
            return await client.scan(cursor, match=pattern, count=KEYS_AT_ONCE)

        following, found = await self._link.run(scan)
        return int(following), [text(key) for key in found]


def fence_key(tenant: str) -> str:
    """Where scripts see that a tenant is deleted."""
    return f"sluice:{{{tenant}}}:deletion"


def _is_kept(tenant: str, key: str) -> bool:
    """Whether it is of the ledger of usage, which is the operator's."""
    return key.startswith(usage_prefix(tenant))
