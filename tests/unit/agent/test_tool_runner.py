"""What holds around every tool: time, size, faults, one call at a time. In virtual time.

Mutants: runner_timeout_does_not_cancel, runner_same_key_twice_at_once, runner_output_unbounded,
runner_passes_exception_texts, runner_breaker_never_refuses.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_svc.adapters.tools.runner import CallLimits, Runner, preview_of
from agent_svc.domain.model import Effect, ToolInfo
from agent_svc.domain.tool_breaker import COOLDOWN_S, FAULTS_MAX
from agent_svc.ports import Tool, ToolContext, ToolError, ToolResult
from sluice.errors import unavailable

Virtual = Callable[[Coroutine[Any, Any, Any]], Any]
Work = Callable[[dict[str, Any], ToolContext], Awaitable[ToolResult]]
LIMITS = CallLimits(timeout_s=10.0, output_bytes_max=1000, preview_bytes=100, label="t")


class Scripted:
    """A tool that does what a function says, and notes its calls."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.calls = self.running = self.together = self.cancelled = 0

    @property
    def info(self) -> ToolInfo:
        return ToolInfo("t", "d", {}, Effect.READ)

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        self.calls += 1
        self.running += 1
        self.together = max(self.together, self.running)
        try:
            return await self._work(arguments, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Kept:
    def __init__(self, fails: bool = False) -> None:
        self.blobs: dict[tuple[str, str, str], bytes] = {}
        self._fails = fails

    async def put(
        self, tenant: str, owner: str, name: str, content: bytes, *, deadline_s: float
    ) -> None:
        if self._fails:
            raise unavailable("STORE_UNAVAILABLE", "The store does not answer.")
        self.blobs[tenant, owner, name] = content


def context(key: str = "run:1", deadline_s: float = 100.0, tenant: str = "a") -> ToolContext:
    return ToolContext(tenant, "run", key, deadline_s)


def answering(text: str = "{}", takes_s: float = 0.0) -> Work:
    async def work(_: dict[str, Any], __: ToolContext) -> ToolResult:
        await asyncio.sleep(takes_s)
        return ToolResult(text)

    return work


def failing(error: Exception) -> Work:
    async def work(_: dict[str, Any], __: ToolContext) -> ToolResult:
        raise error

    return work


async def failure(tool: Tool, **fields: Any) -> ToolError:
    with pytest.raises(ToolError) as error:
        await tool.call({}, context(**fields))
    return error.value


def test_a_tool_that_takes_too_long_is_cancelled(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        slow = Scripted(answering(takes_s=200.0))
        tool = Runner().wrap(slow, LIMITS)
        for deadline_s, took in ((100.0, 10.0), (3.0, 3.0)):
            begin = loop.time()
            error = await failure(tool, deadline_s=deadline_s)
            assert (error.reason, error.made) == ("TOOL_TIMEOUT", True)
            assert loop.time() - begin == pytest.approx(took)
        assert (slow.running, slow.cancelled) == (0, 2)
        error = await failure(tool, deadline_s=0.0)
        assert (error.reason, error.made, slow.calls) == ("TOOL_TIMEOUT", False, 2)

    run_virtual(scenario())


def test_a_call_that_still_runs_is_not_started_a_second_time(run_virtual: Virtual) -> None:
    """A tool of 200 s that takes a second to stop: whoever asks again with the same key waits for
    the first to have stopped; another key does not."""

    async def scenario() -> None:
        async def work(_: dict[str, Any], __: ToolContext) -> ToolResult:
            try:
                await asyncio.sleep(200.0)
            except asyncio.CancelledError:
                await asyncio.sleep(1.0)
                raise
            return ToolResult("{}")

        slow = Scripted(work)
        tool = Runner().wrap(slow, CallLimits(300.0, 1000, 100, "t"))
        first = asyncio.create_task(tool.call({}, context(deadline_s=1000.0)))
        await asyncio.sleep(190.0)
        first.cancel()
        again = asyncio.create_task(tool.call({}, context(deadline_s=1000.0)))
        await asyncio.sleep(0.5)
        assert slow.calls == 1
        assert (await again).content_json == "{}"
        assert (slow.calls, slow.together) == (2, 1)
        with pytest.raises(asyncio.CancelledError):
            await first
        both = [tool.call({}, context(key=key, deadline_s=1000.0)) for key in ("run:2", "run:3")]
        await asyncio.gather(*both)
        assert slow.together == 2

    run_virtual(scenario())


def test_one_that_waits_for_the_first_gives_up_at_its_deadline(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        slow = Scripted(answering(takes_s=200.0))
        tool = Runner().wrap(slow, CallLimits(300.0, 1000, 100, "t"))
        first = asyncio.create_task(tool.call({}, context(deadline_s=1000.0)))
        await asyncio.sleep(0)
        error = await failure(tool, deadline_s=5.0)
        assert (error.reason, error.made, slow.calls) == ("TOOL_TIMEOUT", True, 1)
        assert (await first).content_json == "{}"

    run_virtual(scenario())


def test_a_cancel_reaches_the_tool_at_once(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        slow = Scripted(answering(takes_s=200.0))
        runner = Runner()
        task = asyncio.create_task(runner.wrap(slow, LIMITS).call({}, context()))
        await asyncio.sleep(1.0)
        assert len(runner.running) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (slow.cancelled, len(runner.running)) == (1, 0)
        assert runner.calls == {("t", "CANCELLED"): 1}

    run_virtual(scenario())


async def test_a_small_result_is_passed_on_and_a_large_one_kept_with_a_preview() -> None:
    blobs = Kept()
    runner = Runner(blobs)
    small = json.dumps("x" * 90)
    assert await runner.wrap(Scripted(answering(small)), LIMITS).call({}, context()) == ToolResult(
        small, size_bytes=92
    )
    large = json.dumps({"text": "ä" * 200}, ensure_ascii=False)
    result = await runner.wrap(Scripted(answering(large)), LIMITS).call({}, context("run:7"))
    assert result.truncated and result.size_bytes == len(large.encode())
    assert len(result.content_json.encode()) <= 100
    assert large.startswith(json.loads(result.content_json))
    assert blobs.blobs == {("a", "run", result.blob): large.encode()}
    assert result.blob == "run:7"


async def test_a_result_that_is_not_kept_is_still_told() -> None:
    large = json.dumps("x" * 500)
    for blobs in (None, Kept(fails=True)):
        result = await Runner(blobs).wrap(Scripted(answering(large)), LIMITS).call({}, context())
        assert (result.truncated, result.blob, result.size_bytes) == (True, "", 502)


async def test_a_result_beyond_the_limit_is_a_failure_that_says_that_it_was_made() -> None:
    blobs = Kept()
    error = await failure(Runner(blobs).wrap(Scripted(answering(json.dumps("x" * 1000))), LIMITS))
    assert (error.reason, error.made, blobs.blobs) == ("TOOL_OUTPUT_TOO_LARGE", False, {})


async def test_no_text_of_an_exception_gets_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    runner = Runner()
    tool = runner.wrap(Scripted(failing(RuntimeError("canary-in-an-exception"))), LIMITS)
    error = await failure(tool)
    assert (error.reason, error.made) == ("TOOL_LOST", True)
    assert error.__cause__ is None and error.__suppress_context__
    assert (
        "canary"
        not in f"{error} {error.message} {[vars(one) for one in caplog.records]} {runner.calls}"
    )
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    fields = record.sluice_fields  # type: ignore[attr-defined]
    assert fields["kind"] == "RuntimeError" and fields["at"].startswith("test_tool_runner.py:")


def test_a_tool_that_fails_rests_and_its_neighbour_does_not(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        broken = Scripted(failing(ToolError("TOOL_LOST", "Lost.", made=True)))
        runner = Runner()
        tool = runner.wrap(broken, LIMITS)
        for _ in range(FAULTS_MAX):
            assert (await failure(tool)).reason == "TOOL_LOST"
        error = await failure(tool)
        assert (error.reason, error.made, broken.calls) == ("TOOL_UNAVAILABLE", False, FAULTS_MAX)
        assert (await failure(tool, tenant="b")).reason == "TOOL_LOST"
        await asyncio.sleep(COOLDOWN_S)
        assert (await failure(tool)).reason == "TOOL_LOST"
        assert runner.breakers.opened == 2

    run_virtual(scenario())


def test_what_the_model_or_the_run_brings_about_rests_no_tool(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        for error in (
            ToolError("TOOL_REFUSED", "No.", made=False),
            ToolError("TOOL_FAILED", "No.", made=False),
            ToolError("EGRESS_REFUSED", "No.", made=False),
        ):
            tool = Runner().wrap(Scripted(failing(error)), LIMITS)
            for _ in range(3 * FAULTS_MAX):
                assert (await failure(tool)).reason == error.reason
        slow = Runner().wrap(Scripted(answering(takes_s=5.0)), LIMITS)
        for _ in range(3 * FAULTS_MAX):
            assert (await failure(slow, deadline_s=1.0)).made  # the run had no more time

    run_virtual(scenario())


async def test_a_registered_tool_serves_its_tenant_only() -> None:
    own = Scripted(answering())
    tool = Runner().wrap(own, LIMITS, "a")
    assert (await tool.call({}, context())).content_json == "{}"
    assert (await failure(tool, tenant="b")).reason == "TOOL_NOT_GRANTED"
    assert own.calls == 1


@given(st.text(max_size=300), st.integers(2, 200))
def test_a_preview_is_a_json_string_within_its_bytes(text: str, bytes_max: int) -> None:
    preview = preview_of(text.encode(errors="replace").decode(), bytes_max)
    assert len(preview.encode()) <= bytes_max
    assert text.encode(errors="replace").decode().startswith(json.loads(preview))


async def test_a_result_is_text_that_can_be_stored() -> None:
    tool = Runner().wrap(Scripted(answering('{"a": "\ud800b"}')), LIMITS)
    assert (await tool.call({}, context())).content_json == '{"a": "?b"}'
    long = Runner(Kept()).wrap(Scripted(answering('"' + "\udfff" * 400 + '"')), LIMITS)
    assert json.loads((await long.call({}, context())).content_json).startswith('"??')
