"""A store whose memory is full: what needs more is refused by name, the rest goes on.

Goal: reading and deleting work, so that somebody can make room, and nothing is half done. Method:
a Valkey with 8 MB that refuses writes when they are used up. Oracle: the ports' own words.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from sluice.errors import Code, SluiceError
from state_svc.adapters.schema import ensure_schema
from state_svc.adapters.store_errors import store_errors
from state_svc.adapters.valkey_documents import ValkeyDocuments
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_registry import ValkeyRegistry
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.adapters.valkey_sessions import ValkeySessions
from state_svc.adapters.valkey_text import STORE_S, ValkeyTexts
from state_svc.adapters.valkey_values import ValkeyBlobs, ValkeyValues
from state_svc.domain.documents import Draft
from state_svc.domain.run_values import Lease, Phase, Position
from state_svc.ports import Kind, StoreFullError
from tests.contract.state_rig import LEASE_MS, a_run, an_append, lease_of
from tests.valkey import PATIENT_S, valkey

LONG_MS = 60_000
OPTIONS = (
    *("--maxmemory", "8mb", "--maxmemory-policy", "noeviction"),
    *("--lazyfree-lazy-user-flush", "no"),  # room is there when FLUSHDB has answered
)


@pytest.fixture
async def link() -> AsyncIterator[ValkeyLink]:
    with valkey(*OPTIONS) as server:
        opened = ValkeyLink(server.url, PATIENT_S)
        yield opened
        await opened.close()


async def fill(link: ValkeyLink) -> None:
    """Uses all memory up. The limit then goes below what is used: buffers of the server's own come
    and go, and would leave room for a small write now and then."""
    for _ in range(1_000):
        try:
            await link.run(lambda client: client.set(f"x:{uuid.uuid4()}", bytes(1 << 20)))
        except StoreFullError:
            break
    used = (await link.run(lambda client: client.info("memory")))["used_memory"]
    await link.run(lambda client: client.config_set("maxmemory", used - (1 << 19)))


async def test_what_needs_no_memory_goes_on_and_the_rest_is_refused_by_name(
    link: ValkeyLink,
) -> None:
    documents, values, blobs = ValkeyDocuments(link), ValkeyValues(link), ValkeyBlobs(link)
    registry, sessions = ValkeyRegistry(link), ValkeySessions(link)
    await ensure_schema(link)
    draft = Draft(b"text", "text/plain", {}, "d")
    await documents.put("a", "c", "x", draft, "r")
    await values.put("a", "k", b"1", LONG_MS)
    await blobs.put("a", "run", "b", b"1", LONG_MS)
    await registry.put(Kind.TENANTS, "a", b"")
    await registry.put(Kind.TOOLS, "a/t", b"")
    session_id = str(uuid.uuid4())
    await sessions.create("a", session_id, str(uuid.uuid4()), LONG_MS, [])
    await fill(link)

    with pytest.raises(StoreFullError):
        await documents.put("a", "c", "x", draft, "r2")
    with pytest.raises(StoreFullError):
        await values.put("a", "k", b"2", LONG_MS)
    with pytest.raises(StoreFullError):
        await registry.put(Kind.TOOLS, "a/u", b"")
    with pytest.raises(SluiceError) as raised, store_errors():
        await blobs.put("a", "run", "b", b"2", LONG_MS)
    assert (raised.value.code, raised.value.reason) == (Code.RESOURCE_EXHAUSTED, "STORE_FULL")
    assert raised.value.retry_after_s

    found = await values.get("a", "k")
    assert found is not None
    assert found.value == b"1"
    assert await documents.get("a", "c", "x") is not None
    assert list(await registry.children(Kind.TOOLS, "a")) == ["t"]
    await ensure_schema(link)  # a service that starts now is up

    assert await documents.delete("a", "c", "x")
    assert await values.delete("a", "k")
    assert await blobs.delete_all("a", "run") == 1
    await sessions.delete("a", session_id)
    assert await registry.delete(Kind.TENANTS, "a")
    assert await registry.children(Kind.TOOLS, "a") == {}

    # At once: by itself the server gives the memory back in the background.
    await link.run(lambda client: client.config_set("lazyfree-lazy-user-flush", "no"))
    await link.run(lambda client: client.flushdb())
    await values.put("a", "k", b"2", LONG_MS)


async def test_runs_of_a_full_store_go_on_to_their_ends(link: ValkeyLink) -> None:
    """What they hold would otherwise never be given back."""
    runs = ValkeyRuns(link)
    going, waiting, unclaimed, cancelled = (a_run() for _ in range(4))
    for run in (going, waiting, cancelled):
        await runs.create(run)
    held = {one.run.run_id: one for one in (await runs.claim("h", 9, LEASE_MS)).runs}
    await runs.create(unclaimed)
    await fill(link)
    with pytest.raises(StoreFullError):
        await runs.create(a_run())
    with pytest.raises(StoreFullError):
        await runs.append(an_append(held[going.run_id], b"step"))
    assert [one.run.run_id for one in (await runs.claim("h", 9, LEASE_MS)).runs] == [
        unclaimed.run_id
    ]
    await runs.cancel("a", cancelled.run_id)
    leases = [lease_of(one) for one in held.values()]
    assert all(state.held for state in await runs.renew(leases, LEASE_MS))
    await runs.append(an_append(held[waiting.run_id], b"w", phase=Phase.WAITING, waiting_step=1))
    for run in (going, cancelled):
        await runs.append(an_append(held[run.run_id], b"end", phase=Phase.FAILED))
        assert (await runs.get("a", run.run_id)).phase is Phase.FAILED


async def test_live_text_goes_on_where_a_full_store_keeps_none_of_it(link: ValkeyLink) -> None:
    """Who watches hears it, and so does who comes later to the process that has it."""
    seconds = [100.0]
    texts = ValkeyTexts(link, lambda: seconds[0])
    lease, at = Lease("a", "r", 1), Position(1, 0)
    await texts.publish(lease, at, 1, "one ", replaces=True)
    await fill(link)
    for _ in range(3):
        seconds[0] += STORE_S
        assert await texts.publish(lease, at, 1, "more ", replaces=False)
    found = await texts.whole("a", "r")
    assert found is not None
    assert found.text == "one more more more "
