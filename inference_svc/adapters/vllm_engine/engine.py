"""The engine port over vLLM's ``AsyncLLM``, inside this process.

Owns the engine with its child processes, the tokenizer's thread and the constraint compiler.
Everything runs on the event loop except what blocks: starting and stopping (a thread of their own)
and text (``vllm_text``). Importing this module imports neither vLLM nor torch; ``start`` does.

Failure modes: when vLLM's engine process dies, every generation ends with ERROR and UNAVAILABLE,
``healthy`` is False for good, and a new engine has to take its place. An engine
that holds work and completes no step for ``stall_s_max`` is not healthy until it does. A start that
fails, is cancelled or takes too long leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inference_svc.adapters.vllm_engine import launch
from inference_svc.adapters.vllm_engine.constraint_checker import ConstraintChecker
from inference_svc.adapters.vllm_engine.processes import EngineProcesses
from inference_svc.adapters.vllm_engine.settings import GIB, EngineTask, VllmSettings, settings_of
from inference_svc.config import InstanceConfig
from inference_svc.domain import continuation as rules
from inference_svc.domain import sampling_rules
from inference_svc.ports import (
    Constraint,
    ConstraintKind,
    EngineStats,
    FinishReason,
    GenerateSpec,
    ModelDescription,
    OutputEnd,
    OutputSink,
    PreparedPrompt,
    Prompt,
    RunningRequest,
    Sampling,
    TokenPrompt,
)
from sluice import logs
from sluice.errors import failed_precondition, invalid, unavailable

if TYPE_CHECKING:
    from inference_svc.adapters.vllm_engine.generation import VllmGeneration, VllmPrepared
    from inference_svc.adapters.vllm_engine.stats import SchedulerStatistics
    from inference_svc.adapters.vllm_engine.text import TextWorker, TokenBytes

_log = logs.get(__name__)

# close() is at most 30 s: aborted outputs end, vLLM stops its processes, what is left is killed.
ABORT_S_MAX = 3.0
SHUTDOWN_S_MAX = 18.0
WARM_UP_S_MAX = 300.0
MAKING_WATCH_S = 0.5

_COMPILED = {
    ConstraintKind.JSON_SCHEMA: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf",
}


@dataclass(slots=True)
class _Running:
    """What exists between a start and a close."""

    llm: Any  # vllm AsyncLLM
    text: TextWorker
    token_bytes: TokenBytes
    statistics: SchedulerStatistics
    checker: ConstraintChecker | None
    description: ModelDescription
    defaults: dict[str, Any]
    """Sampling parameters that the model's generation configuration sets."""
    end_tokens: frozenset[int]
    """Tokens that end an output unless ``ignore_eos``."""


