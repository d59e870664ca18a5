"""Circuit breakers: which instance takes nothing more for a while because it fails.

Owns one :class:`Breaker` per instance and the pace of first tokens that calls are slow against.
An attempt has one of three outcomes. FAULT and SUCCESS count; NEUTRAL (a client's error or cancel,
a refusal for want of room, a drain, a deadline) counts as neither, or one bad client could close
the fleet, and a client's error could pass for the health of an instance.

CLOSED -> OPEN: ``faults_max`` faults in a row, or in a sliding window of at least ``volume_min``
outcomes a share of ``error_ratio`` faults or ``slow_ratio`` slow first tokens. (Several faults at
one moment are one for the row: a broken stream ends all that ran over it at once.)
OPEN -> HALF_OPEN: after a cool-down that doubles with every opening, or when the instance comes
back with a new engine. HALF_OPEN: ``probes_max`` attempts at a time. ``closes_after`` of them with
a first token close it (to wait for the ends of long outputs would keep it out for minutes); one
fault opens it; a neutral one gives its place back and says nothing.

Slow alone bars an instance only while others have its work: if all are slow, that is load.
Counts per window and half-open probes as in resilience4j; the generation that makes outcomes from
before a change of state void is that of sony/gobreaker.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from math import inf
from typing import Final

from scheduler_svc.domain.limits import BreakerLimits
from scheduler_svc.domain.model import FaultKind, Line, Outcome

BUCKETS: Final = 10  # of the window: outcomes leave it in tenths
PACE_STEP: Final = 1.1  # the median moves by this factor per call


class Verdict(Enum):
    """What an attempt says of its instance."""

    FAULT = "fault"
    NEUTRAL = "neutral"
    SUCCESS = "success"


class BreakerState(Enum):
    """Names as in ``sluice.scheduler.v1.InstanceStatus.breaker``."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_NEUTRAL_KINDS: Final = frozenset(
    (FaultKind.LOST_RELAY, FaultKind.GOING_DOWN, FaultKind.FINGERPRINT)
)
_FAULT_ENDS: Final = frozenset((Outcome.INTER_TOKEN_TIMEOUT, Outcome.INSTANCE_FAILED))


def verdict_of_failure(kind: FaultKind) -> Verdict:
    """A failed attempt: a fault, unless the instance had no part in it or stops in order."""
    return Verdict.NEUTRAL if kind in _NEUTRAL_KINDS else Verdict.FAULT


def verdict_of_end(outcome: Outcome) -> Verdict:
    """An attempt that ended or was aborted. Everything that a client can bring about is neutral."""
    if outcome is Outcome.FINISHED:
        return Verdict.SUCCESS
    return Verdict.FAULT if outcome in _FAULT_ENDS else Verdict.NEUTRAL


class Window:
    """Counts of the last ``BUCKETS`` spans of ``span_s``, the present one included. O(1)."""

    __slots__ = ("_faults", "_firsts", "_slow", "_span", "_span_s", "_total")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self.clear()

    def clear(self) -> None:
        self._span = 0
        self._total = [0] * BUCKETS
        self._faults = [0] * BUCKETS
        self._firsts = [0] * BUCKETS
        self._slow = [0] * BUCKETS

    def outcome(self, fault: bool, now: float) -> None:
        bucket = self._bucket(now)
        self._total[bucket] += 1
        self._faults[bucket] += fault

    def first_token(self, slow: bool, now: float) -> None:
        bucket = self._bucket(now)
        self._firsts[bucket] += 1
        self._slow[bucket] += slow

    def faults(self) -> tuple[int, int]:
        """Faults and all outcomes that count, as of the last one."""
        return sum(self._faults), sum(self._total)

    def slow(self) -> tuple[int, int]:
        """Slow first tokens and all of them, as of the last one."""
        return sum(self._slow), sum(self._firsts)

    def _bucket(self, now: float) -> int:
        span = int(now / self._span_s)
        for stale in range(max(self._span + 1, span - BUCKETS + 1), span + 1):
            bucket = stale % BUCKETS
            self._total[bucket] = self._faults[bucket] = 0
            self._firsts[bucket] = self._slow[bucket] = 0
        self._span = max(self._span, span)
        return self._span % BUCKETS


