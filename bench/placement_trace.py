"""Replays a trace of prompts through the real scheduler domain, over instances with a prefix cache.

One instance reads prompts one after the other at its prefill rate, less what its cache holds (every
block it ever read: the ideal is then the same for all policies), and makes output tokens at one
step each, all sequences side by side. Time is virtual. What is measured is what the instances'
own caches found, not what the scheduler's index expected.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_svc.domain.canonical import PrefixHasher
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    Dispatch,
    InstanceName,
    InstanceReport,
    Prefix,
    PriorityClass,
    Ticket,
    TicketId,
)
from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.domain.scheduler import Scheduler

BLOCK_TOKENS = 512  # of the trace
STEP_S = 0.02
PREFILL_TOKENS_PER_S = 16_000.0  # llm-d publishes 15,928 for a 32B model on two H100
REPORT_EVERY_S = 1.0


@dataclass(frozen=True)
class Request:
    """One line of the trace; ``at_s`` from its beginning."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """``hit_rate``: prompt tokens found in caches over all. ``max_over_mean``: the busiest
    instance's work over the mean, work being prompt tokens read and output tokens made, in seconds
    of the instance at normal speed; ``tokens_max_over_mean`` the same over whole prompts and
    outputs in tokens."""

    policy: str
    hit_rate: float
    max_over_mean: float
    tokens_max_over_mean: float
    ttft_p50_s: float
    ttft_p99_s: float
    expected_over_found: float


@dataclass
class Engine:
    """One instance."""

    name: InstanceName
    speed: float
    cache: set[int] = field(default_factory=set)
    free_at_s: float = 0.0
    read_s: float = 0.0
    hits: int = 0
    tokens: int = 0
    read: int = 0
    outputs: int = 0
    running: int = 0


def read_trace(path: Path, spread: bool = True) -> list[Request]:
    """The trace in order of time. Its times are quantised to about 3 s: requests of one instant are
    spread evenly up to the next."""
    packed = path.suffix == ".gz"
    text = gzip.decompress(path.read_bytes()).decode() if packed else path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    times = sorted({row["timestamp"] for row in rows})
    following = dict(itertools.pairwise([*times, times[-1] + 3_000]))
    sizes = Counter(row["timestamp"] for row in rows)
    seen: Counter[int] = Counter()
    requests = []
    for row in rows:
        at = row["timestamp"]
        offset = (following[at] - at) * seen[at] / sizes[at] if spread else 0.0
        seen[at] += 1
        requests.append(
            Request(
                (at + offset) / 1_000.0,
                row["input_length"],
                row["output_length"],
                _block_ids(row),
            )
        )
    return sorted(requests, key=lambda request: request.at_s)


def _block_ids(row: dict[str, Any]) -> tuple[int, ...]:
    """As in the original (``hash_ids``), or as runs of following ids (``hash_id_runs``)."""
    if "hash_ids" in row:
        return tuple(row["hash_ids"])
    return tuple(id_ for first, count in row["hash_id_runs"] for id_ in range(first, first + count))


def cached_tokens(request: Request, cache: set[int]) -> int:
    """Tokens of the prompt that whole blocks at its beginning hold."""
    known = 0
    for block in request.blocks:
        if block not in cache:
            break
        known += 1
    return min(known * BLOCK_TOKENS, request.input_tokens - 1)


def ideal_hit_rate(requests: Iterable[Request]) -> float:
    """Of one instance with endless memory and speed."""
    cache: set[int] = set()
    hits = tokens = 0
    for request in requests:
        hits += cached_tokens(request, cache)
        tokens += request.input_tokens
        cache.update(request.blocks)
    return hits / tokens


class Simulation:
    """One policy, one fleet, one trace."""

    def __init__(self, policy: str, speeds: Sequence[float], limits: SchedulerLimits) -> None:
        self.policy = policy
        self.scheduler = Scheduler(limits, POLICIES[policy](0))
        self.engines = {
            InstanceName(f"i{n}"): Engine(InstanceName(f"i{n}"), speed)
            for n, speed in enumerate(speeds)
        }
        self._hasher = PrefixHasher(b"bench")
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._requests: dict[TicketId, Request] = {}
        self.ttfts: list[float] = []

    def run(self, requests: Sequence[Request]) -> Replay:
        for engine in self.engines.values():
            self._report(engine, 0.0)
            self.scheduler.instances.credit(engine.name, 256, 64_000_000, 0.0)
        for number, request in enumerate(requests):
            self._at(request.at_s, partial(self._arrive, number, request))
        last_s = requests[-1].at_s
        for tick in range(1, int(last_s / REPORT_EVERY_S) + 1):
            self._at(tick * REPORT_EVERY_S, self._report_all)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            for effect in self.scheduler.turn(now):
                assert isinstance(effect, Dispatch), effect
                self._start(effect, now)
        assert len(self.ttfts) == len(requests)
        return self._result()

    def _result(self) -> Replay:
        engines = list(self.engines.values())
        work = [e.read_s + e.outputs * STEP_S / 256 / e.speed for e in engines]
        tokens = [e.tokens + e.outputs for e in engines]
        hits = sum(engine.hits for engine in engines)
        expected = self.scheduler.snapshot().prefix_tokens_expected
        return Replay(
            policy=self.policy,
            hit_rate=hits / sum(engine.tokens for engine in engines),
            max_over_mean=max(work) / (sum(work) / len(work)),
            tokens_max_over_mean=max(tokens) / (sum(tokens) / len(tokens)),
            ttft_p50_s=float(np.percentile(self.ttfts, 50)),
            ttft_p99_s=float(np.percentile(self.ttfts, 99)),
            expected_over_found=expected / hits if hits else 0.0,
        )

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, number: int, request: Request, now: float) -> None:
        data = np.array(request.blocks, dtype=np.uint64).tobytes()
        hashes = self._hasher.hashes(data, 8, ["trace"])
        ticket = Ticket(
            id=TicketId(number),
            request_id=str(number),
            tenant="trace",
            model="m",
            priority_class=PriorityClass.STANDARD,
            arrival_s=now,
            deadline_s=now + 1e6,
            first_token_limit_s=now + 1e6,
            prompt_tokens=request.input_tokens,
            output_tokens=self.scheduler.expected_output_tokens("trace", "m", None),
            size_bytes=4 * request.input_tokens,
            prefix=Prefix(hashes, request.input_tokens / BLOCK_TOKENS),
        )
        self._requests[ticket.id] = request
        refusal = self.scheduler.submit(ticket, now)
        assert refusal is None, refusal

    def _start(self, effect: Dispatch, now: float) -> None:
        engine, ticket = self.engines[effect.instance], effect.ticket
        request = self._requests.pop(ticket.id)
        cached = cached_tokens(request, engine.cache)
        engine.cache.update(request.blocks)
        engine.hits += cached
        engine.tokens += request.input_tokens
        engine.outputs += request.output_tokens
        engine.running += 1
        read_s = (request.input_tokens - cached) / (PREFILL_TOKENS_PER_S * engine.speed)
        engine.read_s += read_s
        engine.free_at_s = max(now, engine.free_at_s) + read_s
        self.ttfts.append(engine.free_at_s - ticket.arrival_s)
        self.scheduler.attempts.accepted(
            ticket.id, effect.attempt, request.input_tokens, cached, now
        )

        def first(at: float) -> None:
            self.scheduler.attempts.first_token(ticket.id, effect.attempt, at)
            engine.read += request.input_tokens - cached
            self._at(at + request.output_tokens * STEP_S / engine.speed, end)

        def end(at: float) -> None:
            engine.running -= 1
            self.scheduler.attempts.ended(
                ticket.id, effect.attempt, at, output_tokens=request.output_tokens
            )

        self._at(engine.free_at_s, first)

    def _report_all(self, now: float) -> None:
        for engine in self.engines.values():
            self._report(engine, now)

    def _report(self, engine: Engine, now: float) -> None:
        self.scheduler.instances.report(
            InstanceReport(
                name=engine.name,
                model="m",
                fingerprint="f",
                serving=True,
                draining=False,
                sequences_max=256,
                kv_tokens=64_000_000,
                context_tokens=1_000_000,
                step_tokens_max=8_192,
                kv_block_tokens=BLOCK_TOKENS,
                generates=True,
                embeds=False,
                simulated=True,
                running=engine.running,
                waiting=0,
                prompt_tokens_per_s=PREFILL_TOKENS_PER_S * engine.speed,
                step_ms=STEP_S * 1_000.0 / engine.speed,
            ),
            now,
        )


def replay(
    policy: str, requests: Sequence[Request], speeds: Sequence[float], **changes: object
) -> Replay:
    """Runs a trace; the limits are the defaults but for ``changes``."""
    limits = SchedulerLimits(instances_max=max(8, len(speeds)), **changes)  # type: ignore[arg-type]
    return Simulation(policy, speeds, limits).run(requests)
