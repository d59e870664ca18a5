"""The one error type that crosses layers.

Owns :class:`SluiceError` and the words for making one. Pure: no gRPC, no protobuf, so that a
domain may raise it; ``sluice.status`` turns it into a ``google.rpc.Status`` and back.

A message is a fixed, safe text: it reaches clients as it stands. It never holds an exception's
text, a prompt, a key or a path. What varies goes into ``metadata``, ``fields`` and ``quotas``; a
name may stand in the message too, bounded and, where it is the client's own, quoted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class Code(IntEnum):
    """The gRPC status codes, by their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A request field that is wrong, by its path in the proto, e.g. ``sampling.temperature``."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """A quota that is used up: ``subject`` has it, e.g. ``tenant:dev``, ``metric`` is its name,
    e.g. ``requests_per_min``, and ``limit`` what it permits; 0 where that is not known."""

    subject: str
    description: str
    metric: str = ""
    limit: int = 0


class SluiceError(Exception):
    """An outcome that is not success, in the form in which a client may see it.

    ``reason`` is UPPER_SNAKE and stable: callers branch on it. ``retry_after_s`` says when trying
    again makes sense, in seconds; ``None`` means that the error says nothing about it.
    """

    def __init__(
        self,
        code: Code,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        fields: Sequence[FieldViolation] = (),
        quotas: Sequence[QuotaViolation] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = metadata if metadata is not None else _NO_METADATA
        self.retry_after_s = retry_after_s
        self.fields = tuple(fields)
        self.quotas = tuple(quotas)

    def __repr__(self) -> str:
        return f"SluiceError({self.code.name}, {self.reason}, {self.message!r})"

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason}: {self.message}"


def invalid(field: str, description: str, reason: str = "INVALID_FIELD") -> SluiceError:
    """INVALID_ARGUMENT for one field; the message names it."""
    return SluiceError(
        Code.INVALID_ARGUMENT,
        reason,
        f"{field}: {description}",
        fields=(FieldViolation(field, description),),
    )


def exhausted(
    reason: str,
    message: str,
    retry_after_s: float,
    *,
    metadata: Mapping[str, str] | None = None,
    quotas: Sequence[QuotaViolation] = (),
) -> SluiceError:
    """RESOURCE_EXHAUSTED: busy or over a quota; trying again helps after ``retry_after_s``."""
    return SluiceError(
        Code.RESOURCE_EXHAUSTED,
        reason,
        message,
        metadata=metadata,
        retry_after_s=retry_after_s,
        quotas=quotas,
    )


def unavailable(
    reason: str,
    message: str,
    retry_after_s: float | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> SluiceError:
    """UNAVAILABLE: draining, or no backend; nothing was done."""
    return SluiceError(
        Code.UNAVAILABLE, reason, message, metadata=metadata, retry_after_s=retry_after_s
    )


def not_found(
    reason: str, message: str, *, metadata: Mapping[str, str] | None = None, field: str = ""
) -> SluiceError:
    """NOT_FOUND. Permission is checked before existence. ``field``: of the request, that names
    it."""
    return SluiceError(
        Code.NOT_FOUND, reason, message, metadata=metadata, fields=_named(field, message)
    )


def permission_denied(
    reason: str, message: str, *, metadata: Mapping[str, str] | None = None, field: str = ""
) -> SluiceError:
    """PERMISSION_DENIED: known who asks, and they may not. ``field``: of the request, that
    says what."""
    return SluiceError(
        Code.PERMISSION_DENIED, reason, message, metadata=metadata, fields=_named(field, message)
    )


def _named(field: str, message: str) -> tuple[FieldViolation, ...]:
    return (FieldViolation(field, message),) if field else ()


def unauthenticated(
    reason: str, message: str, *, metadata: Mapping[str, str] | None = None
) -> SluiceError:
    """UNAUTHENTICATED: no valid key or credential."""
    return SluiceError(Code.UNAUTHENTICATED, reason, message, metadata=metadata)


def failed_precondition(
    reason: str, message: str, *, metadata: Mapping[str, str] | None = None
) -> SluiceError:
    """FAILED_PRECONDITION: the same request cannot succeed until something else changes."""
    return SluiceError(Code.FAILED_PRECONDITION, reason, message, metadata=metadata)


def deadline_exceeded(
    reason: str = "DEADLINE_EXCEEDED",
    message: str = "The deadline passed before the work was done.",
    *,
    metadata: Mapping[str, str] | None = None,
) -> SluiceError:
    """DEADLINE_EXCEEDED: no time is left, or less than the work needs."""
    return SluiceError(Code.DEADLINE_EXCEEDED, reason, message, metadata=metadata)


def internal(request_id: str) -> SluiceError:
    """INTERNAL with the fixed text; the log line of ``request_id`` holds what happened."""
    return SluiceError(
        Code.INTERNAL,
        "INTERNAL",
        "Internal error. The log of the service holds more under this request id.",
        metadata={"request_id": request_id},
    )
