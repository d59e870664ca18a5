"""One contract for the stores in memory and the real ones on Valkey.

Goal: what holds for one holds for the other. Method: each test runs on both; the real one talks to
a Valkey process. Oracle: the ports' own words (state_svc/ports.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sluice.quota.exchange import Amounts, Answer, Decision, Exchange, Limits, Need, Settlement
from state_svc.adapters.memory_quota import MemoryQuotaStore
from state_svc.adapters.memory_stores import MemoryDecisions, MemoryRegistry, MemoryUsage
from state_svc.adapters.valkey_ledger import ValkeyDecisions, ValkeyUsage
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_quota import ValkeyQuotaStore
from state_svc.adapters.valkey_registry import ValkeyRegistry
from state_svc.ports import (
    CHILDREN_BYTES_MAX,
    CHILDREN_MAX,
    RECORDS_MAX,
    DecisionStore,
    Kind,
    NameTakenError,
    ParentMissingError,
    QuotaStore,
    RegistryFullError,
    RegistryStore,
    StoreUnavailableError,
    UsageKey,
    UsageStore,
    VersionConflictError,
)
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

DECISIONS_MAX = 5


@dataclass
class Stores:
    registry: RegistryStore
    usage: UsageStore
    decisions: DecisionStore
    quota: QuotaStore


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture(params=["memory", "valkey"])
async def stores(request: pytest.FixtureRequest, server: ValkeyProcess) -> AsyncIterator[Stores]:
    if request.param == "memory":
        yield Stores(
            MemoryRegistry(),
            MemoryUsage(),
            MemoryDecisions(decisions_max=DECISIONS_MAX),
            MemoryQuotaStore(),
        )
        return
    link = ValkeyLink(server.url, PATIENT_S)
    await link.run(lambda client: client.flushdb())
    yield Stores(
        ValkeyRegistry(link),
        ValkeyUsage(link),
        ValkeyDecisions(link, decisions_max=DECISIONS_MAX),
        ValkeyQuotaStore(link),
    )
    await link.close()


async def test_a_kind_takes_no_more_than_its_bound(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDS_MAX, Kind.ALIASES, 2)
    registry = stores.registry
    for name in ("a", "b"):
        await registry.put(Kind.ALIASES, name, b"1")
    with pytest.raises(RegistryFullError):
        await registry.put(Kind.ALIASES, "c", b"1")
    await registry.put(Kind.ALIASES, "a", b"2")  # a change of what is there
    await registry.delete(Kind.ALIASES, "b")
    await registry.put(Kind.ALIASES, "c", b"1", unique=("x:1",))
    assert await registry.find(Kind.ALIASES, "x:1") == "c"


async def test_a_record_is_written_by_compare_and_set(stores: Stores) -> None:
    registry = stores.registry
    assert (await registry.revisions([Kind.TENANTS]))[0] == 0
    first = await registry.put(Kind.TENANTS, "a", b"one", expected=0)
    with pytest.raises(VersionConflictError):
        await registry.put(Kind.TENANTS, "a", b"two", expected=0)
    second = await registry.put(Kind.TENANTS, "a", b"two \x00 words", expected=first)
    assert second > first
    third = await registry.put(Kind.TENANTS, "a", b"three")
    snapshot = await registry.read(Kind.TENANTS)
    assert snapshot.revision == third == (await registry.revisions([Kind.TENANTS]))[0]
    assert snapshot.records["a"].value == b"three"
    assert snapshot.records["a"].version == third


async def test_of_writers_at_once_exactly_one_wins(stores: Stores) -> None:
    async def write(n: int) -> bool:
        try:
            await stores.registry.put(Kind.ALIASES, "x", str(n).encode(), expected=0)
        except VersionConflictError:
            return False
        return True

    assert sum(await asyncio.gather(*(write(n) for n in range(20)))) == 1


async def test_a_key_needs_its_tenant_and_goes_with_it(stores: Stores) -> None:
    registry = stores.registry
    with pytest.raises(ParentMissingError):
        await registry.put(Kind.KEYS, "a/k1", b"", unique=("id:k1",))
    await registry.put(Kind.TENANTS, "a", b"")
    await registry.put(Kind.TENANTS, "ab", b"")
    await registry.put(Kind.KEYS, "a/k1", b"", unique=("id:k1", "sha:1"))
    await registry.put(Kind.KEYS, "ab/k2", b"", unique=("id:k2", "sha:2"))
    with pytest.raises(NameTakenError):
        await registry.put(Kind.KEYS, "a/k3", b"", unique=("id:k3", "sha:2"))
    assert await registry.find(Kind.KEYS, "id:k1") == "a/k1"
    before = (await registry.revisions([Kind.KEYS]))[0]
    assert await registry.delete(Kind.TENANTS, "a")
    assert (await registry.revisions([Kind.KEYS]))[0] > before
    assert list((await registry.read(Kind.KEYS)).records) == ["ab/k2"]
    assert await registry.find(Kind.KEYS, "id:k1") is None
    assert not await registry.delete(Kind.TENANTS, "a")
    await registry.put(Kind.KEYS, "ab/k1", b"", unique=("id:k1", "sha:1"))


async def test_a_tenant_of_many_keys_is_deleted_at_once(stores: Stores) -> None:
    # A store that is busy for longer than its time limit answers no quota either.
    registry = stores.registry
    await registry.put(Kind.TENANTS, "a", b"")
    for n in range(2_000):
        await registry.put(Kind.KEYS, f"a/k{n}", b"", unique=(f"id:k{n}", f"sha:{n}"))
    assert await registry.delete(Kind.TENANTS, "a")
    assert not (await registry.read(Kind.KEYS)).records
    assert await registry.find(Kind.KEYS, "id:k1999") is None


async def test_a_foreign_record_hides_no_other(server: ValkeyProcess) -> None:
    link = ValkeyLink(server.url, PATIENT_S)
    registry = ValkeyRegistry(link)
    await link.run(lambda client: client.flushdb())
    await registry.put(Kind.TENANTS, "a", b"one")
    await link.run(lambda client: client.hset("sluice:{registry}:tenants", "b", "no version"))
    assert list((await registry.read(Kind.TENANTS)).records) == ["a"]
    await link.run(lambda client: client.set("sluice:{registry}:tenants:revision", "many"))
    with pytest.raises(StoreUnavailableError):  # what was read last stays, and callers hear why
        await registry.revisions([Kind.TENANTS])
    await link.run(lambda client: client.flushdb())
    await link.close()


async def test_a_deletion_can_be_conditional(stores: Stores) -> None:
    registry = stores.registry
    version = await registry.put(Kind.TENANTS, "a", b"")
    with pytest.raises(VersionConflictError):
        await registry.delete(Kind.TENANTS, "a", expected=version + 1)
    assert await registry.delete(Kind.TENANTS, "a", expected=version)
    assert await registry.put(Kind.TENANTS, "b", b"") > version


async def test_usage_adds_up_and_a_batch_is_added_once(stores: Stores) -> None:
    usage = stores.usage
    monday, tuesday = UsageKey(500_000, "m|1"), UsageKey(500_024, "m|1")
    added = {monday: {"tokens": 5.0, "cost": 0.25}, tuesday: {"tokens": 1.0}}
    assert await usage.append("a", "batch-1", added)
    assert not await usage.append("a", "batch-1", added)
    assert await usage.append("b", "batch-1", {monday: {"tokens": 100.0}})
    assert await usage.append("a", "batch-2", {monday: {"tokens": 2.0}})
    found = await usage.query("a", 500_000, 500_024)
    assert {key: dict(sums) for key, sums in found.items()} == {
        monday: {"tokens": 7.0, "cost": 0.25}
    }
    assert set(await usage.query("a", 500_000, 500_025)) == {monday, tuesday}
    assert await usage.query("nobody", 0, 10) == {}


async def test_decisions_belong_to_their_tenant_and_the_oldest_go(stores: Stores) -> None:
    decisions = stores.decisions
    await decisions.put("a", {"r0": b"first", "r1": b"\x00\xff"})
    assert await decisions.get("a", "r1") == b"\x00\xff"
    assert await decisions.get("b", "r1") is None
    await decisions.put("a", {"r0": b"again"})
    await decisions.put("a", {f"n{number}": b"x" for number in range(DECISIONS_MAX - 1)})
    assert await decisions.get("a", "r0") == b"again"
    assert await decisions.get("a", "r1") is None
    assert await decisions.get("a", "n0") == b"x"


async def test_quota_is_counted_settled_and_refused(stores: Stores) -> None:
    tenant = uuid.uuid4().hex
    limits = Limits(requests_per_min=3, tokens_per_min=100, concurrent_requests=2)

    async def ask(sequence: int, *tokens: int, **more: Any) -> Answer:
        exchange = Exchange("h", sequence, limits, needs=tuple(map(Need, tokens)), **more)
        (answer,) = await stores.quota.exchange([(tenant, exchange)])
        assert isinstance(answer, Answer)
        return answer

    first = await ask(1, 40, 70, 60)
    assert [v.decision for v in first.verdicts] == [
        Decision.GRANTED,
        Decision.REFUSED,
        Decision.GRANTED,
    ]
    use = await stores.quota.use(tenant)
    assert (use.requests, use.tokens, use.slots) == (2, 100, 2)
    from_first = Settlement(
        first.epoch, first.bucket, first.day, Amounts(2, 100, 2), tokens_refund=50
    )
    second = await ask(2, 50, 1, settlements=(from_first,))
    assert [v.decision for v in second.verdicts] == [Decision.GRANTED, Decision.REFUSED]
    assert await ask(2, 50, 1, settlements=(from_first,)) == second
    use = await stores.quota.use(tenant)
    assert (use.requests, use.tokens, use.slots, use.holders) == (3, 100, 1, 1)


async def test_tenants_are_counted_apart(stores: Stores) -> None:
    limits = Limits(requests_per_min=1)
    parts = [(uuid.uuid4().hex, Exchange("h", 1, limits, needs=(Need(1),))) for _ in range(3)]
    answers = await stores.quota.exchange(parts)
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.verdicts[0].decision is Decision.GRANTED


async def test_tools_are_read_by_tenant_bounded_and_go_with_it(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = stores.registry
    with pytest.raises(ParentMissingError):
        await registry.put(Kind.TOOLS, "a/x", b"1")
    for tenant in ("a", "ab"):
        await registry.put(Kind.TENANTS, tenant, b"")
    version = await registry.put(Kind.TOOLS, "a/x", b"one two")
    await registry.put(Kind.TOOLS, "ab/y", b"2")
    children = await registry.children(Kind.TOOLS, "a")
    assert {name: (one.version, one.value) for name, one in children.items()} == {
        "x": (version, b"one two")
    }
    monkeypatch.setitem(CHILDREN_MAX, Kind.TOOLS, 2)
    monkeypatch.setitem(CHILDREN_BYTES_MAX, Kind.TOOLS, 100)
    await registry.put(Kind.TOOLS, "a/y", b"2")
    with pytest.raises(RegistryFullError):
        await registry.put(Kind.TOOLS, "a/z", b"")
    with pytest.raises(RegistryFullError):
        await registry.put(Kind.TOOLS, "a/x", bytes(100))
    await registry.put(Kind.TOOLS, "a/x", bytes(90))
    before = (await registry.revisions([Kind.TOOLS]))[0]
    assert await registry.delete(Kind.TENANTS, "a")
    assert (await registry.revisions([Kind.TOOLS]))[0] > before
    assert await registry.children(Kind.TOOLS, "a") == {}
    assert list(await registry.children(Kind.TOOLS, "ab")) == ["y"]
