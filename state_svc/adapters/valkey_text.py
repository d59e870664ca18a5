"""Live text of runs: kept in the memory of the process to which it is published, told to all others
by pub/sub.

Nothing is written for a message: a store that logs every write before it answers would log each
piece of every answer. A text that takes longer than :data:`STORE_S` goes whole into one key of the
volatile store, at most so often, gone :data:`KEPT_S` after the last: newcomers on other replicas
read it, and what came since then when it comes. A process that begins anew does not know what was
published before: it says so to the agent, which sends all of it again. For one event loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis

from state_svc.adapters.valkey_link import Script, ValkeyLink
from state_svc.domain.run_values import Lease, LeaseLostError, Position
from state_svc.ports import StoreFullError, TenantDeletedError
from state_svc.run_ports import TEXT_BYTES_MAX, LiveText

KEPT_S: Final = 600
KEPT_BYTES: Final = 64 << 20  # of all texts; the longest untouched makes room
STORE_S: Final = 2.0
KEPT_OVERHEAD: Final = 512
_STORE: Final = Script("tenant_guard.lua", "store_text.lua")


def text_channel(tenant: str, run_id: str) -> str:
    """Where new text of a run is published."""
    return f"sluice:{{{tenant}}}:run:{run_id}:text"


def _stored_key(channel: str) -> str:
    """Owned here: the whole text as a message, KEPT_S."""
    return f"{channel}:shown"


@dataclass(slots=True)
class _Kept:
    """The text of a run. ``size``: of all that was published of this version, in bytes, of which
    ``text`` is the beginning."""

    token: int
    version: int
    at: Position
    step: int
    touched_s: float
    stored_s: float  # or when it began: what is over sooner is never written
    size: int = 0
    text: bytearray = field(default_factory=bytearray)

    def shown(self) -> LiveText:
        """The text from its beginning."""
        return LiveText(
            self.version, self.at.sequence, self.step, 0, self.text.decode(), self.at.create_ms
        )


class ValkeyTexts:
    """A :class:`state_svc.run_ports.TextStore`. ``clock``: seconds."""

    def __init__(self, link: ValkeyLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by channel, the last touched last
        self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """What the texts take in memory."""
        return self._bytes

    async def publish(
        self, lease: Lease, at: Position, step: int, text: str, *, replaces: bool
    ) -> bool:
        """See :class:`state_svc.run_ports.TextStore`."""
        channel = text_channel(lease.tenant, lease.run_id)
        known = self._kept.get(channel)
        stamp = 0
        if known is None or replaces or (known.token, known.step) != (lease.token, step):
            stamp = await self._stamp()
            known = self._kept.get(channel)
        if known is not None and lease.token < known.token:
            return True
        is_whole = replaces or (known is not None and known.token == lease.token)
        if stamp:
            version = max(stamp, known.version + 1 if known is not None else 0)
            self._drop(channel)
            now_s = self._clock()
            known = _Kept(lease.token, version, at, step, now_s, now_s)
            self._keep(channel, known)
        assert known is not None
        message = self._add(channel, known, at, text.encode())
        await self._link.run(lambda client: client.publish(channel, message))
        if self._clock() - known.stored_s >= STORE_S:
            known.stored_s = self._clock()
            whole, key = _message(known, 0, bytes(known.text)), _stored_key(channel)
            try:
                await self._link.script(_STORE, [key], [whole, KEPT_S])
            except TenantDeletedError as error:
                raise LeaseLostError from error
            except StoreFullError:
                pass  # those who watch have heard it; newcomers elsewhere see it with its event
        return is_whole

    async def whole(self, tenant: str, run_id: str) -> LiveText | None:
        """See :class:`state_svc.run_ports.TextStore`."""
        channel = text_channel(tenant, run_id)
        known = self._kept.get(channel)
        if known is not None and self._clock() - known.touched_s < STORE_S:
            return known.shown()
        stored = await self._link.run(lambda client: client.get(_stored_key(channel)))
        found = parse(stored) if isinstance(stored, bytes) else None
        # Another process may have gone on with it; a text never gets shorter within a version.
        if known is None or (found is not None and _extent(found) > _extent(known.shown())):
            return found
        return known.shown()

    async def _stamp(self) -> int:
        """Microseconds of the store's clock: what begins later has a larger one, on any replica."""

        async def ask(client: Redis) -> tuple[int, int]:
            seconds, micros = await client.time()
            return int(seconds), int(micros)

        seconds, micros = await self._link.run(ask)
        return seconds * 1_000_000 + micros

    def _add(self, channel: str, known: _Kept, at: Position, text: bytes) -> bytes:
        """Keeps more text, if it fits; the message that tells it."""
        offset = known.size
        known.at, known.touched_s = at, self._clock()
        known.size += len(text)
        if len(known.text) == offset and known.size <= TEXT_BYTES_MAX:
            known.text += text
            self._bytes += len(text)
        self._kept.move_to_end(channel)
        self._make_room()
        return _message(known, offset, text)

    def _keep(self, channel: str, known: _Kept) -> None:
        self._kept[channel] = known
        self._bytes += KEPT_OVERHEAD

    def _drop(self, channel: str) -> None:
        dropped = self._kept.pop(channel, None)
        if dropped is not None:
            self._bytes -= len(dropped.text) + KEPT_OVERHEAD

    def _make_room(self) -> None:
        """Without what is old and, beyond the bound, what was not touched for longest."""
        while len(self._kept) > 1:
            channel, oldest = next(iter(self._kept.items()))
            is_old = self._clock() - oldest.touched_s > KEPT_S
            if not is_old and self._bytes <= KEPT_BYTES:
                return
            self._drop(channel)


def _extent(text: LiveText) -> tuple[int, int]:
    return text.version, len(text.text)


def _message(known: _Kept, offset: int, text: bytes) -> bytes:
    numbers = (known.at.create_ms, known.version, known.at.sequence, known.step, offset)
    return b"%d %d %d %d %d %b" % (*numbers, text)


def parse(message: bytes) -> LiveText:
    """A message: when its run was made, version, sequence number, step, offset and text."""
    *numbers, words = message.split(b" ", 5)
    created, version, sequence, step, offset = map(int, numbers)
    return LiveText(version, sequence, step, offset, words.decode(), created)
