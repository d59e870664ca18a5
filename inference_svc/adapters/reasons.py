"""Why work was not taken and why it ended, as they are written on the wire. Stateless."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from inference_svc.ports import GenerateSpec
from sluice.common.v1 import result_pb2
from sluice.errors import Code, SluiceError
from sluice.inference.v1 import inference_pb2

if TYPE_CHECKING:
    FinishWire: TypeAlias = result_pb2.FinishReason.ValueType
    RejectWire: TypeAlias = inference_pb2.RejectReason.ValueType


class RejectError(Exception):
    """A start cannot be taken; the reason says all."""

    def __init__(self, reason: RejectWire) -> None:
        super().__init__(reason)
        self.reason = reason


_REJECT_REASONS: dict[Code, RejectWire] = {
    Code.PERMISSION_DENIED: inference_pb2.REJECT_REASON_NO_GRANT,
    Code.INVALID_ARGUMENT: inference_pb2.REJECT_REASON_INVALID,
    Code.NOT_FOUND: inference_pb2.REJECT_REASON_INVALID,
    Code.FAILED_PRECONDITION: inference_pb2.REJECT_REASON_INVALID,
    Code.RESOURCE_EXHAUSTED: inference_pb2.REJECT_REASON_NO_ROOM,
    Code.UNAVAILABLE: inference_pb2.REJECT_REASON_ENGINE_DOWN,
}
_ABORT_REASONS = frozenset(
    {
        result_pb2.FINISH_REASON_UNSPECIFIED,
        result_pb2.FINISH_REASON_CANCELLED,
        result_pb2.FINISH_REASON_DEADLINE,
    }
)


def reject_reason(error: SluiceError, spec: GenerateSpec | None = None) -> RejectWire:
    """The reason for an error of admission or, with its ``spec``, of the engine."""
    continues = spec is not None and spec.continuation is not None
    if continues and error.code is Code.FAILED_PRECONDITION:
        return inference_pb2.REJECT_REASON_FINGERPRINT
    return _REJECT_REASONS.get(error.code, inference_pb2.REJECT_REASON_UNSPECIFIED)


def abort_reason(asked: FinishWire) -> FinishWire:
    """What the end will say; a value that is no reason for a cancel counts as CANCELLED."""
    return asked if asked in _ABORT_REASONS else result_pb2.FINISH_REASON_CANCELLED


def first_reason(ended: inference_pb2.Ended) -> FinishWire:
    """How the first output ended."""
    if not ended.outputs:
        return result_pb2.FINISH_REASON_UNSPECIFIED
    return ended.outputs[0].finish_reason


def finish_label(reason: FinishWire) -> str:
    """A finish reason as a metric's label."""
    return result_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def reject_label(reason: RejectWire) -> str:
    """A reject reason as a metric's label."""
    return inference_pb2.RejectReason.Name(reason).removeprefix("REJECT_REASON_").lower()
