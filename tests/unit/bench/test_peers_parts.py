"""The peers' mock engine and its client: short runs in which every token is counted.

These two read a real clock and loopback sockets, because that is what they are, on
the event loop that the processes run on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import ParamSpec

import pytest
import uvloop

from bench import mock_openai
from bench.load import Tally
from bench.sse_load import (
    Load,
    MalformedError,
    Reply,
    check,
    connect,
    idle_ttft_ms,
    request_bytes,
)

STEP_S = 0.002
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


P = ParamSpec("P")


def on_uvloop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*arguments, **named))

    return run


@contextlib.asynccontextmanager
async def mock() -> AsyncIterator[tuple[str, mock_openai.Server]]:
    listening, server = await mock_openai.start("127.0.0.1", 0, STEP_S)
    async with listening:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", server


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


@on_uvloop
async def test_an_answer_has_exactly_the_tokens_asked_for_each_in_its_own_chunk() -> None:
    async with mock() as (target, _):
        host, port = target.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_bytes(target, "hello", 7))
        await reader.readuntil(b"\r\n\r\n")
        payloads = []
        while size := int(await reader.readline(), 16):
            payloads.append((await reader.readexactly(size + 2))[:-2])
        writer.close()
        await writer.wait_closed()
    assert payloads.pop() == b"data: [DONE]\n\n"
    choices = [json.loads(payload.removeprefix(b"data: "))["choices"][0] for payload in payloads]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    texts = [choice["delta"]["content"] for choice in choices[1:]]
    assert texts == [f" w{number:03d}" for number in range(7)]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * 7 + ["length"]


@on_uvloop
async def test_the_client_counts_every_token_of_every_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with mock() as (target, server):
        load = Load(target, 16, 25, "hello")
        tally = await load.run(warmup_s=0.0, seconds=0.3)
        answered = server.requests
    assert tally.errors == 0
    assert answered >= 32
    # Measured from the start; each worker's last request ends after the measurement.
    assert answered - 16 <= tally.requests <= answered
    assert tally.requests * 25 <= tally.tokens <= answered * 25
    assert len(tally.ttft_ms) == tally.requests
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"measuring": True},
        {"measuring": False},
    ]


@on_uvloop
async def test_tokens_are_paced_by_the_step_that_all_streams_share() -> None:
    async with mock() as (target, _):
        loop = asyncio.get_running_loop()
        tally = Tally()
        connections = [await connect(target, tally) for _ in range(8)]
        began = loop.time()
        replies = await asyncio.gather(
            *(one.ask(request_bytes(target, "hello", 50)) for one in connections)
        )
        took_s = loop.time() - began
        for connection in connections:
            connection.close()
    assert [reply.tokens for reply in replies] == [50] * 8
    assert [reply.events for reply in replies] == [52] * 8  # a role before them, [DONE] after them
    assert took_s >= 48 * STEP_S  # a late step may be made good once; never is one faster


@on_uvloop
async def test_a_reader_that_goes_away_is_forgotten_by_the_engine() -> None:
    async with mock() as (target, server):
        connection = await connect(target, Tally())
        asking = asyncio.ensure_future(connection.ask(request_bytes(target, "hello", 10_000)))
        while not connection.first_s:
            await asyncio.sleep(STEP_S)
        connection.close()
        with pytest.raises(ConnectionResetError):
            await asking
        async with asyncio.timeout(5):
            while server.engine._stepping:
                await asyncio.sleep(STEP_S)
        assert server.engine._running == []


@on_uvloop
async def test_idle_times_are_taken_from_both_targets_in_turn() -> None:
    async with mock() as (direct, one), mock() as (through, other):
        times = await idle_ttft_ms(direct, through, count=5, skip=2)
        assert [len(found) for found in times] == [5, 5]
        assert (one.requests, other.requests) == (7, 7)
        assert min(times[0] + times[1]) > 0


@on_uvloop
async def test_what_gateways_poll_is_answered_and_the_rest_is_not_found() -> None:
    async with mock() as (target, server):
        host, port = target.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        statuses = {}
        for path in ("/health", "/v1/models", "/version", "/metrics", "/get_load"):
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {target}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            statuses[path] = int(head.split()[1])
        writer.close()
        await writer.wait_closed()
        assert server.unknown == {"/get_load": 1}
    assert statuses.pop("/get_load") == 404
    assert set(statuses.values()) == {200}


def test_a_reply_is_read_the_same_however_its_bytes_are_cut() -> None:
    events = [b'data: {"delta":{"role":"assistant","content":""}}\n\n']
    events += [b'data: {"delta":{"content":" w%03d"}}\n\n' % number for number in range(3)]
    events += [b"data: [DONE]\n\n"]
    apart = b"".join(chunk(event) for event in events)
    joined = chunk(b"".join(events))
    text = b"".join(events)
    across = chunk(text[:70]) + chunk(text[70:95]) + chunk(text[95:])  # events cut by chunks
    for body in (apart, joined, across):
        data = HEAD + body + b"0\r\n\r\n"
        for size in (1, 2, 3, 7, 50, len(data)):
            reply = Reply()
            counted = sum(
                reply.feed(data[start : start + size]) for start in range(0, len(data), size)
            )
            assert (reply.status, counted, reply.tokens, reply.events) == (200, 3, 3, 5)
            assert reply.done and reply.over


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([b'data: {"content":"a"}\n\n', b"data: [DONE]\n\n"], "1 tokens where 2"),
        ([b'data: {"content":"a"}\n\n'] * 2, "without"),
        ([b'data: {"content":"a"}\n\n'] * 3 + [b"data: [DONE]\n\n"], "3 tokens where 2"),
    ],
)
def test_an_answer_that_is_not_whole_ends_the_run(events: list[bytes], says: str) -> None:
    reply = Reply()
    reply.feed(HEAD + b"".join(chunk(event) for event in events) + b"0\r\n\r\n")
    with pytest.raises(SystemExit, match=says):
        check(reply, 2)


def test_bytes_that_are_no_chunks_are_malformed() -> None:
    with pytest.raises(MalformedError):
        Reply().feed(HEAD + b"data: hello\r\n\r\n")
    with pytest.raises(MalformedError):
        Reply().feed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
