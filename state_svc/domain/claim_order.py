"""Which tenants are asked for ready runs, in which order, and for how many.

Pure. Classes go first; between the tenants of a class it is round robin by name, from the tenant
after the one served last. That is fair at the moment of the claim; what a tenant holds already is
the count of who asks, who brings it along as :class:`ClaimRoom`. Each state service has a turn of
its own, which is lost with it: the sum of several is as fair, and who lost a turn gets the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

LAST_URGENT: Final = 2  # the last class that `later_max` does not hold back
LARGE_MAX: Final = 64  # tenants remembered for the size of their next run


@dataclass(frozen=True, slots=True)
class ClaimRoom:
    """What an asker has room for, beside the number of runs. ``later_max``: most of the classes
    after the second; ``tenant_max``: most of a tenant that is not among ``tenants``, which have
    their own; None: not limited. ``endings_max``: when there is nothing else for it, or it has no
    room for that, most runs that have only to be ended."""

    later_max: int | None = None
    tenant_max: int | None = None
    tenants: Mapping[str, int] = field(default_factory=dict)
    endings_max: int = 0

    def full(self) -> tuple[str, ...]:
        """Tenants of which it takes no more."""
        return tuple(tenant for tenant, most in self.tenants.items() if not most)


class Allowance:
    """What is left of a :class:`ClaimRoom` while runs are claimed."""

    def __init__(self, runs_max: int, room: ClaimRoom) -> None:
        self._room = room
        self._left = runs_max
        self._later = runs_max if room.later_max is None else room.later_max
        self._taken: dict[str, int] = {}

    def of_class(self, priority: int) -> int:
        """How many more runs of a class may be claimed."""
        return self._left if priority <= LAST_URGENT else min(self._left, self._later)

    def of_tenant(self, tenant: str, priority: int) -> int:
        """How many more of a tenant in a class."""
        most = self._room.tenants.get(tenant, self._room.tenant_max)
        left = self.of_class(priority)
        return left if most is None else min(left, most - self._taken.get(tenant, 0))

    def take(self, tenant: str, priority: int, count: int) -> None:
        """So many were claimed."""
        self._left -= count
        self._taken[tenant] = self._taken.get(tenant, 0) + count
        if priority > LAST_URGENT:
            self._later -= count


class ClaimOrder:
    """The turn."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}  # by priority
        # Those whose next run was left for its size, the first of them first; by priority.
        self._large: dict[int, dict[str, None]] = {}

    def arrange(self, priority: int, tenants: Sequence[str]) -> list[str]:
        """The tenants in the order in which their turn is."""
        ordered = sorted(tenants)
        begin = bisect_right(ordered, self._last.get(priority, ""))
        ordered = ordered[begin:] + ordered[:begin]
        among = set(ordered)
        first = next((one for one in self._large.get(priority, ()) if one in among), None)
        return sorted(ordered, key=lambda one: one != first)

    def goes_alone(self, priority: int, tenant: str) -> bool:
        """Whether its next run was too large to be claimed beside those of others."""
        return tenant in self._large.get(priority, ())

    def too_large(self, priority: int, tenant: str) -> None:
        """The tenant's next run was left for its size: it goes first, and alone, the next time.
        Else it would stand back for as long as others have smaller ones."""
        large = self._large.setdefault(priority, {})
        large[tenant] = None
        if len(large) > LARGE_MAX:
            del large[next(iter(large))]

    def went_alone(self, priority: int, tenant: str) -> None:
        """The tenant was asked for one run of whatever size."""
        self._large.get(priority, {}).pop(tenant, None)

    def served(self, priority: int, tenant: str) -> None:
        """The tenant got a run."""
        self._last[priority] = tenant


def shares(tenants: Sequence[str], left: int) -> list[tuple[str, int]]:
    """Who is asked for how many, so that all together give at most ``left``: equal shares, and one
    each for the first ones where there are more tenants than that."""
    share = max(1, left // max(1, len(tenants)))
    return [(tenant, share) for tenant in tenants[:left]]
