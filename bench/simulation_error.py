"""How far the event-per-request engine model is from the step-by-step simulated engine.

The same arrivals go to both, in virtual time: to one engine alone, which queues by itself, and to a
fleet behind the real scheduler. `python -m bench.simulation_error` prints the table of
docs/BENCHMARKS.md; a unit test holds the bound on smaller cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import astuple, dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice
from math import inf

import numpy as np

from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import (
    GenerateSpec,
    GenerationEnd,
    RunningRequest,
    Sampling,
    TokenLogprob,
    TokenPrompt,
)
from scheduler_svc.domain.model import Dispatch
from scheduler_svc.simulation import engine_model
from scheduler_svc.simulation.arrivals import Arrival, Lengths, Mix, generated
from scheduler_svc.simulation.engine_model import EngineModel
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.run import Options, Simulation
from sluice.clock import START_S, run_virtual


@dataclass(slots=True)
class Timing:
    """One request's times from its arrival, and how many tokens it wrote."""

    tokens: int = 0
    ttft_s: float = inf
    end_s: float = inf

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.ttft_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Case:
    """A load on a kind of engine."""

    name: str
    kind: GpuKind
    mix: Mix
    rate_per_s: float
    requests: int
    cv: float = 1.0
    seed: int = 1

    def arrivals(self) -> list[Arrival]:
        """A microsecond apart or more: the event loop takes times within a nanosecond for one."""
        made: list[Arrival] = []
        for arrival in islice(
            generated(self.mix, self.rate_per_s, self.cv, self.seed), self.requests
        ):
            least_s = made[-1].at_s + 1e-6 if made else 0.0
            made.append(replace(arrival, at_s=max(arrival.at_s, least_s)))
        return made


# Odd numbers, so that no two events fall on one time, where rounding would decide which is first.
KIND = GpuKind(
    "compared",
    prefill_tokens_per_s=19_937.3,
    decode_step_ms=10.01373,
    decode_step_ms_per_sequence=0.05039,
    sequences_max=64,
)
CHAT = Mix(prompts=Lengths(400.0, 0.8, 4_000), outputs=Lengths(100.0, 0.7, 600))
LONG = Mix(prompts=Lengths(5_000.0, 0.4, 7_500), outputs=Lengths(60.0, 0.7, 300))
CASES = (
    Case("a third of capacity", KIND, CHAT, 6.0, 2_000),
    Case("three quarters", KIND, CHAT, 14.0, 2_000),
    Case("three quarters, in bursts", KIND, CHAT, 14.0, 2_000, cv=3.0),
    Case("one and a half", KIND, CHAT, 28.0, 2_000),
    Case("long prompts in chunks", replace(KIND, step_tokens_max=2_048), LONG, 2.5, 800),
    Case("memory full, preemptions", replace(KIND, kv_tokens=16_384), CHAT, 20.0, 1_500),
)

FLEET_CASES = (
    Case("a third of capacity", KIND, CHAT, 24.0, 3_000),
    Case("three quarters, in bursts", KIND, CHAT, 56.0, 3_000, cv=3.0),
    Case("one and a half", KIND, CHAT, 110.0, 3_000),
)


def profile_of(kind: GpuKind) -> SimulatedProfile:
    """The step engine's profile of a kind."""
    return SimulatedProfile(
        prefill_tokens_per_s=kind.prefill_tokens_per_s,
        decode_step_ms=kind.decode_step_ms,
        decode_step_ms_per_sequence=kind.decode_step_ms_per_sequence,
        sequences_max=kind.sequences_max,
        kv_tokens=kind.kv_tokens,
        kv_block_tokens=kind.kv_block_tokens,
        step_tokens_max=kind.step_tokens_max,
        context_tokens=kind.context_tokens,
        prefix_cache=False,
    )


# --- one engine alone ----------------------------------------------------------------------------


class Sink:
    """Notes when output came, in seconds since ``origin_s``."""

    def __init__(
        self,
        origin_s: float,
        timing: Timing,
        started: Callable[[], None] | None = None,
        over: Callable[[], None] | None = None,
    ) -> None:
        self._origin_s = origin_s
        self._timing = timing
        self._started = started
        self._over = over

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        if not self._timing.tokens:
            self._timing.ttft_s = asyncio.get_running_loop().time() - self._origin_s
            if self._started is not None:
                self._started()
        self._timing.tokens += len(token_ids)

    def ended(self, end: GenerationEnd) -> None:
        assert end.error is None
        self._timing.end_s = asyncio.get_running_loop().time() - self._origin_s
        if self._over is not None:
            self._over()


def spec_of(number: int, arrival: Arrival) -> GenerateSpec:
    return GenerateSpec(
        request_id=str(number),
        prompt=TokenPrompt((7,) * arrival.prompt_tokens),
        sampling=Sampling(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True),
    )


