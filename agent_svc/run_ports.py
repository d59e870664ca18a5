"""What the worker needs of the state service and the schedulers: runs, sessions, documents, models.

Every method ends within its own bounded time and can be cancelled. All raise SluiceError; code
UNAVAILABLE or DEADLINE_EXCEEDED says that what was asked may have happened: every write can be
repeated as it was. LEASE_LOST (ABORTED): the run is somebody else's, for good.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from agent_svc.domain.model import (
    Budget,
    Choice,
    Event,
    Failure,
    Message,
    Resumed,
    RunId,
    ToolInfo,
)
from agent_svc.domain.slots import Room
from agent_svc.ports import ToolContext, ToolResult


class Phase(Enum):
    """Phase of a run after an append. Every phase but RUNNING gives the lease back."""

    RUNNING = "running"
    QUEUED = "queued"  # ready for anybody
    PAUSED = "paused"  # ready at a time
    WAITING = "waiting"  # until a person decides
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task or a session's turn. ``tools``: names as granted at admission. ``context_tokens``: of
    the model, 0 when not known. ``output_tokens_max``: of one model call; None: the default."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    choice: Choice
    answer_schema_json: str
    turn: bool
    context_tokens: int
    output_tokens_max: int | None


@dataclass(frozen=True, slots=True)
class IngestSpec:
    """A document that is to be made searchable. ``model``: what embeds."""

    collection: str
    document_id: str
    generation: int
    model: str


class RunKind(Enum):
    """What a run is."""

    TASK = "task"
    TURN = "turn"
    INGEST = "ingest"


@dataclass(frozen=True, slots=True)
class Spec:
    """A run as it was admitted. ``credential`` and ``sampling`` are serialized messages that only
    the way to the schedulers opens. ``model``: as the client named it, for the run's record."""

    work: TaskSpec | IngestSpec
    budget: Budget
    credential: bytes
    model: str = ""
    sampling: bytes = b""
    traceparent: str = ""

    @property
    def kind(self) -> RunKind:
        """What it is."""
        if isinstance(self.work, IngestSpec):
            return RunKind.INGEST
        return RunKind.TURN if self.work.turn else RunKind.TASK


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """A lease: the run and the fencing token of the claim."""

    tenant: str
    run_id: RunId
    token: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """A run that this process holds now. ``spec`` None: it cannot be read. ``last_sequence``:
    number of its last event. ``decision``: of a person, not yet among the events. ``to_end``: it
    has only to be ended, by its cancel mark or its wall time. ``losses``: how often in a row its
    holder was lost without an event."""

    lease: LeaseKey
    spec: Spec | None
    create_s: float
    last_sequence: int
    cancelled: bool = False
    decision: Resumed | None = None
    session_id: str = ""
    to_end: bool = False
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Claims:
    """What was claimed, and when to ask again if nothing nudges before."""

    runs: tuple[Claimed, ...]
    poll_s: float


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A lease after its renewal. ``held`` False is final."""

    held: bool
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run stands, for those who ask without reading its events."""

    steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tool_calls: int
    cost: float
    budget: Budget
    model: str
    session_id: str = ""
    answer: str = ""
    failure: Failure | None = None
    kind: RunKind = RunKind.TASK


@dataclass(frozen=True, slots=True)
class Append:
    """Events to add, all or nothing. The same ``append_id`` as the last one answers as before.
    ``session_messages``: what the run's session gets in the same step, with SUCCEEDED."""

    append_id: str
    expected_sequence: int
    events: tuple[Event, ...]
    summary: Summary | None
    phase: Phase = Phase.RUNNING
    ready_s: float = 0.0
    waiting_step: int = 0
    session_messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """What changed for a run. ``cancelled``: it is to end; otherwise it became ready."""

    tenant: str
    run_id: RunId
    cancelled: bool


class UnreadableError(Exception):
    """A run was written by a version that this one does not understand."""


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """The events of a run, and their size as they are stored."""

    events: Sequence[Event]
    size_bytes: int


class Runs(Protocol):
    """The store of runs."""

    async def claim(self, holder: str, room: Room, lease_s: float) -> Claims:
        """Claims ready runs, and runs whose lease has lapsed, as there is room for, at most 64.
        With ``room.endings`` runs that have only to be ended come first and alone."""

    async def read(self, lease: LeaseKey, bytes_max: int) -> StoredEvents:
        """All events of a run. RUN_TOO_LONG (RESOURCE_EXHAUSTED) beyond ``bytes_max``. Raises
        UnreadableError."""

    async def renew(self, leases: Sequence[LeaseKey], lease_s: float) -> Sequence[LeaseState]:
        """Extends leases; their states in the same order."""

    async def append(self, lease: LeaseKey, append: Append) -> int:
        """Stores events; their bytes as stored."""

    async def publish(self, lease: LeaseKey, step: int, text: str, *, replaces: bool) -> bool:
        """Passes text of the running model call to those who watch. True: what came before it is
        lost on the way; all of it is wanted again."""

    def orders(self, holder: str) -> AsyncIterator[Order | None]:
        """Orders as they come. None says that the watch is set: what came before may be missed."""


