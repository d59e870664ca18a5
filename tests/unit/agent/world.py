"""A world for agent services in one process: the twin of the state service's client, a scripted
model, tools with effects, all under the virtual clock.

The twin keeps what the ports promise (agent_svc/run_ports.py): leases with fencing tokens, appends
that are guarded, atomic and repeatable, marks, decisions, orders. A crash is the end of an agent's
tasks: what the world holds stays, what the agent knew is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_svc.adapters.counts import Counts
from agent_svc.adapters.run_work import Outside, RunWork
from agent_svc.adapters.task_run import Manner
from agent_svc.adapters.worker import Limits, Worker
from agent_svc.domain.ending import Rules
from agent_svc.domain.model import (
    Budget,
    CallEnded,
    Choice,
    Effect,
    Event,
    Kind,
    Message,
    ModelStep,
    Paused,
    Queued,
    Resumed,
    RunId,
    ToolInfo,
)
from agent_svc.domain.slots import Room
from agent_svc.domain.tool_format import Options
from agent_svc.ports import ToolContext, ToolError, ToolResult
from agent_svc.run_ports import (
    Append,
    Claimed,
    Claims,
    DocumentContent,
    GrantedTools,
    IngestSpec,
    LeaseKey,
    LeaseState,
    Order,
    Phase,
    Prompt,
    Spec,
    StoredEvents,
    Summary,
    TaskSpec,
    UnreadableError,
    VectorChunk,
    Written,
)
from sluice import context as calling
from sluice.errors import Code, SluiceError, exhausted, unavailable

UNIX_S = 1_700_000_000.0
POLL_S = 0.5
ENDED = {Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED}
READY = {Phase.QUEUED, Phase.PAUSED, Phase.RUNNING}
WIDE = Budget(steps_max=50, tokens_max=100_000, tool_calls_max=20, wall_time_s=600.0, cost_max=50.0)


def lease_lost() -> SluiceError:
    return SluiceError(Code.ABORTED, "LEASE_LOST", "x")


@dataclass
class Run:
    """A run as the twin stores it."""

    tenant: str
    run_id: RunId
    spec: Spec | None
    create_s: float
    session_id: str = ""
    phase: Phase = Phase.QUEUED
    due: float = 0.0
    events: list[Event] = field(default_factory=list)
    token: int = 0
    holder: str = ""
    cancelled: bool = False
    decision: Resumed | None = None
    waiting_step: int = 0
    summary: Summary | None = None
    last_append: str = ""
    claims: int = 0
    priority: int = 2
    waits_s: float = 0.0  # since when it waits for a person
    waited_s: float = 0.0

    @property
    def kinds(self) -> list[Kind]:
        return [event.kind for event in self.events]


class MemoryState:
    """The twin: ports Runs, Sessions, Documents and Usage at once. ``down`` lets every call fail as
    an unreachable service does; ``lost_replies`` lets that many appends happen and say they did
    not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.runs: dict[tuple[str, RunId], Run] = {}
        self.sessions: dict[str, list[Message]] = {}
        self.documents: dict[tuple[str, str, str], DocumentContent] = {}
        self.chunks: dict[int, VectorChunk] = {}
        self.chunk_writes: Counter[int] = Counter()
        self.complete = False
        self.needless: set[RunId] = set()
        self.texts: defaultdict[RunId, list[tuple[int, str, bool]]] = defaultdict(list)
        self.down = False
        self.refused_calls: set[str] = set()
        self.cut_off: set[str] = set()  # holders whose calls never arrive
        self.orders_down = False
        self.lost_replies = 0
        self.refuse: SluiceError | None = None  # what the next append with events hears
        self.session_refusal: SluiceError | None = None  # of appends that bring a session messages
        self.full = False  # STORE_FULL for appends that keep the lease
        self.calls: Counter[str] = Counter()
        self._orders: dict[str, asyncio.Queue[Order]] = {}

    # What schedulers do.

    def create(
        self,
        run_id: str,
        spec: Spec | None,
        *,
        tenant: str = "t",
        session: str = "",
        priority: int = 2,
    ) -> Run:
        """Stores a run."""
        run = Run(tenant, RunId(run_id), spec, round(UNIX_S + self.clock(), 6), session)
        run.due, run.priority = self.clock(), priority
        run.events.append(Event(1, run.create_s, Queued("ALLOWED")))
        self.runs[tenant, run.run_id] = run
        self._tell(run, cancelled=False)
        return run

    def cancel(self, run: Run) -> None:
        """Marks a run as cancelled."""
        if run.phase in ENDED:
            return
        run.cancelled = True
        self._tell(run, cancelled=True)
        if run.phase is not Phase.RUNNING:
            run.phase, run.due = Phase.QUEUED, self.clock()
            self._tell(run, cancelled=False)

    def resume(self, run: Run, decision: Resumed) -> None:
        """Stores a decision."""
        assert run.phase is Phase.WAITING
        assert run.waiting_step == decision.step
        run.decision = decision
        run.waited_s += self.clock() - run.waits_s
        run.phase, run.due = Phase.QUEUED, self.clock()
        self._tell(run, cancelled=False)

    def _tell(self, run: Run, *, cancelled: bool) -> None:
        if not self.orders_down:
            for queue in self._orders.values():
                queue.put_nowait(Order(run.tenant, run.run_id, cancelled))

    # What agents do.

    async def _network(self, call: str) -> None:
        self.calls[call] += 1
        await asyncio.sleep(0.001)
        if self.down or call in self.refused_calls:
            raise unavailable("STATE_UNREACHABLE", "x")

    async def claim(self, holder: str, room: Room, lease_s: float) -> Claims:
        await self._network("claim")
        now = self.clock()
        ready = [run for run in self.runs.values() if run.phase in READY and run.due <= now]
        over = [run for run in ready if self._only_to_end(run)][: room.endings]
        if over:
            return Claims(tuple(self._take(run, holder, lease_s) for run in over), 0.05)
        claimed: list[Claimed] = []
        taken: Counter[str] = Counter()
        later = 0
        for run in ready:
            most = room.tenants.get(run.tenant, room.tenant)
            if len(claimed) == room.runs or taken[run.tenant] >= most:
                continue
            if run.priority > 2 and later >= room.later:
                continue
            later += run.priority > 2
            taken[run.tenant] += 1
            claimed.append(self._take(run, holder, lease_s))
        return Claims(tuple(claimed), POLL_S)

    def _only_to_end(self, run: Run) -> bool:
        if run.phase is Phase.RUNNING:
            return False
        spent_s = UNIX_S + self.clock() - run.create_s - run.waited_s
        return run.cancelled or (run.spec is not None and spent_s > run.spec.budget.wall_time_s)

    def _take(self, run: Run, holder: str, lease_s: float) -> Claimed:
        to_end = self._only_to_end(run)
        run.token += 1
        run.claims += 1
        run.holder, run.phase, run.due = holder, Phase.RUNNING, self.clock() + lease_s
        return Claimed(
            LeaseKey(run.tenant, run.run_id, run.token),
            run.spec,
            run.create_s,
            len(run.events),
            run.cancelled,
            run.decision,
            run.session_id,
            to_end,
        )

    def _held(self, lease: LeaseKey) -> Run:
        run = self.runs[lease.tenant, lease.run_id]
        if run.token != lease.token or run.phase is not Phase.RUNNING:
            raise lease_lost()
        return run

    async def read(self, lease: LeaseKey, bytes_max: int) -> StoredEvents:
        await self._network("read")
        run = self.runs[lease.tenant, lease.run_id]
        if run.spec is None:
            raise UnreadableError
        return StoredEvents(tuple(run.events), 100 * len(run.events))

    async def renew(self, leases: Sequence[LeaseKey], lease_s: float) -> list[LeaseState]:
        await self._network("renew")
        states = []
        for lease in leases:
            run = self.runs[lease.tenant, lease.run_id]
            held = run.token == lease.token and run.phase is Phase.RUNNING
            if held:
                run.due = self.clock() + lease_s
            states.append(LeaseState(held, run.cancelled))
        return states

    async def append(self, lease: LeaseKey, append: Append) -> int:
        await self._network("append")
        run = self.runs[lease.tenant, lease.run_id]
        if run.token != lease.token:
            raise lease_lost()
        if run.last_append != append.append_id:
            self._held(lease)
            if append.expected_sequence != len(run.events):
                raise SluiceError(Code.ABORTED, "VERSION_CONFLICT", "x")
            if self.refuse is not None and append.events:
                refusal, self.refuse = self.refuse, None
                raise refusal
            if self.session_refusal is not None and append.session_messages:
                raise self.session_refusal
            if self.full and append.phase is Phase.RUNNING:
                raise exhausted("STORE_FULL", "x", 10.0)
            self._apply(run, append)
        if self.lost_replies:
            self.lost_replies -= 1
            raise unavailable("STATE_UNREACHABLE", "x")
        return 100 * len(append.events)

    def _apply(self, run: Run, append: Append) -> None:
        assert [e.sequence for e in append.events] == list(
            range(len(run.events) + 1, len(run.events) + 1 + len(append.events))
        )
        assert run.phase not in ENDED
        run.last_append = append.append_id
        run.events += append.events
        run.summary = append.summary or run.summary
        if append.events:
            run.decision = None
        if append.phase is Phase.RUNNING:
            return
        run.phase, run.holder = append.phase, ""
        run.waiting_step, run.waits_s = append.waiting_step, self.clock()
        if append.phase is Phase.PAUSED:
            run.due = append.ready_s - UNIX_S
        elif append.phase is Phase.QUEUED:
            run.due = self.clock()
        if append.phase is Phase.SUCCEEDED and run.session_id:
            self.sessions[run.session_id] += append.session_messages

    async def publish(self, lease: LeaseKey, step: int, text: str, *, replaces: bool) -> bool:
        await self._network("publish")
        self._held(lease)
        self.texts[lease.run_id].append((step, text, replaces))
        return False

    async def orders(self, holder: str) -> AsyncIterator[Order | None]:
        await self._network("orders")
        queue = self._orders[holder] = asyncio.Queue()
        try:
            yield None
            while True:
                yield await queue.get()
        finally:
            self._orders.pop(holder, None)

    async def messages(self, tenant: str, session_id: str) -> Sequence[Message]:
        await self._network("messages")
        return tuple(self.sessions[session_id])

    async def content(self, tenant: str, collection: str, document_id: str) -> DocumentContent:
        await self._network("content")
        return self.documents[tenant, collection, document_id]

    async def store(
        self, tenant: str, spec: IngestSpec, chunks: Sequence[VectorChunk], total: int | None
    ) -> None:
        await self._network("store")
        document = self.documents.get((tenant, spec.collection, spec.document_id))
        if document is None or document.generation != spec.generation:
            raise SluiceError(Code.ABORTED, "GENERATION_REPLACED", "x")
        for chunk in chunks:
            self.chunks[chunk.number] = chunk
            self.chunk_writes[chunk.number] += 1
        if total is not None:
            assert sorted(self.chunks) == list(range(total))
            self.complete = True

    async def abandon(self, tenant: str, spec: IngestSpec) -> None:
        await self._network("abandon")
        if not self.complete:
            self.chunks.clear()

    async def agent_not_needed(self, tenant: str, run_id: RunId, model: str) -> None:
        await self._network("usage")
        self.needless.add(run_id)


