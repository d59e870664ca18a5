"""The search index in this process's memory, made from the store and proved against it.

Owns one :class:`CollectionIndex` for each collection that was searched lately. A search first asks
the store for the collection's version, so that what another replica wrote is seen by the next
search here; when it differs, what changed is read and the index follows. A collection is read by
one task at a time, which all its searches wait for and none of them cancels: one whose time runs
out is told how long it may still take, and the next one finds more of it done. Reading is done in
pieces by the event loop, everything else in threads: two search, one builds.

Bounded: ``bytes_max`` in all, documents' names and labels included, and ``collections_max``; the
collections that were searched longest ago go first. While a collection's segments are merged, and
while a search still uses what was dropped, there is up to twice that. Nothing here is durable:
after a restart the first search of a collection reads it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from sluice import logs
from state_svc.document_ports import (
    ChunkSource,
    CollectionUnknownError,
    IndexLoadingError,
    IndexTooLargeError,
    SearchBusyError,
    VectorLengthError,
)
from state_svc.domain.collection_index import CollectionIndex
from state_svc.domain.documents import (
    Changed,
    LiveDocument,
    Match,
    Query,
    SmallChange,
    is_record,
)
from state_svc.domain.segment import Segment, build

T = TypeVar("T")
Key = tuple[str, str]  # tenant, collection: never one without the other

ROUNDS_MAX: Final = 8  # times that one refresh reads in pieces
SMALL_GENERATIONS: Final = 64  # changes of documents that are read in one step, with READ_CHUNKS
READ_CHUNKS: Final = 512  # records in one reply: about 1 MiB at 384 dimensions
BUILD_ROWS: Final = 16_384  # rows of a segment when a collection is read; 40 MB of records
ENTRY_MEMORY: Final = 2_048  # bytes of a collection whose index is almost empty
RETRY_S_MIN: Final = 0.2
RETRY_S_MAX: Final = 30.0
BUSY_RETRY_S: Final = 0.5

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """``bytes_max``: memory of all indexes. ``collections_max``: indexes, deleted collections that
    nobody asked for since included: all are looked at after each change. ``searches_max``: searches
    in progress, those that wait included; of one tenant half of them, so that who waits for a large
    collection to be read leaves room to others."""

    bytes_max: int = 1 << 30
    searches_max: int = 64
    collections_max: int = 4_096

    @property
    def tenant_searches_max(self) -> int:
        """Searches of one tenant in progress."""
        return (self.searches_max + 1) // 2


@dataclass(slots=True)
class _Entry:
    index: CollectionIndex | None = None
    size_bytes: int = ENTRY_MEMORY
    task: asyncio.Task[None] | None = None
    begun: int = 0  # number of the last refresh that began
    done: int = 0  # number of the last one that ended well
    began_s: float = 0.0
    rows_read: int = 0
    rows_wanted: int = 0

    def retry_after_s(self, now: float) -> float:
        """About how long the refresh in progress will still take."""
        if not self.rows_read:
            return 1.0
        left = (self.rows_wanted - self.rows_read) / self.rows_read
        return min(max(left * (now - self.began_s), RETRY_S_MIN), RETRY_S_MAX)


class MatrixIndex:
    """A :class:`state_svc.document_ports.SearchIndex`."""

    def __init__(self, source: ChunkSource, limits: IndexLimits | None = None) -> None:
        self.limit_hits: Counter[str] = Counter()  # by the bound's name
        self.used_bytes = 0  # as of the last change
        self._source = source
        self._limits = limits or IndexLimits()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._running: Counter[str] = Counter()  # searches by tenant; none has 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads = asyncio.Semaphore(1)  # whole collections, so that their room is known
        self._searchers = ThreadPoolExecutor(2, thread_name_prefix="search")
        self._builders = ThreadPoolExecutor(1, thread_name_prefix="index")

    @property
    def size_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(entry.size_bytes for entry in self._entries.values())

    async def search(
        self, tenant: str, collection: str, query: Query, wait_s: float
    ) -> Sequence[Match]:
        """See :class:`state_svc.document_ports.SearchIndex`."""
        limits = self._limits
        if (
            self._running.total() >= limits.searches_max
            or self._running[tenant] >= limits.tenant_searches_max
        ):
            self.limit_hits["searches_max"] += 1
            raise SearchBusyError
        self._running[tenant] += 1
        try:
            index = await self._current((tenant, collection), wait_s)
            if index is None:
                raise CollectionUnknownError
            if not index.parts:
                return []
            if query.vector is not None and query.vector.size != index.dims:
                raise VectorLengthError(index.dims)
            return await _in(self._searchers, partial(index.search, query))
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    def drop(self, tenant: str) -> None:
        """Forgets a tenant that is gone. What is being read of it ends by itself."""
        for key in [key for key in self._entries if key[0] == tenant]:
            del self._entries[key]
        self.used_bytes = self.size_bytes

    async def close(self) -> None:
        """Ends what is being read."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._searchers.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown(wait=False, cancel_futures=True)

    async def _current(self, key: Key, wait_s: float) -> CollectionIndex | None:
        """The index at the collection's version now, or a later one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        head = await self._source.head(*key)
        if head is None:
            self._entries.pop(key, None)
            return None
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        asked = entry.begun  # a refresh with a larger number begins after the head was read
        while (index := entry.index) is None or (
            index.version != head.version and entry.done <= asked
        ):
            if entry.task is None:
                entry.begun += 1
                entry.task = self._start(self._refresh(key, entry, entry.begun))
            task = entry.task
            await asyncio.wait({task}, timeout=max(until - loop.time(), 0.0))
            if not task.done():
                raise IndexLoadingError(entry.retry_after_s(loop.time()))
            if task.cancelled():
                raise IndexLoadingError(RETRY_S_MIN)
            task.result()
        return index

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to those that wait; there may be none left

    async def _refresh(self, key: Key, entry: _Entry, number: int) -> None:
        try:
            if entry.index is None:
                async with self._loads:
                    await self._make_room(key)
                    index = await self._follow(key, entry, CollectionIndex())
            else:
                index = await self._follow(key, entry, entry.index)
            entry.index, entry.done = index, number
            entry.size_bytes = ENTRY_MEMORY + index.size_bytes
            self._trim(key, 0)
        finally:
            entry.task = None

    async def _make_room(self, key: Key) -> None:
        head = await self._source.head(*key)
        needed = 0 if head is None else head.size_bytes
        if needed > self._limits.bytes_max:
            self.limit_hits["index_bytes_max"] += 1
            raise IndexTooLargeError
        self._trim(key, needed)

    def _trim(self, kept: Key, needed: int) -> None:
        """Drops indexes, the longest unused first, until ``needed`` bytes more have room."""
        used, limits = self.size_bytes, self._limits
        for key in [key for key in self._entries if key != kept]:
            many = len(self._entries) > limits.collections_max
            if not many and used + needed <= limits.bytes_max:
                break
            used -= self._entries.pop(key).size_bytes
            self.limit_hits["index_collections_max" if many else "index_bytes_max"] += 1
            log.info("a search index was dropped for room", indexes=len(self._entries))
        self.used_bytes = used

    async def _follow(self, key: Key, entry: _Entry, index: CollectionIndex) -> CollectionIndex:
        """The index after what changed since its version. What changed little is read in one step.
        Else it is read in pieces; what is replaced meanwhile is then missing, and is among what
        changed after that."""
        entry.began_s = asyncio.get_running_loop().time()
        entry.rows_read = entry.rows_wanted = 0
        for _ in range(ROUNDS_MAX):
            small = await self._source.small_change(
                *key, index.version, SMALL_GENERATIONS, READ_CHUNKS
            )
            if small is not None:
                return await _in(self._builders, partial(_followed, index, small))
            changed = await self._source.changed(*key, index.version)
            if changed is None:
                return CollectionIndex()
            index, is_whole = await self._advanced(key, entry, index, changed)
            if is_whole:
                return index
        raise IndexLoadingError(RETRY_S_MIN)

    async def _advanced(
        self, key: Key, entry: _Entry, index: CollectionIndex, changed: Changed
    ) -> tuple[CollectionIndex, bool]:
        """The index at the version of ``changed``, and whether it surely lacks nothing: some may
        not be live any more when they are read."""
        gone, new = await _in(self._builders, partial(_difference, index, changed))
        live = await self._source.live(*key, new)
        is_whole = len(live) == len(new)
        entry.rows_wanted += sum(document.chunk_count for document in live.values())
        added: list[Segment] = []
        for some in _batches(live):
            records = await self._read(key, entry, some)
            built, all_there = await _in(
                self._builders, partial(_built, some, records, changed.dims)
            )
            is_whole = is_whole and all_there
            added += [] if built is None else [built]
        step = partial(index.changed, changed.version, changed.dims, gone, added)
        return await _in(self._builders, step), is_whole

    async def _read(
        self, key: Key, entry: _Entry, documents: Sequence[LiveDocument]
    ) -> Mapping[int, Sequence[bytes | None]]:
        """The records of each document's chunks, in their order."""
        found: dict[int, list[bytes | None]] = {d.generation: [] for d in documents}
        for ranges in _ranges(documents):
            pieces = await self._source.records(key[0], ranges)
            for (generation, _, _), records in zip(ranges, pieces, strict=True):
                found[generation] += records
                entry.rows_read += len(records)
        return found


