"""The public gateways that ``make bench-peers`` measures, and the processes of a measurement.

Gateways come from their own environment (``requirements/peers.txt``) and are started as modules,
because packages of this family overwrite each other's commands. Each forwards to the mock engine
with its own defaults, save what only costs it time here: one backend needs no prefix tree (with
``round_robin`` vllm-router does less, and smg asks the engine to tokenise nothing), and logs are
down to warnings.

Every process is started in a session of its own and ended by its id when its block is left, however
it is left.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.harness import ROOT, quantile
from bench.mock_openai import MODEL

READY_S = 60.0
END_S = 3.0
LOAD_S = 90.0  # longer than any load of the benchmark with what it leaves open


@dataclass(frozen=True)
class Gateway:
    """How to start one."""

    name: str  # in the results' keys
    package: str
    module: tuple[str, ...]
    options: tuple[str, ...] = ()
    policy: str = "round_robin"
    labels: tuple[tuple[str, str], ...] = ()  # put on each engine over its API


GATEWAYS = (
    Gateway("vllm_router", "vllm-router", ("vllm_router.launch_router",)),
    Gateway("smg", "smg", ("smg", "launch"), ("--shutdown-grace-period-secs", "1")),
)


@dataclass(frozen=True)
class Running:
    """A process that serves."""

    target: str  # HOST:PORT
    pid: int

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of the process and its children since it started."""
        process = psutil.Process(self.pid)
        family = [process, *process.children(recursive=True)]
        times = [member.cpu_times() for member in family]
        return {"gateway": sum(one.user + one.system for one in times)}


@contextmanager
def process(
    command: Sequence[str], log: Path, *, piped: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command for the length of the block; its errors go to ``log``."""
    # Unbuffered, Python loses what one write to a full pipe does not take: a tally is longer.
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with log.open("ab") as errors:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if piped else errors,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environ,
            cwd=ROOT if piped else log.parent,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()


@contextmanager
def mock_engine(scratch: Path) -> Iterator[Running]:
    """The engine behind the gateways."""
    command = [sys.executable, "-m", "bench.mock_openai"]
    with process(command, scratch / "mock.log", piped=True) as child:
        assert child.stdout is not None
        port = json.loads(child.stdout.readline())["port"]
        yield Running(f"127.0.0.1:{port}", child.pid)


@contextmanager
def gateway(
    kind: Gateway, python: Path, engines: Sequence[str], scratch: Path
) -> Iterator[Running]:
    """A gateway before engines (HOST:PORT each), ready to forward."""
    port, metrics_port = free_ports(2)
    log = scratch / f"{kind.name}.log"
    command = [str(python), "-m", *kind.module, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(f"http://{engine}" for engine in engines)]
    command += ["--worker-startup-check-interval", "1", "--policy", kind.policy, *kind.options]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--log-level", "warning" if kind.name == "vllm_router" else "warn"]
    with process(command, log) as child:
        running = Running(f"127.0.0.1:{port}", child.pid)
        _wait_ready(kind, running, child, log)
        if kind.labels:
            _label(running, dict(kind.labels), len(engines))
        yield running


def _label(running: Running, labels: Mapping[str, str], engines: int) -> None:
    """Puts labels on every engine, as soon as the gateway knows all of them."""
    url = f"http://{running.target}/workers"
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        with urllib.request.urlopen(url, timeout=5) as answer:
            workers = json.load(answer)["workers"]
        if len(workers) == engines and all(worker["is_healthy"] for worker in workers):
            for worker in workers:
                body = json.dumps({"labels": labels}).encode()
                headers = {"content-type": "application/json"}
                change = f"{url}/{worker['id']}"
                request = urllib.request.Request(change, body, headers, method="PATCH")
                urllib.request.urlopen(request, timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"{running.target} does not know its {engines} engines")


def version(python: Path, package: str) -> str:
    """The version of a package in the gateways' environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _wait_ready(kind: Gateway, running: Running, child: subprocess.Popen[str], log: Path) -> None:
    """Until a generation comes through: a gateway may answer before it knows its engine."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 1,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://{running.target}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    until = time.monotonic() + READY_S
    while time.monotonic() < until and child.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if b"[DONE]" in answer.read():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-2000:]
    raise SystemExit(f"{kind.package} does not forward; the end of its log:\n{tail}")


def measure(
    module: str, arguments: Sequence[str], cpu_s: Callable[[], dict[str, float]], scratch: Path
) -> dict[str, float]:
    """Runs a load client; CPU time is taken between the client's own marks. Returns figures."""
    command = [sys.executable, "-m", module, *arguments]
    marks: dict[bool, dict[str, float]] = {}
    tally: dict[str, object] = {}
    with process(command, scratch / "load.log", piped=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            if "measuring" in message:
                marks[bool(message["measuring"])] = cpu_s()
            else:
                tally = message
        if child.wait(LOAD_S) != 0 or not tally:
            tail = (scratch / "load.log").read_text(errors="replace")[-2000:]
            raise SystemExit(f"the load failed:\n{tail}")
    if tally["errors"]:
        print(f"  {module} met errors: {tally['error_codes']}", flush=True)
    before, after = marks[True], marks[False]
    return figures(tally, {name: after[name] - before.get(name, 0.0) for name in after})


def figures(tally: Mapping[str, object], cpu: Mapping[str, float]) -> dict[str, float]:
    """What a load says: tokens a second, CPU by process for a token and a request, TTFT."""

    def number(name: str) -> float:
        value = tally[name]
        assert isinstance(value, int | float)
        return float(value)

    ttft = tally["ttft_ms"]
    assert isinstance(ttft, list)
    tokens, requests = max(1.0, number("tokens")), max(1.0, number("requests"))
    found = {
        "tokens_per_s": number("tokens") / number("seconds"),
        "tokens_per_message": tokens / max(1.0, number("messages")),
        "ttft_ms_p50": quantile(ttft, 0.5) if ttft else 0.0,
        "ttft_ms_p99": quantile(ttft, 0.99) if ttft else 0.0,
        "errors": number("errors"),
        "cpu_us_per_token": sum(cpu.values()) * 1e6 / tokens,
        "cpu_us_per_request": sum(cpu.values()) * 1e6 / requests,
    }
    for name, used in cpu.items():
        found[f"cpu_us_per_token_{name}"] = used * 1e6 / tokens
        found[f"cpu_us_per_request_{name}"] = used * 1e6 / requests
    return found
