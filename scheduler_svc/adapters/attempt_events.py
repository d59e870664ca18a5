"""What instances say of attempts, told to the domain: accepted, first token, and each kind of end.

An end is read here once: a result, an error of the engine, a refused start, work that is wrong, a
stop that was asked for, a loss. The request hears what is final at once; the domain hears of it in
the owner's next turn, and decides whether a failed attempt is made again. Embeddings, whose handler
makes the call itself, arrive as ``unary_ended`` and ``unary_failed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scheduler_svc.adapters.lane import Slot
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.domain.model import FaultKind, Outcome, Refusal, RejectKind
from scheduler_svc.domain.scheduler import Scheduler
from sluice import logs
from sluice.common.v1 import result_pb2
from sluice.errors import Code, SluiceError, deadline_exceeded, unavailable
from sluice.grants import GRANT_LAPSED
from sluice.inference.v1 import inference_pb2
from sluice.status import from_status

LAPSES_MAX: Final = 3
"""So often a start may come too late for its quota before the clocks are taken to differ."""

_REJECTIONS: Final = {
    inference_pb2.REJECT_REASON_NO_ROOM: RejectKind.NO_ROOM,
    inference_pb2.REJECT_REASON_DRAINING: RejectKind.DRAINING,
    inference_pb2.REJECT_REASON_EXPIRED: RejectKind.EXPIRED,
}

# Refusals of a start that has to go elsewhere; others break the protocol.
_REFUSALS: Final = {
    inference_pb2.REJECT_REASON_ENGINE_DOWN: FaultKind.NOT_SERVING,
    inference_pb2.REJECT_REASON_FINGERPRINT: FaultKind.FINGERPRINT,
}

# Reasons with which an engine that died ends what it ran.
_DEATHS: Final = frozenset(("ENGINE_DIED", "ENGINE_FAILED", "ENGINE_DOWN"))

# Codes of a unary call that failed through no fault of the request.
_CALL_FAULTS: Final = {
    Code.UNAVAILABLE: FaultKind.UNREACHABLE,  # or lost: a call that never arrived looks the same
    Code.INTERNAL: FaultKind.ENGINE_ERROR,
    Code.UNKNOWN: FaultKind.ENGINE_ERROR,
    Code.CANCELLED: FaultKind.GOING_DOWN,
}

_CALL_REASONS: Final = {
    "EXECUTION_UNREACHABLE": FaultKind.LOST_RELAY,
    "PEER_UNAVAILABLE": FaultKind.LOST_RELAY,
    "ENGINE_NOT_SERVING": FaultKind.NOT_SERVING,
}

log = logs.get(__name__)


class AttemptEvents:
    """See the module's docstring. ``post``: queues a command for the owner's next turn."""

    def __init__(
        self, domain: Scheduler, post: Callable[[Callable[[float], object]], None]
    ) -> None:
        self._domain = domain
        self._post = post

    def first_token(self, live: LiveRequest) -> None:
        """The attempt under way made its first token."""
        attempt = live.attempt
        self._post(lambda now: self._domain.attempts.first_token(live.ticket.id, attempt, now))

    def accepted(self, slot: Slot, accepted: inference_pb2.Accepted) -> None:
        """The instance took it, with exact counts."""
        if slot.live is not None:
            slot.live.accept(accepted)
        self._post(
            lambda now: self._domain.attempts.accepted(
                slot.ticket_id,
                slot.domain_attempt,
                accepted.prompt_tokens,
                accepted.cached_tokens,
                now,
            )
        )

    def ended(self, slot: Slot, ended: inference_pb2.Ended) -> None:
        """It ended on the instance: finished, stopped, or failed. Its slot is free."""
        live = slot.live
        reasons = {output.finish_reason for output in ended.outputs}
        if live is not None and ended.HasField("status"):
            error = from_status(ended.status)
            if error.code is Code.INVALID_ARGUMENT:
                self._invalid(slot, live, error)
            else:
                self._post(lambda now: self.failed(slot, end_fault(error), now, error))
            return
        if live is not None and result_pb2.FINISH_REASON_ERROR in reasons:
            # Without a status too an error is no answer.
            self._post(lambda now: self.failed(slot, FaultKind.ENGINE_ERROR, now))
            return
        if live is not None and result_pb2.FINISH_REASON_UNSPECIFIED in reasons:
            self._post(lambda now: self._yielded(slot, now))
            return
        if live is not None and result_pb2.FINISH_REASON_CANCELLED in reasons:
            # Nobody here asked for that: the instance goes down.
            self._post(lambda now: self.failed(slot, FaultKind.GOING_DOWN, now))
            return
        tokens, outcome = None, Outcome.FINISHED
        if live is not None and result_pb2.FINISH_REASON_DEADLINE in reasons:
            outcome = Outcome.DEADLINE_EXCEEDED
            live.fail(deadline_exceeded(), outcome)
        elif live is not None:
            live.end(ended)
            tokens = ended.usage.completion_tokens
        self._post(
            lambda now: self._domain.attempts.ended(
                slot.ticket_id, slot.domain_attempt, now, outcome, tokens
            )
        )

    def rejected(self, slot: Slot, rejected: inference_pb2.Rejected) -> None:
        """The instance did not take it. Its slot is free."""
        live = slot.live
        rejection = _REJECTIONS.get(rejected.reason)
        if live is None:
            self._post(
                lambda now: self._domain.attempts.ended(
                    slot.ticket_id, slot.domain_attempt, now, Outcome.CANCELLED
                )
            )
        elif rejection is not None:
            self._post(
                lambda now: self._domain.attempts.rejected(
                    slot.ticket_id, slot.domain_attempt, rejection, now
                )
            )
        elif rejected.reason == inference_pb2.REJECT_REASON_INVALID:
            error = from_status(rejected.status)
            if error.reason == GRANT_LAPSED:
                self._post(lambda now: self._lapsed(live, slot.domain_attempt, now))
                return
            self._invalid(slot, live, error)
        else:
            name = inference_pb2.RejectReason.Name(rejected.reason)
            log.error("an instance rejected a start", instance=live.instance, reason=name)
            kind = _REFUSALS.get(rejected.reason, FaultKind.PROTOCOL)
            self._post(lambda now: self.failed(slot, kind, now))

    def failed(
        self, slot: Slot, kind: FaultKind, now: float, error: SluiceError | None = None
    ) -> None:
        """The attempt in a slot failed, in a turn of the owner."""
        live = slot.live
        if live is None or live.over:
            self._domain.attempts.ended(slot.ticket_id, slot.domain_attempt, now, Outcome.CANCELLED)
        else:
            self.attempt_failed(live, slot.domain_attempt, kind, now, error)

    def unary_ended(self, live: LiveRequest, usage: result_pb2.Usage) -> None:
        """The call succeeded."""
        live.end(inference_pb2.Ended(usage=usage))
        attempt = live.attempt
        self._post(lambda now: self._domain.attempts.ended(live.ticket.id, attempt, now))

    def unary_failed(self, live: LiveRequest, error: SluiceError) -> None:
        """The call failed: a fault of the instance is placed elsewhere, the rest is final."""
        attempt = live.attempt

        def fail(now: float) -> None:
            if live.over:
                self._domain.attempts.ended(live.ticket.id, attempt, now, Outcome.CANCELLED)
            elif error.reason == GRANT_LAPSED:
                self._lapsed(live, attempt, now)
            elif error.code is Code.RESOURCE_EXHAUSTED:
                self._domain.attempts.rejected(live.ticket.id, attempt, RejectKind.NO_ROOM, now)
            elif error.code in _CALL_FAULTS:
                self.attempt_failed(live, attempt, call_fault(error), now, error)
            else:
                live.fail(error, Outcome.INVALID)
                self._domain.attempts.ended(live.ticket.id, attempt, now, Outcome.INVALID)

        self._post(fail)

    def attempt_failed(
        self,
        live: LiveRequest,
        attempt: int,
        kind: FaultKind,
        now: float,
        error: SluiceError | None,
    ) -> None:
        """An attempt failed: the domain places it elsewhere, or it ends with a typed error."""
        delivered = max(live.tokens, live.first_token_s > 0)
        final = self._domain.attempts.failed(live.ticket.id, attempt, kind, now, delivered)
        if isinstance(final, Refusal):
            final.metadata = {
                **final.metadata,
                "instance": live.instance,
                "cause": error.reason if error is not None else "INSTANCE_LOST",
            }
            live.fail(came_to(final, live), final.outcome)

    def _invalid(self, slot: Slot, live: LiveRequest, error: SluiceError) -> None:
        """The work is wrong: nobody else is asked, and the instance is not to blame."""
        live.fail(error, Outcome.INVALID)
        self._post(
            lambda now: self._domain.attempts.ended(
                slot.ticket_id, slot.domain_attempt, now, Outcome.INVALID
            )
        )

    def _lapsed(self, live: LiveRequest, attempt: int, now: float) -> None:
        """The start came too late for its quota: back to the queue, uncharged. Again and again
        means that the clocks of the two machines are apart."""
        live.quota_lapses += 1
        if live.quota_lapses <= LAPSES_MAX or live.over:
            self._domain.attempts.rejected(live.ticket.id, attempt, RejectKind.LAPSED, now)
            return
        log.error("the clock of an instance is ahead", instance=live.instance)
        error = unavailable(
            "CLOCKS_DIFFER",
            "the instance's clock is ahead of the scheduler's, so that it starts no counted work",
            1.0,
            metadata={"instance": live.instance},
        )
        live.fail(error, Outcome.INSTANCE_FAILED)
        self._domain.attempts.ended(live.ticket.id, attempt, now, Outcome.INSTANCE_FAILED)

    def _yielded(self, slot: Slot, now: float) -> None:
        """An instance stopped a request without an end of its own."""
        live = slot.live
        if live is None or live.over:
            self._domain.attempts.ended(slot.ticket_id, slot.domain_attempt, now, Outcome.CANCELLED)
            return
        asked = self._domain.attempts.yielded(slot.ticket_id, slot.domain_attempt, now, live.tokens)
        if asked == "unasked":
            self.failed(slot, FaultKind.PROTOCOL, now)


def came_to(error: SluiceError, live: LiveRequest) -> SluiceError:
    """The error, saying how far a request came that ends in mid-stream."""
    if live.first_token_s or (isinstance(error, Refusal) and error.reason == "INSTANCE_LOST"):
        error.metadata = {**error.metadata, "delivered_tokens": str(live.tokens)}
    return error


def end_fault(error: SluiceError) -> FaultKind:
    """What an engine's end with an error says of the instance."""
    return FaultKind.ENGINE_DOWN if error.reason in _DEATHS else FaultKind.ENGINE_ERROR


def call_fault(error: SluiceError) -> FaultKind:
    """What the failure of a unary call says of the instance."""
    if error.reason in _DEATHS:
        return FaultKind.ENGINE_DOWN
    return _CALL_REASONS.get(error.reason) or _CALL_FAULTS[error.code]
