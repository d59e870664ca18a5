"""What an engine yields, as protos: deltas, ends and errors. Stateless.

:func:`write_delta` is on the path of every token: field by field into the entry that the batch
made costs 0.6 µs for a one-token delta, against 0.9 µs with keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2

from inference_svc.ports import FinishReason, GenerationEnd, ModelDescription, TokenLogprob
from sluice import logs
from sluice.common.v1 import result_pb2
from sluice.errors import SluiceError, internal
from sluice.inference.v1 import inference_pb2
from sluice.status import to_status

if TYPE_CHECKING:
    from google.rpc import status_pb2

log = logs.get(__name__)

FINISH_REASONS: dict[FinishReason, result_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: result_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: result_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: result_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: result_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: result_pb2.FINISH_REASON_ERROR,
}


def write_delta(
    entry: inference_pb2.Delta,
    index: int,
    text: str,
    token_ids: Sequence[int],
    position: int,
    logprobs: Sequence[TokenLogprob],
) -> None:
    """Fills a delta, apart from slot and attempt. Zeroes are not written: they are the default."""
    if text:
        entry.text = text
    if token_ids:
        entry.token_ids.extend(token_ids)
    if position:
        entry.position = position
    if index:
        entry.index = index
    for logprob in logprobs:
        item = entry.logprobs.add(
            token_id=logprob.token_id, logprob=logprob.logprob, token=logprob.token
        )
        for top in logprob.top:
            item.top.add(token_id=top.token_id, logprob=top.logprob, token=top.token)


def to_ended(
    end: GenerationEnd,
    *,
    request_id: str,
    simulated: bool,
    first_token_s: float | None,
    total_s: float,
    abort_reason: result_pb2.FinishReason.ValueType | None = None,
) -> inference_pb2.Ended:
    """The end of a generation. ``abort_reason`` is what the caller gave when it cancelled: it
    takes the place of CANCELLED and DEADLINE, so that a yield is told from a cancel."""
    ended = inference_pb2.Ended(
        usage=result_pb2.Usage(
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            completion_tokens=end.completion_tokens,
        ),
        total=to_duration(total_s),
        simulated=simulated,
    )
    if first_token_s is not None:
        ended.first_token.CopyFrom(to_duration(first_token_s))
    for output in end.outputs:
        reason = FINISH_REASONS[output.reason]
        if abort_reason is not None and output.reason in _ABORTED:
            reason = abort_reason
        ended.outputs.add(
            index=output.index,
            finish_reason=reason,
            stop_string=output.stop_string or "",
            stop_token_id=output.stop_token_id,
        )
    if end.error is not None:
        ended.status.CopyFrom(error_status(end.error, request_id))
    return ended


_ABORTED = frozenset({FinishReason.CANCELLED, FinishReason.DEADLINE})


def aborted_end(
    reason: result_pb2.FinishReason.ValueType, outputs: int, *, simulated: bool
) -> inference_pb2.Ended:
    """The end of work that the engine never saw."""
    ended = inference_pb2.Ended(usage=result_pb2.Usage(), simulated=simulated)
    for index in range(outputs):
        ended.outputs.add(index=index, finish_reason=reason)
    return ended


def typed_error(error: Exception, request_id: str) -> SluiceError:
    """The error as a client may see it; the text of any other exception goes to the log only."""
    if isinstance(error, SluiceError):
        return error
    log.failure("unexpected error of the engine", error, request_id=request_id)
    return internal(request_id)


def error_status(error: Exception, request_id: str) -> status_pb2.Status:
    """:func:`typed_error` as a status message."""
    return to_status(typed_error(error, request_id))


def to_duration(seconds: float) -> duration_pb2.Duration:
    """A span of time; negative ones become 0."""
    nanos = max(0, round(seconds * 1e9))
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def to_seconds(duration: duration_pb2.Duration) -> float:
    """A span of time in seconds."""
    return duration.seconds + duration.nanos / 1e9


def to_model(
    description: ModelDescription, *, instance: str, epoch: int
) -> inference_pb2.GetModelResponse:
    """The description of what an instance serves."""
    return inference_pb2.GetModelResponse(
        instance=instance,
        model=description.model,
        fingerprint=description.fingerprint,
        epoch=epoch,
        engine=description.engine,
        simulated=description.simulated,
        capabilities=inference_pb2.ModelCapabilities(
            generate=description.generate,
            embed=description.embed,
            chat=description.chat,
            structured_output=description.structured_output,
            continuation=description.continuation,
        ),
        context_tokens=description.context_tokens,
        kv_tokens=description.kv_tokens,
        kv_block_tokens=description.kv_block_tokens,
        sequences_max=description.sequences_max,
        step_tokens_max=description.step_tokens_max,
        dtype=description.dtype,
        quantization=description.quantization,
        tensor_parallel_size=description.tensor_parallel_size,
        pipeline_parallel_size=description.pipeline_parallel_size,
        embedding_dimensions=description.embedding_dimensions,
    )
