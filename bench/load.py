"""A closed-loop gRPC load client: cheap enough to share two cores with what it measures.

Run as a process: ``python -m bench.load --target HOST:PORT --key KEY --streams N --tokens T
--seconds S``; prints one JSON object. Each of N workers keeps one generation open; the count of
tokens comes from positions and the ``finished`` message, and sequence numbers are checked, so that
a lost or repeated message fails the run. With ``--direct NAME --keys FOLDER`` the same load goes to
an instance past the mesh (``bench/direct.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc.aio

from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc


@dataclass
class Tally:
    """What the load saw, inside the measured time only."""

    requests: int = 0
    tokens: int = 0
    messages: int = 0
    errors: int = 0
    seconds: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    error_codes: dict[str, int] = field(default_factory=dict)


class Load:
    """N workers against one target."""

    def __init__(self, target: str, key: str, streams: int, tokens: int, prompt: str) -> None:
        options = [("grpc.max_receive_message_length", 8 << 20)]
        channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(4)]
        self._stubs = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in channels]
        self._channels = channels
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._streams = streams
        self._tokens = tokens
        self._prompt = prompt
        self.tally = Tally()
        self._measuring = False
        self._stopping = False

    async def run(self, warmup_s: float, seconds: float) -> Tally:
        """Runs warm-up and measurement, then lets the open requests end."""
        workers = [
            asyncio.create_task(self._worker(number, number / self._streams * min(1.0, warmup_s)))
            for number in range(self._streams)
        ]
        await asyncio.sleep(warmup_s)
        print(json.dumps({"measuring": True}), flush=True)
        self._measuring = True
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self._measuring = False
        self.tally.seconds = time.monotonic() - began
        print(json.dumps({"measuring": False}), flush=True)
        self._stopping = True
        await asyncio.gather(*workers)
        for channel in self._channels:
            await channel.close()
        return self.tally

    async def _worker(self, number: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        stub = self._stubs[number % len(self._stubs)]
        request = generate_pb2.GenerateRequest(prompt=f"{self._prompt} {number}")
        request.sampling.max_tokens = self._tokens
        request.sampling.ignore_eos = True
        while not self._stopping:
            try:
                await self._one(stub, request)
            except grpc.aio.AioRpcError as error:
                self.tally.errors += 1
                name = error.code().name
                self.tally.error_codes[name] = self.tally.error_codes.get(name, 0) + 1
                await asyncio.sleep(0.05)

    async def _one(
        self,
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub,
        request: generate_pb2.GenerateRequest,
    ) -> None:
        began = time.monotonic()
        sequence = 0
        first = 0.0
        seen = 0  # tokens before the last delta, for the share of a stream inside the measurement
        async for message in stub.Generate(request, metadata=self._metadata, timeout=120):
            sequence += 1
            if message.sequence != sequence:
                raise SystemExit(f"sequence {message.sequence} where {sequence} was due")
            if self._measuring:
                self.tally.messages += 1
            kind = message.WhichOneof("event")
            if kind == "delta":
                position = message.delta.position
                if not first:
                    first = time.monotonic()
                if self._measuring:
                    self.tally.tokens += position - seen
                seen = position
            elif kind == "finished":
                total = message.finished.usage.completion_tokens
                if total != self._tokens:
                    raise SystemExit(f"{total} tokens where {self._tokens} were asked for")
                if self._measuring:
                    self.tally.tokens += total - seen
                    self.tally.requests += 1
                    self.tally.ttft_ms.append((first - began) * 1000)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--warmup", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt", default="Tell me about stream number")
    parser.add_argument("--direct", default="")
    parser.add_argument("--keys", type=Path)
    arguments = parser.parse_args()

    async def go() -> Tally:
        if arguments.direct:
            from bench.direct import DirectLoad

            direct = DirectLoad(arguments.direct, arguments.keys, arguments.prompt)
            await direct.run(
                arguments.target,
                streams=arguments.streams,
                tokens=arguments.tokens,
                warmup_s=arguments.warmup,
                seconds=arguments.seconds,
            )
            return direct.tally
        load = Load(
            arguments.target, arguments.key, arguments.streams, arguments.tokens, arguments.prompt
        )
        return await load.run(arguments.warmup, arguments.seconds)

    tally = asyncio.run(go())
    print(json.dumps(asdict(tally)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
