"""What the engine contract needs to drive an engine, and how one generation is collected.

A test module of an engine builds one :class:`EngineHarness` and hands it to the contract classes
of ``engine_contract`` by a fixture named ``harness``:

    @pytest.mark.asyncio(loop_scope="module")
    class TestThisEngine(GenerationContract):
        @pytest_asyncio.fixture(scope="module", loop_scope="module")
        async def harness(self) -> AsyncIterator[EngineHarness]:
            engine = ThisEngine(...)
            await engine.start()
            yield EngineHarness(engine=engine, ...)
            await engine.close()

One engine serves all cases of a class, so that each case also shows that the engine survived the
ones before it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inference_svc.ports import (
    Continuation,
    Engine,
    FinishReason,
    GenerateSpec,
    GenerationEnd,
    OutputEnd,
    PreparedPrompt,
    Prompt,
    RunningRequest,
    Sampling,
    TextPrompt,
    TokenLogprob,
)

_ids = itertools.count(1)


def every_cut(total: int) -> Sequence[int]:
    """All places where an output of ``total`` tokens can be cut, both ends included."""
    return range(total + 1)


@dataclass(frozen=True, slots=True)
class EngineHarness:
    """An engine and the engine-specific hooks of its contract.

    ``encode`` and ``decode`` are the model's tokenizer: text to ids without special tokens or
    template, and ids to text with special tokens left out and an incomplete last character
    dropped. ``received(request_id)`` tells what the engine itself was given: by name of the
    ``Sampling`` field, the value in force. ``defaults`` is what it shows for an unset field (a
    field that is absent from both counts as ``None``). ``exact`` says that the same tokens always
    give the same next token, also in another batch or after a continuation; where it is False
    outputs are checked for gaps and repetitions but not compared token by token. ``cuts`` chooses
    where an output of so many tokens is cut in continuation cases (a slow engine takes a few).
    """

    engine: Engine
    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]
    vocabulary_size: int
    received: Callable[[str], Mapping[str, object]]
    defaults: Mapping[str, object] = field(default_factory=dict)
    exact: bool = True
    cuts: Callable[[int], Sequence[int]] = every_cut
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class DeltaSeen:
    """One call of the sink."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    position: int
    logprobs: tuple[TokenLogprob, ...]


class Recorder:
    """A sink that keeps what it was given and notes what the port forbids."""

    def __init__(self) -> None:
        self.deltas: list[DeltaSeen] = []
        self.end: GenerationEnd | None = None
        self.faults: list[str] = []
        self.over = asyncio.Event()
        self.begun = asyncio.Event()
        self._positions: dict[int, int] = {}

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        if self.end is not None:
            self.faults.append("a delta after the end")
        if not text and not token_ids:
            self.faults.append("an empty delta")
        if position != self._positions.get(index, position):
            self.faults.append(f"output {index}: position {position} leaves a gap or an overlap")
        if logprobs and len(logprobs) != len(token_ids):
            self.faults.append("log probabilities and tokens differ in number")
        self._positions[index] = position + len(token_ids)
        ids = tuple(token_ids)
        self.deltas.append(DeltaSeen(index, text, ids, position, tuple(logprobs)))
        self.begun.set()

    def ended(self, end: GenerationEnd) -> None:
        if self.end is not None:
            self.faults.append("ended twice")
        self.end = end
        self.over.set()

    def text(self, index: int = 0) -> str:
        """All text of one output."""
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        """All token ids of one output."""
        return tuple(
            token for delta in self.deltas if delta.index == index for token in delta.token_ids
        )

    def logprobs(self, index: int = 0) -> tuple[TokenLogprob, ...]:
        """The log probabilities of one output, by position."""
        return tuple(
            entry for delta in self.deltas if delta.index == index for entry in delta.logprobs
        )

    def output_end(self, index: int = 0) -> OutputEnd:
        """How one output ended."""
        assert self.end is not None
        return self.end.outputs[index]

    def reason(self, index: int = 0) -> FinishReason:
        """Why one output ended."""
        return self.output_end(index).reason


@dataclass(frozen=True, slots=True)
class Started:
    """A generation that was prepared and submitted."""

    spec: GenerateSpec
    prepared: PreparedPrompt
    running: RunningRequest
    sink: Recorder


def new_id() -> str:
    """A request id of its own for each generation."""
    return f"contract-{next(_ids)}"


def a_spec(
    prompt: Prompt | str,
    sampling: Sampling | None = None,
    continuation: Continuation | None = None,
    cache_salt: str = "",
) -> GenerateSpec:
    """A spec with a fresh request id."""
    return GenerateSpec(
        request_id=new_id(),
        prompt=TextPrompt(prompt) if isinstance(prompt, str) else prompt,
        sampling=sampling if sampling is not None else Sampling(),
        continuation=continuation,
        cache_salt=cache_salt,
    )


async def begin(
    harness: EngineHarness,
    prompt: Prompt | str,
    sampling: Sampling | None = None,
    continuation: Continuation | None = None,
    cache_salt: str = "",
) -> Started:
    """Prepares and submits a generation and does not wait."""
    spec = a_spec(prompt, sampling, continuation, cache_salt)
    prepared = await harness.engine.prepare(spec)
    sink = Recorder()
    return Started(spec, prepared, harness.engine.submit(prepared, sink), sink)


async def finish(harness: EngineHarness, started: Started) -> Started:
    """Waits for the end of a generation and checks that the sink was treated well."""
    async with asyncio.timeout(harness.timeout_s):
        await started.sink.over.wait()
    assert started.sink.faults == []
    return started


async def generate(
    harness: EngineHarness,
    prompt: Prompt | str,
    sampling: Sampling | None = None,
    continuation: Continuation | None = None,
    cache_salt: str = "",
) -> Started:
    """Runs a generation to its end."""
    started = await begin(harness, prompt, sampling, continuation, cache_salt)
    return await finish(harness, started)


async def until(harness: EngineHarness, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds that no event announces."""
    async with asyncio.timeout(harness.timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
