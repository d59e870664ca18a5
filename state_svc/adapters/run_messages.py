"""Runs and sessions as messages, and what is common to their services."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.errors import invalid
from sluice.state.v1 import runs_pb2, sessions_pb2
from state_svc.domain.names import check_tenant, check_uuid
from state_svc.domain.run_values import Lease, RunRecord, SessionRecord

NUMBER_DIGITS_MAX = 15


def stored_run(record: RunRecord) -> runs_pb2.StoredRun:
    """A run."""
    return runs_pb2.StoredRun(
        run_id=record.run_id,
        tenant=record.tenant,
        phase=int(record.phase),  # type: ignore[arg-type]
        spec=record.spec,
        summary=record.summary,
        last_sequence=record.last_sequence,
        create_time=timestamp(record.create_ms),
        end_time=timestamp(record.end_ms) if record.end_ms else None,
        cancelled=record.cancelled,
        decision=record.decision,
        decision_step=record.decision_step,
        session_id=record.session_id,
        priority=record.priority,
        request_digest=record.request_digest,
    )


def stored_session(record: SessionRecord) -> sessions_pb2.StoredSession:
    """A session."""
    return sessions_pb2.StoredSession(
        session_id=record.session_id,
        version=record.version,
        message_count=record.message_count,
        size_bytes=record.size_bytes,
        create_time=timestamp(record.create_ms),
        update_time=timestamp(record.update_ms),
        expire_time=timestamp(record.expire_ms),
        open_run_id=record.open_run_id,
    )


def lease_of(lease: Any, field: str) -> Lease:
    """A lease, checked."""
    check_tenant(lease.tenant, f"{field}.tenant")
    check_uuid(lease.run_id, f"{field}.run_id")
    return Lease(lease.tenant, lease.run_id, lease.token)


def page_number(token: str) -> int:
    """The number in a page token; 0: none was given."""
    if not token:
        return 0
    if not token.isascii() or not token.isdigit() or len(token) > NUMBER_DIGITS_MAX:
        raise invalid("page_token", "must be of the previous response")
    return int(token)


def timestamp(when_ms: int) -> Timestamp:
    """Milliseconds since 1970 as a time."""
    return Timestamp(seconds=when_ms // 1000, nanos=when_ms % 1000 * 1_000_000)


def milliseconds(span_ms: int) -> Duration:
    """A span."""
    return Duration(seconds=span_ms // 1000, nanos=span_ms % 1000 * 1_000_000)
