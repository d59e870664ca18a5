"""Child processes of an agent service: tool servers and parsers.

Goal: each child that is started runs its program. Method: a process as an agent service is one, on
uvloop, with calls of gRPC going on all the time, starts children and talks to them. Oracle: every
child answers and ends with 0. Seed: none; without what is shown here about one in twenty dies of
SIGSEGV between fork and exec.

Seen to fail on a mutant: gRPC's handlers around fork() left on.
"""

from __future__ import annotations

import subprocess
import sys

CHILDREN = 60
PARENT = f"""
import agent_svc  # first, as in every process of the service
import asyncio, sys
import grpc.aio, uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ECHO = "import sys; print(sys.stdin.readline(), end='')"

async def child():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", ECHO, stdin=-1, stdout=-1, start_new_session=True
    )
    try:
        output, _ = await process.communicate(b"hello\\n")
    except (OSError, RuntimeError):
        output = b""
    return await process.wait() == 0 and output == b"hello\\n"

async def main():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def calls():
            while True:
                await stub.Check(health_pb2.HealthCheckRequest())

        tasks = [asyncio.create_task(calls()) for _ in range(4)]
        print(sum([await child() for _ in range({CHILDREN})]))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(None)

uvloop.run(main())
"""


def test_every_child_that_is_started_runs_its_program() -> None:
    command = [sys.executable, "-c", PARENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == [str(CHILDREN)], done.stderr[-2000:]
