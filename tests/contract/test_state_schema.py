"""The version of what is stored, on a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from state_svc.adapters.schema import KEY, SchemaTooNewError, ensure_schema
from state_svc.adapters.valkey_link import ValkeyLink
from tests.valkey import PATIENT_S, valkey


@pytest.fixture
async def link() -> AsyncIterator[ValkeyLink]:
    with valkey() as server:
        opened = ValkeyLink(server.url, PATIENT_S)
        yield opened
        await opened.close()


async def test_a_new_store_gets_the_version_and_an_old_one_is_migrated_in_order(
    link: ValkeyLink,
) -> None:
    """Mutant: the version is written before its migration has run."""
    done: list[int] = []

    async def first(client: Redis) -> None:
        done.append(1)

    async def second(client: Redis) -> None:
        done.append(2)
        if len(done) < 3:
            raise OSError("crashed half way")

    await ensure_schema(link, 1, {})
    with pytest.raises(Exception, match="crashed half way"):
        await ensure_schema(link, 3, {1: first, 2: second})
    await ensure_schema(link, 3, {1: first, 2: second})
    assert done == [1, 2, 2]
    await ensure_schema(link, 3, {})


async def test_a_store_of_a_newer_release_is_not_touched(link: ValkeyLink) -> None:
    await link.run(lambda client: client.set(KEY, 9))
    with pytest.raises(SchemaTooNewError):
        await ensure_schema(link, 1, {})
    assert await link.run(lambda client: client.get(KEY)) == b"9"