class VllmEngine:
    """Fulfils ``inference_svc.ports.Engine``; serves one model for one task."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._running: _Running | None = None
        self._closing = False
        self._generations: set[VllmGeneration] = set()
        self._busy_since_s = 0.0
        self._embeddings = 0
        self._started = False
        self._making: asyncio.Future[Any] | None = None
        self._processes = EngineProcesses()
        # Kept alive: a process that vLLM starts may be tied to the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")

    # --- life ---

    async def start(self) -> None:
        """See ``Engine``. Raises EngineConfigError, TimeoutError and whatever vLLM raises."""
        await self._processes.begin()
        try:
            async with asyncio.timeout(self._settings.start_s_max):
                await self._start()
            await self._processes.settle()
        except BaseException:
            await self.close()
            raise
        self._started = True

    async def close(self) -> None:
        """See ``Engine``."""
        self._closing = True
        running, self._running = self._running, None
        generations = list(self._generations)
        for generation in generations:
            generation.abort(FinishReason.CANCELLED)
        if generations:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_S_MAX):
                    await asyncio.gather(*(generation.ended() for generation in generations))
        if running is not None:
            running.text.close()
            if running.checker is not None:
                await running.checker.close()
            if (handler := running.llm.output_handler) is not None:
                handler.cancel()  # it would report the orderly end as a failure
            try:
                async with asyncio.timeout(SHUTDOWN_S_MAX):
                    await asyncio.get_running_loop().run_in_executor(
                        self._thread, launch.shut_down, running.llm
                    )
            except Exception as error:  # what is left is killed below
                _log.failure("vLLM did not shut down in order", error)
        elif self._making is not None and not self._making.done():
            await self._end_making(self._making)
        self._making = None
        del running, generations  # the last references to vLLM here
        await self._processes.end()
        self._thread.shutdown(wait=False)

    @property
    def healthy(self) -> bool:
        """See ``Engine``."""
        running = self._running
        return (
            running is not None
            and self._started
            and not self._closing
            and not running.llm.errored
            and not self._stalled(running)
        )

    def describe(self) -> ModelDescription:
        """See ``Engine``."""
        return self._ready().description

    def stats(self) -> EngineStats:
        """See ``Engine``."""
        running = self._running
        if running is None:
            return EngineStats()
        model = running.description
        return running.statistics.read(kv_tokens=model.kv_tokens, sequences_max=model.sequences_max)

    # --- work ---

    async def prepare(self, spec: GenerateSpec) -> PreparedPrompt:
        """See ``Engine``."""
        running = self._ready()
        if not running.description.generate:
            raise failed_precondition("NOT_A_GENERATOR", "This model embeds; it does not generate.")
        sampling_rules.check(spec.sampling)
        sampling_rules.check_token_ids(spec.sampling, running.text.vocabulary)
        if spec.sampling.constraint is not None and running.checker is not None:
            await _check_constraint(running.checker, spec.sampling.constraint)
        return await running.text.run(partial(self._prepare, running, spec))

    def submit(self, prepared: PreparedPrompt, sink: OutputSink) -> RunningRequest:
        """See ``Engine``."""
        from inference_svc.adapters.vllm_engine.generation import VllmGeneration, VllmPrepared

        assert isinstance(prepared, VllmPrepared), "prepared by another engine"
        running = self._ready()
        self._begin_work()
        generation = VllmGeneration(prepared, sink, running.token_bytes, self._generations.discard)
        self._generations.add(generation)
        generation.start(running.llm)
        return generation

    async def embed(
        self, request_id: str, prompts: Sequence[Prompt]
    ) -> tuple[list[list[float]], int]:
        """See ``Engine``."""
        running = self._ready()
        if not running.description.embed:
            raise failed_precondition("NOT_AN_EMBEDDER", "This model generates; it does not embed.")
        from inference_svc.adapters.vllm_engine.embed import embed

        self._begin_work()
        self._embeddings += 1
        try:
            return await embed(
                running.llm, running.text, running.description.context_tokens, request_id, prompts
            )
        finally:
            self._embeddings -= 1

    # --- inside ---

    def _begin_work(self) -> None:
        """Notes since when there is work without a break, for :meth:`_stalled`."""
        if not self._generations and not self._embeddings:
            self._busy_since_s = asyncio.get_running_loop().time()

    def _ready(self) -> _Running:
        running = self._running
        if running is None or self._closing:
            raise unavailable("ENGINE_DOWN", "The engine is not running.")
        if running.llm.errored:
            raise unavailable("ENGINE_FAILED", "The engine failed.")
        return running

    async def _end_making(self, making: asyncio.Future[Any]) -> None:
        """Ends a start that was given up: the thread inside vLLM comes back with an error once the
        processes that it has started, or is about to start, are gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S_MAX):
                while not making.done():
                    await self._processes.kill()
                    await asyncio.wait([making], timeout=MAKING_WATCH_S)
        if making.done() and not making.cancelled():
            making.exception()  # expected: nobody waits for it any more

    def _stalled(self, running: _Running) -> bool:
        if not self._generations and not self._embeddings:
            return False
        last_step_s = running.statistics.last_step_s or 0.0
        since_s = max(last_step_s, self._busy_since_s)
        return asyncio.get_running_loop().time() - since_s > self._settings.stall_s_max

    def _prepare(self, running: _Running, spec: GenerateSpec) -> VllmPrepared:
        """The blocking part of ``prepare``."""
        from inference_svc.adapters.vllm_engine import sampling as vllm_sampling
        from inference_svc.adapters.vllm_engine.continuation import ContinuedText
        from inference_svc.adapters.vllm_engine.generation import VllmPrepared
        from inference_svc.adapters.vllm_engine.text import over_length

        context = running.description.context_tokens
        prompt = running.text.tokenize(spec.prompt, context)
        room = context - len(prompt)
        if room < 1:
            raise over_length("input", len(prompt), context)
        sampling, begun = spec.sampling, spec.continuation
        least = sampling.min_tokens or 0
        if least > room:
            raise invalid("sampling.min_tokens", f"the context leaves {room} tokens")
        if sampling.total_tokens_max is not None:
            room = rules.within_total(sampling, sampling.total_tokens_max, len(prompt), room)
        if begun is not None:
            running.text.check_ids(begun.output_token_ids, "continuation.output_token_ids")
            rules.check(begun, sampling, fingerprint=running.description.fingerprint, room=room)
        limits = rules.rebase(sampling, len(begun.output_token_ids) if begun else 0, room)
        params = vllm_sampling.translate(
            sampling,
            running.defaults,
            max_tokens=max(limits.most, 1),
            min_tokens=limits.least,
            detokenize=begun is None,
        )
        vllm_sampling.verify(params, sampling, running.llm)
        if begun is None:
            return VllmPrepared(spec, tuple(prompt), limits.most, params)
        original = vllm_sampling.translate(
            sampling, running.defaults, max_tokens=max(room, least, 1), min_tokens=least
        )
        ids = begun.output_token_ids
        end = _end_token(running, sampling, ids)
        continued = ContinuedText(
            running.llm.output_processor.tokenizer,
            spec.request_id,
            prompt,
            original,
            begun,
            ended_by_token=end is not None,
        )
        if continued.stop_string is not None:
            end = OutputEnd(0, FinishReason.STOP, stop_string=continued.stop_string)
        elif end is None and limits.most == 0:
            end = OutputEnd(0, FinishReason.LENGTH)
        return VllmPrepared(spec, tuple(prompt), limits.most, params, continued, end)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        made: list[SchedulerStatistics] = []
        run: Callable[..., asyncio.Future[Any]] = partial(loop.run_in_executor, self._thread)
        await run(launch.import_vllm, self._settings)
        self._making = run(launch.make_llm, self._settings, loop.time, made.append)
        # Shielded, so that close() can wait for the thread's end when this start is given up.
        llm = await asyncio.shield(self._making)
        from inference_svc.adapters.vllm_engine.text import TextWorker, TokenBytes

        text = TextWorker(llm)
        generates = self._settings.task is EngineTask.GENERATE
        checker = None
        if generates and llm.vllm_config.structured_outputs_config.backend == "xgrammar":
            tokenizer = await text.run(partial(launch.serialized_tokenizer, llm))
            if tokenizer is not None:
                checker = ConstraintChecker(
                    tokenizer,
                    seconds_max=self._settings.constraint_s_max,
                    memory_bytes=int(self._settings.constraint_memory_gib * GIB),
                )
        description = await run(launch.describe, self._settings, llm, text.chat)
        config = llm.model_config
        running = _Running(
            llm=llm,
            text=text,
            token_bytes=TokenBytes(llm.renderer.tokenizer),
            statistics=made[0],
            checker=checker,
            description=description,
            defaults=config.get_diff_sampling_param() if generates else {},
            end_tokens=launch.end_tokens(llm) if generates else frozenset(),
        )
        self._running = running
        async with asyncio.timeout(WARM_UP_S_MAX):
            running.description = await self._warm_up(running)
        if checker is not None:
            await checker.start()

    async def _warm_up(self, running: _Running) -> ModelDescription:
        """One request through everything: a model that cannot answer must not look ready. For an
        embedding model it also tells how long its vectors are."""
        prompt = TokenPrompt((0,))
        if running.description.embed:
            vectors, _ = await self.embed("warm-up", [prompt])
            return replace(running.description, embedding_dimensions=len(vectors[0]))
        sink = launch.WarmUpSink(asyncio.Event())
        spec = GenerateSpec("warm-up", prompt, Sampling(temperature=0.0, max_tokens=1, logprobs=1))
        self.submit(await self.prepare(spec), sink)
        await sink.over.wait()
        if sink.error is not None:
            raise sink.error
        return running.description