async def _step_alone(kind: GpuKind, arrivals: Sequence[Arrival]) -> tuple[list[Timing], int]:
    loop = asyncio.get_running_loop()
    engine = SimulatedEngine(profile_of(kind))
    await engine.start()
    timings = [Timing() for _ in arrivals]
    base_s, open_ = loop.time(), len(arrivals)
    done = asyncio.Event()

    def over() -> None:
        nonlocal open_
        open_ -= 1
        if not open_:
            done.set()

    for number, (arrival, timing) in enumerate(zip(arrivals, timings, strict=True)):
        prepared = await engine.prepare(spec_of(number, arrival))
        at_s = base_s + arrival.at_s
        loop.call_at(at_s, engine.submit, prepared, Sink(at_s, timing, over=over))
    await done.wait()
    preemptions = engine.stats().preemptions
    await engine.close()
    return timings, preemptions or 0


def step_alone(kind: GpuKind, arrivals: Sequence[Arrival]) -> tuple[list[Timing], int]:
    """Times by the step engine, and its preemptions."""
    return run_virtual(_step_alone(kind, arrivals))


def model_alone(kind: GpuKind, arrivals: Sequence[Arrival]) -> tuple[list[Timing], int]:
    """Times by the engine model, and its preemptions."""
    engine = EngineModel(kind)
    timings = [Timing() for _ in arrivals]
    heap: list[tuple[float, int, int]] = [(a.at_s, -1, i) for i, a in enumerate(arrivals)]
    heap.sort()
    stamp = 0
    while heap:
        now, what, number = heappop(heap)
        if what == -1:
            arrival = arrivals[number]
            seq = engine_model.Sequence(number, arrival.prompt_tokens, arrival.output_tokens)
            engine.start(seq, now)
        elif number == engine.stamp:
            first, ended = engine.advance(now)
            for seq in first:
                timings[seq.key].ttft_s = now - arrivals[seq.key].at_s
            for seq in ended:
                timings[seq.key].end_s = now - arrivals[seq.key].at_s
                timings[seq.key].tokens = seq.output_tokens
        if engine.stamp != stamp and engine.due_s < inf:
            heappush(heap, (engine.due_s, 0, engine.stamp))
        stamp = engine.stamp
    return timings, engine.preemptions


# --- a fleet behind the scheduler ----------------------------------------------------------------


class _OverSteps(Simulation):
    """The simulation's own scheduler and arrivals, over step engines and an event loop: what
    differs is the engine, and how its load is measured."""

    def __init__(self, options: Options, arrivals: Sequence[Arrival]) -> None:
        super().__init__(options)
        self._arrivals = arrivals
        self.timings = [Timing() for _ in arrivals]
        self._steps: list[SimulatedEngine] = []
        self._runs: dict[int, RunningRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turning = False
        self._left = len(arrivals)
        self._done = asyncio.Event()

    async def play(self) -> None:
        loop = asyncio.get_running_loop()
        for engine in self._engines:
            self._steps.append(SimulatedEngine(profile_of(engine.kind)))
            await self._steps[-1].start()
        self._open()
        for arrival in self._arrivals:
            loop.call_at(START_S + arrival.at_s, self._come, arrival)
        self._spawn(self._report_all())
        await self._done.wait()
        for task in self._tasks:
            task.cancel()
        for steps in self._steps:
            await steps.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - START_S

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._carry_out)

    def _come(self, arrival: Arrival) -> None:
        self._arrive(arrival, arrival.at_s)
        assert self._next_id - 1 in self._live, "the compared loads are not refused"
        self._soon()

    def _carry_out(self) -> None:
        self._turning = False
        now = self._now()
        for effect in self._scheduler.turn(now):
            assert isinstance(effect, Dispatch), "the compared loads keep their deadlines"
            self._spawn(self._begin(int(effect.ticket.id), self._rows[effect.instance]))
        wake_s = self._scheduler.next_wakeup(now)
        if wake_s is not None:
            asyncio.get_running_loop().call_at(START_S + max(wake_s, now + 1e-3), self._soon)

    async def _begin(self, number: int, index: int) -> None:
        live = self._live[number]
        live.engine = index
        ticket, arrival = live.ticket, live.arrival
        prepared = await self._steps[index].prepare(spec_of(number, arrival))

        def started() -> None:
            self._scheduler.attempts.first_token(ticket.id, ticket.attempt, self._now())

        def ended() -> None:
            tokens = arrival.output_tokens
            self._scheduler.attempts.ended(
                ticket.id, ticket.attempt, self._now(), output_tokens=tokens
            )
            del self._runs[number]
            self._left -= 1
            if not self._left:
                self._done.set()
            self._soon()

        sink = Sink(START_S + arrival.at_s, self.timings[number - 1], started, ended)
        self._runs[number] = self._steps[index].submit(prepared, sink)
        tokens = arrival.prompt_tokens
        self._scheduler.attempts.accepted(ticket.id, ticket.attempt, tokens, 0, self._now())

    async def _report_all(self) -> None:
        for number in count():
            due_s = (1 + number / len(self._steps)) * self._options.report_interval_s
            await asyncio.sleep(due_s - self._now())
            self._report_steps(number % len(self._steps))
            self._soon()

    def _report_steps(self, index: int) -> None:
        stats = self._steps[index].stats()
        report = replace(
            self._identities[index],
            running=stats.running,
            waiting=stats.waiting,
            kv_tokens_used=stats.kv_tokens_used,
            prompt_tokens_per_s=stats.prompt_tokens_per_s,
            output_tokens_per_s=stats.output_tokens_per_s,
            step_ms=stats.step_ms,
        )
        self._scheduler.instances.report(report, self._now())
        for number, run in self._runs.items():
            live = self._live[number]
            if live.engine == index:
                self._scheduler.attempts.progressed(
                    live.ticket.id, live.ticket.attempt, run.output_tokens
                )


