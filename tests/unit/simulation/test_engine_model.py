"""The engine model against the step-by-step simulated engine, and its own rules.

Seen to fail on mutants: a stretch cut one step late; a block given back that a preempted sequence
did not have; blocks taken a step early; outputs a token short; a meter whose windows end only with
stretches.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from random import Random

import pytest

from bench.simulation_error import (
    CASES,
    FLEET_CASES,
    Case,
    Sink,
    Timing,
    compare,
    model_alone,
    profile_of,
    spec_of,
    step_alone,
)
from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.ports import FinishReason
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.engine_model import EngineModel, Sequence
from scheduler_svc.simulation.kinds import GpuKind
from sluice.clock import run_virtual

EXACT_S = 1e-6
# What is promised is 5 %; what is reached is the rounding of sums.
EXACT = 1e-6
TINY = GpuKind(
    "tiny",
    prefill_tokens_per_s=10_000.0,
    decode_step_ms=10.0,
    decode_step_ms_per_sequence=0.7,
    sequences_max=5,
    kv_tokens=160,
    kv_block_tokens=8,
    step_tokens_max=32,
    context_tokens=100,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_time_is_that_of_the_step_engine(case: Case) -> None:
    case = replace(case, requests=case.requests // 5)
    arrivals = case.arrivals()
    steps, preemptions = step_alone(case.kind, arrivals)
    model, modelled = model_alone(case.kind, arrivals)
    assert modelled == preemptions
    for mine, its in zip(model, steps, strict=True):
        assert mine.tokens == its.tokens
        assert mine.ttft_s == pytest.approx(its.ttft_s, abs=EXACT_S)
        assert mine.end_s == pytest.approx(its.end_s, abs=EXACT_S)


def test_preemptions_happen_in_the_case_that_is_for_them() -> None:
    case = CASES[-1]
    assert model_alone(case.kind, case.arrivals())[1] > 100


@pytest.mark.parametrize("case", FLEET_CASES, ids=lambda case: case.name)
def test_a_fleet_behind_the_scheduler_has_the_figures_of_step_engines(case: Case) -> None:
    steps, model = compare(replace(case, requests=500), 3)
    assert model.worst_error(steps) < EXACT


Story = list[tuple[float, Arrival, float]]  # when it comes, what it is, when it is aborted or inf


def a_story(seed: int) -> Story:
    """Requests that crowd a tiny engine; a fifth is aborted at any time."""
    random = Random(seed)
    story: Story = []
    at_s = 0.0
    for _ in range(60):
        at_s += random.choice((0.001, 0.013, 0.05, 0.4)) * random.uniform(0.5, 1.5)
        arrival = Arrival(
            at_s, "t", PriorityClass.STANDARD, random.randint(1, 60), random.randint(1, 40)
        )
        abort_s = at_s + random.uniform(0.0, 2.0) if random.random() < 0.2 else inf
        story.append((at_s, arrival, abort_s))
    return story


async def step_story(story: Story) -> list[Timing]:
    loop = asyncio.get_running_loop()
    engine = SimulatedEngine(profile_of(TINY))
    await engine.start()
    base_s = loop.time()
    timings = [Timing() for _ in story]
    left = len(story)
    done = asyncio.Event()

    def over() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    async def play(number: int) -> None:
        at_s, arrival, abort_s = story[number]
        prepared = await engine.prepare(spec_of(number, arrival))
        await asyncio.sleep(base_s + at_s - loop.time())
        running = engine.submit(prepared, Sink(base_s, timings[number], over=over))
        if abort_s < inf:
            await asyncio.sleep(base_s + abort_s - loop.time())
            running.abort(FinishReason.CANCELLED)

    tasks = [asyncio.ensure_future(play(number)) for number in range(len(story))]
    await done.wait()
    await asyncio.gather(*tasks)
    await engine.close()
    return timings


def model_story(story: Story) -> list[Timing]:
    engine = EngineModel(TINY)
    timings = [Timing() for _ in story]
    sequences: dict[int, Sequence] = {}
    heap: list[tuple[float, int, int]] = []
    for number, (at_s, _, abort_s) in enumerate(story):
        heappush(heap, (at_s, 0, number))
        if abort_s < inf:
            heappush(heap, (abort_s, 1, number))
    stamp = 0
    while heap:
        now, what, number = heappop(heap)
        if what == 0:
            arrival = story[number][1]
            sequences[number] = Sequence(number, arrival.prompt_tokens, arrival.output_tokens)
            engine.start(sequences[number], now)
        elif what == 1:
            if timings[number].end_s == inf:
                written = dict(engine.written(now)).get(number)
                if written is not None:
                    timings[number].tokens = written
                engine.abort(sequences[number], now)
                timings[number].end_s = now
        elif number == engine.stamp:
            first, over = engine.advance(now)
            for seq in first:
                timings[seq.key].ttft_s = now
            for seq in over:
                timings[seq.key].end_s, timings[seq.key].tokens = now, seq.output_tokens
        if engine.stamp != stamp and engine.due_s < inf:
            heappush(heap, (engine.due_s, 2, engine.stamp))
        stamp = engine.stamp
    assert engine.running == engine.waiting == engine.kv_tokens_used == 0
    return timings


@pytest.mark.parametrize("seed", range(15))
def test_crowded_engines_with_aborts_and_preemptions_end_as_the_step_engine_does(
    seed: int,
) -> None:
    """Goal: exactness under every change of the batch. Method: random stories of 60 requests on
    an engine with room for few, every fifth aborted. Oracle: the step engine, time for time."""
    story = a_story(seed)
    steps = run_virtual(step_story(story))
    model = model_story(story)
    for mine, its in zip(model, steps, strict=True):
        assert mine.ttft_s == pytest.approx(its.ttft_s, abs=EXACT_S)
        assert mine.end_s == pytest.approx(its.end_s, abs=EXACT_S)


def test_a_long_output_costs_one_event() -> None:
    engine = EngineModel(GpuKind("long", context_tokens=100_000, kv_tokens=200_000))
    engine.start(Sequence(1, 10, 50_000), 0.0)
    engine.advance(0.0)  # it begins
    first, over = engine.advance(engine.due_s)
    assert [seq.key for seq in first] == [1]
    assert over == []
    _, over = engine.advance(engine.due_s)
    assert [seq.key for seq in over] == [1]
    assert engine.due_s == inf


def test_output_beyond_the_context_is_cut() -> None:
    engine = EngineModel(TINY)
    assert not engine.fits(100)
    assert engine.fits(99)
    seq = Sequence(1, 99, 50)
    engine.start(seq, 0.0)
    assert seq.output_tokens == 1


def test_counts_in_the_middle_of_a_stretch_are_those_of_whole_steps() -> None:
    engine = EngineModel(TINY)
    engine.start(Sequence(7, 10, 30), 0.0)
    engine.advance(0.0)
    begun_s = engine.due_s
    engine.advance(begun_s)
    step_s = 0.0107
    assert engine.written(begun_s + 3.5 * step_s) == [(7, 4)]
    busy_s, steps, prompts, outputs = engine.so_far(begun_s + 3.5 * step_s)
    assert (steps, prompts, outputs) == (4, 10, 4)
    assert busy_s == pytest.approx(begun_s + 3 * step_s)


def test_the_prefix_cache_saves_reading_and_gives_way_to_sequences() -> None:
    kind = GpuKind("cached", context_tokens=4_096, kv_tokens=4_096)
    engine = EngineModel(kind, prefix_block_tokens=512)

    def read_s(seq: Sequence) -> float:
        start_s = engine.due_s if engine.due_s < inf else 100.0 * seq.key
        engine.start(seq, start_s)
        engine.advance(start_s)
        first, _ = engine.advance(engine.due_s)
        assert first == [seq]
        return 0.0 if engine.due_s == inf else engine.due_s - start_s

    read_s(Sequence(1, 1_500, 1, (1, 2)))
    again = Sequence(2, 1_500, 1, (1, 2))
    read_s(again)
    assert again.cached == 1_024
    read_s(Sequence(3, 3_900, 1, (3, 4, 5, 6, 7)))  # the memory of all that was cached
    late = Sequence(4, 1_500, 1, (1, 2))
    read_s(late)
    assert late.cached < 1_024
    assert engine.cache is not None
    assert engine.cache.hit_tokens >= 1_024