@dataclass
class Script:
    """What the model writes and the tools do. ``replies``: text by model call of a run, or an error
    to raise; calls beyond the list repeat the last."""

    replies: list[str | SluiceError] = field(default_factory=lambda: [answer("done")])
    model_s: float = 0.2
    tool_s: float = 0.1
    context_tokens: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    model_calls: Counter[str] = field(default_factory=Counter)  # by request id
    effects: Counter[str] = field(default_factory=Counter)  # calls made, by idempotency key
    ended: Counter[str] = field(default_factory=Counter)  # calls that ended, by key
    errors: dict[str, list[ToolError]] = field(default_factory=dict)  # by tool, one per try
    embeds: int = 0
    traceparents: list[str] = field(default_factory=list)  # of model calls and tool calls
    embed_chars_max: int = 1000
    by_run: dict[str, list[str | SluiceError]] = field(default_factory=dict)  # other replies
    late: list[str] = field(default_factory=list)  # calls made after their end was stored
    approved: dict[str, bool] = field(default_factory=dict)  # by tool: said of its last call
    most_tokens: list[int] = field(default_factory=list)  # that each model call might write
    total_tokens: list[int] = field(default_factory=list)  # that each might use
    cut_calls: int = 0  # the first so many model calls end at the limit of tokens
    prompt_tokens: int = 20  # of each model call


