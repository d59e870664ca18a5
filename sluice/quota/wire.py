"""Exchanges of quota as messages of ``sluice.state.v1``. Stateless."""

from __future__ import annotations

from sluice.errors import invalid
from sluice.quota.exchange import (
    AMOUNT_MAX,
    LEASE_MS_MAX,
    NEEDS_MAX,
    SETTLEMENTS_MAX,
    Amounts,
    Answer,
    Decision,
    Exchange,
    Limits,
    Need,
    QuotaKind,
    Settlement,
    Verdict,
)
from sluice.state.v1 import quota_pb2

HOLDER_TTL_MS_MIN, HOLDER_TTL_MS_MAX = 500, 60_000


def exchange_message(tenant: str, exchange: Exchange) -> quota_pb2.TenantExchange:
    """The exchange as sent; the holder's name travels once beside all of them."""
    limits = exchange.limits
    return quota_pb2.TenantExchange(
        tenant=tenant,
        sequence=exchange.sequence,
        running=exchange.running,
        limits=quota_pb2.QuotaLimits(
            requests_per_min=limits.requests_per_min,
            tokens_per_min=limits.tokens_per_min,
            concurrent_requests=limits.concurrent_requests,
            tokens_per_day=limits.tokens_per_day,
        ),
        settlements=[
            quota_pb2.Settlement(
                epoch=one.epoch,
                bucket=one.bucket,
                day=one.day,
                reserved=_amounts_message(one.reserved),
                requests_refund=one.requests_refund,
                tokens_refund=one.tokens_refund,
            )
            for one in exchange.settlements
        ],
        overuse_tokens=exchange.overuse_tokens,
        needs=[quota_pb2.QuotaNeed(tokens=n.tokens, final=n.final) for n in exchange.needs],
        lease=_amounts_message(exchange.lease),
        lease_ms=exchange.lease_ms,
        holder_ttl_ms=exchange.holder_ttl_ms,
    )


def read_exchange(holder: str, part: quota_pb2.TenantExchange, where: str) -> Exchange:
    """The exchange in a message. Raises INVALID_ARGUMENT naming the field under ``where``."""
    if part.sequence < 1:
        raise invalid(f"{where}.sequence", "must be at least 1")
    if len(part.settlements) > SETTLEMENTS_MAX:
        raise invalid(f"{where}.settlements", f"at most {SETTLEMENTS_MAX}")
    if len(part.needs) > NEEDS_MAX:
        raise invalid(f"{where}.needs", f"at most {NEEDS_MAX}")
    if part.lease_ms > LEASE_MS_MAX:
        raise invalid(f"{where}.lease_ms", f"at most {LEASE_MS_MAX}")
    if not HOLDER_TTL_MS_MIN <= part.holder_ttl_ms <= HOLDER_TTL_MS_MAX:
        raise invalid(
            f"{where}.holder_ttl_ms", f"must be {HOLDER_TTL_MS_MIN} to {HOLDER_TTL_MS_MAX}"
        )
    tokens = [need.tokens for need in part.needs]
    tokens += [one.reserved.tokens for one in part.settlements]
    tokens += [one.tokens_refund for one in part.settlements]
    tokens += [part.overuse_tokens, part.lease.tokens]
    tokens += [part.limits.tokens_per_min, part.limits.tokens_per_day]
    if max(tokens) > AMOUNT_MAX:
        raise invalid(where, f"no number of tokens may be more than {AMOUNT_MAX}")
    return Exchange(
        holder=holder,
        sequence=part.sequence,
        limits=read_limits(part.limits),
        running=part.running,
        settlements=tuple(
            Settlement(
                epoch=one.epoch,
                bucket=one.bucket,
                day=one.day,
                reserved=_read_amounts(one.reserved),
                requests_refund=one.requests_refund,
                tokens_refund=one.tokens_refund,
            )
            for one in part.settlements
        ),
        overuse_tokens=part.overuse_tokens,
        needs=tuple(Need(need.tokens, need.final) for need in part.needs),
        lease=_read_amounts(part.lease),
        lease_ms=part.lease_ms,
        holder_ttl_ms=part.holder_ttl_ms,
    )


def read_limits(limits: quota_pb2.QuotaLimits) -> Limits:
    """Limits; unset ones are none."""
    given = limits.HasField
    return Limits(
        limits.requests_per_min if given("requests_per_min") else None,
        limits.tokens_per_min if given("tokens_per_min") else None,
        limits.concurrent_requests if given("concurrent_requests") else None,
        limits.tokens_per_day if given("tokens_per_day") else None,
    )


def answer_message(tenant: str, answer: Answer) -> quota_pb2.TenantExchangeResult:
    """An answer as sent."""
    return quota_pb2.TenantExchangeResult(
        tenant=tenant,
        epoch=answer.epoch,
        bucket=answer.bucket,
        day=answer.day,
        lease=_amounts_message(answer.lease),
        lease_ms=answer.lease_ms,
        contended=answer.contended,
        verdicts=[
            quota_pb2.QuotaVerdict(
                decision=quota_pb2.QuotaDecision.ValueType(one.decision),
                delay_ms=one.delay_ms,
                quota=quota_pb2.QuotaKind.ValueType(one.quota),
            )
            for one in answer.verdicts
        ],
    )


def read_answer(result: quota_pb2.TenantExchangeResult) -> Answer:
    """The answer in a message."""
    return Answer(
        epoch=result.epoch,
        bucket=result.bucket,
        day=result.day,
        lease=_read_amounts(result.lease),
        lease_ms=result.lease_ms,
        contended=result.contended,
        verdicts=tuple(
            Verdict(Decision(one.decision), one.delay_ms, QuotaKind(one.quota))
            for one in result.verdicts
        ),
    )


def _amounts_message(amounts: Amounts) -> quota_pb2.QuotaAmounts:
    return quota_pb2.QuotaAmounts(
        requests=amounts.requests, tokens=amounts.tokens, slots=amounts.slots
    )


def _read_amounts(amounts: quota_pb2.QuotaAmounts) -> Amounts:
    return Amounts(amounts.requests, amounts.tokens, amounts.slots)
