"""The agent path at the public API: who gets through the gate, and what the others hear.

A request that insists on the agent path and does not get it is refused by type; one that allows it
(AUTO) is answered by one direct call, whose messages become the events of a run that is nowhere
stored. Counts what the gate said. Runs that were not needed are counted by the agent service that
ended them, once each: a scheduler does not see every end. One event loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from scheduler_svc.adapters import run_request
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.domain.agent_gate import (
    AgentGate,
    AgentMode,
    FleetLoad,
    GateReason,
    Path,
    Verdict,
)
from scheduler_svc.domain.run_budget import RunLimits, granted
from sluice import telemetry_names as names
from sluice.common.v1 import input_pb2, result_pb2
from sluice.errors import Code, FieldViolation, SluiceError
from sluice.sampling_rules import OUTPUT_TOKENS_MAX, TOTAL_TOKENS_MAX
from sluice.scheduler.v1 import generate_pb2, runs_pb2
from sluice.telemetry import Labels, Telemetry

_UNKNOWN: Final = result_pb2.FINISH_REASON_UNSPECIFIED
_MODES: Final = {
    runs_pb2.AGENT_MODE_UNSPECIFIED: AgentMode.REQUIRED,
    runs_pb2.AGENT_MODE_REQUIRED: AgentMode.REQUIRED,
    runs_pb2.AGENT_MODE_AUTO: AgentMode.AUTO,
}


class AgentPath:
    """See the module's docstring."""

    def __init__(self, gate: AgentGate, most: RunLimits) -> None:
        """``most``: the deployment's limits of a run."""
        self.verdicts: Counter[tuple[Path, GateReason]] = Counter()
        self._gate = gate
        self._most = most

    def export(self, telemetry: Telemetry) -> None:
        """Exports the counts."""
        telemetry.counter(names.AGENT_VERDICTS, self._read_verdicts)

    def judge(
        self,
        request: runs_pb2.RunAgentRequest,
        tenant: Tenant,
        load: FleetLoad,
        *,
        available: bool,
    ) -> Verdict:
        """The path of a request that was checked. ``available``: whether runs can be stored and
        somebody works on them."""
        mode = mode_of(request)
        verdict = self._gate.judge(mode, load, allowed=tenant.agents, available=available)
        if verdict.path is Path.AGENT and not self.runs_max(tenant):
            return self.too_many(request, tenant)
        return verdict

    def too_many(self, request: runs_pb2.RunAgentRequest, tenant: Tenant) -> Verdict:
        """The path of a request that is one run too many for its tenant."""
        return self._gate.too_many(mode_of(request), tenant.name, self.runs_max(tenant))

    def runs_max(self, tenant: Tenant) -> int:
        """Most open runs of a tenant."""
        return self._gate.runs_max(tenant.concurrent_runs)

    def budget(self, budget: runs_pb2.RunBudget, tenant: Tenant | None) -> RunLimits:
        """The limits of a run, of which some may have been asked for: each at most its tenant's,
        and that at most the deployment's. ``tenant`` None: a turn of a session, no agent's run."""
        most = self._most if tenant is None else granted(tenant.run_limits, self._most)
        return granted(run_request.some_limits(budget), most)

    def count(self, verdict: Verdict) -> None:
        """Counts what was said in the end."""
        self.verdicts[verdict.path, verdict.reason] += 1

    def refusal(self, verdict: Verdict, *, away: bool = False) -> SluiceError:
        """What a request that was refused by ``verdict`` is told. ``away``: there was an agent
        service before."""
        return self._gate.refusal(verdict, away=away)

    def _read_verdicts(self) -> Iterator[tuple[int, Labels]]:
        for (path, reason), count in list(self.verdicts.items()):
            yield count, {"verdict": path.value, "reason": reason.value.lower()}


def mode_of(request: runs_pb2.RunAgentRequest) -> AgentMode:
    """What a request allows. What needs a stored run (a session, or going on in the background) or
    the use of tools cannot be answered directly."""
    needs_tools = request.tool_choice in run_request.NEED_TOOLS
    if request.session_id or request.background or needs_tools:
        return AgentMode.REQUIRED
    return _MODES[request.mode]


