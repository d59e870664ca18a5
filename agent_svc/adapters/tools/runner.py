"""What holds for every call of every tool, around the tool.

Time: the lesser of the tool's timeout and what the run has left; its end cancels the call and
waits for it to stop. Size: a result beyond the tool's limit is a failure; one beyond its preview is
stored as a blob, and the run gets the beginning. Faults: a breaker per tenant and tool. Failures
are ToolErrors with fixed texts; the text of any other exception stays here.

A call that still runs is never started a second time: one with the same run and idempotency key
waits until the first has really stopped. Runs on the event loop; its tables are bounded by calls
in progress and by ToolBreakers.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from agent_svc.domain.model import ToolInfo
from agent_svc.domain.tool_breaker import Pass, ToolBreaker, ToolBreakers, Verdict
from agent_svc.ports import Blobs, Tool, ToolContext, ToolError, ToolResult
from sluice import logs
from sluice.errors import SluiceError
from sluice.telemetry import Telemetry
from sluice.telemetry_names import (
    ATTR_TENANT,
    ATTR_TOOL,
    SPAN_TOOL,
    TOOL_BREAKER_OPENED,
    TOOL_CALLS,
    TOOL_TIME,
    TOOLS_RUNNING,
)

BLOB_S: Final = 5.0  # for keeping a large result
# The tool's own faults; other failures are brought about by arguments and rules.
_FAULTS: Final = frozenset({"TOOL_TIMEOUT", "TOOL_LOST", "TOOL_UNAVAILABLE"})

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Of one declaration. ``label``: its bounded name in metrics."""

    timeout_s: float
    output_bytes_max: int
    preview_bytes: int
    label: str


class Runner:
    """Wraps tools; one per process."""

    def __init__(
        self,
        blobs: Blobs | None = None,
        telemetry: Telemetry | None = None,
        breakers: ToolBreakers | None = None,
    ) -> None:
        self.blobs = blobs
        self.telemetry = telemetry or Telemetry.off()
        self.breakers = breakers or ToolBreakers()
        self.running: dict[tuple[str, str, str], asyncio.Event] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        self.time = self.telemetry.histogram(TOOL_TIME)
        self.telemetry.counter(TOOL_CALLS, self._calls)
        self.telemetry.counter(TOOL_BREAKER_OPENED, lambda: self.breakers.opened)
        self.telemetry.gauge(TOOLS_RUNNING, lambda: len(self.running))

    def wrap(self, tool: Tool, limits: CallLimits, tenant: str = "") -> Tool:
        """The tool under its limits. ``tenant``: the only one that may call it; empty: any."""
        return _RunTool(self, tool, limits, tenant)

    def _calls(self) -> list[tuple[int, dict[str, str]]]:
        return [
            (count, {"tool": tool, "outcome": outcome})
            for (tool, outcome), count in self.calls.items()
        ]


