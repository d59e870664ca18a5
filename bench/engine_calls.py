"""One vLLM engine in this process, asked questions side by side: for benches of what it writes.

Without the mesh: what a model answers does not depend on the way to it, and a bench of accuracy
needs no more than the engine. One event loop; ``running`` starts and closes the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from inference_svc.adapters.vllm_engine.engine import VllmEngine
from inference_svc.adapters.vllm_engine.settings import EngineTask, VllmSettings
from inference_svc.ports import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    GenerateSpec,
    GenerationEnd,
    Sampling,
    TokenLogprob,
)

STREAMS_MAX = 16  # questions in the engine at once
_ids = itertools.count(1)


class _Sink:
    """Collects the text of one output."""

    def __init__(self) -> None:
        self.text = ""
        self.end: GenerationEnd | None = None
        self.over = asyncio.Event()

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        self.text += text

    def ended(self, end: GenerationEnd) -> None:
        self.end = end
        self.over.set()


class EngineCalls:
    """Asks the engine. Greedy."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._room = asyncio.Semaphore(STREAMS_MAX)

    async def __call__(
        self,
        messages: Sequence[dict[str, object]],
        *,
        json_schema: str = "",
        tools: Sequence[dict[str, object]] = (),
        max_tokens: int,
        keep_special_tokens: bool = False,
    ) -> tuple[str, str]:
        """The text and how it ended: "stop" or "length". Raises SluiceError."""
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, json_schema) if json_schema else None
        spec = GenerateSpec(
            request_id=f"bench-{next(_ids)}",
            prompt=ChatPrompt(tuple(messages), tuple(tools)),
            sampling=Sampling(
                temperature=0.0,
                max_tokens=max_tokens,
                keep_special_tokens=keep_special_tokens,
                constraint=constraint,
            ),
        )
        async with self._room:
            sink = _Sink()
            self._engine.submit(await self._engine.prepare(spec), sink)
            await sink.over.wait()
        assert sink.end is not None
        if sink.end.error is not None:
            raise sink.end.error
        return sink.text, sink.end.outputs[0].reason.value


@asynccontextmanager
async def running(model: Path) -> AsyncIterator[EngineCalls]:
    """A started engine over a model's folder, an absolute path; float32, as the default mesh runs
    it on processors."""
    engine = VllmEngine(
        VllmSettings(
            path=str(model),
            model=model.name,
            task=EngineTask.GENERATE,
            dtype="float32",
            enforce_eager=True,
            kv_cache_gib=1.0,
        )
    )
    await engine.start()
    try:
        yield EngineCalls(engine)
    finally:
        async with asyncio.timeout(35):
            await engine.close()
