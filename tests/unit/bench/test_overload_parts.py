"""What `make bench-overload` is made of: arrivals, figures, and the engine behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import ParamSpec

import pytest
import uvloop

from bench import openai_engine
from bench.overload import mesh_config
from bench.overload_client import FINISHED, LEFT, REFUSED, Ask, Row, SseSender, Words, run
from bench.overload_figures import Run, attainment, fairness, goodput, headline, met
from bench.overload_profile import Profile, read_profile
from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.model import encode
from inference_svc.adapters.simulated.profile import SimulatedProfile
from scheduler_svc.domain.model import PriorityClass

P = ParamSpec("P")
FAST = SimulatedProfile(decode_step_ms=2.0, sequences_max=2)


def on_uvloop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def wrapped(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*arguments, **named))

    return wrapped


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile()


@contextlib.asynccontextmanager
async def engine(
    settings: SimulatedProfile = FAST,
) -> AsyncIterator[tuple[str, SimulatedEngine]]:
    listening, running = await openai_engine.start("127.0.0.1", 0, settings)
    async with listening:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", running
        await running.close()


async def exchange(target: str, request: bytes) -> bytes:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
    length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    answer += await reader.readexactly(length)
    writer.close()
    return answer


def post(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


# --- arrivals ---


def test_the_same_profile_gives_the_same_arrivals(profile: Profile) -> None:
    rates = profile.equal_rates(40.0)
    first = list(profile.arrivals(rates, 20.0))
    assert first == list(profile.arrivals(rates, 20.0))
    assert len(first) == pytest.approx(800, rel=0.15)
    assert [one.at_s for one in first] == sorted(one.at_s for one in first)
    assert {one.tenant for one in first} == set(profile.tenants)
    assert {one.priority_class for one in first} == set(PriorityClass)


def test_what_one_tenant_asks_changes_nothing_for_another(profile: Profile) -> None:
    noisy = profile.noisy_rates(40.0)
    calm = {**noisy, profile.tenants[0]: noisy[profile.tenants[1]]}
    others = [
        [one for one in profile.arrivals(rates, 30.0) if one.tenant != profile.tenants[0]]
        for rates in (calm, noisy)
    ]
    assert others[0] == others[1]
    assert noisy[profile.tenants[0]] == pytest.approx(20 * noisy[profile.tenants[1]])


def test_capacity_is_what_the_engines_serve_with_full_batches(profile: Profile) -> None:
    tokens = sum(output for _, output in profile.lengths) / len(profile.lengths)
    most = profile.instances * profile.kind.sequences_max / profile.kind.unloaded_tpot_s / tokens
    assert 0.5 * most < profile.capacity_per_s() < most


def test_a_prompt_has_the_tokens_that_it_should_and_a_beginning_of_its_own() -> None:
    words = Words()
    for tokens in (6, 7, 500, 2_000):
        assert len(encode(words.prompt(7, tokens))) == pytest.approx(tokens, rel=0.01)
    assert words.prompt(1, 300)[:6] != words.prompt(2, 300)[:6]


def test_our_configuration_says_what_the_classes_promise(profile: Profile) -> None:
    text = mesh_config(profile)
    assert "first_token_critical_s = 0.9" in text
    assert "share_batch = 0.1" in text
    assert text.count("[[instance]]") == profile.instances
    assert f"decode_step_ms = {profile.kind.decode_step_ms}" in text


# --- figures ---


def row(cls: PriorityClass, **changes: object) -> Row:
    """Arrived at 10 s, first token after half a second, 21 tokens at the unloaded pace."""
    made = Row(10.0, "tenant-0", int(cls), 21, 0.0, 10.5, 11.005, FINISHED)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_an_slo_is_first_token_and_pace(profile: Profile) -> None:
    critical = PriorityClass.CRITICAL
    assert met(row(critical), profile)
    assert not met(row(critical, first_s=11.1, end_s=11.5), profile)
    assert not met(row(critical, end_s=10.5 + 20 * 0.0506), profile)
    assert not met(row(critical, outcome=LEFT), profile)
    assert met(row(PriorityClass.STANDARD, first_s=19.0, end_s=20.0), profile)
    assert met(row(PriorityClass.BATCH, first_s=60.0, end_s=90.0), profile)


def test_goodput_counts_what_ended_in_time_and_attainment_what_arrived(profile: Profile) -> None:
    critical = PriorityClass.CRITICAL
    rows = [
        row(critical),
        row(critical, outcome=REFUSED, first_s=0.0, end_s=10.0),
        row(critical, at_s=1.0),  # before the measured time, and too slow
        row(critical, end_s=25.0),  # after it
    ]
    found = Run(rows, 5.0, 20.0)
    assert goodput(found, profile) == pytest.approx(21 / 15.0)
    assert attainment(found, profile, critical) == pytest.approx(1 / 3)
    assert attainment(found, profile, PriorityClass.BATCH) == 1.0


def test_the_headline_compares_rates_and_neighbours(profile: Profile) -> None:
    standard = PriorityClass.STANDARD
    all_of = [row(standard, tenant=tenant) for tenant in profile.tenants]
    half = [*all_of[:4], *(replace(one, outcome=REFUSED) for one in all_of[4:])]
    rates = {0.5: Run(all_of, 0.0, 20.0), 2.0: Run(all_of, 0.0, 20.0), 4.0: Run(half, 0.0, 20.0)}
    found = headline(rates, Run(half, 0.0, 20.0), profile)
    assert found["goodput_ratio_4x"] == pytest.approx(0.5)
    assert found["jain_index"] == pytest.approx(0.5)
    assert found["noisy_neighbour_cost"] == pytest.approx(4 / 7)
    assert fairness(rates[2.0], profile) == 1.0


# --- the engine behind HTTP ---


@on_uvloop
async def test_requests_beyond_the_batch_wait_in_the_engine_first_come_first_served() -> None:
    async with engine() as (target, running):
        asks = [Ask(0.005 * n, "tenant-0", n % 4, 50, 20, 30.0) for n in range(10)]
        rows = await run(SseSender(target), asks, 0.0, 30.0)
        assert [one.outcome for one in rows] == [FINISHED] * 10
        firsts = [one.first_s for one in rows]
        assert firsts == sorted(firsts)
        assert firsts[-1] - firsts[0] > 4 * 20 * 0.002  # five rounds of two
        assert running.counters().finished == 10


@on_uvloop
async def test_a_client_that_leaves_stops_its_engine() -> None:
    slow = replace(FAST, decode_step_ms=20.0)
    async with engine(slow) as (target, running):
        asks = [Ask(0.0, "tenant-0", 0, 50, 1_000, 0.2), Ask(0.0, "tenant-0", 0, 50, 2, 5.0)]
        left, finished = await run(SseSender(target), asks, 0.0, 30.0)
        assert (left.outcome, finished.outcome) == (LEFT, FINISHED)
        await asyncio.sleep(0.05)
        counted = running.counters()
        assert (counted.running, counted.aborted, counted.finished) == (0, 1, 1)


@on_uvloop
async def test_what_is_open_at_the_end_of_the_run_is_given_up() -> None:
    async with engine(replace(FAST, decode_step_ms=20.0)) as (target, _):
        rows = await run(SseSender(target), [Ask(0.0, "t", 0, 50, 1_000, 60.0)], 0.0, 0.3)
        assert rows[0].outcome == LEFT
        assert 0.29 < rows[0].end_s < 2.0


@on_uvloop
async def test_whole_answers_and_what_gateways_poll() -> None:
    async with engine() as (target, _):
        asked: dict[str, object] = {"prompt": "a b", "max_tokens": 3, "ignore_eos": True}
        whole = await exchange(target, post("/v1/completions", asked))
        assert b'"completion_tokens": 3' in whole
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        whole = await exchange(target, post("/v1/chat/completions", asked))
        assert b'"role": "assistant"' in whole
        for path, text in (("/health", b"200 OK"), ("/v1/models", b"simulated")):
            assert text in await exchange(target, f"GET {path} HTTP/1.1\r\n\r\n".encode())
        metrics = await exchange(target, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"vllm:num_requests_waiting" in metrics
        for body in ({"prompt": ""}, {"prompt": 7}, {}):
            refused = await exchange(target, post("/v1/completions", body))  # type: ignore[arg-type]
            assert refused.startswith(b"HTTP/1.1 400")
        missing = await exchange(target, post("/v1/embeddings", {}))
        assert missing.startswith(b"HTTP/1.1 404")
