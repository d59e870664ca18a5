"""Quotas through the whole mesh: Envoy, two schedulers, the state service, Valkey.

Goal: one requester gets exactly the limit, two schedulers together never
more; whatever way a request ends it gives back what it did not use; a refusal charges nothing, says
which quota and when to come again, alike over gRPC and HTTP. Method: tenants of their own per test.
Oracle: the state service's own count, and what the answers say was used.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import generate_pb2
from sluice.status import from_rpc_error
from tests.hermetic import quota_mesh
from tests.hermetic.local_mesh import ROOT
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually, sim

PROMPT: dict[str, Any] = {"token_ids": [7] * 10}
"""Ten tokens, known to the scheduler as ten."""
PRICE = (10.0, 100.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(
        instances={
            "sim-0": {"decode_step_ms": 2.0},
            "sim-1": {"decode_step_ms": 2.0},
            "embed-0": {"generate": False, "embedding_dimensions": 8, "model": "sim-embed"},
        },
        schedulers=2,
        scheduler={"prices": [f"sim={PRICE[0]}:{PRICE[1]}"], "default_model": "sim"},
        state={},
    )
    with mesh(tmp_path_factory.mktemp("quotas"), shape) as made:
        yield made


async def ask(client: MeshClient, tokens: int = 1) -> str:
    """One request; "OK" or the reason of its error."""
    try:
        await client.text(**PROMPT, sampling={"max_tokens": tokens, "ignore_eos": True})
    except SluiceError as error:
        return error.reason
    return "OK"


async def refusal(client: MeshClient, tokens: int = 1) -> SluiceError:
    """The error of a request that fails."""
    with pytest.raises(SluiceError) as caught:
        await client.text(**PROMPT, sampling={"max_tokens": tokens, "ignore_eos": True})
    return caught.value


async def settled(running: Mesh, who: quota_mesh.TestTenant) -> None:
    """Waits until no slot is taken; leases end after a second at most."""
    await eventually(lambda: quota_mesh.use(running, who).slots == 0, "all slots are free")


async def test_one_requester_gets_exactly_the_limit(running: Mesh) -> None:
    """Mutant: every scheduler counts for itself."""
    who = quota_mesh.tenant(running, requests_per_min=20)
    async with client_of(running, key=who.key) as client:
        told = [await ask(client) for _ in range(25)]
    assert told == ["OK"] * 20 + ["QUOTA_EXCEEDED"] * 5


async def test_many_at_once_over_two_schedulers_get_exactly_the_limit(running: Mesh) -> None:
    who = quota_mesh.tenant(running, requests_per_min=60)
    async with client_of(running, key=who.key) as client:
        told = Counter(await asyncio.gather(*(ask(client) for _ in range(150))))
    assert told == {"OK": 60, "QUOTA_EXCEEDED": 90}


async def test_over_two_schedulers_the_tokens_reserved_never_exceed_the_limit(
    running: Mesh,
) -> None:
    """Mutant: every scheduler counts for itself."""
    limit, each = 3000, 10 + 1
    who = quota_mesh.tenant(running, tokens_per_min=limit)
    seen: list[int] = []
    over = asyncio.Event()

    async def look() -> None:
        while not over.is_set():
            seen.append((await asyncio.to_thread(quota_mesh.use, running, who)).tokens)

    looking = asyncio.create_task(look())
    told: Counter[str] = Counter()
    for name in running.schedulers:
        async with client_of(running, running[name].address, who.key) as client:
            told.update(await asyncio.gather(*(ask(client) for _ in range(200))))
    over.set()
    await looking
    assert max(seen) <= limit
    assert told["OK"] == limit // each, told
    await settled(running, who)
    assert quota_mesh.use(running, who).tokens == told["OK"] * each


async def test_a_slot_is_free_again_after_every_cancel(running: Mesh) -> None:
    """Mutant: a cancelled stream keeps its slot."""
    who = quota_mesh.tenant(running, concurrent_requests=1)
    async with client_of(running, key=who.key) as client:
        for _ in range(50):
            call = client.start(**PROMPT, sampling={"max_tokens": 2000, "ignore_eos": True})
            assert await call.read() is not grpc.aio.EOF
            call.cancel()
            assert await ask(client) == "OK"
    await settled(running, who)


async def test_one_after_the_other_is_never_two_at_once(running: Mesh) -> None:
    """Mutant: a slot that is given back through another scheduler is not waited for."""
    who = quota_mesh.tenant(running, concurrent_requests=1)
    async with client_of(running, key=who.key) as client:
        told = Counter([await ask(client) for _ in range(100)])
    assert told == {"OK": 100}


async def test_what_is_refused_by_concurrency_is_not_charged_to_the_minute(running: Mesh) -> None:
    """Mutant: a refusal is charged."""
    who = quota_mesh.tenant(running, requests_per_min=2, concurrent_requests=1)
    async with client_of(running, key=who.key) as client:
        first = client.start(**PROMPT, sampling={"max_tokens": 2000, "ignore_eos": True})
        assert await first.read() is not grpc.aio.EOF
        second = await refusal(client)
        assert second.reason == "QUOTA_EXCEEDED"
        assert [one.metric for one in second.quotas] == ["concurrent_requests"]
        first.cancel()
        await settled(running, who)
        assert await ask(client) == "OK"
        third = await refusal(client)
        assert [one.metric for one in third.quotas] == ["requests_per_min"]


async def test_a_refusal_says_which_quota_and_when_to_come_again(running: Mesh) -> None:
    """Alike over gRPC and HTTP."""
    who = quota_mesh.tenant(running, requests_per_min=1)
    async with client_of(running, key=who.key) as client:
        assert await ask(client) == "OK"
        error = await refusal(client)
        assert error.code is Code.RESOURCE_EXHAUSTED and error.reason == "QUOTA_EXCEEDED"
        assert error.metadata["scope"] == "tenant" and error.metadata["charged"] == "false"
        assert error.metadata["quota"] == "requests_per_min"
        assert error.retry_after_s is not None and 30.0 < error.retry_after_s <= 66.3
        answer = await client.http.post(
            "/v1/generate", json={"prompt": "hi", "sampling": {"max_tokens": 1}}
        )
    assert answer.status_code == 429
    assert 30 <= int(answer.headers["retry-after"]) <= 67
    body = answer.json()
    details = {detail["@type"].rsplit(".", 1)[1]: detail for detail in body["details"]}
    assert details["ErrorInfo"]["reason"] == "QUOTA_EXCEEDED"
    assert details["ErrorInfo"]["metadata"]["charged"] == "false"
    (violation,) = details["QuotaFailure"]["violations"]
    assert violation["subject"] == f"tenant:{who.name}"
    assert (violation["quota_metric"], violation["quota_value"]) == ("requests_per_min", "1")
    assert details["RetryInfo"]["retry_delay"].endswith("s")


async def test_what_can_never_fit_is_told_so_without_a_delay(running: Mesh) -> None:
    who = quota_mesh.tenant(running, tokens_per_min=50)
    async with client_of(running, key=who.key) as client:
        with pytest.raises(SluiceError) as caught:
            await client.text(token_ids=[7] * 60, sampling={"max_tokens": 1})
        error = caught.value
        assert (error.reason, error.retry_after_s) == ("QUOTA_TOO_SMALL", None)
        assert await ask(client) == "OK"


async def test_what_is_refused_for_other_reasons_charges_nothing(running: Mesh) -> None:
    """By the scheduler, by the engine, or because the mesh failed it. Mutant: what did not run
    keeps its reservation."""
    who = quota_mesh.tenant(running, requests_per_min=5, tokens_per_min=10_000)
    async with client_of(running, key=who.key) as client:
        wrong: list[dict[str, Any]] = [
            {"sampling": {"temperature": -1.0}},
            {"model": "unknown"},
            {"prompt": sim(refuse=True, status="INVALID_ARGUMENT", reason="NO", message="no")},
            {"prompt": sim(fail_after=0, status="INTERNAL", message="no")},
        ]
        for fields in wrong:
            with pytest.raises(SluiceError) as caught:
                await client.text(**(fields if "prompt" in fields else {**PROMPT, **fields}))
            assert caught.value.reason != "QUOTA_EXCEEDED"
    await settled(running, who)
    use = quota_mesh.use(running, who)
    assert (use.requests, use.tokens) == (0, 0)


async def test_embeddings_count_too(running: Mesh) -> None:
    who = quota_mesh.tenant(running, requests_per_min=3)
    request = generate_pb2.EmbedRequest(texts=["one", "two"], model="sim-embed")
    reasons = []
    async with client_of(running, key=who.key) as client:
        for _ in range(4):
            try:
                answer = await client.stub.Embed(request, metadata=client.metadata, timeout=10)
                reasons.append("OK")
            except grpc.aio.AioRpcError as error:
                reasons.append(from_rpc_error(error).reason)
    assert reasons == ["OK"] * 3 + ["QUOTA_EXCEEDED"]
    await settled(running, who)
    assert quota_mesh.use(running, who).tokens == 3 * answer.usage.prompt_tokens


async def test_after_300_that_leave_at_any_time_all_that_was_used_is_paid_and_no_more(
    running: Mesh,
) -> None:
    """Mutants: a cancelled stream keeps its slot; a request's use is not settled."""
    who = quota_mesh.tenant(
        running, requests_per_min=10_000, tokens_per_min=10**6, concurrent_requests=1000
    )
    chance = random.Random(7)
    async with client_of(running, key=who.key) as client:

        async def one() -> None:
            call = client.start(**PROMPT, sampling={"max_tokens": 200, "ignore_eos": True})
            await asyncio.sleep(chance.random() * 1.0)
            call.cancel()

        for _ in range(3):
            await asyncio.gather(*(one() for _ in range(100)))
    await asyncio.to_thread(running.until_idle)
    await settled(running, who)
    await asyncio.sleep(2.5)  # what was used is told once a second
    used = quota_mesh.usage(running, who)
    assert set(used.requests) <= {"cancelled", "finished"}
    assert 30 < sum(used.requests.values()) <= 300  # some left before they had arrived
    assert used.completion_tokens > 0
    use = quota_mesh.use(running, who)
    assert use.tokens == used.prompt_tokens + used.completion_tokens


