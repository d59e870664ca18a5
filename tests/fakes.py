"""Fakes that several test modules share.

:class:`FakeEngine` is the smallest engine that obeys the port: tokens count up from 0, the text of
token *n* is ``"n "``, and one step emits one token of every running request. Tests reach into it:
they hold rendering back, stop the steps, count aborts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inference_svc.ports import (
    EngineStats,
    FinishReason,
    GenerateSpec,
    GenerationEnd,
    ModelDescription,
    OutputEnd,
    OutputSink,
    PreparedPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from sluice.errors import failed_precondition, invalid
from sluice.telemetry import Span, SpanKindName, Telemetry, Value

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class FakeRunning:
    """A submitted request."""

    engine: FakeEngine
    prepared: PreparedPrompt
    sink: OutputSink
    left: int
    position: int
    output_tokens: int = 0
    reason: FinishReason | None = None

    def abort(self, reason: FinishReason) -> None:
        if self.reason is None and self in self.engine.running:
            self.reason = reason
            self.engine.aborted.append((self.prepared.spec.request_id, reason))
            self.engine.running.remove(self)
            asyncio.get_running_loop().call_soon(self.end)

    def end(self) -> None:
        reason = self.reason or FinishReason.LENGTH
        self.sink.ended(
            GenerationEnd(
                outputs=tuple(
                    OutputEnd(index, reason) for index in range(self.prepared.spec.sampling.n)
                ),
                prompt_tokens=len(self.prepared.prompt_token_ids),
                cached_tokens=0,
                completion_tokens=self.output_tokens,
                error=self.engine.failure if reason is FinishReason.ERROR else None,
            )
        )


@dataclass
class FakeEngine:
    """See the module. ``render`` is awaited by every :meth:`prepare` when it is set."""

    step_s: float = 0.005
    sequences_max: int = 8
    kv_tokens: int = 8192
    context_tokens: int = 1024
    fingerprint: str = "fake-1"
    embeds: bool = True
    generates: bool = True
    start_error: Exception | None = None
    render: asyncio.Event | None = None
    paused: bool = False
    failure: Exception | None = None
    healthy: bool = False
    running: list[FakeRunning] = field(default_factory=list)
    submitted: list[GenerateSpec] = field(default_factory=list)
    rendering: int = 0
    aborted: list[tuple[str, FinishReason]] = field(default_factory=list)
    closed: int = 0
    _steps: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.healthy = True
        self._steps = asyncio.create_task(self._run())

    async def close(self) -> None:
        self.closed += 1
        self.healthy = False
        if self._steps is not None:
            self._steps.cancel()
        self.crash()

    def crash(self, error: Exception | None = None) -> None:
        """The engine dies with all that runs on it."""
        self.healthy = False
        self.failure = error
        running, self.running = self.running, []
        for request in running:
            request.reason = FinishReason.ERROR
            request.end()

    def describe(self) -> ModelDescription:
        return ModelDescription(
            model="fake",
            fingerprint=self.fingerprint,
            engine="fake 1",
            simulated=True,
            generate=self.generates,
            embed=self.embeds,
            chat=True,
            structured_output=False,
            continuation=True,
            context_tokens=self.context_tokens,
            kv_tokens=self.kv_tokens,
            kv_block_tokens=16,
            sequences_max=self.sequences_max,
            step_tokens_max=2048,
            dtype="float32",
            quantization="",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            embedding_dimensions=4,
        )

    async def prepare(self, spec: GenerateSpec) -> PreparedPrompt:
        self.rendering += 1
        try:
            if self.render is not None:
                await self.render.wait()
        finally:
            self.rendering -= 1
        ids = _ids(spec.prompt)
        if len(ids) >= self.context_tokens:
            raise invalid("input", f"has {len(ids)} tokens, the limit is {self.context_tokens}")
        if spec.continuation and spec.continuation.model_fingerprint != self.fingerprint:
            raise failed_precondition("FINGERPRINT_MISMATCH", "Another model began it.")
        most = spec.sampling.max_tokens or DEFAULT_MAX_TOKENS
        return PreparedPrompt(spec, ids, most)

    def submit(self, prepared: PreparedPrompt, sink: OutputSink) -> FakeRunning:
        begun = prepared.spec.continuation
        position = len(begun.output_token_ids) if begun else 0
        request = FakeRunning(self, prepared, sink, prepared.max_output_tokens, position)
        self.submitted.append(prepared.spec)
        self.running.append(request)
        return request

    async def embed(
        self, request_id: str, prompts: Sequence[Prompt]
    ) -> tuple[list[list[float]], int]:
        counts = [len(_ids(prompt)) for prompt in prompts]
        return [[float(count), 0.0, 0.0, 1.0] for count in counts], sum(counts)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), sequences_max=self.sequences_max)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not self.paused:
                self.step()

    def step(self) -> None:
        """One token of every request."""
        for request in list(self.running):
            token = request.position
            request.position += 1
            request.output_tokens += 1
            request.left -= 1
            request.sink.delta(0, f"{token} ", (token,), token)
            if request.left == 0:
                self.running.remove(request)
                request.end()


def _ids(prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    if isinstance(prompt, TextPrompt):
        return tuple(prompt.text.encode())
    return tuple(b"".join(str(message.get("content")).encode() for message in prompt.messages))


class FakeSpan(Span):
    """A span that remembers."""

    __slots__ = ("attributes", "ends", "error", "name", "parent")

    def __init__(
        self, name: str, parent: str, traceparent: str, attributes: Mapping[str, Value]
    ) -> None:
        super().__init__(traceparent)
        self.name = name
        self.parent = parent
        self.attributes = dict(attributes)
        self.ends = 0
        self.error: str | None = None

    def set(self, key: str, value: Value) -> None:
        self.attributes[key] = value

    def end(self, error: str | None = None, *, end_unix_ns: int | None = None) -> None:
        self.ends += 1
        self.error = error


class FakeTelemetry(Telemetry):
    """Makes child spans whose ids count up from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[FakeSpan] = []

    def span(
        self,
        name: str,
        traceparent: str = "",
        attributes: Mapping[str, Value] | None = None,
        kind: SpanKindName = "internal",
        *,
        start_unix_ns: int | None = None,
    ) -> FakeSpan:
        version, trace, _, flags = (traceparent or f"00-{'0' * 32}-{'0' * 16}-00").split("-")
        own = f"{version}-{trace}-{len(self.spans) + 1:016x}-{flags}"
        span = FakeSpan(name, traceparent, own, attributes or {})
        self.spans.append(span)
        return span


class FixedRights:
    """Port Rights of the agent service: the same list for every tenant, which a test may change."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.names = names

    def tools(self, tenant: str) -> Collection[str] | None:
        """The list."""
        return self.names
