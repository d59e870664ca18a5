"""One use of a slot: a generation from its start to its end, and the sink of its output.

Owned by a :class:`inference_svc.adapters.frame_stream.FrameStream`; called by the engine on the
event loop. :meth:`Slot.delta` is the path of every token and does nothing that it need not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from inference_svc.adapters.reasons import finish_label
from inference_svc.adapters.results import write_delta
from inference_svc.ports import (
    FinishReason,
    GenerationEnd,
    PreparedPrompt,
    RunningRequest,
    TokenLogprob,
)
from sluice.common.v1 import result_pb2
from sluice.telemetry_names import (
    ATTR_FINISH_REASONS,
    ATTR_INPUT_TOKENS,
    ATTR_OUTPUT_TOKENS,
    ATTR_TPOT_MS,
    ATTR_TTFT_MS,
)

if TYPE_CHECKING:
    from inference_svc.adapters.outbox import Outbox
    from inference_svc.adapters.reasons import FinishWire
    from sluice.telemetry import Span


class Slot:
    """A generation in a slot. It is *rendering* until the engine has it, then *running*; after
    the first :meth:`claim_abort` it is on its way to its end."""

    __slots__ = (
        "_on_end",
        "_outbox",
        "abort_reason",
        "accepted_at",
        "accepted_in",
        "attempt",
        "first_at",
        "kv_tokens_bound",
        "number",
        "outputs",
        "prepared",
        "prompt_kv_tokens",
        "request_id",
        "running",
        "span",
        "task",
        "timer",
    )

    def __init__(
        self,
        number: int,
        attempt: int,
        request_id: str,
        outputs: int,
        outbox: Outbox,
        on_end: Callable[[Slot, GenerationEnd], None],
    ) -> None:
        self.number = number
        self.attempt = attempt
        self.request_id = request_id
        self.outputs = outputs
        self._outbox = outbox
        self._on_end = on_end
        self.prepared: PreparedPrompt | None = None
        self.prompt_kv_tokens = 0
        self.kv_tokens_bound = 0  # the most that it can come to
        self.running: RunningRequest | None = None
        self.task: asyncio.Task[None] | None = None  # renders the prompt
        self.timer: asyncio.TimerHandle | None = None  # the deadline
        self.span: Span | None = None
        self.accepted_at = 0.0
        self.accepted_in = 0  # number of the frame with `accepted`
        self.first_at: float | None = None  # loop time of the first delta
        self.abort_reason: FinishWire | None = None

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """See :class:`inference_svc.ports.OutputSink`."""
        outbox = self._outbox
        if self.first_at is None:
            self.first_at = asyncio.get_running_loop().time()
            outbox.seal(self.accepted_in)
        entry = outbox.add_delta()
        entry.slot = self.number
        entry.attempt = self.attempt
        write_delta(entry, index, text, token_ids, position, logprobs)
        if not outbox.awake:
            outbox.rouse()

    def ended(self, end: GenerationEnd) -> None:
        """See :class:`inference_svc.ports.OutputSink`."""
        self._on_end(self, end)

    def claim_abort(self, reason: FinishWire) -> bool:
        """Whether this is the first abort of the slot; ``reason`` is what its end will say."""
        if self.abort_reason is not None:
            return False
        self.abort_reason = reason
        return True

    def admit(self, prepared: PreparedPrompt, kv_tokens: int, now: float) -> None:
        """The engine is about to take it; ``kv_tokens`` are those of its prompt and of what a
        continuation brings."""
        self.prepared = prepared
        self.accepted_at = now
        self.prompt_kv_tokens = kv_tokens
        self.kv_tokens_bound = kv_tokens + prepared.max_output_tokens * self.outputs

    @property
    def kv_tokens(self) -> int:
        """KV tokens held now."""
        running = self.running
        return self.prompt_kv_tokens + (running.output_tokens if running is not None else 0)

    def to_finish_reason(self) -> FinishReason:
        """The abort's reason as the engine knows it: a yield is a cancel to it."""
        if self.abort_reason == result_pb2.FINISH_REASON_DEADLINE:
            return FinishReason.DEADLINE
        return FinishReason.CANCELLED

    def end_span(self, reason: FinishWire, now: float) -> None:
        """Ends the slot's span, if it is traced, with prefill and decode as attributes."""
        span = self.span
        if span is None:
            return
        if self.prepared is not None:
            span.set(ATTR_INPUT_TOKENS, len(self.prepared.prompt_token_ids))
        if self.running is not None:
            tokens = self.running.output_tokens
            span.set(ATTR_OUTPUT_TOKENS, tokens)
            if self.first_at is not None:
                span.set(ATTR_TTFT_MS, (self.first_at - self.accepted_at) * 1e3)
                span.set(ATTR_TPOT_MS, (now - self.first_at) * 1e3 / max(1, tokens - 1))
        span.set(ATTR_FINISH_REASONS, finish_label(reason))
        span.end("ERROR" if reason == result_pb2.FINISH_REASON_ERROR else None)