class _Timed(Simulation):
    """Over engine models; notes the times of every request."""

    def __init__(self, options: Options, arrivals: Sequence[Arrival]) -> None:
        super().__init__(options)
        self.timings = [Timing() for _ in arrivals]
        recorder = self.recorder
        event = recorder.event

        def noted(code: bytes, now: float, ticket: int, instance: int) -> None:
            event(code, now, ticket, instance)
            timing, arrival = self.timings[ticket - 1], arrivals[ticket - 1]
            if code == b"f":
                timing.ttft_s = now - arrival.at_s
            elif code == b"e":
                timing.end_s, timing.tokens = now - arrival.at_s, arrival.output_tokens

        recorder.event = noted  # type: ignore[method-assign]


def step_fleet(options: Options, arrivals: Sequence[Arrival]) -> list[Timing]:
    """Times of a fleet of step engines behind the scheduler."""

    async def play() -> list[Timing]:
        mesh = _OverSteps(options, arrivals)
        await mesh.play()
        return mesh.timings

    return run_virtual(play())


def model_fleet(options: Options, arrivals: Sequence[Arrival]) -> list[Timing]:
    """Times of a fleet of engine models behind the scheduler."""
    simulation = _Timed(options, arrivals)
    simulation.run(iter(arrivals))
    simulation.check()
    return simulation.timings


# --- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one side: seconds, and output tokens per second until the last end."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p50: float
    tpot_p99: float
    tokens_per_s: float

    @classmethod
    def of(cls, timings: Sequence[Timing], arrivals: Sequence[Arrival]) -> Figures:
        ttft = np.array([timing.ttft_s for timing in timings])
        tpot = np.array([timing.tpot_s for timing in timings if timing.tokens > 1])
        ends = [t.end_s + arrival.at_s for t, arrival in zip(timings, arrivals, strict=True)]
        figures = (
            *(ttft.mean(), *np.percentile(ttft, (50, 99))),
            *(tpot.mean(), *np.percentile(tpot, (50, 99))),
            sum(timing.tokens for timing in timings) / max(ends),
        )
        return cls(*(float(figure) for figure in figures))

    def worst_error(self, other: Figures) -> float:
        """The largest relative difference of any figure."""
        mine, its = np.array(astuple(self)), np.array(astuple(other))
        return float(np.abs(mine / its - 1.0).max())


def compare(case: Case, instances: int) -> tuple[Figures, Figures]:
    """Step engines first, then the model. ``instances`` 0: one engine alone."""
    arrivals = case.arrivals()
    if not instances:
        return (
            Figures.of(step_alone(case.kind, arrivals)[0], arrivals),
            Figures.of(model_alone(case.kind, arrivals)[0], arrivals),
        )
    options = Options([(case.kind, instances)], seed=case.seed)
    return (
        Figures.of(step_fleet(options, arrivals), arrivals),
        Figures.of(model_fleet(options, arrivals), arrivals),
    )


def main() -> None:
    print("| load | engines | TTFT mean, p99 | TPOT mean, p99 | tokens/s | largest error |")
    print("|---|---|---|---|---|---|")
    for case, instances in [*((case, 0) for case in CASES), *((case, 4) for case in FLEET_CASES)]:
        steps, model = compare(case, instances)
        print(
            f"| {case.name} | {instances or 'one, no gate'}"
            f" | {model.ttft_mean * 1e3:.1f}, {model.ttft_p99 * 1e3:.1f} ms"
            f" | {model.tpot_mean * 1e3:.2f}, {model.tpot_p99 * 1e3:.2f} ms"
            f" | {model.tokens_per_s:.0f} | {model.worst_error(steps):.0e} |"
        )


if __name__ == "__main__":
    main()
