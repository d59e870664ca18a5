"""A scripted HTTP server on loopback, and canaries that nothing may connect to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Asked:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]


# Writes an answer; whether the connection stays open.
Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[bool]]


def fixed(
    body: bytes = b"{}", status: str = "200 OK", media_type: str = "application/json", **more: str
) -> Answer:
    """An answer with a body."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        length = f"content-length: {len(body)}\r\n"
        writer.write(_head(status, media_type, more) + length.encode() + b"\r\n" + body)
        await writer.drain()
        return True

    return answer


def endless(piece: bytes, size: int, pause_s: float = 0.0, **more: str) -> Answer:
    """``size`` bytes, a piece at a time, of a length that is not told."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head("200 OK", "application/json", more) + b"connection: close\r\n\r\n")
        for _ in range(0, size, len(piece)):
            writer.write(piece)
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
        return False

    return answer


async def silent(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    """Never answers."""
    await asyncio.sleep(3600)
    return False


def _head(status: str, media_type: str, more: Mapping[str, str]) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {media_type}\r\n"
    head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in more.items())
    return head.encode()


@dataclass
class HttpServer:
    """Answers by path, notes what it was asked."""

    answers: Mapping[str, Answer]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    left: int = 0  # calls whose caller went away before their answer
    port: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (asked := await _read(reader)) is not None:
                self.asked.append(asked)
                path = asked.target.partition("?")[0]
                answer = self.answers.get(path, fixed(b"{}", "404 Not Found"))
                going_on = await _unless_left(reader, answer(asked, writer))
                self.left += going_on is None
                if not going_on:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()


async def _unless_left(reader: asyncio.StreamReader, answer: Awaitable[bool]) -> bool | None:
    """The answer's own result, or None as soon as the caller has gone away."""
    task = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([task], timeout=0.05))[0]:
            if reader.at_eof():
                return None
        return task.result()
    finally:
        task.cancel()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    line = (await reader.readline()).decode().strip()
    if not line:
        return None
    headers: dict[str, str] = {}
    while raw := (await reader.readline()).decode().strip():
        name, _, value = raw.partition(":")
        before = headers.get(name.lower())
        headers[name.lower()] = value.strip() if before is None else f"{before}, {value.strip()}"
    size = int(headers.get("content-length", "0"))
    return Asked(line, headers, await reader.readexactly(size) if size else b"")


@asynccontextmanager
async def serving(
    answers: Mapping[str, Answer] | None = None,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[HttpServer]:
    """A server on a free port; what it still does ends with the block."""
    one = HttpServer(answers or {})
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await one.handle(reader, writer)
        except asyncio.CancelledError:  # the end of the block; asyncio would log it
            writer.close()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(accept, host, 0, ssl=tls)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        running = list(tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def canaries(*hosts: str) -> AsyncIterator[list[HttpServer]]:
    """Listeners that a test asks afterwards how often they were connected to."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(host=host)) for host in hosts]
