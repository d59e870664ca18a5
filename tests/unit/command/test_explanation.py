"""The story of a decision record: everything a person asks is in it, in plain words."""

from __future__ import annotations

from google.protobuf import duration_pb2

from scheduler_svc.domain.decision import closed_by
from sluice.command.explanation import FILTERS, story
from sluice.common.v1 import policy_pb2, result_pb2
from sluice.scheduler.v1 import records_pb2
from sluice.scheduler.v1.records_pb2 import Attempt, Candidate, DecisionRecord


def span(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


def moved() -> records_pb2.DecisionRecord:
    record = DecisionRecord(
        request_id="r-1",
        tenant="dev",
        model="m",
        priority_class=policy_pb2.PRIORITY_CLASS_BATCH,
        outcome=policy_pb2.OUTCOME_FINISHED,
        queue_time=span(1.5),
        queue_position=3,
        attempts=[
            Attempt(instance="a", score=0.25, candidate_count=2, end="lost", cause="engine_down"),
            Attempt(
                instance="b",
                score=0.5,
                candidate_count=10,
                candidates=[
                    Candidate(instance="b", score=0.5, parts={"backlog": 0.4, "prompt": 0.1}),
                    Candidate(instance="c", score=0.75),
                ],
                filtered={"excluded": 1, "no_room": 4},
                end="ended",
                tokens=7,
                after=span(1.4),
            ),
        ],
        usage=result_pb2.Usage(prompt_tokens=12, cached_tokens=4, completion_tokens=7),
        timings=result_pb2.Timings(
            first_token=span(1.6), per_output_token=span(0.0125), total=span(2.0)
        ),
        cost=0.002,
        charged=True,
        scheduler="scheduler-0",
    )
    record.arrival_time.FromSeconds(1_700_000_000)
    return record


def test_a_step_says_of_which_run_it_is() -> None:
    record = moved()
    record.run_id = "run-1"
    assert "a call of run run-1" in list(story(record))
    record.step = 3
    assert list(story(record))[2] == "step 3 of run run-1"


def test_a_moved_request_is_told_as_it_went() -> None:
    assert list(story(moved())) == [
        "request r-1",
        "arrived 2023-11-14T22:13:20.000Z at scheduler-0, tenant dev, class batch, model m",
        "",
        "When it was queued, about 3 requests went before it.",
        "It waited 1.50 s until its last placement.",
        "1. after 0 ms: placed on a, expected to cost 0.250 s; 2 instances had room.",
        "   It failed there (engine down), after 0 tokens.",
        "2. after 1.40 s: placed on b, expected to cost 0.500 s; 10 instances had room.",
        "     > b                       0.500 s   (backlog +0.400, prompt +0.100)",
        "       c                       0.750 s",
        "       and 8 more",
        "     not: 4 without a free place",
        "     not: 1 had failed this request before",
        "   It ran to its end there, after 7 tokens.",
        "",
        "It ended: finished after 2.00 s.",
        "First token after 1.60 s, then a token every 12.5 ms.",
        "Charged: 12 prompt tokens (4 of them cached) and 7 output tokens; cost 0.002.",
    ]


def test_a_refused_request_is_told_what_stood_in_its_way_and_what_to_do() -> None:
    record = DecisionRecord(
        request_id="r",
        tenant="dev",
        model="m",
        priority_class=policy_pb2.PRIORITY_CLASS_STANDARD,
        outcome=policy_pb2.OUTCOME_NO_INSTANCE,
        reason="NO_INSTANCE",
        attempts=[Attempt(after=span(10), end="refused", filtered={"health": 2})],
        gate_reason="NOT_ALLOWED",
    )
    lines = list(story(record))
    assert "1. after 10.00 s: refused." in lines
    assert "     not: 2 down, starting or unreachable" in lines
    assert "It ended: no instance (NO_INSTANCE)." in lines
    assert "agent path: NOT_ALLOWED" in lines
    assert any("sluice status" in line for line in lines)
    assert lines[-1] == "Nothing was charged."


def test_a_wrong_request_has_no_wait_and_no_placement() -> None:
    record = DecisionRecord(request_id="r", tenant="t", outcome=policy_pb2.OUTCOME_INVALID)
    assert not any("waited" in line or "placed" in line for line in story(record))


def test_what_was_refused_at_entry_is_told_without_gaps() -> None:
    record = DecisionRecord(
        request_id="r",
        tenant="dev",
        model="m",
        outcome=policy_pb2.OUTCOME_QUOTA_EXCEEDED,
        reason="QUOTA_TOO_SMALL",
        quota="tokens_per_min",
    )
    lines = list(story(record))
    assert lines[2:4] == ["", "It ended: quota exceeded (QUOTA_TOO_SMALL)."]
    assert "tokens_per_min" in lines[4]
    assert "max_tokens" in lines[5]


def test_every_filter_of_the_scheduler_has_words() -> None:
    constants = closed_by.__code__.co_consts
    named = {each for each in constants if isinstance(each, str) and each.isidentifier()}
    assert named
    assert named <= FILTERS.keys()
