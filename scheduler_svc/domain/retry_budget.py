"""Whether a failed attempt may be made again, and when.

:class:`RetryBudget`: further attempts may be a tenth of what succeeds. The bucket is filled by
requests that were served, not by those that came, so that it fills with nothing when everything
fails: then attempts are calls. It is drained by faults above 8 %: with a share p of attempts that
fail, p / (1 - p) further ones are needed for each that succeeds. The least rate lets a mesh with
little traffic recover (as ``minRetriesPerSec`` of Finagle; the ratio is gRPC's ``tokenRatio``).

:class:`Pacing`: what one broken stream orphaned goes back to the queue at a bounded rate and not
all at once, or the instances left would read all those prompts before anything else. The first
failover of a ticket after a loss is free: a death is no sign of overload, and not to go on after
one would punish those who happened to be there.

Both are pure: ``now`` in seconds never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from scheduler_svc.domain.heap import LazyHeap
from scheduler_svc.domain.limits import RetryLimits
from scheduler_svc.domain.model import FaultKind, Ticket

LOSSES: Final = frozenset(
    (
        FaultKind.UNREACHABLE,
        FaultKind.LOST_CONNECTION,
        FaultKind.LOST_RELAY,
        FaultKind.ENGINE_DOWN,
        FaultKind.NOT_SERVING,
        FaultKind.GOING_DOWN,
        FaultKind.FINGERPRINT,
    )
)
"""What lay under the attempt is gone, or another model by now: the first failover after one of
these is free and paced."""


ROUNDING: Final = 1e-6  # of a token: at the time that ``next_s`` says there is one


class Bucket:
    """A token bucket, full at first. O(1)."""

    __slots__ = ("_at_s", "_cap", "_rate", "tokens")

    def __init__(self, cap: float, rate_per_s: float) -> None:
        self._cap = cap
        self._rate = rate_per_s
        self._at_s: float | None = None
        self.tokens = cap

    def add(self, tokens: float) -> None:
        self.tokens = min(self._cap, self.tokens + tokens)

    def take(self, now: float) -> bool:
        """One token, if there is one."""
        self._fill(now)
        if self.tokens < 1.0 - ROUNDING:
            return False
        self.tokens -= 1.0
        return True

    def next_s(self, now: float) -> float:
        """When there is one; ``now`` if there is."""
        self._fill(now)
        missing = 1.0 - self.tokens
        return now if missing <= ROUNDING else now + missing / self._rate

    def _fill(self, now: float) -> None:
        if self._at_s is not None:
            self.add((now - self._at_s) * self._rate)
        self._at_s = now


class RetryBudget:
    """See the module's text. ``refused``: attempts that it did not allow."""

    def __init__(self, limits: RetryLimits) -> None:
        self._limits = limits
        self._bucket = Bucket(limits.budget_max, limits.budget_min_per_s)
        self.taken = 0
        self.refused = 0

    def served(self) -> None:
        """A request came to its end."""
        self._bucket.add(self._limits.budget_ratio)

    def take(self, now: float) -> bool:
        """Whether one more attempt may be made; if so it is counted."""
        allowed = self._bucket.take(now)
        self.taken += allowed
        self.refused += not allowed
        return allowed


class Pacing:
    """Tickets on their way back to the queue: higher classes first, of a class those that had come
    least far. O(log n) per ticket."""

    def __init__(self, limits: RetryLimits) -> None:
        self._bucket = Bucket(limits.failover_burst, limits.failover_per_s)
        self._waiting: LazyHeap[Ticket] = LazyHeap()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, ticket: Ticket, tokens: int) -> None:
        """``tokens``: how far it had come."""
        self._waiting.push(ticket.id, (ticket.priority_class, tokens, ticket.id), ticket)

    def remove(self, ticket: Ticket) -> None:
        self._waiting.remove(ticket.id)

    def release(self, now: float, may_go: Callable[[Ticket], bool]) -> Iterator[Ticket]:
        """Those whose turn it is, one by one; one that may not go yet lets others pass."""
        held = []
        while self._waiting and self._bucket.next_s(now) <= now:
            entry = self._waiting.pop()
            assert entry is not None
            if may_go(entry[2]):
                paid = self._bucket.take(now)
                assert paid
                yield entry[2]
            else:
                held.append(entry)
        for entry in held:
            self._waiting.restore(entry[2].id, entry)

    def next_s(self, now: float, go_at_s: Callable[[Ticket], float | None]) -> float | None:
        """When time alone lets one go. ``go_at_s``: from when on it may, whatever else happens."""
        if not self._waiting:
            return None
        rate_s = self._bucket.next_s(now)
        if rate_s > now:
            return rate_s
        times = (go_at_s(ticket) for ticket in self._waiting.items())
        return min((time for time in times if time is not None), default=None)
