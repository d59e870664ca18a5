"""The version of what is stored, and the way from one version to the next.

``sluice:{schema}:version`` holds a number. A store without one is new. Migrations run in order,
each safe to run twice, before the service says that it is up; every replica may run them. A
store that a newer release has written is not touched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from redis.asyncio import Redis

from sluice import logs
from state_svc.adapters.valkey_link import ValkeyLink, text

SCHEMA_VERSION: Final = 1
KEY: Final = "sluice:{schema}:version"

Migration = Callable[[Redis], Awaitable[None]]
# From the version that is the key to the next one.
MIGRATIONS: Final[Mapping[int, Migration]] = {}

log = logs.get(__name__)


class SchemaTooNewError(Exception):
    """The store was written by a newer release."""


async def ensure_schema(
    link: ValkeyLink,
    version: int = SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> None:
    """Brings the store to ``version``. Raises SchemaTooNewError, StoreUnavailableError."""

    async def run(client: Redis) -> None:
        known = await client.get(KEY)
        if (
            known is None
        ):  # a store whose memory is full takes no write, not even one without effect
            await client.set(KEY, version, nx=True)
            known = await client.get(KEY)
        stored = int(text(known or str(version)))
        if stored > version:
            raise SchemaTooNewError(f"the store is at version {stored}, this release at {version}")
        for number in range(stored, version):
            log.info("migrating the store", from_version=number)
            await migrations[number](client)
            await client.set(KEY, number + 1)

    await link.run(run)
