"""One generation on vLLM: from a prepared prompt to the calls of its sink.

Owns one task per request, which iterates ``AsyncLLM.generate`` and calls the sink once per engine
step. An abort cancels the task, on which vLLM frees the sequence at once; the end is reported from
the task's done callback, so that it comes exactly once on every path, a task that never ran
included.

Failure modes: a dead engine ends the output with ERROR and UNAVAILABLE, reason ENGINE_FAILED; what
vLLM refuses after all is INVALID_ARGUMENT; anything else is INTERNAL with its text in the log only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.adapters.vllm_engine.continuation import ContinuedText
from inference_svc.adapters.vllm_engine.sampling import constraint_error
from inference_svc.adapters.vllm_engine.text import TokenBytes
from inference_svc.ports import (
    FinishReason,
    GenerationEnd,
    OutputEnd,
    OutputSink,
    PreparedPrompt,
    TokenLogprob,
    TopLogprob,
)
from sluice import logs
from sluice.errors import SluiceError, internal, invalid, unavailable

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class VllmPrepared(PreparedPrompt):
    """A prepared prompt with what vLLM is given.

    ``complete``: nothing is left to generate, and this is how the output ended."""

    params: SamplingParams
    continued: ContinuedText | None = None
    complete: OutputEnd | None = None


def engine_failed() -> SluiceError:
    """The error of everything that runs on an engine that died."""
    return unavailable("ENGINE_FAILED", "The engine failed.")


class VllmGeneration:
    """A submitted request; fulfils ``RunningRequest``."""

    __slots__ = (
        "_abort_reason",
        "_cached",
        "_ends",
        "_error",
        "_generated",
        "_on_end",
        "_over",
        "_positions",
        "_prepared",
        "_sink",
        "_task",
        "_token_bytes",
        "request_id",
    )

    def __init__(
        self,
        prepared: VllmPrepared,
        sink: OutputSink,
        token_bytes: TokenBytes,
        on_end: Callable[[VllmGeneration], None],
    ) -> None:
        self.request_id = prepared.spec.request_id
        self._prepared = prepared
        self._sink = sink
        self._token_bytes = token_bytes
        self._on_end = on_end
        continuation = prepared.spec.continuation
        before = len(continuation.output_token_ids) if continuation is not None else 0
        self._positions = [before] * prepared.spec.sampling.n
        self._ends: dict[int, OutputEnd] = {}
        self._generated = 0
        self._cached = 0
        self._abort_reason: FinishReason | None = None
        self._error: SluiceError | None = None
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def start(self, llm: Any) -> None:  # vllm AsyncLLM
        """Begins; called once, on the event loop."""
        self._task = asyncio.get_running_loop().create_task(
            self._run(llm), name=f"generation {self.request_id}"
        )
        self._task.add_done_callback(self._finish)

    def abort(self, reason: FinishReason) -> None:
        """See ``RunningRequest``. The first reason counts."""
        if self._over or self._abort_reason is not None or self._task is None:
            return
        self._abort_reason = reason
        self._task.cancel()

    @property
    def output_tokens(self) -> int:
        """See ``RunningRequest``."""
        return self._generated

    async def ended(self) -> None:
        """Returns when the sink was told of the end."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, llm: Any) -> None:
        prepared = self._prepared
        if prepared.complete is not None:
            self._ends[0] = prepared.complete
            if prepared.continued is not None and (rest := prepared.continued.rest()):
                self._sink.delta(0, rest, (), self._positions[0])
            self._over = True
            return
        spec = prepared.spec
        prompt = list(prepared.prompt_token_ids)
        if spec.continuation is not None:
            prompt.extend(spec.continuation.output_token_ids)
        stream = llm.generate(
            tokens_input(prompt, cache_salt=spec.cache_salt or None),
            prepared.params,
            spec.request_id,
        )
        take = self._take if prepared.continued is None else self._take_continued
        try:
            async with aclosing(stream):
                async for output in stream:
                    self._cached = output.num_cached_tokens or 0
                    for completion in output.outputs:
                        take(completion)
                    if self._over:
                        break  # closing the stream aborts it in the engine
        except EngineDeadError:
            self._error = engine_failed()
        except VLLMClientError:
            self._error = invalid("work", "the engine does not accept this work")
        except Exception as error:  # reported with fixed words; the text goes to the log
            _log.failure("a generation failed", error, request_id=self.request_id)
            self._error = internal(self.request_id)
        finally:
            # From here on the outcome stands: a late abort changes nothing.
            self._over = self._over or self._abort_reason is None

    def _take(self, completion: Any) -> None:  # vllm CompletionOutput
        """One output's share of an engine step."""
        index = completion.index
        token_ids = completion.token_ids
        text = completion.text
        if token_ids or text:
            count = len(token_ids)
            position = self._positions[index]
            self._positions[index] = position + count
            self._generated += count
            if completion.logprobs:
                logprobs = self._logprobs(token_ids, completion.logprobs)
                self._sink.delta(index, text, token_ids, position, logprobs)
            else:
                self._sink.delta(index, text, token_ids, position)
        if completion.finish_reason is not None:
            self._end(index, completion.finish_reason, completion.stop_reason, token_ids)

    def _take_continued(self, completion: Any) -> None:
        """As above for an output with a seam: the text is made here."""
        continued = self._prepared.continued
        assert continued is not None
        finish = completion.finish_reason
        taken = continued.take(
            completion.token_ids, finished=finish is not None, ended_by_token=finish == "stop"
        )
        token_ids = completion.token_ids[: taken.kept]
        if token_ids or taken.text:
            position = self._positions[0]
            self._positions[0] = position + len(token_ids)
            self._generated += len(token_ids)
            self._sink.delta(0, taken.text, token_ids, position)
        if taken.stop_string is not None:
            self._end(0, "stop", taken.stop_string, token_ids)
            self._over = True
        elif finish is not None:
            self._end(0, finish, completion.stop_reason, token_ids)

    def _end(
        self, index: int, finish: str, stop: int | str | None, token_ids: Sequence[int]
    ) -> None:
        """Notes how an output ended. ``finish`` and ``stop`` are vLLM's words."""
        sampling = self._prepared.spec.sampling
        if finish == "stop":
            stop_token_id = stop if isinstance(stop, int) else None
            if stop is None and token_ids and token_ids[-1] in sampling.stop_token_ids:
                stop_token_id = token_ids[-1]  # both the model's own end and one asked for
            stop_string = stop if isinstance(stop, str) else None
            self._ends[index] = OutputEnd(index, FinishReason.STOP, stop_string, stop_token_id)
        elif finish in ("length", "repetition"):
            self._ends[index] = OutputEnd(index, FinishReason.LENGTH)
        else:  # "error", or an abort that was not ours
            self._ends[index] = OutputEnd(index, FinishReason.ERROR)
            if sampling.constraint is not None and not self._generated:
                self._error = constraint_error(sampling.constraint)  # its own compiler refused it
            else:
                self._error = self._error or engine_failed()

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Any]]
    ) -> list[TokenLogprob]:
        """vLLM's candidates by position: the sampled one first, then the best by rank."""
        wanted = self._prepared.spec.sampling.logprobs or 0
        of = self._token_bytes.of
        result = []
        for token_id, candidates in zip(token_ids, positions, strict=True):
            best = sorted(candidates.items(), key=lambda item: -item[1].logprob)[:wanted]
            top = tuple(TopLogprob(one, float(lp.logprob), of(one)) for one, lp in best)
            sampled = float(candidates[token_id].logprob)
            result.append(TokenLogprob(token_id, sampled, of(token_id), top))
        return result

    def _finish(self, task: asyncio.Task[None]) -> None:
        if self._error is not None:
            missing = FinishReason.ERROR
        elif self._abort_reason is not None:
            missing = self._abort_reason
        else:
            missing = FinishReason.CANCELLED  # the loop itself is ending
        if not task.cancelled() and (failure := task.exception()) is not None:
            # Only a sink that raises gets here, against the port.
            _log.failure("a sink raised", failure, request_id=self.request_id)
            self._error, missing = internal(self.request_id), FinishReason.ERROR
        self._over = True
        outputs = tuple(
            self._ends.get(index) or OutputEnd(index, missing)
            for index in range(len(self._positions))
        )
        errored = any(output.reason is FinishReason.ERROR for output in outputs)
        self._on_end(self)
        self._sink.ended(
            GenerationEnd(
                outputs=outputs,
                prompt_tokens=len(self._prepared.prompt_token_ids),
                cached_tokens=min(self._cached, len(self._prepared.prompt_token_ids)),
                completion_tokens=self._generated,
                error=self._error if errored else None,
            )
        )
