"""Follows a run over connections that break: events come once each, in order, until the run ends.

A run is durable and watching it is not: when the connection or a scheduler is lost the watch begins
again after the last event that was seen, for LOST_MAX_S without any event at most. A start that was
cut before its first event is sent again with its request id, which starts nothing twice. Blocking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from sluice.command.failures import UnreachableError
from sluice.errors import Code, SluiceError, deadline_exceeded
from sluice.scheduler.v1 import runs_pb2

if TYPE_CHECKING:
    from sluice.command.client import MeshClient

LOST_MAX_S: Final = 60.0
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
# A server's own longest deadline may be shorter than what a person waits for.
CALL_MAX_S: Final = 3000.0

Events = Iterator[runs_pb2.RunEvent]


def start(client: MeshClient, request: runs_pb2.RunAgentRequest, limit_s: float) -> Events:
    """Starts a run and yields its events. One in the background: the first event only. Raises
    SluiceError and UnreachableError."""
    call = _Call(client, "RunAgent", request)
    return _follow(call, limit_s, once=request.background)


def watch(client: MeshClient, run_id: str, from_sequence: int, limit_s: float) -> Events:
    """The events of a run from a sequence number on. Raises as above."""
    request = runs_pb2.WatchRunRequest(run_id=run_id, from_sequence=from_sequence)
    return _follow(_Call(client, "WatchRun", request), limit_s)


def so_far(client: MeshClient, run_id: str, limit_s: float) -> Events:
    """The durable events that a run has now. Raises as above."""
    run = client.call("GetRun", runs_pb2.GetRunRequest(run_id=run_id)).run
    for event in watch(client, run_id, 0, limit_s):
        if event.HasField("partial_text"):
            continue
        yield event
        if event.sequence >= run.last_sequence:
            return


def waits_now(client: MeshClient, event: runs_pb2.RunEvent) -> bool:
    """Whether a run still waits with this event, its last one: what is replayed may have been
    decided since, and its agent not have said so yet. Raises as above."""
    if not event.HasField("waiting"):
        return False
    run = client.call("GetRun", runs_pb2.GetRunRequest(run_id=event.run_id)).run
    last: int = run.last_sequence
    return last <= event.sequence and run.state == runs_pb2.RUN_STATE_WAITING


class _Call:
    """What is asked now: the start, then the watch of what it started."""

    def __init__(
        self,
        client: MeshClient,
        method: str,
        request: runs_pb2.RunAgentRequest | runs_pb2.WatchRunRequest,
    ) -> None:
        self._client = client
        self._method = method
        self._request = request
        self.seen = 0
        self.stored = method == "WatchRun"

    def events(self, limit_s: float) -> Events:
        timeout_s = max(0.001, min(limit_s, CALL_MAX_S))
        for message in self._client.stream(self._method, self._request, timeout_s):
            yield message.event

    def saw(self, event: runs_pb2.RunEvent) -> bool:
        """Notes an event; whether it is new."""
        if not event.HasField("partial_text"):
            if event.sequence <= self.seen:
                return False
            self.seen = event.sequence
        if event.run_id and not self.stored:
            self.stored = True
            self._method = "WatchRun"
            self._request = runs_pb2.WatchRunRequest(run_id=event.run_id)
        if isinstance(self._request, runs_pb2.WatchRunRequest):
            self._request.from_sequence = self.seen + 1
        return True

    def is_over(self) -> bool:
        """Whether the run ended before the first event that is wanted now. Raises SluiceError."""
        if not isinstance(self._request, runs_pb2.WatchRunRequest):
            return False
        request = runs_pb2.GetRunRequest(run_id=self._request.run_id)
        run = self._client.call("GetRun", request).run
        ended: bool = run.HasField("end_time")
        return ended and run.last_sequence < self._request.from_sequence

    def over(self, limit_s: float) -> str:
        """What the end of the time means that was given to watching."""
        if self.stored:
            return f"only the watching ended, after {limit_s:g} s, not the run"
        return f"nothing was heard for {limit_s:g} s; `sluice agent list` shows whether it began"

    @property
    def can_go_on(self) -> bool:
        """Whether asking again loses and doubles nothing: what was answered directly is nowhere
        stored."""
        return self.stored or not self.seen


def _follow(
    call: _Call,
    limit_s: float,
    *,
    once: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Events:
    end_s = clock() + limit_s
    lost_s, pause_s = clock(), PAUSE_MIN_S
    while True:
        try:
            for event in call.events(end_s - clock()):
                lost_s, pause_s = clock(), PAUSE_MIN_S
                if not call.saw(event):
                    continue
                yield event
                if event.HasField("ended") or once:
                    return
            if call.is_over():
                return
        except (SluiceError, UnreachableError) as error:
            passes = _passes(error) and call.can_go_on
            if clock() - lost_s > LOST_MAX_S or not passes:
                raise
            if clock() >= end_s and not _is_late(error):
                raise
        if clock() >= end_s:
            raise deadline_exceeded(message=call.over(limit_s))
        sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _is_late(error: SluiceError | UnreachableError) -> bool:
    return isinstance(error, SluiceError) and error.code is Code.DEADLINE_EXCEEDED


def _passes(error: SluiceError | UnreachableError) -> bool:
    """Whether asking again may help: something is away, or a call's own time was up."""
    return isinstance(error, UnreachableError) or error.code in (
        Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED,
    )
