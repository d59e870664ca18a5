"""What experience says about requests: tokens per byte, output length, service time, prefill rate.

Every estimate is an exponentially weighted mean of exact counts that instances reported, kept per
model or per (tenant, model) in maps that forget the least recently used entry at a named bound.
Nothing learnt: a named default. Estimates steer order and room; they never decide correctness:
``accepted`` and ``ended`` replace them by exact counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import OUTPUT_WEIGHT, Line, Ticket, WorkKind

K = TypeVar("K", bound=Hashable)

WEIGHT = 0.1  # of a new sample: about the last 20 requests count
# A measured prefill rate says nothing any more after this long: so a wrong one cannot refuse
# everything, and with it every chance to measure again.
PREFILL_MEMORY_S = 60.0


class Means(Generic[K]):
    """Exponentially weighted means by key; at most ``keys_max`` keys, least recently used first
    out. O(1)."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._means: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def learn(self, key: K, sample: float) -> None:
        mean = self._means.get(key)
        self._means[key] = sample if mean is None else mean + WEIGHT * (sample - mean)
        self._means.move_to_end(key)
        if len(self._means) > self._keys_max:
            self._means.popitem(last=False)

    def get(self, key: K) -> float | None:
        return self._means.get(key)


@dataclass(slots=True)
class PrefillRate:
    """The best prompt tokens per second that a busy instance of a model was seen to do."""

    tokens_per_s: float
    seen_s: float


class Estimates:
    """All learnt estimates of one scheduler."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._bytes_per_token: Means[str] = Means(limits.models_max)
        self._service_s: Means[Line] = Means(limits.models_max)
        self._first_s: Means[Line] = Means(limits.models_max)
        self._first_deviation_s: Means[Line] = Means(limits.models_max)
        self._work: Means[Line] = Means(limits.models_max)
        self._output: Means[str] = Means(limits.models_max)
        self._tenant_output: Means[tuple[str, str]] = Means(limits.tenant_models_max)
        self._prefill: OrderedDict[str, PrefillRate] = OrderedDict()

    def saw_prompt(self, model: str, size_bytes: int, tokens: int) -> None:
        """An exact count for a text of that size."""
        if size_bytes > 0 and tokens > 0:
            self._bytes_per_token.learn(model, size_bytes / tokens)

    def saw_end(self, ticket: Ticket, output_tokens: int, service_s: float) -> None:
        """A ticket that finished: its output tokens, and its time from dispatch to end. Without a
        token a generation teaches nothing."""
        if ticket.kind is WorkKind.GENERATE:
            if output_tokens <= 0:
                return
            self._output.learn(ticket.model, output_tokens)
            self._tenant_output.learn((ticket.tenant, ticket.model), output_tokens)
        self._service_s.learn(ticket.line, max(0.0, service_s))
        work = ticket.prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._work.learn(ticket.line, max(1, work))

    def saw_first_token(self, line: Line, took_s: float) -> None:
        """From a dispatch to its first token."""
        mean_s = self._first_s.get(line)
        self._first_s.learn(line, took_s)
        if mean_s is not None:
            self._first_deviation_s.learn(line, abs(took_s - mean_s))

    def saw_prefill(self, model: str, tokens_per_s: float, now: float) -> None:
        """The throughput of an instance that had prompts to read all the time."""
        known = self._prefill.get(model)
        if known is None or tokens_per_s >= known.tokens_per_s or self._forgotten(known, now):
            self._prefill[model] = PrefillRate(tokens_per_s, now)
            self._prefill.move_to_end(model)
        else:
            known.tokens_per_s += WEIGHT * (tokens_per_s - known.tokens_per_s)
            known.seen_s = now
        if len(self._prefill) > self._limits.models_max:
            self._prefill.popitem(last=False)

    def prompt_tokens(self, model: str, size_bytes: int) -> int:
        """Expected tokens of a text of that size; at least 1."""
        return max(1, round(size_bytes / self.bytes_per_token(model)))

    def bytes_per_token(self, model: str) -> float:
        """Learnt for the model, else the default."""
        return self._bytes_per_token.get(model) or self._limits.default_bytes_per_token

    def output_tokens(self, tenant: str, model: str, max_tokens: int | None) -> int:
        """Expected output tokens: the tenant's mean, else the model's, else the default; at least
        1, at most ``max_tokens``."""
        mean = self._tenant_output.get((tenant, model))
        if mean is None:
            mean = self._output.get(model)
        expected = self._limits.default_output_tokens if mean is None else max(1, round(mean))
        return expected if max_tokens is None else max(1, min(expected, max_tokens))

    def service_s(self, line: Line) -> float | None:
        """Expected time from dispatch to end; ``None`` before the first end."""
        return self._service_s.get(line)

    def first_token_s(self, line: Line) -> float:
        """Time from dispatch to first token that most stay below: the mean and two mean deviations
        (as TCP reckons its timeout: Jacobson 1988); 0 when nothing is known."""
        return (self._first_s.get(line) or 0.0) + 2.0 * (self._first_deviation_s.get(line) or 0.0)

    def work_tokens(self, line: Line) -> float | None:
        """Weighted tokens of a ticket, in the mean; ``None`` before the first end."""
        return self._work.get(line)

    def prefill_s(self, model: str, prompt_tokens: int, now: float) -> float:
        """The least time in which a prompt of that length can be read; 0 when nothing recent is
        known: what was not measured refuses nobody."""
        known = self._prefill.get(model)
        if known is None or self._forgotten(known, now):
            return 0.0
        return prompt_tokens / known.tokens_per_s

    def check(self) -> None:
        """Every map is within its bound."""
        assert len(self._bytes_per_token) <= self._limits.models_max
        assert len(self._output) <= self._limits.models_max
        assert len(self._service_s) <= self._limits.models_max
        assert len(self._first_s) <= self._limits.models_max
        assert len(self._first_deviation_s) <= self._limits.models_max
        assert len(self._work) <= self._limits.models_max
        assert len(self._tenant_output) <= self._limits.tenant_models_max
        assert len(self._prefill) <= self._limits.models_max

    @staticmethod
    def _forgotten(known: PrefillRate, now: float) -> bool:
        return now - known.seen_s > PREFILL_MEMORY_S
