"""``make bench-peers``: Sluice beside public gateways, on one machine and in one run.

Every gateway stands before an engine of the same pace: ours before the simulated engine of
``bench/mesh.toml``, the others before ``bench/mock_openai.py``, whose docstring says what makes the
two equivalent. All are up at the same time and take the same loads in turn, so that the machine's
drift meets them alike; clients, engines and gateways share its cores.

CPU time is that of the gateway's processes. Ours is counted over all mesh processes, Envoy and the
inference process with the engine in it included, and once more without the inference process,
which for the others is the mock and not counted. Bounded in time; ends what it started on any way
out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvloop

from bench import mesh as mesh_bench
from bench import sse_load
from bench.harness import ROOT, Mesh, mesh, quantile, table, write_results
from bench.peer_gateways import GATEWAYS, gateway, measure, mock_engine, version

BUDGET_S = 360
STREAMS = 128  # at which the cost of a token is taken
TOKENS = 200
SATURATION = (64, 128, 256, 512)
REQUEST_STREAMS = 16  # one-token requests: the cost of a request
IDLE_REQUESTS = 200
WARMUP_S = 3.0
BUSY = 0.5
INFERENCE = "sim-0"  # the process that holds our engine

NOTES = """\
CPU us/token by streams ({counts}): {by_streams}.
Cost of a token at {streams} streams of {tokens} tokens, of a request by one-token requests of
{request_streams} streams, TTFT by single requests to an idle gateway less the same to its engine.
CPU: of the gateway only, for the others; of every mesh process, Envoy included, for sluice, and
once more without the inference process, whose place the mock takes for the others. Clients, mock
and telemetry sink are not counted.
Work done: in this run the others forward each HTTP chunk as it comes (cheapest policy, one engine,
their optional queues, limits and keys off). sluice queues by deadline, places by the engines'
load, checks keys and signed grants, traces 1 % and, under load, joins tokens of several steps into
one message: {joined:.1f} tokens a message at {streams} streams.
Saturation: the best load without an error, clients on the same cores; an SSE client takes an event
for each token, a gRPC client a message for several."""


@dataclass
class Subject:
    """One gateway, or the mock without one."""

    name: str
    title: str
    load: Callable[[int, int, float], dict[str, float]]  # streams, tokens, seconds
    ttft: Callable[[], tuple[list[float], list[float]]] | None  # direct, through; ms
    added_ms: tuple[float, float] = (0.0, 0.0)  # p50, p99
    requests: dict[str, float] = field(default_factory=dict)
    loads: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def best(self) -> tuple[float, int]:
        """The most tokens a second without an error, and at how many streams."""
        clean = {streams: load for streams, load in self.loads.items() if not load["errors"]}
        if not clean:
            return 0.0, 0
        return max((load["tokens_per_s"], streams) for streams, load in clean.items())

    def cost(self, without: str = "") -> tuple[float, float]:
        """CPU in µs for a token and for a request, all processes or without one."""
        token, request = self.loads[STREAMS], self.requests
        return (
            token["cpu_us_per_token"] - token.get(f"cpu_us_per_token_{without}", 0.0),
            request["cpu_us_per_request"] - request.get(f"cpu_us_per_request_{without}", 0.0),
        )


def sse_subject(
    name: str,
    title: str,
    target: str,
    cpu_s: Callable[[], dict[str, float]],
    scratch: Path,
    direct: str | None = None,
) -> Subject:
    """A gateway of OpenAI streams; ``direct`` is its engine."""

    def load(streams: int, tokens: int, seconds: float) -> dict[str, float]:
        arguments = ["--target", target, *_load_arguments(streams, tokens, seconds)]
        return measure("bench.sse_load", arguments, cpu_s, scratch)

    def ttft() -> tuple[list[float], list[float]]:
        assert direct is not None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(sse_load.idle_ttft_ms(direct, target, IDLE_REQUESTS))

    return Subject(name, title, load, ttft if direct else None)


def sluice_subject(running: Mesh, scratch: Path) -> Subject:
    """Our mesh, loaded and timed as ``make bench-mesh`` does it."""

    def load(streams: int, tokens: int, seconds: float) -> dict[str, float]:
        arguments = ["--target", running.envoy, "--key", running.key]
        arguments += _load_arguments(streams, tokens, seconds)
        return measure("bench.load", arguments, running.cpu_s, scratch)

    def ttft() -> tuple[list[float], list[float]]:
        return asyncio.run(mesh_bench.idle_ttft_ms(running))

    return Subject("sluice", "sluice", load, ttft)


def _load_arguments(streams: int, tokens: int, seconds: float) -> list[str]:
    arguments = ["--streams", str(streams), "--tokens", str(tokens)]
    return [*arguments, "--seconds", str(seconds), "--warmup", str(WARMUP_S)]


@contextmanager
def our_mesh(scratch: Path) -> Iterator[Mesh]:
    """The mesh with a telemetry sink; stopped also when it is left while it starts."""
    runtime = scratch / "run"
    with mesh_bench.otlp_sink() as endpoint:
        environ = {"SLUICE_MESH_OTLP_ENDPOINT": endpoint}
        try:
            with mesh(runtime, environ=environ) as running:
                yield running
        except BaseException:
            command = [sys.executable, "-m", "sluice.command.cli", "down"]
            environ = {**os.environ, "SLUICE_MESH_RUNTIME_DIR": str(runtime)}
            subprocess.run(command, env=environ, cwd=ROOT, timeout=30, check=False)
            raise


def compare(subjects: Sequence[Subject], seconds: float, saturation: Sequence[int]) -> None:
    """Takes every load to every subject in turn, forwards and backwards."""
    for subject in subjects:
        if subject.ttft is not None:
            say(f"time to first token: {subject.title}")
            direct, through = subject.ttft()
            subject.added_ms = (
                quantile(through, 0.5) - quantile(direct, 0.5),
                quantile(through, 0.99) - quantile(direct, 0.99),
            )
    for subject in subjects:
        if subject.ttft is not None:
            say(f"one-token requests: {subject.title}")
            subject.requests = subject.load(REQUEST_STREAMS, 1, seconds)
    order = list(subjects)
    for streams in sorted({STREAMS, *saturation}):
        for subject in order:
            found = subject.loads[streams] = subject.load(streams, TOKENS, seconds)
            say(f"{streams} streams: {subject.title}: {found['tokens_per_s']:,.0f} tokens/s")
        order.reverse()


def results(subjects: Sequence[Subject]) -> dict[str, float]:
    """One flat object of every figure."""
    found: dict[str, float] = {}
    for subject in subjects:
        name = subject.name
        found[f"{name}_tokens_per_s"], streams = subject.best
        found[f"{name}_tokens_per_s_at_streams"] = streams
        for count, load in subject.loads.items():
            found[f"{name}_tokens_per_s_{count}"] = load["tokens_per_s"]
            found[f"{name}_errors_{count}"] = load["errors"]
            found[f"{name}_loaded_ttft_ms_p50_{count}"] = load["ttft_ms_p50"]
            found[f"{name}_loaded_ttft_ms_p99_{count}"] = load["ttft_ms_p99"]
            if subject.ttft is not None:
                found[f"{name}_cpu_us_per_token_{count}"] = load["cpu_us_per_token"]
        if subject.ttft is None:
            continue
        found[f"{name}_added_ttft_ms_p50"], found[f"{name}_added_ttft_ms_p99"] = subject.added_ms
        costs = {name: subject.cost()}
        if name == "sluice":
            costs["sluice_without_inference"] = subject.cost(INFERENCE)
            found["sluice_tokens_per_message"] = subject.loads[STREAMS]["tokens_per_message"]
            found.update(_by_process(subject))
        for row, (token, request) in costs.items():
            found[f"{row}_cpu_us_per_token"] = token
            found[f"{row}_cpu_us_per_request"] = request
    return found


def _by_process(subject: Subject) -> dict[str, float]:
    """Our CPU for a token and for a request, process by process."""
    return {
        f"{subject.name}_{name}": value
        for figures, prefix in (
            (subject.loads[STREAMS], "cpu_us_per_token_"),
            (subject.requests, "cpu_us_per_request_"),
        )
        for name, value in figures.items()
        if name.startswith(prefix)
    }


def report(subjects: Sequence[Subject]) -> str:
    """The one table, and what it does not say by itself."""
    rows = [
        [
            "gateway",
            "CPU us/token",
            "CPU us/request",
            "added TTFT p50 ms",
            "p99 ms",
            "tokens/s, best",
            "at streams",
        ]
    ]
    joined = 1.0
    for subject in subjects:
        speed, streams = subject.best
        last = [f"{speed:,.0f}", str(streams)]
        if subject.ttft is None:
            rows.append([subject.title, "-", "-", "-", "-", *last])
            continue
        added = [f"{value:.2f}" for value in subject.added_ms]
        rows.append([subject.title, *_costs(subject.cost()), *added, *last])
        if subject.name == "sluice":
            joined = subject.loads[STREAMS]["tokens_per_message"]
            blank = ["", "", "", ""]
            rows.append(["  without inference", *_costs(subject.cost(INFERENCE)), *blank])
    return f"{table(rows)}\n" + NOTES.format(
        counts=", ".join(str(count) for count in sorted(subjects[0].loads)),
        by_streams="; ".join(_by_streams(subject) for subject in subjects if subject.ttft),
        streams=STREAMS,
        tokens=TOKENS,
        request_streams=REQUEST_STREAMS,
        joined=joined,
    )


def _by_streams(subject: Subject) -> str:
    loads = [load for _, load in sorted(subject.loads.items())]
    costs = ", ".join(f"{load['cpu_us_per_token']:.0f}" for load in loads)
    return f"{subject.title} {costs}"


def _costs(cost: tuple[float, float]) -> list[str]:
    return [f"{cost[0]:.1f}", f"{cost[1]:.0f}"]


def say(text: str) -> None:
    """One line of progress."""
    print(f"  {text}", flush=True)


def leave_by_signal(budget_s: int) -> None:
    """A signal, or so many seconds, end the process by the ordinary way, so that every block ends
    what it started; once."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

    def leave(number: int, _: FrameType | None) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        if number == signal.SIGALRM:
            raise SystemExit(f"not done after {budget_s} s: stopped")
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, leave)
    signal.alarm(budget_s)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--streams", type=int, nargs="*", default=list(SATURATION))
    parser.add_argument(
        "--peers-python", type=Path, default=Path(sys.prefix) / "peers" / "bin" / "python"
    )
    parser.add_argument("--without-sluice", action="store_true", help="measure the others alone")
    arguments = parser.parse_args()
    python: Path = arguments.peers_python.absolute()  # not resolved: a link into the environment
    if not python.exists():
        raise SystemExit(f"no gateways in {python}: `make bench-peers` installs them")
    leave_by_signal(BUDGET_S)
    busy = os.getloadavg()[0]  # runnable processes of the last minute
    if busy > BUSY:
        say(f"other work runs on this machine (load {busy:.1f}): trust the ratios, not the figures")
    subjects: list[Subject] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(mock_engine(scratch))
        if not arguments.without_sluice:
            subjects.append(sluice_subject(stack.enter_context(our_mesh(scratch)), scratch))
        for kind in GATEWAYS:
            title = f"{kind.package} {version(python, kind.package)}"
            running = stack.enter_context(gateway(kind, python, [engine.target], scratch))
            target = running.target
            subjects.append(
                sse_subject(kind.name, title, target, running.cpu_s, scratch, engine.target)
            )
        subjects.append(
            sse_subject("mock", "mock, no gateway", engine.target, engine.cpu_s, scratch)
        )
        compare(subjects, arguments.seconds, arguments.streams)
    print(report(subjects))
    written = write_results("bench-peers", {**results(subjects), "load_average_before": busy})
    print(f"written: {written.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
