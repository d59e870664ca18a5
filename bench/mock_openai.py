"""An OpenAI-shaped HTTP/1.1 server: the engine behind the peers, equivalent to our simulated one.

Run as a process: ``python -m bench.mock_openai --port 0``; prints ``{"port": N}`` when it listens
and ends on SIGTERM. What makes it equivalent to ``bench/mesh.toml``'s engine:

- all requests share one step loop of 5 ms; a step begins at once when the engine is at rest, a
  request that comes during a step joins the next one, and its first token ends that step;
- steps are laid out on absolute time, and what is late by more than a step is lost;
- a request writes exactly ``max_tokens`` tokens and the engine never waits for a reader.

What makes it equivalent to vLLM for a gateway: one server-sent event in its own HTTP chunk for each
token, about as long as vLLM's (a role event before the first token, ``[DONE]`` after the last), and
the routes that gateways poll. Reading a prompt takes no time (our engine: 0.02 ms for these).

It is cheap, so that it is not what is measured: one event loop, one write for each request and
step, and three byte strings joined for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Protocol, cast

import uvloop

MODEL = "simulated"
STEP_MS = 5.0
HEAD_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = 1 << 20
TOKENS_MAX = 100_000

# Of one length, so that every chunk of a request has the same size line.
WORDS = [f" w{number:03d}".encode() for number in range(64)]

_HEADERS = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_OPEN = (
    '{"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":1790000000,'
    f'"model":"{MODEL}","choices":[{{"index":0,"delta":'
)
_CLOSE = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n\r\n'
_CLOSE_LAST = b'},"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n\r\n'
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_END_BYTES = 2  # the line break that ends a chunk and is not counted in its size


class Stream:
    """One request's answer: which bytes it writes at each step."""

    __slots__ = ("_begin", "_last", "_open", "_transport", "left", "position")

    def __init__(self, transport: asyncio.WriteTransport, number: int, tokens: int) -> None:
        self._transport = transport
        self.left = tokens
        self.position = 0
        opening = b"data: " + (_OPEN % number).encode()
        role = opening + b'{"role":"assistant","content":""' + _CLOSE
        content = opening + b'{"content":"'
        rest = len(content) + len(WORDS[0]) + len(b'"') - _END_BYTES
        self._begin = _HEADERS + b"%x\r\n" % (len(role) - _END_BYTES) + role
        self._open = b"%x\r\n" % (rest + len(_CLOSE)) + content
        self._last = b"%x\r\n" % (rest + len(_CLOSE_LAST)) + content

    def step(self) -> bool:
        """Writes one token; returns whether more follow."""
        word = WORDS[self.position & 63]
        self.position += 1
        self.left -= 1
        if self.left:
            text = b"".join((self._open, word, b'"', _CLOSE))
        else:
            text = b"".join((self._last, word, b'"', _CLOSE_LAST, _DONE))
        self._transport.write(self._begin + text if self.position == 1 else text)
        return self.left > 0

    def drop(self) -> None:
        """The reader has gone: the next step forgets this stream."""
        self.left = 0

    @property
    def dropped(self) -> bool:
        """Whether nothing is to be written any more."""
        return self.left <= 0


class Engine:
    """The step loop that all requests share; stands still when there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, step_s: float) -> None:
        self._loop = loop
        self._step_s = step_s
        self._running: list[Stream] = []
        self._waiting: list[Stream] = []
        self._stepping = False
        self._due_s = 0.0

    def submit(self, stream: Stream) -> None:
        """Takes a stream into the next step."""
        self._waiting.append(stream)
        if not self._stepping:
            self._stepping = True
            # Not now: what arrives in the same turn of the loop goes into the same step.
            self._loop.call_soon(self._begin_from_rest)

    def _begin_from_rest(self) -> None:
        self._begin(self._loop.time())

    def _begin(self, start_s: float) -> None:
        self._running += self._waiting
        self._waiting = []
        if not self._running:
            self._stepping = False
            return
        self._due_s = start_s + self._step_s
        self._loop.call_at(self._due_s, self._end)

    def _end(self) -> None:
        self._running = [stream for stream in self._running if not stream.dropped and stream.step()]
        self._begin(max(self._due_s, self._loop.time() - self._step_s))


class Server:
    """Counts requests and answers what is not a generation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests = 0
        self.unknown: Counter[str] = Counter()
        models = {"object": "list", "data": [_model()]}
        self._plain = {
            "/health": (b"", b"text/plain"),
            "/v1/models": (json.dumps(models).encode(), b"application/json"),
            "/version": (b'{"version":"0.32.0"}', b"application/json"),
            "/metrics": (_METRICS, b"text/plain; version=0.0.4"),
        }

    def answer(self, path: str) -> bytes:
        """The whole response to a plain GET; 404 as vLLM says it for what it does not have."""
        found = self._plain.get(path)
        if found is None:
            self.unknown[path] += 1
            return response(b"404 Not Found", b'{"detail":"Not Found"}', b"application/json")
        return response(b"200 OK", *found)

    def generate(self, transport: asyncio.Transport, path: str, body: bytes) -> Stream | None:
        """Begins a chat completion that is streamed and says how long it is."""
        if path != "/v1/chat/completions":
            transport.write(self.answer(path))
            return None
        try:
            asked = json.loads(body)
            tokens = int(asked["max_tokens"])
        except (ValueError, KeyError, TypeError):
            asked, tokens = {}, 0
        if not asked.get("stream") or not 1 <= tokens <= TOKENS_MAX:
            text = b'{"error":{"message":"stream and max_tokens are needed"}}'
            transport.write(response(b"400 Bad Request", text, b"application/json"))
            return None
        self.requests += 1
        stream = Stream(transport, self.requests, tokens)
        self.engine.submit(stream)
        return stream


