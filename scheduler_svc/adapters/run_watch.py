"""Watching a run: its events from a sequence number on, then as they come, until it ends.

A watch reads the state service's and writes to one client, holding one message: a client that does
not read holds up only itself, and is ended after the write limit; such clients come back one by one
(``domain/slow_watchers.py``). What is being written is counted, for its tenant and for the process
(``run_watch_bytes_max``): a watch that finds no room lets its message go and reads it again when
there is. When the state service goes away
the watch is taken up again behind the last event that was passed on, with a growing, jittered
pause; nothing durable is lost or told twice. Watches are bounded, those of one tenant too. When the
process goes down they end with DRAINING, and go on by another scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from scheduler_svc.adapters.run_records import ENDED, set_event, set_text
from scheduler_svc.adapters.state_calls import answered, time_limit_s, told, unreachable
from scheduler_svc.domain.slow_watchers import SlowWatchers
from sluice import deadline
from sluice.channels import ending
from sluice.errors import Code, SluiceError, deadline_exceeded, exhausted, unavailable
from sluice.fair_rooms import FairRooms
from sluice.scheduler.v1 import runs_pb2
from sluice.state.v1 import runs_pb2 as stored_pb2
from sluice.state.v1 import runs_pb2_grpc
from sluice.status import from_rpc_error

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
AWAY_LIMIT_S: Final = 30.0
"""A watch waits so long for a state service that is away."""

TENANT_SHARE: Final = 0.25
"""Of all watches, those of one tenant."""

RETRY_AFTER_S: Final = 1.0
ROOM_RETRY_S: Final = 5.0
SMALL_BYTES: Final = 4096
"""A message up to this size is not counted: ordinary steps of an agent never wait."""

WINDOW_BYTES: Final = 64 << 10
"""What the state service may send unread on one watch."""

_AGAIN: Final = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED)

Response = runs_pb2.RunAgentResponse | runs_pb2.WatchRunResponse
"""What an event is written in; made at once, as a copy of an event of megabytes costs as much."""

Write = Callable[[Any], Awaitable[object]]


@dataclass(slots=True)
class _Place:
    """How far a watch has come. ``sequence``: of the last durable event that was passed on."""

    tenant: str
    run_id: str
    response: type[Response]
    sequence: int
    over: bool = False
    room: int = 0  # bytes that it has waited for

    def told(self, message: stored_pb2.WatchRunResponse) -> Response:
        """What the client is told; the watch has come so far then."""
        response = self.response()
        if message.HasField("text"):
            set_text(response.event, self.run_id, self.sequence, message.text)
        else:
            set_event(response.event, self.run_id, message.entry)
        self.sequence = response.event.sequence
        self.over = response.event.HasField("ended")
        return response


class _NoRoomError(Exception):
    """A message of so many bytes has to wait."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class RunWatches:
    """See the module's docstring. ``channel``: to the state service, for watches alone."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        write_limit_s: float,
        watches_max: int,
        bytes_max: int = 32 << 20,
    ) -> None:
        self._channel = channel
        self._stub: Any = runs_pb2_grpc.RunServiceStub(channel)
        self._write_limit_s = write_limit_s
        self._watches_max = watches_max
        self._tenant_max = max(1, int(TENANT_SHARE * watches_max))
        self._room = FairRooms(bytes_max, int(TENANT_SHARE * bytes_max), first_always=True)
        self.slow = SlowWatchers()
        self._open: dict[asyncio.Task[Any], str] = {}
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def open(self) -> int:
        """Watches now."""
        return len(self._open)

    def held(self, tenant: str) -> int:
        """Bytes that are being written to a tenant's watchers."""
        return self._room.held(tenant)

    async def forward(
        self,
        tenant: str,
        run_id: str,
        first: int,
        response: type[Response],
        write: Write,
        *,
        once: bool = False,
    ) -> None:
        """Passes events on, each in a ``response``, from sequence number ``first`` (0 and 1: from
        the first) to the end of the run; with ``once`` one event. Raises the state service's
        refusals (NOT_FOUND), at the deadline DEADLINE_EXCEEDED, and what the docstring above
        says."""
        place = _Place(tenant, run_id, response, max(first, 1) - 1)
        task = asyncio.current_task()
        assert task is not None
        self._enter(task, tenant, once=once)
        try:
            async with aclosing(self._events(place)) as events:
                async for message in events:
                    await self._write(message, write, tenant)
                    del message  # here and below: not to be held until the next one comes
                    if once:
                        return
        except SluiceError as error:
            error.metadata = {**error.metadata, "last_sequence": str(place.sequence)}
            raise
        except asyncio.CancelledError:
            if self._draining and not task.uncancel():
                raise _draining(place.sequence) from None  # by drain(), not by the client
            raise
        finally:
            self._room.leave(tenant, place.room)
            self._leave(task, tenant)

    def close(self) -> None:
        """Takes no more watches."""
        self._closed = True

    async def drain(self, within_s: float) -> None:
        """Ends all watches, whose runs may end in order before."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        self._draining = True
        for task in self._open:
            task.cancel()

    async def disconnect(self) -> None:
        """Closes the channel, after the last watch."""
        await self._channel.close()

    def check(self, tenant: str, *, once: bool = False) -> None:
        """Raises when one more watch would be refused: UNAVAILABLE, RESOURCE_EXHAUSTED."""
        if self._closed:
            raise _draining(0)
        if len(self._open) >= self._watches_max or self._counts[tenant] >= self._tenant_max:
            raise exhausted("TOO_MANY_STREAMS", "too many runs are watched", RETRY_AFTER_S)
        wait_s = 0.0 if once else self.slow.wait_s(tenant, _now())
        if wait_s:
            why = "watches of the tenant were ended because nobody read them: begin them one by one"
            raise exhausted("TOO_MANY_STREAMS", why, wait_s)

    def _enter(self, task: asyncio.Task[Any], tenant: str, *, once: bool) -> None:
        self.check(tenant, once=once)
        if not once:
            self.slow.began(tenant, _now())
        self._idle.clear()
        self._open[task] = tenant
        self._counts[tenant] += 1

    def _leave(self, task: asyncio.Task[Any], tenant: str) -> None:
        del self._open[task]
        if not self._open:
            self._idle.set()
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    async def _write(self, message: Response, write: Write, tenant: str) -> None:
        try:
            async with asyncio.timeout(self._write_limit_s):
                await write(message)
        except TimeoutError:
            self.slow.ended(tenant, _now())
            raise SluiceError(
                Code.RESOURCE_EXHAUSTED,
                "SLOW_CONSUMER",
                f"the client did not read for {self._write_limit_s:.0f} s",
            ) from None

    async def _events(self, place: _Place) -> AsyncGenerator[Response, None]:
        pause_s, loop = PAUSE_MIN_S, asyncio.get_running_loop()
        failing_s = loop.time()
        while not place.over:
            before, began_s, wanted = place.sequence, loop.time(), 0
            try:
                async with aclosing(self._follow(place)) as events:
                    async for message in events:
                        yield message
                        del message
                if not place.over:
                    place.over = await self._has_ended(place)
            except _NoRoomError as error:
                wanted = error.size  # and no more of it: its frames hold the message
            except grpc.aio.AioRpcError as error:
                refused = from_rpc_error(error)
                if refused.code not in _AGAIN:
                    raise told(refused, {}) from None
            except SluiceError as error:
                if error.code not in _AGAIN:
                    raise
            if place.over:
                return
            if wanted:
                await self._wait_for_room(place, wanted)
                continue
            if place.sequence > before or loop.time() - began_s > AWAY_LIMIT_S / 10:
                pause_s, failing_s = PAUSE_MIN_S, loop.time()  # it was there
            elif loop.time() - failing_s > AWAY_LIMIT_S:
                raise unreachable()
            else:
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            await _pause(pause_s * random.uniform(0.5, 1.5))

    async def _follow(self, place: _Place) -> AsyncGenerator[Response, None]:
        """One watch of the state service."""
        request = stored_pb2.WatchRunRequest(
            tenant=place.tenant, run_id=place.run_id, from_sequence=place.sequence + 1
        )
        call = self._stub.WatchRun(request, timeout=_left_s())
        with ending(call):
            # Not by the library's iterator: that holds the last message, while it is written and,
            # as it and the call hold each other, long after the watch.
            while (message := await call.read()) is not grpc.aio.EOF:
                if not message.HasField("text") and message.entry.sequence <= place.sequence:
                    continue
                with self._counted(place, message.ByteSize()):
                    response = place.told(message)
                    del message  # it holds the event a second time
                    yield response
                    del response

    @contextlib.contextmanager
    def _counted(self, place: _Place, size: int) -> Iterator[None]:
        """Room for a message while it is written. Raises _NoRoomError: it is to be let go."""
        size = size if size > SMALL_BYTES else 0
        if size and place.room >= size:
            size, place.room = place.room, 0
        elif not self._room.enter_now(place.tenant, size):
            raise _NoRoomError(size)
        try:
            yield
        finally:
            self._room.leave(place.tenant, size)

    async def _wait_for_room(self, place: _Place, size: int) -> None:
        self._room.leave(place.tenant, place.room)
        place.room = 0
        left_s, limit_s = _left_s(), self._write_limit_s
        try:
            async with asyncio.timeout(limit_s if left_s is None else min(left_s, limit_s)):
                await self._room.enter(place.tenant, size)
        except TimeoutError:
            if left_s is not None and left_s <= limit_s:
                raise _late() from None
            raise exhausted(
                "WATCH_BYTES",
                "clients of the tenant leave too much of watched runs unread",
                ROOM_RETRY_S,
                metadata={"limit": "run_watch_bytes_max"},
            ) from None
        place.room = size

    async def _has_ended(self, place: _Place) -> bool:
        """Whether a watch that ended without the end of its run has nothing more to tell."""
        request = stored_pb2.GetRunRequest(tenant=place.tenant, run_id=place.run_id)
        found = await answered(self._stub.GetRun(request, timeout=time_limit_s()))
        return found.run.phase in ENDED and found.run.last_sequence <= place.sequence


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left_s() -> float | None:
    """Seconds to the deadline of the call that is served. Raises when none are left."""
    limit = deadline.current()
    if limit is None:
        return None
    left_s = limit.remaining(asyncio.get_running_loop().time())
    if left_s <= 0:
        raise _late()
    return left_s


async def _pause(pause_s: float) -> None:
    left_s = _left_s()
    await asyncio.sleep(pause_s if left_s is None else min(pause_s, left_s))
    if left_s is not None and left_s <= pause_s:
        raise _late()


def _late() -> SluiceError:
    return deadline_exceeded(message="The deadline passed; the run goes on: watch it again.")


def _draining(sequence: int) -> SluiceError:
    return unavailable(
        "DRAINING",
        "this scheduler goes down; the run goes on: watch it by another",
        RETRY_AFTER_S,
        metadata={"last_sequence": str(sequence)},
    )
