"""A gate before real instances, all in memory: with simulated engines in virtual time.

What stands between is as thin as can be: each instance's frames are passed on as they are, except
where a test cuts a stream in two."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.frame_stream import FrameStream
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.room import RoomKeeper
from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.faults import Fault
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import Engine
from scheduler_svc.adapters.execution_link import ExecuteConnection, ExecutionLink
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.translate import obstacle_of
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.limits import BreakerLimits, PoisonLimits, RetryLimits, SchedulerLimits
from scheduler_svc.domain.model import (
    InstanceName,
    InstanceReport,
    Outcome,
    PriorityClass,
    Ticket,
    TicketId,
)
from scheduler_svc.domain.placement import LeastWork
from scheduler_svc.domain.scheduler import Scheduler
from sluice.common.v1 import sampling_pb2
from sluice.errors import SluiceError
from sluice.execution.v1 import execution_pb2
from sluice.frames import FrameBroken, FrameConnection
from sluice.frames_memory import MemoryConnection, memory_pair
from sluice.grants import GrantSigner, ensure_keys
from sluice.inference.v1 import inference_pb2
from sluice.telemetry import Telemetry

PROFILE = SimulatedProfile(
    model="m",
    decode_step_ms=10.0,
    decode_step_ms_per_sequence=0.0,
    prefill_tokens_per_s=1_000_000.0,
    sequences_max=4,
    context_tokens=512,
    kv_tokens=2048,
    step_tokens_max=512,
)
REPORT_S = 0.25

ServerSide = FrameConnection[
    execution_pb2.ExecuteFramesResponse, execution_pb2.ExecuteFramesRequest
]


class MemoryInstance:
    """One instance: the inference service's own parts, without a server."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.host = EngineHost(lambda: engine)
        self.room = RoomKeeper(self.host.capacity)
        self.instance = Instance(name, self.host, self.room, None, Telemetry.off())
        self.up = True
        self.closed_to_new = False

    def report(self, gate: Gate) -> None:
        """What the load watch would say."""
        model = self.engine.describe()
        stats = self.engine.stats()
        gate.lanes.report(
            InstanceReport(
                name=InstanceName(self.name),
                model=model.model,
                fingerprint=model.fingerprint,
                serving=self.up,
                draining=self.closed_to_new,
                sequences_max=model.sequences_max,
                kv_tokens=model.kv_tokens,
                context_tokens=model.context_tokens,
                step_tokens_max=model.step_tokens_max,
                kv_block_tokens=model.kv_block_tokens,
                generates=True,
                embeds=False,
                simulated=True,
                running=stats.running,
                waiting=stats.waiting,
                kv_tokens_used=stats.kv_tokens_used,
                step_ms=stats.step_ms,
                epoch=str(self.host.epoch),
            ),
            f"{self.name}:1",
        )


class MemoryStream:
    """A frame stream to an instance."""

    def __init__(self, instance: MemoryInstance) -> None:
        server: MemoryConnection[
            inference_pb2.GenerateFramesResponse, inference_pb2.GenerateFramesRequest
        ]
        self._client: MemoryConnection[
            inference_pb2.GenerateFramesRequest, inference_pb2.GenerateFramesResponse
        ]
        self._client, server = memory_pair()
        self._sequence = 0
        self._serving = asyncio.create_task(self._serve(FrameStream(server, instance.instance)))
        self._beating = asyncio.create_task(self._beat())

    @staticmethod
    async def _serve(stream: FrameStream) -> None:
        try:
            await stream.run()
        except* (SluiceError, FrameBroken):
            pass

    async def _beat(self) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                await self.send(inference_pb2.GenerateFramesRequest())
        except FrameBroken:
            pass

    async def send(self, frame: inference_pb2.GenerateFramesRequest) -> None:
        self._sequence += 1
        frame.sequence = self._sequence
        await self._client.write(frame)

    async def read(self) -> inference_pb2.GenerateFramesResponse | None:
        return await self._client.read()

    def cut(self) -> None:
        """As when the process is killed: all that ran on it is gone."""
        self._client.cancel()
        self._beating.cancel()


