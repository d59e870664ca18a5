"""What the scheduler takes over from the state service: tenants, keys and aliases, over a real
connection to its servicers on stores in memory. Oracle: who is let in, and as what.

Seen to fail on mutants: seed_comes_back.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from scheduler_svc.adapters.alias_table import AliasTable
from scheduler_svc.adapters.state_admin import StateAdmin
from scheduler_svc.adapters.state_watch import StateWatch, read_alias, read_tenant
from scheduler_svc.adapters.tenants import Tenants
from scheduler_svc.domain.aliases import Target
from scheduler_svc.domain.model import PriorityClass
from sluice.channels import open_channel
from sluice.common.v1 import policy_pb2
from sluice.errors import Code, SluiceError
from sluice.quota.exchange import Limits
from sluice.scheduler.v1 import admin_pb2
from sluice.server import Health, MeshServer
from sluice.state.v1 import aliases_pb2, tenants_pb2
from sluice.state.v1.aliases_pb2_grpc import add_AliasServiceServicer_to_server
from sluice.state.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from sluice.state.v1.tenants_pb2_grpc import (
    TenantServiceStub,
    add_TenantServiceServicer_to_server,
)
from state_svc.adapters.alias_servicer import AliasServicer
from state_svc.adapters.fleet_servicer import FleetServicer
from state_svc.adapters.memory_stores import MemoryRegistry
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.tenant_servicer import PART_BYTES, TenantServicer
from state_svc.ports import Kind

FILE_KEY = "file-key"


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class State:
    """A state service in this process that can be ended and started again on its port."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry()
        self.port = 0

    async def start(self) -> None:
        self._watch = RegistryWatch(self.registry)
        self._server = MeshServer("state", [f"127.0.0.1:{self.port}"], Health())
        tenants = TenantServicer(self.registry, self._watch)
        add_TenantServiceServicer_to_server(tenants, self._server.grpc)
        aliases = AliasServicer(self.registry, self._watch)
        add_AliasServiceServicer_to_server(aliases, self._server.grpc)
        fleet = FleetServicer(self.registry, self._watch)
        add_FleetServiceServicer_to_server(fleet, self._server.grpc)
        await self._server.start()
        self.port = self._server.ports[0]
        self._running = asyncio.create_task(self._watch.run())

    async def stop(self) -> None:
        self._watch.close()
        self._running.cancel()
        await self._server.stop(0)


class Rig:
    """The scheduler's side."""

    def __init__(self, path: Path, channel: grpc.aio.Channel) -> None:
        self.health = Health()
        self.path = path
        self.tenants = Tenants(path)
        self.aliases = AliasTable({"chat": "model-a"})
        component = self.health.component("state", optional=True)
        self.drained: list[tuple[str, bool]] = []
        self.watch = StateWatch(
            channel,
            self.tenants,
            self.aliases,
            lambda name, *, drained: self.drained.append((name, drained)),
            component,
        )
        self.admin = StateAdmin(channel)

    def who(self, key: str) -> str:
        """The tenant that a key names; empty for none."""
        try:
            return self.tenants.tenant(f"Bearer {key}").name
        except SluiceError:
            return ""

    async def until(self, condition: Any, within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def seed_again(self) -> None:
        """The file gets one more tenant; when its key opens, all of the file was looked at."""
        more = f'[[tenant]]\nname = "new"\nkey_sha256 = ["{key_hash("new-key")}"]\n'
        self.path.write_text(self.path.read_text() + more)
        self.tenants.refresh()
        await self.until(lambda: self.who("new-key") == "new")

    def told(self) -> bool:
        return not self.health.failing()

    async def make(self, name: str, **more: Any) -> admin_pb2.Tenant:
        fields = {"ceiling": policy_pb2.PRIORITY_CLASS_INTERACTIVE, **more}
        request = admin_pb2.PutTenantRequest(tenant=admin_pb2.Tenant(name=name, **fields))
        return (await self.admin.put_tenant(request)).tenant

    async def key(self, tenant: str, **more: Any) -> admin_pb2.CreateKeyResponse:
        return await self.admin.create_key(admin_pb2.CreateKeyRequest(tenant=tenant, **more))


@pytest.fixture
async def state() -> AsyncIterator[State]:
    made = State()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def rig(tmp_path: Path, state: State) -> AsyncIterator[Rig]:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenant]]\nname = "dev"\nkey_sha256 = ["{key_hash(FILE_KEY)}"]\n')
    channel = open_channel(f"127.0.0.1:{state.port}")
    made = Rig(path, channel)
    running = asyncio.create_task(made.watch.run())
    await made.until(made.told)
    yield made
    running.cancel()
    await channel.close()