def _difference(index: CollectionIndex, changed: Changed) -> tuple[set[int], list[int]]:
    """The generations that have gone, and those that may have come."""
    have, told = index.generations(), set(changed.generations)
    # A generation goes live once and away once: one that we have and hear of again is gone.
    gone = have - told if changed.everything else have & told
    return set(gone), sorted(told - have)


def _followed(index: CollectionIndex, small: SmallChange) -> CollectionIndex:
    """The index after a change."""
    if small.version in (0, index.version):
        return index if small.version else CollectionIndex()
    have = index.generations()
    gone = have & set(small.generations)
    new = [document for document in small.live if document.generation not in have]
    built, _ = _built(new, small.records, small.dims)
    return index.changed(small.version, small.dims, gone, [] if built is None else [built])


def _built(
    documents: Sequence[LiveDocument], found: Mapping[int, Sequence[bytes | None]], dims: int
) -> tuple[Segment | None, bool]:
    """A segment of the documents whose records are all there, and whether those are all."""
    whole, all_there = [], True
    for document in documents:
        records = [record for record in found[document.generation] if record is not None]
        if len(records) == document.chunk_count and all(is_record(one, dims) for one in records):
            whole.append((document, records))
            continue
        all_there = False
        if len(records) == document.chunk_count:  # not ours: what is of us stays searchable
            log.error("stored chunks cannot be read", generation=document.generation)
    return build(whole, dims) if any(records for _, records in whole) else None, all_there


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _batches(live: Mapping[int, LiveDocument]) -> Iterator[list[LiveDocument]]:
    """The documents in batches of about ``BUILD_ROWS``."""
    batch: list[LiveDocument] = []
    rows = 0
    for document in live.values():
        batch.append(document)
        rows += document.chunk_count
        if rows >= BUILD_ROWS:
            yield batch
            batch, rows = [], 0
    if batch:
        yield batch


def _ranges(documents: Sequence[LiveDocument]) -> Iterator[list[tuple[int, int, int]]]:
    """All chunks of the documents as ranges, at most ``READ_CHUNKS`` together."""
    ranges: list[tuple[int, int, int]] = []
    room = READ_CHUNKS
    for document in documents:
        first = 0
        while first < document.chunk_count:
            end = min(first + room, document.chunk_count)
            ranges.append((document.generation, first, end))
            room -= end - first
            first = end
            if room == 0:
                yield ranges
                ranges, room = [], READ_CHUNKS
    if ranges:
        yield ranges
