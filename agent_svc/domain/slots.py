"""How many runs an agent service takes, of whom: its slots, and who may have them. Pure.

* **A share for each tenant.** A tenant may take a run while it then holds at most a fixed multiple
  of the slots that are free: with ``tenant_share`` 0.75 three times as many. Alone it gets 3/4 of
  all slots, two that want everything get 3/7 each, and so on: there is always room for one more
  tenant, which gets its share at once, although nobody is ever stopped for it (dynamic thresholds:
  Choudhury and Hahne, 1998). Who holds none gets one while any slot is free.
* **Slots kept for the first classes.** STANDARD and BATCH leave ``urgent_share`` of all slots free
  for CRITICAL and INTERACTIVE.
* **Endings need no slot.** A run that has only to be ended is taken beyond all this, at most
  :data:`ENDINGS_MAX` at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ENDINGS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of all slots: the most that one tenant holds, and what is kept for the first
    classes."""

    tenant: float = 0.75
    urgent: float = 0.1


SHARES: Final = Shares()


@dataclass(frozen=True, slots=True)
class Room:
    """``runs``: most runs; ``later``: most of them in the classes after the second; ``tenant``:
    most of a tenant that holds none; ``tenants``: of those that do; ``endings``: most runs that
    have only to be ended."""

    runs: int
    later: int
    tenant: int
    tenants: Mapping[str, int]
    endings: int

    @property
    def is_limited(self) -> bool:
        """Whether there are runs for which there is no room."""
        return not (self.runs and self.later and self.tenant and all(self.tenants.values()))


def room(shares: Shares, slots: int, held: Mapping[str, int], endings: int, claim_max: int) -> Room:
    """The room there is. ``held``: slots by tenant that holds any; ``endings``: runs held that have
    only to be ended; ``claim_max``: most runs of one claim."""
    free = max(0, slots - sum(held.values()))

    def of(tenant_holds: int) -> int:
        # What it then holds, h + n, is at most share / (1 - share) times what is then free, f - n.
        most = math.floor(shares.tenant * free - (1 - shares.tenant) * tenant_holds + 1e-9)
        return min(free, max(most, 0 if tenant_holds else 1))

    return Room(
        runs=min(free, claim_max),
        later=max(0, free - math.floor(shares.urgent * slots)),
        tenant=of(0),
        tenants={tenant: of(count) for tenant, count in held.items()},
        endings=max(0, ENDINGS_MAX - endings),
    )
