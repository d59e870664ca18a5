"""What the state service needs from a store.

Every method is atomic for one tenant, may block on the network, and raises
:class:`StoreUnavailableError` within the store's own bounded time when the store is slow, frozen or
gone; what was asked may then have happened or not. Keys carry the tenant, so that one tenant's call
cannot reach another's data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from sluice.quota.exchange import Answer, Exchange, QuotaUse


class StoreUnavailableError(Exception):
    """The store did not answer in time, or refused the connection. The text is for logs."""


class QuotaStore(Protocol):
    """Quotas; volatile store. Rules: ``state_svc/domain/quota_book.py``."""

    async def exchange(self, parts: Sequence[tuple[str, Exchange]]) -> list[Answer | Exception]:
        """Carries out exchanges of different tenants, each atomically and by itself. A failed one
        is an exception in its place: StaleExchangeError, TooManyHoldersError,
        StoreUnavailableError. Repeating an exchange with its sequence is safe."""

    async def use(self, tenant: str) -> QuotaUse:
        """What is reserved now; all zero for an unknown tenant."""


class Kind(StrEnum):
    """What the registry holds. A key's name is ``tenant/key_id``; it goes with its tenant. A seed
    is the mark of a tenant or key that a file once brought: what was deleted since stays so."""

    TENANTS = "tenants"
    KEYS = "keys"
    ALIASES = "aliases"
    DRAINS = "drains"
    SEEDS = "seeds"


RECORDS_MAX: Final = {
    Kind.TENANTS: 10_000,
    Kind.KEYS: 20_000,
    Kind.ALIASES: 1_000,
    Kind.DRAINS: 4_096,
    Kind.SEEDS: 40_000,
}
"""A list of all, and a watch of aliases or drains, is one message of at most 6 MiB."""


@dataclass(frozen=True, slots=True)
class Record:
    """A value and its version, which grows with every change of its kind."""

    version: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All records of a kind. ``revision`` grows with every change of the kind."""

    revision: int = 0
    records: Mapping[str, Record] = field(default_factory=dict)


class VersionConflictError(Exception):
    """The record is at another version than was expected. Nothing was done."""


class RegistryFullError(Exception):
    """A kind has as many records as it may have. Nothing was done."""


class NameTakenError(Exception):
    """A unique value is in use by another record. Nothing was done."""


class ParentMissingError(Exception):
    """The tenant of a key does not exist. Nothing was done."""


class RegistryStore(Protocol):
    """Tenants, keys and aliases: few, small, read by everybody. Durable store; no time to live,
    since they are what somebody configured."""

    async def put(
        self,
        kind: Kind,
        name: str,
        value: bytes,
        *,
        expected: int | None = None,
        unique: Sequence[str] = (),
    ) -> int:
        """Writes a record; returns its version. ``expected`` 0: it must not exist. ``unique``:
        values that no other record of the kind may have; only given for records that are written
        once. Raises VersionConflictError, NameTakenError, ParentMissingError (for a key) and, at
        the bound of the kind, RegistryFullError."""

    async def delete(self, kind: Kind, name: str, *, expected: int | None = None) -> bool:
        """Deletes a record, with a tenant its keys; says whether it existed. Raises
        VersionConflictError."""

    async def find(self, kind: Kind, unique: str) -> str | None:
        """The name of the record with a unique value."""

    async def read(self, kind: Kind) -> Snapshot:
        """All records."""

    async def revisions(self, kinds: Sequence[Kind]) -> list[int]:
        """The revisions of these kinds; 0: nothing was ever written."""


@dataclass(frozen=True, slots=True)
class UsageKey:
    """An hour (hours since 1970, UTC) and a model."""

    hour: int
    model: str


class UsageStore(Protocol):
    """The ledger of usage. Durable store; an hour is kept for 100 days."""

    async def append(
        self, tenant: str, batch_id: str, amounts: Mapping[UsageKey, Mapping[str, float]]
    ) -> bool:
        """Adds amounts by their names. False: a batch of this id was added in the last 24 hours,
        and nothing was done."""

    async def query(
        self, tenant: str, begin_hour: int, end_hour: int
    ) -> Mapping[UsageKey, Mapping[str, float]]:
        """What was added to the hours from ``begin_hour`` to before ``end_hour``."""


class DecisionStore(Protocol):
    """Decision records. Volatile store; bounded in number per tenant and in time."""

    async def put(self, tenant: str, decisions: Mapping[str, bytes]) -> None:
        """Keeps records by request id. Beyond the bound the oldest go."""

    async def get(self, tenant: str, request_id: str) -> bytes | None:
        """The record; ``None`` when there is none."""
