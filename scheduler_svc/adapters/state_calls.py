"""Calls of the state service: one time limit, and its errors as this scheduler's clients hear them.

Stateless. What the state service refuses passes through, with the field that is wrong under the
name that it has here; a service that does not answer is UNAVAILABLE with STATE_UNREACHABLE: what
was asked may have happened, and all writes can be repeated with the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Final, TypeVar

import grpc.aio

from sluice import deadline
from sluice.errors import FieldViolation, SluiceError, failed_precondition, unavailable
from sluice.status import from_rpc_error

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 3.0  # below what an operator's command waits
RETRY_AFTER_S: Final = 1.0
AWAY: Final = ("PEER_UNAVAILABLE", "DEADLINE_EXCEEDED")
MARGIN_S: Final = 0.02  # for this layer, of a caller's deadline


def not_configured() -> SluiceError:
    """This scheduler has no state service."""
    return failed_precondition(
        "STATE_NOT_CONFIGURED",
        "this scheduler has no state service; set scheduler.state to its address",
    )


def unreachable() -> SluiceError:
    """The state service does not answer."""
    return unavailable("STATE_UNREACHABLE", "the state service does not answer now", RETRY_AFTER_S)


def time_limit_s() -> float:
    """Seconds that a call may take: what is left to the call that is served, at most the limit.
    Raises DEADLINE_EXCEEDED when that is nothing."""
    limit = deadline.current()
    if limit is None:
        return CALL_TIMEOUT_S
    left_s = limit.remaining(asyncio.get_running_loop().time())
    return deadline.child_budget(left_s, MARGIN_S, CALL_TIMEOUT_S, MARGIN_S)


async def answered(call: Awaitable[T], renamed: Mapping[str, str] | None = None) -> T:
    """The answer of a call; raises SluiceError. ``renamed``: fields (their beginnings) that have
    another name here."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise told(from_rpc_error(error), renamed or {}) from None


def told(error: SluiceError, renamed: Mapping[str, str]) -> SluiceError:
    """The error as a client hears it."""
    if error.reason in AWAY:
        return unreachable()
    return SluiceError(
        error.code,
        error.reason,
        _renamed(error.message, renamed),
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
        fields=[
            FieldViolation(_renamed(one.field, renamed), one.description) for one in error.fields
        ],
        quotas=error.quotas,
    )


def _renamed(text: str, renamed: Mapping[str, str]) -> str:
    for theirs, ours in renamed.items():
        if text.startswith(theirs):
            return ours + text.removeprefix(theirs)
    return text
