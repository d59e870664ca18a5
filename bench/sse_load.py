"""A closed-loop client of OpenAI streams: cheap enough to share two cores with what it measures.

Run as a process: ``python -m bench.sse_load --target HOST:PORT --streams N --tokens T
--seconds S``; prints the marks and the tally that ``bench.load`` prints for gRPC. Each of N workers
keeps one request open on its own keep-alive connection. A token is an event with content; an answer
with another number of tokens than asked for, or without ``[DONE]``, fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from typing import cast

import uvloop

from bench.load import Tally

ANSWER_S = 120.0
CONTENT = b'"content":"'
NO_CONTENT = b'"content":""'
DONE = b"data: [DONE]\n\n"


class MalformedError(Exception):
    """The bytes are no chunked response of server-sent events."""


class Reply:
    """One response, fed with bytes cut anywhere. After ``over`` it must not be fed."""

    __slots__ = ("_buffer", "_event", "_in_body", "done", "events", "over", "status", "tokens")

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is read
        self.tokens = 0
        self.events = 0
        self.done = False  # [DONE] was seen
        self.over = False  # the last chunk was seen
        self._in_body = False
        self._buffer = b""  # a chunk that is not yet complete
        self._event = b""  # an event that is not yet complete

    def feed(self, data: bytes) -> int:
        """Takes bytes; returns the tokens that they completed."""
        buffer = self._buffer + data if self._buffer else data
        start = 0
        if not self._in_body:
            head = buffer.find(b"\r\n\r\n")
            if head < 0:
                self._buffer = buffer
                return 0
            self._read_head(buffer[:head].lower())
            start = head + 4
        before = self.tokens
        while not self.over:
            line = buffer.find(b"\r\n", start)
            if line < 0:
                break
            try:
                stop = line + 2 + int(buffer[start:line], 16)
            except ValueError:
                raise MalformedError(f"a chunk's size is {buffer[start:line]!r}") from None
            if len(buffer) < stop + 2:
                break
            if stop == line + 2:
                self.over = True
            else:
                self._take(buffer[line + 2 : stop])
            start = stop + 2
        self._buffer = buffer[start:]
        return self.tokens - before

    def _read_head(self, head: bytes) -> None:
        self.status = int(head.split(b" ", 2)[1])
        self._in_body = True
        if self.status == 200 and b"transfer-encoding: chunked" not in head:
            raise MalformedError("the response is not chunked")
        if self.status != 200:
            self.over = True  # the connection is given up with whatever body follows

    def _take(self, payload: bytes) -> None:
        text = self._event + payload if self._event else payload
        end = text.rfind(b"\n\n") + 2
        if end < 2:
            self._event = text
            return
        if end < len(text):
            text, self._event = text[:end], text[end:]
        else:
            self._event = b""
        self.events += text.count(b"\n\n")
        self.tokens += text.count(CONTENT) - text.count(NO_CONTENT)
        if text.endswith(DONE):
            self.done = True


class Connection(asyncio.Protocol):
    """A connection that asks one request at a time."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._reply = Reply()
        self._answered: asyncio.Future[Reply] | None = None
        self.counting = False
        self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        try:
            tokens = reply.feed(data)
        except MalformedError as error:
            self._fail(error)
            return
        if tokens:
            if not self.first_s:
                self.first_s = time.perf_counter()
            if self.counting:
                self._tally.tokens += tokens
                self._tally.messages += 1
        if reply.over and self._answered is not None and not self._answered.done():
            self._answered.set_result(reply)

    async def ask(self, request: bytes) -> Reply:
        """Sends a request and reads its whole answer; ``first_s`` is when its first token came."""
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._reply = Reply()
        self.first_s = 0.0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_S):
            return await self._answered

    def close(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


async def connect(target: str, tally: Tally) -> Connection:
    """A new connection to HOST:PORT."""
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(tally), host, int(port))
    return connection


def request_bytes(target: str, prompt: str, tokens: int, model: str = "simulated") -> bytes:
    """A chat completion of ``tokens`` tokens, streamed."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {target}\r\naccept: text/event-stream\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def check(reply: Reply, tokens: int) -> None:
    """Ends the run when an answer is not whole."""
    if reply.tokens != tokens:
        raise SystemExit(f"{reply.tokens} tokens where {tokens} were asked for")
    if not reply.done:
        raise SystemExit("an answer ended without [DONE]")


class Load:
    """N workers against one target."""

    def __init__(self, target: str, streams: int, tokens: int, prompt: str) -> None:
        self._target = target
        self._streams = streams
        self._tokens = tokens
        self._prompt = prompt
        self._open: set[Connection] = set()
        self._stopping = False
        self._measuring = False
        self.tally = Tally()

    async def run(self, warmup_s: float, seconds: float) -> Tally:
        """Runs warm-up and measurement, then lets the open requests end."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._streams):
                delay_s = number / self._streams * min(1.0, warmup_s)
                group.create_task(self._worker(number, delay_s))
            await asyncio.sleep(warmup_s)
            self._measure(True)
            began = time.monotonic()
            await asyncio.sleep(seconds)
            self._measure(False)
            self.tally.seconds = time.monotonic() - began
            self._stopping = True
        return self.tally

    def _measure(self, on: bool) -> None:
        print(json.dumps({"measuring": on}), flush=True)
        self._measuring = on
        for connection in self._open:
            connection.counting = on

    async def _worker(self, number: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        request = request_bytes(self._target, f"{self._prompt} {number}", self._tokens)
        while not self._stopping:
            connection: Connection | None = None
            try:
                connection = await connect(self._target, self.tally)
                connection.counting = self._measuring
                self._open.add(connection)
                while not self._stopping:
                    await self._one(connection, request)
            except (OSError, TimeoutError, MalformedError) as error:
                self._count_error(type(error).__name__)
                await asyncio.sleep(0.05)
            finally:
                if connection is not None:
                    self._open.discard(connection)
                    connection.close()

    async def _one(self, connection: Connection, request: bytes) -> None:
        began = time.perf_counter()
        reply = await connection.ask(request)
        if reply.status != 200:
            raise ConnectionAbortedError(reply.status)
        check(reply, self._tokens)
        if self._measuring:
            self.tally.requests += 1
            self.tally.ttft_ms.append((connection.first_s - began) * 1000)

    def _count_error(self, name: str) -> None:
        self.tally.errors += 1
        self.tally.error_codes[name] = self.tally.error_codes.get(name, 0) + 1


async def idle_ttft_ms(
    direct: str, through: str, count: int, skip: int = 20
) -> tuple[list[float], list[float]]:
    """Times to first token of single requests in ms, alternately to ``direct`` and ``through``.

    The first ``skip`` pairs warm both up. Two tokens each: the engine is at rest before the next.
    """
    tally = Tally()
    found: dict[str, list[float]] = {direct: [], through: []}
    connections = {target: await connect(target, tally) for target in found}
    for number in range(count + skip):
        for target, connection in connections.items():
            request = request_bytes(target, f"hello {number}", 2)
            began = time.perf_counter()
            reply = await connection.ask(request)
            if reply.status != 200:
                raise SystemExit(f"{target} answers {reply.status}")
            check(reply, 2)
            found[target].append((connection.first_s - began) * 1000)
            await asyncio.sleep(0.01)
    for connection in connections.values():
        connection.close()
    return found[direct][skip:], found[through][skip:]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt", default="Tell me about stream number")
    arguments = parser.parse_args()
    load = Load(arguments.target, arguments.streams, arguments.tokens, arguments.prompt)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tally = runner.run(load.run(arguments.warmup, arguments.seconds))
    print(json.dumps(asdict(tally)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
