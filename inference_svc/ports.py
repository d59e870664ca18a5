"""What inference_svc needs from an engine, from the GPUs and from its caller's side.

This file reads as a specification. Two engines implement :class:`Engine`: vLLM
(``adapters/vllm_engine``) and the simulated engine (``adapters/simulated``); both pass the same
contract suite (``tests/contract``). The port is callback based: an engine calls the
request's :class:`OutputSink` from the event loop, once per engine step and request, so that a
frame can gather the output of all requests without a task switch per token.

All methods are called from the event loop of the service, and all callbacks happen on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class FinishReason(Enum):
    """Why an output ended; the names equal those of ``sluice.common.v1.FinishReason``."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text, tokenised as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages in the shape chat templates take (role, content, name, tool_calls, tool_call_id)."""

    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...] = ()
    continue_final_message: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class ConstraintKind(Enum):
    """Kinds of structured output."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form that the output must have. ``text`` is the schema, expression or grammar;
    ``choices`` is used by CHOICE only."""

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. ``None`` means unset (the engine's default), never zero.
    Ranges as in ``protos/sluice/common/v1/sampling.proto``; checked before an engine sees them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    keep_special_tokens: bool = False
    constraint: Constraint | None = None
    total_tokens_max: int | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """An output begun elsewhere; see ``Continuation`` in inference.proto."""

    output_token_ids: tuple[int, ...]
    delivered_text_bytes: int
    delivered_text_tail: str
    model_fingerprint: str


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """The input of the pure function."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    continuation: Continuation | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A spec that was rendered, tokenised and checked; ready for :meth:`Engine.submit`.

    ``prompt_token_ids`` excludes the continuation's tokens. ``max_output_tokens`` is what this
    attempt may still generate: max_tokens rebased by the continuation, capped by the context and by
    total_tokens_max."""

    spec: GenerateSpec
    prompt_token_ids: tuple[int, ...]
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One candidate at a position."""

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The sampled token at a position, its log probability and the best candidates."""

    token_id: int
    logprob: float
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """How one output ended."""

    index: int
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """The end of a generation: one :class:`OutputEnd` per output, exact counts of this attempt.

    ``error`` is set when a reason is ERROR: a typed error with fixed text (never an exception's
    text)."""

    outputs: tuple[OutputEnd, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: Exception | None = None


class OutputSink(Protocol):
    """Receives the output of one request. Calls never block and never raise."""

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """New output of output ``index``: whole characters (maybe empty) and token ids; at least
        one of both is not empty. ``position`` is the number of output tokens of this output before
        this delta, a continuation's included."""

    def ended(self, end: GenerationEnd) -> None:
        """Called exactly once, after the last delta; also after an abort."""


class RunningRequest(Protocol):
    """A submitted request."""

    def abort(self, reason: FinishReason) -> None:
        """Stops it at once: the engine frees its sequence and KV memory now, and the sink's
        ``ended`` comes within one engine step with ``reason``. Idempotent; nothing after the
        end."""

    @property
    def output_tokens(self) -> int:
        """Output tokens generated by this attempt so far, over all outputs."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the engine serves; the fields of ``GetModelResponse``. ``kv_tokens`` 0 = no KV cache."""

    model: str
    fingerprint: str
    engine: str
    simulated: bool
    generate: bool
    embed: bool
    chat: bool
    structured_output: bool
    continuation: bool
    context_tokens: int
    kv_tokens: int
    kv_block_tokens: int
    sequences_max: int
    step_tokens_max: int
    dtype: str
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    embedding_dimensions: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's own scheduler statistics; ``None`` = not reported. Units as in load.proto."""

    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_free: int | None = None
    prefix_hit_rate: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    sequences_max: int | None = None
    preemptions: int | None = None
    step_ms: float | None = None


class Engine(Protocol):
    """A model that runs: a pure function from a spec to its output.

    Errors are ``sluice.errors.SluiceError``: INVALID_ARGUMENT naming the field (paths as in the
    proto, e.g. ``sampling.temperature``, ``input.conversation.messages``), FAILED_PRECONDITION for
    a capability the model lacks or another fingerprint, UNAVAILABLE when the engine is down."""

    async def start(self) -> None:
        """Loads the model; returns when it can serve. Raises when it cannot; may take minutes."""

    async def close(self) -> None:
        """Aborts what runs, ends its processes and frees its memory. Idempotent; at most 30 s."""

    @property
    def healthy(self) -> bool:
        """Whether it can serve now. False before start, after a crash, after close."""

    def describe(self) -> ModelDescription:
        """What it serves. Valid after start."""

    async def prepare(self, spec: GenerateSpec) -> PreparedPrompt:
        """Renders, tokenises and checks a spec. Work above 1 ms leaves the event loop. Raises
        INVALID_ARGUMENT; a prompt over the context length names the limit and both counts."""

    def submit(self, prepared: PreparedPrompt, sink: OutputSink) -> RunningRequest:
        """Starts it. Never blocks; deltas begin at the next engine step."""

    async def embed(
        self, request_id: str, prompts: Sequence[Prompt]
    ) -> tuple[list[list[float]], int]:
        """Embeds prompts; returns vectors in order and the tokens read. Cancelling the task
        aborts."""

    def stats(self) -> EngineStats:
        """The latest statistics of the engine's own scheduler. Cheap; no I/O."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU; ``None`` = not supported by the device. Units as in load.proto."""

    index: int
    uuid: str
    name: str
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    ecc_uncorrected_errors: int | None = None
    xid_errors: int | None = None
    last_xid: int | None = None


class GpuMonitor(Protocol):
    """Reads the GPUs of this instance. Absent hardware is an empty tuple, never an error."""

    def read(self) -> tuple[GpuReading, ...]:
        """The latest readings; at most one second old. Never blocks the loop above 1 ms."""

    def close(self) -> None:
        """Releases NVML. Idempotent."""
