"""Clients of the simulated mesh: what they ask, when they leave, how slowly they read, and what has
to be true of every message they get."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from inference_svc.ports import Sampling
from sluice.common.v1 import policy_pb2, result_pb2
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.status import from_rpc_error
from tests.simulation.journal import Journal
from tests.simulation.mesh import TENANTS, Mesh, SchedulerProcess, key_of
from tests.simulation.network import Channel, Node
from tests.simulation.oracle import Expected, expected

DIMENSIONS: Final = 4
CLASSES: Final = (
    policy_pb2.PRIORITY_CLASS_CRITICAL,
    policy_pb2.PRIORITY_CLASS_INTERACTIVE,
    policy_pb2.PRIORITY_CLASS_STANDARD,
    policy_pb2.PRIORITY_CLASS_BATCH,
)
WORDS: Final = ("sea", " light", " and", " 한", "국", " the", "boat", " 🫠", " winter", ", ", "x")

# Errors that a client may get: each says what happened to it. Anything else is a fault of the mesh.
ALLOWED: Final = frozenset(
    (
        "CANCELLED",
        "CALL_CANCELLED",
        "DEADLINE_EXCEEDED",
        "DEADLINE_TOO_CLOSE",
        "FIRST_TOKEN_TIMEOUT",
        "HOPELESS",
        "INSTANCE_LOST",
        "INTER_TOKEN_TIMEOUT",
        "NO_INSTANCE",
        "POISON",  # an input that was alone where engines died
        "QUEUE_FULL",
        "QUOTA_EXCEEDED",
        "QUOTA_QUEUE_FULL",
        "QUOTA_UNREACHABLE",
        "SLOW_CONSUMER",
        "TOO_MANY_STREAMS",
        "STREAM_DISCONNECTED",  # the scheduler died
        "STREAM_UNREACHABLE",
    )
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one client does. ``leave_s``: it leaves after so long, whatever comes. ``pause_s``: it
    waits so long before each further message, from ``pause_from`` on."""

    request_id: str
    at_s: float
    tenant: str
    model: str
    priority_class: policy_pb2.PriorityClass.ValueType
    text: str
    max_tokens: int
    outputs: int = 1
    seed: int | None = None
    timeout_s: float | None = None
    leave_s: float | None = None
    pause_s: float = 0.0
    whole: bool = False
    embed: bool = False


def make_plan(source: random.Random, number: int, arrivals_s: float, models: list[str]) -> Plan:
    """A random client."""
    roll = source.random
    length = source.choice((1, 3, 10, 40)) if roll() < 0.9 else 90
    return Plan(
        request_id=f"r{number}",
        at_s=arrivals_s * (roll() if roll() < 0.6 else source.choice((0.1, 0.4, 0.7))),
        tenant=source.choice([*TENANTS]),
        model=source.choice(models),
        priority_class=source.choice(CLASSES),
        text="".join(source.choices(WORDS, k=length)),
        max_tokens=source.choice((1, 3, 10, 25, 50, 90)),
        outputs=2 if roll() < 0.06 else 1,
        seed=source.randrange(1000) if roll() < 0.3 else None,
        timeout_s=source.choice((0.3, 1.5, 4.0, 12.0, 25.0)) if roll() < 0.6 else 30.0,
        leave_s=source.choice((0.0, 0.05, 0.4, 1.5, 4.0)) * roll() if roll() < 0.3 else None,
        pause_s=source.choice((0.3, 1.0, 8.0)) if roll() < 0.08 else 0.0,
        whole=roll() < 0.15,
        embed=roll() < 0.06,
    )


@dataclass(slots=True)
class Got:
    """What a client has got so far. ``possible``: the outputs by index that each of the model's
    fingerprints would give, as far as they still fit."""

    possible: list[list[Expected]]
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    sequence: int = 0
    started: bool = False
    finished: bool = False

    @property
    def count(self) -> int:
        """Output tokens."""
        return sum(map(len, self.tokens))

    def check(self, index: int, *, whole: bool) -> None:
        """It is what one and the same fingerprint gives for all outputs."""
        tokens, text = self.tokens[index], self.texts[index]
        self.possible = [
            outputs for outputs in self.possible if outputs[index].fits(tokens, text, whole=whole)
        ]
        what = "at the end" if whole else "so far"
        assert self.possible, f"output {what} lost, repeated or exchanged: {len(tokens)} tokens"


