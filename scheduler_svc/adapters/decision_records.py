"""Decision records: which requests get one, and what it says. Stateless but for its settings.

A record is made where a request ends, from what the domain noted with its ticket and what its live
form counted: about 20 µs, only for the requests that are kept. Kept are those that were refused or
failed, that went on elsewhere or gave their place away, that were slow, and a sample of the rest.
It holds no text of a request: identifiers, names, counts, times and reasons only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from scheduler_svc.adapters.answers import timings
from scheduler_svc.adapters.lane import set_duration
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.quota_keeper import NOTHING_USED, Consumption
from scheduler_svc.domain.decision import Placement
from scheduler_svc.domain.model import Outcome, PriorityClass, Ticket
from sluice.common.v1 import policy_pb2
from sluice.errors import SluiceError
from sluice.scheduler.v1 import records_pb2

RECORD_BYTES_MAX: Final = 16 * 1024
REASON_CHARS_MAX: Final = 64

# By the names of TenantQuota's fields.
_QUOTA: Final = re.compile(r"[a-z_]{1,64}")
_REASON: Final = re.compile(rf"[A-Z][A-Z0-9_]{{0,{REASON_CHARS_MAX - 1}}}")
_CLASSES: Final = {
    each: policy_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{each.name}") for each in PriorityClass
}
_OUTCOMES: Final = {each: policy_pb2.Outcome.Value(f"OUTCOME_{each.name}") for each in Outcome}
_UNREMARKABLE: Final = frozenset((Outcome.FINISHED, Outcome.CANCELLED))
"""Ends that alone are no reason to keep a record."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Makes records. ``slow_share``: a request is slow when its first token, or its end without
    one, took more than this share of its first-token limit."""

    scheduler: str
    slow_share: float
    clock: Callable[[], float] = time.time

    def keeps(self, live: LiveRequest, outcome: Outcome, now: float) -> bool:
        """Whether a request that ended so gets a record. Less than 1 µs."""
        ticket = live.ticket
        if outcome not in _UNREMARKABLE or ticket.sampled or live.attempt > 1 or ticket.gate_reason:
            return True
        took_s = (live.first_token_s or now) - ticket.arrival_s
        return took_s > self.slow_share * (ticket.first_token_limit_s - ticket.arrival_s)

    def ended(
        self, live: LiveRequest, outcome: Outcome, used: Consumption, cost: float, now: float
    ) -> records_pb2.DecisionRecord:
        """The record of a request that was admitted."""
        record = self._begun(live.ticket, outcome, now)
        record.reason = _reason(live.error, outcome)
        record.quota = _quota(live.error)
        record.charged = used.charged
        record.cost = cost
        record.usage.prompt_tokens = used.prompt_tokens
        record.usage.cached_tokens = used.cached_tokens
        record.usage.completion_tokens = used.output_tokens
        record.timings.CopyFrom(timings(live, now))
        set_duration(record.queue_time, (live.dispatch_s or now) - live.ticket.arrival_s)
        _add_attempts(record, live.ticket, live.tokens, outcome)
        return _bounded(record)

    def refused(
        self, ticket: Ticket, outcome: Outcome, error: SluiceError, now: float
    ) -> records_pb2.DecisionRecord:
        """The record of a request that was refused before it was admitted."""
        record = self._begun(ticket, outcome, now)
        record.reason = _reason(error, outcome)
        record.quota = _quota(error)
        _add_attempts(record, ticket, NOTHING_USED.output_tokens, outcome)
        return _bounded(record)

    def wrong(
        self,
        tenant: str,
        request_id: str,
        priority_class: PriorityClass,
        outcome: Outcome,
        error: SluiceError,
        gate_reason: str = "",
    ) -> records_pb2.DecisionRecord:
        """The record of a request that was refused for what it asked."""
        record = records_pb2.DecisionRecord(
            request_id=request_id,
            tenant=tenant,
            priority_class=_CLASSES[priority_class],
            outcome=_OUTCOMES[outcome],
            reason=_reason(error, outcome),
            quota=_quota(error),
            gate_reason=gate_reason,
            scheduler=self.scheduler,
        )
        record.arrival_time.FromNanoseconds(int(self.clock() * 1e9))
        return record

    def _begun(self, ticket: Ticket, outcome: Outcome, now: float) -> records_pb2.DecisionRecord:
        record = records_pb2.DecisionRecord(
            request_id=ticket.request_id,
            tenant=ticket.tenant,
            model=ticket.model,
            priority_class=_CLASSES[ticket.priority_class],
            outcome=_OUTCOMES[outcome],
            gate_reason=ticket.gate_reason,
            scheduler=self.scheduler,
            queue_position=0 if ticket.trail is None else ticket.trail.ahead,
        )
        if ticket.step_of is not None:
            record.run_id, record.step = ticket.step_of
        arrival_s = self.clock() - (now - ticket.arrival_s)
        record.arrival_time.FromNanoseconds(int(arrival_s * 1e9))
        return record


def _add_attempts(
    record: records_pb2.DecisionRecord, ticket: Ticket, tokens: int, outcome: Outcome
) -> None:
    trail = ticket.trail
    if trail is None:
        return
    trail.close(tokens, "ended" if outcome is Outcome.FINISHED else "stopped")
    for placement in trail.placements:
        _add_attempt(record, placement, ticket.arrival_s)


def _add_attempt(
    record: records_pb2.DecisionRecord, placement: Placement, arrival_s: float
) -> None:
    attempt = record.attempts.add(
        instance=placement.instance,
        filtered=placement.removed,
        end=placement.end,
        cause=placement.cause,
        tokens=placement.tokens,
        candidate_count=placement.candidates,
        score=placement.score,
    )
    set_duration(attempt.after, max(0.0, placement.at_s - arrival_s))
    for one in placement.best:
        attempt.candidates.add(instance=one.instance, score=one.score, parts=one.parts)


def _quota(error: SluiceError | None) -> str:
    """The quota that is used up; what came from an engine is taken only in the form of a name."""
    metric = error.quotas[0].metric if error is not None and error.quotas else ""
    return metric if _QUOTA.fullmatch(metric) else ""


def _reason(error: SluiceError | None, outcome: Outcome) -> str:
    """A reason that came from an engine is taken only in the form of a reason."""
    if error is None:
        return "" if outcome is Outcome.FINISHED else outcome.name
    return error.reason if _REASON.fullmatch(error.reason) else outcome.name


def _bounded(record: records_pb2.DecisionRecord) -> records_pb2.DecisionRecord:
    """At most RECORD_BYTES_MAX: names of instances and models may be long. The candidates of the
    oldest attempts go first, then whole attempts."""
    attempts = iter(list(record.attempts))
    while record.ByteSize() > RECORD_BYTES_MAX:
        attempt = next(attempts, None)
        if attempt is not None:
            del attempt.candidates[:]
        elif record.attempts:
            del record.attempts[0]
        else:
            record.model = ""
    return record
