"""A state service over Valkey in this process, for agent services in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from sluice.channels import open_channel
from sluice.common.v1 import input_pb2
from sluice.scheduler.v1 import runs_pb2 as public_pb2
from sluice.scheduler.v1 import spec_pb2
from sluice.server import Health, MeshServer
from sluice.state.v1 import (
    documents_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
)
from state_svc.config import StateConfig
from state_svc.main import Parts
from tests.valkey import PATIENT_S

TENANT = "t"


@dataclass
class Rig:
    """A state service; ``channel`` is a client's."""

    channel: grpc.aio.Channel
    runs: Any
    sessions: Any
    documents: Any

    def spec(self, *, turn: bool = False, **fields: Any) -> spec_pb2.RunSpec:
        """A task as a scheduler admits it; fields of RunAgentRequest."""
        request = public_pb2.RunAgentRequest(**{"task": "Do it.", "model": "m", **fields})
        spec = spec_pb2.RunSpec(task=spec_pb2.AgentTask(request=request, turn=turn))
        spec.budget.steps_max = 200
        spec.budget.tokens_max = 1_000_000
        spec.budget.tool_calls_max = 200
        spec.budget.wall_time_max.FromSeconds(600)
        spec.budget.cost_max = 1e9
        return spec

    async def create(self, *, session: str = "", **fields: Any) -> str:
        """Stores a task; its id."""
        turn = bool(session) and not fields.get("tools")
        return await self.create_spec(self.spec(turn=turn, **fields), session=session)

    async def create_spec(self, spec: spec_pb2.RunSpec, *, session: str = "") -> str:
        """Stores a run; its id."""
        run_id = str(uuid.uuid4())
        await self.runs.CreateRun(self.creation(run_id, spec, session=session))
        return run_id

    def creation(
        self, run_id: str, spec: spec_pb2.RunSpec, *, session: str = ""
    ) -> runs_pb2.CreateRunRequest:
        """What stores a run as a scheduler does."""
        queued = public_pb2.RunEvent(sequence=1, run_id=run_id)
        queued.queued.gate_reason = "ALLOWED"
        queued.time.GetCurrentTime()
        return runs_pb2.CreateRunRequest(
            tenant=TENANT,
            run_id=run_id,
            request_id=str(uuid.uuid4()),
            spec=spec.SerializeToString(),
            summary=public_pb2.Run().SerializeToString(),
            events=[queued.SerializeToString()],
            priority=3,
            active_max=1000,
            session_id=session,
        )

    async def session(self, *messages: tuple[str, str]) -> str:
        """Creates a session with messages."""
        chat = [input_pb2.ChatMessage(role=role, content=text) for role, text in messages]
        made = await self.sessions.CreateSession(
            sessions_pb2.CreateSessionRequest(
                tenant=TENANT,
                request_id=str(uuid.uuid4()),
                messages=[one.SerializeToString() for one in chat],
            )
        )
        return str(made.session.session_id)

    async def stored(self, run_id: str) -> runs_pb2.StoredRun:
        """A run as stored."""
        found = await self.runs.GetRun(runs_pb2.GetRunRequest(tenant=TENANT, run_id=run_id))
        run: runs_pb2.StoredRun = found.run
        return run

    async def events(self, run_id: str) -> list[public_pb2.RunEvent]:
        """The events of a run."""
        request = runs_pb2.ReadRunRequest(tenant=TENANT, run_id=run_id)
        page = await self.runs.ReadRun(request)
        return [public_pb2.RunEvent.FromString(one.event) for one in page.entries]

    async def until(self, run_id: str, *phases: int, limit_s: float = 20.0) -> runs_pb2.StoredRun:
        """Waits until a run is in one of these phases."""
        async with asyncio.timeout(limit_s):
            while (run := await self.stored(run_id)).phase not in phases:
                await asyncio.sleep(0.01)
        return run


@asynccontextmanager
async def state_service(url: str) -> AsyncIterator[Rig]:
    """Serves until the block ends."""
    health = Health()
    parts = Parts(StateConfig(durable_url=url, store_timeout_s=PATIENT_S), health)
    server = MeshServer("state", ["127.0.0.1:0"], health)
    parts.add_to(server)
    await server.start()
    running = asyncio.create_task(parts.run())
    channel = open_channel(f"127.0.0.1:{server.ports[0]}")
    try:
        async with asyncio.timeout(10):
            while not health.healthy:
                await asyncio.sleep(0.01)
            await channel.channel_ready()
        yield Rig(
            channel,
            runs_pb2_grpc.RunServiceStub(channel),
            sessions_pb2_grpc.SessionServiceStub(channel),
            documents_pb2_grpc.DocumentServiceStub(channel),
        )
    finally:
        await parts.drain()
        await channel.close()
        await server.stop(0.1)
        running.cancel()
        await asyncio.wait([running])
        await parts.close()
