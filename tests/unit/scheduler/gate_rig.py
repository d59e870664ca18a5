"""A gate with a scripted execution service, in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from scheduler_svc.adapters.execution_link import ExecuteConnection, ExecutionLink
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.quota_keeper import QuotaKeeper
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import (
    InstanceName,
    InstanceReport,
    PriorityClass,
    Ticket,
    TicketId,
)
from scheduler_svc.domain.placement import LeastWork
from scheduler_svc.domain.scheduler import Scheduler
from sluice.common.v1 import result_pb2
from sluice.execution.v1 import execution_pb2
from sluice.frames import FrameBroken, FrameConnection
from sluice.frames_memory import memory_pair
from sluice.grants import GrantSigner, ensure_keys
from sluice.inference.v1 import inference_pb2

ServerSide = FrameConnection[
    execution_pb2.ExecuteFramesResponse, execution_pb2.ExecuteFramesRequest
]


class ScriptedExecution:
    """Plays execution service and instances at once: records what it is sent and answers what the
    test says."""

    def __init__(self, sequences: int = 4) -> None:
        self.sequences = sequences
        self.epoch = 1
        self.starts: list[tuple[str, inference_pb2.Start]] = []
        self.cancels: list[tuple[str, inference_pb2.Cancel]] = []
        self.opened: list[str] = []
        self.refuse_connections = False
        self.draining = False
        self._ends = 0
        self._server: ServerSide | None = None
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(self) -> ExecuteConnection:
        """What the link calls."""
        client: ExecuteConnection
        server: ServerSide
        client, server = memory_pair()
        if self.refuse_connections:
            server.cancel()
            return client
        self._server = server
        self._sequence = 0
        task = asyncio.get_running_loop().create_task(self._serve(server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return client

    async def _serve(self, server: ServerSide) -> None:
        await self._send(server, execution_pb2.ExecuteFramesResponse())
        beat = asyncio.get_running_loop().create_task(self._beat(server))
        try:
            while (frame := await server.read()) is not None:
                for part in frame.parts:
                    await self._part(part)
            self._ends += 1
        except FrameBroken:
            pass
        finally:
            beat.cancel()

    async def _beat(self, server: ServerSide) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                await self._send(server, execution_pb2.ExecuteFramesResponse())
        except FrameBroken:
            pass

    async def _part(self, part: execution_pb2.InstanceRequest) -> None:
        name = part.instance.name
        if name not in self.opened:
            self.opened.append(name)
            frame = inference_pb2.GenerateFramesResponse(epoch=self.epoch)
            frame.credit.sequences = self.sequences
            frame.credit.kv_tokens = 100_000
            await self.send(name, frame)
        self.starts += [(name, start) for start in part.frame.starts]
        self.cancels += [(name, cancel) for cancel in part.frame.cancels]

    async def _send(
        self, server: ServerSide, response: execution_pb2.ExecuteFramesResponse
    ) -> None:
        self._sequence += 1
        response.sequence = self._sequence
        response.draining = self.draining
        await server.write(response)

    async def send(self, name: str, frame: inference_pb2.GenerateFramesResponse) -> None:
        """Sends an instance's frame."""
        frame.epoch = self.epoch
        response = execution_pb2.ExecuteFramesResponse()
        response.parts.add(instance=name, frame=frame)
        assert self._server is not None
        await self._send(self._server, response)

    async def lose(self, name: str) -> None:
        """Reports an instance as lost."""
        response = execution_pb2.ExecuteFramesResponse()
        part = response.parts.add(instance=name)
        part.lost.reason = execution_pb2.LOSS_REASON_DISCONNECTED
        self.opened.remove(name)
        assert self._server is not None
        await self._send(self._server, response)

    async def drain(self) -> None:
        """Says that it drains, and from then on with every frame."""
        self.draining = True
        assert self._server is not None
        await self._send(self._server, execution_pb2.ExecuteFramesResponse())

    def ends(self) -> int:
        """How often the scheduler half-closed a stream."""
        return self._ends

    def break_stream(self) -> None:
        """Breaks the whole stream, as a killed execution service does."""
        assert self._server is not None
        self.opened.clear()
        self._server.cancel()

    async def accept(self, number: int = -1) -> None:
        """Accepts a start."""
        name, start = self.starts[number]
        frame = inference_pb2.GenerateFramesResponse()
        event = frame.events.add(slot=start.slot, attempt=start.attempt)
        event.accepted.prompt_tokens = 3
        await self.send(name, frame)

    async def reject(self, reason: inference_pb2.RejectReason.ValueType, number: int = -1) -> None:
        """Rejects a start."""
        name, start = self.starts[number]
        frame = inference_pb2.GenerateFramesResponse()
        event = frame.events.add(slot=start.slot, attempt=start.attempt)
        event.rejected.reason = reason
        if reason == inference_pb2.REJECT_REASON_INVALID:
            event.rejected.status.code = 3
        await self.send(name, frame)

    async def delta(self, text: str, position: int, number: int = -1, tokens: int = 1) -> None:
        """Sends output of a start."""
        name, start = self.starts[number]
        batch = inference_pb2.DeltaBatch()
        batch.deltas.add(
            slot=start.slot,
            attempt=start.attempt,
            text=text,
            token_ids=range(tokens),
            position=position,
        )
        frame = inference_pb2.GenerateFramesResponse(deltas=batch.SerializeToString())
        await self.send(name, frame)

    async def end(
        self,
        number: int = -1,
        reason: result_pb2.FinishReason.ValueType = result_pb2.FINISH_REASON_STOP,
        code: int = 0,
    ) -> None:
        """Ends a start; with ``code`` as a failure."""
        name, start = self.starts[number]
        frame = inference_pb2.GenerateFramesResponse()
        event = frame.events.add(slot=start.slot, attempt=start.attempt)
        event.ended.outputs.add(finish_reason=reason)
        event.ended.usage.completion_tokens = 1
        if code:
            event.ended.status.code = code
        await self.send(name, frame)


