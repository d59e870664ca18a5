"""Values and blobs in Redis or Valkey.

Keys, all of one tenant's hash tag and owned here, below ``sluice:{<tenant>}:``. ``value:<key>``
and ``blob:<owner>/<name>`` end with their time to live; ``blobs:<owner>`` (names) with the last of
them; ``values:version`` after 100 days without a write, when no value is left. What is counted for
the bounds (``values``, ``values:sizes``, ``blobs``, ``blob-sizes``) ends an hour after the last of
them; each write forgets what has ended. Each change is one script: a crash leaves it done or not
done.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis

from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.ports import (
    BlobPart,
    LimitReachedError,
    Record,
    StoreUnavailableError,
    ValueLimits,
    VersionConflictError,
)

_SCRIPT: Final = Script("tenant_guard.lua", "values.lua")
_DELETION: Final = Script("tenant_guard.lua", "values.lua", frees=True)
_UNCHECKED: Final = -1


class ValkeyValues:
    """A :class:`state_svc.ports.KeyValueStore`."""

    def __init__(self, link: ValkeyLink, limits: ValueLimits | None = None) -> None:
        self._link = link
        self._limits = limits or ValueLimits()

    async def get(self, tenant: str, key: str) -> Record | None:
        """See :class:`state_svc.ports.KeyValueStore`."""
        name = f"sluice:{{{tenant}}}:value:{key}"
        version, value = await self._link.run(lambda client: client.hmget(name, ["v", "d"]))
        if version is None or value is None:
            return None
        return Record(int(version), _bytes(value))

    async def put(
        self, tenant: str, key: str, value: bytes, ttl_ms: int, expected: int | None = None
    ) -> int:
        """See :class:`state_svc.ports.KeyValueStore`."""
        checked = _UNCHECKED if expected is None else expected
        limits = self._limits
        arguments: list[Argument] = ["value", "", "", key, value, ttl_ms]
        arguments += [limits.items_max, limits.bytes_max, checked]
        reply = _checked(await self._link.script(_SCRIPT, _value_keys(tenant, key), arguments))
        return int(reply[1])

    async def delete(self, tenant: str, key: str, expected: int | None = None) -> bool:
        """See :class:`state_svc.ports.KeyValueStore`."""
        checked = _UNCHECKED if expected is None else expected
        arguments: list[Argument] = ["unset", "", "", key, checked]
        reply = await self._link.script(_DELETION, _value_keys(tenant, key), arguments)
        return reply[0] != b"ABSENT" and bool(_checked(reply))


class ValkeyBlobs:
    """A :class:`state_svc.ports.BlobStore`."""

    def __init__(self, link: ValkeyLink, limits: ValueLimits | None = None) -> None:
        self._link = link
        self._limits = limits or ValueLimits()

    async def put(self, tenant: str, owner: str, name: str, content: bytes, ttl_ms: int) -> None:
        """See :class:`state_svc.ports.BlobStore`."""
        limits = self._limits
        arguments: list[Argument] = ["blob", "", f"sluice:{{{tenant}}}:blobs:", f"{owner}/{name}"]
        arguments += [content, ttl_ms, limits.items_max, limits.bytes_max, name]
        _checked(await self._link.script(_SCRIPT, _blob_keys(tenant, owner, name), arguments))

    async def get(
        self, tenant: str, owner: str, name: str, offset: int, size_max: int
    ) -> BlobPart | None:
        """See :class:`state_svc.ports.BlobStore`."""
        key = _blob_keys(tenant, owner, name)[2]

        async def read(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.exists(key)
                pipeline.strlen(key)
                pipeline.getrange(key, offset, offset + size_max - 1)
                return await pipeline.execute()

        there, size, content = await self._link.run(read)
        return BlobPart(_bytes(content), size) if there else None

    async def delete_all(self, tenant: str, owner: str) -> int:
        """See :class:`state_svc.ports.BlobStore`."""
        arguments = ["drop", f"sluice:{{{tenant}}}:blob:", owner]
        reply = await self._link.script(_DELETION, _blob_keys(tenant, owner, ""), arguments)
        return int(_checked(reply)[1])


def _value_keys(tenant: str, key: str) -> list[str]:
    own = f"sluice:{{{tenant}}}:"
    return [f"{own}values", f"{own}values:sizes", f"{own}value:{key}", f"{own}values:version"]


def _blob_keys(tenant: str, owner: str, name: str) -> list[str]:
    own = f"sluice:{{{tenant}}}:"
    return [f"{own}blobs", f"{own}blob-sizes", f"{own}blob:{owner}/{name}", f"{own}blobs:{owner}"]


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _checked(reply: Any) -> Any:
    match reply[0]:
        case b"OK":
            return reply
        case b"FULL":
            raise LimitReachedError(text(reply[1]))
        case b"VERSION":
            raise VersionConflictError
    raise StoreUnavailableError(f"unknown reply {reply[0]!r}")
