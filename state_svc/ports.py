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


class StoreFullError(StoreUnavailableError):
    """The store's memory is full: it refuses what needs more. Nothing was done; reading and
    deleting go on."""


class QuotaStore(Protocol):
    """Quotas; volatile store. Rules: ``state_svc/domain/quota_book.py``."""

    async def exchange(self, parts: Sequence[tuple[str, Exchange]]) -> list[Answer | Exception]:
        """Carries out exchanges of different tenants, each atomically and by itself. A failed one
        is an exception in its place: StaleExchangeError, TooManyHoldersError,
        StoreUnavailableError. Repeating an exchange with its sequence is safe."""

    async def use(self, tenant: str) -> QuotaUse:
        """What is reserved now; all zero for an unknown tenant."""


class Kind(StrEnum):
    """What the registry holds. A key's name is ``tenant/key_id``, a tool's ``tenant/name``; they go
    with their tenant. A seed is the mark of a tenant or key that a file once brought: what was
    deleted since stays so."""

    TENANTS = "tenants"
    KEYS = "keys"
    ALIASES = "aliases"
    DRAINS = "drains"
    SEEDS = "seeds"
    TOOLS = "tools"


RECORDS_MAX: Final = {
    Kind.TENANTS: 10_000,
    Kind.KEYS: 20_000,
    Kind.ALIASES: 1_000,
    Kind.DRAINS: 4_096,
    Kind.SEEDS: 40_000,
    Kind.TOOLS: 4_096,
}
"""A list of all, and a watch of aliases or drains, is one message of at most 6 MiB."""

CHILDREN_MAX: Final = {Kind.TOOLS: 256}
"""Records of a kind that one tenant may have."""

CHILDREN_BYTES_MAX: Final = {Kind.TOOLS: 4 << 20}
"""Their bytes together: a list of them is one message."""


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


class RequestIdReusedError(Exception):
    """The request id belongs to a request for something else. Nothing was done."""


class RegistryFullError(Exception):
    """A kind has as many records as it may have. Nothing was done."""


class LimitReachedError(Exception):
    """A bound of a tenant is reached; ``limit`` is its name. Nothing was done."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class NameTakenError(Exception):
    """A unique value is in use by another record. Nothing was done."""


class ParentMissingError(Exception):
    """The tenant of a key or tool does not exist. Nothing was done."""


class TenantBeingDeletedError(Exception):
    """A tenant of this name was deleted, and what belonged to it is not gone yet. Nothing was
    done."""


class TenantDeletedError(Exception):
    """What is to be written belongs to a tenant that is deleted. Nothing was done."""


class RegistryStore(Protocol):
    """Tenants, keys, aliases and tools: few, small, read by everybody. Durable store; no time to
    live, since they are what somebody configured."""

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
        once. Raises VersionConflictError, NameTakenError, ParentMissingError (for a key or tool)
        and, at the bound of the kind or of its tenant, RegistryFullError; for a new tenant
        TenantBeingDeletedError while its name is marked (``state_svc/deletion_ports.py``), marked
        names counting against the bound of tenants."""

    async def delete(self, kind: Kind, name: str, *, expected: int | None = None) -> bool:
        """Deletes a record, with a tenant its keys and tools, and marks its name; says whether it
        existed. Raises VersionConflictError."""

    async def find(self, kind: Kind, unique: str) -> str | None:
        """The name of the record with a unique value."""

    async def read(self, kind: Kind) -> Snapshot:
        """All records."""

    async def children(self, kind: Kind, parent: str) -> Mapping[str, Record]:
        """The records of a tenant, by their own names."""

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
        self, tenant: str, begin_hour: int, end_hour: int, *, earlier: bool = False
    ) -> Mapping[UsageKey, Mapping[str, float]]:
        """What was added to the hours from ``begin_hour`` to before ``end_hour``; those that
        began while another tenant had the name only if ``earlier``."""


class DecisionStore(Protocol):
    """Decision records. Volatile store; bounded in number per tenant and in time."""

    async def put(self, tenant: str, decisions: Mapping[str, bytes]) -> None:
        """Keeps records by request id. Beyond the bound the oldest go."""

    async def get(self, tenant: str, request_id: str) -> bytes | None:
        """The record; ``None`` when there is none."""


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """Bounds of one tenant's values, or of its blobs: how many, and bytes of names and contents."""

    items_max: int = 10_000
    bytes_max: int = 64 << 20


class KeyValueStore(Protocol):
    """Values by name. Durable store; each ends with its time to live."""

    async def get(self, tenant: str, key: str) -> Record | None:
        """A value and its version."""

    async def put(
        self, tenant: str, key: str, value: bytes, ttl_ms: int, expected: int | None = None
    ) -> int:
        """Writes a value; returns its version, which was never given before. ``expected`` 0: it
        must not exist. Raises VersionConflictError and LimitReachedError."""

    async def delete(self, tenant: str, key: str, expected: int | None = None) -> bool:
        """Deletes a value; whether it was there. Raises VersionConflictError."""


@dataclass(frozen=True, slots=True)
class BlobPart:
    """A part of a blob, and the size of the whole."""

    content: bytes
    size_bytes: int


class BlobStore(Protocol):
    """Large results by owner and name. Durable store; each ends with its time to live."""

    async def put(self, tenant: str, owner: str, name: str, content: bytes, ttl_ms: int) -> None:
        """Stores a blob, or replaces it. Raises LimitReachedError."""

    async def get(
        self, tenant: str, owner: str, name: str, offset: int, size_max: int
    ) -> BlobPart | None:
        """At most ``size_max`` (1 or more) bytes of a blob from ``offset`` on."""

    async def delete_all(self, tenant: str, owner: str) -> int:
        """Deletes the blobs of an owner; how many there were."""