class Rig:
    """A running gate, its execution services and what tests ask of them."""

    def __init__(self, gate: Gate, executions: list[ScriptedExecution]) -> None:
        self.gate = gate
        self.executions = executions
        self.execution = executions[0]
        self._ids: Iterator[int] = iter(range(1, 1_000_000))

    def report(self, name: str = "chat-0", **changes: object) -> None:
        """A load report of an instance."""
        fields: dict[str, object] = {
            "name": InstanceName(name),
            "model": "m",
            "fingerprint": "f",
            "serving": True,
            "draining": False,
            "sequences_max": 4,
            "kv_tokens": 100_000,
            "context_tokens": 4096,
            "step_tokens_max": 2048,
            "kv_block_tokens": 16,
            "generates": True,
            "embeds": False,
            "simulated": True,
            **changes,
        }
        self.gate.lanes.report(InstanceReport(**fields), f"{name}:1")  # type: ignore[arg-type]

    def submit(self, **changes: object) -> LiveRequest:
        """Admits a request."""
        live = self.prepare(**changes)
        self.gate.admit(live)
        return live

    def prepare(self, **changes: object) -> LiveRequest:
        """A request that is not admitted yet."""
        loop = asyncio.get_running_loop()
        number = next(self._ids)
        fields: dict[str, object] = {
            "id": TicketId(number),
            "request_id": f"r{number}",
            "tenant": "dev",
            "model": "m",
            "priority_class": PriorityClass.STANDARD,
            "arrival_s": loop.time(),
            "deadline_s": loop.time() + 60.0,
            "first_token_limit_s": loop.time() + 30.0,
            "prompt_tokens": 3,
            "output_tokens": 10,
            "size_bytes": 10,
            **changes,
        }
        ticket = Ticket(**fields)  # type: ignore[arg-type]
        work = inference_pb2.Work(request_id=ticket.request_id)
        return LiveRequest(ticket, work, self.gate.flush, loop=loop, inter_token_limit_s=5.0)

    async def settle(self) -> None:
        """Lets everything that is due now happen."""
        await asyncio.sleep(0.05)

    async def idle(self) -> None:
        """Asserts that nothing is left anywhere."""
        await asyncio.sleep(0.5)
        assert not self.gate.lives
        assert self.gate.flush.open_streams == 0
        assert self.gate.flush.written_streams == 0
        assert all(link.open_slots() == 0 for link in self.gate.lanes.links)
        snapshot = self.gate.domain.snapshot()
        assert snapshot.running == 0
        assert sum(snapshot.waiting.values()) == 0
        self.gate.domain.check_invariants()


@asynccontextmanager
async def rig(
    folder: Path, executions: int = 1, sequences: int = 4, quota: QuotaKeeper | None = None
) -> AsyncIterator[Rig]:
    """A gate with scripted execution services, connected."""
    ensure_keys(folder)
    domain = Scheduler(SchedulerLimits(), LeastWork())
    gate = Gate(domain, GrantSigner.load(folder, "test"), FlushBudget(), quota=quota)
    scripted = [ScriptedExecution(sequences) for _ in range(executions)]
    gate.lanes.links = [
        ExecutionLink(f"execution-{number}", one.connect, gate.lanes)
        for number, one in enumerate(scripted)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(gate.run())]
        tasks += [group.create_task(link.run()) for link in gate.lanes.links]
        await asyncio.sleep(0.1)
        yield Rig(gate, scripted)
        for task in tasks:
            task.cancel()