async def test_the_files_tenants_are_seeded_and_known_all_the_time(rig: Rig) -> None:
    assert rig.who(FILE_KEY) == "dev"
    listed = await rig.admin.list_tenants()
    assert [tenant.name for tenant in listed.tenants] == ["dev"]
    assert [key.tenant for key in listed.keys] == ["dev"]


async def test_what_was_deleted_there_does_not_come_back_with_the_file(
    rig: Rig, state: State
) -> None:
    await rig.make("team")
    await rig.admin.delete_tenant("dev")
    await rig.until(lambda: not rig.who(FILE_KEY))
    mark = await state.registry.deletion("dev")
    assert mark is not None
    await state.registry.mark("dev", mark, None)  # nothing is left of it: the name is free
    await rig.seed_again()
    names = {tenant.name for tenant in (await rig.admin.list_tenants()).tenants}
    assert names == {"team", "new"}


async def test_what_was_changed_there_is_not_changed_back_by_the_file(rig: Rig) -> None:
    await rig.make("dev", models=["only-this"])
    await rig.until(lambda: not rig.tenants.tenant(f"Bearer {FILE_KEY}").may_use("another"))
    await rig.seed_again()
    assert not rig.tenants.tenant(f"Bearer {FILE_KEY}").may_use("another")


async def test_a_new_key_in_the_file_is_added_to_its_tenant(rig: Rig, tmp_path: Path) -> None:
    both = f'["{key_hash(FILE_KEY)}", "{key_hash("second")}"]'
    (tmp_path / "tenants.toml").write_text(f'[[tenant]]\nname = "dev"\nkey_sha256 = {both}\n')
    rig.tenants.refresh()
    await rig.until(lambda: rig.who("second") == "dev")
    assert rig.who(FILE_KEY) == "dev"


async def test_a_tenant_a_key_its_rotation_and_its_end_take_effect_within_a_second(
    rig: Rig,
) -> None:
    tenant = await rig.make("team", quota=admin_pb2.TenantQuota(requests_per_min=7))
    assert tenant.version > 0
    first, second = await rig.key("team"), await rig.key("team", label="next")
    await rig.until(lambda: rig.who(first.key) == rig.who(second.key) == "team", 1.0)
    known = rig.tenants.tenant(f"Bearer {first.key}")
    assert known.ceiling is PriorityClass.INTERACTIVE
    assert known.limits == Limits(requests_per_min=7)
    await rig.admin.revoke_key(first.key_id)
    await rig.until(lambda: not rig.who(first.key), 1.0)
    assert rig.who(second.key) == "team"
    await rig.admin.delete_tenant("team")
    await rig.until(lambda: not rig.who(second.key), 1.0)


async def test_a_key_itself_is_nowhere_in_the_store(rig: Rig, state: State) -> None:
    await rig.make("team")
    made = await rig.key("team")
    for kinds in state.registry._records.values():
        assert all(made.key.encode() not in record.value for record in kinds.values())


async def test_a_key_that_is_void_already_is_refused(rig: Rig) -> None:
    with pytest.raises(SluiceError, match="expire_time"):
        await rig.key("dev", expire_time=Timestamp(seconds=1))


@pytest.mark.parametrize("time", [{"seconds": 2**62}, {"nanos": -1}], ids=str)
async def test_a_key_whose_end_is_no_time_is_refused_by_field(
    rig: Rig, time: dict[str, int]
) -> None:
    with pytest.raises(SluiceError) as raised:
        await rig.key("dev", expire_time=Timestamp(**time))
    assert [one.field for one in raised.value.fields] == ["expire_time"]


