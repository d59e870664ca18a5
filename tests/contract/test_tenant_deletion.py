"""Deleting a tenant deletes what it stored, before its name can be used again.

Goal: who gets the name of a deleted tenant finds nothing of it, wherever the deletion was
interrupted and whoever writes late. Method: each test of the steps runs on the stores in memory and
on Valkey; a crash is an exception at a fault point, and another replica goes on from what is
stored. Oracle: the ports' own words (state_svc/deletion_ports.py), and the names of all keys.

Seen to fail on mutants: tenant_purge_forgets_a_store, tenant_name_free_at_once,
tenant_fence_not_looked_at, tenant_late_replica_deletes, tenant_usage_is_inherited,
tenant_looked_at_once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest

from sluice.errors import Code, SluiceError
from sluice.quota.exchange import Exchange, Limits, Need, QuotaUse
from state_svc.adapters import tenant_purge, valkey_text
from state_svc.adapters.memory_stores import MemoryDecisions, MemoryRegistry, MemoryUsage
from state_svc.adapters.memory_tenant_data import MemoryTenantData
from state_svc.adapters.store_errors import store_errors
from state_svc.adapters.tenant_purge import TenantPurge
from state_svc.adapters.valkey_documents import ValkeyDocuments
from state_svc.adapters.valkey_ledger import ValkeyDecisions, ValkeyUsage
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_quota import ValkeyQuotaStore
from state_svc.adapters.valkey_registry import ValkeyRegistry
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.adapters.valkey_sessions import ValkeySessions
from state_svc.adapters.valkey_tenant_data import ValkeyTenantData
from state_svc.adapters.valkey_text import ValkeyTexts
from state_svc.adapters.valkey_values import ValkeyBlobs, ValkeyValues
from state_svc.deletion_ports import DeletionState, TenantData
from state_svc.domain.documents import Draft
from state_svc.domain.run_values import LeaseLostError, Position
from state_svc.ports import (
    RECORDS_MAX,
    DecisionStore,
    Kind,
    RegistryFullError,
    StoreUnavailableError,
    TenantBeingDeletedError,
    TenantDeletedError,
    UsageKey,
    UsageStore,
)
from tests.contract.state_rig import LEASE_MS, a_run, an_append, lease_of
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

LONG_MS = 60_000
AT = Position(1, 0)
LATE_KEY = "sluice:{a}:late"
POINTS = ("tenants.before_purge", "tenants.before_gone", "tenants.before_unmark")


@dataclass
class Stores:
    """Two stores of data, as the durable and the volatile one are; usage is in the first."""

    registry: MemoryRegistry | ValkeyRegistry
    usage: UsageStore
    decisions: DecisionStore  # in the second
    data: list[TenantData]
    links: list[ValkeyLink] = field(default_factory=list)

    def purge(self, settle_s: float = 0.0) -> TenantPurge:
        """Another replica."""
        return TenantPurge(self.registry, self.data, settle_s)

    async def state(self, name: str = "a") -> DeletionState | None:
        mark = await self.registry.deletion(name)
        return None if mark is None else mark.state

    async def create(self, name: str = "a") -> None:
        await self.registry.put(Kind.TENANTS, name, b"", expected=0)

    async def delete(self, name: str = "a") -> None:
        assert await self.registry.delete(Kind.TENANTS, name)

    async def write_past_the_fence(self) -> None:
        """As a call that looked at it before it was closed. That in memory stops nobody."""
        await self.decisions.put("a", {"late": b"old"})
        for link in self.links:
            await link.run(lambda client: client.set(LATE_KEY, b"old"))

    async def late_is_there(self) -> bool:
        found = [await link.run(lambda client: client.exists(LATE_KEY)) for link in self.links]
        return any(found) or await self.decisions.get("a", "late") is not None


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture
async def links(server: ValkeyProcess) -> AsyncIterator[list[ValkeyLink]]:
    """The durable store and the volatile one: two databases of one server."""
    opened = [
        ValkeyLink(url, PATIENT_S) for url in (server.url, server.url.removesuffix("0") + "1")
    ]
    await opened[0].run(lambda client: client.flushall())
    yield opened
    for link in opened:
        await link.close()


@pytest.fixture(params=["memory", "valkey"])
def stores(request: pytest.FixtureRequest, links: list[ValkeyLink]) -> Stores:
    if request.param == "memory":
        usage, decisions = MemoryUsage(), MemoryDecisions()
        data = [MemoryTenantData([], usage), MemoryTenantData([decisions.forget])]
        return Stores(MemoryRegistry(), usage, decisions, list(data))
    return on_valkey(links)


def on_valkey(links: list[ValkeyLink]) -> Stores:
    durable, volatile = links
    data = [
        ValkeyTenantData(durable, has_usage=True),
        ValkeyTenantData(volatile, has_usage=False),
    ]
    registry = ValkeyRegistry(durable)
    return Stores(registry, ValkeyUsage(durable), ValkeyDecisions(volatile), list(data), links)


async def test_a_name_is_refused_until_everything_is_gone(stores: Stores) -> None:
    await stores.create()
    await stores.decisions.put("a", {"r": b"old"})
    await stores.delete()
    with pytest.raises(TenantBeingDeletedError):
        await stores.create()
    with pytest.raises(SluiceError) as raised, store_errors():
        await stores.create()
    told = raised.value
    assert (told.code, told.reason) == (Code.FAILED_PRECONDITION, "TENANT_BEING_DELETED")
    assert told.retry_after_s
    await stores.create("b")  # nobody else waits
    purge = stores.purge()
    assert not await purge.once()
    assert await stores.decisions.get("a", "r") is None
    await stores.create()
    await purge.created("a")
    assert await stores.state() is None
    await stores.decisions.put("a", {"r": b"new"})
    assert not await purge.once()
    assert await stores.decisions.get("a", "r") == b"new"


async def test_what_comes_in_after_the_first_look_is_deleted_too(stores: Stores) -> None:
    await stores.create()
    await stores.delete()
    replica = stores.purge(settle_s=60.0)
    assert await replica.once()  # there is more to do
    assert await stores.state() is DeletionState.PURGING
    with pytest.raises(TenantBeingDeletedError):
        await stores.create()
    await stores.write_past_the_fence()
    assert await replica.once()
    assert await stores.late_is_there()  # nothing is looked for meanwhile
    replica._settle_ms = 0.0
    assert not await replica.once()
    assert not await stores.late_is_there()
    assert await stores.state() is DeletionState.GONE


async def test_usage_stays_for_the_operator_alone(stores: Stores) -> None:
    hour = int(time.time() if stores.links else asyncio.get_running_loop().time()) // 3600
    # The hour may end meanwhile.
    old, new, end = UsageKey(hour, "m"), UsageKey(hour + 2, "m"), hour + 3
    await stores.create()
    await stores.usage.append("a", "1", {old: {"tokens": 5.0}})
    assert set(await stores.usage.query("a", hour, end)) == {old}
    await stores.delete()
    await stores.purge().once()
    await stores.usage.append("a", "2", {old: {"tokens": 1.0}})  # told late, and still counted
    await stores.create()
    await stores.purge().created("a")
    assert await stores.usage.query("a", hour, end) == {}
    await stores.usage.append("a", "3", {new: {"tokens": 7.0}})
    assert dict(await stores.usage.query("a", hour, end)) == {new: {"tokens": 7.0}}
    whole = await stores.usage.query("a", hour, end, earlier=True)
    assert dict(whole) == {old: {"tokens": 6.0}, new: {"tokens": 7.0}}


class CrashError(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("point", POINTS)
async def test_another_replica_ends_what_one_began(
    stores: Stores, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was done before it died, the next one does it again, and nothing of the new
    tenant goes with it."""
    died = []

    def crash(name: str) -> None:
        if name == point:
            died.append(name)
            raise CrashError

    await stores.create()
    await stores.decisions.put("a", {"r": b"old"})
    await stores.delete()
    monkeypatch.setattr(tenant_purge, "fault_point", crash)
    if point != "tenants.before_unmark":
        with pytest.raises(CrashError):
            await stores.purge().once()
        with pytest.raises(TenantBeingDeletedError):
            await stores.create()
    monkeypatch.setattr(tenant_purge, "fault_point", lambda name: None)
    await stores.purge().once()
    await stores.create()
    assert await stores.decisions.get("a", "r") is None
    monkeypatch.setattr(tenant_purge, "fault_point", crash)
    if point == "tenants.before_unmark":
        with pytest.raises(CrashError):
            await stores.purge().created("a")
        await stores.decisions.put("a", {"r": b"new"})
    monkeypatch.setattr(tenant_purge, "fault_point", lambda name: None)
    assert await stores.state() is DeletionState.RETURNING
    await stores.purge().once()  # its creation was never ended by who made it
    assert await stores.state() is None
    await stores.decisions.put("a", {"s": b"new"})
    await stores.purge().once()
    if point == "tenants.before_unmark":
        assert await stores.decisions.get("a", "r") == b"new"
    assert await stores.decisions.get("a", "s") == b"new"
    assert died


