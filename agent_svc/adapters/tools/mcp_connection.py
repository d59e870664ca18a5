"""The connection to one MCP server: opened, kept, and opened again.

One task per server owns the session, because the library's contexts end in the task that began
them; calls come from other tasks. It lists the server's tools after opening, when the server says
that they changed, when a call ran into trouble and every five minutes, but not while calls are in
progress. A listing that fails ends the session, and a new one is tried with growing delays. A call
that finds no session hastens the next attempt and waits for its outcome.

What a server asks of its clients (sampling, elicitation, roots) is refused by the library, which
does not announce these abilities.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final

import anyio
import mcp_types as types
from mcp import MCPError
from mcp.client import Client, ClientSession, IncomingMessage, Transport
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

from agent_svc.adapters.tools.mcp_http import NOT_ALLOWED, code_of
from agent_svc.ports import ToolError
from sluice import __version__, logs

_log = logs.get(__name__)

CONNECT_S: Final = 30.0  # to open: starting a process, negotiating and listing
ANSWER_S: Final = 10.0  # for the answer to one request that is no call
PAGES_MAX: Final = 16
LISTED_MAX: Final = 1024  # tools over all pages
REFRESH_S: Final = 300.0
LISTING_GAP_S: Final = 1.0  # between two listings, whatever the server notifies
IDLE_S: Final = 900.0  # without a use; then it is closed until the next one
DELAY_FIRST_S: Final = 0.5
DELAY_MAX_S: Final = 30.0
STABLE_S: Final = 60.0  # a session that lasted so long was sound: delays begin anew
CLOSE_S: Final = 5.0


class NotConnectedError(Exception):
    """There is no session, and the last attempt to open one failed."""


class McpConnection:
    """``transport`` makes the streams of a new session. ``listed`` hears each new listing.
    ``busy``: whether calls are in progress."""

    def __init__(
        self,
        name: str,
        transport: Callable[[], Transport],
        listed: Callable[[Sequence[types.Tool]], Awaitable[None]],
        busy: Callable[[], bool],
    ) -> None:
        self.name = name
        self._transport = transport
        self._listed = listed
        self._busy = busy
        # Why there is no session; for operators. Who reads it has asked for one.
        self.problem = "the server has not answered yet; a run waits for it"
        self._session: ClientSession | None = None
        self._opened = False  # whether the present or last attempt led to a session
        self._opened_at = self._used_at = 0.0
        self._wake = asyncio.Event()
        self._broken = False  # the session is of no use, the server is sound
        self._gone = False  # the server has ended
        self._resting = False  # between two attempts
        self._closing = False
        self._attempt: asyncio.Future[None] | None = None  # done when it has its outcome
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    async def session(self) -> ClientSession:
        """The session. Waits for an attempt to open one, at most CONNECT_S and a second. Raises
        NotConnectedError."""
        self._used_at = asyncio.get_running_loop().time()
        if self._session is None and not self._closing:
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run())
            if self._resting:
                self._wake.set()
            if self._attempt is None:
                self._attempt = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._attempt)
        if self._session is None:
            raise NotConnectedError
        return self._session

    def suspect(self) -> None:
        """Something went wrong in a call: asks the server for its tools, and opens a new session
        when it does not answer."""
        self._wake.set()

    @property
    def unused_s(self) -> float:
        """Seconds since somebody asked for the session; without end when it is to be closed."""
        return asyncio.get_running_loop().time() - self._used_at

    def rest(self) -> None:
        """Closes the session as an idle one, unless it is used meanwhile; a use opens it again."""
        self._used_at = float("-inf")
        self._wake.set()

    def broken(self, session: ClientSession) -> None:
        """This session is of no use any more: opens a new one."""
        if session is self._session:
            self._broken, self._session = True, None
            self._wake.set()

    def gone(self) -> None:
        """The server has ended, which a transport may notice."""
        self._gone, self._session = True, None
        self._wake.set()

    async def list_again(self, session: ClientSession) -> None:
        """Lists now, for a call that the server refused because the listing is old."""
        await self._listed(await _list(session))

    async def close(self) -> None:
        """Ends the session, and with it a child process. Idempotent; at most CLOSE_S."""
        self._closing = True
        self._wake.set()
        task = self._task
        if task is not None:
            await asyncio.wait([task], timeout=CLOSE_S)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        failures = 0
        try:
            while not self._closing and not self._idle:
                try:
                    await self._serve()
                    self._broken = False
                except Exception as error:
                    # Of a server's making, whatever its type: no text of it is logged.
                    lasted_s = asyncio.get_running_loop().time() - self._opened_at
                    failures = 1 if lasted_s > STABLE_S else failures + 1
                    self._session, self._broken, self._gone = None, False, False
                    self._failed(error, failures)
                    if not self._opened:
                        self._tried()
                    delay_s = min(DELAY_MAX_S, DELAY_FIRST_S * 2.0 ** min(failures - 1, 16))
                    self._resting = True
                    await self._until_woken(delay_s * random.uniform(0.5, 1.0))
                    self._resting = False
        finally:
            self._session, self._task = None, None
            self._tried()

    def _failed(self, error: Exception, failures: int) -> None:
        """Told once, until something is different."""
        problem = _problem(error)
        if self._opened or problem != self.problem:
            _log.warning(
                "no session with a tool server",
                server=self.name,
                problem=problem,
                error=type(error).__name__,
                failures=failures,
            )
        self.problem = problem

    @property
    def _idle(self) -> bool:
        return self.unused_s > IDLE_S and not self._busy()

    @property
    def _ends(self) -> bool:
        return self._closing or self._broken or self._gone

    def _tried(self) -> None:
        """Tells those who wait that an attempt has its outcome."""
        if self._attempt is not None:
            self._attempt.set_result(None)
            self._attempt = None

    async def _serve(self) -> None:
        """One session from its opening to its end. Raises what ended it, if that was no decision
        of this side."""
        self._gone = self._opened = False
        self._opened_at = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_S):
                client = await stack.enter_async_context(self._client())
                await self._listed(await _list(client.session))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._listen, client)
            self._session, self._opened = client.session, True
            _log.info(
                "session with a tool server", server=self.name, version=client.protocol_version
            )
            self._tried()
            while True:
                await self._until_woken(REFRESH_S)
                if self._gone:
                    raise ConnectionError("the server ended")
                if self._closing or self._broken or self._idle:
                    break
                if self._busy():
                    # A server that does one thing at a time cannot answer now, and a new session
                    # would lose the calls.
                    self._wake.set()
                    continue
                await self._listed(await _list(client.session))
            self._session = None
            tasks.cancel_scope.cancel()

    def _client(self) -> Client:
        return Client(
            self._transport(),
            read_timeout_seconds=ANSWER_S,
            message_handler=self._noticed,
            client_info=types.Implementation(name="sluice", version=__version__),
            cache=None,
        )

    async def _noticed(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._wake.set()

    async def _listen(self, client: Client) -> None:
        """Servers of the stateless protocol tell of changes only who asks for it."""
        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self._wake.set()
            except (ListenNotSupportedError, MCPError):
                return  # it tells by itself, or not at all
            except (SubscriptionLost, TimeoutError):
                pass
            await asyncio.sleep(DELAY_MAX_S)
            self._wake.set()  # for what changed meanwhile

    async def _until_woken(self, seconds: float) -> None:
        """Waits LISTING_GAP_S at least, unless it closes or the session broke."""
        loop = asyncio.get_running_loop()
        earliest = loop.time() + min(LISTING_GAP_S, seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()
        while not self._ends and (left_s := earliest - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            self._wake.clear()


async def _list(session: ClientSession) -> list[types.Tool]:
    """The whole listing, as far as it is taken. Raises what the library raises."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    for _ in range(PAGES_MAX):
        page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) >= LISTED_MAX:
            break
    return tools[:LISTED_MAX]


def _problem(error: BaseException) -> str:
    """A fixed text for what kept a session from being opened or ended it."""
    for one in _leaves(error):
        if isinstance(one, ToolError):
            return one.message
        if isinstance(one, MCPError) and code_of(one) == NOT_ALLOWED:
            return "its address is not allowed"
        if isinstance(one, FileNotFoundError | PermissionError):
            return "its command cannot be started"
    return "the server does not answer"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
