"""``make bench-agent``: what a step of a run costs beyond its model and its tool, how many runs one
agent service takes, how fast the runs of a killed one go on, and what agents cost the direct path.

Real processes with an embedded Valkey (``appendfsync always``) and the simulated engine, whose time
for an answer is known: tokens x 2 ms. A step's overhead is the time from one model step to the next
as the client sees them through Envoy, less the engine's: the tool call between them (a calculator,
which takes no time), all that is stored, the way through scheduler and execution. The client runs
on the same cores. See docs/BENCHMARKS.md for the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from bench import session_append, vector_search
from bench.harness import ROOT, Mesh, mesh, quantile, table, write_results
from sluice.command.run_files import RunPaths, read_records
from sluice.scheduler.v1 import generate_pb2, runs_pb2, scheduler_pb2_grpc

CONFIG = ROOT / "bench" / "agent.toml"
TOKEN_S = 0.002
PREFILL_TOKENS_PER_S = 1e6
CALLS = 3
"""Tool calls of a run; it takes one model call more."""

WARM_UP = 5
CROWD = 200
LIMIT_S = 120.0
AGAIN_S = 0.2


@dataclass
class Seen:
    """A run as its client saw it; times by ``time.monotonic``."""

    began_s: float
    ended_s: float = 0.0
    model_steps: list[tuple[float, float]] = field(default_factory=list)
    """When each was seen, and the engine's own time for it."""
    succeeded: bool = False
    broken: int = 0
    """Calls that were refused for a moment, or broke."""
    events: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Model steps."""
        return len(self.model_steps)

    @property
    def start_ms(self) -> float:
        """From the request to the first model step, without the engine's time: admission, claim."""
        seen_s, model_s = self.model_steps[0]
        return (seen_s - self.began_s - model_s) * 1000

    @property
    def step_ms(self) -> list[float]:
        """Of every further step, what is neither model nor tool: from one model step to the next,
        a tool call between them."""
        pairs = zip(self.model_steps, self.model_steps[1:], strict=False)
        return [(there - here - model_s) * 1000 for (here, _), (there, model_s) in pairs]


class Client:
    """The tenant ``dev`` at the edge."""

    def __init__(self, running: Mesh) -> None:
        self._channel = grpc.aio.insecure_channel(running.envoy)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {running.key}"),)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def run(self, *, pace_ms: float = 0.0) -> Seen:
        """One run of ``CALLS`` calls, watched to its end."""
        seen = Seen(time.monotonic())
        request = _request(pace_ms)
        call: Any = self._stub.RunAgent(request, timeout=LIMIT_S, metadata=self._metadata)
        run_id = ""
        while not seen.ended_s:
            try:
                async for message in call:
                    run_id = message.event.run_id or run_id
                    _note(seen, message.event)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                seen.broken += 1
                await asyncio.sleep(AGAIN_S)
            if run_id:
                watch = runs_pb2.WatchRunRequest(run_id=run_id, from_sequence=len(seen.events) + 1)
                call = self._stub.WatchRun(watch, timeout=LIMIT_S, metadata=self._metadata)
            else:  # the same request again starts nothing twice
                call = self._stub.RunAgent(request, timeout=LIMIT_S, metadata=self._metadata)
        return seen

    async def direct_ms(self, count: int) -> list[float]:
        """Direct answers of one token, one after the other."""
        request = generate_pb2.GenerateTextRequest(prompt="hello")
        request.sampling.max_tokens = 1
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await self._stub.GenerateText(request, timeout=30, metadata=self._metadata)
            times.append((time.perf_counter() - began) * 1000)
        return times


@asynccontextmanager
async def client_of(running: Mesh) -> AsyncIterator[Client]:
    """A client for the time of the block."""
    client = Client(running)
    try:
        yield client
    finally:
        await client.close()


def _request(pace_ms: float) -> runs_pb2.RunAgentRequest:
    replies: list[dict[str, object]] = [
        {"tool": "calculator", "arguments": {"expression": f"{number} + 1"}}
        for number in range(CALLS)
    ]
    script: dict[str, object] = {"replies": [*replies, {"answer": "done"}]}
    if pace_ms:
        script["pace_ms"] = pace_ms
    return runs_pb2.RunAgentRequest(
        task=f"Calculate. [[sim: {json.dumps(script)}]]",
        tools=["calculator"],
        request_id=str(uuid.uuid4()),
    )


def _note(seen: Seen, event: runs_pb2.RunEvent) -> None:
    if event.HasField("partial_text"):
        return
    now = time.monotonic()
    seen.events.append(now)
    if event.HasField("model_step"):
        usage = event.model_step.usage
        read = usage.prompt_tokens - usage.cached_tokens
        model_s = usage.completion_tokens * TOKEN_S + read / PREFILL_TOKENS_PER_S
        seen.model_steps.append((now, model_s))
    elif event.HasField("ended"):
        seen.ended_s = now
        seen.succeeded = event.ended.state == runs_pb2.RUN_STATE_SUCCEEDED


