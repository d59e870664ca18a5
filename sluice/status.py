"""Errors on the wire: SluiceError to and from ``google.rpc.Status`` and a gRPC call's trailers.

Stateless. ErrorInfo (domain ``sluice``) is always present; RetryInfo, BadRequest and QuotaFailure
where the error has them. A retry delay is also an ASCII trailer ``retry-after`` in whole seconds,
rounded up, for HTTP callers behind the transcoder. Text from a peer that does not speak this form
is dropped, never passed on: it may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NoReturn, Protocol, cast

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from sluice.errors import Code, FieldViolation, QuotaViolation, SluiceError

DOMAIN = "sluice"
DETAILS_KEY = "grpc-status-details-bin"
RETRY_AFTER_KEY = "retry-after"

# gRPC sends trailers as HTTP/2 headers. Peers limit those to 8-16 KiB in all, and a status over
# the limit would arrive as a bare RST_STREAM; details are cut before that.
STATUS_BYTES_MAX = 4096
VIOLATIONS_MAX = 16
TEXT_CHARS_MAX = 512

_GRPC_CODES: dict[int, grpc.StatusCode] = {c.value[0]: c for c in grpc.StatusCode}

Metadata = tuple[tuple[str, str | bytes], ...]


class Abortable(Protocol):
    """The part of a servicer context that :func:`abort` needs."""

    async def abort(
        self, code: grpc.StatusCode, details: str = ..., trailing_metadata: Metadata = ...
    ) -> NoReturn: ...


def grpc_code(code: Code) -> grpc.StatusCode:
    """The grpc library's name of a code."""
    return _GRPC_CODES[code.value]


def to_status(error: SluiceError) -> status_pb2.Status:
    """The error as a message, at most :data:`STATUS_BYTES_MAX` bytes: violations beyond
    :data:`VIOLATIONS_MAX` and text beyond :data:`TEXT_CHARS_MAX` characters are cut; when it is
    still too long only ErrorInfo's reason and RetryInfo remain."""
    status = _compose(error, full=True)
    if status.ByteSize() > STATUS_BYTES_MAX:
        status = _compose(error, full=False)
    return status


def _compose(error: SluiceError, *, full: bool) -> status_pb2.Status:
    status = status_pb2.Status(code=error.code.value, message=error.message[:TEXT_CHARS_MAX])
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if full:
        for key, value in error.metadata.items():
            info.metadata[key] = value[:TEXT_CHARS_MAX]
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s))
        status.details.add().Pack(retry)
    if full and error.fields:
        bad = error_details_pb2.BadRequest()
        for field in error.fields[:VIOLATIONS_MAX]:
            bad.field_violations.add(
                field=field.field[:TEXT_CHARS_MAX], description=field.description[:TEXT_CHARS_MAX]
            )
        status.details.add().Pack(bad)
    if full and error.quotas:
        quota = error_details_pb2.QuotaFailure()
        for violation in error.quotas[:VIOLATIONS_MAX]:
            quota.violations.add(
                subject=violation.subject[:TEXT_CHARS_MAX],
                description=violation.description[:TEXT_CHARS_MAX],
                quota_metric=violation.metric[:TEXT_CHARS_MAX],
                quota_value=violation.limit,
            )
        status.details.add().Pack(quota)
    return status


def _duration(seconds: float) -> duration_pb2.Duration:
    nanos = round(max(0.0, seconds) * 1e9)
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def from_status(status: status_pb2.Status) -> SluiceError:
    """The error in a message. Without an ErrorInfo of this domain the sender is foreign: the
    reason is ``PEER_<CODE>`` and the sender's text is dropped."""
    code = _code(status.code)
    info: error_details_pb2.ErrorInfo | None = None
    retry_after_s: float | None = None
    fields: list[FieldViolation] = []
    quotas: list[QuotaViolation] = []
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            candidate = error_details_pb2.ErrorInfo()
            detail.Unpack(candidate)
            if candidate.domain == DOMAIN:
                info = candidate
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            delay = retry.retry_delay
            retry_after_s = (delay.seconds * 10**9 + delay.nanos) / 10**9
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            fields += [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif detail.Is(error_details_pb2.QuotaFailure.DESCRIPTOR):
            quota = error_details_pb2.QuotaFailure()
            detail.Unpack(quota)
            quotas += [
                # The stubs are older than the fields.
                QuotaViolation(v.subject, v.description, v.quota_metric, v.quota_value)  # type: ignore[attr-defined]
                for v in quota.violations
            ]
    if info is None:
        return foreign(code, retry_after_s)
    return SluiceError(
        code,
        info.reason,
        status.message,
        metadata=dict(info.metadata),
        retry_after_s=retry_after_s,
        fields=fields,
        quotas=quotas,
    )


# What is said of a status without details of ours; where no word is here, its code alone.
_FOREIGN: Final = {
    Code.UNAVAILABLE: (
        "PEER_UNAVAILABLE",
        "A service of the mesh, or one before it, does not answer now; ask again in a moment.",
    ),
    Code.RESOURCE_EXHAUSTED: (
        "PEER_RESOURCE_EXHAUSTED",
        "The message exceeds what a service on its way takes, or that is full.",
    ),
    Code.CANCELLED: ("PEER_CANCELLED", "The call was ended on its way; ask again."),
}


def foreign(code: Code, retry_after_s: float | None = None) -> SluiceError:
    """The error for a status that carries no details of ours: a proxy's, the library's own (no
    connection, message too large, deadline), or a foreign server's."""
    if code is Code.DEADLINE_EXCEEDED:
        return SluiceError(
            code, "DEADLINE_EXCEEDED", "The deadline passed before the work was done."
        )
    reason, text = _FOREIGN.get(
        code, (f"PEER_{code.name}", f"A service on the way answered {code.name} without a reason.")
    )
    return SluiceError(code, reason, text, retry_after_s=retry_after_s)


def _code(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:
        return Code.UNKNOWN


def trailers(error: SluiceError) -> Metadata:
    """The trailing metadata that carries an error's details."""
    details = (DETAILS_KEY, to_status(error).SerializeToString())
    if error.retry_after_s is None:
        return (details,)
    return (details, (RETRY_AFTER_KEY, str(max(0, math.ceil(error.retry_after_s)))))


async def abort(context: Abortable, error: SluiceError) -> NoReturn:
    """Ends a call with the error. Before the first message the reply is trailers only, so that a
    transcoder can still choose the HTTP status."""
    await context.abort(grpc_code(error.code), error.message[:TEXT_CHARS_MAX], trailers(error))


def from_rpc_error(error: grpc.aio.AioRpcError) -> SluiceError:
    """The error of a failed call."""
    return _from_trailers(error.code(), error.trailing_metadata())


async def from_call(call: grpc.aio.Call) -> SluiceError:
    """The status of a call that is over; waits for its end. Code OK when it succeeded."""
    return _from_trailers(await call.code(), await call.trailing_metadata())


def _from_trailers(status_code: grpc.StatusCode, metadata: object) -> SluiceError:
    code = _code(status_code.value[0])
    for key, value in cast("Iterable[tuple[str, str | bytes]]", metadata or ()):
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            if status.code == code.value:
                return from_status(status)
    return foreign(code)
