"""How a run is followed over connections that break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sluice.command import run_watch
from sluice.command.failures import UnreachableError
from sluice.errors import Code, SluiceError, deadline_exceeded, unavailable
from sluice.scheduler.v1 import runs_pb2

RUN = "6f0c9f3e-0000-4000-8000-000000000001"
LOST = unavailable("CONNECTION_BROKEN", "gone")


def event(sequence: int, run_id: str = RUN, **kind: Any) -> runs_pb2.RunEvent:
    kind = kind or {"progress": runs_pb2.RunProgress(phase="embed", done=sequence)}
    return runs_pb2.RunEvent(sequence=sequence, run_id=run_id, **kind)


def text(sequence: int, words: str) -> runs_pb2.RunEvent:
    return event(sequence, partial_text=runs_pb2.PartialText(step=1, text=words))


def ended(sequence: int) -> runs_pb2.RunEvent:
    return event(sequence, ended=runs_pb2.RunEnded(state=runs_pb2.RUN_STATE_SUCCEEDED))


class Script:
    """A client whose streams are written down: events, or errors that end one."""

    def __init__(self, *streams: Sequence[runs_pb2.RunEvent | Exception]) -> None:
        self._streams = iter(streams)
        self.asked: list[tuple[str, int]] = []
        self.over = False
        self.state = runs_pb2.RUN_STATE_WAITING

    def stream(self, method: str, request: Any, timeout_s: float) -> Iterator[Any]:
        self.asked.append((method, getattr(request, "from_sequence", 0)))
        for one in next(self._streams):
            if isinstance(one, Exception):
                raise one
            yield runs_pb2.WatchRunResponse(event=one)

    def call(self, method: str, request: Any) -> Any:
        assert method == "GetRun"
        run = runs_pb2.Run(run_id=RUN, last_sequence=2, state=self.state)
        if self.over:
            run.end_time.seconds = 1
        return runs_pb2.GetRunResponse(run=run)


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    follow = run_watch._follow

    def fast(call: Any, limit_s: float, **more: Any) -> run_watch.Events:
        return follow(call, limit_s, clock=made, sleep=made.sleep, **more)

    monkeypatch.setattr(run_watch, "_follow", fast)
    return made


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ([event(1)], "only the watching ended, after 1 s, not the run"),
        ([], "`sluice agent list` shows whether it began"),
    ],
)
@pytest.mark.parametrize("by", [None, deadline_exceeded()], ids=["its own", "the call's"])
def test_the_end_of_the_time_to_watch_is_not_that_of_the_run(
    stream: list[Any], said: str, by: SluiceError | None, clock: Clock
) -> None:
    end = [] if by is None else [by]
    script: Any = Script(*([[*stream, *end]] + [end] * 9))
    with pytest.raises(SluiceError, match=said) as raised:
        for _ in run_watch.start(script, runs_pb2.RunAgentRequest(), 1.0):
            pass
    assert raised.value.code is Code.DEADLINE_EXCEEDED


def started(script: Any, **fields: Any) -> list[int]:
    request = runs_pb2.RunAgentRequest(task="x", request_id="r", **fields)
    return [one.sequence for one in run_watch.start(script, request, 1000.0)]


def test_a_run_is_watched_to_its_end() -> None:
    script = Script([event(1), event(2), ended(3), event(4)])
    assert started(script) == [1, 2, 3]
    assert script.asked == [("RunAgent", 0)]


def test_a_broken_watch_goes_on_after_the_last_event_and_repeats_none() -> None:
    script = Script([event(1), event(2), LOST], [event(2), event(3), LOST], [ended(4)])
    assert started(script) == [1, 2, 3, 4]
    assert script.asked == [("RunAgent", 0), ("WatchRun", 3), ("WatchRun", 4)]


def test_a_stream_that_ends_before_the_run_is_asked_again() -> None:
    script = Script([event(1)], [ended(2)])
    assert started(script) == [1, 2]


def test_a_watch_from_behind_the_end_of_a_run_ends() -> None:
    script: Any = Script([])
    script.over = True
    assert list(run_watch.watch(script, RUN, 3, 1000.0)) == []


def test_a_start_that_was_cut_before_its_first_event_is_sent_again() -> None:
    script = Script([UnreachableError("nobody")], [LOST], [event(1), ended(2)])
    assert started(script) == [1, 2]
    assert [method for method, _ in script.asked] == ["RunAgent"] * 3


def test_live_text_is_passed_on_as_it_comes() -> None:
    script = Script([event(1), text(1, "a"), text(1, "b"), LOST], [text(1, "ab"), ended(2)])
    assert started(script) == [1, 1, 1, 1, 2]


def test_one_in_the_background_ends_with_its_first_event() -> None:
    assert started(Script([event(1), event(2)]), background=True) == [1]


def test_what_was_answered_directly_cannot_go_on() -> None:
    script = Script([event(1, run_id=""), LOST])
    with pytest.raises(SluiceError, match="CONNECTION_BROKEN"):
        started(script)


def test_a_refusal_is_final() -> None:
    refused = SluiceError(Code.PERMISSION_DENIED, "AGENT_REFUSED", "no")
    with pytest.raises(SluiceError, match="AGENT_REFUSED"):
        started(Script([refused]))


def test_after_a_minute_without_an_event_the_loss_is_told(clock: Clock) -> None:
    with pytest.raises(SluiceError, match="CONNECTION_BROKEN"):
        started(Script([event(1)], *([LOST] for _ in range(1000))))
    assert run_watch.LOST_MAX_S < clock.now < run_watch.LOST_MAX_S + 3


def test_the_time_limit_ends_the_watch(clock: Clock) -> None:
    endless: Any = Script(*([event(number)] for number in range(1, 1000)))
    with pytest.raises(SluiceError, match="DEADLINE_EXCEEDED"):
        list(run_watch.watch(endless, RUN, 0, 5.0))
    assert 5.0 <= clock.now < 8.0


def test_so_far_ends_with_the_last_event_that_there_is_now() -> None:
    script: Any = Script([event(1), text(1, "a"), event(2), event(3)])
    assert [one.sequence for one in run_watch.so_far(script, RUN, 5.0)] == [1, 2]


def test_a_run_waits_only_with_its_last_event() -> None:
    client: Any = Script()
    waiting = runs_pb2.RunWaiting(step=1)
    assert run_watch.waits_now(client, event(2, waiting=waiting))
    assert not run_watch.waits_now(client, event(1, waiting=waiting))
    assert not run_watch.waits_now(client, event(2))
    client.state = runs_pb2.RUN_STATE_QUEUED  # decided, and no agent has come yet
    assert not run_watch.waits_now(client, event(2, waiting=waiting))
