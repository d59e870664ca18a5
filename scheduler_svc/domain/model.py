"""The words of the scheduling domain: tickets, reports, outcomes and effects.

Owns no behaviour beyond a few derived values. Everything here belongs to the one owner task: a
ticket is changed by the scheduler alone, and effects are values that the adapters carry out.
Times are seconds of one monotonic clock that the caller passes in; tokens and bytes are counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, NewType

import numpy as np
from numpy.typing import NDArray

from sluice.errors import Code, SluiceError

if TYPE_CHECKING:
    from scheduler_svc.domain.decision import Trail
    from scheduler_svc.domain.quarantine import Suspicion

TicketId = NewType("TicketId", int)
InstanceName = NewType("InstanceName", str)

# Of an output token, in prompt tokens, where work is measured: the weights 1 and 2 of the virtual
# token counter (see ``fair``). An output token costs an engine step, a prompt token a part of one.
OUTPUT_WEIGHT: Final = 2


class PriorityClass(IntEnum):
    """Lower value, higher class. Names as in ``sluice.common.v1.PriorityClass``."""

    CRITICAL = 0
    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


class Outcome(Enum):
    """How a request ended; closed, names as in ``sluice.common.v1.Outcome``."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a count of words, not a secret
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"  # noqa: S105
    SLOW_CONSUMER = "slow_consumer"
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    QUOTA_EXCEEDED = "quota_exceeded"
    QUEUE_FULL = "queue_full"
    HOPELESS = "hopeless"
    NO_INSTANCE = "no_instance"
    DRAINING = "draining"
    AGENT_REFUSED = "agent_refused"
    INSTANCE_FAILED = "instance_failed"
    POISON = "poison"
    INTERNAL = "internal"


class RejectKind(Enum):
    """Why an instance did not take a start. All are neutral: nothing is charged."""

    NO_ROOM = "no_room"
    DRAINING = "draining"
    EXPIRED = "expired"
    LAPSED = "lapsed"  # its quota had been given up by then


class FaultKind(Enum):
    """Why an attempt failed, as far as the scheduler can tell. Client errors are none of these."""

    UNREACHABLE = "unreachable"  # no connection to the instance could be made: it never got there
    LOST_CONNECTION = "lost_connection"  # the stream or the call broke, or fell silent
    LOST_RELAY = "lost_relay"  # the execution service between is gone; says nothing of the instance
    ENGINE_DOWN = "engine_down"  # the engine died while it ran there
    NOT_SERVING = "not_serving"  # the engine was down already, and took nothing
    ENGINE_ERROR = "engine_error"  # the engine ended this attempt alone with an error
    PROTOCOL = "protocol"  # the instance broke the protocol, or refused what it should not
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a count of words, not a secret
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"  # noqa: S105
    FINGERPRINT = "fingerprint"  # it cannot go on with what another model began; neutral
    GOING_DOWN = "going_down"  # the instance stops in order, and ended what it ran


class WorkKind(Enum):
    """What a ticket asks of an instance."""

    GENERATE = "generate"  # over the frame stream: needs credit
    EMBED = "embed"  # a unary call: needs no credit, has no output tokens

    # Members are singletons. Enum's own hash runs Python code, some 20 times a request as part of
    # a Line.
    __hash__ = object.__hash__


Line = tuple[str, WorkKind]  # model and kind: what waits for the same instances


class TicketState(Enum):
    """Where a ticket is. ``LOST`` is running on an instance that is gone, until ``failed``;
    ``RETURNING`` is on the way back to the queue after such a loss. ``YIELDING`` runs on until the
    instance confirms that it stopped, and then waits again."""

    NEW = "new"
    WAITING = "waiting"
    RETURNING = "returning"
    RUNNING = "running"
    YIELDING = "yielding"
    LOST = "lost"
    ABORTING = "aborting"
    ENDED = "ended"


