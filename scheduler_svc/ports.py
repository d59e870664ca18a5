"""What the scheduling domain needs from outside: a placement policy.

No clock, no I/O: times are passed in, effects are returned. A policy is called by the owner task,
synchronously, once per ticket that is about to be placed; it must not block, must not keep the
arrays it is given (they change with the next dispatch), and must be deterministic given its seed.

Columns are numpy arrays indexed by instance row, all of one length R. Rows of removed instances
are reused; a free row has ``usable`` false for every model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Need:
    """What a ticket needs. ``prompt_tokens``: the whole prompt; ``output_tokens``: expected;
    ``kv_tokens``: held at its expected end; ``context_tokens``: prompt and at least one token.
    ``cached_tokens``: a column of the prompt tokens that each row should have in its prefix cache,
    below ``prompt_tokens``; ``None`` when no row has any, or nobody asks."""

    model: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    context_tokens: int
    cached_tokens: Column | None = None


class FleetColumns(Protocol):
    """Read-only columns. Counts are this scheduler's ledger plus what others were reported to run.

    context_tokens: most tokens of prompt and output together; _min: the least of them.
    backlog_s: expected seconds of engine time of what runs there: prompt tokens outstanding
        / prefill rate + output tokens expected * step time / sequences_max.
    prompt_s_per_token: 1 / prefill rate. output_s_per_token: step time / sequences_max.
        All three are higher while a GPU of the instance is throttled.
    free_sequences, free_kv_tokens: by ledger and credit; kv is inf where KV is no limit.
    kv_load: share of the KV memory that running sequences hold or are expected to, 0 to 1; 0 where
        KV is no limit.
    gpu_memory_free: least free share of memory over its GPUs, 0 to 1; 1 where it is not known;
        _min: the least of them.
    """

    @property
    def context_tokens(self) -> Column: ...
    @property
    def context_tokens_min(self) -> float: ...
    @property
    def backlog_s(self) -> Column: ...
    @property
    def prompt_s_per_token(self) -> Column: ...
    @property
    def output_s_per_token(self) -> Column: ...
    @property
    def free_sequences(self) -> Column: ...
    @property
    def free_kv_tokens(self) -> Column: ...
    @property
    def kv_load(self) -> Column: ...
    @property
    def gpu_memory_free(self) -> Column: ...
    @property
    def gpu_memory_free_min(self) -> float: ...


class PlacementPolicy(Protocol):
    """Chooses among instances that could run a ticket now. ``reads_prefixes``: whether it wants
    ``Need.cached_tokens``, which costs a look into the prefix index per decision."""

    @property
    def reads_prefixes(self) -> bool: ...

    def filter(self, fleet: FleetColumns, need: Need, usable: Mask) -> Mask:
        """Narrows ``usable`` (model, health, drain, breaker, GPU faults, freshness, exclusion) to
        where the ticket may ever run, room aside. Returns a mask of the same length; may return
        ``usable`` itself. Narrowing to nothing means that the ticket waits."""

    def score(self, fleet: FleetColumns, need: Need) -> Column:
        """Expected cost of running the ticket on each row, in seconds; less is better."""

    def pick(self, scores: Column, candidates: Mask) -> int:
        """A row among ``candidates`` (at least one is true)."""

    def parts(self, fleet: FleetColumns, need: Need, row: int) -> Mapping[str, float]:
        """What the score of a row is made of, for people: names and seconds whose sum it is. Called
        for few rows, and only for decisions that are kept. May be empty."""
