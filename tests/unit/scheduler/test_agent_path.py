"""What may be answered directly, and the events of a task that was."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.adapters import agent_path
from scheduler_svc.adapters.agent_path import DirectEvents, mode_of
from scheduler_svc.domain.agent_gate import AgentMode, GateReason
from sluice.common.v1 import result_pb2
from sluice.errors import Code, invalid
from sluice.scheduler.v1 import generate_pb2, runs_pb2


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "s"},
        {"background": True},
        {"tools": ["t"], "tool_choice": runs_pb2.TOOL_CHOICE_REQUIRED},
        {"tools": ["t"], "tool_choice": runs_pb2.TOOL_CHOICE_EACH},
    ],
)
def test_what_needs_a_stored_run_or_tools_is_not_answered_directly(fields: dict[str, Any]) -> None:
    auto = runs_pb2.AGENT_MODE_AUTO
    assert mode_of(runs_pb2.RunAgentRequest(mode=auto)) is AgentMode.AUTO
    assert mode_of(runs_pb2.RunAgentRequest(mode=auto, **fields)) is AgentMode.REQUIRED
    assert mode_of(runs_pb2.RunAgentRequest()) is AgentMode.REQUIRED


def test_a_direct_call_keeps_to_the_runs_budget_and_schema() -> None:
    request = runs_pb2.RunAgentRequest(
        task="x", answer_schema_json="{}", model="m", tools=["t"], request_id="r"
    )
    request.budget.tokens_max = 9
    direct = agent_path.direct_request(request)
    assert (direct.sampling.max_tokens, direct.sampling.total_tokens_max) == (9, 9)
    assert direct.sampling.structured_output.json_schema == "{}"
    assert (direct.prompt, direct.model, len(direct.tools)) == ("x", "m", 0)
    request.sampling.max_tokens = 5
    assert agent_path.direct_request(request).sampling.max_tokens == 5
    request.sampling.total_tokens_max = 7
    assert agent_path.direct_request(request).sampling.total_tokens_max == 7


def test_only_the_field_that_has_another_name_is_renamed() -> None:
    error = agent_path.in_a_runs_words(invalid("prompt", "is too long"))
    assert (error.fields[0].field, error.message) == ("task", "task: is too long")
    error = agent_path.in_a_runs_words(invalid("sampling.n", "prompt"))
    assert error.message == "sampling.n: prompt"


def test_a_prompt_that_the_budget_does_not_hold_is_told_as_a_runs_end() -> None:
    error = agent_path.in_a_runs_words(
        invalid("sampling.total_tokens_max", "too few", reason="TOTAL_TOKENS")
    )
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "BUDGET_TOKENS")
    assert error.retry_after_s is None


def test_live_events_repeat_the_last_durable_number() -> None:
    events = DirectEvents(GateReason.SATURATED)
    response, cut = generate_pb2.GenerateResponse, result_pb2.FINISH_REASON_LENGTH
    stream = [
        response(started=generate_pb2.GenerateStarted()),
        response(delta=generate_pb2.GenerateDelta(text="a")),
        response(delta=generate_pb2.GenerateDelta(text="of another output", index=1)),
        response(delta=generate_pb2.GenerateDelta(text="b")),
        response(
            finished=generate_pb2.GenerateFinished(
                request_id="r", outputs=[generate_pb2.OutputFinish(finish_reason=cut)]
            )
        ),
    ]
    seen = [event.event for message in stream for event in events.of(message)]
    assert [event.sequence for event in seen] == [1, 1, 1, 2, 3]
    assert seen[0].queued.gate_reason == "SATURATED"
    assert seen[-1].ended.answer == "ab"
    assert not seen[-1].ended.agent_not_needed
    assert (seen[-2].model_step.finish_reason, seen[-1].ended.truncated) == (cut, True)
