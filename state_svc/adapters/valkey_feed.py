"""Hints of changes from Redis or Valkey, by pub/sub: one connection per server, which finds itself
again when it is lost.

Nothing here is needed for correctness. A follower hears ``again`` whenever hints may have been
missed: when its subscription is confirmed, which is after it asked for it, and after every
reconnection. What a frozen server costs is found by its missing pongs; what nobody finds costs a
follower its own slow poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisError

from state_svc.adapters.inbox import Inbox
from state_svc.adapters.valkey_link import ValkeyLink, text
from state_svc.adapters.valkey_run_index import ORDERS
from state_svc.adapters.valkey_text import parse, text_channel
from state_svc.run_ports import POKE, LiveText, Order, Poke

PING_S: Final = 1.0
SILENT_S: Final = 3.0  # without any answer the connection is given up
RETRY_S: Final = 0.1
ANYTHING_READY: Final = Order("", "")

Listener = Callable[[bytes | None], None]
"""Takes a message, or None: some may have been missed. Never blocks, never raises."""


@contextmanager
def _on_shared() -> Iterator[None]:
    """A call on a connection that another task may drop meanwhile. Under a timeout redis-py writes
    in a task of its own, which then finds the writer gone and says AttributeError."""
    try:
        yield
    except AttributeError as error:
        raise LostError("The connection was dropped.") from error


class Channels:
    """Subscriptions on one server."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link
        self._listeners: dict[str, set[Listener]] = {}
        self._connection: Any = None

    @asynccontextmanager
    async def listening(self, channel: str, listener: Listener) -> AsyncIterator[None]:
        """Calls ``listener`` for what comes on a channel, for the time of the block."""
        listeners = self._listeners.setdefault(channel, set())
        listeners.add(listener)
        try:
            await self._send("SUBSCRIBE", channel)  # again for a second one: its confirmation
            yield
        finally:
            listeners.discard(listener)
            if not listeners and self._listeners.get(channel) is listeners:
                del self._listeners[channel]
                await self._send("UNSUBSCRIBE", channel)

    async def run(self) -> None:
        """Receives until cancelled."""
        while True:
            with suppress(RedisError, OSError, TimeoutError):
                await self._receive()
            await asyncio.sleep(RETRY_S)

    async def _receive(self) -> None:
        connection = self._link.own_connection()
        try:
            await connection.connect()
            self._connection = connection
            if self._listeners:
                with _on_shared():
                    await connection.send_command("SUBSCRIBE", *self._listeners)
            loop = asyncio.get_running_loop()
            heard = loop.time()
            while loop.time() - heard < SILENT_S:
                with _on_shared():
                    message = await connection.read_response(timeout=PING_S)
                    if message is None:
                        # Without a subscription the answer is a plain PONG.
                        await connection.send_command("PING", check_health=False)
                        continue
                heard = loop.time()
                if isinstance(message, list):
                    self._pass_on(message)
        finally:
            self._connection = None
            await connection.disconnect(nowait=True)

    def _pass_on(self, message: list[Any]) -> None:
        kind, channel, *rest = message
        for listener in list(self._listeners.get(text(channel), ())):
            if kind == b"message":
                listener(rest[0])
            elif kind == b"subscribe":
                listener(None)

    async def _send(self, command: str, channel: str) -> None:
        """Without a connection there is nothing to say: the next one begins with all channels."""
        connection = self._connection
        if connection is not None and connection.is_connected:
            with suppress(RedisError, OSError, TimeoutError), _on_shared():
                await connection.send_command(command, channel, check_health=False)


class ValkeyFeed:
    """A :class:`state_svc.run_ports.RunFeed`."""

    def __init__(self, durable: ValkeyLink, volatile: ValkeyLink) -> None:
        self._durable = Channels(durable)
        self._volatile = self._durable if volatile is durable else Channels(volatile)
        self._inboxes: set[Inbox[Any]] = set()

    async def run_forever(self) -> None:
        """Receives until cancelled."""
        async with asyncio.TaskGroup() as group:
            for channels in {self._durable, self._volatile}:
                group.create_task(channels.run())

    def close(self) -> None:
        """Ends all that follow."""
        for inbox in list(self._inboxes):
            inbox.close()

    @asynccontextmanager
    async def run(self, tenant: str, run_id: str) -> AsyncIterator[AsyncIterator[Poke | LiveText]]:
        """See :class:`state_svc.run_ports.RunFeed`."""
        inbox: Inbox[Poke | LiveText] = Inbox(POKE)

        def heard(_: bytes | None) -> None:
            inbox.again()

        def read(message: bytes | None) -> None:
            if message is None:
                inbox.again()
            else:
                inbox.put(parse(message), len(message))

        self._inboxes.add(inbox)
        try:
            async with (
                self._durable.listening(f"sluice:{{{tenant}}}:run:{run_id}", heard),
                self._volatile.listening(text_channel(tenant, run_id), read),
            ):
                yield inbox
        finally:
            self._inboxes.discard(inbox)

    @asynccontextmanager
    async def orders(self) -> AsyncIterator[AsyncIterator[Order]]:
        """See :class:`state_svc.run_ports.RunFeed`."""
        inbox: Inbox[Order] = Inbox(ANYTHING_READY)

        def read(message: bytes | None) -> None:
            if message is None:
                inbox.again()
                return
            holder, tenant, run_id = text(message).split(" ")
            if holder == "*":
                inbox.again()  # any number of ready runs is one reason to ask
            else:
                inbox.put(Order(tenant, run_id, holder))

        self._inboxes.add(inbox)
        try:
            async with self._durable.listening(ORDERS, read):
                yield inbox
        finally:
            self._inboxes.discard(inbox)
