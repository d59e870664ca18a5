"""One plain ``Generate`` call: one generation as a server stream, for grpcurl, tests and single
callers.

Owns the call's share of the room and its engine request. Concurrency: the engine's callbacks fill a
list, the handler empties it; several deltas that came while a message was being written leave one
by one. Whatever ends the call (its end, a cancel, the deadline) aborts the engine at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from inference_svc.adapters.convert import to_spec
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.results import to_ended, write_delta
from inference_svc.adapters.room import PlainShare
from inference_svc.ports import FinishReason, GenerationEnd, RunningRequest, TokenLogprob
from sluice import deadline
from sluice.errors import exhausted, unavailable
from sluice.inference.v1 import inference_pb2

# A caller that does not read: its generation is aborted when so many messages wait.
MESSAGES_PENDING_MAX = 65_536


class _CallSink:
    """Collects what the engine yields."""

    def __init__(self) -> None:
        self.pending: deque[inference_pb2.Delta] = deque()
        self.end: GenerationEnd | None = None
        self.first_at: float | None = None
        self.wake = asyncio.Event()

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        if self.first_at is None:
            self.first_at = asyncio.get_running_loop().time()
        entry = inference_pb2.Delta()
        write_delta(entry, index, text, token_ids, position, logprobs)
        self.pending.append(entry)
        self.wake.set()

    def ended(self, end: GenerationEnd) -> None:
        self.end = end
        self.wake.set()


async def generate(
    instance: Instance, share: PlainShare, request: inference_pb2.GenerateRequest
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """The messages of one generation. Raises typed errors before ``accepted`` only."""
    work = request.work
    instance.verify(request.grant, work.request_id)
    if instance.host.draining:
        raise unavailable("DRAINING", "This instance starts nothing more.")
    engine = instance.host.generator()
    spec = to_spec(work, instance.host.served_names)
    loop = asyncio.get_running_loop()
    sink = _CallSink()
    running: RunningRequest | None = None
    timer: asyncio.TimerHandle | None = None
    kv_tokens = 0
    share.enter()
    try:
        prepared = await engine.prepare(spec)
        share.hold(len(prepared.prompt_token_ids))
        kv_tokens = len(prepared.prompt_token_ids)
        accepted_at = loop.time()
        running = engine.submit(prepared, sink)
        limit = deadline.current()
        if limit is not None:
            timer = loop.call_at(limit.at, running.abort, FinishReason.DEADLINE)
        response = inference_pb2.GenerateResponse(sequence=1)
        response.accepted.prompt_tokens = len(prepared.prompt_token_ids)
        response.accepted.simulated = instance.host.simulated
        yield response
        sequence = 1
        while sink.end is None or sink.pending:
            if not sink.pending:
                sink.wake.clear()
                await sink.wake.wait()
                continue
            if len(sink.pending) > MESSAGES_PENDING_MAX:
                raise exhausted("SLOW_CONSUMER", "The caller does not read.", 1.0)
            sequence += 1
            yield inference_pb2.GenerateResponse(sequence=sequence, delta=sink.pending.popleft())
        ended = to_ended(
            sink.end,
            request_id=spec.request_id,
            simulated=instance.host.simulated,
            first_token_s=None if sink.first_at is None else sink.first_at - accepted_at,
            total_s=loop.time() - accepted_at,
        )
        yield inference_pb2.GenerateResponse(sequence=sequence + 1, ended=ended)
    finally:
        if timer is not None:
            timer.cancel()
        if running is not None and sink.end is None:
            running.abort(FinishReason.CANCELLED)
        share.exit(kv_tokens)
