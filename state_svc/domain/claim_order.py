"""Which tenants are asked for ready runs, in which order, and for how many.

Pure. Classes go first; between the tenants of a class it is round robin by name, from the tenant
after the one served last. Each state service has a turn of its own, which is lost with it: the sum
of several is as fair, and who lost a turn gets the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class ClaimOrder:
    """The turn."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}  # by priority

    def arrange(self, priority: int, tenants: Sequence[str]) -> list[str]:
        """The tenants in the order in which their turn is."""
        ordered = sorted(tenants)
        begin = bisect_right(ordered, self._last.get(priority, ""))
        return ordered[begin:] + ordered[:begin]

    def served(self, priority: int, tenant: str) -> None:
        """The tenant got a run."""
        self._last[priority] = tenant


def shares(tenants: Sequence[str], left: int) -> list[tuple[str, int]]:
    """Who is asked for how many, so that all together give at most ``left``: equal shares, and one
    each for the first ones where there are more tenants than that."""
    share = max(1, left // max(1, len(tenants)))
    return [(tenant, share) for tenant in tenants[:left]]