def calls(*wanted: tuple[str, dict[str, Any]]) -> str:
    """A reply that asks for calls."""
    return json.dumps({"calls": [{"tool": name, "arguments": given} for name, given in wanted]})


def answer(text: str) -> str:
    """A reply that answers."""
    return json.dumps({"answer": text})


class ScriptedModels:
    """Port Models. The reply is that of the run's number of recorded steps, so a call that was lost
    is answered alike."""

    def __init__(self, script: Script, state: MemoryState) -> None:
        self._script = script
        self._state = state

    def of_run(self, lease: LeaseKey, spec: Spec, affinity: str) -> ScriptedModel:
        run = self._state.runs[lease.tenant, lease.run_id]

        def recorded(_: str) -> int:
            return sum(isinstance(kind, ModelStep | Paused) for kind in run.kinds)

        return ScriptedModel(self._script, recorded)


class ScriptedModel:
    """``before``: steps before the call of this request id, by which its reply is chosen."""

    def __init__(self, script: Script, before: Callable[[str], int]) -> None:
        self._script = script
        self._before = before

    async def generate(
        self,
        prompt: Prompt,
        *,
        step: int,
        request_id: str,
        max_tokens: int,
        total_tokens_max: int,
        deadline_s: float,
    ) -> AsyncGenerator[str | Written, None]:
        script = self._script
        script.prompts.append(prompt)
        script.most_tokens.append(max_tokens)
        script.total_tokens.append(total_tokens_max)
        script.traceparents.append(calling.traceparent.get())
        script.model_calls[request_id] += 1
        replies = script.by_run.get(request_id.rpartition(".")[0], script.replies)
        reply = replies[min(self._before(request_id), len(replies) - 1)]
        if isinstance(reply, SluiceError):
            await asyncio.sleep(0.001)
            raise reply
        for at in range(0, len(reply), 20):
            await asyncio.sleep(script.model_s / max(1, len(reply) / 20))
            yield reply[at : at + 20]
        cut = len(script.prompts) <= script.cut_calls
        finish = "length" if cut else "stop"
        yield Written(finish, script.prompt_tokens, 10, 0, 0.25, request_id)

    async def embed(
        self, texts: Sequence[str], *, request_id: str, deadline_s: float
    ) -> Sequence[bytes]:
        await asyncio.sleep(self._script.model_s)
        if any(len(text) > self._script.embed_chars_max for text in texts):
            raise SluiceError(Code.INVALID_ARGUMENT, "CONTEXT_LENGTH", "x")
        self._script.embeds += len(texts)
        return [text.encode()[:4].ljust(4) for text in texts]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = {
    name: ToolInfo(name, f"Does {name}.", SCHEMA, effect, needs_approval=name == "sign")
    for name, effect in (
        ("find", Effect.READ),
        ("put", Effect.IDEMPOTENT),
        ("pay", Effect.ONCE),
        ("sign", Effect.READ),
    )
}


