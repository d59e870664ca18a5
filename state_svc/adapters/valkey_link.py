"""The connection to one Redis or Valkey server: bounded in time and number, and watched.

Owns a pool of at most ``connections_max`` connections. Every call ends within ``timeout_s`` plus
the wait for a free connection, which is bounded by the same: a slow, frozen or lost server
costs a caller at most twice ``timeout_s`` and gathers no queue. A connection on which a call timed
out is closed, so that no late reply meets another call. Nothing is retried here: who asks decides.

While the server does not answer, :meth:`watch` asks it again every ``PROBE_S``; the health
component follows. No restart is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, Final, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from sluice import logs
from state_svc.ports import StoreFullError, StoreUnavailableError, TenantDeletedError

T = TypeVar("T")
Argument = str | bytes | int | float

PROBE_S: Final = 0.25
TIMEOUT_S: Final = 1.0
CONNECTIONS_MAX: Final = 32
_DELETED: Final = "TENANT_DELETED"  # tenant_guard.lua

log = logs.get(__name__)


def _is_of_deleted(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith(_DELETED)


def text(value: bytes | str) -> str:
    """A reply as text: the client hands out bytes, but its types allow both."""
    return value.decode() if isinstance(value, bytes) else value


class Script:
    """A Lua script of this package, by file names; several are one, in this order. ``frees``: it
    may run in a store whose memory is full, because it makes room; counting down takes none."""

    def __init__(self, *names: str, frees: bool = False) -> None:
        folder = resources.files("state_svc.adapters")
        text = "".join((folder / name).read_text(encoding="utf-8") for name in names)
        self.text = f"#!lua flags=allow-oom\n{text}" if frees else text
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class ValkeyLink:
    """A server, by URL (``redis://``, ``rediss://``, ``unix://``)."""

    def __init__(
        self, url: str, timeout_s: float = TIMEOUT_S, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        self.failures = 0  # calls that found no store
        self._timeout_s = timeout_s
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections_max,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            health_check_interval=0,
            # A new connection costs no round trip of its own: no HELLO, no names, no subscription
            # to maintenance. With those a store that is slow by 80 ms made the first call on it
            # 320 ms late, more than a request waits for its quota.
            protocol=2,
            driver_info=None,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
        self.client: Redis = Redis(connection_pool=self._pool)

    def own_connection(self) -> Any:
        """A connection beside the pool, not connected yet, for one who listens; theirs to close."""
        return self._pool.make_connection()  # type: ignore[no-untyped-call]

    async def run(self, call: Callable[[Redis], Awaitable[T]]) -> T:
        """``call(client)`` within the bound. Raises StoreUnavailableError."""
        with self._failing():
            async with asyncio.timeout(2 * self._timeout_s):
                return await call(self.client)

    async def script(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]
    ) -> Any:
        """Runs one script over keys of one hash tag. Raises StoreUnavailableError,
        TenantDeletedError."""
        # Not a pipeline of one: that costs a third more of this process's time.
        command = ("EVALSHA", script.sha, len(keys), *keys, *arguments)

        async def run(client: Redis) -> Any:
            execute: Any = client.execute_command  # without types
            try:
                return await execute(*command)
            except NoScriptError:
                await client.script_load(script.text)
                return await execute(*command)

        return await self.run(run)

    async def scripts(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Runs a script for each of the calls in one round trip, each atomic by itself. A store
        that does not know the script (new, or emptied) is taught it; then none had run. A call for
        a deleted tenant is a TenantDeletedError in its place."""

        async def run(client: Redis) -> list[Any]:
            replies = await self._pipeline(client, script, calls)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                await client.script_load(script.text)
                again = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                fresh = await self._pipeline(client, script, [calls[n] for n in again])
                for n, reply in zip(again, fresh, strict=True):
                    replies[n] = reply
            for n, reply in enumerate(replies):
                if isinstance(reply, Exception):
                    if not _is_of_deleted(reply):
                        raise reply
                    replies[n] = TenantDeletedError()
            return replies

        return await self.run(run)

    async def _pipeline(
        self,
        client: Redis,
        script: Script,
        calls: Sequence[tuple[Sequence[str], Sequence[Argument]]],
    ) -> list[Any]:
        async with client.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                pipeline.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
            return await pipeline.execute(raise_on_error=False)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OutOfMemoryError as error:
            raise StoreFullError(str(error)) from error
        except (RedisError, OSError, TimeoutError) as error:
            if _is_of_deleted(error):
                raise TenantDeletedError from error
            self.failures += 1
            raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error

    async def watch(
        self,
        prepare: Callable[[ValkeyLink], Awaitable[None]],
        up: Callable[[], None],
        down: Callable[[str], None],
    ) -> None:
        """Tells ``up`` and ``down`` how the server is, until cancelled. ``prepare`` runs whenever
        it is reached again, before ``up``; what it raises but StoreUnavailableError ends this."""
        healthy: bool | None = None
        while True:
            try:
                if healthy:
                    await self.run(lambda client: client.ping())
                else:
                    await prepare(self)
                    log.info("store reached")
                    up()
                healthy = True
            except StoreUnavailableError as error:
                if healthy is not False:
                    log.warning("store not reached", problem=str(error))
                    down("the store does not answer")
                healthy = False
            await asyncio.sleep(PROBE_S)

    async def close(self) -> None:
        """Closes every connection."""
        await self.client.aclose()
        await self._pool.disconnect()
