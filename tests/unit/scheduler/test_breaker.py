"""The breaker, by example and against a plain list of everything that happened."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.domain.breaker import (
    BUCKETS,
    Breaker,
    BreakerState,
    FirstTokenPace,
    Verdict,
    verdict_of_end,
    verdict_of_failure,
)
from scheduler_svc.domain.limits import BreakerLimits
from scheduler_svc.domain.model import FaultKind, Outcome, WorkKind
from tests.unit.scheduler.scheduling import SEARCH

LIMITS = BreakerLimits(
    faults_max=3, volume_min=4, window_s=10.0, cooldown_s=2.0, cooldown_max_s=6.0, probes_max=2
)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def fault(breaker: Breaker, now: float) -> None:
    breaker.end(breaker.begin(), Verdict.FAULT, False, now)


def success(breaker: Breaker, now: float) -> None:
    generation = breaker.begin()
    breaker.first_token(generation, False, True, now)
    breaker.end(generation, Verdict.SUCCESS, True, now)


def opened(now: float = 0.0, limits: BreakerLimits = LIMITS) -> Breaker:
    breaker = Breaker(limits)
    for part in range(limits.faults_max):
        fault(breaker, now + part * 1e-6)
    assert breaker.state is OPEN
    return breaker


def test_faults_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(replace(LIMITS, volume_min=100))
    for now in range(2):
        fault(breaker, now)
    success(breaker, 2.0)
    for now in range(3, 5):
        fault(breaker, now)
    assert breaker.state is CLOSED
    fault(breaker, 5.0)
    assert breaker.state is OPEN
    assert breaker.probes_free == 0


def test_all_that_one_broken_stream_ends_is_one_fault_in_the_row() -> None:
    breaker = Breaker(replace(LIMITS, volume_min=100))
    running = [breaker.begin() for _ in range(20)]
    for generation in running:
        breaker.end(generation, Verdict.FAULT, True, 1.0)
    assert breaker.state is CLOSED


def test_a_share_of_faults_opens_it_only_from_the_least_volume_on() -> None:
    breaker = Breaker(replace(LIMITS, faults_max=100))
    success(breaker, 0.0)
    fault(breaker, 0.1)
    fault(breaker, 0.2)
    assert breaker.state is CLOSED
    success(breaker, 0.3)
    fault(breaker, 0.4)
    assert breaker.state is OPEN


def test_client_errors_count_as_neither() -> None:
    """20 client errors between faults: it stays closed on them alone, and opens all the same."""
    breaker = Breaker(LIMITS)
    for now in range(20):
        breaker.end(breaker.begin(), Verdict.NEUTRAL, False, now)
    assert breaker.state is CLOSED
    for now in range(20, 23):
        assert breaker.state is CLOSED
        breaker.end(breaker.begin(), Verdict.NEUTRAL, False, now)
        fault(breaker, now)
    assert breaker.state is OPEN


def test_a_neutral_probe_gives_its_place_back_and_says_nothing() -> None:
    breaker = opened()
    breaker.look(2.1)
    assert (breaker.state, breaker.probes_free) == (HALF_OPEN, 2)
    for _ in range(5):
        generation = breaker.begin()
        assert breaker.probes_free == 1
        breaker.end(generation, Verdict.NEUTRAL, False, 2.2)
        assert (breaker.state, breaker.probes_free) == (HALF_OPEN, 2)


def test_the_first_tokens_of_probes_close_it() -> None:
    breaker = opened()
    breaker.look(2.1)
    first, second = breaker.begin(), breaker.begin()
    assert breaker.probes_free == 0
    breaker.first_token(first, False, True, 2.2)
    assert (breaker.state, breaker.probes_free) == (HALF_OPEN, 1)
    breaker.end(first, Verdict.SUCCESS, True, 2.3)
    assert breaker.probes_free == 1
    breaker.first_token(second, False, True, 2.4)
    assert breaker.state is CLOSED
    assert breaker.probes_free is None


def test_probes_that_have_no_first_token_close_it_by_their_ends() -> None:
    breaker = opened()
    breaker.look(2.1)
    for _ in range(2):
        breaker.end(breaker.begin(), Verdict.SUCCESS, False, 2.2)
    assert breaker.state is CLOSED


def test_a_probe_that_fails_after_its_first_token_opens_it_again() -> None:
    breaker = opened()
    breaker.look(2.1)
    generation = breaker.begin()
    breaker.first_token(generation, False, True, 2.2)
    breaker.end(generation, Verdict.FAULT, True, 2.3)
    assert breaker.state is OPEN


def test_the_cool_down_grows_to_its_bound_and_starts_anew_after_a_calm_window() -> None:
    breaker = opened()
    now, spans = 0.0, []
    for _ in range(4):
        spans.append(breaker.until_s - now)
        now = breaker.until_s
        assert breaker.look(now)
        fault(breaker, now)
    assert spans == pytest.approx([2.0, 4.0, 6.0, 6.0], abs=1e-5)
    now = breaker.until_s
    breaker.look(now)
    success(breaker, now)
    success(breaker, now)
    assert breaker.state is CLOSED
    now += LIMITS.window_s
    for part in range(3):
        fault(breaker, now + part)
    assert breaker.until_s - (now + 2) == pytest.approx(2.0)


def test_outcomes_from_before_it_opened_are_void() -> None:
    breaker = Breaker(LIMITS)
    old = [breaker.begin() for _ in range(3)]
    for now in range(3):
        fault(breaker, now)
    breaker.look(breaker.until_s)
    for generation in old:
        breaker.first_token(generation, False, True, 9.0)
        breaker.end(generation, Verdict.SUCCESS, True, 9.0)
    assert (breaker.state, breaker.probes_free) == (HALF_OPEN, 2)


def test_an_instance_that_is_back_has_to_prove_itself_at_once() -> None:
    breaker = opened()
    breaker.revive()
    assert (breaker.state, breaker.probes_free) == (HALF_OPEN, 2)
    closed = Breaker(LIMITS)
    fault(closed, 0.0)
    fault(closed, 1.0)
    closed.revive()
    fault(closed, 2.0)
    assert closed.state is CLOSED


def test_slow_first_tokens_open_it_while_others_have_its_work() -> None:
    for spare, state in ((True, OPEN), (False, CLOSED)):
        breaker = Breaker(LIMITS)
        for now in range(4):
            breaker.first_token(breaker.begin(), True, spare, now)
        assert breaker.state is state


def test_the_norm_of_first_tokens_is_the_median_and_has_a_floor() -> None:
    line = ("m", WorkKind.GENERATE)
    pace = FirstTokenPace(BreakerLimits(slow_floor_s=1.0, slow_multiple=4.0), lines_max=2)
    assert pace.limit_s(line, 0.1) == 1.0
    assert pace.limit_s(line, 1.0) == 4.0
    for number in range(300):  # a third is 100 times slower than the rest
        pace.saw(line, 1.0, 50.0 if number % 3 == 0 else 0.5)
    assert pace.limit_s(line, 1.0) < 4.0 * 2.0
    for model in "abc":
        pace.saw((model, WorkKind.GENERATE), 1.0, 9.0)
    assert pace.limit_s(line, 1.0) == 4.0


def test_what_a_client_can_bring_about_is_neutral() -> None:
    faults = {Outcome.INTER_TOKEN_TIMEOUT, Outcome.INSTANCE_FAILED}
    for outcome in Outcome:
        want = Verdict.FAULT if outcome in faults else Verdict.NEUTRAL
        assert verdict_of_end(outcome) is (Verdict.SUCCESS if outcome.name == "FINISHED" else want)
    neutral = {FaultKind.LOST_RELAY, FaultKind.GOING_DOWN, FaultKind.FINGERPRINT}
    for kind in FaultKind:
        assert (verdict_of_failure(kind) is Verdict.NEUTRAL) == (kind in neutral)


# --- against a plain list -------------------------------------------------------------------------


@dataclass
class Reference:
    """Everything that happened since the last change of state, and the rules read off the text."""

    limits: BreakerLimits
    state: BreakerState = CLOSED
    life: int = 0  # changes with every change of state
    until: float = 0.0
    level: int = 0
    closed_at: float = float("-inf")
    events: list[tuple[float, str]] = field(default_factory=list)
    out: set[int] = field(default_factory=set)  # probes without a first token
    won: int = 0

    def go(self, state: BreakerState) -> None:
        self.state, self.life, self.events, self.won = state, self.life + 1, [], 0
        self.out = set()

    def window(self, now: float, *kinds: str) -> int:
        span = self.limits.window_s / BUCKETS
        first = int(now / span) - BUCKETS + 1
        return sum(kind in kinds and int(at / span) >= first for at, kind in self.events)

    def bar(self, now: float) -> None:
        if self.state is CLOSED and now - self.closed_at >= self.limits.window_s:
            self.level = 0
        self.until = now + min(self.limits.cooldown_max_s, self.limits.cooldown_s * 2**self.level)
        self.level += 1
        self.go(OPEN)

    def win(self, now: float) -> None:
        self.won += 1
        if self.won == self.limits.closes_after:
            self.closed_at = now
            self.go(CLOSED)

    def judge(self, now: float) -> None:
        """Whether a closed one must open now."""
        row: set[float] = set()
        for at, kind in reversed([e for e in self.events if e[1] in ("fault", "success")]):
            if kind == "success":
                break
            row.add(at)
        faults = self.window(now, "fault")
        total = self.window(now, "fault", "success")
        if len(row) >= self.limits.faults_max or (
            total >= self.limits.volume_min and faults >= self.limits.error_ratio * total
        ):
            self.bar(now)


@dataclass
class Try:
    """An attempt, and the life of the reference in which it began."""

    number: int
    generation: int
    life: int
    first_token: bool = False


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "first", "slow", "fault", "fault", "success", "neutral"])
        | st.sampled_from(["wait", "revive"]),
        st.integers(0, 5),
        st.sampled_from([0.0, 0.0, 0.4, 1.5, 3.0]),
    ),
    max_size=120,
)


@SEARCH
@given(steps=STEPS)
def test_the_breaker_agrees_with_a_plain_list(steps: list[tuple[str, int, float]]) -> None:
    breaker, reference = Breaker(LIMITS), Reference(LIMITS)
    tries: list[Try] = []
    now = 0.0
    for number, (step, which, later) in enumerate(steps):
        now += later
        breaker.look(now)
        if reference.state is OPEN and now >= reference.until:
            reference.go(HALF_OPEN)
        if step == "revive":
            breaker.revive()
            reference.go(CLOSED if reference.state is CLOSED else HALF_OPEN)
            if reference.state is CLOSED:  # attempts stay those of this life
                reference.life -= 1
        elif step == "begin":
            _begin(breaker, reference, tries, number)
        elif tries and step != "wait":
            _event(breaker, reference, tries, step, which, now)
        assert breaker.state is reference.state
        free = {CLOSED: None, OPEN: 0, HALF_OPEN: LIMITS.probes_max - len(reference.out)}
        assert breaker.probes_free == free[reference.state]
        if reference.state is OPEN:
            assert breaker.until_s == pytest.approx(reference.until)


def _begin(breaker: Breaker, reference: Reference, tries: list[Try], number: int) -> None:
    if breaker.probes_free == 0:
        return
    tries.append(Try(number, breaker.begin(), reference.life))
    if reference.state is HALF_OPEN:
        reference.out.add(number)


def _event(
    breaker: Breaker, reference: Reference, tries: list[Try], step: str, which: int, now: float
) -> None:
    one = tries[which % len(tries)]
    # A closed breaker also hears of the probes that closed it.
    current = reference.state is not OPEN and (
        one.life == reference.life
        or (
            (reference.state is CLOSED and reference.closed_at > float("-inf"))
            and one.life == reference.life - 1
        )
    )
    if step in ("first", "slow"):
        if one.first_token:
            return
        one.first_token = True
        breaker.first_token(one.generation, step == "slow", True, now)
        if not current:
            return
        if reference.state is HALF_OPEN:
            reference.out.discard(one.number)
            if step == "slow":
                reference.bar(now)
            else:
                reference.win(now)
            return
        reference.events.append((now, step))
        slow, total = reference.window(now, "slow"), reference.window(now, "slow", "first")
        if step == "slow" and total >= LIMITS.volume_min and slow >= LIMITS.slow_ratio * total:
            reference.bar(now)
        return
    tries.remove(one)
    breaker.end(one.generation, Verdict(step), one.first_token, now)
    if not current:
        return
    if reference.state is HALF_OPEN:
        reference.out.discard(one.number)
        if step == "fault":
            reference.bar(now)
        elif step == "success" and not one.first_token:
            reference.win(now)
    elif step != "neutral":
        reference.events.append((now, step))
        if step == "fault":
            reference.judge(now)
