"""The refusals of the scheduling domain: one function per way to be refused.

Codes: busy is RESOURCE_EXHAUSTED with a retry delay, no backend or draining is UNAVAILABLE, too
late is DEADLINE_EXCEEDED. Reasons are the names of outcomes, except INSTANCE_LOST. Texts are fixed.
"""

from __future__ import annotations

from scheduler_svc.domain.model import Outcome, Refusal, Ticket
from sluice.errors import Code


def spread(number: int, share: float) -> float:
    """A factor from 1 - share to 1 + share, another for every number, so that those who were
    refused together do not come back together (Knuth's multiplicative hash)."""
    return 1.0 + share * ((number * 2_654_435_761 % 2**32) / 2**31 - 1.0)


def queue_full(scope: str, retry_after_s: float) -> Refusal:
    """``scope``: "class" or "tenant", whose bound was hit. Nothing was charged."""
    return Refusal(
        Outcome.QUEUE_FULL,
        Code.RESOURCE_EXHAUSTED,
        "too many requests wait already",
        retry_after_s=retry_after_s,
        metadata={"scope": scope},
    )


def hopeless(retry_after_s: float) -> Refusal:
    """The first token cannot come in time any more: by the estimate, or its time has passed in the
    queue."""
    return Refusal(
        Outcome.HOPELESS,
        Code.RESOURCE_EXHAUSTED,
        "the first token could not come within its limit",
        retry_after_s=retry_after_s,
    )


def no_instance(retry_after_s: float) -> Refusal:
    return Refusal(
        Outcome.NO_INSTANCE,
        Code.UNAVAILABLE,
        "no instance serves the model now",
        retry_after_s=retry_after_s,
    )


def draining(retry_after_s: float) -> Refusal:
    return Refusal(
        Outcome.DRAINING,
        Code.UNAVAILABLE,
        "this scheduler is going down; another one may answer",
        retry_after_s=retry_after_s,
    )


def deadline_exceeded() -> Refusal:
    return Refusal(
        Outcome.DEADLINE_EXCEEDED, Code.DEADLINE_EXCEEDED, "the deadline of the request passed"
    )


def first_token_timeout() -> Refusal:
    return Refusal(
        Outcome.FIRST_TOKEN_TIMEOUT,
        Code.DEADLINE_EXCEEDED,
        "the instance gave no first token within the limit",
    )


def poison(ticket: Ticket) -> Refusal:
    """No delay is told: the same input is not run again before an operator has looked at it, or its
    time in quarantine is over."""
    return Refusal(
        Outcome.POISON,
        Code.FAILED_PRECONDITION,
        "engines died each time they ran this input; it is not run again for now",
        metadata={"attempts": str(ticket.attempts)},
    )


def instance_lost(ticket: Ticket, *, delivered: bool) -> Refusal:
    """``delivered``: output has reached the client, so that nothing may be repeated."""
    return Refusal(
        Outcome.INSTANCE_FAILED,
        Code.UNAVAILABLE,
        "the instance failed after output was delivered"
        if delivered
        else "every attempted instance failed",
        reason="INSTANCE_LOST",
        metadata={"attempts": str(ticket.attempts)},
    )
