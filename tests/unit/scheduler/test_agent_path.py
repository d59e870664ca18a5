"""Accounting of runs that were not needed, and the events of a task that was answered directly."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_svc.adapters import agent_path
from scheduler_svc.adapters.agent_path import OTHER, TENANTS_MAX, AgentPath, DirectEvents
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.domain.agent_gate import AgentGate, AgentLimits, GateReason, RunSummary
from sluice.errors import SluiceError, invalid
from sluice.scheduler.v1 import generate_pb2, runs_pb2

SUMMARY = RunSummary("t", "m", model_calls=1, tool_calls=0, cost=3.0, direct_cost=1.0)


def a_path() -> tuple[AgentPath, UsageLog]:
    usage = UsageLog("test", cast("Any", SimpleNamespace()), clock=lambda: 7_200.0)
    return AgentPath(AgentGate(AgentLimits()), usage), usage


def test_runs_that_were_not_needed_are_counted_per_tenant_with_their_extra_cost() -> None:
    path, usage = a_path()
    path.run_ended(SUMMARY)
    path.run_ended(replace(SUMMARY, cost=1.5))
    path.run_ended(replace(SUMMARY, tool_calls=1))
    path.run_ended(replace(SUMMARY, tenant="u", model_calls=0))
    assert path.not_needed == {"t": 2, "u": 1}
    assert path.extra_cost == {"t": 2.5, "u": 2.0}
    assert list(path._read_not_needed()) == [(2, {"tenant": "t"}), (1, {"tenant": "u"})]
    sums = usage._sums["t"]["m", 2].record(("m", 2))
    assert sums.agent_not_needed == 2


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    path, _ = a_path()
    for number in range(TENANTS_MAX + 3):
        path.run_ended(replace(SUMMARY, tenant=f"t{number}"))
    assert len(path.not_needed) == TENANTS_MAX + 1
    assert path.not_needed[OTHER] == 3


def test_a_direct_call_keeps_to_the_runs_budget_and_schema() -> None:
    request = runs_pb2.RunAgentRequest(
        task="x", answer_schema_json="{}", model="m", tools=["t"], request_id="r"
    )
    request.budget.tokens_max = 9
    direct = agent_path.direct_request(request)
    assert direct.sampling.max_tokens == 9
    assert direct.sampling.structured_output.json_schema == "{}"
    assert (direct.prompt, direct.model, len(direct.tools)) == ("x", "m", 0)
    request.sampling.max_tokens = 5
    assert agent_path.direct_request(request).sampling.max_tokens == 5
    request.budget.tokens_max = 0
    with pytest.raises(SluiceError, match=r"budget.tokens_max"):
        agent_path.direct_request(request)


def test_only_the_field_that_has_another_name_is_renamed() -> None:
    error = agent_path.in_a_runs_words(invalid("prompt", "is too long"))
    assert (error.fields[0].field, error.message) == ("task", "task: is too long")
    error = agent_path.in_a_runs_words(invalid("sampling.n", "prompt"))
    assert error.message == "sampling.n: prompt"


def test_live_events_repeat_the_last_durable_number() -> None:
    events = DirectEvents(GateReason.SATURATED)
    response = generate_pb2.GenerateResponse
    stream = [
        response(started=generate_pb2.GenerateStarted()),
        response(delta=generate_pb2.GenerateDelta(text="a")),
        response(delta=generate_pb2.GenerateDelta(text="of another output", index=1)),
        response(delta=generate_pb2.GenerateDelta(text="b")),
        response(finished=generate_pb2.GenerateFinished(request_id="r")),
    ]
    seen = [event.event for message in stream for event in events.of(message)]
    assert [event.sequence for event in seen] == [1, 1, 1, 2, 3]
    assert seen[0].queued.gate_reason == "SATURATED"
    assert seen[-1].ended.answer == "ab"
    assert not seen[-1].ended.agent_not_needed
