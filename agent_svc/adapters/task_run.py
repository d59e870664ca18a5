"""A task or a session's turn, from its claim to its end or to the next who holds it.

The loop asks :func:`next_action` and does what it says; whatever it does is stored before its
effect is used. Nothing else is remembered: a run that is left in the middle goes on from its
events. Ends with the lease given back, but when it was lost. For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, assert_never, cast

from agent_svc.adapters.counts import Counts
from agent_svc.adapters.held_run import HeldRun, InterruptedRunError, persistently
from agent_svc.adapters.journal import Journal
from agent_svc.adapters.model_step import BudgetTooSmallError, Lengths, fitting, model_step
from agent_svc.adapters.tool_calls import ToolCalls
from agent_svc.domain.ending import (
    Finish,
    Pause,
    Rules,
    after_refusal,
    cancelled,
    failed,
    next_is_too_large,
    out_of_time,
    run_too_long,
)
from agent_svc.domain.history import request_id
from agent_svc.domain.model import Ended, Message, Task, ToolInfo
from agent_svc.domain.next_action import (
    AskPerson,
    CallModel,
    CallTools,
    PlannedCall,
    Record,
    next_action,
)
from agent_svc.domain.tool_format import Options, ask
from agent_svc.ports import ToolContext
from agent_svc.run_ports import GrantedTools, Model, Runs, Sessions, Spec, TaskSpec, Usage
from sluice import context, logs
from sluice import telemetry_names as names
from sluice.errors import SluiceError
from sluice.telemetry import Span, Telemetry

IN_PLACE_TRIES: Final = 3

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Manner:
    """How runs are worked off. ``options``: of prompts; with ``options_by_context`` their length
    follows the model's context where that is known. ``output_tokens_max``: of a model call whose
    run sets none; ``call_tokens_max``: likewise of one that has to call tools. ``in_place_s``: a
    refused step that may be tried again within this time keeps its lease. ``text_interval_s``:
    between two messages of live text, as it is now. ``history_bytes_max``: of one run's events."""

    rules: Rules
    options: Options
    options_by_context: bool
    output_tokens_max: int
    call_tokens_max: int
    in_place_s: float
    text_interval_s: Callable[[], float]
    history_bytes_max: int = 8 << 20


@dataclass(frozen=True, slots=True)
class TaskWorld:
    """What a task reaches."""

    runs: Runs
    sessions: Sessions
    usage: Usage
    model: Model
    tools: GrantedTools
    telemetry: Telemetry


