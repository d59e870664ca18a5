"""What runs and sessions are to the state service, and why it refuses to change them. Values only.

Times are milliseconds since 1970 on the store's clock, which is the only one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Phase(IntEnum):
    """Phase of a run; numbers as ``sluice.state.v1.RunPhase``."""

    QUEUED = 1
    RUNNING = 2
    PAUSED = 3
    WAITING = 4
    SUCCEEDED = 5
    FAILED = 6
    CANCELLED = 7


ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
PRIORITIES: Final = (1, 2, 3, 4)  # the first goes first
DEDUP_MS: Final = 24 * 3600 * 1000
RUN_OVERHEAD_BYTES: Final = 1024  # what a run costs beside what it brings
SESSION_OVERHEAD_BYTES: Final = 512
MESSAGE_OVERHEAD_BYTES: Final = 16  # also of an event


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Bounds of what a tenant's runs may hold. Beyond one: RunsFullError, RunFullError."""

    open_max: int = 2_000
    """Runs that have not ended, those that wait for people included."""
    tenant_bytes_max: int = 128 << 20
    """All stored runs together; ended ones make room."""
    events_max: int = 10_000
    """Events of a run, its end excepted."""
    run_bytes_max: int = 16 << 20
    """Spec and events of a run, its end excepted."""
    kept_ms: int = 7 * 24 * 3600 * 1000
    """How long an ended run is kept, at least :data:`DEDUP_MS`."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of what a tenant's sessions may hold. Beyond one: SessionsFullError,
    SessionFullError."""

    sessions_max: int = 10_000
    tenant_bytes_max: int = 128 << 20
    messages_max: int = 10_000
    session_bytes_max: int = 8 << 20


SEQUENCE_MAX: Final = 1 << 40
"""Above the number of any event."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be stored. ``priority`` 1 to 4. ``active_max``: most runs of the tenant claimed at
    once; 0: this one is neither held back nor counted. ``open_max``: most counted runs that are
    queued, running or paused; 0: this one is neither refused nor counted. ``wall_ms``: after so
    long, waits for people excepted, it has only to be ended; 0: never. ``request_digest``: what its
    writer tells a repeated request by."""

    tenant: str
    run_id: str
    request_id: str
    spec: bytes
    summary: bytes
    events: tuple[bytes, ...]
    priority: int
    active_max: int = 0
    open_max: int = 0
    session_id: str = ""
    wall_ms: int = 0
    request_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as stored. ``spec`` is empty where it was not asked for or was given up, ``decision``
    and ``request_digest`` in lists."""

    tenant: str
    run_id: str
    phase: Phase
    spec: bytes
    summary: bytes
    last_sequence: int
    create_ms: int
    end_ms: int  # 0: it has not ended
    cancelled: bool
    decision: bytes
    decision_step: int
    session_id: str
    priority: int
    request_digest: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """A claimed run. ``token``: its fencing token, larger than every earlier one of the run."""

    tenant: str
    run_id: str
    token: int


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A lease after its renewal. Not held is final for its token."""

    held: bool
    cancelled: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """A run that its asker holds now. ``to_end``: it has only to be ended. ``losses``: how often in
    a row its holder was lost without having appended an event."""

    run: RunRecord
    token: int
    to_end: bool = False
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Append:
    """Events for a claimed run, and its phase from now on. RUNNING: the lease goes on; every other
    phase gives it back. ``ready_ms``: for PAUSED. ``waiting_step``: for WAITING.
    ``session_messages``: for SUCCEEDED, what the run's session gets with it."""

    lease: Lease
    expected_sequence: int
    append_id: str
    events: tuple[bytes, ...]
    summary: bytes = b""
    phase: Phase = Phase.RUNNING
    ready_ms: int = 0
    waiting_step: int = 0
    session_messages: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs, newest first. ``next_number``: where the next page begins; 0: there is none."""

    runs: tuple[RunRecord, ...]
    next_number: int


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events from ``first`` on, which is later than asked for where earlier ones of an ended run
    were given up. ``ended``: whether the run has; with ``more`` False then these are
    its last ones. ``last``: sequence number of its last event. ``create_ms``: when the run was
    made, which tells it from an earlier one of the same name."""

    first: int
    events: tuple[bytes, ...]
    more: bool
    ended: bool
    last: int
    create_ms: int

    @property
    def size(self) -> int:
        """Bytes of its events."""
        return sum(map(len, self.events))


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come. ``sequence``: number of its last event; ``create_ms``: when it was
    made."""

    sequence: int
    create_ms: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as stored. ``version`` is 1 when created and grows by one with every append."""

    session_id: str
    version: int
    message_count: int
    size_bytes: int
    create_ms: int
    update_ms: int
    expire_ms: int
    open_run_id: str


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Sessions, newest first. ``next_number`` as in :class:`RunPage`."""

    sessions: tuple[SessionRecord, ...]
    next_number: int


class RunUnknownError(Exception):
    """The tenant has no such run."""


class SessionUnknownError(Exception):
    """The tenant has no such session."""


class SessionBusyError(Exception):
    """A run has the session's turn. Nothing was done."""


class LeaseLostError(Exception):
    """The run is not held under this token (any more). Nothing was done."""


class NotWaitingError(Exception):
    """The run does not wait at this step. Nothing was done."""


class TooManyRunsError(Exception):
    """The tenant has as many counted open runs as the caller permits. Nothing was done."""


class LimitError(Exception):
    """A bound is reached; ``limit`` names its setting. Nothing was done."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class RunsFullError(LimitError):
    """The tenant's runs. ``retry_ms``: when an ended one goes that makes room; 0: not known."""

    def __init__(self, limit: str, retry_ms: int | str = 0) -> None:
        super().__init__(limit)
        self.retry_ms = int(retry_ms)


class RunFullError(LimitError):
    """One run; it can still be ended."""


class SessionsFullError(LimitError):
    """The tenant's sessions."""


class SessionFullError(LimitError):
    """One session."""
