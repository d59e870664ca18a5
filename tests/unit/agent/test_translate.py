"""Runs on the wire and in the domain are the same runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_svc.adapters import translate
from agent_svc.domain.model import (
    Budget,
    CallEnded,
    CallId,
    CallStarted,
    Choice,
    Decision,
    End,
    Ended,
    Event,
    Failure,
    Message,
    ModelStep,
    Paused,
    Progress,
    Queued,
    Resumed,
    ToolCall,
    Waiting,
    WaitReason,
)
from agent_svc.run_ports import IngestSpec, Summary, TaskSpec
from sluice.common.v1 import input_pb2
from sluice.errors import Code
from sluice.scheduler.v1 import runs_pb2, spec_pb2

text = st.text(st.characters(codec="utf-8"), max_size=20)
small = st.integers(0, 1000)
times = st.integers(0, 4_000_000_000_000_000).map(lambda us: us / 1e6)
tool_calls = st.builds(ToolCall, text.map(CallId), text, text)
messages = st.builds(Message, text, text, text, st.lists(tool_calls, max_size=3).map(tuple), text)
failures = st.builds(Failure, st.sampled_from([c for c in Code if c]), st.just("SOME_REASON"), text)
kinds = st.one_of(
    st.builds(Queued, text),
    st.builds(
        ModelStep,
        small,
        messages,
        small,
        small,
        st.floats(0, 1e6),
        text,
        small,
        text,
        small,
        st.booleans(),
    ),
    st.builds(CallStarted, small, tool_calls, text),
    st.builds(
        CallEnded, small, text.map(CallId), text, st.booleans(), st.none() | failures, text, small
    ),
    st.builds(Waiting, small, st.sampled_from(WaitReason), tool_calls),
    st.builds(Resumed, small, st.sampled_from(Decision), text),
    st.builds(Paused, times, text, text),
    st.builds(Progress, text, small, small),
    st.builds(
        Ended,
        st.sampled_from(End),
        text,
        st.none() | failures,
        st.booleans(),
        st.booleans(),
    ),
)


@given(st.integers(1, 10_000), times, kinds)
def test_every_event_is_read_as_it_was_written(sequence: int, time_s: float, kind: object) -> None:
    event = Event(sequence, time_s, kind)  # type: ignore[arg-type]
    assert translate.read_event(sequence, translate.event_bytes("r", event)) == event


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"",
        runs_pb2.RunEvent(waiting=runs_pb2.RunWaiting(step=1)).SerializeToString(),
        runs_pb2.RunEvent(ended=runs_pb2.RunEnded()).SerializeToString(),
    ],
)
def test_an_event_of_another_version_is_not_guessed_at(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not"):
        translate.read_event(1, data)


def test_a_task_is_read_with_its_limits() -> None:
    spec = spec_pb2.RunSpec(traceparent="t")
    spec.credential.payload = b"p"
    request = spec.task.request
    request.messages.add(role="user", content="Hi")
    request.tools.extend(["a", "b"])
    request.tool_choice = runs_pb2.TOOL_CHOICE_EACH
    request.model = "m"
    request.sampling.max_tokens = 7
    spec.task.context_tokens = 2048
    spec.budget.steps_max = 9
    spec.budget.wall_time_max.FromMilliseconds(1500)
    read = translate.read_spec(spec.SerializeToString())
    assert read.work == TaskSpec(
        (Message("user", "Hi"),), ("a", "b"), Choice.EACH, "", False, 2048, 7
    )
    assert (read.budget.steps_max, read.budget.wall_time_s) == (9, 1.5)
    assert (read.model, read.traceparent) == ("m", "t")
    assert read.credential == spec.credential.SerializeToString()


def test_an_ingest_is_read_and_what_is_neither_is_not() -> None:
    spec = spec_pb2.RunSpec()
    spec.ingest.collection, spec.ingest.document_id = "c", "d"
    spec.ingest.generation, spec.ingest.embedding_model = 3, "e"
    assert translate.read_spec(spec.SerializeToString()).work == IngestSpec("c", "d", 3, "e")
    for data in (b"", b"\xff", spec_pb2.RunSpec(traceparent="t").SerializeToString()):
        with pytest.raises(ValueError, match=r"not"):
            translate.read_spec(data)


def test_a_decision_is_read_and_nothing_is_no_decision() -> None:
    said = runs_pb2.RunResumed(
        step=2, decision=runs_pb2.RESUME_DECISION_SUPPLY_RESULT, result_json="1"
    )
    decision = translate.read_decision(said.SerializeToString())
    assert decision == Resumed(2, Decision.SUPPLY_RESULT, "1")
    assert translate.read_decision(b"") is None
    with pytest.raises(ValueError, match="not"):
        translate.read_decision(runs_pb2.RunResumed(step=2).SerializeToString())


def test_a_summary_holds_the_beginning_of_a_long_answer() -> None:
    budget = Budget(1, 2, 3, 4.5, 6.0)
    summary = Summary(1, 2, 3, 4, 5, 0.5, budget, "m", "s", "ü" * 40_000)
    run = runs_pb2.Run.FromString(translate.summary_bytes(summary))
    assert len(run.answer.encode()) == translate.SUMMARY_ANSWER_BYTES
    assert set(run.answer) == {"ü"}
    assert translate.read_budget(run.budget) == budget
    assert (run.steps, run.usage.prompt_tokens, run.tool_calls, run.cost) == (1, 2, 5, 0.5)


def test_messages_of_a_session_are_chat_messages() -> None:
    said = [Message("user", "Hi"), Message("assistant", "Ho")]
    stored = [input_pb2.ChatMessage.FromString(one) for one in translate.session_messages(said)]
    assert [translate.read_message(one) for one in stored] == said
