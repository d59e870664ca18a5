"""What the deletion of a tenant's data needs from the stores.

A deleted tenant's name passes through three states, each written durably beside the tenants:

* ``PURGING``, by the script that deletes the tenant: nobody may make a tenant of this name.
* ``GONE``: everything is deleted. What is still written by somebody who has not heard of it is
  refused by the fence, a key of the tenant's own hash tag that the scripts look at.
* ``RETURNING``, by the script that makes a tenant of this name anew: the fence is to be opened.

Without a mark there is no fence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class DeletionState(StrEnum):
    """See the module's text."""

    PURGING = "purging"
    GONE = "gone"
    RETURNING = "returning"


@dataclass(frozen=True, slots=True)
class Deletion:
    """``number``: when the tenant was deleted, in Unix milliseconds of the store, made larger than
    that of every deletion before."""

    number: int
    state: DeletionState


class DeletionMarks(Protocol):
    """The marks. Durable store. Every method raises StoreUnavailableError."""

    async def deletions(self) -> tuple[int, Mapping[str, Deletion]]:
        """The store's time in Unix milliseconds, and the marks by name."""

    async def deletion(self, name: str) -> Deletion | None:
        """The mark of one name."""

    async def mark(self, name: str, known: Deletion, state: DeletionState | None) -> bool:
        """Moves a mark on, or takes it away (None). False: it is not ``known`` any more, and
        nothing was done."""


class TenantData(Protocol):
    """All that a store holds below a tenant's name. Every method raises StoreUnavailableError;
    repeating it is safe."""

    async def close(self, tenant: str, number: int) -> bool:
        """Has scripts refuse the tenant from now on. False: that deletion is over already, and
        nothing was done."""

    async def purge(self, tenant: str, number: int) -> bool:
        """Deletes everything but the ledger of usage, while the fence of this deletion is closed.
        False: it is not."""

    async def open(self, tenant: str, number: int) -> None:
        """Ends the refusals of this deletion. Usage of hours that began before is from now on shown
        to who asks for that of earlier holders of the name."""
