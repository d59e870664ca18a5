"""``SessionService``: checks what comes in and hands it to the store. Stateless."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from sluice.errors import invalid
from sluice.state.v1 import sessions_pb2, sessions_pb2_grpc
from state_svc.adapters.run_messages import page_number, stored_session
from state_svc.adapters.store_errors import store_errors
from state_svc.domain.names import check_request_id, check_tenant, check_uuid
from state_svc.run_ports import SessionStore

TTL_MS: Final = (1_000, 90 * 86_400_000)
TTL_DEFAULT_MS: Final = 7 * 86_400_000
MESSAGES_MAX: Final = 256
MESSAGES_BYTES_MAX: Final = 4 << 20
PAGE_MESSAGES_MAX: Final = 1_000
PAGE_MAX: Final = 100


class SessionServicer(sessions_pb2_grpc.SessionServiceServicer):
    """See the proto."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def CreateSession(
        self, request: sessions_pb2.CreateSessionRequest, context: Any
    ) -> sessions_pb2.CreateSessionResponse:
        """Creates a session."""
        check_tenant(request.tenant, "tenant")
        check_request_id(request.request_id, "request_id")
        _check_messages(request.messages)
        ttl_ms, (least, most) = TTL_DEFAULT_MS, TTL_MS
        if request.HasField("ttl"):
            ttl_ms = request.ttl.ToMilliseconds()
        if not least <= ttl_ms <= most:
            raise invalid("ttl", "must be 1 s to 90 days")
        with store_errors():
            record = await self._store.create(
                request.tenant, str(uuid.uuid4()), request.request_id, ttl_ms, request.messages
            )
        return sessions_pb2.CreateSessionResponse(session=stored_session(record))

    async def GetSession(
        self, request: sessions_pb2.GetSessionRequest, context: Any
    ) -> sessions_pb2.GetSessionResponse:
        """Reads a session."""
        _check_session(request)
        if request.page_size > PAGE_MESSAGES_MAX:
            raise invalid("page_size", f"at most {PAGE_MESSAGES_MAX}")
        with store_errors():
            record, messages = await self._store.get(
                request.tenant, request.session_id, request.from_message, request.page_size
            )
        return sessions_pb2.GetSessionResponse(session=stored_session(record), messages=messages)

    async def ListSessions(
        self, request: sessions_pb2.ListSessionsRequest, context: Any
    ) -> sessions_pb2.ListSessionsResponse:
        """Lists sessions."""
        check_tenant(request.tenant, "tenant")
        if not 1 <= request.page_size <= PAGE_MAX:
            raise invalid("page_size", f"must be 1 to {PAGE_MAX}")
        before = page_number(request.page_token)
        with store_errors():
            page = await self._store.page(request.tenant, request.page_size, before=before)
        return sessions_pb2.ListSessionsResponse(
            sessions=map(stored_session, page.sessions),
            next_page_token=str(page.next_number or ""),
        )

    async def AppendSession(
        self, request: sessions_pb2.AppendSessionRequest, context: Any
    ) -> sessions_pb2.AppendSessionResponse:
        """Appends messages."""
        _check_session(request)
        check_request_id(request.request_id, "request_id")
        if not request.messages:
            raise invalid("messages", "at least one")
        _check_messages(request.messages)
        expected = request.expected_version if request.HasField("expected_version") else None
        if expected is not None and expected >= 1 << 53:
            raise invalid("expected_version", "is none")
        with store_errors():
            record = await self._store.append(
                request.tenant, request.session_id, request.messages, expected, request.request_id
            )
        return sessions_pb2.AppendSessionResponse(session=stored_session(record))

    async def DeleteSession(
        self, request: sessions_pb2.DeleteSessionRequest, context: Any
    ) -> sessions_pb2.DeleteSessionResponse:
        """Deletes a session."""
        _check_session(request)
        with store_errors():
            await self._store.delete(request.tenant, request.session_id)
        return sessions_pb2.DeleteSessionResponse()


def _check_session(request: Any) -> None:
    check_tenant(request.tenant, "tenant")
    check_uuid(request.session_id, "session_id")


def _check_messages(messages: Sequence[bytes]) -> None:
    if len(messages) > MESSAGES_MAX or sum(map(len, messages)) > MESSAGES_BYTES_MAX:
        raise invalid("messages", f"at most {MESSAGES_MAX}, {MESSAGES_BYTES_MAX} bytes together")
