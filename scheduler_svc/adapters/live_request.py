"""One admitted request between the frame reader and the client's handler.

The frame reader calls :meth:`LiveRequest.append` for every delta and never waits: output gathers
in one joined buffer per output index. The client's handler awaits :meth:`LiveRequest.ready` and
takes what has gathered. So a slow client costs memory up to ``buffer_chars_max`` and nothing
else; past that the request ends as ``slow_consumer``.

Everything runs on one event loop; no locks. A request ends exactly once: by :meth:`end` (the
engine's ``ended``) or by :meth:`fail` (a typed error), whichever is first.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Final

from scheduler_svc.domain.continuation import TAIL_BYTES_MAX, tail_of
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.model import Dispatch, InstanceName, Outcome, Ticket
from scheduler_svc.domain.quota import Reservation
from sluice.common.v1 import result_pb2
from sluice.errors import Code, SluiceError
from sluice.inference.v1 import inference_pb2

STREAM_BUFFER_CHARS_MAX: Final = 64 * 1024
"""Unsent characters of one streamed request (at most 256 KiB of UTF-8); beyond it the client is a
slow consumer."""

TEXT_CHARS_MAX: Final = 1024 * 1024
"""Characters of one unary answer (GenerateText) over all outputs; at most 4 MiB of UTF-8. Token ids
and log probabilities that were asked for count too, as so many characters of four bytes."""

CHAR_BYTES_MAX: Final = 4

_PARTS_MAX: Final = 256
"""Pieces of text that are kept before they are joined, measured and cut to the tail."""


class Kept:
    """What another attempt needs to go on with an output: its token ids, the bytes of its text and
    the end of it. 4 bytes a token, and a few KiB of text. 0.3 µs a delta."""

    __slots__ = ("parts", "tail", "text_bytes", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.parts: list[str] = []
        self.text_bytes = 0
        self.tail = ""

    def append(self, text: str) -> None:
        """More text of the output."""
        self.parts.append(text)
        if len(self.parts) >= _PARTS_MAX:
            self._join()

    def _join(self) -> None:
        text = "".join(self.parts)
        self.parts.clear()
        self.text_bytes += len(text) if text.isascii() else len(text.encode())
        self.tail = (self.tail + text)[-TAIL_BYTES_MAX:]

    def continuation(self, fingerprint: str) -> inference_pb2.Continuation:
        """The message for an instance whose model has the fingerprint."""
        self._join()
        return inference_pb2.Continuation(
            output_token_ids=self.token_ids,
            delivered_text_bytes=self.text_bytes,
            delivered_text_tail=tail_of(self.tail),
            model_fingerprint=fingerprint,
        )


class Output:
    """Unsent output of one index: joined text, token ids and log probabilities."""

    __slots__ = ("logprobs", "parts", "sent_tokens", "token_ids", "tokens")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[result_pb2.TokenLogprob] = []
        self.tokens = 0
        self.sent_tokens = 0

    @property
    def pending(self) -> bool:
        """Whether anything waits to be sent."""
        return self.tokens > self.sent_tokens or bool(self.parts)


class LiveRequest:
    """A request that was admitted and has not ended; see the module's docstring."""

    __slots__ = (
        "_first_due",
        "_flush",
        "_flush_at_s",
        "_loop",
        "_on_first_token",
        "_timer",
        "_waiter",
        "abandon",
        "accepted",
        "attempt",
        "attempt_base",
        "buffer_chars_max",
        "dispatch_s",
        "ended",
        "error",
        "first_token_s",
        "flush_min_s",
        "instance",
        "inter_token_limit_s",
        "kept",
        "last_token_s",
        "outcome",
        "outputs",
        "paid_tokens",
        "pending_chars",
        "progress_told_s",
        "prompt_tokens",
        "queue_s",
        "quota",
        "quota_closed",
        "quota_lapses",
        "renewing",
        "sequence",
        "simulated",
        "started_due",
        "ticket",
        "traceparent",
        "tracestate",
        "unary",
        "want_token_ids",
        "whole",
        "work",
        "write_began_s",
        "written_to",
    )

    def __init__(
        self,
        ticket: Ticket,
        work: inference_pb2.Work,
        flush: FlushBudget,
        *,
        loop: asyncio.AbstractEventLoop,
        whole: bool = False,
        unary: bool = False,
        want_token_ids: bool = False,
        traceparent: str = "",
        inter_token_limit_s: float = 60.0,
    ) -> None:
        self.ticket = ticket
        self.work = work
        self.whole = whole
        self.unary = unary
        self.abandon: Callable[[], object] | None = None
        self.want_token_ids = want_token_ids
        self.traceparent = traceparent
        self.tracestate = ""
        self.inter_token_limit_s = inter_token_limit_s
        self.flush_min_s = 0.0  # between two messages, at least
        self.buffer_chars_max = TEXT_CHARS_MAX if whole else STREAM_BUFFER_CHARS_MAX
        self.outputs = [Output() for _ in range(max(1, work.sampling.n))]
        self.pending_chars = 0
        self.kept = Kept() if ticket.continuable else None
        self.attempt = 0
        self.attempt_base = 0
        self.sequence = 0
        self.instance = InstanceName("")
        self.accepted: inference_pb2.Accepted | None = None
        self.prompt_tokens = 0
        """By the first instance that took it; a later one may read earlier output as prompt."""
        self.quota: Reservation | None = None  # this and the next five belong to the quota keeper
        self.quota_closed = False
        self.renewing: Dispatch | None = None  # waits for quota that is reserved anew
        self.quota_lapses = 0
        self.paid_tokens = 0
        self.progress_told_s = 0.0
        self.started_due = False
        self.simulated = False
        self.ended: inference_pb2.Ended | None = None
        self.error: SluiceError | None = None
        self.outcome: Outcome | None = None
        self.dispatch_s = 0.0
        self.queue_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.write_began_s = 0.0
        self.written_to = False
        self._flush = flush
        self._flush_at_s = 0.0
        self._first_due = False
        self._loop = loop
        self._on_first_token: Callable[[LiveRequest], None] = _ignore
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    # What the frame reader and the gate do.

    @property
    def over(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.ended is not None or self.error is not None

    @property
    def tokens(self) -> int:
        """Output tokens received so far, over all outputs and attempts."""
        return sum(output.tokens for output in self.outputs)

    def dispatched(
        self,
        instance: InstanceName,
        attempt: int,
        now: float,
        on_first_token: Callable[[LiveRequest], None],
    ) -> None:
        """It was sent to an instance. ``on_first_token`` is called once, with the first output of
        this attempt."""
        self.instance = instance
        self.attempt = attempt
        self.attempt_base = self.tokens
        self._first_due = True
        self._on_first_token = on_first_token
        self.dispatch_s = now
        if not self.first_token_s:
            self.queue_s = now - self.ticket.arrival_s
        if self.unary:
            self._wake()
        elif not (self.whole or self.written_to):
            self.written_to = True
            self._flush.begin(self.ticket.priority_class)

    def to_start(self) -> inference_pb2.Work:
        """What the next attempt is to do: the work, or what is left of it. A copy is made only for
        a request that goes on."""
        if self.kept is None or not self.kept.token_ids:
            return self.work
        assert self.ticket.fingerprint is not None
        work = inference_pb2.Work()
        work.CopyFrom(self.work)
        work.continuation.CopyFrom(self.kept.continuation(self.ticket.fingerprint))
        return work

    def usage(self) -> result_pb2.Usage:
        """Exact counts over all attempts: the prompt once, and every output token."""
        assert self.ended is not None
        usage = result_pb2.Usage()
        usage.CopyFrom(self.ended.usage)
        usage.completion_tokens += self.attempt_base
        return usage

    def accept(self, accepted: inference_pb2.Accepted) -> None:
        """An instance took it: ``started`` is due, once per request."""
        if self.accepted is None:
            self.prompt_tokens = accepted.prompt_tokens
            self.started_due = not self.whole
        self.accepted = accepted
        self.simulated = accepted.simulated
        if self.started_due:
            self._wake()

    def append(self, delta: inference_pb2.Delta, now: float) -> bool:
        """Joins one delta to what waits. Returns False when the delta does not fit: a gap, an
        overlap or an unknown index, which are faults of the instance."""
        if self.error is not None:
            return True  # nobody waits for it
        index = delta.index
        if index >= len(self.outputs):
            return False
        output = self.outputs[index]
        if delta.position != output.tokens:
            return False
        token_ids = delta.token_ids
        count = len(token_ids)
        output.tokens += count
        if self.want_token_ids:
            output.token_ids.extend(token_ids)
        text = delta.text
        if text:
            output.parts.append(text)
            self.pending_chars += len(text)
        kept = self.kept
        if kept is not None:
            if count == 1:  # nearly always; 0.3 µs less than to extend
                kept.token_ids.append(token_ids[0])
            else:
                kept.token_ids.extend(token_ids)
            if text:
                kept.append(text)
        if delta.logprobs:
            output.logprobs.extend(delta.logprobs)
        if self.whole:
            self._count_beside_text(delta)
        self.last_token_s = now
        if self._first_due:
            self._first_due = False
            if not self.first_token_s:
                self.first_token_s = now
            self._on_first_token(self)
        if self.pending_chars > self.buffer_chars_max:
            self._overflow()
        elif self._waiter is not None and self._timer is None and not self.whole:
            self._wake_at(self._flush_at_s, now)
        return True

    def end(self, ended: inference_pb2.Ended) -> None:
        """The engine finished it."""
        if not self.over:
            self.ended = ended
            self._wake()

    def fail(self, error: SluiceError, outcome: Outcome) -> None:
        """It ends with a typed error."""
        if not self.over:
            self.error = error
            self.outcome = outcome
            self._wake()

    # What the client's handler does.

    async def ready(self) -> None:
        """Returns when ``started`` is due, output is due, or the request is over."""
        while not (self.started_due or self.over):
            now = self._loop.time()
            if self._pending() and now >= self._flush_at_s:
                return
            self._waiter = self._loop.create_future()
            if self._pending():
                self._wake_at(self._flush_at_s, now)
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._disarm()

    async def finished(self) -> None:
        """Returns when the request is over."""
        while not self.over:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def placed(self, after_attempt: int) -> None:
        """For unary requests: returns when an attempt after ``after_attempt`` was dispatched, or
        the request is over."""
        while not self.over and self.attempt <= after_attempt:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def flushed(self, now: float) -> None:
        """What was due is being written; the next flush is one interval away."""
        interval_s = self._flush.interval_s(self.ticket.priority_class)
        self._flush_at_s = now + max(interval_s, self.flush_min_s)
        self.pending_chars = 0

    def close(self) -> None:
        """The handler is gone."""
        self._disarm()
        if self.written_to:
            self.written_to = False
            self._flush.end(self.ticket.priority_class)

    def _pending(self) -> bool:
        return not self.whole and any(output.pending for output in self.outputs)

    def _count_beside_text(self, delta: inference_pb2.Delta) -> None:
        """A whole answer is bounded with all that it carries: a client could not receive it."""
        if self.want_token_ids:
            self.pending_chars += len(delta.token_ids)
        if delta.logprobs:
            self.pending_chars += (
                sum(entry.ByteSize() for entry in delta.logprobs) // CHAR_BYTES_MAX
            )

    def _overflow(self) -> None:
        if self.whole:
            error = SluiceError(
                Code.RESOURCE_EXHAUSTED,
                "OUTPUT_TOO_LARGE",
                f"the answer does not fit into {TEXT_CHARS_MAX * CHAR_BYTES_MAX} bytes; "
                "use the streaming Generate",
            )
            self.fail(error, Outcome.INVALID)
        else:
            error = SluiceError(
                Code.RESOURCE_EXHAUSTED,
                "SLOW_CONSUMER",
                f"the client left more than {self.buffer_chars_max} characters of output unread",
            )
            self.fail(error, Outcome.SLOW_CONSUMER)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wake_at(self, when_s: float, now: float) -> None:
        if when_s <= now:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_at(when_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._wake()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _ignore(live: LiveRequest) -> None:
    """Nobody waits for the first token of a request that was not dispatched."""
