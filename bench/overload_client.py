"""The client of ``make bench-overload``: open loop, one arrival list, gRPC or OpenAI streams.

Run as a process: ``python -m bench.overload_client --target HOST:PORT --protocol grpc|sse
--arrivals FILE --out FILE``. Each request is sent at its arrival time whatever the others do, is
given up after its class's ``client_s``, and is never sent again. Both protocols use the same
clock, the same arrivals and the same words for how a request ended, one row of ``Row`` each.

Prints ``{"measuring": true}`` when the warm-up is over, ``false`` when the last arrival was sent,
and ends when the last request has. The token count of a finished request is checked; a wrong one
fails the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
import grpc.aio
import uvloop

from bench.sse_load import MalformedError, Reply
from scheduler_svc.domain.model import PriorityClass
from sluice.common.v1 import policy_pb2
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.status import from_rpc_error

FINISHED, LEFT, REFUSED, FAILED = "finished", "left", "refused", "failed"
CHANNELS = 4

_CLASSES = {
    PriorityClass.CRITICAL: policy_pb2.PRIORITY_CLASS_CRITICAL,
    PriorityClass.INTERACTIVE: policy_pb2.PRIORITY_CLASS_INTERACTIVE,
    PriorityClass.STANDARD: policy_pb2.PRIORITY_CLASS_STANDARD,
    PriorityClass.BATCH: policy_pb2.PRIORITY_CLASS_BATCH,
}
# Refused before any output, in the peers' and in our own words.
_REFUSALS = (429, 408, 503)


class Ask(NamedTuple):
    """A request to be sent. ``at_s`` from the beginning; lengths in tokens."""

    at_s: float
    tenant: str
    priority_class: int
    prompt_tokens: int
    output_tokens: int
    client_s: float


@dataclass(slots=True)
class Row:
    """What became of a request. Times in seconds from the beginning; ``first_s`` 0: no output.
    ``late_s``: how much later than planned it was sent. ``outcome``: finished, left (its client
    gave up), refused (no output) or failed; ``reason``: the server's word for the last two."""

    at_s: float
    tenant: str
    priority_class: int
    tokens: int
    late_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    outcome: str = LEFT
    reason: str = ""


# Each is a token of the simulated engine's vocabulary, with the space before it.
WORDS = ("the", "of", "and", "to", "is", "that", "it", "was", "for", "on", "with", "as", "at")


class Words:
    """Prompts of so many tokens of the simulated engine's vocabulary, each with a beginning of its
    own, so that nothing is found in a prefix cache."""

    def __init__(self, tokens_max: int = 8_192) -> None:
        ends = [0]
        parts = []
        for number in range(tokens_max):
            parts.append(f" {WORDS[number % len(WORDS)]}")
            ends.append(ends[-1] + len(parts[-1]))
        self._text, self._ends = "".join(parts), ends

    def prompt(self, number: int, tokens: int) -> str:
        """The prompt of a request; the digits of its number are tokens too."""
        head = f"{number:06d}"
        return head + self._text[: self._ends[max(0, tokens - len(head))]]


