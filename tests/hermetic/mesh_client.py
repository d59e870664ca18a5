"""A client of a mesh: one call becomes one `Answer`, whatever its end.

For tests that look at messages one by one there is `MeshClient.stub`. Everything is for one event
loop; a client belongs to the test that made it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx

from sluice.channels import ending, open_channel
from sluice.errors import SluiceError
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh

CALL_LIMIT_S = 30.0
CONNECT_LIMIT_S = 2.0

_ids = itertools.count(1)


@dataclass
class Answer:
    """All that came of one streamed call."""

    messages: list[generate_pb2.GenerateResponse] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """time.monotonic() of each message."""
    error: SluiceError | None = None
    trailers: dict[str, str | bytes] = field(default_factory=dict)

    def check(self) -> Answer:
        """The contract of every stream, however it ended: no gap in the sequence, `started` first,
        nothing after `finished`, positions that join. Returns itself."""
        kinds = [message.WhichOneof("event") for message in self.messages]
        sequence = [message.sequence for message in self.messages]
        assert sequence == list(range(1, len(sequence) + 1)), sequence
        assert kinds[:1] in ([], ["started"]), kinds
        assert kinds.count("started") <= 1
        assert "finished" not in kinds[:-1], kinds
        assert (kinds[-1:] == ["finished"]) == (self.error is None), (kinds, self.error)
        told: dict[int, int] = {}
        for message in self.messages:
            if message.HasField("delta") and message.delta.token_ids:
                delta = message.delta
                assert delta.position == told.get(delta.index, 0), "a gap or a repetition"
                told[delta.index] = delta.position + len(delta.token_ids)
        return self

    @property
    def ok(self) -> Answer:
        """Itself, when it finished in order."""
        assert self.error is None, self.error
        return self.check()

    @property
    def refused(self) -> SluiceError:
        """The typed error with which it ended."""
        assert self.error is not None, self.finished
        self.check()
        return self.error

    @property
    def started(self) -> generate_pb2.GenerateStarted:
        """The first message."""
        return self.messages[0].started

    @property
    def finished(self) -> generate_pb2.GenerateFinished:
        """The last message."""
        return self.messages[-1].finished

    @property
    def deltas(self) -> list[generate_pb2.GenerateDelta]:
        """Output as it came."""
        return [message.delta for message in self.messages if message.HasField("delta")]

    def text(self, index: int = 0) -> str:
        """Joined text of an output."""
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        """Joined token ids of an output."""
        return [token for d in self.deltas if d.index == index for token in d.token_ids]


class MeshClient:
    """One tenant's client, at the edge or, with `target`, at a single process."""

    def __init__(self, mesh: Mesh, target: str = "", key: str = "") -> None:
        self.mesh = mesh
        self.metadata = (("authorization", f"Bearer {key or mesh.api_key}"),)
        self.channel = open_channel(target or mesh.target)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.http = httpx.AsyncClient(
            base_url=mesh.url,
            headers=dict(self.metadata),
            timeout=CALL_LIMIT_S,
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes its connections."""
        await self.channel.close()
        await self.http.aclose()

    def start(
        self, prompt: str = "Hello", *, timeout: float | None = CALL_LIMIT_S, **fields: Any
    ) -> grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]:
        """A Generate that was sent; reading it is the test's."""
        return self.stub.Generate(
            request(generate_pb2.GenerateRequest, prompt, fields),
            timeout=timeout,
            metadata=self.metadata,
        )

    async def generate(self, prompt: str = "Hello", **fields: Any) -> Answer:
        """A Generate, read to its end."""
        return await collect(self.start(prompt, **fields))

    async def text(
        self, prompt: str = "Hello", *, timeout: float | None = CALL_LIMIT_S, **fields: Any
    ) -> generate_pb2.GenerateTextResponse:
        """A GenerateText. Raises SluiceError."""
        try:
            return await self.stub.GenerateText(
                request(generate_pb2.GenerateTextRequest, prompt, fields),
                timeout=timeout,
                metadata=self.metadata,
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


def request(kind: Any, prompt: str, fields: dict[str, Any]) -> Any:
    """A request; `prompt` counts only where `fields` give no other input."""
    if not fields.keys() & {"messages", "text", "token_ids", "prompt"}:
        fields = {"prompt": prompt} | fields
    return kind(**fields)


async def collect(
    call: grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse],
    into: Answer | None = None,
) -> Answer:
    """Reads a call to its end."""
    answer = into or Answer()
    with ending(call):
        try:
            async for message in call:
                answer.messages.append(message)
                answer.times.append(time.monotonic())
        except grpc.aio.AioRpcError as error:
            answer.error = from_rpc_error(error)
            answer.trailers = dict(error.trailing_metadata() or ())
    return answer


async def connected(channel: grpc.aio.Channel) -> None:
    """Waits for a connection, unless there is nobody. An attempt to connect has 0.1 s at first,
    which may be too little on a busy machine, and a call that comes before would fail with it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CONNECT_LIMIT_S):
            await channel.channel_ready()


@asynccontextmanager
async def client_of(mesh: Mesh, target: str = "", key: str = "") -> AsyncIterator[MeshClient]:
    """A client for the time of the block."""
    client = MeshClient(mesh, target, key)
    await connected(client.channel)
    try:
        yield client
    finally:
        await client.close()


async def eventually(condition: Callable[[], Any], what: str, limit_s: float = 10.0) -> float:
    """Waits for a condition over processes without holding up the loop; the seconds it took."""
    begin = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - begin < limit_s, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - begin


def fresh_id(prefix: str = "test") -> str:
    """A request id that no other test of this run uses."""
    return f"{prefix}-{next(_ids)}"


def sim(prompt: str = "Hello", **fault: object) -> str:
    """A prompt that scripts the engine; see inference_svc/adapters/simulated/faults.py."""
    return f"{prompt} [[sim: {json.dumps(fault)}]]"