def direct_request(request: runs_pb2.RunAgentRequest) -> generate_pb2.GenerateRequest:
    """The one call that answers a run's task directly, within the run's budget of tokens. Tools
    are not offered: nobody would execute them."""
    direct = generate_pb2.GenerateRequest(
        prompt=request.task,
        messages=request.messages,
        model=request.model,
        priority_class=request.priority_class,
        request_id=request.request_id,
    )
    if request.HasField("sampling"):
        direct.sampling.CopyFrom(request.sampling)
    if request.answer_schema_json:
        direct.sampling.structured_output.json_schema = request.answer_schema_json
    if request.budget.HasField("tokens_max"):
        most = request.budget.tokens_max
        if not direct.sampling.HasField("max_tokens") or most < direct.sampling.max_tokens:
            direct.sampling.max_tokens = min(most, OUTPUT_TOKENS_MAX)
        if (
            not direct.sampling.HasField("total_tokens_max")
            or most < direct.sampling.total_tokens_max
        ):
            direct.sampling.total_tokens_max = min(most, TOTAL_TOKENS_MAX)
    return direct


def in_a_runs_words(error: SluiceError) -> SluiceError:
    """The same error, with the field that a run calls ``task``, or as the end of a run whose tokens
    do not hold its call."""
    if error.reason == "TOTAL_TOKENS":
        text = "The run's limit of tokens is too small for its model call."
        return SluiceError(Code.RESOURCE_EXHAUSTED, "BUDGET_TOKENS", text)
    if not any(violation.field == "prompt" for violation in error.fields):
        return error
    error.fields = tuple(
        FieldViolation("task" if one.field == "prompt" else one.field, one.description)
        for one in error.fields
    )
    error.message = error.message.replace("prompt", "task", 1)
    return error


class DirectEvents:
    """The events of a run that was answered directly, made from the messages of a generation:
    ``queued`` with the gate's reason, the text as it comes, the one step, the end. Its run has no
    identifier, since nothing is stored."""

    def __init__(self, reason: GateReason) -> None:
        self._reason = reason
        self._text: list[str] = []
        self._sequence = 0

    def of(self, message: generate_pb2.GenerateResponse) -> Iterator[runs_pb2.RunAgentResponse]:
        """What a message of the generation becomes."""
        kind = message.WhichOneof("event")
        if kind == "started":
            yield self._event(queued=runs_pb2.RunQueued(gate_reason=self._reason.value))
        elif kind == "delta" and message.delta.text and not message.delta.index:
            self._text.append(message.delta.text)
            text = runs_pb2.PartialText(step=1, text=message.delta.text)
            yield self._event(partial_text=text)
        elif kind == "finished":
            finished = message.finished
            reason = finished.outputs[0].finish_reason if finished.outputs else _UNKNOWN
            yield self._step(finished.usage, finished.request_id, reason)
            ended = runs_pb2.RunEnded(
                state=runs_pb2.RUN_STATE_SUCCEEDED,
                answer="".join(self._text),
                truncated=reason == result_pb2.FINISH_REASON_LENGTH,
            )
            yield self._event(ended=ended)

    def _step(
        self, usage: result_pb2.Usage, request_id: str, reason: result_pb2.FinishReason.ValueType
    ) -> runs_pb2.RunAgentResponse:
        answer = input_pb2.ChatMessage(role="assistant", content="".join(self._text))
        step = runs_pb2.ModelStep(
            step=1, message=answer, usage=usage, request_id=request_id, finish_reason=reason
        )
        return self._event(model_step=step)

    def _event(
        self,
        *,
        queued: runs_pb2.RunQueued | None = None,
        partial_text: runs_pb2.PartialText | None = None,
        model_step: runs_pb2.ModelStep | None = None,
        ended: runs_pb2.RunEnded | None = None,
    ) -> runs_pb2.RunAgentResponse:
        if partial_text is None:  # what is live only repeats the last number
            self._sequence += 1
        event = runs_pb2.RunEvent(
            sequence=self._sequence,
            queued=queued,
            partial_text=partial_text,
            model_step=model_step,
            ended=ended,
        )
        event.time.FromNanoseconds(time.time_ns())
        return runs_pb2.RunAgentResponse(event=event)
