"""An MCP server as a child process: one JSON-RPC message a line on its standard input and output.

The library's own transport has no bound on a line and leaves a server that ignores the end of its
input alive when this process is killed; this one has the bound and tells the guard. The child gets
a session of its own, so that what it starts ends with it, and an environment without secrets but
those that are declared. What it writes to standard error is counted, never read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from sluice import logs
from sluice.process_guard import ProcessGuard

_log = logs.get(__name__)

INHERITED: Final = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")
EXIT_S: Final = 1.0  # to end by itself after the end of its input, then after SIGTERM
POLL_S: Final = 0.01
READ_BYTES: Final = 64 * 1024

Inbound = MemoryObjectSendStream[SessionMessage | Exception]
Outbound = MemoryObjectReceiveStream[SessionMessage]


def child_environment(environ: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """What a child gets of this process's environment."""
    return {name: environ[name] for name in INHERITED if name in environ} | dict(declared)


@asynccontextmanager
async def stdio_transport(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    name: str,
    folder: Path,
    line_bytes_max: int,
    guard: ProcessGuard,
    ended: Callable[[], None],
) -> AsyncIterator[TransportStreams]:
    """A running server, started in ``folder``. ``ended`` is called when its output ends before
    this does. Leaving ends the child within about 2 s. Raises OSError when it cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=dict(environment),
        cwd=folder,
        limit=line_bytes_max,
        start_new_session=True,
    )
    guard.watch_group(process.pid)
    to_session, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outbound, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, process, to_session, name, ended)
            tasks.start_soon(_write, process, from_session)
            tasks.start_soon(_count_errors, process, name)
            try:
                yield inbound, outbound
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process)
                tasks.cancel_scope.cancel()
    finally:
        guard.forget(process.pid)
        for stream in (to_session, inbound, outbound, from_session):
            stream.close()


async def _read(
    process: Process, to_session: Inbound, name: str, ended: Callable[[], None]
) -> None:
    assert process.stdout is not None
    noise = 0  # lines that are no messages; servers print banners
    with to_session, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                _log.warning("a tool server wrote a line that is too long", server=name)
                break
            if not line:
                break
            try:
                message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                if line.strip():
                    noise += 1
                    if noise == 1:
                        _log.warning("a tool server wrote what is no message", server=name)
                await asyncio.sleep(0)  # lines that have come already are read without a pause
                continue
            await to_session.send(SessionMessage(message))
    ended()


async def _write(process: Process, from_session: Outbound) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, RuntimeError):  # it ended: its output tells
        async for item in from_session:
            line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()


async def _count_errors(process: Process, name: str) -> None:
    assert process.stderr is not None
    size = 0
    while chunk := await process.stderr.read(READ_BYTES):
        size += len(chunk)
    if size:
        _log.info("a tool server wrote to its standard error", server=name, bytes=size)


async def _end(process: Process) -> None:
    """Ends the child and what it started: the end of its input, SIGTERM, SIGKILL."""
    assert process.stdin is not None
    process.stdin.close()
    await _wait(process, EXIT_S)
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        # The group may outlive its leader; its number stays taken as long as it has a member.
        try:
            os.killpg(process.pid, wanted)
        except (ProcessLookupError, PermissionError):
            break
        await _wait(process, EXIT_S)
    transport = process._transport  # type: ignore[attr-defined]
    transport.close()  # a process that left the group may hold the pipes open


async def _wait(process: Process, seconds: float) -> None:
    """Until the whole group is gone. Not ``process.wait()``, which also waits for the ends of all
    pipes."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not _gone(process) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def _gone(process: Process) -> bool:
    if process.returncode is None:
        return False
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # what is left cannot be signalled
    return False
