"""``make bench-mesh``: what the mesh costs per token and per request, and what it sustains.

The simulated engine makes one token per stream every 5 ms; the client runs on the same cores,
through Envoy, with grants, metrics and 1 % trace sampling on (an OTLP sink runs beside it, and is
not counted). CPU time is counted over all mesh processes, Envoy included, the client and the sink
excluded. See docs/BENCHMARKS.md for the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio

from bench.harness import ROOT, Mesh, mesh, quantile, table, write_results
from sluice.common.v1 import input_pb2
from sluice.grants import GrantSigner
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

SINK_PORT = 14317
IDLE_REQUESTS = 200


@contextmanager
def otlp_sink() -> Iterator[str]:
    """A collector that throws everything away; yields its endpoint."""
    command = [sys.executable, "-m", "bench.otlp_sink", str(SINK_PORT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"127.0.0.1:{SINK_PORT}"
    finally:
        process.terminate()
        process.wait()


def run_load(running: Mesh, streams: int, tokens: int, seconds: float) -> dict[str, float]:
    """One load; returns its figures, CPU taken between the load's own marks."""
    arguments = ["--target", running.envoy, "--key", running.key, "--streams", str(streams)]
    arguments += ["--tokens", str(tokens), "--seconds", str(seconds), "--warmup", "3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.load", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    tally: dict[str, object] = {}
    for line in process.stdout:
        message = json.loads(line)
        if message.get("measuring") is True:
            before = running.cpu_s()
        elif message.get("measuring") is False:
            after = running.cpu_s()
        else:
            tally = message
    if process.wait() != 0 or not tally:
        raise SystemExit("the load failed")
    cpu = {name: after[name] - before.get(name, 0.0) for name in after}
    return _figures(tally, cpu)


def _figures(tally: dict[str, object], cpu: dict[str, float]) -> dict[str, float]:
    def number(name: str) -> float:
        value = tally[name]
        assert isinstance(value, int | float)
        return float(value)

    ttft = tally["ttft_ms"]
    assert isinstance(ttft, list)
    seconds, tokens = number("seconds"), max(1.0, number("tokens"))
    figures = {
        "tokens_per_s": tokens / seconds,
        "requests_per_s": number("requests") / seconds,
        "cpu_us_per_token": sum(cpu.values()) * 1e6 / tokens,
        "cpu_us_per_request": sum(cpu.values()) * 1e6 / max(1.0, number("requests")),
        "tokens_per_message": tokens / max(1.0, number("messages")),
        "ttft_ms_p50": quantile(ttft, 0.5) if ttft else 0.0,
        "ttft_ms_p99": quantile(ttft, 0.99) if ttft else 0.0,
        "errors": number("errors"),
    }
    for name, used in cpu.items():
        figures[f"cpu_us_per_token_{name}"] = used * 1e6 / tokens
        figures[f"cpu_share_{name}"] = used / seconds
    return figures


async def idle_ttft_ms(running: Mesh) -> tuple[list[float], list[float]]:
    """Time to first token of single requests, alternately direct and through the mesh, in ms."""
    signer = GrantSigner.load(running.runtime / "keys", "bench")
    direct: list[float] = []
    through: list[float] = []
    metadata = (("authorization", f"Bearer {running.key}"),)
    async with (
        grpc.aio.insecure_channel(running.instance()) as instance,
        grpc.aio.insecure_channel(running.envoy) as envoy,
    ):
        inference = inference_pb2_grpc.InferenceServiceStub(instance)
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(envoy)
        for number in range(IDLE_REQUESTS + 20):
            work = inference_pb2.Work(request_id=f"bench-{number}")
            work.input.conversation.messages.append(
                input_pb2.ChatMessage(role="user", content=f"hello {number}")
            )
            work.sampling.max_tokens = 2
            grant = signer.sign(work.request_id, "sim-0", now_unix_s=time.time())
            began = time.perf_counter()
            call = inference.Generate(inference_pb2.GenerateRequest(work=work, grant=grant))
            async for message in call:
                if message.HasField("delta"):
                    direct.append((time.perf_counter() - began) * 1000)
                    break
            call.cancel()
            request = generate_pb2.GenerateRequest(prompt=f"hello {number}")
            request.sampling.max_tokens = 2
            began = time.perf_counter()
            stream = scheduler.Generate(request, metadata=metadata)
            async for answer in stream:
                if answer.HasField("delta"):
                    through.append((time.perf_counter() - began) * 1000)
                    break
            stream.cancel()
            await asyncio.sleep(0.01)
    return direct[20:], through[20:]


def measure(running: Mesh, seconds: float, counts: list[int]) -> dict[str, float]:
    """All figures; those of a load carry the number of its streams, 128 is the plain name."""
    figures: dict[str, float] = {}
    direct, through = asyncio.run(idle_ttft_ms(running))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        added = quantile(through, share) - quantile(direct, share)
        figures[f"added_ttft_ms_{name}"] = added
    short = run_load(running, streams=16, tokens=1, seconds=seconds)
    figures["cpu_us_per_request"] = short["cpu_us_per_request"]
    figures["requests_per_s"] = short["requests_per_s"]
    for name, value in short.items():
        if name.startswith("cpu_us_per_token_"):
            figures[name.replace("_per_token_", "_per_request_")] = value
    for streams in counts:
        suffix = "" if streams == 128 else f"_{streams}"
        for name, value in run_load(running, streams, tokens=200, seconds=seconds).items():
            if name not in ("cpu_us_per_request", "requests_per_s"):
                figures[name + suffix] = value
    figures["memory_mb"] = sum(running.memory_mb().values())
    return figures


def report(figures: dict[str, float], counts: list[int]) -> str:
    """The figures as two tables and two lines."""
    services = [
        name.removeprefix("cpu_us_per_request_")
        for name in figures
        if name.startswith("cpu_us_per_request_")
    ]
    loads = [["streams", "tokens/s", "tokens/message", "TTFT p50 ms", "p99 ms", "errors"]]
    costs = [["CPU us per", "all", *services]]
    for streams in counts:
        suffix = "" if streams == 128 else f"_{streams}"
        names = ("tokens_per_s", "tokens_per_message", "ttft_ms_p50", "ttft_ms_p99", "errors")
        loads.append([str(streams), *(f"{figures[name + suffix]:,.1f}" for name in names)])
        each = [figures[f"cpu_us_per_token_{name}{suffix}"] for name in services]
        total = figures[f"cpu_us_per_token{suffix}"]
        costs.append([f"token, {streams} streams", *(f"{cost:.1f}" for cost in (total, *each))])
    each = [figures[f"cpu_us_per_request_{name}"] for name in services]
    total = figures["cpu_us_per_request"]
    costs.append(["one-token request", *(f"{cost:.0f}" for cost in (total, *each))])
    added = ", ".join(
        f"{name} {figures[f'added_ttft_ms_{name}']:.2f} ms" for name in ("p50", "p99")
    )
    memory = f"memory of all services: {figures['memory_mb']:.0f} MB"
    return "\n".join((table(loads), "", table(costs), "", f"added TTFT at idle: {added}", memory))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, nargs="*", default=[128, 512, 1000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, otlp_sink() as endpoint:
        environ = {"SLUICE_MESH_OTLP_ENDPOINT": endpoint}
        with mesh(Path(scratch) / "run", environ=environ) as running:
            figures = measure(running, arguments.seconds, arguments.streams)
    print(report(figures, arguments.streams))
    print(f"written: {write_results('bench-mesh', figures).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