class Refusal(SluiceError):  # noqa: N818 - the domain's word, and what it is
    """A typed error together with the outcome to record."""

    def __init__(
        self,
        outcome: Outcome,
        code: Code,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            code,
            reason or outcome.name,
            message,
            retry_after_s=retry_after_s,
            metadata=metadata,
        )
        self.outcome = outcome


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginnings of a prompt, for placement: hash ``i`` stands for its first ``i + 1`` blocks
    (``canonical``). ``blocks``: how many blocks the whole prompt is, the last one in part."""

    hashes: NDArray[np.uint64]
    blocks: float


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way through the scheduler.

    ``prompt_tokens`` starts as an estimate and becomes exact with ``accepted``; ``output_tokens``
    is what is expected (0 for EMBED); ``size_bytes`` is the size of the input's text: it counts
    against the queue's byte bounds and teaches the bytes-per-token ratio. ``deadline_s`` and
    ``first_token_limit_s`` are absolute. ``attempts`` counts charged attempts: those that an
    instance failed; ``attempt`` numbers every dispatch and only grows. ``prefix`` is ``None`` when
    nobody looks at prefixes. ``continuable``: whether an output that was begun may be continued by
    another attempt. ``sampled``: its decision record is kept however it ends. ``gate_reason``:
    what the agent gate said, if it was asked. ``step_of``: the run whose step it is, and the step's
    number. Fields below it belong to the scheduler.

    ``fingerprint``: of the model that began the output; only instances with the same one may go on
    with it. ``None``: nothing was begun. ``resumed_tokens``: output tokens that earlier attempts
    made; the next attempt reads them again, as part of its prompt, and they stay part of the
    output. ``migrations`` counts the times that it went on after a failure, ``yields`` those that
    it gave its place away, ``yielded_s`` and ``yield_cause`` the last one. ``ran_s``: seconds on
    instances before this attempt. ``generated_tokens`` and ``first_token`` are about this attempt
    alone. ``stranded``: it waits, and when last looked no instance could go on with it.

    ``charged_tokens``: weighted tokens that its tenant was charged, from its first dispatch to its
    end. ``taken``: an instance has taken its prompt, in this attempt or one that it goes on from.
    """

    id: TicketId
    request_id: str
    tenant: str
    model: str
    priority_class: PriorityClass
    arrival_s: float
    deadline_s: float
    first_token_limit_s: float
    prompt_tokens: int
    output_tokens: int
    size_bytes: int
    kind: WorkKind = WorkKind.GENERATE
    input_hash: Callable[[], bytes] | None = None
    excluded: set[InstanceName] = field(default_factory=set)
    attempts: int = 0
    prefix: Prefix | None = None
    continuable: bool = False
    sampled: bool = False
    gate_reason: str = ""
    step_of: tuple[str, int] | None = None
    trail: Trail | None = field(default=None, init=False)
    fingerprint: str | None = field(default=None, init=False)
    resumed_tokens: int = field(default=0, init=False)
    migrations: int = field(default=0, init=False)
    yields: int = field(default=0, init=False)
    yielded_s: float = field(default=0.0, init=False)
    yield_cause: str = field(default="", init=False)
    ran_s: float = field(default=0.0, init=False)
    stranded: bool = field(default=False, init=False)
    charged_tokens: int = field(default=0, init=False)
    taken: bool = field(default=False, init=False)
    state: TicketState = field(default=TicketState.NEW, init=False)
    attempt: int = field(default=0, init=False)
    row: int = field(default=-1, init=False)
    instance: InstanceName | None = field(default=None, init=False)
    dispatched_s: float = field(default=0.0, init=False)
    generated_tokens: int = field(default=0, init=False)
    first_token: bool = field(default=False, init=False)
    trial: int = field(default=-1, init=False)
    failed_over: bool = field(default=False, init=False)
    suspicion: Suspicion | None = field(default=None, init=False)
    first_token_expected_s: float = field(default=0.0, init=False)
    passed_over: int = field(default=0, init=False)
    held_row: int = field(default=-1, init=False)
    held_cached_tokens: int = field(default=0, init=False)
    held_until_s: float | None = field(default=None, init=False)
    abort_outcome: Outcome | None = field(default=None, init=False)
    engine_s: float = field(default=0.0, init=False)
    engine_mark_s: float = field(default=0.0, init=False)

    @property
    def line(self) -> Line:
        """Where it waits."""
        return self.model, self.kind

    @property
    def due_s(self) -> float:
        """The time by which the first token must be there; of what was begun, the end."""
        if self.resumed_tokens:
            return self.deadline_s
        return min(self.deadline_s, self.first_token_limit_s)

    @property
    def read_tokens(self) -> int:
        """What an attempt reads: the prompt, and the output of earlier attempts."""
        return self.prompt_tokens + self.resumed_tokens

    @property
    def output_left(self) -> int:
        """Output tokens expected of this attempt; at least one of what has any."""
        if not self.output_tokens:
            return 0
        return max(1, self.output_tokens - self.resumed_tokens)

    @property
    def reread_tokens(self) -> int:
        """Tokens that would be read again if it stopped now: the price of a yield."""
        return self.prompt_tokens + self.resumed_tokens + self.generated_tokens

    @property
    def work_tokens(self) -> int:
        """Expected weighted tokens: what fairness and shares are measured in."""
        return max(1, self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens)

    @property
    def kv_tokens(self) -> int:
        """KV tokens held at its expected end; at least one, never below what it holds."""
        done = self.resumed_tokens + self.generated_tokens
        return max(1, self.prompt_tokens + max(self.output_tokens, done))


