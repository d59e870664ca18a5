"""The event loop: arrivals, the real scheduler, engine models, one virtual clock.

Owns the clock and nothing of policy: :class:`scheduler_svc.domain.scheduler.Scheduler` decides, as
it does in the service. Events are arrivals, ends of engine stretches, reports of instances, and
the scheduler's own timers; all events of one time come before one ``turn``. What the mesh adds
(frames, flushes, a few milliseconds) is left out. Single-threaded; the same options, arrivals and
seed give the same :attr:`Recorder.event_hash`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from random import Random

import numpy as np

from scheduler_svc.config import ClassTimes, SchedulerConfig, class_times
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    Abort,
    Dispatch,
    InstanceName,
    InstanceReport,
    Outcome,
    Prefix,
    PriorityClass,
    Refuse,
    Ticket,
    TicketId,
    TicketState,
)
from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.domain.scheduler import Scheduler
from scheduler_svc.simulation import engine_model
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.engine_model import EngineModel
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.record import SLOS, Recorder, Slo

MODEL = "simulated"
SAMPLE_S = 1.0
DEFAULT_POLICY = "weighted"  # as in the service
_MIX = 0x9E3779B97F4A7C15  # spreads small ids over 64 bits (Knuth)
# The scheduler sees bytes and estimates tokens: bytes per token of a prompt vary so much.
BYTES_PER_TOKEN = (3.0, 5.0)


@dataclass(frozen=True, slots=True)
class Options:
    """A simulation but for its arrivals. ``fleet``: kinds and how many instances of each.
    ``policy``: of ``placement.POLICIES``. ``progress``: instances also report each request's
    progress with their load, as deltas do in the service; without it the ledger learns of output
    only at its end. ``prefix_block_tokens``: of the arrivals' prefixes; 0: no prefix caches."""

    fleet: Sequence[tuple[GpuKind, int]]
    seed: int = 0
    policy: str = DEFAULT_POLICY
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    times: ClassTimes = field(default_factory=lambda: class_times(SchedulerConfig()))
    slos: Mapping[PriorityClass, Slo] = field(default_factory=lambda: SLOS)
    report_interval_s: float = 1.0
    progress: bool = True
    prefix_block_tokens: int = 0


