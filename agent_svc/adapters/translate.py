"""Runs on the wire and in the domain: specs, events, decisions and summaries, to and from protos.

Stateless. What cannot be read raises ValueError: it was not written by a scheduler or an agent
service that this one understands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import status_pb2

from agent_svc.domain import model
from agent_svc.run_ports import IngestSpec, RunKind, Spec, Summary, TaskSpec
from sluice.common.v1 import input_pb2, result_pb2
from sluice.errors import SluiceError
from sluice.scheduler.v1 import runs_pb2, spec_pb2
from sluice.status import from_status, to_status

K = TypeVar("K")
V = TypeVar("V")

SUMMARY_ANSWER_BYTES: Final = 32 << 10  # the whole answer is in the last event

_CHOICES: Final = {
    runs_pb2.TOOL_CHOICE_UNSPECIFIED: model.Choice.AUTO,
    runs_pb2.TOOL_CHOICE_AUTO: model.Choice.AUTO,
    runs_pb2.TOOL_CHOICE_REQUIRED: model.Choice.REQUIRED,
    runs_pb2.TOOL_CHOICE_EACH: model.Choice.EACH,
}
_RUN_KINDS: Final = {
    RunKind.TASK: runs_pb2.RUN_KIND_TASK,
    RunKind.TURN: runs_pb2.RUN_KIND_TURN,
    RunKind.INGEST: runs_pb2.RUN_KIND_INGEST,
}
_WAITS: Final = {
    model.WaitReason.APPROVAL: runs_pb2.WAIT_REASON_APPROVAL,
    model.WaitReason.IN_DOUBT: runs_pb2.WAIT_REASON_IN_DOUBT,
}
_DECISIONS: Final = {
    model.Decision.RETRY: runs_pb2.RESUME_DECISION_RETRY,
    model.Decision.SKIP: runs_pb2.RESUME_DECISION_SKIP,
    model.Decision.SUPPLY_RESULT: runs_pb2.RESUME_DECISION_SUPPLY_RESULT,
    model.Decision.CANCEL: runs_pb2.RESUME_DECISION_CANCEL,
}
_ENDS: Final = {
    model.End.SUCCEEDED: runs_pb2.RUN_STATE_SUCCEEDED,
    model.End.FAILED: runs_pb2.RUN_STATE_FAILED,
    model.End.CANCELLED: runs_pb2.RUN_STATE_CANCELLED,
}
_WAITS_READ: Final = {number: value for value, number in _WAITS.items()}
_DECISIONS_READ: Final = {number: value for value, number in _DECISIONS.items()}
_ENDS_READ: Final = {number: value for value, number in _ENDS.items()}


# --- Specs and decisions ---------------------------------------------------------------------


def read_spec(data: bytes) -> Spec:
    """A stored RunSpec."""
    try:
        message = spec_pb2.RunSpec.FromString(data)
    except DecodeError:
        raise ValueError("not a RunSpec") from None
    kind = message.WhichOneof("kind")
    budget = read_budget(message.budget)
    credential = message.credential.SerializeToString()
    if kind == "ingest":
        ingest = message.ingest
        work = IngestSpec(
            ingest.collection, ingest.document_id, ingest.generation, ingest.embedding_model
        )
        return Spec(
            work, budget, credential, ingest.embedding_model, traceparent=message.traceparent
        )
    if kind != "task":
        raise ValueError("a kind of run that is not known here")
    request = message.task.request
    sampling = request.sampling
    return Spec(
        TaskSpec(
            messages=_task_messages(request),
            tools=tuple(request.tools),
            choice=_known(_CHOICES, request.tool_choice),
            answer_schema_json=request.answer_schema_json,
            turn=message.task.turn,
            context_tokens=message.task.context_tokens,
            output_tokens_max=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        ),
        budget,
        credential,
        request.model,
        sampling.SerializeToString(),
        message.traceparent,
    )


def _task_messages(request: runs_pb2.RunAgentRequest) -> tuple[model.Message, ...]:
    if request.messages:
        return tuple(map(read_message, request.messages))
    return (model.Message("user", request.task),)


def read_budget(message: runs_pb2.RunBudget) -> model.Budget:
    """Limits in force; all are set."""
    return model.Budget(
        steps_max=message.steps_max,
        tokens_max=message.tokens_max,
        tool_calls_max=message.tool_calls_max,
        wall_time_s=message.wall_time_max.ToMicroseconds() / 1e6,
        cost_max=message.cost_max,
    )


def budget_message(budget: model.Budget) -> runs_pb2.RunBudget:
    """The limits as a message."""
    message = runs_pb2.RunBudget(
        steps_max=budget.steps_max,
        tokens_max=budget.tokens_max,
        tool_calls_max=budget.tool_calls_max,
        cost_max=budget.cost_max,
    )
    message.wall_time_max.FromMicroseconds(round(budget.wall_time_s * 1e6))
    return message


def read_decision(data: bytes) -> model.Resumed | None:
    """A stored decision; None when there is none."""
    if not data:
        return None
    try:
        return _resumed(runs_pb2.RunResumed.FromString(data))
    except DecodeError:
        raise ValueError("not a decision") from None


def _resumed(message: runs_pb2.RunResumed) -> model.Resumed:
    decision = _known(_DECISIONS_READ, message.decision)
    return model.Resumed(message.step, decision, message.result_json)


# --- Messages --------------------------------------------------------------------------------


def read_message(message: input_pb2.ChatMessage) -> model.Message:
    """A message of a conversation."""
    return model.Message(
        message.role,
        message.content,
        message.name,
        tuple(map(_read_call, message.tool_calls)),
        message.tool_call_id,
    )


def chat_message(message: model.Message) -> input_pb2.ChatMessage:
    """The same on the wire."""
    return input_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=map(_call, message.tool_calls),
        tool_call_id=message.call_id,
    )


def _read_call(message: input_pb2.ToolCall) -> model.ToolCall:
    return model.ToolCall(model.CallId(message.id), message.name, message.arguments_json)


def _call(call: model.ToolCall) -> input_pb2.ToolCall:
    return input_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)


# --- Events ----------------------------------------------------------------------------------


def event_bytes(run_id: str, event: model.Event) -> bytes:
    """An event as it is stored."""
    return event_message(run_id, event).SerializeToString()


def read_event(sequence: int, data: bytes) -> model.Event:
    """A stored event. Its number is the store's."""
    try:
        message = runs_pb2.RunEvent.FromString(data)
    except DecodeError:
        raise ValueError("not a RunEvent") from None
    return model.Event(sequence, message.time.ToMicroseconds() / 1e6, _read_kind(message))


