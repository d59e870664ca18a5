"""One exchange between a holder of quota and the state service, as values.

Pure. A holder is a process that admits work (a scheduler). It has at most one exchange per tenant
under way, numbers them, and repeats one without an answer unchanged; the service carries it out
once. So a lost reply strands nothing. Field meanings: ``protos/sluice/state/v1/quota.proto``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

WINDOW_MS: Final = 60_000
BUCKET_MS: Final = 250  # resolution: a charge frees between 60 and 60.25 s after it was made
LEASE_MS_MAX: Final = 1_000
NEEDS_MAX: Final = 256
SETTLEMENTS_MAX: Final = 512
TENANTS_MAX: Final = 64
AMOUNT_MAX: Final = 10**12  # tokens in one number; sums stay exact in doubles


class Decision(IntEnum):
    """What came of a need."""

    GRANTED = 1
    WAIT = 2
    REFUSED = 3
    NEVER = 4


class QuotaKind(IntEnum):
    """Which quota lacks room."""

    NONE = 0
    REQUESTS_PER_MIN = 1
    TOKENS_PER_MIN = 2
    CONCURRENT_REQUESTS = 3
    TOKENS_PER_DAY = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant; ``None``: unlimited."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None

    @property
    def unlimited(self) -> bool:
        """Whether nothing needs to be counted."""
        return self == _UNLIMITED


_UNLIMITED: Final = Limits()


@dataclass(frozen=True, slots=True)
class Amounts:
    """Requests, tokens, and requests at once."""

    requests: int = 0
    tokens: int = 0
    slots: int = 0


NOTHING: Final = Amounts()


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of reservations made together: ``reserved`` closes, the refunds come back."""

    epoch: int
    bucket: int
    day: int
    reserved: Amounts
    requests_refund: int = 0
    tokens_refund: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """One request that wants a reservation. ``final``: refuse rather than answer WAIT."""

    tokens: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a holder says about one tenant."""

    holder: str
    sequence: int
    limits: Limits
    running: int = 0
    settlements: tuple[Settlement, ...] = ()
    overuse_tokens: int = 0
    needs: tuple[Need, ...] = ()
    lease: Amounts = NOTHING
    lease_ms: int = 0
    holder_ttl_ms: int = 3_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to one need."""

    decision: Decision
    delay_ms: int = 0
    quota: QuotaKind = QuotaKind.NONE


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an exchange."""

    epoch: int
    bucket: int
    day: int
    lease: Amounts
    lease_ms: int
    contended: bool
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """What is reserved of a tenant's quotas now."""

    requests: int = 0
    tokens: int = 0
    slots: int = 0
    day_tokens: int = 0
    holders: int = 0


class StaleExchangeError(Exception):
    """The exchange is older than the last one of its holder; nothing was done."""