class Sessions(Protocol):
    """Conversations that are kept."""

    async def messages(self, tenant: str, session_id: str) -> Sequence[Message]:
        """All messages of a session, oldest first. They do not change during a run's turn."""


@dataclass(frozen=True, slots=True)
class DocumentContent:
    """A document as it was put. ``generation``: the newest."""

    content: bytes
    media_type: str
    generation: int


class TextChunk(Protocol):
    """A chunk of a document: its number from 0 and the bytes of the content that it covers."""

    @property
    def number(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def begin_byte(self) -> int: ...
    @property
    def end_byte(self) -> int: ...


Chunks = Callable[[str, bytes, str], Awaitable[Sequence[TextChunk]]]
"""Tenant, content and media type to chunks, always the same. SluiceError: it cannot be read."""


@dataclass(frozen=True, slots=True)
class VectorChunk:
    """A chunk with its vector, little-endian float32."""

    number: int
    text: str
    begin_byte: int
    end_byte: int
    vector: bytes


class Documents(Protocol):
    """Documents and their chunks."""

    async def content(self, tenant: str, collection: str, document_id: str) -> DocumentContent:
        """A document. NOT_FOUND when it is gone."""

    async def store(
        self, tenant: str, spec: IngestSpec, chunks: Sequence[VectorChunk], total: int | None
    ) -> None:
        """Stores chunks by number, again if need be; ``total`` completes the generation.
        GENERATION_REPLACED (ABORTED) when a later one exists or the document is gone."""

    async def abandon(self, tenant: str, spec: IngestSpec) -> None:
        """Drops the chunks of a generation that is not complete."""


class Usage(Protocol):
    """The ledger of what tenants use."""

    async def agent_not_needed(self, tenant: str, run_id: RunId, model: str) -> None:
        """Counts a run for which a direct call would have done: once, however often it is told."""


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a model call. ``finish_reason``: "stop" or "length"."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked. ``json_schema``: of what it writes, or empty. ``tools``: for its chat
    template. ``otherwise``: sampled otherwise than usual, since a reply like this ran on."""

    messages: Sequence[Message]
    json_schema: str = ""
    tools: Sequence[ToolInfo] = ()
    keep_special_tokens: bool = False
    otherwise: bool = False


class Model(Protocol):
    """The models behind the scheduler's mesh API, for one run."""

    def generate(
        self,
        prompt: Prompt,
        *,
        step: int,
        request_id: str,
        max_tokens: int,
        total_tokens_max: int,
        deadline_s: float,
    ) -> AsyncGenerator[str | Written, None]:
        """Text as it comes, then the end. ``total_tokens_max``: of prompt and output together,
        counted by the engine; INVALID_ARGUMENT TOTAL_TOKENS when it does not hold the prompt.
        Raises SluiceError as the scheduler refused or failed; its retry delay is honest. Closing
        it cancels the call."""

    async def embed(
        self, texts: Sequence[str], *, request_id: str, deadline_s: float
    ) -> Sequence[bytes]:
        """A vector for each text, as little-endian float32. Raises SluiceError."""


class Models(Protocol):
    """The way to the schedulers."""

    def of_run(self, lease: LeaseKey, spec: Spec, affinity: str) -> Model:
        """The models under a run's credential. Calls of the same ``affinity`` go to the same
        scheduler while it answers."""


class GrantedTools(Protocol):
    """The tools that a run may call, and the only way to call one: what was not granted is
    refused, whatever the model wrote."""

    async def infos(self, *, begun: bool = False) -> Sequence[ToolInfo]:
        """What the model and the rules know of them now, in the order in which they were named.
        ``begun``: whether the model was asked already; then one that the tenant may no longer use
        is not among them. Raises SluiceError UNAVAILABLE where one cannot be had, or none may be
        used."""

    async def call(
        self, name: str, arguments_json: str, context: ToolContext, *, approved: bool = False
    ) -> ToolResult:
        """Makes one call. Raises ToolError. ``approved``: a person agreed, where that is needed."""
