"""Decision records: who gets one, what it says, that it is bounded and holds no text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.adapters import translate
from scheduler_svc.adapters.decision_log import DecisionLog
from scheduler_svc.adapters.decision_records import RECORD_BYTES_MAX, Recorder
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.quota_keeper import NOTHING_USED, Consumption, consumption
from scheduler_svc.domain.decision import Candidate, Placement, Trail
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.model import InstanceName, Outcome, PriorityClass
from scheduler_svc.domain.quota_errors import refused
from sluice.common.v1 import policy_pb2
from sluice.errors import Code, QuotaViolation, SluiceError, exhausted
from sluice.inference.v1 import inference_pb2
from sluice.quota.exchange import Limits, QuotaKind
from sluice.scheduler.v1 import generate_pb2, records_pb2
from tests.unit.scheduler.gate_rig import Rig, rig
from tests.unit.scheduler.scheduling import a_ticket

CANARY = "canary-7f3a"
RECORDER = Recorder("test-0", slow_share=0.25, clock=lambda: 1_000.0)
Run = Callable[[Coroutine[object, object, None]], None]


def a_live(work: inference_pb2.Work | None = None, **changes: Any) -> LiveRequest:
    ticket = a_ticket(**changes)
    ticket.trail = Trail(ticket.sampled)
    loop = SimpleNamespace(time=lambda: 0.0)
    return LiveRequest(ticket, work or inference_pb2.Work(), FlushBudget(), loop=cast("Any", loop))


def test_a_request_that_moved_is_told_from_beginning_to_end(
    run_virtual: Run, tmp_path: Path
) -> None:
    async def body(r: Rig) -> None:
        r.report("a")
        live = r.submit(request_id="moved")
        await r.settle()
        r.report("b")
        await r.execution.lose("a")
        await asyncio.sleep(1.0)
        assert [name for name, _ in r.execution.starts] == ["a", "b"]
        await r.execution.accept()
        await r.execution.delta("x", 0)
        await r.execution.end()
        await r.settle()
        now = asyncio.get_running_loop().time()
        r.gate.leave(live, Outcome.FINISHED)
        assert RECORDER.keeps(live, Outcome.FINISHED, now)
        record = RECORDER.ended(
            live, Outcome.FINISHED, consumption(live, Outcome.FINISHED), 0.5, now
        )
        first, second = record.attempts
        assert (first.instance, first.end, first.tokens) == ("a", "lost", 0)
        assert first.cause
        assert (second.instance, second.end, second.tokens) == ("b", "ended", 1)
        assert [one.instance for one in second.candidates] == ["b"]
        assert sum(second.candidates[0].parts.values()) == pytest.approx(second.score)
        assert second.after.ToTimedelta().total_seconds() <= record.queue_time.ToSeconds() + 1.0
        assert record.outcome == policy_pb2.OUTCOME_FINISHED
        assert (record.reason, record.charged, record.cost) == ("", True, 0.5)
        assert record.usage.completion_tokens == 1
        assert record.timings.HasField("first_token")
        assert (record.scheduler, record.tenant, record.request_id) == ("test-0", "dev", "moved")
        arrived_s = record.arrival_time.ToNanoseconds() / 1e9
        assert arrived_s == pytest.approx(1_000.0 - (now - live.ticket.arrival_s))

    async def main() -> None:
        async with rig(tmp_path) as running:
            await body(running)
            await running.idle()

    run_virtual(main())


@pytest.mark.parametrize(
    ("outcome", "changes", "attempt", "now", "kept"),
    [
        (Outcome.FINISHED, {}, 1, 1.0, False),
        (Outcome.FINISHED, {"sampled": True}, 1, 1.0, True),
        (Outcome.FINISHED, {}, 2, 1.0, True),
        (Outcome.FINISHED, {}, 1, 7.6, True),
        (Outcome.FINISHED, {}, 1, 7.4, False),
        (Outcome.CANCELLED, {}, 0, 1.0, False),
        (Outcome.CANCELLED, {}, 0, 9.0, True),
        (Outcome.HOPELESS, {}, 0, 0.0, True),
        (Outcome.INSTANCE_FAILED, {}, 1, 1.0, True),
        (Outcome.FIRST_TOKEN_TIMEOUT, {}, 1, 1.0, True),
    ],
)
def test_refused_failed_moved_slow_and_sampled_requests_are_kept(
    outcome: Outcome, changes: dict[str, Any], attempt: int, now: float, kept: bool
) -> None:
    live = a_live(**changes)
    live.attempt = attempt
    assert RECORDER.keeps(live, outcome, now) is kept


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (Outcome.FINISHED, "ended"),
        (Outcome.CANCELLED, "stopped"),
        (Outcome.FIRST_TOKEN_TIMEOUT, "stopped"),
    ],
)
def test_what_was_cut_short_did_not_run_to_its_end(outcome: Outcome, end: str) -> None:
    live = a_live()
    assert live.ticket.trail is not None
    live.ticket.trail.placed(Placement("i", 0.0))
    record = RECORDER.ended(live, outcome, NOTHING_USED, 0.0, 1.0)
    assert [attempt.end for attempt in record.attempts] == [end]


def refusal(reason: str = "QUEUE_FULL") -> SluiceError:
    return SluiceError(Code.RESOURCE_EXHAUSTED, reason, CANARY, metadata={"x": CANARY})


def test_a_refused_request_says_why_and_what_stood_in_the_way() -> None:
    ticket = a_ticket()
    ticket.trail = Trail(full=False, ahead=3)
    ticket.trail.placed(Placement("", 0.5, removed={"no_room": 2}, end="refused"))
    record = RECORDER.refused(ticket, Outcome.QUEUE_FULL, refusal(), 0.5)
    assert (record.outcome, record.reason) == (policy_pb2.OUTCOME_QUEUE_FULL, "QUEUE_FULL")
    assert (record.queue_position, record.charged) == (3, False)
    (attempt,) = record.attempts
    assert (attempt.instance, attempt.end, dict(attempt.filtered)) == (
        "",
        "refused",
        {"no_room": 2},
    )


def test_the_quota_that_refused_is_named_however_far_the_request_came() -> None:
    error = refused(QuotaKind.TOKENS_PER_DAY, 1.0, "t", Limits(tokens_per_day=5))
    outcome = Outcome.QUOTA_EXCEEDED
    live = a_live()
    live.fail(error, outcome)
    for record in (
        RECORDER.refused(a_ticket(), outcome, error, 0.0),
        RECORDER.wrong("t", "r", PriorityClass.BATCH, outcome, error),
        RECORDER.ended(live, outcome, NOTHING_USED, 0.0, 1.0),
    ):
        assert (record.reason, record.quota) == ("QUOTA_EXCEEDED", "tokens_per_day")
    assert not RECORDER.refused(a_ticket(), Outcome.QUEUE_FULL, refusal(), 0.0).quota


@pytest.mark.parametrize("metric", ["", f"x {CANARY}", "a" * 65])
def test_a_quota_that_is_none_is_not_told(metric: str) -> None:
    error = exhausted("X", "", 1.0, quotas=[QuotaViolation("", "", metric)])
    assert not RECORDER.refused(a_ticket(), Outcome.INTERNAL, error, 0.0).quota


@pytest.mark.parametrize("reason", ["", "two words", "lower", "A" * 65, f"X{CANARY}"])
def test_a_reason_that_is_none_is_not_told(reason: str) -> None:
    record = RECORDER.refused(a_ticket(), Outcome.INVALID, refusal(reason), 0.0)
    assert record.reason == "INVALID"


def test_a_record_is_bounded_whatever_names_it_holds() -> None:
    ticket = a_ticket(model="m" * 20_000)
    ticket.trail = Trail(full=True)
    for number in range(20):
        best = tuple(
            Candidate(InstanceName(f"{other}" * 300), 1.0, dict.fromkeys("abcdef", 1.0))
            for other in range(8)
        )
        ticket.trail.placed(Placement("i" * 300, float(number), 1.0, 8, best, {"model": 1}))
    for model in (ticket.model, "m"):
        ticket.model = model
        record = RECORDER.refused(ticket, Outcome.INTERNAL, refusal("INTERNAL"), 20.0)
        assert record.ByteSize() <= RECORD_BYTES_MAX
        assert record.request_id == ticket.request_id
    assert record.attempts[-1].instance


texts = st.text(max_size=20).map(lambda text: f"{text}{CANARY}{text}")
wrong_and_right = st.fixed_dictionaries(
    {},
    optional={
        "prompt": texts,
        "text": texts,
        "cache_salt": texts,
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": texts, "name": texts}),
            max_size=2,
        ),
        "tools": st.lists(st.fixed_dictionaries({"name": texts, "description": texts}), max_size=2),
        "sampling": st.fixed_dictionaries(
            {}, optional={"stop": st.lists(texts), "temperature": st.sampled_from([0.5, 9.0])}
        ),
    },
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(fields=wrong_and_right, outcome=st.sampled_from(Outcome))
def test_no_record_holds_anything_of_what_was_asked(
    fields: dict[str, Any], outcome: Outcome
) -> None:
    """Whatever a client writes into its request, and however that ends."""
    request = generate_pb2.GenerateRequest(**fields)
    try:
        source = translate.check_input(request)
        output = translate.check_sampling(request.sampling)
    except SluiceError as error:
        record = RECORDER.wrong("t", "r", PriorityClass.BATCH, outcome, error)
    else:
        work = translate.work_for(request, "t", "r", "m", source, output)
        live = a_live(work, sampled=True)
        live.fail(refusal(f"X{CANARY}"), outcome)
        assert live.ticket.trail is not None
        live.ticket.trail.placed(Placement("i", 0.0))
        record = RECORDER.ended(live, outcome, Consumption(1, 0, 1, True), 0.0, 1.0)
    assert CANARY.encode() not in record.SerializeToString()


async def test_decisions_keep_what_the_recorder_says_and_a_sample() -> None:
    draws = iter([0.0, 0.5, 0.009, 0.01])
    log = DecisionLog(1 << 20)
    decisions = Decisions(RECORDER, log, 0.01, lambda: next(draws))
    assert [decisions.sample() for _ in range(4)] == [True, False, True, False]
    decisions.ended(a_live(), Outcome.FINISHED, NOTHING_USED, 0.0, 1.0)
    assert log.kept == 0
    decisions.ended(a_live(), Outcome.INTERNAL, NOTHING_USED, 0.0, 1.0)
    decisions.refused(a_ticket(), Outcome.QUEUE_FULL, refusal(), 0.0)
    decisions.wrong("t", "w", PriorityClass.BATCH, Outcome.INVALID, refusal("INVALID_FIELD"))
    assert log.kept == 3
    assert isinstance(await log.get("t", "w"), records_pb2.DecisionRecord)