async def test_a_stored_key_whose_end_is_no_time_opens_nothing_and_stops_nothing(
    rig: Rig, state: State
) -> None:
    bad = tenants_pb2.TenantKey(key_id="bad", tenant="dev", sha256=bytes.fromhex(key_hash("bad")))
    bad.expire_time.seconds = 2**62
    await state.registry.put(Kind.KEYS, "dev/bad", bad.SerializeToString())
    await rig.until(lambda: rig.tenants.reloads_failed == 1)
    good = await rig.key("dev")
    await rig.until(lambda: rig.who(good.key) == "dev")
    assert rig.who("bad") == ""


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "A B"}, "tenant.name"),
        ({"ceiling": 0}, "tenant.ceiling"),
        ({"default_class": policy_pb2.PRIORITY_CLASS_CRITICAL}, "tenant.default_class"),
        ({"models": ["bad name"]}, "tenant.models"),
        ({"quota": admin_pb2.TenantQuota(tokens_per_min=1 << 60)}, "tenant.quota"),
    ],
)
async def test_a_bad_change_is_refused_by_field_and_the_last_good_stays(
    rig: Rig, change: dict[str, Any], field: str
) -> None:
    good = await rig.make("team")
    fields = {"name": "team", "ceiling": policy_pb2.PRIORITY_CLASS_INTERACTIVE, **change}
    request = admin_pb2.PutTenantRequest(tenant=admin_pb2.Tenant(**fields))
    with pytest.raises(SluiceError) as raised:
        await rig.admin.put_tenant(request)
    assert [one.field for one in raised.value.fields] == [field]
    assert raised.value.message.startswith(field)
    kept = {tenant.name: tenant for tenant in (await rig.admin.list_tenants()).tenants}
    assert kept["team"] == good


async def test_a_change_of_another_version_is_refused(rig: Rig) -> None:
    await rig.make("team")
    request = admin_pb2.PutTenantRequest(
        tenant=admin_pb2.Tenant(name="team", ceiling=policy_pb2.PRIORITY_CLASS_BATCH),
        expected_version=0,
    )
    with pytest.raises(SluiceError) as raised:
        await rig.admin.put_tenant(request)
    assert raised.value.reason == "VERSION_CONFLICT"


async def test_while_it_is_away_the_last_table_stays_and_changes_come_with_it(
    rig: Rig, state: State
) -> None:
    made = await rig.key("dev")
    await rig.until(lambda: rig.who(made.key) == "dev")
    await state.stop()
    await rig.until(lambda: not rig.told())
    assert rig.health.healthy  # it serves all the same
    assert rig.who(made.key) == rig.who(FILE_KEY) == "dev"
    with pytest.raises(SluiceError) as raised:
        await rig.key("dev")
    assert raised.value.reason == "STATE_UNREACHABLE"
    await state.start()
    await rig.until(rig.told)
    another = await rig.key("dev")
    await rig.until(lambda: rig.who(another.key) == "dev")


async def test_a_record_that_cannot_be_read_leaves_what_was_known(rig: Rig, state: State) -> None:
    newer = tenants_pb2.Tenant.FromString(b"\x0a\x03dev\x10\x01\x18\x09")  # class 9
    with pytest.raises(ValueError, match=r"dev\.default_class"):
        read_tenant(newer)
    await state.registry.put(Kind.TENANTS, "dev", newer.SerializeToString())
    await rig.until(lambda: rig.tenants.reloads_failed == 1)
    assert rig.who(FILE_KEY) == "dev"


async def test_an_alias_over_the_configurations_goes_back_to_it(rig: Rig) -> None:
    request = admin_pb2.SetAliasRequest(alias="chat")
    request.targets.add(model="model-b", weight=9)
    request.targets.add(model="model-a", weight=1)
    configured = rig.aliases.configured("chat")
    assert configured is not None
    await rig.admin.set_alias(request, configured.targets[0].model)
    await rig.until(lambda: rig.aliases.configured("chat") is None)
    found = rig.aliases.get("chat")
    assert found is not None
    await rig.until(
        lambda: rig.aliases.all()["chat"].targets == (Target("model-b", 9), Target("model-a", 1))
    )
    back = await rig.admin.rollback_alias("chat")
    assert [(one.model, one.weight) for one in back.targets] == [("model-a", 1)]
    await rig.until(lambda: rig.aliases.all()["chat"].targets == (Target("model-a", 1),))


