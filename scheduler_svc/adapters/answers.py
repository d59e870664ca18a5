"""Messages to clients, made from what a live request has gathered. Stateless."""

from __future__ import annotations

from google.protobuf import duration_pb2

from scheduler_svc.adapters.lane import set_duration
from scheduler_svc.adapters.live_request import LiveRequest
from sluice.common.v1 import result_pb2
from sluice.execution.v1 import execution_pb2
from sluice.scheduler.v1 import generate_pb2


def started(live: LiveRequest) -> generate_pb2.GenerateResponse:
    """The first message of a stream."""
    prompt_tokens = live.accepted.prompt_tokens if live.accepted is not None else 0
    return generate_pb2.GenerateResponse(
        started=generate_pb2.GenerateStarted(
            request_id=live.ticket.request_id,
            model=live.ticket.model,
            instance=live.instance,
            prompt_tokens=prompt_tokens,
            simulated=live.simulated,
        )
    )


def deltas_due(live: LiveRequest) -> list[generate_pb2.GenerateResponse]:
    """One message per output that has something to send; takes it from the live request. The
    tokens of a message may be more than its text shows: text lags behind tokens."""
    messages = []
    for index, output in enumerate(live.outputs):
        if not output.pending:
            continue
        delta = generate_pb2.GenerateDelta(
            text="".join(output.parts), index=index, position=output.sent_tokens
        )
        output.parts.clear()
        output.sent_tokens = output.tokens
        if output.token_ids:
            delta.token_ids.extend(output.token_ids)
            output.token_ids.clear()
        if output.logprobs:
            delta.logprobs.extend(output.logprobs)
            output.logprobs.clear()
        messages.append(generate_pb2.GenerateResponse(delta=delta))
    return messages


def finished(live: LiveRequest, now: float, cost: float = 0.0) -> generate_pb2.GenerateResponse:
    """The last message of a stream."""
    assert live.ended is not None
    return generate_pb2.GenerateResponse(
        finished=generate_pb2.GenerateFinished(
            outputs=_finishes(live),
            usage=live.usage(),
            timings=timings(live, now),
            cost=cost,
            instance=live.instance,
            attempts=live.attempt,
            simulated=live.ended.simulated,
            request_id=live.ticket.request_id,
        )
    )


def whole_answer(live: LiveRequest, now: float, cost: float) -> generate_pb2.GenerateTextResponse:
    """The answer of a unary call."""
    assert live.ended is not None
    outputs = [
        generate_pb2.GeneratedOutput(
            index=finish.index,
            text="".join(live.outputs[finish.index].parts),
            token_ids=live.outputs[finish.index].token_ids,
            logprobs=live.outputs[finish.index].logprobs,
            finish=finish,
        )
        for finish in _finishes(live)
        if finish.index < len(live.outputs)
    ]
    return generate_pb2.GenerateTextResponse(
        text=outputs[0].text if outputs else "",
        outputs=outputs,
        usage=live.usage(),
        timings=timings(live, now),
        cost=cost,
        model=live.ticket.model,
        instance=live.instance,
        request_id=live.ticket.request_id,
        attempts=live.attempt,
        simulated=live.ended.simulated,
    )


def embeddings(
    live: LiveRequest, response: execution_pb2.ExecuteEmbedResponse, cost: float
) -> generate_pb2.EmbedResponse:
    """The answer of an embedding."""
    answer = response.response
    return generate_pb2.EmbedResponse(
        embeddings=[generate_pb2.Embedding(values=each.values) for each in answer.embeddings],
        usage=answer.usage,
        model=live.ticket.model,
        instance=response.instance,
        request_id=live.ticket.request_id,
        simulated=answer.simulated,
        cost=cost,
    )


def _finishes(live: LiveRequest) -> list[generate_pb2.OutputFinish]:
    assert live.ended is not None
    finishes = []
    for end in live.ended.outputs:
        finish = generate_pb2.OutputFinish(
            index=end.index, finish_reason=end.finish_reason, stop_string=end.stop_string
        )
        if end.HasField("stop_token_id"):
            finish.stop_token_id = end.stop_token_id
        finishes.append(finish)
    return finishes


def timings(live: LiveRequest, now: float) -> result_pb2.Timings:
    """Where the time of a request went so far."""
    times = result_pb2.Timings()
    arrival = live.ticket.arrival_s
    set_duration(times.queue, live.queue_s)
    _span(times.total, arrival, now)
    if live.first_token_s:
        _span(times.first_token, arrival, live.first_token_s)
        gaps = max(output.tokens for output in live.outputs) - 1
        if gaps > 0:
            decode_s = live.last_token_s - live.first_token_s
            set_duration(times.per_output_token, decode_s / gaps)
    return times


def _span(duration: duration_pb2.Duration, begin_s: float, end_s: float) -> None:
    set_duration(duration, max(0.0, end_s - begin_s))
