"""Sessions at the public service: authorized here, kept by the state service.

The right is checked before anything that depends on what exists. Whose session it is, the state
service decides by the tenant: another tenant's and an unknown one are alike.
"""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from scheduler_svc.adapters.identity import Identity
from scheduler_svc.adapters.requests import check_page_token, check_uuid, page_size, request_id_of
from scheduler_svc.adapters.run_request import check_sessions
from scheduler_svc.adapters.state_calls import answered, not_configured, time_limit_s
from sluice.common.v1 import input_pb2
from sluice.errors import invalid
from sluice.input_rules import check_message
from sluice.scheduler.v1 import data_pb2, scheduler_pb2_grpc
from sluice.state.v1 import sessions_pb2, sessions_pb2_grpc

MESSAGES_MAX: Final = 256  # of one call, by the state service's contract
MESSAGES_BYTES_MAX: Final = 2 << 20
MESSAGES_PAGE_DEFAULT: Final = 100
MESSAGES_PAGE_MAX: Final = 1_000
TTL_MAX_S: Final = 90 * 86_400.0

Context = grpc.aio.ServicerContext[Any, Any]


class SessionsApi(scheduler_pb2_grpc.SchedulerServiceServicer):
    """See the module's docstring. ``channel``: to the state service; ``None``: there is none."""

    def __init__(self, identity: Identity, channel: grpc.aio.Channel | None) -> None:
        self._identity = identity
        self._stub: Any = None if channel is None else sessions_pb2_grpc.SessionServiceStub(channel)

    async def CreateSession(
        self, request: data_pb2.CreateSessionRequest, context: Context
    ) -> data_pb2.CreateSessionResponse:
        """See scheduler.proto."""
        tenant = self._permitted(context)
        message = sessions_pb2.CreateSessionRequest(
            tenant=tenant,
            request_id=request_id_of(request.request_id),
            messages=_serialized(request.messages),
        )
        if request.HasField("ttl"):
            ttl_s = request.ttl.seconds + request.ttl.nanos / 1e9
            if not 1.0 <= ttl_s <= TTL_MAX_S:
                raise invalid("ttl", "must be 1 s to 90 days")
            message.ttl.CopyFrom(request.ttl)
        done = await answered(self._stub.CreateSession(message, timeout=time_limit_s()))
        return data_pb2.CreateSessionResponse(session=_shown(done.session))

    async def GetSession(
        self, request: data_pb2.GetSessionRequest, context: Context
    ) -> data_pb2.GetSessionResponse:
        """See scheduler.proto."""
        tenant = self._permitted(context)
        check_uuid(request.session_id, "session_id")
        if request.page_size > MESSAGES_PAGE_MAX:
            raise invalid("page_size", f"must be 1 to {MESSAGES_PAGE_MAX}")
        message = sessions_pb2.GetSessionRequest(
            tenant=tenant,
            session_id=request.session_id.lower(),
            from_message=request.from_message,
            page_size=request.page_size or MESSAGES_PAGE_DEFAULT,
        )
        found = await answered(self._stub.GetSession(message, timeout=time_limit_s()))
        return data_pb2.GetSessionResponse(
            session=_shown(found.session),
            messages=map(input_pb2.ChatMessage.FromString, found.messages),
        )

    async def ListSessions(
        self, request: data_pb2.ListSessionsRequest, context: Context
    ) -> data_pb2.ListSessionsResponse:
        """See scheduler.proto."""
        tenant = self._permitted(context)
        check_page_token(request.page_token)
        message = sessions_pb2.ListSessionsRequest(
            tenant=tenant, page_size=page_size(request.page_size), page_token=request.page_token
        )
        found = await answered(self._stub.ListSessions(message, timeout=time_limit_s()))
        return data_pb2.ListSessionsResponse(
            sessions=map(_shown, found.sessions), next_page_token=found.next_page_token
        )

    async def AppendSession(
        self, request: data_pb2.AppendSessionRequest, context: Context
    ) -> data_pb2.AppendSessionResponse:
        """See scheduler.proto."""
        tenant = self._permitted(context)
        check_uuid(request.session_id, "session_id")
        request_id = request_id_of(request.request_id)
        if not request.messages:
            raise invalid("messages", "at least one is needed")
        message = sessions_pb2.AppendSessionRequest(
            tenant=tenant,
            session_id=request.session_id.lower(),
            messages=_serialized(request.messages),
            request_id=request_id,
        )
        if request.HasField("expected_version"):
            message.expected_version = request.expected_version
        done = await answered(self._stub.AppendSession(message, timeout=time_limit_s()))
        return data_pb2.AppendSessionResponse(session=_shown(done.session))

    async def DeleteSession(
        self, request: data_pb2.DeleteSessionRequest, context: Context
    ) -> data_pb2.DeleteSessionResponse:
        """See scheduler.proto."""
        tenant = self._permitted(context)
        check_uuid(request.session_id, "session_id")
        message = sessions_pb2.DeleteSessionRequest(
            tenant=tenant, session_id=request.session_id.lower()
        )
        await answered(self._stub.DeleteSession(message, timeout=time_limit_s()))
        return data_pb2.DeleteSessionResponse()

    def _permitted(self, context: Context) -> str:
        """The name of a tenant that may keep sessions."""
        tenant = self._identity.tenant(context)
        check_sessions(tenant)
        if self._stub is None:
            raise not_configured()
        return tenant.name


def _serialized(messages: Any) -> list[bytes]:
    if len(messages) > MESSAGES_MAX:
        raise invalid("messages", f"at most {MESSAGES_MAX} are allowed")
    for index, message in enumerate(messages):
        check_message(message, f"messages[{index}]")
    serialized = [message.SerializeToString() for message in messages]
    if sum(map(len, serialized)) > MESSAGES_BYTES_MAX:
        raise invalid("messages", f"at most {MESSAGES_BYTES_MAX} bytes are allowed")
    return serialized


def _shown(stored: sessions_pb2.StoredSession) -> data_pb2.Session:
    session = data_pb2.Session(
        session_id=stored.session_id, version=stored.version, message_count=stored.message_count
    )
    for name in ("create_time", "update_time", "expire_time"):
        if stored.HasField(name):
            getattr(session, name).CopyFrom(getattr(stored, name))
    return session
