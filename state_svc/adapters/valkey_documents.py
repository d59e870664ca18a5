"""Documents in Redis or Valkey.

Keys, all of one tenant's hash tag and owned here, below ``sluice:{<tenant>}:``. ``library``
(counter of generations and versions; bytes stored), ``collections``, ``collection:<name>`` with
``:documents``, ``:live`` and ``:changes``, ``document:<collection>/<id>`` with its newest content
in ``content:<collection>/<id>``, and ``chunks:<generation>`` have no time to live; ``put:<request
id>`` has 24 hours. ``documents.lua`` says what they hold; each change is one script: a crash
leaves it done or not done.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis

from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.document_ports import (
    ChunksMissingError,
    DocumentDeletedError,
    DocumentLimits,
    GenerationReplacedError,
    VectorLengthError,
)
from state_svc.domain.documents import (
    Changed,
    ChunkText,
    CollectionHead,
    CollectionState,
    DocumentState,
    Draft,
    LiveDocument,
    NewChunk,
    SmallChange,
    labels_text,
    record_bytes,
)
from state_svc.ports import LimitReachedError, RequestIdReusedError, StoreUnavailableError

REQUEST_KEPT_S: Final = 86_400
_SCRIPT: Final = Script("tenant_guard.lua", "documents.lua")
_DELETION: Final = Script("tenant_guard.lua", "documents.lua", frees=True)
_READING: Final = Script("documents_read.lua")
_RANGE: Final = 16  # bytes before a chunk's text: the range that it covers
_LIVE_AT_ONCE: Final = 256  # entries of up to 17 KiB in one reply


class ValkeyDocuments:
    """A :class:`state_svc.document_ports.DocumentStore` and its ``ChunkSource``."""

    def __init__(self, link: ValkeyLink, limits: DocumentLimits | None = None) -> None:
        self._link = link
        self._limits = limits or DocumentLimits()

    async def put(
        self, tenant: str, collection: str, document_id: str, draft: Draft, request_id: str
    ) -> DocumentState:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        labels = labels_text(draft.labels)
        keys = _keys(tenant, collection, document_id)
        keys.append(f"sluice:{{{tenant}}}:put:{request_id}")
        limits = self._limits
        arguments: list[Argument] = ["put", _chunks(tenant, "")]
        arguments += [
            draft.content,
            draft.media_type,
            labels,
            draft.digest,
            document_id,
            collection,
        ]
        arguments += [limits.collections_max, limits.bytes_max, limits.documents_max]
        arguments += [REQUEST_KEPT_S, record_bytes(document_id, draft.labels)]
        reply = await self._link.script(_SCRIPT, keys, arguments)
        if reply[0] == b"KNOWN":
            live, chunks = reply[3]
            return DocumentState(
                document_id,
                int(reply[1]),
                len(draft.content),
                int(chunks or 0),
                live == reply[1],
                draft.media_type,
                dict(draft.labels),
                int(reply[2]),
            )
        return _state(document_id, _checked(reply)[1])

    async def get(
        self, tenant: str, collection: str, document_id: str, *, with_content: bool = True
    ) -> tuple[DocumentState, bytes] | None:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        keys = _keys(tenant, collection, document_id)

        async def read(client: Redis) -> list[Any]:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.hgetall(keys[6])
                if with_content:
                    pipeline.get(keys[7])
                return await pipeline.execute()

        fields, *content = await self._link.run(read)
        return (_state(document_id, fields), content[0] if content else b"") if fields else None

    async def list(
        self, tenant: str, collection: str, after: str, count: int
    ) -> tuple[Sequence[DocumentState], str]:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        names = _keys(tenant, collection, "")[3]

        async def read(client: Redis) -> tuple[list[bytes], list[Any]]:
            beyond = b"(" + after.encode() if after else b"-"
            found: Any = await client.zrangebylex(names, beyond, b"+", 0, count)
            async with client.pipeline(transaction=False) as pipeline:
                for name in found:
                    pipeline.hgetall(_keys(tenant, collection, text(name))[6])
                return found, await pipeline.execute()

        found, all_fields = await self._link.run(read)
        states = [
            _state(text(name), fields)
            for name, fields in zip(found, all_fields, strict=True)
            if fields  # deleted in between
        ]
        return states, text(found[-1]) if len(found) == count else ""

    async def delete(
        self, tenant: str, collection: str, document_id: str, until: int | None = None
    ) -> bool:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        last = "" if until is None else str(until)
        arguments = ["delete", _chunks(tenant, ""), document_id, collection, last]
        keys = _keys(tenant, collection, document_id)
        reply = await self._link.script(_DELETION, keys, arguments)
        return bool(reply[0] != b"ABSENT")

    async def newest(self, tenant: str) -> int:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        key = _keys(tenant, "", "")[0]
        return int(await self._link.run(lambda client: client.hget(key, "counter")) or 0)

    async def collections(
        self, tenant: str, after: str, count: int
    ) -> tuple[Sequence[CollectionState], str]:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        key = _keys(tenant, "", "")[1]

        async def read(client: Redis) -> tuple[list[str], list[Any]]:
            # A set of at most collections_max names: read whole, ordered here.
            members: Any = await client.smembers(key)
            names = sorted(map(text, members))
            page = [name for name in names if name > after][:count]
            async with client.pipeline(transaction=True) as pipeline:
                for name in page:
                    keys = _keys(tenant, name, "")
                    pipeline.hmget(keys[2], ["version", "stored", "size"])
                    pipeline.zcard(keys[3])
                return page, await pipeline.execute() if page else []

        page, replies = await self._link.run(read)
        states = [
            CollectionState(name, documents, int(stored or 0), int(size or 0))
            for name, (version, stored, size), documents in zip(
                page, replies[::2], replies[1::2], strict=True
            )
            if version  # deleted in between
        ]
        return states, page[-1] if len(page) == count else ""

    async def abandon(
        self, tenant: str, collection: str, document_id: str, generation: int
    ) -> None:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        arguments: list[Argument] = ["abandon", _chunks(tenant, ""), generation]
        keys = _keys(tenant, collection, document_id)
        _checked(await self._link.script(_DELETION, keys, arguments))

    async def store(
        self,
        tenant: str,
        collection: str,
        document_id: str,
        generation: int,
        chunks: Sequence[NewChunk],
        dims: int,
        chunk_count: int | None,
    ) -> DocumentState:
        """See :class:`state_svc.document_ports.DocumentStore`."""
        total = -1 if chunk_count is None else chunk_count
        limits = self._limits
        arguments: list[Argument] = ["store", _chunks(tenant, ""), generation, dims, total]
        arguments += [limits.chunks_max, limits.bytes_max, document_id]
        for chunk in chunks:
            shown = chunk.shown
            head = shown.begin_byte.to_bytes(8, "little") + shown.end_byte.to_bytes(8, "little")
            arguments += [chunk.number, head + shown.text.encode(), chunk.record]
        keys = _keys(tenant, collection, document_id)
        reply = _checked(await self._link.script(_SCRIPT, keys, arguments))
        return _state(document_id, reply[1])

    async def shown(
        self, tenant: str, places: Sequence[tuple[int, int]]
    ) -> Sequence[ChunkText | None]:
        """See :class:`state_svc.document_ports.DocumentStore`."""

        async def read(client: Redis) -> list[bytes | None]:
            async with client.pipeline(transaction=False) as pipeline:
                for generation, number in places:
                    pipeline.hget(_chunks(tenant, generation), f"t{number}")
                return await pipeline.execute()

        return [None if found is None else _shown(found) for found in await self._link.run(read)]

    async def head(self, tenant: str, collection: str) -> CollectionHead | None:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        key = _keys(tenant, collection, "")[2]
        fields = await self._link.run(lambda client: client.hmget(key, ["version", "dims", "size"]))
        version, dims, size = (int(field or 0) for field in fields)
        return CollectionHead(version, dims, size) if version else None

    async def small_change(
        self, tenant: str, collection: str, since: int, generations_max: int, chunks_max: int
    ) -> SmallChange | None:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        keys = _keys(tenant, collection, "")
        arguments: list[Argument] = [since, _chunks(tenant, ""), generations_max, chunks_max]
        reply = await self._link.script(_READING, [keys[2], keys[4], keys[5]], arguments)
        if not reply:
            return None
        version, dims, *changes = reply
        live = [_live(int(one), entry) for one, entry, _ in changes if entry is not None]
        return SmallChange(
            int(version),
            int(dims),
            [int(one) for one, _, _ in changes],
            live,
            {int(one): records for one, entry, records in changes if entry is not None},
        )

    async def changed(self, tenant: str, collection: str, since: int) -> Changed | None:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        keys = _keys(tenant, collection, "")

        async def read(client: Redis, everything: bool) -> list[Any]:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(keys[2], ["version", "dims", "floor"])
                if everything:
                    pipeline.hkeys(keys[4])
                else:
                    pipeline.zrangebyscore(keys[5], f"({since}", "+inf")
                return await pipeline.execute()

        everything = since == 0
        fields, generations = await self._link.run(lambda client: read(client, everything))
        if not everything and since < int(fields[2] or 0):
            everything = True
            fields, generations = await self._link.run(lambda client: read(client, True))
        version, dims = int(fields[0] or 0), int(fields[1] or 0)
        if not version:
            return None
        return Changed(version, dims, everything, [int(one) for one in generations])

    async def live(
        self, tenant: str, collection: str, generations: Sequence[int]
    ) -> Mapping[int, LiveDocument]:
        """See :class:`state_svc.document_ports.ChunkSource`."""
        key = _keys(tenant, collection, "")[4]
        found: dict[int, LiveDocument] = {}
        for some in _pieces(generations, _LIVE_AT_ONCE):
            entries = await self._link.run(_fields(key, [str(one) for one in some]))
            for generation, entry in zip(some, entries, strict=True):
                if entry is not None:
                    found[generation] = _live(generation, entry)
        return found

    async def records(
        self, tenant: str, ranges: Sequence[tuple[int, int, int]]
    ) -> Sequence[Sequence[bytes | None]]:
        """See :class:`state_svc.document_ports.ChunkSource`."""

        async def read(client: Redis) -> list[list[bytes | None]]:
            async with client.pipeline(transaction=False) as pipeline:
                for generation, first, end in ranges:
                    fields = [f"i{number}" for number in range(first, end)]
                    pipeline.hmget(_chunks(tenant, generation), fields)
                return await pipeline.execute()

        return await self._link.run(read)


def _keys(tenant: str, collection: str, document_id: str) -> list[str]:
    """The first eight keys of the script."""
    own = f"sluice:{{{tenant}}}:"
    of_collection = f"{own}collection:{collection}"
    return [
        f"{own}library",
        f"{own}collections",
        of_collection,
        f"{of_collection}:documents",
        f"{of_collection}:live",
        f"{of_collection}:changes",
        f"{own}document:{collection}/{document_id}",
        f"{own}content:{collection}/{document_id}",
    ]


def _chunks(tenant: str, generation: int | str) -> str:
    return f"sluice:{{{tenant}}}:chunks:{generation}"


def _pieces(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


def _fields(key: str, names: list[str]) -> Callable[[Redis], Awaitable[list[Any]]]:
    return lambda client: client.hmget(key, names)


def _state(document_id: str, fields: Any) -> DocumentState:
    if not isinstance(fields, dict):
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    return DocumentState(
        document_id,
        int(fields[b"generation"]),
        int(fields[b"size"]),
        int(fields.get(b"chunks", 0)),
        fields.get(b"live") == fields[b"generation"],
        text(fields[b"media_type"]),
        json.loads(fields[b"labels"]),
        int(fields[b"made"]),
    )


def _live(generation: int, entry: bytes) -> LiveDocument:
    count, size, rest = entry.split(b" ", 2)
    at = int(size)
    return LiveDocument(generation, rest[at:].decode(), int(count), json.loads(rest[:at]))


def _shown(stored: bytes) -> ChunkText:
    begin, end = (int.from_bytes(stored[at : at + 8], "little") for at in (0, 8))
    return ChunkText(stored[_RANGE:].decode(), begin, end)


def _checked(reply: Any) -> Any:
    match reply[0]:
        case b"OK":
            return reply
        case b"FULL":
            raise LimitReachedError(text(reply[1]))
        case b"REUSED":
            raise RequestIdReusedError
        case b"DELETED":
            raise DocumentDeletedError
        case b"REPLACED":
            raise GenerationReplacedError
        case b"MISSING":
            raise ChunksMissingError
        case b"DIMS":
            raise VectorLengthError(int(reply[1]))
    raise StoreUnavailableError(f"unknown reply {reply[0]!r}")