async def test_a_replica_that_stood_still_deletes_nothing_of_the_next_tenant(
    stores: Stores,
) -> None:
    await stores.create()
    await stores.delete()
    mark = await stores.registry.deletion("a")
    assert mark is not None
    await stores.purge().once()
    await stores.create()
    await stores.purge().created("a")
    await stores.decisions.put("a", {"r": b"new"})
    for data in stores.data:
        assert not await data.close("a", mark.number)
        assert not await data.purge("a", mark.number)
    assert not await stores.registry.mark("a", mark, DeletionState.GONE)
    assert await stores.decisions.get("a", "r") == b"new"
    await stores.delete()  # and a second deletion is one
    await stores.purge().once()
    assert await stores.decisions.get("a", "r") is None
    for data in stores.data:
        await data.open("a", mark.number)  # of the first
        second = await stores.registry.deletion("a")
        assert second is not None and second.number > mark.number
        assert await data.purge("a", second.number)  # it is still closed


async def test_a_name_that_nobody_takes_is_forgotten(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stores.create()
    await stores.delete()
    await stores.purge().once()
    await stores.purge().once()
    assert await stores.state() is DeletionState.GONE
    monkeypatch.setattr(tenant_purge, "GONE_KEPT_MS", 0)
    await stores.purge().once()
    assert await stores.state() is None
    await stores.create()
    await stores.decisions.put("a", {"r": b"new"})
    assert await stores.decisions.get("a", "r") == b"new"


async def test_marked_names_count_against_the_bound_of_tenants(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDS_MAX, Kind.TENANTS, 2)
    await stores.create()
    await stores.create("b")
    await stores.delete()
    with pytest.raises(RegistryFullError):
        await stores.create("c")
    await stores.purge().once()
    await stores.create()  # its own mark has the place


async def test_a_store_that_is_away_keeps_the_name_marked(links: list[ValkeyLink]) -> None:
    stores = on_valkey(links)
    gone = ValkeyLink("redis://127.0.0.1:1/0", 0.2)
    stores.data[1] = ValkeyTenantData(gone, has_usage=False)
    await stores.create()
    await stores.delete()
    assert await stores.purge().once()
    assert await stores.state() is DeletionState.PURGING
    with pytest.raises(TenantBeingDeletedError):
        await stores.create()
    await gone.close()
    assert not await on_valkey(links).purge().once()


class Everything:
    """One of each kind of data of a tenant."""

    def __init__(self, stores: Stores) -> None:
        durable, volatile = stores.links
        self.stores = stores
        self.values, self.blobs = ValkeyValues(durable), ValkeyBlobs(durable)
        self.documents, self.sessions = ValkeyDocuments(durable), ValkeySessions(durable)
        self.runs, self.texts = ValkeyRuns(durable), ValkeyTexts(volatile)

    async def value(self, tenant: str) -> None:
        await self.values.put(tenant, "k", b"secret", LONG_MS)

    async def blob(self, tenant: str) -> None:
        await self.blobs.put(tenant, "run", "b", b"secret", LONG_MS)

    async def document(self, tenant: str) -> None:
        draft = Draft(b"secret", "text/plain", {}, "d")
        await self.documents.put(tenant, "c", "x", draft, str(uuid.uuid4()))

    async def session(self, tenant: str) -> None:
        await self.sessions.create(
            tenant, str(uuid.uuid4()), str(uuid.uuid4()), LONG_MS, [b"secret"]
        )

    async def run(self, tenant: str) -> None:
        await self.runs.create(a_run(tenant))

    async def write(self, tenant: str) -> None:
        for kind in (self.value, self.blob, self.document, self.session, self.run):
            await kind(tenant)
        await self.stores.decisions.put(tenant, {"r": b"secret"})


async def keys_of(link: ValkeyLink, tenant: str) -> set[bytes]:
    found = await link.run(lambda client: client.keys(f"sluice:{{{tenant}}}:*"))
    fence = f"sluice:{{{tenant}}}:deletion".encode()
    return {key for key in found if isinstance(key, bytes)} - {fence}


async def test_no_key_of_a_deleted_tenant_is_left_and_none_comes_back(
    links: list[ValkeyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_text, "STORE_S", 0.0)  # every live text is written
    stores = on_valkey(links)
    every = Everything(stores)
    for tenant in ("a", "ab"):
        await stores.create(tenant)
        await every.write(tenant)
    held = {one.run.tenant: one for one in (await every.runs.claim("h", 9, LEASE_MS)).runs}
    for tenant, one in held.items():
        await every.texts.publish(lease_of(one), AT, 1, f"text of {tenant}", replaces=False)
    await every.run("a")  # nobody has claimed it
    others = [await keys_of(link, "ab") for link in links]
    assert all(others)
    await stores.delete()
    await stores.purge().once()
    assert [await keys_of(link, "a") for link in links] == [set(), set()]
    assert [await keys_of(link, "ab") for link in links] == others

    for late in (every.value, every.blob, every.document, every.session, every.run):
        with pytest.raises(TenantDeletedError):
            await late("a")
    with pytest.raises(SluiceError) as raised, store_errors():
        await every.value("a")
    assert (raised.value.code, raised.value.reason) == (Code.NOT_FOUND, "TENANT_UNKNOWN")
    lease = lease_of(held["a"])
    with pytest.raises(LeaseLostError):
        await every.runs.append(an_append(held["a"], b"late"))
    with pytest.raises(LeaseLostError):
        await every.runs.position(lease)
    with pytest.raises(LeaseLostError):
        await every.texts.publish(lease, AT, 1, "late", replaces=False)
    states = await every.runs.renew([lease, lease_of(held["ab"])], LEASE_MS)
    assert [state.held for state in states] == [False, True]
    await stores.decisions.put("a", {"late": b"secret"})
    await every.runs.place(["a", "ab"])
    assert not (await every.runs.claim("h", 9, LEASE_MS)).runs
    assert [await keys_of(link, "a") for link in links] == [set(), set()]

    await stores.create()
    await stores.purge().created("a")
    await every.write("a")
    (one,) = (await every.runs.claim("h", 9, LEASE_MS)).runs
    assert one.run.tenant == "a"
    (state,) = await every.runs.renew([lease], LEASE_MS)
    assert not state.held


async def test_a_new_tenant_begins_without_the_quota_counts_of_another(
    links: list[ValkeyLink],
) -> None:
    """Also those that a scheduler settles when everything is gone."""
    stores, quota = on_valkey(links), ValkeyQuotaStore(links[1])
    counted = Exchange("h", 1, Limits(requests_per_min=3), needs=(Need(1),))
    await stores.create()
    await quota.exchange([("a", counted)])
    assert (await quota.use("a")).requests == 1
    await stores.delete()
    await stores.purge().once()
    assert await quota.use("a") == QuotaUse()
    await quota.exchange([("a", counted)])
    await stores.create()
    await stores.purge().created("a")
    assert await quota.use("a") == QuotaUse()


async def test_runs_of_others_are_claimed_beside_those_of_a_deleted_tenant(
    links: list[ValkeyLink],
) -> None:
    """While its runs are still there, and its fence is closed."""
    stores = on_valkey(links)
    every = Everything(stores)
    await every.run("a")
    await every.run("b")
    assert await stores.data[0].close("a", 1)
    claimed = (await every.runs.claim("h", 9, LEASE_MS)).runs
    assert [one.run.tenant for one in claimed] == ["b"]


async def test_many_keys_are_deleted_in_steps(links: list[ValkeyLink]) -> None:
    stores = on_valkey(links)
    every = Everything(stores)
    await stores.create()
    for n in range(3_000):
        await every.values.put("a", f"k{n}", b"1", LONG_MS)
    await stores.delete()
    await stores.purge().once()
    assert await keys_of(links[0], "a") == set()


async def test_a_reserved_name_takes_nothing_along(links: list[ValkeyLink]) -> None:
    """A tenant of an earlier release: the registry has this hash tag."""
    stores = on_valkey(links)
    await stores.create("registry")
    await stores.create("b")
    await stores.delete("registry")
    await stores.purge().once()
    assert list((await stores.registry.read(Kind.TENANTS)).records) == ["b"]


async def test_a_foreign_error_is_still_one_of_the_store(links: list[ValkeyLink]) -> None:
    await links[0].run(lambda client: client.set("sluice:{a}:values", "no set"))
    with pytest.raises(StoreUnavailableError):
        await ValkeyValues(links[0]).put("a", "k", b"1", LONG_MS)
