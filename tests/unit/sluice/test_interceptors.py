"""What a call's guard makes of the end of a handler."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sluice.interceptors import PEER_GONE, CallInterceptor

METHOD = "/test.Service/Watch"


class Left:
    """The context of a call whose client has left."""

    def time_remaining(self) -> None:
        """No deadline."""

    async def write(self, message: object) -> None:
        """Fails as the library's does."""
        raise type(PEER_GONE, (Exception,), {})('Failed "execute_batch": (<grpc operation>,)')

    async def abort(self, *_: object) -> None:
        """Nobody hears it."""


async def test_a_client_that_left_during_a_write_cancelled_and_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(_request: object, call_context: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(call_context.write(b"x"))

    interceptor = CallInterceptor({}, 1000)
    guarded = interceptor._guard(METHOD, handler, check_request=False)
    interceptor.counts.open[METHOD] = 0
    left: Any = Left()
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        await guarded(b"", left)
    assert interceptor.counts.ended == {(METHOD, "CANCELLED"): 1}
    assert not caplog.records