class MemoryExecution:
    """The relay. ``cut`` is asked before each delta is passed on whether the stream breaks first;
    ``passed`` hears of each that was."""

    def __init__(self, instances: dict[str, MemoryInstance]) -> None:
        self.instances = instances
        self.cut: Callable[[inference_pb2.Delta], bool] = lambda delta: False
        self.passed: Callable[[str, inference_pb2.Delta], None] = lambda name, delta: None
        self.starts: list[tuple[str, inference_pb2.Start]] = []
        self._open: dict[str, tuple[MemoryStream, asyncio.Task[None]]] = {}
        self._server: ServerSide | None = None
        self._sequence = 0
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self) -> ExecuteConnection:
        """What the link calls."""
        client: ExecuteConnection
        server: ServerSide
        client, server = memory_pair()
        self._server, self._sequence = server, 0
        self._tasks = [
            asyncio.create_task(self._serve(server)),
            asyncio.create_task(self._beat(server)),
        ]
        return client

    async def _serve(self, server: ServerSide) -> None:
        await self._send(execution_pb2.ExecuteFramesResponse())
        try:
            while (frame := await server.read()) is not None:
                for part in frame.parts:
                    name = part.instance.name
                    if name not in self._open:
                        stream = MemoryStream(self.instances[name])
                        passing = asyncio.create_task(self._pass_on(name, stream))
                        self._open[name] = stream, passing
                    self.starts += [(name, start) for start in part.frame.starts]
                    await self._open[name][0].send(part.frame)
        except FrameBroken:
            pass

    async def _beat(self, server: ServerSide) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                await self._send(execution_pb2.ExecuteFramesResponse())
        except FrameBroken:
            pass

    async def _send(self, response: execution_pb2.ExecuteFramesResponse) -> None:
        self._sequence += 1
        response.sequence = self._sequence
        assert self._server is not None
        await self._server.write(response)

    async def _pass_on(self, name: str, stream: MemoryStream) -> None:
        """An instance's frames, to the scheduler."""
        while True:
            try:
                frame = await stream.read()
            except FrameBroken:
                return
            if frame is None:
                return
            batch = inference_pb2.DeltaBatch.FromString(frame.deltas)
            whole = inference_pb2.DeltaBatch()
            for delta in batch.deltas:
                if self.cut(delta):
                    frame.deltas = whole.SerializeToString()
                    del frame.events[:]
                    await self._send_frame(name, frame)
                    await self.lose(name)
                    return
                whole.deltas.append(delta)
                self.passed(name, delta)
            if any(event.HasField("ended") for event in frame.events) and self.cut(END):
                del frame.events[:]
                await self._send_frame(name, frame)
                await self.lose(name)
                return
            await self._send_frame(name, frame)

    async def _send_frame(self, name: str, frame: inference_pb2.GenerateFramesResponse) -> None:
        response = execution_pb2.ExecuteFramesResponse()
        response.parts.add(instance=name, frame=frame)
        await self._send(response)

    async def lose(self, name: str) -> None:
        """The stream to an instance broke."""
        self._open.pop(name)[0].cut()
        response = execution_pb2.ExecuteFramesResponse()
        response.parts.add(instance=name).lost.reason = execution_pb2.LOSS_REASON_DISCONNECTED
        await self._send(response)

    def stop(self) -> None:
        for stream, passing in self._open.values():
            passing.cancel()
            stream.cut()
        for task in self._tasks:
            task.cancel()


END = inference_pb2.Delta(position=2**32 - 1)
"""What ``cut`` is asked about where all output has passed and the end has not."""


class MemoryMesh:
    """Everything, and what tests ask of it."""

    def __init__(
        self, gate: Gate, execution: MemoryExecution, simulated: list[SimulatedEngine]
    ) -> None:
        self.gate = gate
        self.simulated = simulated
        self.beside: list[MemoryMesh] = []
        self.execution = execution
        self.instances = execution.instances
        self.model = next(iter(self.instances.values())).engine.describe().model
        self._ids = itertools.count(1)

    def rule(self, fault: Fault) -> None:
        """Scripts the same on every simulated engine."""
        for engine in self.simulated:
            engine.faults.add(fault)

    def submit(
        self,
        prompt: str,
        sampling: sampling_pb2.SamplingParams,
        *,
        priority_class: PriorityClass = PriorityClass.STANDARD,
        output_tokens: int = 20,
        inter_token_limit_s: float = 5.0,
    ) -> LiveRequest:
        """Admits a request."""
        loop = asyncio.get_running_loop()
        number = next(self._ids)
        if not sampling.HasField("n"):
            sampling.n = 1
        ticket = Ticket(
            id=TicketId(number),
            request_id=f"r{number}",
            tenant="dev",
            model=self.model,
            priority_class=priority_class,
            arrival_s=loop.time(),
            deadline_s=loop.time() + 600.0,
            first_token_limit_s=loop.time() + 60.0,
            prompt_tokens=len(prompt),
            output_tokens=output_tokens,
            size_bytes=len(prompt),
            continuable=obstacle_of(sampling) is None,
        )
        work = inference_pb2.Work(request_id=ticket.request_id, model=self.model, sampling=sampling)
        work.input.text = prompt
        live = LiveRequest(
            ticket,
            work,
            self.gate.flush,
            loop=loop,
            whole=True,
            want_token_ids=True,
            inter_token_limit_s=inter_token_limit_s,
        )
        self.gate.admit(live)
        return live

    def drain(self, name: str, drain: bool) -> None:
        """What an operator does."""
        self.gate.post(lambda now: self.gate.domain.instances.drain(InstanceName(name), drain, now))

    async def over(self, live: LiveRequest) -> LiveRequest:
        """Waits for its end and lets it go."""
        await live.finished()
        self.gate.leave(live, live.outcome or Outcome.FINISHED)
        return live

    async def idle(self) -> None:
        """Asserts that nothing is left anywhere."""
        await asyncio.sleep(0.5)
        self.gate.domain.check_invariants()
        snapshot = self.gate.domain.snapshot()
        assert not self.gate.lives
        assert snapshot.running == 0
        assert sum(snapshot.waiting.values()) == 0
        assert snapshot.submitted == sum(snapshot.outcomes.values())
        for status in snapshot.instances.values():
            assert status.running == status.kv_tokens == status.prefill_tokens == 0
        assert all(link.open_slots() == 0 for link in self.gate.lanes.links)
        assert all(one.room.sequences_held() == 0 for one in self.instances.values())
        assert all(engine.counters().running == 0 for engine in self.simulated)


