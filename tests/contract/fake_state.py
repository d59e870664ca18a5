"""A state service for tests of its callers: what its protos say of runs, in memory over gRPC.

It can go away and come back (:attr:`FakeRuns.away`), and ends its watches when told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sluice.errors import exhausted, failed_precondition, invalid, not_found, unavailable
from sluice.state.v1 import runs_pb2, runs_pb2_grpc

ENDED = (
    runs_pb2.RUN_PHASE_SUCCEEDED,
    runs_pb2.RUN_PHASE_FAILED,
    runs_pb2.RUN_PHASE_CANCELLED,
)
OPEN = (
    runs_pb2.RUN_PHASE_QUEUED,
    runs_pb2.RUN_PHASE_RUNNING,
    runs_pb2.RUN_PHASE_PAUSED,
)


@dataclass
class FakeRun:
    """A run: what is stored, its events and the text of its running model call."""

    stored: runs_pb2.StoredRun
    create: runs_pb2.CreateRunRequest
    events: list[bytes] = field(default_factory=list)
    texts: list[runs_pb2.LiveText] = field(default_factory=list)


class FakeRuns(runs_pb2_grpc.RunServiceServicer):
    """``RunService`` as far as schedulers call it."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], FakeRun] = {}
        self.calls: list[str] = []
        self.away = False
        self.watches = 0
        self.watches_ended = 0
        self._changed = asyncio.Event()
        self._cut = 0

    def only(self) -> FakeRun:
        """The one run that there is."""
        (run,) = self.runs.values()
        return run

    # What an agent service does.

    def append(
        self,
        run: FakeRun,
        *events: bytes,
        phase: runs_pb2.RunPhase.ValueType = runs_pb2.RUN_PHASE_RUNNING,
        summary: bytes = b"",
    ) -> None:
        """Appends events."""
        run.events += events
        run.texts.clear()
        run.stored.last_sequence = len(run.events)
        run.stored.phase = phase
        if summary:
            run.stored.summary = summary
        if phase in ENDED:
            run.stored.end_time.GetCurrentTime()
        self._wake()

    def text(self, run: FakeRun, step: int, text: str, *, replaces: bool = False) -> None:
        """Passes text on."""
        run.texts.append(runs_pb2.LiveText(step=step, text=text, replaces=replaces))
        self._wake()

    def cut_watches(self) -> None:
        """Ends every watch in order, as a service that drains does."""
        self._cut += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # The service.

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        if self.away:
            raise unavailable("STORE_UNAVAILABLE", "the store does not answer")

    def _find(self, tenant: str, run_id: str) -> FakeRun:
        run = self.runs.get((tenant, run_id))
        if run is None:
            raise not_found("RUN_UNKNOWN", "no such run")
        return run

    async def CreateRun(
        self, request: runs_pb2.CreateRunRequest, context: Any
    ) -> runs_pb2.CreateRunResponse:
        self._begin("CreateRun")
        key = (request.tenant, request.run_id)
        for (tenant, run_id), run in self.runs.items():
            same = request.request_id == run.create.request_id or run_id == request.run_id
            if tenant == request.tenant and same:
                return runs_pb2.CreateRunResponse(run=run.stored, repeated_request=True)
        counted = [
            run
            for (tenant, _), run in self.runs.items()
            if tenant == request.tenant and run.create.open_max and run.stored.phase in OPEN
        ]
        if request.open_max and len(counted) >= request.open_max:
            raise exhausted("TOO_MANY_RUNS", "too many open runs", 5.0)
        stored = runs_pb2.StoredRun(
            run_id=request.run_id,
            tenant=request.tenant,
            phase=runs_pb2.RUN_PHASE_QUEUED,
            spec=request.spec,
            summary=request.summary,
            last_sequence=len(request.events),
            session_id=request.session_id,
            priority=request.priority,
            request_digest=request.request_digest,
        )
        stored.create_time.GetCurrentTime()
        self.runs[key] = FakeRun(stored, request, list(request.events))
        return runs_pb2.CreateRunResponse(run=stored)

    async def GetRun(
        self, request: runs_pb2.GetRunRequest, context: Any
    ) -> runs_pb2.GetRunResponse:
        self._begin("GetRun")
        return runs_pb2.GetRunResponse(run=self._find(request.tenant, request.run_id).stored)

    async def ListRuns(
        self, request: runs_pb2.ListRunsRequest, context: Any
    ) -> runs_pb2.ListRunsResponse:
        self._begin("ListRuns")
        runs = [
            run.stored
            for (tenant, _), run in reversed(self.runs.items())
            if tenant == request.tenant and request.phase in (0, run.stored.phase)
        ]
        if request.page_token and not request.page_token.isdecimal():
            raise invalid("page_token", "is none")
        begin = int(request.page_token or 0)
        end = begin + request.page_size
        token = str(end) if end < len(runs) else ""
        return runs_pb2.ListRunsResponse(runs=runs[begin:end], next_page_token=token)

    async def WatchRun(
        self, request: runs_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[runs_pb2.WatchRunResponse]:
        self._begin("WatchRun")
        run = self._find(request.tenant, request.run_id)
        cut, told, texts = self._cut, max(request.from_sequence, 1) - 1, 0
        fresh = True
        self.watches += 1
        try:
            while True:
                while told < len(run.events):
                    told, texts, fresh = told + 1, 0, False
                    entry = runs_pb2.RunEntry(sequence=told, event=run.events[told - 1])
                    yield runs_pb2.WatchRunResponse(entry=entry)
                if run.stored.phase in ENDED or self._cut != cut:
                    return
                if len(run.texts) > texts:
                    whole = "".join(part.text for part in run.texts)
                    parts = run.texts[texts:]
                    if fresh:  # a newcomer gets the whole text so far
                        parts = [
                            runs_pb2.LiveText(step=run.texts[0].step, text=whole, replaces=True)
                        ]
                    texts, fresh = len(run.texts), False
                    for part in parts:
                        yield runs_pb2.WatchRunResponse(text=part)
                    continue
                await self._changed.wait()
                if self.away:
                    raise unavailable("STORE_UNAVAILABLE", "the store does not answer")
        finally:
            self.watches -= 1
            self.watches_ended += 1

    async def CancelRun(
        self, request: runs_pb2.CancelRunRequest, context: Any
    ) -> runs_pb2.CancelRunResponse:
        self._begin("CancelRun")
        run = self._find(request.tenant, request.run_id)
        if run.stored.phase not in ENDED:
            run.stored.cancelled = True
        return runs_pb2.CancelRunResponse(run=run.stored)

    async def ResumeRun(
        self, request: runs_pb2.ResumeRunRequest, context: Any
    ) -> runs_pb2.ResumeRunResponse:
        self._begin("ResumeRun")
        run = self._find(request.tenant, request.run_id)
        if run.stored.phase != runs_pb2.RUN_PHASE_WAITING:
            raise failed_precondition("NOT_WAITING", "the run does not wait at this step")
        run.stored.phase = runs_pb2.RUN_PHASE_QUEUED
        run.stored.decision = request.decision
        run.stored.decision_step = request.step
        return runs_pb2.ResumeRunResponse(run=run.stored)