class ScriptedTools:
    """Port GrantedTools: each call has an effect at its beginning and takes its time."""

    def __init__(self, script: Script, names: Sequence[str], run: Run | None = None) -> None:
        self._script = script
        self._names = names
        self._run = run

    async def infos(self, *, begun: bool = False) -> Sequence[ToolInfo]:
        return [TOOLS[name] for name in self._names if name in TOOLS]

    async def call(
        self, name: str, arguments_json: str, context: ToolContext, *, approved: bool = False
    ) -> ToolResult:
        assert name in self._names
        script, key = self._script, context.idempotency_key
        script.traceparents.append(context.traceparent)
        script.approved[name] = approved
        await asyncio.sleep(script.tool_s / 2)
        script.effects[key] += 1
        stored = self._run.kinds if self._run else []
        ends = [kind.step for kind in stored if isinstance(kind, CallEnded)]
        if any(key == f"{context.run_id}:{step}" for step in ends):
            script.late.append(key)
        if left := script.errors.get(name):
            raise left.pop(0)
        await asyncio.sleep(script.tool_s / 2)
        script.ended[key] += 1
        return ToolResult(json.dumps({"got": json.loads(arguments_json)}))


class Link:
    """One agent's way to the twin, which can be cut for ever."""

    def __init__(self, state: MemoryState, name: str) -> None:
        self._state = state
        self._name = name

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._state, method)
        if method == "orders":
            return found

        async def call(*args: Any, **fields: Any) -> Any:
            if self._name in self._state.cut_off:
                await asyncio.Event().wait()
            return await found(*args, **fields)

        return call


