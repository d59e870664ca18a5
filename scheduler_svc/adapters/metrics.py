"""Counts, spans and metrics of the scheduler: at most five recordings per request, none per token.

Counters are plain integers; the telemetry thread reads them by itself. Series are bounded: labels
are classes, outcomes and instance names only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from scheduler_svc.adapters.admin_api import state_of
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.domain.model import Outcome, PriorityClass, Ticket
from sluice import context
from sluice import telemetry_names as names
from sluice.errors import SluiceError
from sluice.telemetry import Labels, Span, Telemetry, current_traceparent

LIMIT_REASONS: Final = frozenset(
    ("TOO_MANY_STREAMS", "QUEUE_FULL", "SLOW_CONSUMER", "OUTPUT_TOO_LARGE", "WATCH_BYTES")
)
"""Refusals and ends that say that a named bound of the scheduler was hit."""


class SchedulerMetrics:
    """See the module's docstring."""

    def __init__(self, telemetry: Telemetry, gate: Gate) -> None:
        self.messages = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.outcomes: Counter[tuple[PriorityClass | None, Outcome]] = Counter()
        self.limit_hits: Counter[str] = Counter()
        self._gate = gate
        self._telemetry = telemetry
        self._ttft = telemetry.histogram(names.TTFT)
        self._tpot = telemetry.histogram(names.TPOT)
        self._queue = telemetry.histogram(names.QUEUE_TIME)
        self._total = telemetry.histogram(names.REQUEST_TIME)
        telemetry.counter(names.REQUESTS, self._read_outcomes)
        telemetry.counter(names.TENANT_TOKENS, self._read_tokens)
        telemetry.gauge(names.QUEUE_DEPTH, self._read_waiting)
        telemetry.gauge(names.RUNNING, self._read_running)
        telemetry.gauge(names.OPEN_STREAMS, self._read_streams)
        telemetry.gauge(names.BUFFERED, self._read_buffered)
        telemetry.gauge(names.INSTANCES, self._read_instances)
        telemetry.counter(names.BREAKER_OPENED, self._read_breakers)
        telemetry.counter(names.RETRIES, self._read_retries)
        telemetry.counter(names.MOVES, self._read_moves)
        telemetry.gauge(names.POISONED, self._read_poisoned)
        telemetry.counter(names.LIMIT_HITS, self._read_limit_hits)
        telemetry.counter(names.FRAMES, self._read_frames)

    def request_span(self, ticket: Ticket) -> Span:
        """The span of one request, under the caller's trace context."""
        return self._telemetry.span(
            names.SPAN_REQUEST,
            current_traceparent(),
            {
                names.ATTR_REQUEST_ID: ticket.request_id,
                names.ATTR_TENANT: ticket.tenant,
                names.ATTR_REQUEST_MODEL: ticket.model,
                names.ATTR_CLASS: ticket.priority_class.name.lower(),
            },
            kind="server",
        )

    def refused(self, outcome: Outcome, error: SluiceError, ticket: Ticket | None) -> None:
        """A request was refused before it was admitted; ``ticket``: if it came so far."""
        self.outcomes[None if ticket is None else ticket.priority_class, outcome] += 1
        self.count_limit(error)
        if ticket is None:
            span = self._telemetry.span(names.SPAN_REQUEST, current_traceparent(), kind="server")
            if span.recording:
                span.set(names.ATTR_REQUEST_ID, context.request_id.get())
        else:
            span = self.request_span(ticket)
        if span.recording:
            span.set(names.ATTR_OUTCOME, outcome.value)
        span.end(error.reason)

    def left(self, ticket: Ticket, outcome: Outcome) -> None:
        """Its client left before it was admitted."""
        self.outcomes[ticket.priority_class, outcome] += 1

    def ended(self, live: LiveRequest, outcome: Outcome, now: float, span: Span) -> None:
        """A request is over."""
        ticket = live.ticket
        self.outcomes[ticket.priority_class, outcome] += 1
        if live.error is not None:
            self.count_limit(live.error)
        self.output_tokens += live.tokens
        if live.accepted is not None:
            self.prompt_tokens += live.accepted.prompt_tokens
        label = {"class": ticket.priority_class.name.lower()}
        total_s = now - ticket.arrival_s
        self._total.record(total_s, {**label, "outcome": outcome.value})
        if live.dispatch_s:
            self._queue.record(live.queue_s, label)
        if live.first_token_s:
            self._ttft.record(live.first_token_s - ticket.arrival_s, label)
            gaps = max(output.tokens for output in live.outputs) - 1
            if gaps > 0:
                self._tpot.record((live.last_token_s - live.first_token_s) / gaps, label)
        if span.recording:
            self._describe(span, live, outcome)
            self._trace_queue(span, live, now)
        if outcome is Outcome.FINISHED:
            span.end()
        else:
            told = live.error if live.outcome is outcome else None
            span.end(told.reason if told is not None else outcome.name)

    def _trace_queue(self, request: Span, live: LiveRequest, now: float) -> None:
        """The wait in the queue as a span. It is known only at the end: the dispatch that counted
        is the last one, and a request may leave the queue without any."""
        unix_ns = time.time_ns()
        left_s = live.ticket.arrival_s + live.queue_s if live.dispatch_s else now
        queue = self._telemetry.span(
            names.SPAN_QUEUE,
            request.traceparent,
            start_unix_ns=unix_ns - int((now - live.ticket.arrival_s) * 1e9),
        )
        queue.end(end_unix_ns=unix_ns - int((now - left_s) * 1e9))

    @staticmethod
    def _describe(span: Span, live: LiveRequest, outcome: Outcome) -> None:
        ticket = live.ticket
        if ticket.step_of is not None:
            run_id, step = ticket.step_of
            span.set(names.ATTR_RUN_ID, run_id)
            span.set(names.ATTR_STEP, step)
        span.set(names.ATTR_OUTCOME, outcome.value)
        span.set(names.ATTR_INSTANCE, live.instance)
        span.set(names.ATTR_ATTEMPTS, live.attempt)
        span.set(names.ATTR_OUTPUT_TOKENS, live.tokens)
        span.set(names.ATTR_SIMULATED, live.simulated)
        if live.accepted is not None:
            span.set(names.ATTR_INPUT_TOKENS, live.accepted.prompt_tokens)
            span.set(names.ATTR_CACHED_TOKENS, live.accepted.cached_tokens)
        if live.dispatch_s:
            span.set(names.ATTR_QUEUE_MS, live.queue_s * 1e3)
        if live.first_token_s:
            span.set(names.ATTR_TTFT_MS, (live.first_token_s - ticket.arrival_s) * 1e3)

    def _read_outcomes(self) -> Iterator[tuple[int, Labels]]:
        for (priority_class, outcome), count in self.outcomes.items():
            name = priority_class.name.lower() if priority_class is not None else "none"
            yield count, {"class": name, "outcome": outcome.value}

    def _read_tokens(self) -> Iterator[tuple[int, Labels]]:
        yield self.prompt_tokens, {"direction": "input"}
        yield self.output_tokens, {"direction": "output"}

    def _read_waiting(self) -> Iterator[tuple[int, Labels]]:
        for priority_class, count in self._gate.domain.snapshot().waiting.items():
            yield count, {"class": priority_class.name.lower()}

    def _read_running(self) -> Iterator[tuple[int, Labels]]:
        for instance, status in self._gate.domain.snapshot().instances.items():
            yield status.running, {"instance": instance}

    def _read_streams(self) -> Iterator[tuple[int, Labels]]:
        for priority_class, count in self._gate.flush.open_by_class().items():
            yield count, {"class": priority_class.name.lower()}

    def count_limit(self, error: SluiceError) -> None:
        """Counts an error that says that a named bound was hit."""
        if error.reason in LIMIT_REASONS:
            self.limit_hits[error.reason.lower()] += 1

    def _read_buffered(self) -> int:
        return sum(live.pending_chars for live in list(self._gate.lives.values()))

    def _read_instances(self) -> Iterator[tuple[int, Labels]]:
        states = Counter(map(state_of, self._gate.domain.snapshot().instances.values()))
        for state, count in states.items():
            yield count, {"state": state}

    def _read_breakers(self) -> Iterator[tuple[int, Labels]]:
        for instance, status in self._gate.domain.snapshot().instances.items():
            yield status.breaker_opened, {"instance": instance}

    def _read_retries(self) -> Iterator[tuple[int, Labels]]:
        snapshot = self._gate.domain.snapshot()
        yield snapshot.retries, {"result": "allowed"}
        yield snapshot.retries_refused, {"result": "refused"}

    def _read_moves(self) -> Iterator[tuple[int, Labels]]:
        for cause, count in self._gate.domain.snapshot().moves.items():
            yield count, {"cause": cause}

    def _read_poisoned(self) -> Iterator[tuple[int, Labels]]:
        snapshot = self._gate.domain.snapshot()
        yield snapshot.suspected, {"state": "suspected"}
        yield snapshot.poisoned, {"state": "refused"}

    def _read_limit_hits(self) -> Iterator[tuple[int, Labels]]:
        for limit, count in self.limit_hits.items():
            yield count, {"limit": limit}

    def _read_frames(self) -> Iterator[tuple[int, Labels]]:
        yield sum(link.frames_read for link in self._gate.lanes.links), {"direction": "in"}
        yield sum(link.frames_written for link in self._gate.lanes.links), {"direction": "out"}
