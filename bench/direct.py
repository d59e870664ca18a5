"""The load of ``bench/load.py`` on one instance, past the mesh.

Over a frame stream of its own, under grants, as a scheduler would send it: what the mesh adds is
what is missing here.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from bench.load import Tally
from sluice.channels import open_channel
from sluice.frames import FrameWriter, read_frames
from sluice.frames_grpc import client_connection
from sluice.grants import GrantSigner
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc

DEADLINE_S = 120


class DirectLoad:
    """N slots, each started again when it ends."""

    def __init__(self, instance: str, keys: Path, prompt: str) -> None:
        self.tally = Tally()
        self._instance = instance
        self._signer = GrantSigner.load(keys, "bench")
        self._prompt = prompt
        self._due: list[tuple[int, float]] = []  # slots to start, and from when on
        self._attempts: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._streams = 0
        self._tokens = 0
        self._sequence = 0
        self._measuring = False
        self._stopping = False
        self._ended = asyncio.Event()

    async def run(
        self, target: str, *, streams: int, tokens: int, warmup_s: float, seconds: float
    ) -> None:
        """Runs warm-up and measurement, then lets the open slots end."""
        self._streams, self._tokens = streams, tokens
        now = time.monotonic()
        self._due = [(slot, now) for slot in range(streams)]
        async with open_channel(target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            connection = client_connection(stub.GenerateFrames())
            writer = FrameWriter(connection, self._compose, heartbeat_s=0.1)
            async with asyncio.TaskGroup() as group:
                group.create_task(writer.run())
                group.create_task(self._measure(writer, warmup_s, seconds))
                async for frame in read_frames(connection):
                    self._read(frame)
                    writer.wake()

    async def _measure(
        self,
        writer: FrameWriter[inference_pb2.GenerateFramesRequest],
        warmup_s: float,
        seconds: float,
    ) -> None:
        await asyncio.sleep(warmup_s)
        print(json.dumps({"measuring": True}), flush=True)
        began = time.monotonic()
        self._measuring = True
        await asyncio.sleep(seconds)
        self._measuring = False
        self.tally.seconds = time.monotonic() - began
        print(json.dumps({"measuring": False}), flush=True)
        self._stopping = True
        self._note_end()
        await self._ended.wait()
        writer.close()

    def _compose(self, heartbeat: bool) -> inference_pb2.GenerateFramesRequest | None:
        now = time.monotonic()
        ready = [] if self._stopping else [slot for slot, at in self._due if at <= now]
        if not ready and not heartbeat:
            return None
        self._due = [entry for entry in self._due if entry[0] not in ready]
        self._sequence += 1
        frame = inference_pb2.GenerateFramesRequest(sequence=self._sequence)
        frame.demand.sequences = self._streams
        frame.demand.kv_tokens = self._streams * (self._tokens + 128)
        for slot in ready:
            self._start(frame, slot)
        return frame

    def _start(self, frame: inference_pb2.GenerateFramesRequest, slot: int) -> None:
        attempt = self._sequence
        self._attempts[slot] = attempt
        self._began[slot] = time.monotonic()
        start = frame.starts.add(slot=slot, attempt=attempt)
        start.work.request_id = f"bench-{slot}-{attempt}"
        start.work.input.conversation.messages.add(role="user", content=f"{self._prompt} {slot}")
        start.work.sampling.max_tokens = self._tokens
        start.work.sampling.ignore_eos = True
        start.remaining.seconds = DEADLINE_S
        start.grant.CopyFrom(
            self._signer.sign(start.work.request_id, self._instance, now_unix_s=time.time())
        )

    def _read(self, frame: inference_pb2.GenerateFramesResponse) -> None:
        for delta in inference_pb2.DeltaBatch.FromString(frame.deltas).deltas:
            if self._measuring:
                self.tally.tokens += len(delta.token_ids)
                self.tally.messages += 1
                if delta.position == 0 and (began := self._began.pop(delta.slot, None)):
                    self.tally.ttft_ms.append((time.monotonic() - began) * 1000)
        for event in frame.events:
            if event.HasField("ended"):
                self._attempts.pop(event.slot, None)
                self._note_end()
                self._due.append((event.slot, 0.0))
                self.tally.requests += self._measuring
            elif event.HasField("rejected"):
                # Before the credit has grown to the demand; the slot comes back in a moment.
                self._attempts.pop(event.slot, None)
                self._note_end()
                self._due.append((event.slot, time.monotonic() + 0.1))
                self.tally.errors += self._measuring

    def _note_end(self) -> None:
        if self._stopping and not self._attempts:
            self._ended.set()
