"""Helpers for tests of the simulated engine in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.faults import Fault
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import Prompt, RunningRequest, Sampling, TextPrompt
from tests.contract.engine_harness import Recorder, a_spec

GREEDY = Sampling(temperature=0.0, max_tokens=8)
# A step of 10 ms for any number of sequences, and 1,000 prompt tokens in a second.
PROFILE = SimulatedProfile(
    decode_step_ms=10.0,
    decode_step_ms_per_sequence=0.0,
    prefill_tokens_per_s=1_000_000.0,
    sequences_max=4,
    context_tokens=512,
    kv_tokens=1024,
    kv_block_tokens=16,
    step_tokens_max=512,
)


class TimedRecorder(Recorder):
    """A recorder that notes when each delta came, in seconds of the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def delta(self, *args: object, **kwargs: object) -> None:
        self.times.append(asyncio.get_running_loop().time())
        super().delta(*args, **kwargs)  # type: ignore[arg-type]


@dataclass
class Run:
    """A request under way."""

    running: RunningRequest
    sink: TimedRecorder = field(default_factory=TimedRecorder)

    async def over(self) -> TimedRecorder:
        async with asyncio.timeout(3600.0):
            await self.sink.over.wait()
        assert self.sink.faults == []
        return self.sink


async def engine(profile: SimulatedProfile = PROFILE, *rules: Fault) -> SimulatedEngine:
    """A started engine."""
    made = SimulatedEngine(profile, rules)
    await made.start()
    return made


async def begin(
    engine: SimulatedEngine,
    prompt: Prompt | str = "hello",
    sampling: Sampling = GREEDY,
    **kwargs: object,
) -> Run:
    """Starts a request."""
    spec = a_spec(TextPrompt(prompt) if isinstance(prompt, str) else prompt, sampling, **kwargs)  # type: ignore[arg-type]
    sink = TimedRecorder()
    return Run(engine.submit(await engine.prepare(spec), sink), sink)


async def reply(
    engine: SimulatedEngine,
    prompt: Prompt | str = "hello",
    sampling: Sampling = GREEDY,
    **kwargs: object,
) -> TimedRecorder:
    """Runs a request to its end."""
    return await (await begin(engine, prompt, sampling, **kwargs)).over()
