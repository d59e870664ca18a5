"""The events of a held run: what is known, and what is still to be stored.

Commit before effect: what :meth:`Journal.add` takes is history at once for those who decide, and
:meth:`Journal.store` returns when the store has it. Several adds leave in one append; appends of a
run follow one another. A store that does not answer is asked again with the same append until it
does or the lease is lost, and so is one that was cut off on its way: the store answers a repeated
append as it did before. For one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from agent_svc.adapters.held_run import HeldRun, persistently
from agent_svc.domain.ending import Bounds, Finish, Pause
from agent_svc.domain.history import History
from agent_svc.domain.model import CallStarted, End, Ended, Event, Kind, Message, Waiting
from agent_svc.run_ports import Append, Phase, Runs, Spec, Summary
from sluice.errors import SluiceError
from sluice.fault_points import fault_point

_PHASES: Final = {
    End.SUCCEEDED: Phase.SUCCEEDED,
    End.FAILED: Phase.FAILED,
    End.CANCELLED: Phase.CANCELLED,
}


class Journal:
    """See the module's docstring. ``wall``: Unix time in seconds. The ways out (:meth:`wait`,
    :meth:`pause`, :meth:`finish`, :meth:`hand_over`) store what was added and give the lease back.
    All raise SluiceError: LEASE_LOST, or what the store refuses."""

    def __init__(
        self,
        held: HeldRun,
        spec: Spec,
        bounds: Bounds,
        runs: Runs,
        history: History,
        wall: Callable[[], float],
    ) -> None:
        self.history = history
        self.bounds = bounds
        self._held = held
        self._spec = spec
        self._runs = runs
        self._wall = wall
        self._stored = history.last_sequence
        self._waiting: list[Event] = []
        self._pending: Append | None = None
        self._turn = asyncio.Lock()

    def now_s(self) -> float:
        """Unix time, never before the last event: clocks of machines differ."""
        # Whole microseconds, as events carry them: a decision is the same when read back.
        return round(max(self._wall(), self.history.last_s), 6)

    def add(self, *kinds: Kind) -> None:
        """Adds events that happen now."""
        for kind in kinds:
            event = Event(self.history.last_sequence + 1, self.now_s(), kind)
            self.history.add(event)
            self._waiting.append(event)

    async def store(self) -> None:
        """Stores what was added, if anything; the lease goes on."""
        if self._waiting:
            await self._store(Phase.RUNNING)

    async def wait(self, step: int, waiting: Waiting | None) -> None:
        """Until a person decides."""
        if waiting is not None:
            self.add(waiting)
        fault_point("agent.before_wait")
        await self._store(Phase.WAITING, waiting_step=step)

    async def pause(self, action: Pause) -> None:
        """Until a time. A run that waits for a person gets no event: with its next events the store
        forgets what was decided."""
        if action.paused is not None and self.history.waiting is None:
            self.add(action.paused)
        fault_point("agent.before_pause")
        await self._store(Phase.PAUSED, ready_s=action.ready_s)

    async def hand_over(self) -> None:
        """Ready for anybody."""
        fault_point("agent.before_hand_over")
        await self._store(Phase.QUEUED)

    async def finish(self, action: Finish, session_messages: Sequence[Message] = ()) -> Ended:
        """For good. ``session_messages``: what the run's session gets, if the run succeeded."""
        self.add(*action.events)
        ended = self.history.ended
        assert ended is not None, "a run that ends has an end"
        messages = tuple(session_messages) if ended.end is End.SUCCEEDED else ()
        fault_point("agent.before_end")
        await self._store(_PHASES[ended.end], session_messages=messages)
        fault_point("agent.after_end")
        return ended

    async def leave(self, action: Pause | Finish) -> Ended | None:
        """Pauses or finishes."""
        if isinstance(action, Finish):
            return await self.finish(action)
        await self.pause(action)
        return None

    async def give_up(self, ended: Ended) -> Ended:
        """For good, although the store refused what was added: with as much of it as it takes. A
        call whose beginning it refused was not made, so nothing says that it began."""
        try:
            await self._complete()
        except SluiceError as refusal:
            if refusal.reason == "LEASE_LOST":
                raise
        kept = [event for event in self._waiting if not isinstance(event.kind, Ended | CallStarted)]
        self._held.leaving = True
        for some in (kept, []):
            events = [
                replace(event, sequence=number)
                for number, event in enumerate(
                    (*some, Event(0, self.now_s(), ended)), self._stored + 1
                )
            ]
            try:
                await self._append(self._made(tuple(events), _PHASES[ended.end], ended=ended))
            except SluiceError as refusal:
                if not some or refusal.reason == "LEASE_LOST":
                    raise
            else:
                break
        return ended

    async def _store(
        self,
        phase: Phase,
        *,
        ready_s: float = 0.0,
        waiting_step: int = 0,
        session_messages: tuple[Message, ...] = (),
    ) -> None:
        async with self._turn:
            await self._complete()
            events = tuple(self._waiting)
            if not events and phase is Phase.RUNNING:
                return
            self._pending = self._made(
                events,
                phase,
                ready_s=ready_s,
                waiting_step=waiting_step,
                session_messages=session_messages,
                ended=self.history.ended,
            )
            await self._complete()

    async def _complete(self) -> None:
        """Makes the append under way, if there is one. One that a cancel or a drain cut off may
        have happened: it is repeated as it was before anything else is stored."""
        append = self._pending
        if append is None:
            return
        self._held.leaving = append.phase is not Phase.RUNNING
        fault_point("agent.before_append")
        try:
            self._held.history_bytes += await self._append(append)
        except SluiceError:
            self._pending = None  # refused: nothing of it is stored
            raise
        fault_point("agent.after_append")
        self._pending = None
        self._stored += len(append.events)
        del self._waiting[: len(append.events)]

    def _made(
        self,
        events: tuple[Event, ...],
        phase: Phase,
        *,
        ready_s: float = 0.0,
        waiting_step: int = 0,
        session_messages: tuple[Message, ...] = (),
        ended: Ended | None,
    ) -> Append:
        return Append(
            append_id=str(uuid.uuid4()),
            expected_sequence=self._stored,
            events=events,
            summary=self._summary(ended),
            phase=phase,
            ready_s=ready_s,
            waiting_step=waiting_step,
            session_messages=session_messages,
        )

    async def _append(self, append: Append) -> int:
        held = self._held
        return await persistently(
            held, lambda: self._runs.append(held.lease, append), self._is_out_of_time
        )

    def _is_out_of_time(self) -> bool:
        return self.bounds.left_s(self.history, self.now_s()) <= 0

    def _summary(self, ended: Ended | None) -> Summary:
        history = self.history
        return Summary(
            steps=history.steps_done,
            prompt_tokens=history.prompt_tokens,
            cached_tokens=history.cached_tokens,
            completion_tokens=history.completion_tokens,
            tool_calls=history.tool_calls,
            cost=history.cost,
            budget=self._spec.budget,
            model=self._spec.model,
            session_id=self._held.claimed.session_id,
            answer=ended.answer if ended else "",
            failure=ended.failure if ended else None,
            kind=self._spec.kind,
        )
