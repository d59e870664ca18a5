"""A tenant's sessions: conversations with a version, a bounded size, an idle time to live and at
most one turn at a time. The rules of ``sessions.lua`` and the memory store's implementation.

Pure: the store's time comes in as milliseconds.

Rules:

* A repeated request id is looked at before everything else, within 24 hours: who did not hear the
  answer gets it, whatever happened since. Who asks for something else under it is refused.
* While a run has the turn, nobody else appends or deletes, and the session does not run out.
  The end of the run frees the turn, with or without messages, in the same step as its last event.
* A session that is idle for its time to live is gone: unknown at once, its room given back with the
  next creation or append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from state_svc.domain.asked import asked_to_append, asked_to_create
from state_svc.domain.run_values import (
    DEDUP_MS,
    MESSAGE_OVERHEAD_BYTES,
    SESSION_OVERHEAD_BYTES,
    SessionBusyError,
    SessionFullError,
    SessionLimits,
    SessionPage,
    SessionRecord,
    SessionsFullError,
    SessionUnknownError,
)
from state_svc.ports import RequestIdReusedError, VersionConflictError

PAGE_BYTES: Final = 3 << 20


@dataclass(slots=True)
class _Session:
    session_id: str
    number: int
    ttl_ms: int
    create_ms: int
    update_ms: int
    expire_ms: int
    asked: str  # what its creation asked for
    version: int = 1
    messages: list[bytes] = field(default_factory=list)
    size: int = 0
    open_run: str = ""

    def record(self) -> SessionRecord:
        return SessionRecord(
            self.session_id,
            self.version,
            len(self.messages),
            self.size,
            self.create_ms,
            self.update_ms,
            self.expire_ms,
            self.open_run,
        )

    def alive(self, now: int) -> bool:
        return bool(self.open_run) or now < self.expire_ms


class SessionBook:
    """See the module's text."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._sessions: dict[str, _Session] = {}
        self._created: dict[str, tuple[int, str]] = {}  # by request id: when, which
        self._appended: dict[tuple[str, str], tuple[int, str, SessionRecord]] = {}
        self._number = 0

    def create(
        self, session_id: str, request_id: str, ttl_ms: int, messages: Sequence[bytes], now: int
    ) -> SessionRecord:
        """See :class:`state_svc.run_ports.SessionStore`."""
        asked = asked_to_create(ttl_ms, messages)
        at, known = self._created.get(request_id, (0, ""))
        if known and now - at < DEDUP_MS and known in self._sessions:
            session = self._sessions[known]
            if session.alive(now):
                if session.asked != asked:
                    raise RequestIdReusedError
                return session.record()
        self._drop_expired(now)
        if len(self._sessions) >= self._limits.sessions_max:
            raise SessionsFullError("sessions_max")
        session = _Session(session_id, self._number + 1, ttl_ms, now, now, now + ttl_ms, asked)
        self._check_room(session, messages, SESSION_OVERHEAD_BYTES)
        self._number += 1
        session.messages.extend(messages)
        session.size = size_of(messages)
        self._sessions[session_id] = session
        self._created[request_id] = (now, session_id)
        return session.record()

    def get(
        self, session_id: str, first: int, size: int, now: int
    ) -> tuple[SessionRecord, list[bytes]]:
        """See :class:`state_svc.run_ports.SessionStore`."""
        session = self._known(session_id, now)
        page: list[bytes] = []
        total = 0
        for message in session.messages[first : first + size]:
            total += len(message)
            if page and total > PAGE_BYTES:
                break
            page.append(message)
        return session.record(), page

    def page(self, size: int, before: int, now: int) -> SessionPage:
        """See :class:`state_svc.run_ports.SessionStore`."""
        found = [
            one
            for one in sorted(self._sessions.values(), key=lambda one: -one.number)
            if one.alive(now) and (not before or one.number < before)
        ]
        more = len(found) > size
        return SessionPage(
            tuple(one.record() for one in found[:size]), found[size - 1].number if more else 0
        )

    def append(
        self,
        session_id: str,
        messages: Sequence[bytes],
        expected_version: int | None,
        request_id: str,
        now: int,
    ) -> SessionRecord:
        """See :class:`state_svc.run_ports.SessionStore`."""
        session = self._known(session_id, now)
        asked = asked_to_append(messages, expected_version)
        at, earlier, answer = self._appended.get((session_id, request_id), (0, "", None))
        if answer is not None and now - at < DEDUP_MS:
            if earlier != asked:
                raise RequestIdReusedError
            return answer
        if session.open_run:
            raise SessionBusyError
        if expected_version is not None and expected_version != session.version:
            raise VersionConflictError
        self._drop_expired(now)
        self._add(session, messages, now)
        self._appended[session_id, request_id] = (now, asked, session.record())
        return session.record()

    def delete(self, session_id: str, now: int) -> None:
        """See :class:`state_svc.run_ports.SessionStore`."""
        if self._known(session_id, now).open_run:
            raise SessionBusyError
        del self._sessions[session_id]

    def begin_turn(self, session_id: str, run_id: str, now: int) -> None:
        """Gives the turn to a run. Raises SessionUnknownError, SessionBusyError."""
        session = self._known(session_id, now)
        if session.open_run:
            raise SessionBusyError
        session.open_run = run_id
        session.expire_ms = now + session.ttl_ms

    def check_turn(self, session_id: str, now: int) -> None:
        """Whether a turn could begin. Raises as :meth:`begin_turn`."""
        if self._known(session_id, now).open_run:
            raise SessionBusyError

    def end_turn(self, session_id: str, run_id: str, messages: Sequence[bytes], now: int) -> None:
        """Takes the turn back from a run, with its messages. Raises SessionFullError,
        SessionsFullError, and with messages SessionUnknownError; then nothing was done."""
        session = self._sessions.get(session_id)
        if session is None or session.open_run != run_id:
            if messages:
                raise SessionUnknownError
            return
        if messages:
            self._drop_expired(now)
            self._add(session, messages, now)
        session.open_run = ""
        session.expire_ms = now + session.ttl_ms

    def _known(self, session_id: str, now: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or not session.alive(now):
            raise SessionUnknownError
        return session

    def _add(self, session: _Session, messages: Sequence[bytes], now: int) -> None:
        self._check_room(session, messages, 0)
        session.messages.extend(messages)
        session.size += size_of(messages)
        session.version += 1
        session.update_ms = now
        session.expire_ms = now + session.ttl_ms

    def _check_room(self, session: _Session, messages: Sequence[bytes], overhead: int) -> None:
        limits, added = self._limits, size_of(messages)
        if len(session.messages) + len(messages) > limits.messages_max:
            raise SessionFullError("session_messages_max")
        if session.size + added > limits.session_bytes_max:
            raise SessionFullError("session_bytes_max")
        held = sum(SESSION_OVERHEAD_BYTES + one.size for one in self._sessions.values())
        if held + overhead + added > limits.tenant_bytes_max:
            raise SessionsFullError("sessions_bytes_max")

    def _drop_expired(self, now: int) -> None:
        gone = [name for name, one in self._sessions.items() if not one.alive(now)]
        for name in gone:
            del self._sessions[name]


def size_of(messages: Sequence[bytes]) -> int:
    """What messages or events count for, in bytes."""
    return sum(MESSAGE_OVERHEAD_BYTES + len(one) for one in messages)