def event_message(run_id: str, event: model.Event) -> runs_pb2.RunEvent:
    """An event as clients see it."""
    message = runs_pb2.RunEvent(sequence=event.sequence, run_id=run_id, time=_time(event.time_s))
    match event.kind:
        case model.Queued(gate_reason):
            message.queued.gate_reason = gate_reason
        case model.ModelStep() as step:
            message.model_step.CopyFrom(_model_step(step))
        case model.CallStarted(step, call, key):
            started = runs_pb2.ToolCallStarted(step=step, call=_call(call), idempotency_key=key)
            message.tool_call_started.CopyFrom(started)
        case model.CallEnded() as ended:
            message.tool_call_ended.CopyFrom(_call_ended(ended))
        case model.Waiting(step, reason, call):
            waiting = runs_pb2.RunWaiting(step=step, reason=_WAITS[reason], call=_call(call))
            message.waiting.CopyFrom(waiting)
        case model.Resumed(step, decision, result_json):
            message.resumed.CopyFrom(
                runs_pb2.RunResumed(
                    step=step, decision=_DECISIONS[decision], result_json=result_json
                )
            )
        case model.Paused(ready_s, reason, text):
            paused = runs_pb2.RunPaused(ready_time=_time(ready_s), reason=reason, message=text)
            message.paused.CopyFrom(paused)
        case model.Progress(phase, done, total):
            progress = runs_pb2.RunProgress(phase=phase, done=done, total=total)
            message.progress.CopyFrom(progress)
        case model.Ended() as end:
            message.ended.CopyFrom(_ended(end))
    return message


def _model_step(step: model.ModelStep) -> runs_pb2.ModelStep:
    return runs_pb2.ModelStep(
        step=step.step,
        message=chat_message(step.message),
        usage=result_pb2.Usage(
            prompt_tokens=step.prompt_tokens,
            cached_tokens=step.cached_tokens,
            completion_tokens=step.completion_tokens,
        ),
        request_id=step.request_id,
        cost=step.cost,
        problem=step.problem,
        messages_left_out=step.messages_left_out,
        finish_reason=(
            result_pb2.FINISH_REASON_LENGTH if step.cut_off else result_pb2.FINISH_REASON_STOP
        ),
    )