def make(config: InstanceConfig) -> VllmEngine:
    """The engine of an ``[[instance]]``. Cheap: nothing is imported or started. Raises
    EngineConfigError for a setting that is wrong in itself; ``start`` knows vLLM's own."""
    return VllmEngine(settings_of(config))


def _end_token(running: _Running, sampling: Sampling, ids: Sequence[int]) -> OutputEnd | None:
    """How an output that was begun elsewhere had ended by its last token; None if it had not."""
    if not ids or len(ids) < max(sampling.min_tokens or 0, 1):
        return None
    last = ids[-1]
    if last in sampling.stop_token_ids:
        return OutputEnd(0, FinishReason.STOP, stop_token_id=last)
    if not sampling.ignore_eos and last in running.end_tokens:
        return OutputEnd(0, FinishReason.STOP)
    return None


async def _check_constraint(checker: ConstraintChecker, constraint: Constraint) -> None:
    """Refuses a constraint that does not compile within its limits. Choices and "any JSON object"
    are bounded by their sizes already."""
    kind = _COMPILED.get(constraint.kind)
    if kind is None:
        return
    from inference_svc.adapters.vllm_engine.sampling import constraint_error, is_lark

    if kind == "ebnf" and is_lark(constraint.text):
        kind = "lark"
    if not await checker.compiles(kind, constraint.text):
        raise constraint_error(constraint)