class GrpcSender:
    """Our public API."""

    def __init__(self, target: str, keys: Mapping[str, str]) -> None:
        options = [
            ("grpc.max_receive_message_length", 8 << 20),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channels = [
            grpc.aio.insecure_channel(target, options=options) for _ in range(CHANNELS)
        ]
        self._stubs = [scheduler_pb2_grpc.SchedulerServiceStub(one) for one in self._channels]
        self._metadata = {
            tenant: (("authorization", f"Bearer {key}"),) for tenant, key in keys.items()
        }

    async def send(self, number: int, ask: Ask, prompt: str, row: Row, start_s: float) -> None:
        """Sends one request and writes down what becomes of it."""
        request = generate_pb2.GenerateRequest(prompt=prompt)
        request.priority_class = _CLASSES[PriorityClass(ask.priority_class)]
        request.sampling.max_tokens = ask.output_tokens
        request.sampling.ignore_eos = True
        stub = self._stubs[number % CHANNELS]
        try:
            call = stub.Generate(request, metadata=self._metadata[ask.tenant], timeout=ask.client_s)
            async for message in call:
                if not row.first_s and message.HasField("delta"):
                    row.first_s = time.perf_counter() - start_s
                elif message.HasField("finished"):
                    tokens = message.finished.usage.completion_tokens
                    if tokens != ask.output_tokens:
                        raise SystemExit(f"{tokens} tokens where {ask.output_tokens} were asked")
                    row.outcome = FINISHED
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            row.reason = known.reason
            row.outcome = FAILED if row.first_s else REFUSED
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and known.reason in (
                "DEADLINE_EXCEEDED",
                "",
            ):
                row.outcome = LEFT
            elif error.code() not in (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            ):
                row.outcome = FAILED

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            await channel.close()


class SseConnection(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, row: Row, start_s: float) -> None:
        self._row = row
        self._start_s = start_s
        self._reply = Reply()
        self._transport: asyncio.Transport | None = None
        self.over: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        try:
            reply.feed(data)
        except MalformedError as error:
            if not self.over.done():
                self.over.set_exception(error)
            return
        if not self._row.first_s and reply.tokens:
            self._row.first_s = time.perf_counter() - self._start_s
        if reply.over and not self.over.done():
            self.over.set_result(reply)

    def close(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()


class SseSender:
    """An OpenAI-shaped chat completion. Peers without classes and tenants ignore the headers."""

    # smg's names, in our order of classes.
    PRIORITIES = ("system", "interactive", "default", "bulk")

    def __init__(self, target: str) -> None:
        self._target = target
        host, _, port = target.rpartition(":")
        self._address = (host, int(port))

    async def send(self, number: int, ask: Ask, prompt: str, row: Row, start_s: float) -> None:
        """Sends one request and writes down what becomes of it."""
        loop = asyncio.get_running_loop()
        connection: SseConnection | None = None
        try:
            async with asyncio.timeout(ask.client_s):
                _, connection = await loop.create_connection(
                    lambda: SseConnection(row, start_s), *self._address
                )
                assert connection._transport is not None
                connection._transport.write(self._request(ask, prompt))
                reply = await connection.over
            if reply.status == 200:
                row.outcome = FINISHED if reply.done else FAILED
            else:
                row.outcome = REFUSED if reply.status in _REFUSALS else FAILED
                row.reason = f"HTTP_{reply.status}"
        except TimeoutError:
            row.outcome = LEFT
        except (OSError, MalformedError) as error:
            row.outcome, row.reason = FAILED, type(error).__name__
        finally:
            if connection is not None:
                connection.close()

    def _request(self, ask: Ask, prompt: str) -> bytes:
        body = json.dumps(
            {
                "model": "simulated",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": ask.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._target}\r\n"
            f"accept: text/event-stream\r\ncontent-type: application/json\r\n"
            f"x-smg-priority: {self.PRIORITIES[ask.priority_class]}\r\n"
            f"x-smg-tenant-id: {ask.tenant}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def close(self) -> None:
        """Nothing is open."""


async def run(
    sender: GrpcSender | SseSender, asks: Sequence[Ask], warmup_s: float, until_s: float
) -> list[Row]:
    """Sends every request at its time; returns the rows in the order of arrival. What is open at
    ``until_s`` is given up then."""
    words = Words()
    rows = [Row(ask.at_s, ask.tenant, ask.priority_class, ask.output_tokens) for ask in asks]
    measuring = False
    async with asyncio.TaskGroup() as group:
        start_s = time.perf_counter()

        async def one(number: int) -> None:
            row, ask = rows[number], asks[number]
            row.late_s = time.perf_counter() - start_s - ask.at_s
            prompt = words.prompt(number, ask.prompt_tokens)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s - ask.at_s - row.late_s):
                    await sender.send(number, ask, prompt, row, start_s)
            row.end_s = time.perf_counter() - start_s

        for number, ask in enumerate(asks):
            left_s = ask.at_s - (time.perf_counter() - start_s)
            if left_s > 0:
                await asyncio.sleep(left_s)
            if not measuring and ask.at_s >= warmup_s:
                measuring = True
                print(json.dumps({"measuring": True}), flush=True)
            group.create_task(one(number))
        print(json.dumps({"measuring": False}), flush=True)
    await sender.close()
    return rows


def read_asks(path: Path) -> Iterator[Ask]:
    """Arrivals from a file of one JSON list a line."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Ask(*json.loads(line))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--protocol", choices=("grpc", "sse"), required=True)
    parser.add_argument("--arrivals", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keys", type=Path, help="JSON object of tenants' keys (grpc)")
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("--until", type=float, required=True, help="s from the beginning")
    arguments = parser.parse_args()
    asks = list(read_asks(arguments.arrivals))
    gc.freeze()
    before = time.process_time()

    async def go() -> list[Row]:
        sender: GrpcSender | SseSender
        if arguments.protocol == "grpc":
            keys: Any = json.loads(arguments.keys.read_text())
            sender = GrpcSender(arguments.target, keys)
        else:
            sender = SseSender(arguments.target)
        return await run(sender, asks, arguments.warmup, arguments.until)

    factory = uvloop.new_event_loop if arguments.protocol == "sse" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        rows = runner.run(go())
    with contextlib.closing(arguments.out.open("w", encoding="utf-8")) as file:
        for row in rows:
            file.write(json.dumps(list(asdict(row).values())) + "\n")
    print(json.dumps({"cpu_s": time.process_time() - before}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
