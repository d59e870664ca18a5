"""Instances and an execution replica as real gRPC servers on loopback, in the test's own process.

Every server binds port 0. Engines are fakes unless a test brings another. :class:`SchedulerPeer`
speaks ``ExecuteFrames`` by hand, with one :class:`tests.frame_peer.Peer` per instance for what came
from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from execution_svc.adapters.agents import Agents
from execution_svc.adapters.counts import Counts
from execution_svc.adapters.instance_channels import GrpcInstances
from execution_svc.adapters.servicer import ExecutionServicer
from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.no_gpus import NoGpus
from inference_svc.adapters.room import RoomKeeper
from inference_svc.adapters.servicer import InferenceServicer
from inference_svc.ports import Engine
from sluice.channels import open_channel
from sluice.execution.v1 import execution_pb2, execution_pb2_grpc
from sluice.frames import FrameBroken
from sluice.frames_grpc import GrpcClientConnection, client_connection
from sluice.frames_memory import memory_unreachable
from sluice.grants import GrantVerifier
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from sluice.server import Health, MeshServer
from sluice.telemetry import Telemetry
from tests.fakes import FakeEngine
from tests.frame_peer import Peer

WAIT_S = 10.0


@dataclass
class InstanceServer:
    """One running instance."""

    name: str
    engine: Engine
    host: EngineHost
    servicer: InferenceServicer
    server: MeshServer
    keeper: asyncio.Task[None]
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.ports[0]}"

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    def open(self, *, heartbeats: bool = True) -> Peer:
        """A new frame stream to it."""
        call: Any = self.stub.GenerateFrames()
        return Peer(client_connection(call)).begin(heartbeats=heartbeats)

    async def kill(self) -> None:
        """It vanishes with all its connections."""
        await self.server.grpc.stop(0)

    async def close(self) -> None:
        self.servicer.stop()
        await self.channel.close()
        await self.server.stop(0)
        self.keeper.cancel()
        await asyncio.gather(self.keeper, return_exceptions=True)
        await self.host.close()


async def start_instance(
    name: str = "i0",
    engine: Engine | None = None,
    *,
    make: Callable[[], Engine] | None = None,
    verifier: GrantVerifier | None = None,
    telemetry: Telemetry | None = None,
    port: int = 0,
    wait: bool = True,
) -> InstanceServer:
    """An instance that serves, unless ``wait`` is off."""
    engine = engine or FakeEngine()
    host = EngineHost(make or (lambda: engine))
    instance = Instance(
        name, host, RoomKeeper(host.capacity), verifier, telemetry or Telemetry.off()
    )
    servicer = InferenceServicer(instance, NoGpus())
    server = MeshServer("inference", [f"127.0.0.1:{port}"], Health())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    up = asyncio.Event()
    host.watch(up.set)
    keeper = asyncio.create_task(host.run())
    if wait:
        await up.wait()
    channel = open_channel(f"127.0.0.1:{server.ports[0]}")
    await channel.channel_ready()
    return InstanceServer(name, engine, host, servicer, server, keeper, channel)


@asynccontextmanager
async def instance(
    name: str = "i0",
    engine: Engine | None = None,
    *,
    verifier: GrantVerifier | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[InstanceServer]:
    """An instance for the length of a test."""
    started = await start_instance(name, engine, verifier=verifier, telemetry=telemetry)
    try:
        yield started
    finally:
        await started.close()


@dataclass
class ExecutionServer:
    """One running execution replica."""

    servicer: ExecutionServicer
    instances: GrpcInstances
    server: MeshServer
    channel: grpc.aio.Channel
    counts: Counts

    @property
    def stub(self) -> execution_pb2_grpc.ExecutionServiceAsyncStub:
        return execution_pb2_grpc.ExecutionServiceStub(self.channel)

    def open(self, *, reading: bool = True) -> SchedulerPeer:
        """A new scheduler stream to it."""
        peer = SchedulerPeer(client_connection(self.stub.ExecuteFrames()))
        return peer.begin(reading=reading)


@asynccontextmanager
async def execution(telemetry: Telemetry | None = None) -> AsyncIterator[ExecutionServer]:
    """An execution replica for the length of a test."""
    instances = GrpcInstances()
    counts = Counts()
    agents = Agents((), Health().component("agents", optional=True))
    servicer = ExecutionServicer(instances, telemetry or Telemetry.off(), counts, agents)
    server = MeshServer("execution", ["127.0.0.1:0"], Health())
    execution_pb2_grpc.add_ExecutionServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.ports[0]}")
    await channel.channel_ready()
    try:
        yield ExecutionServer(servicer, instances, server, channel, counts)
    finally:
        await channel.close()
        await server.stop(0)
        await instances.close()


@dataclass
class SchedulerPeer:
    """A scheduler's end of ``ExecuteFrames``. ``of[name]`` is what came from an instance."""

    connection: GrpcClientConnection[
        execution_pb2.ExecuteFramesRequest, execution_pb2.ExecuteFramesResponse
    ]
    messages: list[execution_pb2.ExecuteFramesResponse] = field(default_factory=list)
    of: dict[str, Peer] = field(default_factory=dict)
    lost: list[tuple[str, execution_pb2.LossReason.ValueType]] = field(default_factory=list)
    broken: FrameBroken | None = None
    ended: bool = False
    sequence: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, *, reading: bool = True) -> SchedulerPeer:
        self._tasks.append(asyncio.create_task(self._beat()))
        if reading:
            self.read()
        return self

    def read(self) -> None:
        """Reads from now on."""
        self._tasks.append(asyncio.create_task(self._read()))

    async def stop(self) -> None:
        """Breaks the stream, if it is not over."""
        self.connection.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send(
        self,
        *parts: execution_pb2.InstanceRequest,
        draining: bool = False,
        sequence: int | None = None,
    ) -> None:
        self.sequence += 1
        await self.connection.write(
            execution_pb2.ExecuteFramesRequest(
                sequence=self.sequence if sequence is None else sequence,
                parts=parts,
                draining=draining,
            )
        )

    async def half_close(self) -> None:
        """Sends nothing more."""
        self._tasks[0].cancel()
        await self.connection.half_close()

    async def until(self, met: Callable[[], object], within_s: float = WAIT_S) -> None:
        async with asyncio.timeout(within_s):
            while not met():
                self._came.clear()
                await self._came.wait()

    def peer(self, name: str) -> Peer:
        """What came from an instance."""
        if name not in self.of:
            # A connection of its own it has not: what comes is put in here.
            self.of[name] = Peer(memory_unreachable())
        return self.of[name]

    async def _read(self) -> None:
        try:
            while (message := await self.connection.read()) is not None:
                self.messages.append(message)
                for part in message.parts:
                    if part.HasField("lost"):
                        self.lost.append((part.instance, part.lost.reason))
                    else:
                        self.peer(part.instance).take(part.frame)
                self._came.set()
            self.ended = True
        except FrameBroken as broken:
            self.broken = broken
        finally:
            self._came.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.send()
            except FrameBroken:
                return


def part(
    name: str,
    address: str,
    *starts: inference_pb2.Start,
    cancels: tuple[tuple[int, int], ...] = (),
    demand: tuple[int, int] | None = None,
    close: bool = False,
) -> execution_pb2.InstanceRequest:
    """What a scheduler sends to one instance."""
    request = execution_pb2.InstanceRequest(close=close)
    request.instance.name = name
    request.instance.address = address
    request.frame.starts.extend(starts)
    for slot, attempt in cancels:
        request.frame.cancels.add(slot=slot, attempt=attempt, reason="FINISH_REASON_CANCELLED")
    if demand is not None:
        request.frame.demand.sequences, request.frame.demand.kv_tokens = demand
    if not close:
        request.frame.SetInParent()
    return request
