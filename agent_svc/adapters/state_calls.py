"""Calls of the state service: one time limit, and its errors in this service's words. Stateless."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

import grpc.aio

from sluice.errors import SluiceError, unavailable
from sluice.status import from_rpc_error

T = TypeVar("T")

_AWAY: Final = ("PEER_UNAVAILABLE", "DEADLINE_EXCEEDED", "PEER_CANCELLED")


async def answered(call: Awaitable[T]) -> T:
    """The answer of a call; raises SluiceError. STATE_UNREACHABLE (UNAVAILABLE): what was asked may
    have happened, and can be repeated as it was."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise told(error) from None


def told(error: grpc.aio.AioRpcError) -> SluiceError:
    """The error of a call."""
    typed = from_rpc_error(error)
    if typed.reason in _AWAY:
        return unavailable("STATE_UNREACHABLE", "the state service does not answer now")
    return typed
