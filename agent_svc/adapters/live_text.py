"""The text of a running model call, on its way to those who watch.

Nothing of it is durable and nothing waits for it: the end of the step brings the whole. The first
text leaves at once; then what gathered leaves every ``interval_s`` at most, one message at a time.
What the state service lost, or may not have heard while it was away, is sent again from the
beginning of the step. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sluice.errors import Code, SluiceError

AWAY_S: Final = 1.0  # to the next message after one without an answer
_AWAY: Final = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)


class LiveText:
    """Use as ``async with``; text that is left at the end is not sent. ``publish``: (text, whether
    it replaces what came before); True when all of it is wanted again."""

    def __init__(
        self, publish: Callable[[str, bool], Awaitable[bool]], interval_s: Callable[[], float]
    ) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._text: list[str] = []
        self._sent = 0  # of the pieces of the text
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
            text = "".join(self._text if replaces else self._text[self._sent :])
            self._sent, pause_s = len(self._text), self._interval_s()
            try:
                replaces = await self._publish(text, replaces)
            except SluiceError as error:
                if error.code not in _AWAY:
                    # Nobody takes it; a lease that is lost is found by the renewal. What comes next
                    # would leave a hole, so it waits for the end of the step.
                    return
                replaces, pause_s = True, AWAY_S
            if replaces:
                self._more.set()
            await asyncio.sleep(pause_s)
