"""What becomes of a claimed run: its history is read, and the loop of its kind works on it.

A run whose spec or events this version does not understand is given back for a while: a newer
replica may. A fault of this code pauses the run, longer each time, and in the end fails it; so one
run that finds a fault does not turn for ever. For one event loop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agent_svc.adapters.counts import Counts
from agent_svc.adapters.held_run import HeldRun, persistently
from agent_svc.adapters.ingest_run import IngestRun
from agent_svc.adapters.journal import Journal
from agent_svc.adapters.task_run import Manner, TaskRun, TaskWorld
from agent_svc.domain.ending import Bounds, Finish, after_refusal, overdue, time_is_up, unread
from agent_svc.domain.history import fold
from agent_svc.domain.model import End, Ended, Event, Queued
from agent_svc.run_ports import (
    Append,
    Chunks,
    Documents,
    GrantedTools,
    IngestSpec,
    Models,
    Phase,
    Runs,
    Sessions,
    Spec,
    StoredEvents,
    UnreadableError,
    Usage,
)
from sluice import logs
from sluice.errors import SluiceError, internal
from sluice.telemetry import Telemetry

UNREADABLE_PAUSE_S: Final = 60.0

log = logs.get(__name__)

GrantTools = Callable[[str, str, Sequence[str]], GrantedTools]
"""Tenant, run and granted names to the tools of the run."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The world of runs. ``wall``: Unix time in seconds."""

    runs: Runs
    sessions: Sessions
    documents: Documents
    usage: Usage
    models: Models
    tools: GrantTools
    chunks_of: Chunks
    wall: Callable[[], float] = time.time


class RunWork:
    """See the module's docstring. ``embed_batch``: chunks embedded in one call."""

    def __init__(
        self,
        outside: Outside,
        manner: Manner,
        telemetry: Telemetry | None = None,
        *,
        embed_batch: int = 32,
    ) -> None:
        self.counts = Counts()
        self._outside = outside
        self._manner = manner
        self._telemetry = telemetry or Telemetry.off()
        self._embed_batch = embed_batch

    async def __call__(self, held: HeldRun) -> Ended | None:
        """Works on a run until it is given back; its end, if it came."""
        spec = held.claimed.spec
        try:
            if spec is None:
                raise UnreadableError
            read = await self._read(held)
        except UnreadableError:
            log.error("a run is not understood here", run_id=held.lease.run_id)
            await self._give_back(held)
            return None
        except SluiceError as error:
            if error.reason != "RUN_TOO_LONG":
                raise
            return await self._give_up(held, unread(error))
        held.history_bytes = read.size_bytes
        # Turns of sessions and ingests never were an agent's.
        counted = not isinstance(spec.work, IngestSpec) and not spec.work.turn
        bounds = Bounds(spec.budget, held.claimed.create_s, counted)
        outside = self._outside
        journal = Journal(held, spec, bounds, outside.runs, fold(read.events), outside.wall)
        try:
            return await self._work(held, journal, spec)
        except SluiceError as error:
            if error.reason == "LEASE_LOST":
                raise
            log.warning("a run cannot go on", run_id=held.lease.run_id, reason=error.reason)
            refusal = error
        except Exception as error:
            log.failure("a run met a fault", error, run_id=held.lease.run_id)
            refusal = internal("")
        # What the store refuses for good, or a fault of this code: later, or the end.
        history, now_s = journal.history, journal.now_s()
        if history.ended is not None:
            return await journal.give_up(unread(refusal))
        if held.cancelled:
            return await journal.give_up(unread())
        if bounds.left_s(history, now_s) <= 0:
            return await journal.give_up(overdue(bounds, history, now_s))
        left = after_refusal(bounds, history, refusal, now_s)
        if isinstance(left, Finish):
            return await journal.give_up(unread(refusal))
        await journal.pause(left)
        return None

    async def _read(self, held: HeldRun) -> StoredEvents:
        claimed = held.claimed
        if claimed.last_sequence == 1:
            # A new run: its one event says that it was queued, and nothing follows from that.
            return StoredEvents((Event(1, claimed.create_s, Queued("")),), 0)
        bytes_max = self._manner.history_bytes_max
        return await persistently(held, lambda: self._outside.runs.read(held.lease, bytes_max))

    async def _work(self, held: HeldRun, journal: Journal, spec: Spec) -> Ended | None:
        outside, lease, manner = self._outside, held.lease, self._manner
        model = outside.models.of_run(lease, spec, held.claimed.session_id or lease.run_id)
        if isinstance(spec.work, IngestSpec):
            ingest = IngestRun(
                held,
                journal,
                spec.work,
                outside.documents,
                model,
                outside.chunks_of,
                batch=self._embed_batch,
                rules=manner.rules,
            )
            return await ingest.run()
        world = TaskWorld(
            runs=outside.runs,
            sessions=outside.sessions,
            usage=outside.usage,
            model=model,
            tools=outside.tools(lease.tenant, lease.run_id, spec.work.tools),
            telemetry=self._telemetry,
        )
        return await TaskRun(held, journal, spec, world, manner, self.counts).run()

    async def _give_back(self, held: HeldRun) -> None:
        """For somebody who understands it; one that is cancelled or out of time ends here."""
        claimed = held.claimed
        if claimed.cancelled or claimed.to_end:
            await self._give_up(held, unread(None if claimed.cancelled else time_is_up()))
            return
        ready_s = round(self._outside.wall(), 6) + UNREADABLE_PAUSE_S
        await self._append(held, (), Phase.PAUSED, ready_s)

    async def _give_up(self, held: HeldRun, ended: Ended) -> Ended:
        """Ends a run whose history is not read."""
        now_s = round(self._outside.wall(), 6)
        event = Event(held.claimed.last_sequence + 1, now_s, ended)
        phase = Phase.CANCELLED if ended.end is End.CANCELLED else Phase.FAILED
        await self._append(held, (event,), phase, 0.0)
        return ended

    async def _append(
        self, held: HeldRun, events: tuple[Event, ...], phase: Phase, ready_s: float
    ) -> None:
        append = Append(
            append_id=str(uuid.uuid4()),
            expected_sequence=held.claimed.last_sequence,
            events=events,
            summary=None,
            phase=phase,
            ready_s=ready_s,
        )
        held.leaving = True
        await self._outside.runs.append(held.lease, append)
