"""The simulated engine: the engine port without a model, for load, fault and scale tests.

Owns nothing but a step loop (``batch``) and the rules of scripted faults
(``faults``); used from one event loop, on whose time it runs. Its output is a pure
function of prompt and sampling (``model``), its speed a latency model
(``profile``). It says that it is simulated in :meth:`SimulatedEngine.describe`; the
service repeats that in every response. Failure modes are those that are scripted: a crash makes it
unhealthy until it is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Protocol

from inference_svc.adapters.simulated.batch import Batch
from inference_svc.adapters.simulated.embedding import embed
from inference_svc.adapters.simulated.faults import Fault, FaultBook, directive
from inference_svc.adapters.simulated.model import (
    EOS_TEXT,
    STATES,
    TOKEN_BYTES,
    VOCABULARY_SIZE,
    block_keys,
    decode,
    encode,
    fold,
    row_after,
)
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.adapters.simulated.prompt import (
    SimulatedPrompt,
    first_state,
    prompt_text,
    received,
    scripted_reply,
    spelled,
    tokenise,
    turn_of,
)
from inference_svc.adapters.simulated.sequence import Generation, SequenceState
from inference_svc.adapters.simulated.structured import make_form
from inference_svc.adapters.simulated.writer import Script, Writer
from inference_svc.domain import continuation as continuations
from inference_svc.domain import sampling_rules
from inference_svc.ports import (
    Continuation,
    EngineStats,
    FinishReason,
    GenerateSpec,
    ModelDescription,
    OutputSink,
    PreparedPrompt,
    Prompt,
    RunningRequest,
    Sampling,
)
from sluice.errors import failed_precondition, invalid, unavailable

ENGINE_NAME = "simulated 1"
# What a fingerprint stands for here; a change of vocabulary, template or next-token function is a
# new number.
MODEL_VERSION = "1"
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class SimulatedCounters:
    """Requests since the engine was started last; they add up: ``submitted`` = ``running`` +
    ``finished`` + ``aborted`` + ``failed``."""

    submitted: int
    running: int
    finished: int
    aborted: int
    failed: int


class SimulatedEngine:
    """``inference_svc.ports.Engine``, simulated. ``faults`` may be scripted at any time."""

    def __init__(self, profile: SimulatedProfile, rules: Sequence[Fault] = ()) -> None:
        self.profile = profile
        self.faults = FaultBook(profile.faults_file, rules)
        self.last_spec: GenerateSpec | None = None  # the latest that was submitted
        identity = f"{ENGINE_NAME}\x00{MODEL_VERSION}\x00{profile.model}\x00{profile.weights}"
        self._fingerprint = blake2b(identity.encode(), digest_size=16).hexdigest()
        self._batch: Batch | None = None
        self._embedding = 0  # calls under way

    # --- its life ---

    async def start(self) -> None:
        """Takes ``start_s`` seconds; also after a crash or a close, then with empty counters."""
        if self._batch is not None:
            return
        await asyncio.sleep(self.profile.start_s)
        self._batch = Batch(self.profile, asyncio.get_running_loop(), self._crashed)

    async def close(self) -> None:
        """Aborts what runs. Idempotent."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.stop(FinishReason.CANCELLED)

    def _crashed(self) -> None:
        self._batch = None

    def _alive(self) -> Batch:
        if self._batch is None:
            raise unavailable("ENGINE_DOWN", "The engine is not running.")
        return self._batch

    @property
    def healthy(self) -> bool:
        """Whether it is started, not closed and not crashed."""
        return self._batch is not None

    def describe(self) -> ModelDescription:
        """What it serves; labelled as simulated."""
        profile = self.profile
        return ModelDescription(
            model=profile.model,
            fingerprint=self._fingerprint,
            engine=ENGINE_NAME,
            simulated=True,
            generate=profile.generate,
            embed=profile.embedding_dimensions > 0,
            chat=profile.generate and profile.chat,
            structured_output=profile.generate,
            continuation=profile.generate,
            context_tokens=profile.context_tokens,
            kv_tokens=profile.whole_kv_tokens if profile.generate else 0,
            kv_block_tokens=profile.kv_block_tokens,
            sequences_max=profile.sequences_max,
            step_tokens_max=profile.step_tokens_max,
            dtype=DTYPE,
            quantization="",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            embedding_dimensions=profile.embedding_dimensions,
        )

    # --- generation ---

    async def prepare(self, spec: GenerateSpec) -> SimulatedPrompt:
        """See the port. A prompt's directive and the first rule that matches are found here."""
        self._alive()
        if not self.profile.generate:
            raise failed_precondition("NO_GENERATION", "This model does not generate.")
        now = asyncio.get_running_loop().time()
        text = cache(lambda: prompt_text(spec.prompt))
        fault = self.faults.find(spec.request_id, self.profile.model, now, text)
        if fault is not None and fault.refuse:
            raise fault.error()
        sampling = spec.sampling
        sampling_rules.check(sampling)
        sampling_rules.check_token_ids(sampling, VOCABULARY_SIZE)
        if sampling.n > self.profile.sequences_max:
            raise invalid("sampling.n", f"must be at most {self.profile.sequences_max} here")
        limit = self.profile.context_tokens
        ids = await tokenise(spec.prompt, "input", limit - 1, limit, chat=self.profile.chat)
        if self.profile.prompt_directives:
            fault = self._directive(ids) or fault
            if fault is not None and fault.refuse:
                raise fault.error()
        if fault is not None:
            turn = turn_of(spec.prompt, fault.marker)
            fault = fault.at_turn(turn, constrained=sampling.constraint is not None)
        room = limit - len(ids)
        if sampling.total_tokens_max is not None:
            room = continuations.within_total(sampling, sampling.total_tokens_max, len(ids), room)
        done = 0
        if spec.continuation is not None:
            self._check_continuation(spec.continuation, sampling, room)
            done = len(spec.continuation.output_token_ids)
        state = fold(first_state(self._fingerprint, sampling, 0), ids)
        return SimulatedPrompt(
            spec=spec,
            prompt_token_ids=ids,
            max_output_tokens=continuations.rebase(sampling, done, room).most,
            state=state,
            keys=self._keys(spec.cache_salt, ids),
            script=_script(sampling, fault, ids, state),
            fault=fault,
        )

    def _keys(self, salt: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not self.profile.prefix_cache:
            return ()
        return tuple(block_keys(salt, ids, self.profile.kv_block_tokens))

    def _directive(self, ids: tuple[int, ...]) -> Fault | None:
        try:
            return directive(decode(ids))
        except (ValueError, TypeError):
            raise invalid("input", "holds a directive that is not a fault") from None

    def _check_continuation(
        self, continuation: Continuation, sampling: Sampling, room: int
    ) -> None:
        continuations.check(continuation, sampling, fingerprint=self._fingerprint, room=room)
        ids = continuation.output_token_ids
        if ids and (min(ids) < 0 or max(ids) >= VOCABULARY_SIZE):
            raise invalid("continuation.output_token_ids", f"ids must be below {VOCABULARY_SIZE}")
        text = spelled(ids, keep_special=sampling.keep_special_tokens, eos_text=EOS_TEXT)
        continuations.check_delivered(continuation, text)

    def submit(self, prepared: PreparedPrompt, sink: OutputSink) -> RunningRequest:
        """See the port; takes only what :meth:`prepare` returned. UNAVAILABLE when it is down."""
        batch = self._alive()
        assert isinstance(prepared, SimulatedPrompt), "prepared by another engine"
        spec = prepared.spec
        self.last_spec = spec
        sampling = spec.sampling
        prompt = prepared.prompt_token_ids
        generation = Generation(batch, sink, len(prompt), sampling.n)
        if spec.continuation is not None and spec.continuation.output_token_ids:
            return self._submit_continued(batch, generation, prepared, spec.continuation)
        for index in range(sampling.n):
            state = prepared.state
            if index and sampling.temperature != 0.0:
                state = fold(first_state(self._fingerprint, sampling, index), prompt)
            sequence = SequenceState(
                generation,
                index,
                state=state,
                limit=prepared.max_output_tokens,
                eos_below=self._eos_below(sampling),
                keys=prepared.keys,
                writer=self._writer(prepared),
            )
            generation.sequences.append(sequence)
        batch.submit(generation)
        return generation

    def _submit_continued(
        self,
        batch: Batch,
        generation: Generation,
        prepared: SimulatedPrompt,
        continuation: Continuation,
    ) -> Generation:
        ids = continuation.output_token_ids
        limit = len(ids) + prepared.max_output_tokens
        writer = Writer(prepared.spec.sampling, script=prepared.script, fault=prepared.fault)
        end = writer.resume(0, ids, continuation.delivered_text_bytes, limit)
        sequence = SequenceState(
            generation,
            0,
            state=fold(prepared.state, ids),
            limit=limit,
            base=len(ids),
            row=row_after(TOKEN_BYTES[token] for token in ids),
            eos_below=self._eos_below(prepared.spec.sampling),
            keys=prepared.keys,
            writer=writer,
        )
        generation.sequences.append(sequence)
        if end is None:
            batch.submit(generation)
        else:
            batch.submit_complete(generation, writer.backlog, end)
        return generation

    def _eos_below(self, sampling: Sampling) -> int:
        mean = self.profile.output_tokens_mean
        return int(STATES / mean) if mean else 0

    def _writer(self, prepared: SimulatedPrompt) -> Writer | None:
        """A writer for a sequence that is not plain."""
        sampling = prepared.spec.sampling
        ends_early = self.profile.output_tokens_mean > 0.0 and (
            sampling.ignore_eos or bool(sampling.min_tokens)
        )
        plain = not (
            prepared.script
            or prepared.fault
            or sampling.stop
            or sampling.stop_token_ids
            or sampling.logit_bias
            or sampling.logprobs is not None
            or ends_early
        )
        if plain:
            return None
        if prepared.fault is not None and prepared.fault.echo:
            # An echo shows the stop strings and must not end at them.
            sampling = replace(sampling, stop=(), stop_token_ids=())
        return Writer(sampling, script=prepared.script, fault=prepared.fault)

    # --- embeddings ---

    async def embed(
        self, request_id: str, prompts: Sequence[Prompt]
    ) -> tuple[list[list[float]], int]:
        """See the port; lasts as long as reading the tokens does."""
        self._alive()
        now = asyncio.get_running_loop().time()
        fault = self.faults.find(request_id, self.profile.model, now)
        self._embedding += 1
        try:
            return await embed(self.profile, self._fingerprint, prompts, fault)
        finally:
            self._embedding -= 1

    # --- what it says of itself ---

    def stats(self) -> EngineStats:
        """Numbers of the step loop; all ``None`` when it is down."""
        batch = self._batch
        if batch is None:
            return EngineStats()
        batch.meter.read(asyncio.get_running_loop().time())
        kv = batch.kv
        return EngineStats(
            running=batch.running + self._embedding,
            waiting=batch.waiting,
            kv_tokens_used=kv.used * kv.block_tokens,
            kv_tokens_free=(kv.blocks - kv.used) * kv.block_tokens,
            prefix_hit_rate=batch.meter.hit_rate,
            prompt_tokens_per_s=batch.meter.prompt_tokens_per_s,
            output_tokens_per_s=batch.meter.output_tokens_per_s,
            sequences_max=self.profile.sequences_max,
            preemptions=batch.preemptions,
            step_ms=batch.meter.step_ms,
        )

    def counters(self) -> SimulatedCounters:
        """How the requests since the last start ended."""
        batch = self._alive()
        ended = batch.finished + batch.aborted + batch.failed
        return SimulatedCounters(
            submitted=batch.submitted,
            running=batch.submitted - ended,
            finished=batch.finished,
            aborted=batch.aborted,
            failed=batch.failed,
        )

    def received(self) -> Mapping[str, object]:
        """The sampling of the latest submitted spec, by field, as far as it was set."""
        return received(self.last_spec.sampling) if self.last_spec is not None else {}


def _script(
    sampling: Sampling, fault: Fault | None, prompt: tuple[int, ...], state: int
) -> Script | None:
    if fault is not None:
        reply = scripted_reply(fault, sampling, prompt)
        if reply is not None:
            return reply
    if sampling.constraint is None:
        return None
    return Script(encode(make_form(sampling.constraint, state)))


class SimulatedInstance(Protocol):
    """What of an instance's configuration the engine needs."""

    @property
    def model(self) -> str:
        """The served name."""

    @property
    def simulated(self) -> Mapping[str, object]:
        """The table ``simulated``: fields of :class:`SimulatedProfile`."""


def make(config: SimulatedInstance) -> SimulatedEngine:
    """The engine of a configured instance; ValueError names a setting that is wrong."""
    return SimulatedEngine(SimulatedProfile.from_table(config.model, config.simulated))