def _all_succeeded(runs: Sequence[Seen]) -> None:
    failed = [one for one in runs if not one.succeeded or one.steps != CALLS + 1]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(runs)} runs did not end as they should")


async def overhead(running: Mesh, count: int) -> dict[str, float]:
    """One run after the other."""
    async with client_of(running) as client:
        for _ in range(WARM_UP):
            await client.run()
        before = running.cpu_s()
        runs = [await client.run() for _ in range(count)]
        after = running.cpu_s()
    _all_succeeded(runs)
    times = [step for one in runs for step in one.step_ms]
    steps = sum(one.steps for one in runs)
    cpu = {name: (after[name] - before[name]) / steps * 1000 for name in after}
    return {
        "agent_step_overhead_ms_p50": quantile(times, 0.5),
        "agent_step_overhead_ms_p99": quantile(times, 0.99),
        "agent_start_ms_p50": quantile([one.start_ms for one in runs], 0.5),
        "agent_step_cpu_ms": sum(ms for name, ms in cpu.items() if not name.startswith("sim")),
        **{f"agent_step_cpu_ms_{name}": ms for name, ms in cpu.items()},
    }


async def crowd(running: Mesh, count: int, pace_ms: float) -> dict[str, float]:
    """Many runs at once on one agent service, each slow enough that all are open together."""
    before = running.memory_mb()["agent"]
    peak = before
    async with client_of(running) as client:
        began = time.monotonic()
        work = asyncio.gather(*(client.run(pace_ms=pace_ms) for _ in range(count)))
        while not work.done():
            await asyncio.wait([work], timeout=0.2)
            peak = max(peak, running.memory_mb()["agent"])
        runs = work.result()
    _all_succeeded(runs)
    return {
        "crowd_runs": count,
        "crowd_calls_broken": sum(one.broken for one in runs),
        "crowd_s": time.monotonic() - began,
        "crowd_agent_mb_before": before,
        "crowd_agent_mb_peak": peak,
        "crowd_agent_mb_after": running.memory_mb()["agent"],
    }


async def direct_ratio(running: Mesh, count: int) -> dict[str, float]:
    """The direct path while the agent services are idle and while they are stopped, in turns."""
    pids = [pid for name, pid in _pids(running).items() if name.startswith("agent")]
    with_agents: list[float] = []
    without: list[float] = []
    async with client_of(running) as client:
        await client.direct_ms(count // 4)
        for _ in range(4):
            with_agents += await client.direct_ms(count // 4)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                without += await client.direct_ms(count // 4)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
    idle, stopped = quantile(with_agents, 0.5), quantile(without, 0.5)
    return {
        "direct_ms_p50_idle_agents": idle,
        "direct_ms_p50_without_agents": stopped,
        "direct_idle_agents_ratio": idle / stopped,
    }


async def takeover(running: Mesh, count: int) -> dict[str, float]:
    """Of two agent services one is killed: how long until the last of its runs goes on."""
    async with client_of(running) as client:
        work = [asyncio.create_task(client.run(pace_ms=40.0)) for _ in range(count)]
        await asyncio.sleep(1.0)
        killed_s = time.monotonic()
        os.kill(_pids(running)["agent"], signal.SIGKILL)
        runs = await asyncio.gather(*work)
    _all_succeeded(runs)
    gaps = [next(at for at in one.events if at > killed_s) - killed_s for one in runs]
    return {"takeover_s": max(gaps), "takeover_runs": count}


def _pids(running: Mesh) -> dict[str, int]:
    records = read_records(RunPaths(running.runtime).run)
    return {name: record.pid for name, record in records.items() if record.pid}


def measure(folder: Path, port_offset: int, *, quick: bool) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    runtime = folder / "one"
    with mesh(runtime, config=CONFIG, port_offset=port_offset) as running:
        figures |= asyncio.run(overhead(running, 5 if quick else 50))
        figures |= asyncio.run(direct_ratio(running, 40 if quick else 1200))
        figures |= asyncio.run(crowd(running, *((10, 20.0) if quick else (CROWD, 100.0))))
    environ = {"SLUICE_LOCAL_AGENTS": "2"}
    with mesh(folder / "two", config=CONFIG, port_offset=port_offset, environ=environ) as running:
        figures |= asyncio.run(takeover(running, 6 if quick else 20))
    figures |= session_append.measure(quick=quick)
    figures |= vector_search.measure(quick=quick)
    return figures


def main(argv: list[str]) -> int:
    """Measures, prints, writes the results file."""
    parser = argparse.ArgumentParser(prog="bench.agent")
    parser.add_argument("--quick", action="store_true", help="a fraction: that it runs")
    parser.add_argument("--port-offset", type=int, default=7000)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        figures = measure(Path(folder), options.port_offset, quick=options.quick)
    print(table([["figure", "value"], *([k, f"{v:.3f}"] for k, v in figures.items())]))
    path = write_results("bench-agent-quick" if options.quick else "bench-agent", figures)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
