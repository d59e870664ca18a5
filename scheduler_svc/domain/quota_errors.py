"""Refusals by quota, as clients see them. Nothing is charged for any of them."""

from __future__ import annotations

from typing import Final

from sluice.errors import Code, QuotaViolation, SluiceError, exhausted, unavailable
from sluice.quota.exchange import Limits, QuotaKind

_METADATA: Final = {"scope": "tenant", "charged": "false"}
_WORDS: Final = {
    QuotaKind.REQUESTS_PER_MIN: "requests per minute",
    QuotaKind.TOKENS_PER_MIN: "tokens per minute",
    QuotaKind.CONCURRENT_REQUESTS: "requests at once",
    QuotaKind.TOKENS_PER_DAY: "tokens per day",
}


def _violation(
    quota: QuotaKind, tenant: str, limits: Limits
) -> tuple[dict[str, str], tuple[QuotaViolation, ...], str]:
    words = _WORDS.get(quota, "quota")
    name = quota.name.lower()
    # Unknown when the quota was taken away while the answer was on its way.
    limit: int | None = getattr(limits, name, None)
    violation = QuotaViolation(f"tenant:{tenant}", f"limit of {words}", name, limit or 0)
    return {**_METADATA, "quota": name}, (violation,), words


def refused(quota: QuotaKind, retry_after_s: float, tenant: str, limits: Limits) -> SluiceError:
    """A quota of ``tenant``, one of its ``limits``, has no room before ``retry_after_s``."""
    metadata, quotas, words = _violation(quota, tenant, limits)
    return exhausted(
        "QUOTA_EXCEEDED",
        f"The tenant's quota of {words} is used up.",
        retry_after_s,
        metadata=metadata,
        quotas=quotas,
    )


def never(quota: QuotaKind, tenant: str, limits: Limits) -> SluiceError:
    """The request needs more than the whole quota: trying again does not help."""
    metadata, quotas, words = _violation(quota, tenant, limits)
    return SluiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUOTA_TOO_SMALL",
        f"The request needs more than the tenant's whole quota of {words}.",
        metadata=metadata,
        quotas=quotas,
    )


def unreachable(retry_after_s: float) -> SluiceError:
    """The state service does not answer, and the tenant's requests stop then."""
    return unavailable(
        "QUOTA_UNREACHABLE",
        "Quotas cannot be checked now, and this tenant's requests wait for that.",
        retry_after_s,
        metadata=_METADATA,
    )


def too_many_waiting() -> SluiceError:
    """More requests of the tenant wait for quota than are kept."""
    return exhausted(
        "QUOTA_QUEUE_FULL",
        "Too many requests of the tenant wait for quota.",
        1.0,
        metadata=_METADATA,
    )
