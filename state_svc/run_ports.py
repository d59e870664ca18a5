"""What the state service needs from a store for runs and sessions.

Every method is atomic for one tenant, may block on the network, and raises
:class:`state_svc.ports.StoreUnavailableError` within the store's own bounded time; what was asked
may then have happened or not. Every write can be repeated with the same ids. Another tenant's run
or session and an unknown one are the same: RunUnknownError, SessionUnknownError. Rules:
``state_svc/domain/run_book.py``, ``session_book.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from state_svc.domain.claim_order import ClaimRoom
from state_svc.domain.run_values import (
    Append,
    Claimed,
    EventPage,
    Lease,
    LeaseState,
    NewRun,
    Phase,
    Position,
    RunPage,
    RunRecord,
    SessionPage,
    SessionRecord,
)
from state_svc.domain.session_book import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ClaimBatch:
    """What was claimed. ``next_ms``: when something may be ready next, from now; 0: now."""

    runs: tuple[Claimed, ...]
    next_ms: int


class RunStore(Protocol):
    """Runs; durable store. An ended run is kept for ``RunLimits.kept_ms``."""

    async def create(self, run: NewRun) -> tuple[RunRecord, bool]:
        """Stores a run, ready. True: it was there already, by its id or by its request id within
        24 hours. Raises SessionUnknownError, SessionBusyError, TooManyRunsError, RunsFullError,
        RunFullError."""

    async def get(self, tenant: str, run_id: str) -> RunRecord:
        """The run with its spec."""

    async def page(
        self, tenant: str, size: int, *, before: int = 0, phase: Phase | None = None
    ) -> RunPage:
        """Runs below number ``before`` (0: from the newest), without spec and decision: at most
        ``size``, at most 3 MiB, and fewer when few of those looked at have the phase."""

    async def read(
        self, tenant: str, run_id: str, first: int, bytes_max: int = PAGE_BYTES
    ) -> EventPage:
        """Events from sequence number ``first`` on, which is 1 or more: at most ``bytes_max``
        together, at least one if there is one."""

    async def cancel(self, tenant: str, run_id: str) -> RunRecord:
        """Marks a run that has not ended; makes it ready if nobody holds it."""

    async def resume(
        self, tenant: str, run_id: str, step: int, decision: bytes, request_id: str
    ) -> RunRecord:
        """Stores a decision for a run that waits at ``step``, and makes it ready; the same request
        id changes nothing within 24 hours. Raises NotWaitingError; RequestIdReusedError when it
        brought another decision then."""

    async def claim(
        self, holder: str, runs_max: int, lease_ms: int, room: ClaimRoom | None = None
    ) -> ClaimBatch:
        """Ready runs and runs whose lease has lapsed, over all tenants, with their specs: at most
        3 MiB of them, at least one if there is one, and no more than there is ``room`` for. With
        ``endings_max`` those that have only to be ended come first and alone."""

    async def renew(self, leases: Sequence[Lease], lease_ms: int) -> Sequence[LeaseState]:
        """Extends leases, from now. One that lapsed and that nobody took is held again, unless the
        tenant has no room for it among its active runs any more: then it is given back."""

    async def append(self, append: Append) -> int:
        """Appends; returns the last sequence number. The same append id as the run's last one
        answers as before. Raises LeaseLostError, VersionConflictError, RunFullError (never for an
        end), SessionUnknownError, SessionFullError, SessionsFullError."""

    async def position(self, lease: Lease) -> Position:
        """How far the run has come. Raises LeaseLostError."""


@dataclass(frozen=True, slots=True)
class LiveText:
    """Text of a running model call. ``sequence``: the run's last event when it was published, so
    that text of a call whose result is stored is told from text of the next one. ``offset``: where
    in the text of this ``version`` it begins, in bytes of UTF-8; a version is one run of text that
    nothing replaces. ``create_ms``: when the run was made, as in ``EventPage``."""

    version: int
    sequence: int
    step: int
    offset: int
    text: str
    create_ms: int


TEXT_BYTES_MAX: Final = 1 << 20
"""What is kept of a text."""


class TextStore(Protocol):
    """Live text, kept for minutes where it is published. Nothing of it is durable."""

    async def publish(
        self, lease: Lease, at: Position, step: int, text: str, *, replaces: bool
    ) -> bool:
        """Adds text, or begins anew with another step or token or when it ``replaces``. A smaller
        token than the last one changes nothing. Beyond :data:`TEXT_BYTES_MAX` it passes on and
        keeps no more. False: what it was to be added to is not known here any more."""

    async def whole(self, tenant: str, run_id: str) -> LiveText | None:
        """The text of the current version from offset 0: all of it where it is published, elsewhere
        as it was moments ago."""


class Poke:
    """Something may have changed: read again."""

    __slots__ = ()


POKE = Poke()


class RunFeed(Protocol):
    """Hints of what changed, as soon as it did. A hint may be missing: who follows looks again by
    itself now and then. Never raises because the store is gone."""

    def run(
        self, tenant: str, run_id: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Poke | LiveText]]:
        """Hints and text of one run. ``Poke`` also when hints or text may have been missed."""

    def orders(self) -> AbstractAsyncContextManager[AsyncIterator[Order]]:
        """Orders for those who hold runs, of all tenants."""


@dataclass(frozen=True, slots=True)
class Order:
    """``holder`` is to cancel the run; without one, the run became ready."""

    tenant: str
    run_id: str
    holder: str = ""


class SessionStore(Protocol):
    """Sessions; durable store. One that is idle for its time to live is gone."""

    async def create(
        self, tenant: str, session_id: str, request_id: str, ttl_ms: int, messages: Sequence[bytes]
    ) -> SessionRecord:
        """Creates a session; the same request id within 24 hours answers with the one that it made,
        as it is now. Raises SessionsFullError, SessionFullError; RequestIdReusedError when it asked
        for another one then."""

    async def get(
        self, tenant: str, session_id: str, first: int, size: int
    ) -> tuple[SessionRecord, Sequence[bytes]]:
        """A session and at most ``size`` messages from number ``first`` (from 0) on, at most 3 MiB
        together, at least one if there is one and ``size`` is not 0."""

    async def page(self, tenant: str, size: int, *, before: int = 0) -> SessionPage:
        """Sessions below number ``before`` (0: from the newest)."""

    async def append(
        self,
        tenant: str,
        session_id: str,
        messages: Sequence[bytes],
        expected_version: int | None,
        request_id: str,
    ) -> SessionRecord:
        """Appends all or none. The same request id within 24 hours has the same effect and answer.
        Raises SessionBusyError, VersionConflictError, SessionFullError, SessionsFullError;
        RequestIdReusedError when it appended something else then."""

    async def delete(self, tenant: str, session_id: str) -> None:
        """Deletes a session. Raises SessionBusyError."""
