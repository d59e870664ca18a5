"""Which instance was sent which prompt prefixes: a table of fixed size in bytes.

Owns one set-associative table, as in a processor's cache: a hash (``canonical``) belongs to one
bucket of ``WAYS`` places; a place holds the hash, when it was last used, and up to ``HOLDERS``
instances that were sent that prefix. All columns are numpy arrays that are allocated once, so that
memory never exceeds ``bytes_max``, whatever is put in: 76 bytes a block of a prompt. A full bucket
gives up its least recently used place, so prefixes in use stay and a scan of prompts that never
come again passes through. Looking up, noting and forgetting are a few whole-array operations:
O(blocks + matches), and O(1) to forget an instance.

What is known of an instance goes stale in three ways. It is lost, removed or restarted: its
generation grows and all its entries are void at once. It evicts by itself: a prompt is taken to be
gone from it when more new blocks than fit its KV memory were sent there from that prompt on. Nobody
used the prefix for ``ttl_s``. The index steers placement only: a wrong entry costs a prefill.

Single-threaded; time is passed in (seconds, not below 0). More instances with one prefix than
``HOLDERS``: some are forgotten, those noted last are kept.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.domain.canonical import Hashes

WAYS: Final = 8
HOLDERS: Final = 8
MATCH_BLOCKS_MIN: Final = 2
"""A match of fewer blocks does not count: the first block is often the same for everybody (in the
Mooncake conversation trace all requests share it) and would pull all to one place."""

PROBED_ALL: Final = 32
PROBED_EVERY: Final = 4

TICKS_PER_S: Final = 16  # resolution of the last use; 32 bits last 8 years
_GENERATION_BITS: Final = 32

Blocks = NDArray[np.int32]
_Places = NDArray[np.intp]


class PrefixIndex:
    """``rows_max``: rows of the fleet. ``bytes_max``: all arrays together stay below it."""

    ENTRY_BYTES: Final = 8 + 4 + HOLDERS * (4 + 4)
    _ROW_BYTES: Final = 3 * 4

    def __init__(self, rows_max: int, bytes_max: int, ttl_s: float) -> None:
        self._row_bits = max(1, (rows_max - 1).bit_length())
        table_bytes = bytes_max - rows_max * self._ROW_BYTES
        buckets = max(1, table_bytes // (WAYS * self.ENTRY_BYTES))
        assert buckets < 2**32
        self._buckets = np.uint64(buckets)
        self._ttl_ticks = max(1, round(ttl_s * TICKS_PER_S))
        places = buckets * WAYS
        self._hash: Hashes = np.zeros((buckets, WAYS), np.uint64)  # 0: empty
        self._used = np.zeros((buckets, WAYS), np.uint32)
        # An instance at one time of its life: generation << row bits | row; 0 is nobody.
        self._holder = np.zeros((places, HOLDERS), np.uint32)
        # How many new blocks the holder had been sent before it was last sent this one.
        self._sent_at = np.zeros((places, HOLDERS), np.uint32)
        self._generation = np.ones(rows_max, np.uint32)
        self._sent = np.zeros(rows_max, np.uint32)
        self._capacity = np.full(rows_max, np.iinfo(np.uint32).max, np.uint32)
        self.evictions = 0

    # --- questions ---------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; fixed."""
        arrays = (
            *(self._hash, self._used, self._holder, self._sent_at),
            *(self._generation, self._sent, self._capacity),
        )
        return sum(array.nbytes for array in arrays)

    @property
    def capacity(self) -> int:
        """Most blocks that it can hold."""
        return self._hash.size

    def __len__(self) -> int:
        """Blocks that it holds, void ones included. O(capacity)."""
        return int(np.count_nonzero(self._hash))

    def match(self, hashes: Hashes, rows: int, now: float) -> Blocks | None:
        """Blocks at the beginning of the prompt that each of the first ``rows`` rows should have in
        its cache; 0 below ``MATCH_BLOCKS_MIN``. ``None``: nobody has any. Beyond ``PROBED_ALL``
        blocks it looks at every ``PROBED_EVERY``-th and the last one, so that a long prompt costs
        little and may be found up to 3 blocks shorter than it is."""
        probed = _probed(len(hashes))
        found, places = self._find(hashes[probed])
        levels = probed[found]
        counts = self._used.reshape(-1)[places] + np.uint32(self._ttl_ticks) >= self._tick(now)
        counts &= levels >= MATCH_BLOCKS_MIN - 1
        levels, places = levels[counts], places[counts]
        known = self._holder[places].reshape(-1)
        where = known.nonzero()[0]  # most places have few holders
        holders = known[where]
        owners = (holders & np.uint32((1 << self._row_bits) - 1)).astype(np.intp)
        held = holders >> np.uint32(self._row_bits) == self._generation[owners]
        sent_at = self._sent_at[places].reshape(-1)[where]
        held &= self._sent[owners] - sent_at <= self._capacity[owners]
        held &= owners < rows
        if not held.any():
            return None
        matched: Blocks = np.zeros(rows, np.int32)
        blocks = (levels[where[held] // HOLDERS] + 1).astype(np.int32)
        np.maximum.at(matched, owners[held], blocks)
        return matched

    # --- changes -----------------------------------------------------------------------------

    def note(self, hashes: Hashes, row: int, now: float) -> None:
        """The prompt was sent to the row."""
        if not len(hashes):
            return
        holder = np.uint32(int(self._generation[row]) << self._row_bits | row)
        levels, places = self._find(hashes)
        missing = np.ones(len(hashes), np.bool_)
        missing[levels] = False
        new = int(np.count_nonzero(missing))
        theirs = self._holder[places] == holder
        has = theirs.any(axis=1)
        self._used.reshape(-1)[places] = self._tick(now)
        ways = theirs.argmax(axis=1)
        ways[~has] = self._way_to_give_up(places[~has])
        self._hold(places, ways, holder, row)
        if new:
            self._insert(hashes[missing], holder, row, now)
        # Blocks that the row has already take no more of its memory.
        sent = int(self._sent[row]) + new + len(places) - int(np.count_nonzero(has))
        self._sent[row] = sent % 2**32  # ages are differences, so that a turn of it is harmless

    def forget(self, row: int) -> None:
        """What the row held is gone: it was lost, removed, or its engine began anew. O(1)."""
        generation = (int(self._generation[row]) + 1) % (1 << (_GENERATION_BITS - self._row_bits))
        self._generation[row] = max(1, generation)
        self._sent[row] = 0

    def set_capacity(self, row: int, blocks: int) -> None:
        """Blocks that fit the row's KV memory; 0: no bound is known."""
        self._capacity[row] = min(blocks, np.iinfo(np.uint32).max) or np.iinfo(np.uint32).max

    # --- parts -------------------------------------------------------------------------------

    def _bucket(self, hashes: Hashes) -> _Places:
        return (((hashes >> np.uint64(32)) * self._buckets) >> np.uint64(32)).astype(np.intp)

    def _find(self, hashes: Hashes) -> tuple[_Places, _Places]:
        """Positions in ``hashes`` that are known, growing, and their places."""
        buckets = self._bucket(hashes)
        found, ways = np.nonzero(self._hash[buckets] == hashes[:, None])
        return found, buckets[found] * WAYS + ways

    def _insert(self, hashes: Hashes, holder: np.uint32, row: int, now: float) -> None:
        """Gives each hash the least recently used place of its bucket. Hashes of one prompt that
        meet in a bucket go one after the other; more than it has ways replace each other."""
        tick = self._tick(now)
        buckets = self._bucket(hashes)
        while len(hashes):
            _, first = np.unique(buckets, return_index=True)
            chosen = buckets[first]
            ways = self._used[chosen].argmin(axis=1)
            self.evictions += int(np.count_nonzero(self._hash[chosen, ways]))
            self._hash[chosen, ways] = hashes[first]
            self._used[chosen, ways] = tick
            places = chosen * WAYS + ways
            self._holder[places] = 0
            self._hold(places, np.zeros(len(places), np.intp), holder, row)
            if len(first) == len(hashes):
                return
            rest = np.ones(len(hashes), np.bool_)
            rest[first] = False
            hashes, buckets = hashes[rest], buckets[rest]

    def _way_to_give_up(self, places: _Places) -> _Places:
        """For each place a holder to replace: one that is void, else the one that was sent the
        prefix the longest ago by its own count."""
        holders = self._holder[places]
        owners = holders & np.uint32((1 << self._row_bits) - 1)
        void = holders >> np.uint32(self._row_bits) != self._generation[owners]
        age = (self._sent[owners] - self._sent_at[places]).astype(np.int64)
        age[void] = np.iinfo(np.int64).max
        oldest: _Places = age.argmax(axis=1)
        return oldest

    def _hold(self, places: _Places, ways: _Places, holder: np.uint32, row: int) -> None:
        self._holder[places, ways] = holder
        self._sent_at[places, ways] = self._sent[row]

    @staticmethod
    def _tick(now: float) -> np.uint32:
        return np.uint32(1 + int(now * TICKS_PER_S))


def _probed(blocks: int) -> _Places:
    """Which of so many blocks are looked at, growing."""
    if blocks <= PROBED_ALL:
        return np.arange(blocks)
    some = np.arange(PROBED_ALL + PROBED_EVERY - 1, blocks - 1, PROBED_EVERY)
    return np.concatenate((np.arange(PROBED_ALL), some, [blocks - 1]))