@dataclass
class Agent:
    """One agent service."""

    name: str
    worker: Worker
    counts: Counts
    task: asyncio.Task[None]

    async def crash(self) -> None:
        """The process is gone."""
        self.task.cancel()
        await asyncio.wait([self.task])


class World:
    """State, script and agents. Use inside a virtual loop."""

    def __init__(self, script: Script | None = None) -> None:
        self.clock = asyncio.get_running_loop().time
        self.state = MemoryState(self.clock)
        self.script = script or Script()
        self.agents: list[Agent] = []
        self.tools: Callable[[str, str, Sequence[str]], GrantedTools] = (
            lambda tenant, run_id, names: ScriptedTools(
                self.script, names, self.state.runs[tenant, RunId(run_id)]
            )
        )
        self.manner = Manner(
            rules=Rules(),
            options=Options(),
            options_by_context=True,
            output_tokens_max=512,
            call_tokens_max=256,
            in_place_s=1.0,
            text_interval_s=lambda: 0.04,
        )
        self.limits = Limits()

    def agent(self) -> Agent:
        """Starts an agent service."""
        name = f"agent-{len(self.agents)}"
        link: Any = Link(self.state, name)
        outside = Outside(
            runs=link,
            sessions=link,
            documents=link,
            usage=link,
            models=ScriptedModels(self.script, self.state),
            tools=self.tools,
            chunks_of=chunks_of,
            wall=lambda: UNIX_S + self.clock(),
        )
        work = RunWork(outside, self.manner, embed_batch=4)
        worker = Worker(name, link, work, self.limits, clock=self.clock)
        made = Agent(
            name, worker, work.counts, asyncio.get_running_loop().create_task(worker.run())
        )
        self.agents.append(made)
        return made

    def run(self, run_id: str = "r1", *, session: str = "", **fields: Any) -> Run:
        """Stores a task. Fields of TaskSpec, and `budget`."""
        budget, traceparent = fields.pop("budget", WIDE), fields.pop("traceparent", "")
        work = TaskSpec(
            messages=(Message("user", "Do it."),),
            tools=tuple(TOOLS),
            choice=Choice.AUTO,
            answer_schema_json="",
            turn=False,
            context_tokens=8192,
            output_tokens_max=None,
        )
        spec = Spec(replace(work, **fields), budget, b"", traceparent=traceparent)
        return self.state.create(run_id, spec, session=session)

    async def until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> float:
        """Waits; the seconds it took."""
        begin = self.clock()
        while not condition():
            assert self.clock() - begin < limit_s, "not in time"
            await asyncio.sleep(0.01)
        return self.clock() - begin

    async def until_ended(self, *runs: Run, limit_s: float = 300.0) -> None:
        """Waits until these runs have ended."""
        await self.until(lambda: all(run.phase in ENDED for run in runs), limit_s)

    async def close(self) -> None:
        """Ends the agents."""
        for agent in self.agents:
            await agent.crash()


@dataclass(frozen=True)
class Line:
    number: int
    text: str
    begin_byte: int
    end_byte: int


async def chunks_of(tenant: str, content: bytes, media_type: str) -> list[Line]:
    """A chunk for each line."""
    await asyncio.sleep(0.01)
    return [
        Line(number, line, 0, len(line)) for number, line in enumerate(content.decode().split())
    ]
