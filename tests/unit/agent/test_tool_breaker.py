"""A tool that fails again and again rests, and comes back by a probe."""

from __future__ import annotations

from agent_svc.domain.tool_breaker import (
    COOLDOWN_MAX_S,
    COOLDOWN_S,
    FAULTS_MAX,
    Pass,
    ToolBreaker,
    ToolBreakers,
    Verdict,
)


def fail(breaker: ToolBreaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.end(breaker.begin(now), Verdict.FAULT, now)


def test_faults_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = ToolBreaker()
    fail(breaker, FAULTS_MAX - 1)
    breaker.end(breaker.begin(0.0), Verdict.SUCCESS, 0.0)
    fail(breaker, FAULTS_MAX - 1)
    assert breaker.begin(0.0) is Pass.NORMAL
    breaker.end(Pass.NORMAL, Verdict.FAULT, 0.0)
    assert breaker.begin(COOLDOWN_S - 0.1) is Pass.REFUSED


def test_what_a_caller_brings_about_says_nothing() -> None:
    breaker = ToolBreaker()
    for _ in range(100):
        breaker.end(breaker.begin(0.0), Verdict.NEUTRAL, 0.0)
    assert breaker.is_closed


def test_one_probe_at_a_time_closes_it_or_opens_it_for_longer() -> None:
    breaker = ToolBreaker()
    fail(breaker, FAULTS_MAX)
    now = COOLDOWN_S
    assert breaker.begin(now) is Pass.PROBE
    assert breaker.begin(now) is Pass.REFUSED
    breaker.end(Pass.PROBE, Verdict.FAULT, now)
    assert breaker.begin(now + 2 * COOLDOWN_S - 0.1) is Pass.REFUSED
    now += 2 * COOLDOWN_S
    assert breaker.begin(now) is Pass.PROBE
    breaker.end(Pass.PROBE, Verdict.NEUTRAL, now)  # cancelled: the place is free again
    assert breaker.begin(now) is Pass.PROBE
    breaker.end(Pass.PROBE, Verdict.SUCCESS, now)
    assert breaker.is_closed and breaker.opened == 2
    fail(breaker, FAULTS_MAX, now)
    assert breaker.begin(now + COOLDOWN_S) is Pass.PROBE  # it starts over with the short one


def test_the_cool_down_has_an_end_however_often_it_opens() -> None:
    breaker, now = ToolBreaker(), 0.0
    fail(breaker, FAULTS_MAX)
    for _ in range(100):
        now += COOLDOWN_MAX_S
        breaker.end(breaker.begin(now), Verdict.FAULT, now)
    assert breaker.begin(now + COOLDOWN_MAX_S) is Pass.PROBE


def test_calls_from_before_it_opened_change_nothing() -> None:
    breaker = ToolBreaker()
    early = breaker.begin(0.0)
    fail(breaker, FAULTS_MAX)
    assert breaker.begin(COOLDOWN_S) is Pass.PROBE
    breaker.end(early, Verdict.SUCCESS, COOLDOWN_S)
    breaker.end(early, Verdict.FAULT, COOLDOWN_S)
    assert breaker.begin(COOLDOWN_S) is Pass.REFUSED  # the probe is still out
    breaker.end(Pass.PROBE, Verdict.SUCCESS, COOLDOWN_S)
    assert breaker.is_closed


def test_the_table_is_bounded_and_tenants_have_their_own() -> None:
    breakers = ToolBreakers(tools_max=3)
    fail(breakers.of("a", "t"), FAULTS_MAX)
    assert breakers.of("b", "t").is_closed
    for number in range(10):
        breakers.of("b", f"t{number}")
    assert len(breakers) == 3
    assert breakers.opened == 1
    assert breakers.of("a", "t").is_closed  # forgotten