@dataclass
class Answer:
    """All that a client could see."""

    text: str
    token_ids: list[int]
    finish: bytes
    usage: tuple[int, int]

    @staticmethod
    def of(live: LiveRequest) -> Answer:
        assert live.error is None, live.error
        assert live.ended is not None
        usage = live.usage()
        (output,) = live.outputs
        (end,) = live.ended.outputs
        assert usage.completion_tokens == len(output.token_ids) == live.tokens
        return Answer(
            "".join(output.parts),
            list(output.token_ids),
            end.SerializeToString(deterministic=True),
            (usage.prompt_tokens, usage.completion_tokens),
        )


class Cuts:
    """Breaks the stream after each of so many tokens of the output, each time once; one beyond the
    last is the end itself."""

    def __init__(self, *after: int, passed: int = 0) -> None:
        self.left = sorted(after)
        self.passed = passed

    def __call__(self, delta: inference_pb2.Delta) -> bool:
        if delta is not END and delta.position != self.passed and delta.token_ids:
            raise AssertionError("output that was cut off comes again, or is missing")
        if self.left and (delta is END or self.left[0] <= self.passed):
            self.left.pop(0)
            return True
        self.passed += len(delta.token_ids)
        return False


@asynccontextmanager
async def memory_mesh(
    folder: Path,
    *names: str,
    profile: SimulatedProfile = PROFILE,
    others: Mapping[str, SimulatedProfile] | None = None,
    engines: Mapping[str, Engine] | None = None,
    schedulers: int = 1,
    limits: Mapping[str, object] | None = None,
) -> AsyncIterator[MemoryMesh]:
    """A gate and instances of one model; ``others`` have profiles of their own, ``engines`` are
    given; of several ``schedulers`` the others are ``beside``. Nothing may be left when it is
    over."""
    ensure_keys(folder)
    # Tests break streams more often than a breaker, a budget or a quarantine would bear.
    patient = BreakerLimits(faults_max=1_000_000, volume_min=1_000_000)
    base = SchedulerLimits(
        instances_max=8,
        breaker=patient,
        retry=RetryLimits(budget_max=1e6),
        poison=PoisonLimits(instances_max=1_000_000, deaths_max=1_000_000),
    )
    bounds = replace(base, **(limits or {}))  # type: ignore[arg-type]
    profiles = {**dict.fromkeys(names, profile), **(others or {})}
    made = {name: SimulatedEngine(one) for name, one in profiles.items()}
    instances = {
        name: MemoryInstance(name, one) for name, one in {**made, **(engines or {})}.items()
    }
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.host.run()) for one in instances.values()]
        await asyncio.sleep(0.1)
        meshes = []
        for _ in range(schedulers):
            signer = GrantSigner.load(folder, "test")
            gate = Gate(Scheduler(bounds, LeastWork()), signer, FlushBudget())
            execution = MemoryExecution(instances)
            gate.lanes.links = [ExecutionLink("execution-0", execution.connect, gate.lanes)]
            tasks += [group.create_task(gate.run()), group.create_task(gate.lanes.links[0].run())]
            tasks.append(group.create_task(_watch(gate, instances)))
            meshes.append(MemoryMesh(gate, execution, list(made.values())))
        await asyncio.sleep(0.1)
        meshes[0].beside = meshes[1:]
        yield meshes[0]
        for mesh in meshes:
            await mesh.idle()
        for task in tasks:
            task.cancel()
        for mesh in meshes:
            mesh.execution.stop()
    for one in instances.values():
        await one.host.close()


async def _watch(gate: Gate, instances: Mapping[str, MemoryInstance]) -> None:
    while True:
        for one in instances.values():
            one.report(gate)
        await asyncio.sleep(REPORT_S)
