"""The agent path at the public API: who gets through the gate, and what the others hear.

There is no agent service yet: a request that insists on the agent path is refused by type, and one
that allows it (AUTO) is answered by one direct call, whose messages become the events of a run that
is nowhere stored. Counts what the gate said, and what runs were not needed. One event loop.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Final

from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.domain.agent_gate import (
    AgentGate,
    AgentMode,
    FleetLoad,
    GateReason,
    Path,
    RunSummary,
    Verdict,
    agent_not_needed,
    extra_cost,
)
from sluice import telemetry_names as names
from sluice.common.v1 import input_pb2, result_pb2
from sluice.errors import FieldViolation, SluiceError, invalid, permission_denied
from sluice.scheduler.v1 import generate_pb2, runs_pb2
from sluice.telemetry import Labels, Telemetry

TENANTS_MAX: Final = 4_096
"""Tenants counted apart; more are counted together."""

TOOLS_MAX: Final = 128
OTHER: Final = "other"

_MODES: Final = {
    runs_pb2.AGENT_MODE_UNSPECIFIED: AgentMode.REQUIRED,
    runs_pb2.AGENT_MODE_REQUIRED: AgentMode.REQUIRED,
    runs_pb2.AGENT_MODE_AUTO: AgentMode.AUTO,
}


class AgentPath:
    """See the module's docstring."""

    def __init__(self, gate: AgentGate, usage: UsageLog) -> None:
        self.verdicts: Counter[tuple[Path, GateReason]] = Counter()
        self.not_needed: Counter[str] = Counter()
        self.extra_cost: dict[str, float] = {}
        self._gate = gate
        self._usage = usage

    def export(self, telemetry: Telemetry) -> None:
        """Exports the counts."""
        telemetry.counter(names.AGENT_VERDICTS, self._read_verdicts)
        telemetry.counter(names.AGENT_NOT_NEEDED, self._read_not_needed)
        telemetry.counter(names.AGENT_EXTRA_COST, self._read_extra_cost)

    def judge(self, request: runs_pb2.RunAgentRequest, tenant: Tenant, load: FleetLoad) -> Verdict:
        """The path of a request that was checked. What needs a stored run (a session, or going on
        in the background) cannot be answered directly."""
        mode = _MODES[request.mode]
        if request.session_id or request.background:
            mode = AgentMode.REQUIRED
        verdict = self._gate.judge(
            mode,
            tenant.name,
            load,
            allowed=tenant.agents,
            available=False,
            tenant_runs_max=tenant.concurrent_runs,
        )
        self.verdicts[verdict.path, verdict.reason] += 1
        return verdict

    def refusal(self, verdict: Verdict) -> SluiceError:
        """What a request that was refused by ``verdict`` is told."""
        return self._gate.refusal(verdict)

    def run_ended(self, summary: RunSummary) -> None:
        """Counts a run that was not needed, with what it cost beyond a direct call."""
        if not agent_not_needed(summary):
            return
        tenant = summary.tenant
        if tenant not in self.not_needed and len(self.not_needed) >= TENANTS_MAX:
            tenant = OTHER
        self.not_needed[tenant] += 1
        self.extra_cost[tenant] = self.extra_cost.get(tenant, 0.0) + extra_cost(summary)
        self._usage.agent_not_needed(summary.tenant, summary.model)

    def _read_verdicts(self) -> Iterator[tuple[int, Labels]]:
        for (path, reason), count in list(self.verdicts.items()):
            yield count, {"verdict": path.value, "reason": reason.value.lower()}

    def _read_not_needed(self) -> Iterator[tuple[int, Labels]]:
        for tenant, count in list(self.not_needed.items()):
            yield count, {"tenant": tenant}

    def _read_extra_cost(self) -> Iterator[tuple[float, Labels]]:
        for tenant, cost in list(self.extra_cost.items()):
            yield cost, {"tenant": tenant}


def check(request: runs_pb2.RunAgentRequest, tenant: Tenant) -> None:
    """Checks what a run needs beside what a generation does."""
    if not is_uuid(request.request_id):
        raise invalid("request_id", "must be a UUID")
    if bool(request.task) == bool(request.messages):
        raise invalid("task", "exactly one of task and messages is needed")
    if request.mode not in _MODES:
        raise invalid("mode", "is not a known mode")
    if len(request.tools) > TOOLS_MAX:
        raise invalid("tools", f"has {len(request.tools)} entries; at most {TOOLS_MAX} are allowed")
    for index, tool in enumerate(request.tools):
        if tool not in tenant.tools:
            raise permission_denied(
                "TOOL_NOT_ALLOWED",
                f"tools[{index}] is not in the tenant's list of tools",
            )


def is_uuid(text: str) -> bool:
    """Whether it is a UUID in its usual form."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


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
        if not most:
            raise invalid("budget.tokens_max", "must be 1 or more")
        if not direct.sampling.HasField("max_tokens") or most < direct.sampling.max_tokens:
            direct.sampling.max_tokens = min(most, 2**31 - 1)
    return direct


def in_a_runs_words(error: SluiceError) -> SluiceError:
    """The same error, with the field that a run calls ``task``."""
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
            yield self._step(message.finished.usage, message.finished.request_id)
            ended = runs_pb2.RunEnded(
                state=runs_pb2.RUN_STATE_SUCCEEDED, answer="".join(self._text)
            )
            yield self._event(ended=ended)

    def _step(self, usage: result_pb2.Usage, request_id: str) -> runs_pb2.RunAgentResponse:
        answer = input_pb2.ChatMessage(role="assistant", content="".join(self._text))
        step = runs_pb2.ModelStep(step=1, message=answer, usage=usage, request_id=request_id)
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