async def test_usage_and_cost_are_kept_by_tenant_and_model(running: Mesh) -> None:
    """Mutant: a request that ended is not added."""
    who = quota_mesh.tenant(running)
    costs = []
    async with client_of(running, key=who.key) as client:
        for tokens in (5, 10):
            answer = await client.text(
                **PROMPT, sampling={"max_tokens": tokens, "ignore_eos": True}
            )
            assert answer.cost == pytest.approx((10 * PRICE[0] + tokens * PRICE[1]) / 1e6)
            costs.append(answer.cost)
        streamed = (
            await client.generate(**PROMPT, sampling={"max_tokens": 3, "ignore_eos": True})
        ).ok
        costs.append(streamed.finished.cost)
        assert (await refusal(client, 0)).code is Code.INVALID_ARGUMENT
    await eventually(
        lambda: quota_mesh.usage(running, who).requests["finished"] == 3, "all are counted"
    )
    used = quota_mesh.usage(running, who)
    assert used.prompt_tokens == 30 and used.completion_tokens == 18
    assert used.cost == pytest.approx(sum(costs))
    assert 0 < used.gpu_seconds < 5


async def test_an_orderly_stop_loses_no_usage_and_gives_quota_back(running: Mesh) -> None:
    """Mutant: the end of the process does not tell."""
    who = quota_mesh.tenant(running, requests_per_min=1000, concurrent_requests=10)
    process = running["scheduler-1"]
    async with client_of(running, process.address, who.key) as client:
        told = Counter(await asyncio.gather(*(ask(client) for _ in range(8))))
        assert told == {"OK": 8}
        # One that ends while the process does: nothing but its end can tell of it.
        last = client.start(**PROMPT, sampling={"max_tokens": 1000, "ignore_eos": True})
        assert await last.read() is not grpc.aio.EOF
        process.send(signal.SIGTERM)
        while await last.read() is not grpc.aio.EOF:
            pass
    assert await asyncio.to_thread(process.ended, 20.0) == 0
    assert quota_mesh.usage(running, who).requests["finished"] == 9
    use = quota_mesh.use(running, who)
    assert (use.slots, use.requests) == (0, 9)
    running.recover()


async def test_the_command_shows_what_was_used(running: Mesh, tmp_path: Path) -> None:
    who = quota_mesh.tenant(running)
    async with client_of(running, key=who.key) as client:
        await client.text(**PROMPT, sampling={"max_tokens": 4, "ignore_eos": True})
        await eventually(lambda: quota_mesh.usage(running, who).requests["finished"] == 1, "told")
        over_http = (await client.http.get("/v1/usage")).json()["records"]
    key = tmp_path / "key"
    key.write_text(who.key)
    command = [sys.executable, "-m", "sluice.command.cli", "usage"]
    options = ["--endpoint", running.target, "--key-file", str(key)]

    async def told(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, *options, stdout=PIPE, stderr=STDOUT, cwd=ROOT
        )
        text, _ = await process.communicate()
        assert process.returncode == 0, text
        return text.decode()

    (record,) = json.loads(await told("--json"))
    assert record["requests"] == {"finished": "1"} and record["completion_tokens"] == "4"
    assert over_http == [record]
    line = next(line for line in (await told()).splitlines() if " sim " in line)
    assert "1 finished" in line and "0.0005" in line
