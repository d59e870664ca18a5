"""Where runs may be ready, over all tenants: a hint beside the tenants' own lines.

``sluice:{runs}:due`` holds places, ``<priority>:<tenant>``, by the time to look there, and
``sluice:{runs}:written`` when each was last written by who made a run ready. They have another hash
tag than the runs, so that no script changes both. A run is never lost by that:

* Who makes a run ready from nothing (creates, resumes, cancels one that waits) writes the place
  before and after. *Crash before the tenant's script:* a look finds nothing. *After it:* the place
  stands, from before.
* Who looks postpones the place by :data:`LOOK_AGAIN_MS`, then asks the tenant, then sets it to what
  the tenant says, never to a later time than it has by then. *Crash between:* it is looked at
  again when the postponement ends. *Somebody makes a run ready between look and answer:* that write
  made the time earlier, and it stays so. *Its first write came before the look, its script after
  the answer, and it died before its second:* found when the postponement ends.
* Who has no room for a place leaves it as it is, and so does who only peeks: others find it there.
* A place goes only when its tenant says that no run of the class is in line (held and paused ones
  are), it was not written since, and the last write from nothing is older than :data:`UNUSED_MS`.
  A script that such a write goes before refuses to run later than :data:`LATE_MS` after it, on the
  store's clock; so none can follow the removal.
* Places that are lost although runs are not (another server's log was cut, somebody deleted a key)
  are written anew from the tenants' own lines: ``run_sweep.py``.
* Everything else (claims, renewals, pauses) moves runs that are in line already: their place
  exists, and says a time of at most :data:`LOOK_AGAIN_MS` ahead, or an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice import logs
from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.domain.claim_order import LAST_URGENT
from state_svc.domain.run_values import PRIORITIES
from state_svc.ports import StoreUnavailableError

ORDERS: Final = "sluice:{runs}:orders"  # a channel: "<holder, or *> <tenant> <run>"
LOOK_AGAIN_MS: Final = 5_000
LATE_MS: Final = 30_000
UNUSED_MS: Final = 2 * LATE_MS
PLACES_MAX: Final = 512  # looked at once

_SCRIPT: Final = Script("run_index.lua", frees=True)  # a full store must still be worked off
_KEYS: Final = ("sluice:{runs}:due", "sluice:{runs}:written")

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """``now_ms`` of the store, the next time at which a place is due (``None``: there is none), and
    the places that are: priority and tenant."""

    now_ms: int
    next_ms: int | None
    places: tuple[tuple[int, str], ...]


class ValkeyRunIndex:
    """The hint. Raises StoreUnavailableError; ``clock_ms`` is a test's own time."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link
        self.clock_ms = 0
        self._peeked = 0  # places, by those who only peeked

    async def before_ready(self, tenant: str, priority: int) -> int:
        """Writes the place; until when, on the store's clock, the tenant's script may run."""
        return int(await self._run("ready", _place(tenant, priority), "", "")) + LATE_MS

    async def after_ready(self, tenant: str, priority: int, run_id: str) -> None:
        """Writes it again and tells those who claim. A failure costs time only."""
        try:
            await self._run("ready", _place(tenant, priority), ORDERS, f"* {tenant} {run_id}")
        except StoreUnavailableError as error:
            log.warning("a ready run is found late", problem=str(error))

    async def look(
        self, *, later: bool = True, without: Sequence[str] = (), peeks: bool = False
    ) -> Look:
        """Where to look now: one round trip. Places of tenants in ``without``, and unless ``later``
        those of the classes after the second, are not looked at and stay as they are; so do all
        when somebody only ``peeks``, who sees others each time, until he has seen all."""
        postponed, skipped = (0, self._peeked) if peeks else (LOOK_AGAIN_MS, 0)
        last = PRIORITIES[-1] if later else LAST_URGENT
        now, first, places = await self._run("look", PLACES_MAX, postponed, last, skipped, *without)
        if peeks:
            self._peeked = skipped + len(places) if len(places) == PLACES_MAX else 0
        found = [text(place).split(":", 1) for place in places]
        return Look(
            now, None if first < 0 else first, tuple((int(one), tenant) for one, tenant in found)
        )

    async def found(
        self,
        dues: Sequence[tuple[int, str, int | None]],
        *,
        looked_ms: int = 0,
        nudge: tuple[str, str] | None = None,
    ) -> None:
        """What was found: priority, tenant, when to look next. ``nudge``: a tenant and a run of
        which those who claim are told. A failure costs time only."""
        told = "" if nudge is None else f"* {nudge[0]} {nudge[1]}"
        arguments: list[Argument] = [looked_ms + LOOK_AGAIN_MS, UNUSED_MS, ORDERS, told]
        for priority, tenant, due in dues:
            arguments += (_place(tenant, priority), -1 if due is None else due)
        try:
            await self._run("found", *arguments)
        except StoreUnavailableError as error:
            log.warning("a ready run is found late", problem=str(error))

    async def _run(self, op: str, *arguments: Argument) -> Any:
        return await self._link.script(_SCRIPT, _KEYS, [op, self.clock_ms, *arguments])


def _place(tenant: str, priority: int) -> str:
    return f"{priority}:{tenant}"
