"""What a run does next, rule by rule, from nothing but its events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_svc.domain.ending import Bounds, Finish, Pause, Rules, after_refusal
from agent_svc.domain.history import fold
from agent_svc.domain.model import (
    CallEnded,
    Decision,
    End,
    Ended,
    Message,
    ModelStep,
    Paused,
    Resumed,
    Waiting,
    WaitReason,
)
from agent_svc.domain.next_action import (
    Action,
    AskPerson,
    CallModel,
    CallTools,
    Record,
    next_action,
)
from sluice.errors import Code, SluiceError, exhausted, unavailable
from tests.unit.agent.run_events import (
    ASK,
    BEGIN_S,
    FAILED,
    PAY,
    PUT,
    READ,
    RUN,
    WIDE,
    Book,
    call,
    task,
)


def after(book: Book, **options: object) -> Action:
    """The next action one second after the last event."""
    asked = options.pop("task", task())
    return next_action(asked, book.history, book.now_s + 1, **options)  # type: ignore[arg-type]


def ended(action: Action) -> Ended:
    """The end that an action brings."""
    assert isinstance(action, Finish), action
    end = action.events[-1]
    assert isinstance(end, Ended)
    return end


def reason(action: Action) -> str:
    """Why the run failed."""
    end = ended(action)
    assert end.failure is not None
    return end.failure.reason


# --- The straight way ---------------------------------------------------------------------------


def test_a_new_run_calls_the_model_with_what_its_budgets_leave() -> None:
    action = after(Book())
    assert action == CallModel(1, 10_000, 598.0, f"{RUN}.1")


def test_calls_of_one_step_are_made_side_by_side_under_their_own_step_numbers() -> None:
    first, second = call("find"), call("put")
    action = after(Book().wrote(first, second))
    assert isinstance(action, CallTools)
    assert [(c.step, c.call, c.idempotency_key, c.begun) for c in action.calls] == [
        (2, first, f"{RUN}:2", False),
        (3, second, f"{RUN}:3", False),
    ]


def test_the_model_goes_on_when_all_calls_have_ended() -> None:
    action = after(Book().did(call("find"), call("put")))
    assert isinstance(action, CallModel)
    assert action.step == 4
    assert action.tokens_left == 10_000 - 30


def test_an_answer_ends_the_run() -> None:
    end = ended(after(Book().did(call("find")).wrote(text="42")))
    assert (end.end, end.answer, end.failure) == (End.SUCCEEDED, "42", None)


def test_an_answer_counts_although_it_used_the_last_of_every_budget() -> None:
    book = Book().wrote(text="42", tokens=10_000)
    tight = replace(WIDE, steps_max=1, cost_max=0.1)
    assert ended(after(book, task=task(budget=tight))).end is End.SUCCEEDED


@pytest.mark.parametrize(
    ("book", "turn", "needless"),
    [
        (Book().wrote(text="42"), False, True),
        (Book().wrote(text="42"), True, False),  # a turn of a session never was an agent's
        (Book().wrote(text="?", problem="No.").wrote(text="42"), False, False),
        (Book().did(call("find")).wrote(text="42"), False, False),
    ],
)
def test_a_run_that_a_direct_call_would_have_answered_says_so(
    book: Book, turn: bool, needless: bool
) -> None:
    assert ended(after(book, task=task(turn=turn))).agent_not_needed is needless


# --- Wrong and repeated calls -------------------------------------------------------------------


def test_a_wrong_call_goes_back_to_the_model_a_limited_number_of_times() -> None:
    book = Book().wrote(text="{", problem="Not JSON.").wrote(text="{", problem="Not JSON.")
    assert isinstance(after(book), CallModel)
    assert reason(after(book.wrote(text="{", problem="Not JSON."))) == "WRONG_CALLS"


def test_a_right_call_between_wrong_ones_starts_their_count_anew() -> None:
    book = Book().wrote(problem="No.").wrote(problem="No.").did(call("find")).wrote(problem="No.")
    assert isinstance(after(book), CallModel)


def test_the_same_call_with_the_same_result_ends_the_run_when_it_is_asked_for_too_often() -> None:
    book = Book()
    for number in range(3):
        # Other spaces and another order are the same arguments.
        arguments = '{"a":1, "b":2}' if number % 2 else '{"b": 2,"a": 1}'
        one = call("find", number, arguments)
        assert isinstance(after(book.wrote(one)), CallTools)
        book.began(one).ended(one, "same")
        book.did(call("find", 10 + number, f'{{"other":{number}}}'))
    assert reason(after(book.wrote(call("find", 9, '{"a":1,"b":2}')))) == "REPEATED_CALLS"


def test_a_call_may_be_repeated_while_its_result_changes() -> None:
    book = Book()
    for number in range(6):
        book.did(call("find", number), result=str(number))
    assert isinstance(after(book.wrote(call("find", 9))), CallTools)


# --- Budgets ------------------------------------------------------------------------------------


def test_each_budget_ends_the_run_with_its_reason_and_what_was_done() -> None:
    book = Book().did(call("find"), call("put"))  # 3 steps, 30 tokens, 2 calls, cost 0.5
    for budget, expected in (
        (replace(WIDE, steps_max=3), "BUDGET_STEPS"),
        (replace(WIDE, tokens_max=30), "BUDGET_TOKENS"),
        (replace(WIDE, cost_max=0.5), "BUDGET_COST"),
        (replace(WIDE, wall_time_s=book.now_s + 1 - BEGIN_S), "BUDGET_WALL_TIME"),
    ):
        end = ended(after(book, task=task(budget=budget)))
        assert end.end is End.FAILED
        assert end.failure is not None
        assert end.failure.reason == expected
        assert "1 model calls, 2 tool calls, 30 of" in end.failure.message


def test_calls_that_do_not_fit_the_budget_together_are_not_made_at_all() -> None:
    book = Book().did(call("find"), call("put")).wrote(call("find", 1), call("put", 1))
    tight = replace(WIDE, tool_calls_max=3)
    assert reason(after(book, task=task(budget=tight))) == "BUDGET_TOOL_CALLS"
    tight = replace(WIDE, steps_max=5)
    assert reason(after(book, task=task(budget=tight))) == "BUDGET_STEPS"
    enough = replace(WIDE, tool_calls_max=4, steps_max=6)
    assert isinstance(after(book, task=task(budget=enough)), CallTools)


def test_no_call_begins_once_tokens_or_cost_are_used_up() -> None:
    one = call("find")
    for budget, expected in (
        (replace(WIDE, tokens_max=30), "BUDGET_TOKENS"),
        (replace(WIDE, cost_max=0.5), "BUDGET_COST"),
    ):
        tight = task(budget=budget)
        assert reason(after(Book().wrote(one), task=tight)) == expected
        # One that has begun is made again all the same: it may have had half its effect.
        assert isinstance(after(Book().wrote(one).began(one), task=tight), CallTools)
    enough = task(budget=replace(WIDE, tokens_max=31))
    assert isinstance(after(Book().wrote(one), task=enough), CallTools)


def test_the_end_says_whether_the_answer_was_cut_off() -> None:
    for cut_off in (False, True):
        step = ModelStep(1, Message("assistant", "4"), 20, 10, 0.5, "r", cut_off=cut_off)
        end = ended(after(Book().add(step)))
        assert (end.end, end.truncated) == (End.SUCCEEDED, cut_off)


def test_a_price_of_nothing_never_uses_a_cost_budget_up() -> None:
    assert isinstance(after(Book(), task=task(budget=replace(WIDE, cost_max=0.0))), CallModel)


def test_time_spent_waiting_for_people_is_not_counted() -> None:
    one = call("ask")
    book = Book().wrote(one).add(Waiting(2, WaitReason.APPROVAL, one))
    book.add(Resumed(2, Decision.RETRY), after_s=86_400.0)
    action = after(book)
    assert isinstance(action, CallTools)
    assert action.deadline_s == pytest.approx(600.0 - 4)


def test_the_wall_time_of_a_call_under_way_closes_the_call() -> None:
    one = call("find")
    book = Book().wrote(one).began(one)
    action = next_action(task(), book.history, BEGIN_S + 600)
    assert isinstance(action, Finish)
    closed = action.events[0]
    assert isinstance(closed, CallEnded)
    assert closed.failure is not None
    assert closed.failure.reason == "CALL_ABANDONED"
    assert reason(action) == "BUDGET_WALL_TIME"


# --- Doubt, approval and decisions --------------------------------------------------------------


@pytest.mark.parametrize("tool", [READ, PUT])
def test_a_harmless_call_in_doubt_is_made_again_with_its_key(tool: object) -> None:
    name = tool.name  # type: ignore[attr-defined]
    action = after(Book().wrote(call(name)).began(call(name)))
    assert isinstance(action, CallTools)
    (planned,) = action.calls
    assert (planned.begun, planned.idempotency_key) == (True, f"{RUN}:2")


def test_a_once_call_in_doubt_waits_for_a_person() -> None:
    one = call("pay")
    action = after(Book().wrote(one).began(one))
    assert action == AskPerson(2, Waiting(2, WaitReason.IN_DOUBT, one))


def test_a_call_in_doubt_of_a_tool_that_is_gone_waits_for_a_person() -> None:
    one = call("find")
    action = after(Book().wrote(one).began(one), task=task(tools=(PAY,)))
    assert action == AskPerson(2, Waiting(2, WaitReason.IN_DOUBT, one))


def test_a_call_of_a_tool_that_is_gone_is_told_to_the_model() -> None:
    action = after(Book().wrote(call("find")), task=task(tools=(PAY,)))
    assert isinstance(action, Record)
    (end,) = action.events
    assert isinstance(end, CallEnded)
    assert end.failure is not None
    assert end.failure.reason == "TOOL_UNKNOWN"


def test_calls_that_need_no_person_are_made_before_one_is_asked() -> None:
    find, pay, ask = call("find"), call("pay"), call("ask")
    book = Book().wrote(ask, pay, find).began(pay)
    action = after(book)
    assert isinstance(action, CallTools)
    assert [c.call for c in action.calls] == [find]
    action = after(book.began(find).ended(find))
    assert action == AskPerson(2, Waiting(2, WaitReason.APPROVAL, ask))


def test_a_run_that_waits_stays_so_without_a_decision_for_its_step() -> None:
    one = call("pay")
    book = Book().wrote(one).began(one).add(Waiting(2, WaitReason.IN_DOUBT, one))
    assert after(book) == AskPerson(2, None)
    assert after(book, decision=Resumed(7, Decision.RETRY)) == AskPerson(2, None)
    # However long: waiting for people uses nothing up.
    assert next_action(task(), book.history, BEGIN_S + 1e7) == AskPerson(2, None)


def test_a_decision_is_recorded_and_followed() -> None:
    one = call("pay")
    book = Book().wrote(one).began(one).add(Waiting(2, WaitReason.IN_DOUBT, one))
    retry = Resumed(2, Decision.RETRY)
    assert after(book, decision=retry) == Record((retry,))
    action = after(book.add(retry), decision=retry)
    assert isinstance(action, CallTools)
    assert not action.calls[0].begun
    assert action.calls[0].idempotency_key == f"{RUN}:2"
    # Once it has begun again, it is in doubt again.
    assert isinstance(after(book.began(one), decision=retry), AskPerson)
    assert book.history.tool_calls == 1


def test_a_step_may_be_skipped_or_its_result_supplied() -> None:
    one = call("ask")
    for decision, text, failed in (
        (Resumed(2, Decision.SKIP), "", True),
        (Resumed(2, Decision.SUPPLY_RESULT, '"yes"'), '"yes"', False),
    ):
        book = Book().wrote(one).add(Waiting(2, WaitReason.APPROVAL, one), decision)
        action = after(book)
        assert isinstance(action, Record)
        (end,) = action.events
        assert isinstance(end, CallEnded)
        assert (end.result_json, end.failure is not None) == (text, failed)
        assert isinstance(after(book.add(end)), CallModel)


@pytest.mark.parametrize("name", ["ask", "pay"])
@pytest.mark.parametrize(
    ("decision", "text"), [(Decision.SKIP, ""), (Decision.SUPPLY_RESULT, '"yes"')]
)
def test_nobody_is_asked_again_about_a_call_that_was_decided(
    name: str, decision: Decision, text: str
) -> None:
    one = call(name, arguments='{"a":1,"b":2}')
    book = Book().wrote(one).began(one).add(Waiting(2, WaitReason.IN_DOUBT, one))
    if name == "ask":
        book = Book().wrote(one).add(Waiting(2, WaitReason.APPROVAL, one))
    action = after(book.add(Resumed(2, decision, text)))
    assert isinstance(action, Record)
    book.add(*action.events)
    for number in (1, 2):
        book.did(call("find", number), result=str(number))
        again = call(name, number, '{ "b": 2, "a": 1 }')
        action = after(book.wrote(again))
        assert isinstance(action, Record), action
        (end,) = action.events
        assert isinstance(end, CallEnded)
        assert (end.call_id, end.result_json) == (again.id, text)
        assert (end.failure is not None) == (decision is Decision.SKIP)
        book.add(end)
    # Another call is another question, and one that a person agreed to may be asked for again.
    other = after(book.wrote(call("ask", 9, '{"a":2}')))
    assert isinstance(other, AskPerson)


def test_a_call_that_was_agreed_to_is_asked_about_again() -> None:
    one = call("ask")
    book = Book().wrote(one).add(Waiting(2, WaitReason.APPROVAL, one))
    book.add(Resumed(2, Decision.RETRY)).began(one).ended(one)
    assert isinstance(after(book.wrote(call("ask", 1))), AskPerson)


def test_an_approved_call_is_made_and_not_asked_for_again() -> None:
    one = call("ask")
    assert after(Book().wrote(one)) == AskPerson(2, Waiting(2, WaitReason.APPROVAL, one))
    book = Book().wrote(one).add(Waiting(2, WaitReason.APPROVAL, one), Resumed(2, Decision.RETRY))
    assert isinstance(after(book), CallTools)
    # Read again after a crash under way: it was agreed to already.
    assert ASK.needs_approval
    assert isinstance(after(book.began(one)), CallTools)


def test_a_decision_to_cancel_ends_the_run() -> None:
    one = call("pay")
    book = Book().wrote(one).began(one).add(Waiting(2, WaitReason.IN_DOUBT, one))
    stop = Resumed(2, Decision.CANCEL)
    action = after(book, decision=stop)
    assert isinstance(action, Finish)
    assert action.events[0] == stop
    assert ended(action).end is End.CANCELLED


def test_cancelling_goes_before_everything() -> None:
    one = call("pay")
    for book in (
        Book(),
        Book().wrote(text="42"),
        Book().wrote(one).began(one),
        Book().wrote(one).began(one).add(Waiting(2, WaitReason.IN_DOUBT, one)),
        Book().add(Paused(BEGIN_S + 500, "QUEUE_FULL")),
    ):
        action = after(book, is_cancelled=True)
        assert ended(action).end is End.CANCELLED
        assert reason(action) == "RUN_CANCELLED"


# --- Pauses and refusals ------------------------------------------------------------------------


def test_a_paused_run_goes_on_when_its_time_has_come() -> None:
    book = Book().add(Paused(BEGIN_S + 50, "QUEUE_FULL"))
    assert after(book) == Pause(BEGIN_S + 50, None)
    assert isinstance(next_action(task(), book.history, BEGIN_S + 50), CallModel)


BOUNDS = Bounds(WIDE, BEGIN_S)


def test_a_refusal_with_a_delay_is_waited_out() -> None:
    busy = exhausted("QUEUE_FULL", "Busy.", 7.5)
    left = after_refusal(BOUNDS, Book().history, busy, BEGIN_S + 10)
    assert left == Pause(BEGIN_S + 17.5, Paused(BEGIN_S + 17.5, "QUEUE_FULL", "Busy."))


def test_a_refusal_without_a_delay_is_waited_out_longer_each_time() -> None:
    gone = unavailable("NO_INSTANCE", "None.")
    book = Book()
    waits = []
    for _ in range(9):
        left = after_refusal(BOUNDS, book.history, gone, book.now_s)
        assert isinstance(left, Pause)
        assert left.paused is not None
        waits.append(left.ready_s - book.now_s)
        book.add(left.paused)
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30])
    assert after_refusal(BOUNDS, book.wrote().history, gone, book.now_s) == Pause(
        book.now_s + 0.5, Paused(book.now_s + 0.5, "NO_INSTANCE", "None.")
    )


def test_a_long_refusal_is_told_in_part() -> None:
    long = unavailable("TOOL_UNAVAILABLE", "x" * 10_000)
    left = after_refusal(BOUNDS, Book().history, long, BEGIN_S)
    assert isinstance(left, Pause) and left.paused is not None
    assert left.paused.message == "x" * 300


def test_no_pause_goes_beyond_the_wall_time() -> None:
    busy = exhausted("QUOTA_EXCEEDED", "Much.", 3600.0)
    left = after_refusal(BOUNDS, Book().history, busy, BEGIN_S + 590)
    assert isinstance(left, Pause)
    assert left.ready_s == BEGIN_S + 600
    assert reason(next_action(task(), Book().history, BEGIN_S + 600)) == "BUDGET_WALL_TIME"


@pytest.mark.parametrize(
    "error",
    [
        SluiceError(Code.NOT_FOUND, "MODEL_UNKNOWN", "No."),
        SluiceError(Code.INVALID_ARGUMENT, "CONTEXT_LENGTH", "Long."),
        SluiceError(Code.PERMISSION_DENIED, "TENANT_UNKNOWN", "No."),
        SluiceError(Code.RESOURCE_EXHAUSTED, "QUOTA_TOO_SMALL", "Never."),
    ],
)
def test_what_waiting_does_not_mend_ends_the_run(error: SluiceError) -> None:
    assert reason(after_refusal(BOUNDS, Book().history, error, BEGIN_S)) == error.reason


def test_a_fault_that_comes_again_and_again_ends_the_run() -> None:
    fault = SluiceError(Code.INTERNAL, "INTERNAL", "Fault.")
    book = Book()
    for _ in range(Rules().failures_max - 1):
        left = after_refusal(BOUNDS, book.history, fault, book.now_s)
        assert isinstance(left, Pause)
        assert left.paused is not None
        book.add(left.paused)
    assert reason(after_refusal(BOUNDS, book.history, fault, book.now_s)) == "INTERNAL"


# --- The fold -----------------------------------------------------------------------------------


def test_a_history_folded_again_is_the_same() -> None:
    find, put = call("find"), call("put")
    book = Book().wrote(find, put).began(find, put).ended(put).ended(find, "", FAILED)
    again = fold(book.history.events)
    assert after(book) == next_action(task(), again, book.now_s + 1)
    assert (again.steps, again.tool_calls, again.tokens, again.cost) == (3, 2, 30, 0.5)
    assert again.open_calls == []


def test_a_history_with_a_hole_is_refused() -> None:
    book = Book().wrote(text="42")
    with pytest.raises(AssertionError, match="missing"):
        fold(book.history.events[1:])