class TaskRun:
    """See the module's docstring."""

    def __init__(
        self,
        held: HeldRun,
        journal: Journal,
        spec: Spec,
        world: TaskWorld,
        manner: Manner,
        counts: Counts,
    ) -> None:
        assert isinstance(spec.work, TaskSpec)
        self._held = held
        self._journal = journal
        self._spec = spec
        self._work = spec.work
        self._world = world
        self._manner = manner
        self._counts = counts
        self._history: Sequence[Message] = ()
        self._infos: Sequence[ToolInfo] = ()
        self._tries = 0  # refused tries of this step that are not among the events
        said = self._work.output_tokens_max
        output_tokens = said or manner.output_tokens_max
        self._lengths = Lengths(output_tokens, said or manner.call_tokens_max)
        self._options = manner.options
        if manner.options_by_context:
            tokens = self._work.context_tokens
            self._options = fitting(manner.options, tokens, output_tokens)

    async def run(self) -> Ended | None:
        """Works until the run is given back; its end, if it came. Raises SluiceError LEASE_LOST,
        or what the state service refuses."""
        claimed, journal = self._held.claimed, self._journal
        if claimed.session_id and not self._is_over():
            sessions = self._world.sessions
            self._history = await sessions.messages(claimed.lease.tenant, claimed.session_id)
        while True:
            try:
                left = await self._resolve_tools()
            except InterruptedRunError:
                if not self._held.cancelled:  # without its tools nothing is decided but its end
                    await journal.hand_over()
                    return None
                left = None
            if left is not None:
                return await self._leave(left)
            task = self._task(self._infos)
            action = next_action(
                task,
                journal.history,
                journal.now_s(),
                is_cancelled=self._held.cancelled,
                decision=claimed.decision,
                rules=self._manner.rules,
            )
            match action:
                case Record(events):
                    journal.add(*events)
                case Finish():
                    return await self._finish(action)
                case AskPerson(step, waiting):
                    await journal.wait(step, waiting)
                    return None
                case Pause():
                    await journal.pause(action)
                    return None
                case CallModel() if self._held.history_bytes > self._manner.history_bytes_max:
                    too_long = failed(journal.bounds, journal.history, run_too_long())
                    return await self._finish(too_long)
                case CallModel() | CallTools() if self._held.draining:
                    await journal.hand_over()
                    return None
                case CallModel():
                    if (left := await self._call_model(task, action)) is not None:
                        return await self._leave(left)
                case CallTools():
                    await self._call_tools(action)
                case _:
                    assert_never(action)

    async def _resolve_tools(self) -> Pause | Finish | None:
        """Looks the tools up; what follows when that cannot be done now. A run does not go on
        without a tool that it was granted, but it ends all the same; and what a person decided is
        taken first: while a run waits for people nothing else would end it. Raises
        InterruptedRunError."""
        journal = self._journal
        history = journal.history
        if not self._work.tools or self._is_over() or history.answered or history.waiting:
            return None
        try:
            begun = history.last_step is not None
            self._infos = await self._held.effect(self._world.tools.infos(begun=begun))
        except SluiceError as error:
            now_s = journal.now_s()
            if self._held.cancelled:
                return cancelled(journal.bounds, history)
            if journal.bounds.left_s(history, now_s) <= 0:
                return out_of_time(journal.bounds, history, now_s)
            return after_refusal(journal.bounds, history, error, now_s, rules=self._manner.rules)
        return None

    def _is_over(self) -> bool:
        """Whether the run only has to be ended: that needs nobody else, so that it is done though
        all slots are taken."""
        journal = self._journal
        left_s = journal.bounds.left_s(journal.history, journal.now_s())
        return self._held.cancelled or left_s <= 0

    def _task(self, infos: Sequence[ToolInfo]) -> Task:
        work = self._work
        schema = json.loads(work.answer_schema_json) if work.answer_schema_json else None
        return Task(
            run_id=self._held.lease.run_id,
            messages=work.messages,
            tools=tuple(infos),
            choice=work.choice,
            budget=self._spec.budget,
            create_s=self._held.claimed.create_s,
            answer_schema=cast("Mapping[str, object] | None", schema),
            turn=work.turn,
            history=self._history,
        )

    # --- effects ---------------------------------------------------------------------------------

    async def _call_model(self, task: Task, action: CallModel) -> Pause | Finish | None:
        """One model call; what ends this run or gives it back, if the call could not be made."""
        await self._journal.store()
        span = self._span("model", action.step)
        reason: str | None = None
        try:
            await self._held.until_valid()
            context.traceparent.set(span.traceparent)  # calls of this task carry it
            step = await self._held.effect(
                model_step(
                    task,
                    self._journal.history,
                    action,
                    self._world.model,
                    options=self._options,
                    lengths=self._lengths,
                    publish=self._publish,
                    interval_s=self._manner.text_interval_s,
                )
            )
        except BudgetTooSmallError:
            reason = "BUDGET_TOKENS"
            journal = self._journal
            return next_is_too_large(journal.bounds, journal.history, journal.now_s())
        except InterruptedRunError:
            reason = "INTERRUPTED"
            return None
        except SluiceError as error:
            reason = error.reason
            self._counts.refused_steps += 1
            return await self._refused(error)
        finally:
            span.end(reason)
        self._tries = 0
        self._counts.steps += 1
        self._journal.add(step)
        return None

    async def _refused(self, error: SluiceError) -> Pause | Finish | None:
        """What follows from a refused step; None: it was waited out here."""
        journal, manner = self._journal, self._manner
        now_s = journal.now_s()
        after = after_refusal(
            journal.bounds,
            journal.history,
            error,
            now_s,
            tries=self._tries,
            spread=random.random(),
            rules=manner.rules,
        )
        if isinstance(after, Finish):
            return after
        wait_s = after.ready_s - now_s
        if wait_s > manner.in_place_s or self._tries >= IN_PLACE_TRIES:
            return after
        self._tries += 1
        with contextlib.suppress(InterruptedRunError):
            await self._held.effect(asyncio.sleep(wait_s))
        return None

    async def _call_tools(self, action: CallTools) -> None:
        self._journal.add(*(planned.started for planned in action.calls if not planned.begun))
        await self._journal.store()
        calls = ToolCalls(self._journal, self._world.tools, self._context)
        span = self._span("tools", action.calls[0].step)
        context.traceparent.set(span.traceparent)
        try:
            await self._held.until_valid()
            await self._held.effect(calls.make(action, self._infos))
        except InterruptedRunError:
            return
        finally:
            self._counts.tool_calls += calls.made
            span.end()

    def _span(self, kind: str, step: int) -> Span:
        lease = self._held.lease
        span = self._world.telemetry.span(names.SPAN_STEP, self._spec.traceparent)
        if span.recording:
            span.set(names.ATTR_TENANT, lease.tenant)
            span.set(names.ATTR_RUN_ID, lease.run_id)
            span.set(names.ATTR_STEP, step)
            span.set(names.ATTR_STEP_KIND, kind)
        return span

    async def _publish(self, step: int, text: str, replaces: bool) -> bool:
        return await self._world.runs.publish(self._held.lease, step, text, replaces=replaces)

    async def _embed(self, step: int, texts: Sequence[str], deadline_s: float) -> Sequence[bytes]:
        identifier = request_id(self._held.lease.run_id, step)
        return await self._world.model.embed(texts, request_id=identifier, deadline_s=deadline_s)

    def _context(self, planned: PlannedCall, left_s: float) -> ToolContext:
        return ToolContext(
            tenant=self._held.lease.tenant,
            run_id=self._held.lease.run_id,
            idempotency_key=planned.idempotency_key,
            deadline_s=left_s,
            traceparent=context.traceparent.get(),
            embed=partial(self._embed, planned.step),
        )

    # --- the ways out ----------------------------------------------------------------------------

    async def _leave(self, left: Pause | Finish) -> Ended | None:
        if isinstance(left, Finish):
            return await self._finish(left)
        await self._journal.pause(left)
        return None

    def _extra_cost(self) -> float:
        """What the run cost beyond a direct call: the part of its prompt that the task itself is
        not, by bytes, at the price of the whole. An estimate."""
        history = self._journal.history
        if not history.tokens:
            return 0.0
        own = sum(len(message.content) for message in self._work.messages)
        asked = sum(
            len(m.content) for m in ask(self._task(self._infos), (), self._options).messages
        )
        needless = history.prompt_tokens * max(0.0, 1.0 - own / max(1, asked))
        return history.cost * needless / history.tokens

    async def _finish(self, action: Finish) -> Ended:
        end = action.events[-1]
        assert isinstance(end, Ended)
        if end.agent_not_needed:
            # Before the end, after which nobody comes back to it; told twice it counts once.
            lease, usage = self._held.lease, self._world.usage
            try:
                await persistently(
                    self._held,
                    lambda: usage.agent_not_needed(lease.tenant, lease.run_id, self._spec.model),
                    is_over=lambda: True,  # a full store keeps no run from its end
                )
            except SluiceError as error:
                if error.reason == "LEASE_LOST":
                    raise  # whoever takes the run over counts it
                log.warning("a run that was not needed is not counted", reason=error.reason)
            self._counts.not_needed(lease.tenant, self._extra_cost())
        said: tuple[Message, ...] = ()
        if self._held.claimed.session_id:
            said = (*self._work.messages, Message("assistant", end.answer))
        return await self._journal.finish(action, said)