def _model() -> dict[str, object]:
    return {
        "id": MODEL,
        "object": "model",
        "created": 1790000000,
        "owned_by": "vllm",
        "root": MODEL,
        "parent": None,
        "max_model_len": 8192,
    }


_METRICS = b"".join(
    b'# TYPE vllm:%s gauge\nvllm:%s{engine="0",model_name="simulated"} 0.0\n' % (name, name)
    for name in (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc")
)


def response(status: bytes, body: bytes, content_type: bytes) -> bytes:
    """An HTTP/1.1 response with a body of known length."""
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        content_type,
        len(body),
        body,
    )


class Answer(Protocol):
    """An answer that is being written."""

    def drop(self) -> None:
        """The reader has gone."""


class Answering(Protocol):
    """What a connection needs of a server."""

    def answer(self, path: str) -> bytes:
        """The whole response to a plain GET."""

    def generate(self, transport: asyncio.Transport, path: str, body: bytes) -> Answer | None:
        """Begins to answer a POST, or refuses it at once."""


class Connection(asyncio.Protocol):
    """One keep-alive connection: requests one after the other, bodies with a known length."""

    def __init__(self, server: Answering) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._stream: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        if self._stream is not None:
            self._stream.drop()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            lines = self._buffer[:end].decode("latin-1").split("\r\n")
            method, path, _ = lines[0].split(" ", 2)
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:])
            }
            length = int(headers.get("content-length", "0"))
            if "transfer-encoding" in headers or length > BODY_BYTES_MAX:
                self._refuse(b"411 Length Required")
                return
            stop = end + 4 + length
            if len(self._buffer) < stop:
                return
            body, self._buffer = self._buffer[end + 4 : stop], self._buffer[stop:]
            self._request(method, path.partition("?")[0], body)
        if len(self._buffer) > HEAD_BYTES_MAX + BODY_BYTES_MAX:
            self._refuse(b"431 Request Header Fields Too Large")

    def _refuse(self, status: bytes) -> None:
        assert self._transport is not None
        self._transport.write(response(status, b"", b"text/plain"))
        self._transport.close()

    def _request(self, method: str, path: str, body: bytes) -> None:
        assert self._transport is not None
        if method == "POST":
            self._stream = self._server.generate(self._transport, path, body)
        else:
            self._transport.write(self._server.answer(path))


async def start(host: str, port: int, step_s: float) -> tuple[asyncio.Server, Server]:
    """Listens; the first socket of the asyncio server tells the port."""
    loop = asyncio.get_running_loop()
    server = Server(Engine(loop, step_s))
    make: Callable[[], Connection] = lambda: Connection(server)  # noqa: E731
    return await loop.create_server(make, host, port, backlog=1024), server


async def serve(host: str, port: int, step_s: float) -> None:
    """Serves until SIGTERM or SIGINT."""
    listening, server = await start(host, port, step_s)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    print(json.dumps({"port": listening.sockets[0].getsockname()[1]}), flush=True)
    await ending.wait()
    listening.close()
    summary = {"requests": server.requests, "not_found": dict(server.unknown)}
    print(json.dumps(summary), flush=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.host, arguments.port, arguments.step_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