@dataclass(slots=True)
class Live:
    """A request that is not over."""

    arrival: Arrival
    ticket: Ticket
    sequence: engine_model.Sequence
    engine: int = -1
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineUse:
    """One instance while requests arrived. ``busy``: share of time in which it made steps;
    ``filled``: mean share of its batch that ran."""

    kind: str
    busy: float
    filled: float
    preemptions: int
    hit_tokens: int
    looked_tokens: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A finished simulation. ``load_s``: when the last request came; ``duration_s``: when the last
    one ended."""

    options: Options
    recorder: Recorder
    load_s: float
    duration_s: float
    uses: list[EngineUse]


class Simulation:
    """One run; use it once."""

    def __init__(self, options: Options) -> None:
        kinds = [kind for kind, count in options.fleet for _ in range(count)]
        if not kinds:
            raise ValueError("a fleet needs at least one instance")
        limits = options.limits
        if len(kinds) > limits.instances_max:
            limits = replace(limits, instances_max=len(kinds))
        if options.prefix_block_tokens:
            # So that the index counts in the blocks that it is given.
            limits = replace(limits, prefix_block_tokens_min=options.prefix_block_tokens)
        policy = POLICIES[options.policy](options.seed)
        self._block_tokens = options.prefix_block_tokens if policy.reads_prefixes else 0
        self._options = options
        self._random = Random(f"{options.seed}/sizes")
        self._scheduler = Scheduler(limits, policy)
        self._engines = [
            EngineModel(kind, prefix_block_tokens=options.prefix_block_tokens) for kind in kinds
        ]
        self._names = [InstanceName(f"{kind.name}-{i}") for i, kind in enumerate(kinds)]
        self._rows = {name: i for i, name in enumerate(self._names)}
        self._identities = [
            _identity(name, kind) for name, kind in zip(self._names, kinds, strict=True)
        ]
        self._live: dict[int, Live] = {}
        self._waiting = [0] * len(PriorityClass)
        self._heap: list[tuple[float, int, int]] = []  # (due, engine, stamp)
        self._wake_s = inf
        self._next_id = 1
        self._reports = 0  # instances report in turn, spread over the interval
        self.recorder = Recorder(options.slos)

    def run(self, arrivals: Iterator[Arrival]) -> Outcomes:
        """Runs until every request that arrived is over."""
        self._open()
        pending = next(arrivals, None)
        now = load_s = 0.0
        next_sample_s = SAMPLE_S
        uses: list[EngineUse] = []
        heap = self._heap
        while pending is not None or self._live:
            now = min(self._wake_s, self._report_due(), next_sample_s)
            if heap and heap[0][0] < now:
                now = heap[0][0]
            if pending is not None and pending.at_s < now:
                now = pending.at_s
            while pending is not None and pending.at_s <= now:
                self._arrive(pending, now)
                load_s = now
                pending = next(arrivals, None)
                if pending is None:
                    uses = self._uses(now)
            while heap and heap[0][0] <= now:
                _, index, stamp = heappop(heap)
                if stamp == self._engines[index].stamp:
                    self._advance(index, now)
            while self._report_due() <= now:
                self._report(self._reports % len(self._engines), now)
                self._reports += 1
            if any(self._waiting) or now >= self._wake_s:
                self._turn(now)
            if now >= next_sample_s:
                self._sample(now)
                next_sample_s += SAMPLE_S
        return Outcomes(self._options, self.recorder, load_s, now, uses)

    def check(self) -> None:
        """Every request ended once, and nothing is held: AssertionError. For tests."""
        self._scheduler.check_invariants()
        snapshot = self._scheduler.snapshot()
        assert not self._live
        assert not any(self._waiting)
        assert snapshot.running == 0
        assert snapshot.submitted == sum(snapshot.outcomes.values()) == self._next_id - 1
        for engine in self._engines:
            assert engine.running == engine.waiting == engine.kv_tokens_used == 0

    # --- events --------------------------------------------------------------------------------

    def _open(self) -> None:
        """Every instance says what it is, and grants all of its room to this one scheduler."""
        for index, engine in enumerate(self._engines):
            self._report(index, 0.0)
            kind = engine.kind
            self._scheduler.instances.credit(
                self._names[index], kind.sequences_max, kind.kv_tokens, 0.0
            )

    def _arrive(self, arrival: Arrival, now: float) -> None:
        scheduler, times = self._scheduler, self._options.times
        number = self._next_id
        self._next_id += 1
        cls = arrival.priority_class
        size_bytes = int(arrival.prompt_tokens * self._random.uniform(*BYTES_PER_TOKEN))
        ticket = Ticket(
            id=TicketId(number),
            request_id="",
            tenant=arrival.tenant,
            model=MODEL,
            priority_class=cls,
            arrival_s=now,
            deadline_s=now + times.deadlines_s[cls],
            first_token_limit_s=now + times.first_tokens_s[cls],
            prompt_tokens=scheduler.expected_prompt_tokens(MODEL, size_bytes),
            output_tokens=scheduler.expected_output_tokens(arrival.tenant, MODEL, None),
            size_bytes=size_bytes,
            prefix=self._prefix(arrival),
        )
        self.recorder.offered(arrival)
        refusal = scheduler.submit(ticket, now)
        if refusal is not None:
            self.recorder.event(b"r", now, number, -1)
            self.recorder.refused(arrival, refusal.outcome, now)
            return
        self._waiting[cls] += 1
        self._live[number] = Live(
            arrival,
            ticket,
            engine_model.Sequence(
                number, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix
            ),
        )

    def _prefix(self, arrival: Arrival) -> Prefix | None:
        """What the scheduler is to see of the beginning of a prompt."""
        if not self._block_tokens or not arrival.prefix:
            return None
        ids = np.array(arrival.prefix, dtype=np.uint64) + np.uint64(1)
        return Prefix(ids * np.uint64(_MIX), arrival.prompt_tokens / self._block_tokens)

    def _advance(self, index: int, now: float) -> None:
        """A stretch of an engine is over."""
        engine = self._engines[index]
        first, over = engine.advance(now)
        self._schedule(index)
        for seq in first:
            live = self._live[seq.key]
            live.first_s = now
            self.recorder.event(b"f", now, seq.key, index)
            self._scheduler.attempts.first_token(live.ticket.id, live.ticket.attempt, now)
        for seq in over:
            live = self._live.pop(seq.key)
            ticket, tokens = live.ticket, seq.output_tokens
            self.recorder.event(b"e", now, seq.key, index)
            self._scheduler.attempts.ended(ticket.id, ticket.attempt, now, output_tokens=tokens)
            unloaded_s = engine.kind.unloaded_tpot_s
            self.recorder.finished(live.arrival, tokens, live.first_s, now, unloaded_s)

    def _turn(self, now: float) -> None:
        self._wake_s = inf
        again = False
        for effect in self._scheduler.turn(now):
            live = self._live[effect.ticket.id]
            if isinstance(effect, Dispatch):
                again |= self._start(live, self._rows[effect.instance], now)
            elif isinstance(effect, Refuse):
                self._waiting[live.arrival.priority_class] -= 1
                self._end(live, effect.outcome, now)
            elif isinstance(effect, Abort):
                engine = self._engines[live.engine]
                stamp = engine.stamp
                engine.abort(live.sequence, now)
                if engine.stamp != stamp:
                    self._schedule(live.engine)
                self._scheduler.attempts.ended(effect.ticket.id, effect.attempt, now)
                self._end(live, effect.reason, now)
                again = True
        # What ended here left room.
        wake_s = now if again else self._scheduler.next_wakeup(now)
        self._wake_s = inf if wake_s is None else wake_s

    def _start(self, live: Live, index: int, now: float) -> bool:
        """Carries a dispatch out; whether it was over at once."""
        engine, seq, ticket = self._engines[index], live.sequence, live.ticket
        self._waiting[live.arrival.priority_class] -= 1
        live.engine = index
        self.recorder.event(b"d", now, seq.key, index)
        if not engine.fits(seq.prompt_tokens):
            self._scheduler.attempts.ended(ticket.id, ticket.attempt, now, Outcome.INVALID)
            self._end(live, Outcome.INVALID, now)
            return True
        stamp = engine.stamp
        engine.start(seq, now)
        if engine.stamp != stamp:
            self._schedule(index)
        cached = engine.cached_tokens(seq)
        self._scheduler.attempts.accepted(ticket.id, ticket.attempt, seq.prompt_tokens, cached, now)
        return False

    def _end(self, live: Live, outcome: Outcome, now: float) -> None:
        assert live.ticket.state is TicketState.ENDED
        del self._live[live.ticket.id]
        self.recorder.event(b"r", now, live.ticket.id, live.engine)
        self.recorder.refused(live.arrival, outcome, now)

    def _schedule(self, index: int) -> None:
        engine = self._engines[index]
        if engine.due_s < inf:
            heappush(self._heap, (engine.due_s, index, engine.stamp))

    # --- reports -------------------------------------------------------------------------------

    def _report_due(self) -> float:
        return (1 + self._reports / len(self._engines)) * self._options.report_interval_s

    def _report(self, index: int, now: float) -> None:
        engine = self._engines[index]
        meter = engine.read_meter(now)
        report = replace(
            self._identities[index],
            running=engine.running,
            waiting=engine.waiting,
            kv_tokens_used=engine.kv_tokens_used,
            prompt_tokens_per_s=meter.prompt_tokens_per_s,
            output_tokens_per_s=meter.output_tokens_per_s,
            step_ms=meter.step_ms,
        )
        self._scheduler.instances.report(report, now)
        if self._options.progress:
            for key, tokens in engine.written(now):
                ticket = self._live[key].ticket
                self._scheduler.attempts.progressed(ticket.id, ticket.attempt, tokens)

    def _sample(self, now: float) -> None:
        second = self.recorder.second(now - SAMPLE_S / 2)
        second.waiting = tuple(self._waiting)
        second.running = len(self._live) - sum(self._waiting)

    def _uses(self, now: float) -> list[EngineUse]:
        uses = []
        for engine in self._engines:
            busy_s = engine.so_far(now)[0]
            cache = engine.cache
            uses.append(
                EngineUse(
                    kind=engine.kind.name,
                    busy=min(1.0, busy_s / now) if now else 0.0,
                    filled=engine.sequence_s / now / engine.kind.sequences_max if now else 0.0,
                    preemptions=engine.preemptions,
                    hit_tokens=cache.hit_tokens if cache else 0,
                    looked_tokens=cache.looked_tokens if cache else 0,
                )
            )
        return uses


def _identity(name: InstanceName, kind: GpuKind) -> InstanceReport:
    """What an instance says of itself, without its load."""
    return InstanceReport(
        name=name,
        model=MODEL,
        fingerprint="",
        serving=True,
        draining=False,
        sequences_max=kind.sequences_max,
        kv_tokens=kind.kv_tokens,
        context_tokens=kind.context_tokens,
        step_tokens_max=kind.step_tokens_max,
        kv_block_tokens=kind.kv_block_tokens,
        generates=True,
        embeds=False,
        simulated=True,
    )