async def test_an_alias_that_is_deleted_is_gone_or_as_the_configuration_has_it(rig: Rig) -> None:
    for name in ("chat", "new"):
        request = admin_pb2.SetAliasRequest(alias=name)
        request.targets.add(model="model-b", weight=1)
        await rig.admin.set_alias(request, None)
    await rig.until(lambda: rig.aliases.get("new") is not None)
    await rig.until(lambda: rig.aliases.configured("chat") is None)
    for name in ("chat", "new"):
        await rig.admin.delete_alias(name)
    await rig.until(lambda: rig.aliases.get("new") is None)
    await rig.until(lambda: rig.aliases.configured("chat") is not None)
    assert rig.aliases.all()["chat"].targets == (Target("model-a", 1),)
    with pytest.raises(SluiceError) as raised:
        await rig.admin.delete_alias("new")
    assert (raised.value.code, raised.value.reason) == (Code.NOT_FOUND, "ALIAS_UNKNOWN")


async def test_a_table_of_many_parts_is_taken_over_whole(
    rig: Rig, state: State, tmp_path: Path
) -> None:
    models = [f"model-with-a-long-name-{number}" for number in range(40)]
    for number in range(500):
        name = f"t-{number}"
        tenant = tenants_pb2.Tenant(name=name, models=models)
        tenant.ceiling = tenant.default_class = policy_pb2.PRIORITY_CLASS_STANDARD
        await state.registry.put(Kind.TENANTS, name, tenant.SerializeToString())
        key = tenants_pb2.TenantKey(
            key_id=name, tenant=name, sha256=bytes.fromhex(key_hash(f"key-{number}"))
        )
        await state.registry.put(Kind.KEYS, f"{name}/{name}", key.SerializeToString())
    channel = open_channel(f"127.0.0.1:{state.port}")
    stub: Any = TenantServiceStub(channel)
    parts = []
    async with asyncio.timeout(10):
        async for part in stub.WatchTenants(tenants_pb2.WatchTenantsRequest()):
            parts.append(part)
            if not part.more and sum(len(one.tenants) for one in parts) == 501:
                break
    assert len(parts) > 2
    assert all(part.ByteSize() < 2 * PART_BYTES for part in parts)
    # The one that follows all the time has got it as a change, a new one gets it as a table.
    await rig.until(lambda: rig.who("key-499") == "t-499")
    new = Rig(tmp_path / "tenants.toml", channel)
    running = asyncio.create_task(new.watch.run())
    await new.until(new.told)
    assert new.who("key-0") == "t-0"
    assert new.who("key-499") == "t-499"
    assert new.who(FILE_KEY) == "dev"
    running.cancel()
    await channel.close()


async def test_every_mark_of_a_drain_is_told_once_also_over_a_loss(rig: Rig, state: State) -> None:
    await rig.admin.set_drain("sim-0", drained=True)
    await rig.until(lambda: rig.drained == [("sim-0", True)])
    await state.stop()
    await rig.until(lambda: not rig.told())
    await state.start()
    await rig.until(rig.told)
    await rig.admin.set_drain("sim-1", drained=True)
    await rig.admin.set_drain("sim-0", drained=False)
    await rig.until(lambda: len(rig.drained) == 3)
    assert set(rig.drained[1:]) == {("sim-1", True), ("sim-0", False)}


def test_versions_get_their_shares_exactly_and_a_missing_one_none() -> None:
    table = AliasTable({"chat": "old"})
    alias = read_alias_of("chat", ("v1", 9), ("v2", 1))
    table.change([alias], snapshot=True)
    picked = [table.pick(alias, lambda _: True) for _ in range(1000)]
    assert picked.count("v2") == 100
    assert {table.pick(alias, lambda model: model == "v1") for _ in range(20)} == {"v1"}
    table.change([], ["chat"])
    assert table.all()["chat"].targets == (Target("old", 1),)


def read_alias_of(name: str, *targets: tuple[str, int]) -> Any:
    message = aliases_pb2.Alias(name=name, version=3)
    for model, weight in targets:
        message.targets.add(model=model, weight=weight)
    return read_alias(message)
