"""Placement policies: ``least_work``, ``weighted``, ``prefix_affinity``, ``round_robin``.

A policy is three questions over columns (``ports.PlacementPolicy``); room is not its business.
Times are seconds, counts are tokens. One decision over 1,000 instances takes about 20 µs, and 45 µs
more with a look into the prefix index. Policies keep no more than where the last pick was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Final

import numpy as np

from scheduler_svc.ports import Column, FleetColumns, Mask, Need, PlacementPolicy

# Scores this close count as equal: an estimate knows no better, and without it the rounding of
# tiny differences would decide.
TIE_S = 1e-4

# Engines allocate their memory when they start. A GPU with less than this share left is shared with
# something that grows, or about to run out.
GPU_MEMORY_FREE_MIN: Final = 0.01


class LeastWork:
    """The instance with the least expected seconds of work, this ticket's included.

    Work = (prompt tokens outstanding + this prompt) / prefill rate
         + (output tokens expected + this output) * step time / sequences_max.

    The second term is the engine's time for those tokens in full batches, so that a faster or a
    larger instance counts for more. Rates are learnt from reports (``fleet``). The greedy rule is
    list scheduling on unequal machines (Graham 1969, Horowitz and Sahni 1976). Ties go round from
    the row after the last pick; ``seed`` says where that begins."""

    reads_prefixes = False

    def __init__(self, seed: int = 0) -> None:
        self._next = seed

    def filter(self, fleet: FleetColumns, need: Need, usable: Mask) -> Mask:
        """Prefers instances whose context is long enough by our estimate, and whose GPUs have
        memory left. When none is, all stay: the estimate may be wrong, and the engine refuses with
        exact counts; a nearly full GPU is better than no answer."""
        if fleet.gpu_memory_free_min < GPU_MEMORY_FREE_MIN:
            usable = _prefer(usable, fleet.gpu_memory_free >= GPU_MEMORY_FREE_MIN)
        if need.context_tokens > fleet.context_tokens_min:
            usable = _prefer(usable, fleet.context_tokens >= need.context_tokens)
        return usable

    def score(self, fleet: FleetColumns, need: Need) -> Column:
        work: Column = fleet.prompt_s_per_token * need.prompt_tokens
        work += fleet.backlog_s
        work += fleet.output_s_per_token * need.output_tokens
        return work

    def pick(self, scores: Column, candidates: Mask) -> int:
        costs = np.where(candidates, scores, inf)
        ties = np.flatnonzero(costs <= costs.min() + TIE_S)
        start = self._next % len(scores)
        row = int(ties[int(np.searchsorted(ties, start)) % len(ties)])
        self._next = row + 1
        return row

    def parts(self, fleet: FleetColumns, need: Need, row: int) -> Mapping[str, float]:
        return {
            "prompt": float(fleet.prompt_s_per_token[row]) * need.prompt_tokens,
            "backlog": float(fleet.backlog_s[row]),
            "output": float(fleet.output_s_per_token[row]) * need.output_tokens,
        }


class RoundRobin(LeastWork):
    """The next instance with room after the last pick, whatever it has to do.

    What a load balancer does that knows nothing; here for comparison, and for fleets of equal
    instances under equal requests."""

    def score(self, fleet: FleetColumns, need: Need) -> Column:
        return np.zeros_like(fleet.backlog_s)

    def parts(self, fleet: FleetColumns, need: Need, row: int) -> Mapping[str, float]:
        return {}


class PrefixAffinity(LeastWork):
    """The instance with the longest match, while its load is within a gap of the least; else the
    least work.

    A match of the longest length is worth ``GAP_S`` seconds of backlog, a shorter one its share: so
    it wins against an idle instance while its backlog is at most that much more. That is the rule
    "match of at least two blocks, else least loaded" (which reaches the ideal hit rate on the
    Mooncake conversation trace) with the bounded load gap that SMG's ``cache_aware`` and llm-d's
    sticky scorer have, in seconds instead of requests, so that it means the same on fast and slow
    instances. Nothing is switched off for others when one instance is hot."""

    reads_prefixes = True
    GAP_S: Final = 10.0

    def score(self, fleet: FleetColumns, need: Need) -> Column:
        work = super().score(fleet, need)
        if need.cached_tokens is not None:
            work -= need.cached_tokens * (self.GAP_S / float(need.cached_tokens.max()))
        return work

    def parts(self, fleet: FleetColumns, need: Need, row: int) -> Mapping[str, float]:
        parts = dict(super().parts(fleet, need, row))
        if need.cached_tokens is not None:
            longest = float(need.cached_tokens.max())
            parts["cached"] = -self.GAP_S * float(need.cached_tokens[row]) / longest
        return parts


class Weighted(LeastWork):
    """The least expected cost in seconds: the work, less what a match saves, plus what a full KV
    memory will cost.

    Cost = work of ``LeastWork``
         - REUSE * cached prompt tokens / prefill rate
         + KV_S * k / (1 - k), k = KV memory held and expected
         + BALANCE * work given to the instance lately.

    The saved prefill counts ``REUSE`` times: once for this prompt, and again for those to come that
    begin like it, which would find less of it if it were spread. Measured on the Mooncake
    conversation trace (``bench/placement.py``): counted once, 88 % of the ideal hit rate; 8 times,
    98 %, at the same times to first token. The last term keeps the long run even: backlogs say
    nothing of an hour in which nobody waits, and affinity sends more to where more was sent. With
    it the busiest instance of that trace has 1.01 times the mean work, without it 1.10, at the same
    hit rate. "Lately" is an exponential mean over about ``PICKS`` decisions; a new instance starts
    at the mean of the others, so that it is not flooded.

    llm-d's default blend weighs prefix to queue 3 to 2, Dynamo's cost subtracts the overlap once;
    the KV term and its 0.15 s are SMG's. GPUs that are throttled or short of memory are in the
    columns and the filter."""

    reads_prefixes = True
    REUSE: Final = 8.0
    KV_S: Final = 0.15
    KV_LOAD_MAX: Final = 0.99
    BALANCE: Final = 0.02
    PICKS: Final = 1_000

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._given_s: Column = np.zeros(0)  # by row: seconds of work given lately
        self._adds_s: Column = np.zeros(0)  # by row: what the ticket scored last would add

    def score(self, fleet: FleetColumns, need: Need) -> Column:
        cost = super().score(fleet, need)
        adds: Column = cost - fleet.backlog_s
        if need.cached_tokens is not None:
            saved = fleet.prompt_s_per_token * need.cached_tokens
            adds -= saved
            cost -= saved * self.REUSE
        self._adds_s = adds
        given = self._given(len(cost))
        cost += self.BALANCE * (given - given.min())
        held = np.minimum(fleet.kv_load, self.KV_LOAD_MAX)
        cost += self.KV_S * held / (1.0 - held)
        return cost

    def pick(self, scores: Column, candidates: Mask) -> int:
        row = super().pick(scores, candidates)
        self._given_s *= 1.0 - 1.0 / self.PICKS
        self._given_s[row] += self._adds_s[row]
        return row

    def _given(self, rows: int) -> Column:
        """The column, as long as the fleet."""
        known = len(self._given_s)
        if known < rows:
            start_s = float(self._given_s.mean()) if known else 0.0
            more = np.full(rows - known, start_s)
            self._given_s = np.concatenate((self._given_s, more))
        return self._given_s[:rows]

    def parts(self, fleet: FleetColumns, need: Need, row: int) -> Mapping[str, float]:
        parts = dict(super().parts(fleet, need, row))
        if need.cached_tokens is not None:
            saved = float(fleet.prompt_s_per_token[row]) * float(need.cached_tokens[row])
            parts["cached"] = -saved * self.REUSE
        held = min(float(fleet.kv_load[row]), self.KV_LOAD_MAX)
        parts["memory"] = self.KV_S * held / (1.0 - held)
        return parts


POLICIES: Final[Mapping[str, Callable[[int], PlacementPolicy]]] = {
    "least_work": LeastWork,
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
    "weighted": Weighted,
}
"""By the name in the configuration; the argument is the seed."""


def _prefer(usable: Mask, wanted: Mask) -> Mask:
    preferred: Mask = usable & wanted
    return preferred if preferred.any() else usable
