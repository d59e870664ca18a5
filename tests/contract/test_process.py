"""The life of a service process: real processes, real signals, on both event loops.

Goal: the first SIGTERM ends in order with exit code 0, health first; one during
start-up ends the process too; the second ends it at once; a hanging thread or a failing drain does
not keep it. Method: a script per case that prints what happens. Oracle: the order of its lines and
the exit code. Each test names the mutant on which it was seen to fail.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sluice.process import EXIT_CONFIG, EXIT_FAILED, EXIT_SIGNALLED

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import asyncio, os, signal, sys, threading, time
from sluice import logs
from sluice.config import ConfigError
from sluice.server import Health, MeshServer, run, serve_until_signalled
def say(*words): print(*words, flush=True)
"""

SERVER = """
async def main():
    health = Health()
    health.watch(lambda healthy: say("healthy", healthy))
    server = MeshServer("t", ["127.0.0.1:0"], health)
    await server.start()
    async def drain():
        say("drain")
        {drain}
    say("ready", server.ports[0])
    return await server.run_until_signalled(drain, {grace}, probe_lag_s=0.2)
sys.exit(run(main()))
"""


class _Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    def wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            if line.startswith(word):
                return
        raise AssertionError(f"ended before {word!r}: {self.lines}")

    def send(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def finish(self, within_s: float = 20.0) -> int:
        out, _ = self._process.communicate(timeout=within_s)
        self.lines += out.split("\n")[:-1]
        return self._process.returncode


@contextmanager
def _run(body: str, *, uvloop: bool = True) -> Iterator[_Process]:
    hide = "" if uvloop else "import sys; sys.modules['uvloop'] = None\n"
    process = subprocess.Popen(
        [sys.executable, "-c", hide + PRELUDE + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield _Process(process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_in_order(number: signal.Signals, uvloop: bool) -> None:
    """Mutant: the drain runs before health changes; the exit code is the signal's."""
    body = SERVER.format(drain="await asyncio.sleep(0.1); say('drained')", grace=5.0)
    with _run(body, uvloop=uvloop) as process:
        process.wait_for("ready")
        process.send(number)
        assert process.finish() == 0
        said = [line for line in process.lines if not line.startswith("ready")]
        assert said == ["healthy False", "drain", "drained"]


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_signal_during_start_up_ends_the_process(uvloop: bool) -> None:
    """Mutant: signals are only looked at once the server runs."""
    body = """
async def main():
    try:
        say("starting")
        await asyncio.sleep(60)
    finally:
        say("cleaned up")
sys.exit(run(main()))
"""
    with _run(body, uvloop=uvloop) as process:
        process.wait_for("starting")
        process.send()
        assert process.finish(5.0) == 0
        assert process.lines[-1] == "cleaned up"


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_second_signal_ends_the_process_at_once(uvloop: bool) -> None:
    """Mutant: later signals are ignored."""
    body = SERVER.format(drain="await asyncio.sleep(60)", grace=60.0)
    with _run(body, uvloop=uvloop) as process:
        process.wait_for("ready")
        process.send()
        process.wait_for("drain")
        process.send()
        assert process.finish(3.0) == EXIT_SIGNALLED + signal.SIGTERM


def test_a_second_signal_works_while_the_loop_is_busy() -> None:
    """Mutant: signals go through the loop only."""
    body = SERVER.format(drain="time.sleep(60)", grace=60.0)
    with _run(body) as process:
        process.wait_for("ready")
        process.send()
        process.wait_for("drain")
        process.send()
        assert process.finish(3.0) == EXIT_SIGNALLED + signal.SIGTERM


@pytest.mark.parametrize(
    "drain", ["await asyncio.sleep(60)", "raise RuntimeError('x')"], ids=["slow", "failing"]
)
def test_a_drain_that_is_slow_or_fails_still_ends_in_order(drain: str) -> None:
    """Mutant: the drain has no bound; its exception ends the process with 1."""
    with _run(SERVER.format(drain=drain, grace=0.3)) as process:
        process.wait_for("ready")
        process.send()
        assert process.finish(10.0) == 0


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    """Mutant: no last resort at the exit."""
    body = """
from sluice import process
process.EXIT_S = 0.5
async def main():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
    await asyncio.sleep(0.1)
    return 7
sys.exit(run(main()))
"""
    with _run(body) as process:
        assert process.finish(10.0) == 7


def test_a_start_up_that_swallows_its_cancel_is_ended() -> None:
    """Mutant: no bound on a cancelled start-up."""
    body = """
from sluice import process
process.START_CANCEL_S = 0.5
async def main():
    say("starting")
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            say("ignored")
sys.exit(run(main()))
"""
    with _run(body) as process:
        process.wait_for("starting")
        process.send()
        assert process.finish(5.0) == EXIT_SIGNALLED + signal.SIGTERM


def test_a_bad_configuration_and_a_fault_have_their_exit_codes() -> None:
    """Mutant: ConfigError is logged as a fault."""
    body = """
logs.setup("t")
async def main():
    raise ConfigError("scheduler.port", "70000 is out of range; permitted: 1 to 65535")
sys.exit(run(main()))
"""
    with _run(body) as process:
        assert process.finish() == EXIT_CONFIG
        assert process.lines == [
            "configuration: scheduler.port: 70000 is out of range; permitted: 1 to 65535"
        ]
    with _run(body.replace("ConfigError(", "RuntimeError(")) as process:
        assert process.finish() == EXIT_FAILED
        assert '"error_type": "RuntimeError"' in process.lines[0]


def test_a_frame_stream_is_drained_in_band_before_the_server_stops() -> None:
    """``stop(grace)`` with an open bidirectional stream waits out the whole grace. Method: a
    client holds a frame stream; the service's drain closes its writer, the client half-closes.
    Oracle: the client sees an orderly end, and the process ends long before the grace. Mutant:
    ``stop(drain_grace_s)`` instead of the drain."""
    body = """
import grpc
from sluice.channels import open_channel
from sluice.frames import FrameWriter, read_frames
from sluice.frames_grpc import client_connection, server_connection
writers = []
over = asyncio.Event()
class Handlers(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.exchange)
    async def exchange(self, _, context):
        connection = server_connection(context)
        writer = FrameWriter(connection, lambda due: b"beat" if due else None)
        writers.append(writer)
        async with asyncio.TaskGroup() as group:
            group.create_task(writer.run())
            async for frame in read_frames(connection): pass
            say("client half-closed")
        over.set()
async def client(port):
    async with open_channel(f"127.0.0.1:{port}") as channel:
        connection = client_connection(channel.stream_stream("/t.T/Frames", None, None)())
        writer = FrameWriter(connection, lambda due: b"beat" if due else None)
        async with asyncio.TaskGroup() as group:
            group.create_task(writer.run())
            async for frame in read_frames(connection):
                if b"draining" in frame: writer.close()
            say("stream ended in order")
async def main():
    server = MeshServer("t", ["127.0.0.1:0"], Health())
    server.grpc.add_generic_rpc_handlers((Handlers(),))
    await server.start()
    task = asyncio.create_task(client(server.ports[0]))
    async def drain():
        frames = [b"draining"]
        writers[0]._compose = lambda due: frames.pop() if frames else (b"beat" if due else None)
        writers[0].wake()
        while not writers[0]._closing:
            await asyncio.sleep(0.05)
            if not frames: writers[0].close()
        await over.wait()
        await task
    await asyncio.sleep(0.5)
    say("ready")
    return await server.run_until_signalled(drain, 30.0, probe_lag_s=0.1)
sys.exit(run(main()))
"""
    with _run(body) as process:
        process.wait_for("ready")
        began = time.monotonic()
        process.send()
        assert process.finish() == 0
        assert time.monotonic() - began < 10.0
        assert set(process.lines) >= {"client half-closed", "stream ended in order"}