class Client:
    """One request, from its plan to its one outcome."""

    def __init__(self, plan: Plan, mesh: Mesh, journal: Journal) -> None:
        self.plan = plan
        self.outcome = ""
        self.scheduler: SchedulerProcess | None = None
        self._mesh = mesh
        self._journal = journal

    async def run(self, node: Node, scheduler: SchedulerProcess) -> None:
        """Asks one scheduler, and notes how it ended."""
        plan = self.plan
        self.scheduler = scheduler
        self._journal.note("ask", plan.request_id, scheduler.name)
        channel: Any = Channel(node.network, node, scheduler.address)
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        outcome = "LEFT"
        try:
            async with asyncio.timeout(plan.leave_s):
                if plan.embed:
                    await self._embed(stub)
                else:
                    await (self._whole(stub) if plan.whole else self._stream(stub))
                outcome = "FINISHED"
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            outcome = from_rpc_error(error).reason
            self._journal.check(outcome in ALLOWED, f"{plan.request_id} ended as {outcome}")
        except AssertionError as error:
            self._journal.violation(f"{plan.request_id}: {error}", error)
            outcome = "WRONG"
        self._journal.check(not self.outcome, f"{plan.request_id} ended twice")
        self.outcome = outcome
        self._journal.note("done", plan.request_id, outcome)
        if outcome != "FINISHED":
            self._journal.left(plan.request_id)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {key_of(self.plan.tenant)}"),)

    def _fill(
        self, request: generate_pb2.GenerateRequest | generate_pb2.GenerateTextRequest
    ) -> None:
        plan = self.plan
        request.request_id = plan.request_id
        request.model = plan.model
        request.text = plan.text
        request.priority_class = plan.priority_class
        request.return_token_ids = True
        request.sampling.max_tokens = plan.max_tokens
        request.sampling.n = plan.outputs
        if plan.seed is None:
            request.sampling.temperature = 0.0
        else:
            request.sampling.seed = plan.seed

    def _got(self) -> Got:
        plan = self.plan
        sampling = Sampling(
            max_tokens=plan.max_tokens,
            temperature=0.0 if plan.seed is None else None,
            seed=plan.seed,
            n=plan.outputs,
        )
        numbers = range(plan.outputs)
        possible = [
            [expected(fingerprint, plan.text, sampling, index) for index in numbers]
            for fingerprint in self._mesh.fingerprints[plan.model]
        ]
        return Got(possible, [[] for _ in numbers], ["" for _ in numbers])

    async def _stream(self, stub: Any) -> None:
        plan, got = self.plan, self._got()
        request = generate_pb2.GenerateRequest()
        self._fill(request)
        call = stub.Generate(request, timeout=plan.timeout_s, metadata=self._metadata)
        try:
            while True:
                message = await call.read()
                if not isinstance(message, generate_pb2.GenerateResponse):
                    break
                self._take(got, message)
                if plan.pause_s:
                    await asyncio.sleep(plan.pause_s)
            assert got.finished, "the stream ended without a last message"
        finally:
            call.cancel()

    def _take(self, got: Got, message: generate_pb2.GenerateResponse) -> None:
        """Every message: in order, one beginning, one end, and output as it has to be."""
        got.sequence += 1
        assert message.sequence == got.sequence, "messages out of order"
        assert not got.finished, "a message after the last one"
        kind = message.WhichOneof("event")
        self._journal.note("message", self.plan.request_id, kind, message.delta.position)
        if kind == "started":
            assert not got.started, "started twice"
            got.started = True
            return
        assert got.started, "output before the start"
        if kind == "delta":
            delta = message.delta
            assert delta.position == len(got.tokens[delta.index]), "a gap or an overlap"
            got.tokens[delta.index].extend(delta.token_ids)
            got.texts[delta.index] += delta.text
            got.check(delta.index, whole=False)
            return
        got.finished = True
        finished = message.finished
        assert finished.usage.completion_tokens == got.count, "the usage is not what was delivered"
        for finish in finished.outputs:
            assert finish.finish_reason == result_pb2.FINISH_REASON_LENGTH
            got.check(finish.index, whole=True)

    async def _embed(self, stub: Any) -> None:
        plan = self.plan
        request = generate_pb2.EmbedRequest(
            request_id=plan.request_id,
            model=plan.model,
            texts=[plan.text, "x"],
            priority_class=plan.priority_class,
        )
        answer = await stub.Embed(request, timeout=plan.timeout_s, metadata=self._metadata)
        assert [len(one.values) for one in answer.embeddings] == [DIMENSIONS, DIMENSIONS]

    async def _whole(self, stub: Any) -> None:
        plan, got = self.plan, self._got()
        request = generate_pb2.GenerateTextRequest()
        self._fill(request)
        answer = await stub.GenerateText(request, timeout=plan.timeout_s, metadata=self._metadata)
        assert len(answer.outputs) == plan.outputs
        for output in answer.outputs:
            got.tokens[output.index].extend(output.token_ids)
            got.texts[output.index] = output.text
            got.check(output.index, whole=True)