def _call_ended(ended: model.CallEnded) -> runs_pb2.ToolCallEnded:
    return runs_pb2.ToolCallEnded(
        step=ended.step,
        call_id=ended.call_id,
        result_json=ended.result_json,
        truncated=ended.truncated,
        status=_status(ended.failure),
        blob=ended.blob,
        size_bytes=ended.size_bytes,
    )


def _ended(end: model.Ended) -> runs_pb2.RunEnded:
    return runs_pb2.RunEnded(
        state=_ENDS[end.end],
        answer=end.answer,
        status=_status(end.failure),
        agent_not_needed=end.agent_not_needed,
        truncated=end.truncated,
    )


def _read_kind(message: runs_pb2.RunEvent) -> model.Kind:
    kind: model.Kind
    match message.WhichOneof("kind"):
        case "queued":
            kind = model.Queued(message.queued.gate_reason)
        case "model_step":
            kind = _read_model_step(message.model_step)
        case "tool_call_started":
            started = message.tool_call_started
            call = _read_call(started.call)
            kind = model.CallStarted(started.step, call, started.idempotency_key)
        case "tool_call_ended":
            kind = _read_call_ended(message.tool_call_ended)
        case "waiting":
            waiting = message.waiting
            reason = _known(_WAITS_READ, waiting.reason)
            kind = model.Waiting(waiting.step, reason, _read_call(waiting.call))
        case "resumed":
            kind = _resumed(message.resumed)
        case "paused":
            ready_s = message.paused.ready_time.ToMicroseconds() / 1e6
            kind = model.Paused(ready_s, message.paused.reason, message.paused.message)
        case "progress":
            progress = message.progress
            kind = model.Progress(progress.phase, progress.done, progress.total)
        case "ended":
            end = message.ended
            state = _known(_ENDS_READ, end.state)
            failure = _read_failure(end)
            needless = end.agent_not_needed
            kind = model.Ended(state, end.answer, failure, needless, end.truncated)
        case _:
            raise ValueError("a kind of event that is not known here")
    return kind


def _read_model_step(step: runs_pb2.ModelStep) -> model.ModelStep:
    return model.ModelStep(
        step=step.step,
        message=read_message(step.message),
        prompt_tokens=step.usage.prompt_tokens,
        completion_tokens=step.usage.completion_tokens,
        cost=step.cost,
        request_id=step.request_id,
        cached_tokens=step.usage.cached_tokens,
        problem=step.problem,
        messages_left_out=step.messages_left_out,
        cut_off=step.finish_reason == result_pb2.FINISH_REASON_LENGTH,
    )


def _read_call_ended(ended: runs_pb2.ToolCallEnded) -> model.CallEnded:
    return model.CallEnded(
        step=ended.step,
        call_id=model.CallId(ended.call_id),
        result_json=ended.result_json,
        truncated=ended.truncated,
        failure=_read_failure(ended),
        blob=ended.blob,
        size_bytes=ended.size_bytes,
    )


def _read_failure(message: runs_pb2.ToolCallEnded | runs_pb2.RunEnded) -> model.Failure | None:
    if not message.HasField("status"):
        return None
    error = from_status(message.status)
    return model.Failure(error.code, error.reason, error.message)


def _status(failure: model.Failure | None) -> status_pb2.Status | None:
    if failure is None:
        return None
    return to_status(SluiceError(failure.code, failure.reason, failure.message))


# --- Summaries -------------------------------------------------------------------------------


def summary_bytes(summary: Summary) -> bytes:
    """What GetRun answers with; what the store knows itself is left to it."""
    message = runs_pb2.Run(
        steps=summary.steps,
        usage=result_pb2.Usage(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            completion_tokens=summary.completion_tokens,
        ),
        tool_calls=summary.tool_calls,
        cost=summary.cost,
        answer=_cut(summary.answer),
        status=_status(summary.failure),
        budget=budget_message(summary.budget),
        model=summary.model,
        session_id=summary.session_id,
        kind=_RUN_KINDS[summary.kind],
    )
    return message.SerializeToString()


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= SUMMARY_ANSWER_BYTES:
        return text
    return data[:SUMMARY_ANSWER_BYTES].decode(errors="ignore")


def session_messages(messages: Iterable[model.Message]) -> list[bytes]:
    """Messages as a session stores them."""
    return [chat_message(message).SerializeToString() for message in messages]


def _time(seconds: float) -> Timestamp:
    message = Timestamp()
    # Microseconds: finer ones are noise of the float.
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def _known(table: dict[K, V], key: K) -> V:
    if key not in table:
        raise ValueError("a value that is not known here")
    return table[key]
