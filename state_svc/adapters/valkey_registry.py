"""Tenants, keys, aliases and tools in Redis or Valkey.

Keys ``sluice:{registry}:<kind>``, ``...:unique`` and ``...:revision``, owned here, without time to
live; ``...:tenants:deletions`` marks the names of deleted tenants, until ``tenant_purge.py`` takes
the marks away. Each write is one script: a crash leaves it done or not done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis

from sluice import logs
from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.deletion_ports import Deletion, DeletionState
from state_svc.ports import (
    CHILDREN_BYTES_MAX,
    CHILDREN_MAX,
    RECORDS_MAX,
    Kind,
    NameTakenError,
    ParentMissingError,
    Record,
    RegistryFullError,
    Snapshot,
    StoreUnavailableError,
    TenantBeingDeletedError,
    VersionConflictError,
)

log = logs.get(__name__)

_SCRIPT: Final = Script("registry.lua")
_DELETION: Final = Script("registry.lua", frees=True)
_UNCHECKED: Final = -1
_MARKS: Final = "sluice:{registry}:tenants:deletions"
# Beside a kind's own keys: what a key or tool needs to exist, what goes with a tenant.
_RELATED: Final = {
    ("put", Kind.KEYS): (Kind.TENANTS,),
    ("put", Kind.TOOLS): (Kind.TENANTS,),
    ("delete", Kind.TENANTS): (Kind.KEYS, Kind.TOOLS),
}


class ValkeyRegistry:
    """A :class:`state_svc.ports.RegistryStore`, and its ``deletion_ports.DeletionMarks``."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link

    async def put(
        self,
        kind: Kind,
        name: str,
        value: bytes,
        *,
        expected: int | None = None,
        unique: Sequence[str] = (),
    ) -> int:
        """See :class:`state_svc.ports.RegistryStore`."""
        checked = _UNCHECKED if expected is None else expected
        keys = _keys("put", kind)
        arguments: list[Argument] = ["put", name, checked, RECORDS_MAX[kind]]
        arguments += [CHILDREN_MAX.get(kind, 0), CHILDREN_BYTES_MAX.get(kind, 0), value, *unique]
        reply = await self._link.script(_SCRIPT, keys, arguments)
        return _version(reply)

    async def delete(self, kind: Kind, name: str, *, expected: int | None = None) -> bool:
        """See :class:`state_svc.ports.RegistryStore`."""
        checked = _UNCHECKED if expected is None else expected
        keys = _keys("delete", kind)
        reply = await self._link.script(_DELETION, keys, ["delete", name, checked])
        if reply[0] == b"ABSENT":
            return False
        _version(reply)
        return True

    async def find(self, kind: Kind, unique: str) -> str | None:
        """See :class:`state_svc.ports.RegistryStore`."""

        async def read(client: Redis) -> bytes | str | None:
            return await client.hget(f"{_key(kind)}:unique", unique)

        name = await self._link.run(read)
        return None if name is None else text(name)

    async def read(self, kind: Kind) -> Snapshot:
        """See :class:`state_svc.ports.RegistryStore`."""

        async def read(client: Redis) -> list[object]:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.get(f"{_key(kind)}:revision")
                pipeline.hgetall(_key(kind))
                return await pipeline.execute()

        revision, fields = await self._link.run(read)
        assert isinstance(fields, dict)
        return Snapshot(_number(revision), _records(kind, fields))

    async def children(self, kind: Kind, parent: str) -> Mapping[str, Record]:
        """See :class:`state_svc.ports.RegistryStore`."""
        reply = await self._link.script(_SCRIPT, _keys("children", kind), ["children", parent])
        records = _records(kind, dict(zip(reply[::2], reply[1::2], strict=True)))
        return {name.partition("/")[2]: record for name, record in records.items()}

    async def revisions(self, kinds: Sequence[Kind]) -> list[int]:
        """See :class:`state_svc.ports.RegistryStore`."""
        keys = [f"{_key(kind)}:revision" for kind in kinds]
        return [_number(one) for one in await self._link.run(lambda client: client.mget(keys))]

    async def deletions(self) -> tuple[int, Mapping[str, Deletion]]:
        """See :class:`state_svc.deletion_ports.DeletionMarks`."""

        async def read(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.time()
                pipeline.hgetall(_MARKS)
                return await pipeline.execute()

        (seconds, micros), fields = await self._link.run(read)
        marks = {text(name): _deletion(stored) for name, stored in fields.items()}
        return seconds * 1000 + micros // 1000, marks

    async def deletion(self, name: str) -> Deletion | None:
        """See :class:`state_svc.deletion_ports.DeletionMarks`."""

        async def read(client: Redis) -> bytes | str | None:
            return await client.hget(_MARKS, name)

        stored = await self._link.run(read)
        return None if stored is None else _deletion(stored)

    async def mark(self, name: str, known: Deletion, state: DeletionState | None) -> bool:
        """See :class:`state_svc.deletion_ports.DeletionMarks`."""
        after = "" if state is None else f"{known.number} {state}"
        arguments = ["mark", name, f"{known.number} {known.state}", after]
        reply = await self._link.script(_DELETION, _keys("mark", Kind.TENANTS), arguments)
        return bool(reply[0] == b"OK")


def _deletion(stored: bytes | str) -> Deletion:
    number, _, state = text(stored).partition(" ")
    return Deletion(int(number), DeletionState(state))


def _key(kind: Kind) -> str:
    return f"sluice:{{registry}}:{kind}"


def _keys(op: str, kind: Kind) -> list[str]:
    kinds = [kind, *_RELATED.get((op, kind), ())]
    return [key for k in kinds for key in (_key(k), f"{_key(k)}:unique", f"{_key(k)}:revision")]


def _records(kind: Kind, fields: Mapping[bytes, bytes]) -> dict[str, Record]:
    records = {}
    for name, stored in fields.items():
        version, _, value = stored.partition(b" ")
        if version.isdigit():
            records[text(name)] = Record(int(version), value)
        else:  # not ours: what is of us stays readable
            log.error("a stored record cannot be read", kind=str(kind))
    return records


def _number(value: object) -> int:
    try:
        return 0 if value is None else int(text(value)) if isinstance(value, bytes | str) else 0
    except ValueError as error:
        raise StoreUnavailableError("a revision in the store is no number") from error


def _version(reply: list[bytes | int]) -> int:
    match reply[0]:
        case b"OK":
            return int(reply[1])
        case b"VERSION":
            raise VersionConflictError
        case b"FULL":
            raise RegistryFullError
        case b"TAKEN":
            raise NameTakenError
        case b"PURGING":
            raise TenantBeingDeletedError
        case b"PARENT":
            raise ParentMissingError
    raise AssertionError(reply)
