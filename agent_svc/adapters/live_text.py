"""The text of a running model call, on its way to those who watch.

Nothing of it is durable and nothing waits for it: what the store does not take is left out, and the
end of the step brings the whole. The first text leaves at once; then what gathered leaves every
``interval_s`` at most, one message at a time. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sluice.errors import SluiceError


class LiveText:
    """Use as ``async with``; text that is left at the end is not sent."""

    def __init__(
        self, publish: Callable[[str, bool], Awaitable[None]], interval_s: Callable[[], float]
    ) -> None:
        self._publish = publish  # (text, replaces)
        self._interval_s = interval_s
        self._text: list[str] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def push(self, text: str) -> None:
        """Adds text."""
        if text:
            self._text.append(text)
            self._more.set()

    async def __aenter__(self) -> LiveText:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        replaces = True  # a call that was lost may have left text of this step
        while True:
            await self._more.wait()
            self._more.clear()
            text = "".join(self._text)
            self._text.clear()
            try:
                await self._publish(text, replaces)
                replaces = False
            except SluiceError:
                # Left out; a lease that is lost is found by the renewal. What comes next would
                # leave a hole behind what was left out, so it waits for the end of the step.
                return
            await asyncio.sleep(self._interval_s())