class Breaker:
    """Of one instance; see the module's text. O(1); ``now`` never goes back."""

    __slots__ = (
        *("_closed_s", "_grown_from", "_last_fault_s", "_level", "_limits", "_probes"),
        *("_row_of_faults", "_successes", "_window", "generation", "opened", "state"),
        "until_s",
    )

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._window = Window(limits.window_s / BUCKETS)
        self.state = BreakerState.CLOSED
        self.generation = 0
        self.until_s = inf  # when the cool-down ends, while OPEN
        self.opened = 0  # times that it opened
        self._grown_from = -1  # the HALF_OPEN generation that this CLOSED one came from
        self._closed_s = -inf
        self._level = 0
        self._row_of_faults = 0
        self._last_fault_s = -inf
        self._probes = self._successes = 0

    @property
    def probes_free(self) -> int | None:
        """Attempts that may start; ``None``: as many as there is room for."""
        if self.state is BreakerState.CLOSED:
            return None
        free = self._limits.probes_max - self._probes
        return free if self.state is BreakerState.HALF_OPEN else 0

    def look(self, now: float) -> bool:
        """Lets time pass; whether the state changed."""
        if now < self.until_s:
            return False
        self._half_open()
        return True

    def revive(self) -> None:
        """The instance is back with another engine, or answers again: what was seen is void. One
        that was barred has to prove itself, at once."""
        if self.state is BreakerState.CLOSED:
            self._forget()
        else:
            self._half_open()

    def begin(self) -> int:
        """An attempt starts; returns the generation to hand in with what becomes of it."""
        assert self.state is not BreakerState.OPEN, "an open breaker was dispatched to"
        if self.state is BreakerState.HALF_OPEN:
            self._probes += 1
        return self.generation

    def first_token(self, generation: int, slow: bool, spare: bool, now: float) -> None:
        """``spare``: whether the others could do without this instance; needed where ``slow``."""
        if not self._is_current(generation):
            return
        slow = slow and spare
        if self.state is BreakerState.HALF_OPEN:
            self._probes -= 1
            if slow:
                self._open(now)
            else:
                self._succeeded(now)
            return
        self._window.first_token(slow, now)
        if slow:
            count, total = self._window.slow()
            if total >= self._limits.volume_min and count >= self._limits.slow_ratio * total:
                self._open(now)

    def end(self, generation: int, verdict: Verdict, first_token: bool, now: float) -> None:
        """The attempt is over. ``first_token``: whether it had one."""
        if not self._is_current(generation):
            return
        if self.state is BreakerState.HALF_OPEN:
            self._probes -= not first_token
            if verdict is Verdict.FAULT:
                self._open(now)
            elif verdict is Verdict.SUCCESS and not first_token:
                self._succeeded(now)
        elif verdict is Verdict.SUCCESS:
            self._row_of_faults = 0
            self._window.outcome(False, now)
        elif verdict is Verdict.FAULT:
            self._fault(now)

    def _fault(self, now: float) -> None:
        self._row_of_faults += now > self._last_fault_s
        self._last_fault_s = now
        self._window.outcome(True, now)
        faults, total = self._window.faults()
        limits = self._limits
        enough = total >= limits.volume_min and faults >= limits.error_ratio * total
        if enough or self._row_of_faults >= limits.faults_max:
            self._open(now)

    def _is_current(self, generation: int) -> bool:
        if self.state is BreakerState.OPEN:
            return False
        return generation in (self.generation, self._grown_from)

    def _succeeded(self, now: float) -> None:
        self._successes += 1
        if self._successes >= self._limits.closes_after:
            self._grown_from = self.generation
            self.generation += 1
            self.state = BreakerState.CLOSED
            self._closed_s = now
            self._forget()

    def _open(self, now: float) -> None:
        limits = self._limits
        if self.state is BreakerState.CLOSED and now - self._closed_s >= limits.window_s:
            self._level = 0
        self.until_s = now + min(limits.cooldown_max_s, limits.cooldown_s * 2.0**self._level)
        self._level = min(self._level + 1, 32)
        self.state = BreakerState.OPEN
        self.generation += 1
        self._grown_from = -1
        self.opened += 1

    def _half_open(self) -> None:
        self.state = BreakerState.HALF_OPEN
        self.generation += 1
        self._grown_from = -1
        self.until_s = inf
        self._probes = self._successes = 0

    def _forget(self) -> None:
        self._window.clear()
        self._row_of_faults = 0
        self._last_fault_s = -inf


class FirstTokenPace:
    """How first tokens come compared with what the ledger lets expect, by line: the median of the
    ratio, found by small steps, so that a minority of slow instances cannot make itself the norm.
    At most ``lines_max`` lines, least recently used first out."""

    def __init__(self, limits: BreakerLimits, lines_max: int) -> None:
        self._limits = limits
        self._lines_max = lines_max
        self._ratios: OrderedDict[Line, float] = OrderedDict()

    def limit_s(self, line: Line, expected_s: float) -> float:
        """A first token that takes longer than this is slow."""
        ratio = self._ratios.get(line, 1.0)
        return max(self._limits.slow_floor_s, self._limits.slow_multiple * ratio * expected_s)

    def saw(self, line: Line, expected_s: float, took_s: float) -> None:
        """A first token came."""
        if expected_s <= 0.0:
            return
        sample = took_s / expected_s
        ratio = self._ratios.get(line)
        if ratio is None:
            self._ratios[line] = max(1.0, sample)
            if len(self._ratios) > self._lines_max:
                self._ratios.popitem(last=False)
            return
        self._ratios[line] = ratio * PACE_STEP if sample > ratio else ratio / PACE_STEP
        self._ratios.move_to_end(line)