class _RunTool:
    def __init__(self, runner: Runner, tool: Tool, limits: CallLimits, tenant: str) -> None:
        self._runner = runner
        self._tool = tool
        self._limits = limits
        self._tenant = tenant

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._tool.info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        if self._tenant and context.tenant != self._tenant:
            raise ToolError("TOOL_NOT_GRANTED", "The run may not call this tool.", made=False)
        runner, loop = self._runner, asyncio.get_running_loop()
        begin = loop.time()
        span = runner.telemetry.span(
            SPAN_TOOL,
            context.traceparent,
            {ATTR_TOOL: self._limits.label, ATTR_TENANT: context.tenant},
        )
        outcome = "CANCELLED"
        try:
            # What the tool calls is a child of this span.
            under = replace(context, traceparent=span.traceparent)
            result = await self._once_at_a_time(arguments, under, begin + context.deadline_s)
            outcome = "OK"
        except ToolError as error:
            outcome = error.reason
            raise
        finally:
            runner.calls[self._limits.label, outcome] += 1
            runner.time.record(loop.time() - begin, {"tool": self._limits.label})
            span.end(None if outcome == "OK" else outcome)
        return result

    async def _once_at_a_time(
        self, arguments: dict[str, Any], context: ToolContext, end: float
    ) -> ToolResult:
        running = self._runner.running
        key = (context.tenant, context.run_id, context.idempotency_key)
        try:
            async with asyncio.timeout_at(end):
                while key in running:
                    await running[key].wait()
        except TimeoutError:
            raise ToolError("TOOL_TIMEOUT", "The tool took too long.", made=True) from None
        stopped = running[key] = asyncio.Event()
        try:
            raw = await self._past_the_breaker(arguments, context, end)
            return await self._bounded(raw, context)
        finally:
            del running[key]
            stopped.set()

    async def _past_the_breaker(
        self, arguments: dict[str, Any], context: ToolContext, end: float
    ) -> ToolResult:
        loop = asyncio.get_running_loop()
        breaker = self._runner.breakers.of(context.tenant, self.info.name)
        begun = breaker.begin(loop.time())
        if begun is Pass.REFUSED:
            raise ToolError("TOOL_UNAVAILABLE", "The tool failed lately and rests.", made=False)
        verdict = Verdict.NEUTRAL  # of a cancel
        try:
            result = await self._in_time(arguments, context, end)
            verdict = Verdict.SUCCESS
        except _RunOutOfTimeError as error:
            raise error.of_tool from None
        except ToolError as error:
            verdict = Verdict.FAULT if error.reason in _FAULTS else Verdict.NEUTRAL
            raise
        finally:
            _tell(breaker, begun, verdict, loop.time())
        return result

    async def _in_time(
        self, arguments: dict[str, Any], context: ToolContext, end: float
    ) -> ToolResult:
        loop = asyncio.get_running_loop()
        own = loop.time() + self._limits.timeout_s
        late = ToolError("TOOL_TIMEOUT", "The tool took too long.", made=True)
        if end <= loop.time():
            late = ToolError("TOOL_TIMEOUT", "No time is left for the tool.", made=False)
            raise _RunOutOfTimeError(late)
        try:
            async with asyncio.timeout_at(min(own, end)):
                return await self._tool.call(arguments, context)
        except TimeoutError:
            if end < own:  # the run's time, not the tool's: nothing is said of the tool
                raise _RunOutOfTimeError(late) from None
            raise late from None
        except (ToolError, asyncio.CancelledError):
            raise
        except Exception as error:
            log.error("a tool raised an exception", kind=type(error).__name__, at=_place(error))
            raise ToolError("TOOL_LOST", "The tool failed.", made=True) from None

    async def _bounded(self, result: ToolResult, context: ToolContext) -> ToolResult:
        # Halves of surrogate pairs, which JSON can spell and no one can store, are replaced.
        content = result.content_json.encode("utf-8", "replace")
        text, size = content.decode(), len(content)
        if size > self._limits.output_bytes_max:
            raise ToolError(
                "TOOL_OUTPUT_TOO_LARGE", "The call was made; its result is too large.", made=False
            )
        if size <= self._limits.preview_bytes:
            return ToolResult(text, size_bytes=size)
        blob = await self._keep(content, context)
        preview = preview_of(text, self._limits.preview_bytes)
        return ToolResult(preview, truncated=True, blob=blob, size_bytes=size)

    async def _keep(self, content: bytes, context: ToolContext) -> str:
        """The blob's name; empty when it could not be kept: the call was made all the same, and
        its beginning is worth more to the run than nothing."""
        blobs, name = self._runner.blobs, context.idempotency_key
        if blobs is None:
            return ""
        try:
            async with asyncio.timeout(BLOB_S):
                await blobs.put(context.tenant, context.run_id, name, content, deadline_s=BLOB_S)
        except (SluiceError, TimeoutError):
            log.warning("a large result of a tool was not kept")
            return ""
        return name


class _RunOutOfTimeError(Exception):
    """The run's time is over, which is no fault of the tool."""

    def __init__(self, of_tool: ToolError) -> None:
        super().__init__()
        self.of_tool = of_tool


def _tell(breaker: ToolBreaker, begun: Pass, verdict: Verdict, now: float) -> None:
    closed = breaker.is_closed
    breaker.end(begun, verdict, now)
    if closed and not breaker.is_closed:
        log.warning("a tool failed again and again: it rests")


def _place(error: BaseException) -> str:
    """File and line that raised it: a traceback would come with the exception's text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{PurePath(frame.filename).name}:{frame.lineno}"


def preview_of(content: str, bytes_max: int) -> str:
    """The beginning of a text as a JSON string of at most ``bytes_max`` bytes."""
    cut = content.encode()[:bytes_max].decode(errors="ignore")
    text = json.dumps(cut, ensure_ascii=False)
    while (size := len(text.encode())) > bytes_max and cut:
        cut = cut[: min(len(cut) - 1, len(cut) * bytes_max // size)]
        text = json.dumps(cut, ensure_ascii=False)
    return text
