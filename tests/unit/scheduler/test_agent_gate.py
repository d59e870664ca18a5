"""The agent gate: closed unless asked, allowed, and there is room."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from scheduler_svc.domain.agent_gate import (
    AgentGate,
    AgentLimits,
    AgentMode,
    FleetLoad,
    GateReason,
    Path,
    Verdict,
)
from scheduler_svc.domain.model import Outcome
from sluice.errors import Code, QuotaViolation
from tests.unit.scheduler.scheduling import Bench, a_ticket

IDLE = FleetLoad(0.0, 0.0)
LIMITS = AgentLimits(runs_max=3, utilisation_max=0.9, wait_max_s=2.0)


def judged(
    gate: AgentGate | None = None, mode: AgentMode = AgentMode.REQUIRED, **changes: Any
) -> Verdict:
    values: dict[str, Any] = {
        "load": IDLE,
        "allowed": True,
        "available": True,
    } | changes
    return (gate or AgentGate(LIMITS)).judge(mode, **values)


def test_nobody_who_does_not_ask_takes_the_agent_path() -> None:
    for allowed, available in itertools.product((True, False), repeat=2):
        verdict = judged(mode=AgentMode.DIRECT, allowed=allowed, available=available)
        assert verdict == Verdict(Path.DIRECT, GateReason.NOT_ASKED)


@pytest.mark.parametrize("mode", [AgentMode.REQUIRED, AgentMode.AUTO])
def test_who_asks_and_may_gets_it_while_there_is_room(mode: AgentMode) -> None:
    assert judged(mode=mode) == Verdict(Path.AGENT, GateReason.ALLOWED)
    assert judged(mode=mode, load=FleetLoad(0.9, 2.0)).path is Path.AGENT, "at the limits"


CLOSED: list[tuple[dict[str, Any], GateReason, Code, str]] = [
    ({"allowed": False}, GateReason.NOT_ALLOWED, Code.PERMISSION_DENIED, "AGENT_REFUSED"),
    ({"available": False}, GateReason.NOT_AVAILABLE, Code.UNAVAILABLE, "AGENT_SERVICE_MISSING"),
    (
        {"load": FleetLoad(0.91, 0.0)},
        GateReason.SATURATED,
        Code.RESOURCE_EXHAUSTED,
        "AGENT_REFUSED",
    ),
    (
        {"load": FleetLoad(0.0, 2.1)},
        GateReason.SATURATED,
        Code.RESOURCE_EXHAUSTED,
        "AGENT_REFUSED",
    ),
]


@pytest.mark.parametrize(("changes", "reason", "code", "told"), CLOSED)
def test_a_closed_gate_refuses_with_a_typed_reason_or_answers_directly(
    changes: dict[str, Any], reason: GateReason, code: Code, told: str
) -> None:
    gate = AgentGate(LIMITS)
    assert judged(gate, AgentMode.AUTO, **changes).path is Path.DIRECT
    verdict = judged(gate, **changes)
    assert (verdict.path, verdict.reason) == (Path.REFUSED, reason)
    refusal = gate.refusal(verdict)
    assert (refusal.code, refusal.reason) == (code, told)
    assert refusal.outcome is Outcome.AGENT_REFUSED
    assert (refusal.retry_after_s is not None) == (code is Code.RESOURCE_EXHAUSTED)
    if told == "AGENT_REFUSED":
        assert refusal.metadata["gate_reason"] == reason.value


def test_the_right_is_checked_before_anything_that_tells_of_others() -> None:
    closed: dict[str, Any] = {"available": False, "load": FleetLoad(1.0, 9.0)}
    assert judged(allowed=False, **closed).reason is GateReason.NOT_ALLOWED
    assert judged(**closed).reason is GateReason.NOT_AVAILABLE


def test_one_run_too_many_is_refused_with_the_tenants_limit_or_answered_directly() -> None:
    gate = AgentGate(LIMITS)
    assert (gate.runs_max(None), gate.runs_max(7), gate.runs_max(0)) == (3, 7, 0)
    assert gate.too_many(AgentMode.AUTO, "t", 7).path is Path.DIRECT
    verdict = gate.too_many(AgentMode.REQUIRED, "t", 7)
    assert (verdict.path, verdict.reason) == (Path.REFUSED, GateReason.TOO_MANY_RUNS)
    refusal = gate.refusal(verdict)
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "AGENT_REFUSED")
    assert refusal.quotas == (
        QuotaViolation("tenant:t", "limit of agent runs at once", "concurrent_runs", 7),
    )


def test_the_fleets_load_is_that_of_the_models_instances() -> None:
    bench = Bench("a", report={"sequences_max": 2})
    assert bench.scheduler.load_of("m") == FleetLoad(0.0, 0.0)
    bench.dispatch(a_ticket())
    assert bench.scheduler.load_of("m").utilisation == 0.5
    tickets = [a_ticket() for _ in range(3)]
    bench.submit(*tickets)
    bench.turn()
    assert bench.scheduler.load_of("m").utilisation == 1.0
    assert bench.scheduler.load_of("unknown").utilisation == 1.0
    first = next(ticket for ticket in tickets if ticket.attempt)
    bench.now = 4.0
    bench.scheduler.attempts.ended(first.id, 1, bench.now, output_tokens=5)
    assert bench.scheduler.load_of("m").wait_s > 0


@pytest.mark.parametrize(("wait_s", "least", "most"), [(0.0, 4, 6), (20.0, 16, 24), (1e9, 48, 72)])
def test_the_delay_of_a_busy_gate_follows_the_queue_and_is_spread(
    wait_s: float, least: float, most: float
) -> None:
    gate = AgentGate(LIMITS)
    verdict = judged(gate, load=FleetLoad(1.0, wait_s))
    delays = [gate.refusal(verdict).retry_after_s for _ in range(50)]
    assert all(delay is not None and least <= delay <= most for delay in delays)
    assert len(set(delays)) == 50
