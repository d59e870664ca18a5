"""The tool calls of one step, side by side.

That a call begins is stored before it is made; its end is stored as soon as it is known, also while
others go on. A call of which nobody knows whether it had its effect (ToolError with ``made``) is
made again with its key, a few times, if the tool is READ or IDEMPOTENT; a ONCE one is left without
an end: the next action then asks a person. Every other failure is told to the model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from agent_svc.adapters.journal import Journal
from agent_svc.domain.model import CallEnded, Effect, Failure, ToolInfo
from agent_svc.domain.next_action import CallTools, PlannedCall
from agent_svc.ports import ToolContext, ToolError, ToolResult
from agent_svc.run_ports import GrantedTools
from sluice import logs
from sluice.fault_points import fault_point
from sluice.reasons import code_of

CALL_TRIES: Final = 3
RETRY_S: Final = 0.2  # before the second try; doubled before the third

log = logs.get(__name__)


class ToolCalls:
    """Makes the calls of one step. ``context`` gives what each is made under."""

    def __init__(
        self,
        journal: Journal,
        tools: GrantedTools,
        context: Callable[[PlannedCall, float], ToolContext],
    ) -> None:
        self.made = 0
        self._journal = journal
        self._tools = tools
        self._context = context

    async def make(self, action: CallTools, infos: Sequence[ToolInfo]) -> None:
        """Makes the calls, whose beginnings are stored. Returns when all have ended or are in
        doubt, or the run's time is over."""
        known = {info.name: info for info in infos}
        left = len(action.calls)

        async def one(planned: PlannedCall) -> None:
            nonlocal left
            ended = await self._call(planned, known[planned.call.name], action.deadline_s)
            left -= 1
            if ended is not None:
                self._journal.add(ended)
                # The last one leaves together with what follows from it.
                if left:
                    await self._journal.store()

        # When the run's time is over, the next action says so.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(action.deadline_s):
                await _side_by_side([one(planned) for planned in action.calls])

    async def _call(self, planned: PlannedCall, info: ToolInfo, left_s: float) -> CallEnded | None:
        """One call; None: it is in doubt."""
        for tries in range(1, CALL_TRIES + 1):
            fault_point("agent.before_tool_call")
            self.made += 1
            try:
                result = await self._once(planned, info, left_s)
            except ToolError as error:
                if error.made and info.effect is Effect.ONCE:
                    return None
                if error.made and tries < CALL_TRIES:
                    await asyncio.sleep(RETRY_S * 2 ** (tries - 1))
                    continue
                failure = Failure(code_of(error.reason), error.reason, error.message)
                return CallEnded(planned.step, planned.call.id, error.content_json, failure=failure)
            fault_point("agent.after_tool_call")
            return CallEnded(
                planned.step,
                planned.call.id,
                result.content_json,
                truncated=result.truncated,
                blob=result.blob,
                size_bytes=result.size_bytes,
            )
        raise AssertionError("unreachable")

    async def _once(self, planned: PlannedCall, info: ToolInfo, left_s: float) -> ToolResult:
        try:
            # If it needed a person's word when it was planned, it has it; if it needs one since,
            # it is refused.
            return await self._tools.call(
                planned.call.name,
                planned.call.arguments_json,
                self._context(planned, left_s),
                approved=info.needs_approval,
            )
        except ToolError:
            raise
        except Exception as error:
            log.failure("a tool failed by a fault of its own", error)
            raise ToolError("TOOL_FAILED", "The tool failed.", made=True) from None


async def _side_by_side(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all; the first that fails ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
