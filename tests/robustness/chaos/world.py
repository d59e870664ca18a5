"""A mesh with two agent services, orders that are worked off in it, and direct requests beside
them; one process is killed at a random moment and started again, as a supervisor does.

One round: `ORDERS` orders arrive over `ARRIVAL_S`; the victim dies at a moment that the seed draws,
after so many requests of tools and a time; everybody asks again until it is acknowledged. A round
is over when every acknowledged run has ended. A run that waits in doubt is decided by what the
effects' server knows: made, or not made.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from sluice.common.v1 import sampling_pb2
from sluice.scheduler.v1 import generate_pb2, records_pb2, runs_pb2
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of
from tests.robustness.chaos.effects import KEY_HEADER, Effects, effects_server
from tests.robustness.chaos.oracle import judge
from tests.robustness.chaos.orders import Order

SERVICES: Mapping[str, str] = {
    "agent": "agent-0",
    "execution": "execution-0",
    "scheduler": "scheduler-0",
    "state": "state-0",
    "valkey": "valkey",
}
ORDERS = 6
ARRIVAL_S = 0.6
KILL_AFTER_REQUESTS = 12
KILL_WITHIN_S = 0.3
KILL_LATEST_S = 3.0
"""The victim dies within this time after so many requests of tools at most, a number that is drawn:
on a slow machine too some calls are under way then, some orders have ended and some not begun."""

SUPERVISED_S = 0.1
"""A supervisor starts a process again after this."""

RECOVERY_MAX_S = 5.0
ROUND_MAX_S = 45.0
CALL_S = 2.5
PAUSE_S = 0.05
DIRECT_TOKENS = 8
STEP_TOKENS_MAX = 256
USAGE_LATE_S = 5.0
LATE_EFFECT_S = 0.3
"""A request that a dead caller had sent has arrived by then."""

_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,  # a stream that was reset: its scheduler is gone
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
)


@dataclass
class Round:
    """What one round showed."""

    service: str
    seed: int
    killed_at_s: float = 0.0
    recovery_s: float = 0.0
    """From the kill until a run that was asked for afterwards is acknowledged and a direct request
    answered."""
    done_s: float = 0.0
    """From the kill until every run has ended."""
    in_doubt: int = 0
    direct_answers: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Account:
    """Output tokens of the tenant, over all rounds: what its usage must hold, and what it may."""

    known: int = 0
    """Of answers and steps that were seen."""
    perhaps: int = 0
    """Of calls that may have run without their end being seen: counted or not."""
    lost: int = 0
    """Of rounds in which the scheduler died: it tells what it counted once a second."""

    def fits(self, told: int) -> bool:
        """Whether usage is right."""
        return self.known - self.lost <= told <= self.known + self.perhaps


@dataclass
class World:
    """A running mesh and the server of effects."""

    mesh: Mesh
    effects: Effects
    account: Account = field(default_factory=Account)

    async def round(self, service: str, seed: int) -> Round:
        """One round; the mesh is whole again afterwards."""
        found = Round(service, seed)
        async with client_of(self.mesh) as client:
            await _Play(self, client, found).run()
        await asyncio.to_thread(self.mesh.until_ready)
        return found


@contextmanager
def world(folder: Path, **settings: Mapping[str, object]) -> Iterator[World]:
    """A world, ready."""
    with effects_server(seed=0) as effects:
        shape = Shape(
            instances={"sim-0": {"decode_step_ms": 2.0}},
            agents=2,
            executions=1,
            tools=_tools(effects.port),
            **settings,  # type: ignore[arg-type]
        )
        with mesh(folder, shape) as running:
            yield World(running, effects)


def _tools(port: int) -> list[dict[str, object]]:
    order = {
        "type": "object",
        "properties": {"order": {"type": "string"}},
        "required": ["order"],
        "additionalProperties": False,
    }
    egress = {"hosts": [f"127.0.0.1:{port}"], "private_allowed": [f"127.0.0.1:{port}"]}

    def tool(name: str, effect: str, **http: object) -> dict[str, object]:
        url = f"http://127.0.0.1:{port}/{name}"
        return {
            "name": name,
            "description": f"Sends a {name} for an order.",
            "effect": effect,
            "timeout_s": 5,
            "http": {"method": "POST", "url": url, "parameters": order, **http},
            "egress": egress,
        }

    return [
        tool("charge", "idempotent", idempotency_header=KEY_HEADER),
        tool("mail", "once"),
    ]


class _Play:
    """One round in progress."""

    def __init__(self, world: World, client: MeshClient, found: Round) -> None:
        self._mesh = world.mesh
        self._effects = world.effects
        self._account = world.account
        self._client = client
        self._found = found
        self._random = random.Random(f"{found.service}-{found.seed}")
        self._over = asyncio.Event()
        self._end_s = time.monotonic() + ROUND_MAX_S

    async def run(self) -> None:
        """Plays it and judges."""
        orders = [self._order(number) for number in range(ORDERS)]
        async with asyncio.TaskGroup() as group:
            direct = [group.create_task(self._direct(number)) for number in range(2)]
            kill = group.create_task(self._kill())
            work = [group.create_task(self._work_off(order)) for order in orders]
            killed_s = await kill
            late = self._order(ORDERS)
            await self._recovered(late, killed_s)
            work.append(group.create_task(self._work_off(late)))
            await asyncio.wait(work)
            self._found.done_s = time.monotonic() - killed_s
            self._over.set()
            await asyncio.wait(direct)
        before = self._account.known
        for order in (*orders, late):
            await self._judge(order)
        self._account.known += self._found.direct_answers * DIRECT_TOKENS
        # A run's step is lost with what it depends on; no round loses more than one of each.
        self._account.perhaps += (ORDERS + 1) * STEP_TOKENS_MAX
        if self._found.service == "scheduler":
            self._account.lost += self._account.known - before
        await self._check_usage()

    def _order(self, number: int) -> Order:
        name = f"{self._found.service}-{self._found.seed}-{number}"
        return Order(name, str(uuid.UUID(int=self._random.getrandbits(128), version=4)))

    async def _kill(self) -> float:
        name = SERVICES[self._found.service]
        if self._found.service == "agent":
            name = self._random.choice(["agent-0", "agent-1"])
        wanted = self._effects.requests + self._random.randrange(KILL_AFTER_REQUESTS + 1)
        began_s = time.monotonic()
        while self._effects.requests < wanted and time.monotonic() < began_s + KILL_LATEST_S:
            await asyncio.sleep(0.005)
        await asyncio.sleep(self._random.uniform(0.0, KILL_WITHIN_S))
        killed_s = time.monotonic()
        self._found.killed_at_s = killed_s - began_s
        victim = self._mesh[name]
        await asyncio.to_thread(victim.kill)
        await asyncio.sleep(SUPERVISED_S)
        victim.start()
        return killed_s

    async def _recovered(self, late: Order, killed_s: float) -> None:
        await asyncio.gather(self._acknowledged(late), self._answered("after"))
        self._found.recovery_s = time.monotonic() - killed_s

    async def _direct(self, number: int) -> None:
        """Direct requests, one after the other, until the round is over."""
        while not self._over.is_set():
            await self._answered(str(number))

    async def _answered(self, words: str) -> None:
        sampling = sampling_pb2.SamplingParams(max_tokens=DIRECT_TOKENS, min_tokens=DIRECT_TOKENS)
        request = generate_pb2.GenerateTextRequest(prompt=f"Hello {words}", sampling=sampling)
        if await self._again("GenerateText", request) is not None:
            self._found.direct_answers += 1

    async def _work_off(self, order: Order) -> None:
        if not order.run_id:
            await asyncio.sleep(self._random.uniform(0.0, ARRIVAL_S))
            await self._acknowledged(order)
        while not order.ended and not self._late:
            await self._follow(order)
            if order.waiting is not None:
                await self._decide(order)

    async def _acknowledged(self, order: Order) -> None:
        """Asks for the run until it is acknowledged; always with the same request id."""
        while not order.run_id and not self._late:
            try:
                call = self._client.stub.RunAgent(
                    order.request(), timeout=CALL_S, metadata=self._client.metadata
                )
                async for message in call:
                    order.run_id = message.event.run_id
            except grpc.aio.AioRpcError as error:
                self._check(error)
            await asyncio.sleep(PAUSE_S)

    async def _follow(self, order: Order) -> None:
        """Watches until the run ends, waits, or the watch breaks."""
        request = runs_pb2.WatchRunRequest(
            run_id=order.run_id, from_sequence=max(order.events, default=0) + 1
        )
        call = self._client.stub.WatchRun(request, timeout=CALL_S, metadata=self._client.metadata)
        try:
            async for message in call:
                event = message.event
                if event.HasField("partial_text"):
                    continue
                known = order.events.setdefault(event.sequence, event)
                if known != event:
                    self._found.problems.append(f"{order.name}: event {event.sequence} changed")
                if order.ended or order.waiting is not None:
                    break
        except grpc.aio.AioRpcError as error:
            self._check(error)
            await asyncio.sleep(PAUSE_S)
        finally:
            call.cancel()

    async def _decide(self, order: Order) -> None:
        """The mail may or may not have been sent: the server of effects knows."""
        waiting = order.waiting
        assert waiting is not None
        if waiting.reason != runs_pb2.WAIT_REASON_IN_DOUBT or waiting.call.name != "mail":
            self._found.problems.append(f"{order.name}: waits for {waiting}".replace("\n", " "))
        self._found.in_doubt += 1
        await asyncio.sleep(LATE_EFFECT_S)
        sent = self._effects.mailed(order.name)
        decision = "SUPPLY_RESULT" if sent else "RETRY"
        order.decided.append(decision)
        request = runs_pb2.ResumeRunRequest(
            run_id=order.run_id,
            step=waiting.step,
            decision=runs_pb2.ResumeDecision.Value(f"RESUME_DECISION_{decision}"),
            result_json='{"done": true}' if sent else "",
            request_id=str(uuid.uuid4()),
        )
        await self._again("ResumeRun", request)
        # Else the event that it waits with would be read as a new question.
        while order.waiting is waiting and not self._late:
            await self._follow_one(order)

    async def _follow_one(self, order: Order) -> None:
        before = max(order.events)
        request = runs_pb2.WatchRunRequest(run_id=order.run_id, from_sequence=before + 1)
        call = self._client.stub.WatchRun(request, timeout=CALL_S, metadata=self._client.metadata)
        try:
            async for message in call:
                if not message.event.HasField("partial_text"):
                    order.events.setdefault(message.event.sequence, message.event)
                    break
        except grpc.aio.AioRpcError as error:
            self._check(error)
            await asyncio.sleep(PAUSE_S)
        finally:
            call.cancel()

    async def _again(self, method: str, request: Any) -> Any:
        """A call, again and again until it is answered. A refusal for good is a problem."""
        call = getattr(self._client.stub, method)
        while not self._late:
            try:
                return await call(request, timeout=CALL_S, metadata=self._client.metadata)
            except grpc.aio.AioRpcError as error:
                if not self._check(error):
                    return None
            await asyncio.sleep(PAUSE_S)
        return None

    async def _check_usage(self) -> None:
        """What the tenant used is what it saw, and what it may not have seen."""
        end_s = time.monotonic() + USAGE_LATE_S
        while True:
            got = await self._again("GetUsage", records_pb2.GetUsageRequest())
            told = sum(one.completion_tokens for one in got.records) if got else 0
            if self._account.fits(told):
                return
            if time.monotonic() > end_s:
                self._found.problems.append(f"usage tells {told} output tokens: {self._account}")
                return
            await asyncio.sleep(PAUSE_S)

    def _check(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether asking again is meant by this error; else it is a problem."""
        if error.code() in _AGAIN:
            self._account.perhaps += DIRECT_TOKENS
            return True
        self._found.problems.append(f"{error.code().name}: {error.details()}")
        return False

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._end_s

    async def _judge(self, order: Order) -> None:
        if not order.run_id:
            self._found.problems.append(f"{order.name}: was never acknowledged")
            return
        got = await self._again("GetRun", runs_pb2.GetRunRequest(run_id=order.run_id))
        if got is None or not order.events:
            self._found.problems.append(f"{order.name}: {order.run_id} is lost")
            return
        self._found.problems += judge(order, got.run, self._effects)
        self._account.known += got.run.usage.completion_tokens
