"""Clients that were cut off because they did not read come back one by one.

A client that is ended for slowness usually comes back at once, and is slow again: each round costs
reads of the store and bytes on their way that nobody takes. So for each watch of a tenant that was
ended, one that the tenant begins pays: no two of those within :data:`PACE_S`. Nothing is remembered
:data:`FORGOTTEN_S` after the last such end. Pure; times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PACE_S: Final = 0.5
FREE: Final = 4  # ends that nobody pays for: a client may fall asleep
FORGOTTEN_S: Final = 60.0


@dataclass(slots=True)
class _Owed:
    watches: int = 0
    last_s: float = 0.0
    next_s: float = 0.0


class SlowWatchers:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._owed: dict[str, _Owed] = {}

    def ended(self, tenant: str, now: float) -> None:
        """A watch was ended because its client did not read."""
        self._forget(tenant, now)
        owed = self._owed.setdefault(tenant, _Owed())
        owed.watches += 1
        owed.last_s = now

    def wait_s(self, tenant: str, now: float) -> float:
        """How long the tenant's next watch has to wait; 0: it may begin."""
        self._forget(tenant, now)
        owed = self._owed.get(tenant)
        if owed is None or owed.watches <= FREE:
            return 0.0
        return max(0.0, owed.next_s - now)

    def began(self, tenant: str, now: float) -> None:
        """A watch of the tenant began."""
        owed = self._owed.get(tenant)
        if owed is not None and owed.watches > FREE:
            owed.watches -= 1
            owed.next_s = now + PACE_S

    def _forget(self, tenant: str, now: float) -> None:
        owed = self._owed.get(tenant)
        if owed is not None and now - owed.last_s >= FORGOTTEN_S:
            del self._owed[tenant]
