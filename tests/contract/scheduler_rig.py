"""A scheduler's public service over gRPC, with a scripted state service and agent path behind it.

What serves generations is left out: runs, sessions and documents do not need it, but for the direct
answer of a task, which :class:`Answers` stands in for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from scheduler_svc.adapters.agent_path import AgentPath
from scheduler_svc.adapters.documents_api import DocumentsApi
from scheduler_svc.adapters.identity import Identity
from scheduler_svc.adapters.joined import joined
from scheduler_svc.adapters.run_store import RunStore
from scheduler_svc.adapters.run_watch import RunWatches
from scheduler_svc.adapters.runs_api import RunParts, RunsApi
from scheduler_svc.adapters.sessions_api import SessionsApi
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.domain.agent_gate import AgentGate, AgentLimits, FleetLoad
from scheduler_svc.domain.run_budget import RunLimits
from sluice.agent.v1 import tools_pb2
from sluice.channels import open_channel
from sluice.deadline import MethodDeadline
from sluice.errors import SluiceError, not_found, unauthenticated, unavailable
from sluice.grants import GrantSigner, ensure_keys
from sluice.run_credentials import CredentialSigner
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2, scheduler_pb2_grpc
from sluice.server import Health, MeshServer
from sluice.state.v1 import (
    documents_pb2_grpc,
    runs_pb2_grpc,
    sessions_pb2_grpc,
    values_pb2_grpc,
)
from sluice.status import from_rpc_error
from state_svc.adapters.documents_servicer import DocumentServicer
from state_svc.adapters.matrix_index import IndexLimits, MatrixIndex
from state_svc.adapters.memory_documents import MemoryDocuments
from state_svc.adapters.memory_runs import MemorySessions, MemoryTenants
from state_svc.adapters.memory_values import MemoryBlobs
from state_svc.adapters.session_servicer import SessionServicer
from state_svc.adapters.values_servicers import BlobServicer
from state_svc.document_ports import DocumentLimits
from tests.contract.fake_state import FakeRuns

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
MOST = RunLimits(50, 1000, 10, 600.0, 5.0)
LIMITS = AgentLimits(runs_max=3)
VECTORS = {"cats": (1.0, 0.0, 0.0), "dogs": (0.0, 1.0, 0.0)}


@dataclass
class Answers:
    """Stands in for what serves generations; keeps refusals."""

    refusals: list[tuple[SluiceError, str]] = field(default_factory=list)
    refused_ids: list[str] = field(default_factory=list)
    direct: list[tuple[Any, str]] = field(default_factory=list)
    embedded: list[tuple[Any, Any]] = field(default_factory=list)
    fails: SluiceError | None = None

    def refused(self, caller: Any, ticket: Any, refusal: SluiceError, reason: str = "") -> None:
        self.refusals.append((refusal, reason))
        self.refused_ids.append(caller.request_id if caller is not None else "")

    async def embed(self, request: Any, caller: Any) -> generate_pb2.EmbedResponse:
        self.embedded.append((request, caller))
        if self.fails is not None:
            raise self.fails
        values = VECTORS.get(request.texts[0], (0.0, 0.0, 1.0))
        return generate_pb2.EmbedResponse(embeddings=[generate_pb2.Embedding(values=values)])

    async def stream(
        self, request: Any, caller: Any, context: Any, told: Any, gate_reason: str = ""
    ) -> None:
        self.direct.append((request, gate_reason))
        finished = generate_pb2.GenerateFinished(request_id=caller.request_id)
        for message in (
            generate_pb2.GenerateResponse(started=generate_pb2.GenerateStarted()),
            generate_pb2.GenerateResponse(delta=generate_pb2.GenerateDelta(text="direct")),
            generate_pb2.GenerateResponse(finished=finished),
        ):
            for written in told(message):
                await context.write(written)


class Link:
    """Stands in for the way to agent services."""

    def __init__(self) -> None:
        self.available = True
        self.seen = False
        self.nudged: list[tuple[str, str]] = []
        self.known: list[tools_pb2.ToolState] = []

    def nudge(self, tenant: str, run_id: str) -> None:
        self.nudged.append((tenant, run_id))

    async def tools(self, tenant: str) -> list[tools_pb2.ToolState]:
        if not self.available:
            raise unavailable("AGENT_UNREACHABLE", "none", 1.0)
        return self.known


class Names:
    """Tenants by their keys, which are their names."""

    def __init__(self) -> None:
        self.known = {
            "a": Tenant("a", agents=True, tools=frozenset(("search", "desk", "crm"))),
            "b": Tenant("b", agents=True),
            "tools": Tenant("tools", tools=frozenset(("crm", "desk", "search__web"))),
            "plain": Tenant("plain"),
            "none": Tenant("none", agents=True, concurrent_runs=0, sessions=False),
        }

    def tenant(self, authorization: str | None) -> Tenant:
        tenant = self.known.get((authorization or "").removeprefix("Bearer "))
        if tenant is None:
            raise unauthenticated("KEY_UNKNOWN", "the key is not known")
        return tenant

    def change(self, name: str, **values: Any) -> None:
        """Changes a tenant."""
        self.known[name] = replace(self.known[name], **values)


class Models:
    """Stands in for the catalog."""

    def resolve(self, name: str, tenant: Tenant, *, embeds: bool = False) -> str:
        if name not in ("", "m", "alias"):
            raise not_found("MODEL_UNKNOWN", "no such model for this tenant")
        if embeds and not tenant.may_use("e"):
            raise not_found("MODEL_UNKNOWN", "no such model for this tenant", field="model")
        return "e" if embeds else "m"

    def default_embedding(self, tenant: Tenant) -> str:
        return "e"

    def context_tokens(self, model: str) -> int:
        return 4096


@dataclass
class Rig:
    """The scheduler under test and what is scripted behind it."""

    runs: FakeRuns
    answers: Answers
    link: Link
    names: Names
    watches: RunWatches
    signer: CredentialSigner
    stub: Any
    state: grpc.aio.Channel
    load: FleetLoad = field(default_factory=lambda: FleetLoad(0.0, 0.0))
    state_up: bool = True
    limits: list[str] = field(default_factory=list)
    headers: tuple[tuple[str, str], ...] = ()

    def ask(self, method: str, request: Any, tenant: str = "a", timeout: float = 10.0) -> Any:
        """A call by a tenant."""
        metadata = (("authorization", f"Bearer {tenant}"), *self.headers)
        return getattr(self.stub, method)(request, metadata=metadata, timeout=timeout)

    async def events(self, method: str, request: Any, tenant: str = "a") -> list[Any]:
        """All events of a call that streams them."""
        return [message.event async for message in self.ask(method, request, tenant)]

    async def refused(
        self, method: str, request: Any, tenant: str = "a", timeout: float = 10.0
    ) -> SluiceError:
        """The error of a call that fails."""
        call = self.ask(method, request, tenant, timeout)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (read_all(call) if hasattr(call, "read") else call)
        return from_rpc_error(caught.value)


@asynccontextmanager
async def scheduler_rig(
    folder: Any, write_limit_s: float = 5.0, watch_bytes_max: int = 32 << 20
) -> AsyncIterator[Rig]:
    """A scheduler for the time of the block."""
    ensure_keys(folder)
    signer = CredentialSigner(GrantSigner.load(folder, "scheduler-1"))
    runs = FakeRuns()  # type: ignore[abstract]  # what agents call is not needed
    state = MeshServer("state", ["127.0.0.1:0"], Health())
    runs_pb2_grpc.add_RunServiceServicer_to_server(runs, state.grpc)
    documents = MemoryDocuments(DocumentLimits())
    index = MatrixIndex(documents, IndexLimits())
    sessions_pb2_grpc.add_SessionServiceServicer_to_server(
        SessionServicer(MemorySessions(MemoryTenants())), state.grpc
    )
    documents_pb2_grpc.add_DocumentServiceServicer_to_server(
        DocumentServicer(documents, index, 5.0), state.grpc
    )
    values_pb2_grpc.add_BlobServiceServicer_to_server(BlobServicer(MemoryBlobs()), state.grpc)
    await state.start()
    channel = open_channel(f"127.0.0.1:{state.ports[0]}")
    answers, link, names = Answers(), Link(), Names()
    watches = RunWatches(
        channel, write_limit_s=write_limit_s, watches_max=8, bytes_max=watch_bytes_max
    )
    rig = Rig(runs, answers, link, names, watches, signer, None, channel)
    serving = cast("Any", answers)
    parts = RunParts(
        serving=serving,
        identity=Identity(cast("Any", names), serving),
        catalog=cast("Any", Models()),
        gate=cast("Any", SimpleNamespace(domain=SimpleNamespace(load_of=lambda _: rig.load))),
        agents=AgentPath(AgentGate(LIMITS), MOST),
        link=cast("Any", link),
        store=RunStore(channel, signer),
        watches=watches,
        state_up=lambda: rig.state_up,
        count_limit=lambda error: rig.limits.append(error.reason),
    )
    long = MethodDeadline(60.0, 60.0)
    deadlines = {f"/{SERVICE}/{method}": long for method in ("RunAgent", "WatchRun")}
    public = MeshServer("scheduler", ["127.0.0.1:0"], Health(), deadlines=deadlines)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
        joined(
            RunsApi(parts),  # type: ignore[abstract]
            SessionsApi(parts.identity, channel),  # type: ignore[abstract]
            DocumentsApi(parts, parts.identity, channel),  # type: ignore[abstract]
        ),
        public.grpc,
    )
    await public.start()
    client = open_channel(f"127.0.0.1:{public.ports[0]}")
    rig.stub = scheduler_pb2_grpc.SchedulerServiceStub(client)
    # A first attempt to connect has 0.1 s; on a busy machine that may be too little.
    await asyncio.gather(channel.channel_ready(), client.channel_ready())
    try:
        yield rig
    finally:
        await client.close()
        await public.stop(0)
        await channel.close()
        await state.stop(0)
        await index.close()


async def read_all(call: Any) -> list[Any]:
    """The events that are left in a stream."""
    events = []
    while (message := await call.read()) is not grpc.aio.EOF:
        events.append(message.event)
    return events


async def until(condition: Any, what: str, limit_s: float = 5.0) -> None:
    """Waits for a condition over servers of this process."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while not condition():
        assert loop.time() < end_s, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.005)


@contextmanager
def away(runs: FakeRuns) -> Iterator[None]:
    """The store does not answer for the time of the block."""
    runs.away = True
    runs.cut_watches()
    try:
        yield
    finally:
        runs.away = False
