"""Tenants and aliases while their store, or the state service, is slow, frozen or gone.

Goal: what was told stays in force, so that known tenants' requests go on as if nothing were;
changes are refused with a typed error within seconds; nothing acknowledged is lost; all is well
again within 2 s of the cause's end, without a restart. Method: a mesh with two schedulers, a state
service and a Valkey of its own; SIGSTOP, SIGKILL, late starts, an emptied store. Oracle: answers at
the edge, grpc.health.v1, process ids. Seed: none, nothing is drawn.

Seen to fail on the mutants in tests/mutants: state_watch_gives_up, state_needed_to_serve,
tenants_forgotten_when_alone.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import admin_pb2
from tests.hermetic.admin_client import AdminClient, refused, who
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually

BACK_S = 2.0
CHANGE_S = 2.0
REFUSAL_S = 3.0  # a refused change: the store's own bound, twice, and the way there and back
FROZEN_S = 4.0  # a call of a service that does not answer at all is given up after 3 s
SHAPE = Shape(schedulers=2, state={"store_timeout_s": 0.5})
DURABLE = ("--appendfsync", "always")


@asynccontextmanager
async def the_mesh(
    folder: Path, absent: Sequence[str] = ()
) -> AsyncIterator[tuple[Mesh, MeshClient, AdminClient]]:
    with mesh(folder, SHAPE, absent=absent) as running:
        if absent:
            for name in running.schedulers:
                await eventually(partial(running.reachable, name), f"{name} is ready", 30.0)
            await eventually(lambda: running.edge_members() == 2, "the edge has both", 30.0)
        async with client_of(running) as client:
            admin = AdminClient(running)
            yield running, client, admin
            await admin.close()


def pids(running: Mesh, *without: str) -> dict[str, int]:
    """Of the processes that run."""
    return {
        name: one.pid
        for name, one in running.processes.items()
        if one.alive and name not in without
    }


async def until_known(
    client: MeshClient, running: Mesh, key: str, wanted: str = "", within_s: float = CHANGE_S
) -> None:
    """Waits until every scheduler answers a key as wanted."""
    begin = time.monotonic()
    for name in running.schedulers:
        async with client_of(running, running[name].address) as one:
            while await who(one, key) != wanted:
                assert time.monotonic() - begin < within_s, f"{name}: {await who(one, key)}"
                await asyncio.sleep(0.02)


async def test_a_frozen_store_stops_changes_and_nothing_else(tmp_path: Path) -> None:
    async with the_mesh(tmp_path) as (running, client, admin):
        await admin.tenant("team")
        key = (await admin.key("team")).key
        await until_known(client, running, key)
        before = pids(running)
        running["valkey"].send(signal.SIGSTOP)
        try:
            await eventually(lambda: not running.serving("state-0"), "the service says so", 5.0)
            begin = time.monotonic()
            error = await refused(admin.key("team"))
            assert time.monotonic() - begin < REFUSAL_S
            assert (error.code, error.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
            assert all(running.serving(name) for name in running.schedulers)
            for used in (key, running.api_key):
                assert await who(client, used) == ""
            assert await who(client, "unknown") == "KEY_UNKNOWN"
        finally:
            running["valkey"].send(signal.SIGCONT)
        await eventually(lambda: running.serving("state-0"), "it is back", BACK_S)
        await until_known(client, running, (await admin.key("team")).key)
        assert pids(running) == before


async def test_a_frozen_state_service_costs_changes_only(tmp_path: Path) -> None:
    async with the_mesh(tmp_path) as (running, client, admin):
        before = pids(running)
        running["state-0"].send(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            error = await refused(admin.key("dev"))
            assert time.monotonic() - begin < FROZEN_S
            assert (error.code, error.reason) == (Code.UNAVAILABLE, "STATE_UNREACHABLE")
            assert await who(client, running.api_key) == ""
            assert await who(client, "unknown") == "KEY_UNKNOWN"
        finally:
            running["state-0"].send(signal.SIGCONT)
        await until_known(client, running, (await admin.key("dev")).key)
        assert pids(running) == before


async def test_a_killed_state_service_costs_changes_only_until_it_is_back(tmp_path: Path) -> None:
    async with the_mesh(tmp_path) as (running, client, admin):
        await admin.tenant("team")
        made = await admin.key("team")
        await until_known(client, running, made.key)
        running["state-0"].kill()
        before = pids(running)
        assert (await refused(admin.key("team"))).reason == "STATE_UNREACHABLE"
        for _ in range(5):
            assert await who(client, made.key) == await who(client, running.api_key) == ""
        assert all(running.serving(name) for name in running.schedulers)
        running["state-0"].start()
        await eventually(lambda: running.serving("state-0"), "it serves", 30.0)
        # What changes from now on reaches both schedulers, which found it again by themselves.
        await eventually_done(admin, made.key_id)
        await until_known(client, running, made.key, "KEY_UNKNOWN")
        assert pids(running, "state-0") == before


async def eventually_done(admin: AdminClient, key_id: str) -> None:
    """Revokes a key as soon as the state service is found again."""
    request = admin_pb2.RevokeKeyRequest(key_id=key_id)
    begin = time.monotonic()
    while True:
        with suppress(SluiceError):
            await admin.call("RevokeKey", request)
            return
        assert time.monotonic() - begin < BACK_S
        await asyncio.sleep(0.05)


async def test_without_a_store_at_the_start_the_files_tenants_are_served(tmp_path: Path) -> None:
    """And what was acknowledged once it is there outlives a SIGKILL of it; what the file brought
    and somebody removed does not come back with it."""
    async with the_mesh(tmp_path, absent=["valkey"]) as (running, client, admin):
        await eventually(lambda: running.health("state-0") >= 0, "it answers", 30.0)
        assert not running.serving("state-0")
        assert await who(client, running.api_key) == ""
        # It may be the key of a tenant that only the store knows.
        assert await who(client, "unknown") == "STATE_UNREACHABLE"
        assert (await refused(admin.tenant("team"))).code is Code.UNAVAILABLE
        before = pids(running)
        store = running["valkey"]
        store.command = [*store.command, *DURABLE]
        store.start()
        await eventually(lambda: running.serving("state-0"), "it is ready", BACK_S)
        await eventually_names(admin, {"dev"})
        await admin.tenant("team")
        key = (await admin.key("team")).key
        await admin.call("DeleteTenant", admin_pb2.DeleteTenantRequest(tenant="dev"))
        store.kill()
        store.start()
        await eventually(lambda: running.serving("state-0"), "it is back", BACK_S)
        await eventually_names(admin, {"team"})
        await until_known(client, running, key)
        await until_known(client, running, running.api_key, "KEY_UNKNOWN")
        # A scheduler that starts anew seeds again; what was removed stays so.
        running["scheduler-0"].kill()
        running["scheduler-0"].start()
        await eventually(lambda: running.serving("scheduler-0"), "it serves", 30.0)
        await until_known(client, running, running.api_key, "KEY_UNKNOWN")
        assert await admin.names() == {"team"}
        assert pids(running, "scheduler-0", "valkey").items() <= before.items()


async def eventually_names(admin: AdminClient, wanted: set[str]) -> None:
    """The first call after a loss may still meet it."""
    begin = time.monotonic()
    while True:
        with suppress(SluiceError):
            if await admin.names() == wanted:
                return
        assert time.monotonic() - begin < BACK_S
        await asyncio.sleep(0.05)


async def test_a_store_that_was_emptied_is_seeded_again(tmp_path: Path) -> None:
    async with the_mesh(tmp_path) as (running, client, admin):
        await admin.tenant("team")
        running["valkey"].kill()
        shutil.rmtree(running.folder / "valkey" / "appendonlydir")
        running["valkey"].start()
        await eventually(lambda: running.serving("state-0"), "it is back", BACK_S + 1)
        await until_known(client, running, running.api_key, within_s=5.0)
        await eventually_names(admin, {"dev"})