@dataclass(frozen=True, slots=True)
class GpuState:
    """All GPUs of an instance at once; ``None`` = the devices do not say. ``memory_free``: least
    free share of memory, 0 to 1. ``throttled``: a GPU is slowed by heat or hardware.
    ``xid_errors``: critical ones since the service started. ``ecc_errors``: uncorrected ones since
    the driver loaded. Both are sums."""

    memory_free: float | None = None
    throttled: bool = False
    xid_errors: int | None = None
    ecc_errors: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What an instance says of itself; ``None`` = not reported. Units as in ``load.proto``.

    ``kv_tokens`` 0 = no KV cache: KV memory is then no limit. ``epoch``: another one is another
    life of the engine, its caches empty. ``gpus``: ``None`` without GPUs or readings."""

    name: InstanceName
    model: str
    fingerprint: str
    serving: bool
    draining: bool
    sequences_max: int
    kv_tokens: int
    context_tokens: int
    step_tokens_max: int
    kv_block_tokens: int
    generates: bool
    embeds: bool
    simulated: bool
    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    step_ms: float | None = None
    epoch: str = ""
    gpus: GpuState | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Start the ticket on the instance. ``attempt`` is 1 for the first dispatch, then grows."""

    ticket: Ticket
    instance: InstanceName
    attempt: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The ticket is over without having run (again); tell the client ``error``."""

    ticket: Ticket
    outcome: Outcome
    error: SluiceError


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel the attempt on the instance; its room stays taken until ``ended``, ``rejected``,
    ``failed`` or ``lost``. ``error`` is what the client is told when a limit of the ticket passed;
    ``None`` when the caller itself cancelled."""

    ticket: Ticket
    instance: InstanceName
    attempt: int
    reason: Outcome
    error: SluiceError | None = None


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop the attempt on the instance; the ticket goes on later, there or elsewhere. Its room
    stays taken until ``yielded`` says how far it came (or it ended by itself meanwhile, or
    failed). The client hears nothing of it."""

    ticket: Ticket
    instance: InstanceName
    attempt: int


Effect = Dispatch | Refuse | Abort | Yield


@dataclass(frozen=True, slots=True)
class Demand:
    """What would run on an instance if it had the room: what runs there and all that waits."""

    sequences: int
    kv_tokens: int
