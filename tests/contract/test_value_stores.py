"""Values and blobs: one contract for the stores in memory and the real ones on Valkey.

Oracle: the ports' own words (state_svc/ports.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from state_svc.adapters.memory_values import MemoryBlobs, MemoryValues
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_values import ValkeyBlobs, ValkeyValues
from state_svc.ports import (
    BlobPart,
    BlobStore,
    KeyValueStore,
    LimitReachedError,
    ValueLimits,
    VersionConflictError,
)
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

LONG_MS = 60_000
LIMITS = ValueLimits(items_max=5, bytes_max=1_000)


@dataclass
class Stores:
    values: KeyValueStore
    blobs: BlobStore
    link: ValkeyLink | None = None


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture(params=["memory", "valkey"])
async def stores(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Stores]:
    if request.param == "memory":
        yield Stores(MemoryValues(LIMITS), MemoryBlobs(LIMITS))
        return
    link = ValkeyLink(server.url, PATIENT_S)
    await link.run(lambda client: client.flushdb())
    yield Stores(ValkeyValues(link, LIMITS), ValkeyBlobs(link, LIMITS), link)
    await link.close()


async def test_a_value_is_written_by_compare_and_set(stores: Stores) -> None:
    values = stores.values
    assert await values.get("a", "k") is None
    first = await values.put("a", "k", b"one\x00", LONG_MS, expected=0)
    with pytest.raises(VersionConflictError):
        await values.put("a", "k", b"two", LONG_MS, expected=0)
    with pytest.raises(VersionConflictError):
        await values.delete("a", "k", expected=first + 1)
    second = await values.put("a", "k", b"two", LONG_MS, expected=first)
    assert second > first
    with pytest.raises(VersionConflictError):
        await values.put("a", "k", b"three", LONG_MS, expected=first)
    found = await values.get("a", "k")
    assert found is not None
    assert (found.value, found.version) == (b"two", second)
    assert await values.get("b", "k") is None
    assert await values.delete("a", "k", expected=second)
    assert not await values.delete("a", "k", expected=second)


async def test_a_value_made_anew_has_a_version_of_its_own(stores: Stores) -> None:
    values = stores.values
    first = await values.put("a", "k", b"1", LONG_MS)
    await values.delete("a", "k")
    await values.put("a", "k", b"2", LONG_MS)
    with pytest.raises(VersionConflictError):
        await values.put("a", "k", b"3", LONG_MS, expected=first)


async def test_of_writers_at_once_exactly_one_wins(stores: Stores) -> None:
    async def write(n: int) -> bool:
        try:
            await stores.values.put("a", "k", b"%d" % n, LONG_MS, expected=0)
        except VersionConflictError:
            return False
        return True

    assert sum(await asyncio.gather(*(write(n) for n in range(20)))) == 1


async def pttl(link: ValkeyLink, key: str) -> int:
    """Milliseconds that a key has left; negative: no end."""
    return int(await link.run(lambda client: client.pttl(key)))


async def test_values_and_blobs_end_with_their_time(stores: Stores) -> None:
    for n in range(5):
        await stores.values.put("a", f"k{n}", b"x" * 100, 30)
        await stores.blobs.put("a", "run", f"b{n}", b"x" * 100, 30)
    if stores.link is not None:  # so does what is counted of them, somewhat later
        for name in ("values", "values:sizes", "blobs", "blob-sizes"):
            key = f"sluice:{{a}}:{name}"
            left_ms = await pttl(stores.link, key)
            assert 0 < left_ms <= 3_600_030
    await stores.blobs.put("b", "run", "b", b"", LONG_MS)
    await asyncio.sleep(0.06)
    assert await stores.values.get("a", "k0") is None
    assert await stores.blobs.get("a", "run", "b0", 0, 10) is None
    # What has ended is not counted any more, neither by number nor by size.
    for n in range(5):
        await stores.values.put("a", f"new{n}", b"x" * 150, LONG_MS)
        await stores.blobs.put("a", "run", f"new{n}", b"x" * 150, LONG_MS)
    assert await stores.blobs.delete_all("a", "run") == 5


async def test_a_tenant_stores_as_much_as_it_may_and_no_more(stores: Stores) -> None:
    values, blobs = stores.values, stores.blobs
    for n in range(5):
        await values.put("a", f"k{n}", b"", LONG_MS)
        await blobs.put("a", f"o{n}", "b", b"", LONG_MS)
    with pytest.raises(LimitReachedError) as raised:
        await values.put("a", "k5", b"", LONG_MS)
    assert raised.value.limit == "values_max"
    with pytest.raises(LimitReachedError) as raised:
        await blobs.put("a", "o5", "b", b"", LONG_MS)
    assert raised.value.limit == "blobs_max"
    await values.put("b", "k5", b"", LONG_MS)  # another tenant's room is its own
    await values.put("a", "k0", b"x" * 990, LONG_MS)  # 990 and five names of 2
    with pytest.raises(LimitReachedError) as raised:
        await values.put("a", "k1", b"x", LONG_MS)
    assert raised.value.limit == "values_bytes_max"
    await values.put("a", "k0", b"", LONG_MS)
    await values.put("a", "k1", b"x", LONG_MS)
    with pytest.raises(LimitReachedError) as raised:
        await blobs.put("a", "o0", "b", b"x" * 1_000, LONG_MS)
    assert raised.value.limit == "blobs_bytes_max"
    await values.delete("a", "k2")
    await values.put("a", "k5", b"", LONG_MS)


async def test_a_blob_is_read_in_parts(stores: Stores) -> None:
    blobs = stores.blobs
    await blobs.put("a", "run", "b", b"0123456789", LONG_MS)
    assert await blobs.get("a", "run", "b", 0, 4) == BlobPart(b"0123", 10)
    assert await blobs.get("a", "run", "b", 8, 100) == BlobPart(b"89", 10)
    assert await blobs.get("a", "run", "b", 10, 100) == BlobPart(b"", 10)
    await blobs.put("a", "run", "b", b"", LONG_MS)
    assert await blobs.get("a", "run", "b", 0, 4) == BlobPart(b"", 0)
    for other in (("b", "run", "b"), ("a", "runs", "b"), ("a", "run", "c")):
        assert await blobs.get(*other, 0, 4) is None


async def test_blobs_go_with_their_owner_and_with_nobody_else(stores: Stores) -> None:
    blobs = stores.blobs
    for owner, name in (("r:1", "x"), ("r:1", "y"), ("r", "1:x")):
        await blobs.put("a", owner, name, b"1", LONG_MS)
    assert await blobs.delete_all("b", "r:1") == 0
    assert await blobs.delete_all("a", "r:1") == 2
    assert await blobs.delete_all("a", "r:1") == 0
    assert await blobs.get("a", "r:1", "x", 0, 1) is None
    assert await blobs.get("a", "r", "1:x", 0, 1) is not None
    if stores.link is not None:
        keys = await stores.link.run(lambda client: client.keys("*r:1*"))
        assert not keys
