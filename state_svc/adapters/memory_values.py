"""Values and blobs in this process's memory: twins of the real stores for tests and simulation.
Their clock is the event loop's. Nothing survives the process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from state_svc.ports import (
    BlobPart,
    LimitReachedError,
    Record,
    ValueLimits,
    VersionConflictError,
)


@dataclass(frozen=True, slots=True)
class _Item:
    content: bytes
    version: int
    end_s: float


class _Shelf:
    """Items of one kind by tenant and name, within bounds."""

    def __init__(self, name: str, limits: ValueLimits | None) -> None:
        self._name, self._limits = name, limits or ValueLimits()
        self._items: dict[str, dict[str, _Item]] = {}
        self._version = 0

    def get(self, tenant: str, name: str) -> _Item | None:
        item = self._items.get(tenant, {}).get(name)
        return item if item is not None and item.end_s > _now() else None

    def put(self, tenant: str, name: str, content: bytes, ttl_ms: int) -> int:
        now = _now()
        items = {n: i for n, i in self._items.get(tenant, {}).items() if i.end_s > now}
        if name not in items and len(items) >= self._limits.items_max:
            raise LimitReachedError(f"{self._name}_max")
        used = sum(len(n) + len(item.content) for n, item in items.items() if n != name)
        if used + len(name) + len(content) > self._limits.bytes_max:
            raise LimitReachedError(f"{self._name}_bytes_max")
        self._version += 1
        items[name] = _Item(content, self._version, now + ttl_ms / 1000)
        self._items[tenant] = items
        return self._version

    def delete(self, tenant: str, name: str) -> bool:
        there = self.get(tenant, name) is not None
        self._items.get(tenant, {}).pop(name, None)
        return there

    def names(self, tenant: str) -> list[str]:
        return [name for name in self._items.get(tenant, {}) if self.get(tenant, name)]


class MemoryValues:
    """A :class:`state_svc.ports.KeyValueStore`."""

    def __init__(self, limits: ValueLimits | None = None) -> None:
        self._shelf: Final = _Shelf("values", limits)

    async def get(self, tenant: str, key: str) -> Record | None:
        """See :class:`state_svc.ports.KeyValueStore`."""
        item = self._shelf.get(tenant, key)
        return None if item is None else Record(item.version, item.content)

    async def put(
        self, tenant: str, key: str, value: bytes, ttl_ms: int, expected: int | None = None
    ) -> int:
        """See :class:`state_svc.ports.KeyValueStore`."""
        self._check(tenant, key, expected)
        return self._shelf.put(tenant, key, value, ttl_ms)

    async def delete(self, tenant: str, key: str, expected: int | None = None) -> bool:
        """See :class:`state_svc.ports.KeyValueStore`."""
        if self._shelf.get(tenant, key) is None:
            return False
        self._check(tenant, key, expected)
        return self._shelf.delete(tenant, key)

    def _check(self, tenant: str, key: str, expected: int | None) -> None:
        item = self._shelf.get(tenant, key)
        if expected is not None and expected != (0 if item is None else item.version):
            raise VersionConflictError


class MemoryBlobs:
    """A :class:`state_svc.ports.BlobStore`."""

    def __init__(self, limits: ValueLimits | None = None) -> None:
        self._shelf: Final = _Shelf("blobs", limits)

    async def put(self, tenant: str, owner: str, name: str, content: bytes, ttl_ms: int) -> None:
        """See :class:`state_svc.ports.BlobStore`."""
        self._shelf.put(tenant, f"{owner}/{name}", content, ttl_ms)

    async def get(
        self, tenant: str, owner: str, name: str, offset: int, size_max: int
    ) -> BlobPart | None:
        """See :class:`state_svc.ports.BlobStore`."""
        item = self._shelf.get(tenant, f"{owner}/{name}")
        if item is None:
            return None
        return BlobPart(item.content[offset : offset + size_max], len(item.content))

    async def delete_all(self, tenant: str, owner: str) -> int:
        """See :class:`state_svc.ports.BlobStore`."""
        mine = [name for name in self._shelf.names(tenant) if name.startswith(f"{owner}/")]
        return sum(self._shelf.delete(tenant, name) for name in mine)


def _now() -> float:
    return asyncio.get_running_loop().time()
