"""Checks that a structured-output constraint compiles, within a time and a memory limit.

Owns one child process (``constraint_process``), started with the engine and started again after it
was killed. One check at a time; others wait in a bounded queue. A check that was begun goes on
when its caller is cancelled, so that question and answer stay in step.

Failure modes: a constraint that takes too long, too much memory or kills the compiler is refused,
and remembered, so that sending it again costs nothing; a full queue is RESOURCE_EXHAUSTED; a
process that does not start is UNAVAILABLE. The engine never sees what was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

from sluice import logs
from sluice.errors import SluiceError, exhausted, unavailable

_log = logs.get(__name__)

PROGRAM = Path(__file__).with_name("constraint_process.py")
START_S_MAX = 120.0  # it imports torch: 4 s alone, more while a model loads beside it
WAITING_MAX = 64
REMEMBERED_MAX = 1024
LINE_BYTES_MAX = 1024
RETRY_S = 2.0


class ConstraintChecker:
    """Compiles constraints for one tokenizer in a process of its own."""

    def __init__(self, tokenizer: str, *, seconds_max: float, memory_bytes: int) -> None:
        """``tokenizer`` is xgrammar's serialized tokenizer information (JSON)."""
        self._tokenizer = tokenizer
        self._seconds_max = seconds_max
        self._memory_bytes = memory_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._restart: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts the process and waits until it can compile."""
        async with self._turn:
            await self._ensure_process()

    async def compiles(self, kind: str, text: str) -> bool:
        """Whether the constraint compiles within the limits. ``kind`` is json_schema, regex, ebnf
        or lark. Raises RESOURCE_EXHAUSTED, UNAVAILABLE."""
        key = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if self._waiting >= WAITING_MAX:
            raise exhausted(
                "CONSTRAINTS_BUSY", "Too many output constraints wait to be compiled.", RETRY_S
            )
        task = asyncio.get_running_loop().create_task(self._compile(key, kind, text))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The process answers in order: a question that was asked is seen through.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the process. Idempotent."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = list(self._tasks)
        if self._restart is not None:
            tasks.append(self._restart)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()

    async def _compile(self, key: bytes, kind: str, text: str) -> bool:
        self._waiting += 1
        try:
            async with self._turn:
                process = await self._ensure_process()
                verdict = await self._ask(process, json.dumps({"kind": kind, "text": text}))
        finally:
            self._waiting -= 1
        self._known[key] = verdict
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return verdict

    async def _ask(self, process: asyncio.subprocess.Process, question: str) -> bool:
        """The process's verdict; False, and the process killed, when it does not reach one."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._seconds_max):
                process.stdin.write(question.encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except (TimeoutError, OSError, ValueError):
            answer = b""
        except asyncio.CancelledError:
            await self._kill()
            raise
        if answer in (b"ok\n", b"refused\n"):
            return answer == b"ok\n"
        _log.warning("compiling an output constraint went beyond its limits; it is refused")
        await self._kill()
        # The next one need not wait for the whole start.
        self._restart = asyncio.get_running_loop().create_task(self._start_again())
        return False

    async def _start_again(self) -> None:
        with contextlib.suppress(SluiceError):  # the next check says so
            await self.start()

    async def _ensure_process(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise unavailable("ENGINE_CLOSED", "The engine is shutting down.")
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(PROGRAM),
            str(self._memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # the compiler's messages quote what it was given
            limit=LINE_BYTES_MAX,
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            async with asyncio.timeout(START_S_MAX):
                process.stdin.write(json.dumps({"tokenizer": self._tokenizer}).encode() + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except (TimeoutError, OSError):
            answer = b""
        finally:
            if answer != b"ready\n":
                await self._kill()
        if answer != b"ready\n":
            raise unavailable(
                "CONSTRAINT_COMPILER_DOWN", "Output constraints cannot be compiled now.", RETRY_S
            )
        return process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        # Closes the pipes' transports, which the loop would otherwise report as left open.
        process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way
