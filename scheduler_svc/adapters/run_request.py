"""What a run may ask for: sizes, names, ranges and rights, each refused by the name of its field.

Everything that costs nothing is checked here, before the gate is asked and anything is stored. What
only a model or a tool knows is found out when the run works. Stateless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from google.protobuf import duration_pb2

from scheduler_svc.adapters import translate
from scheduler_svc.adapters.requests import check_uuid
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.domain.run_budget import RunLimits, SomeLimits
from sluice import json_schemas
from sluice.agent.v1 import tools_pb2
from sluice.errors import invalid, permission_denied
from sluice.input_rules import check_message
from sluice.run_budgets import check_run_budget, wall_time_s
from sluice.scheduler.v1 import runs_pb2
from sluice.tool_rules import JOINT

REQUEST_BYTES_MAX: Final = 1 << 20
"""Of a whole request: it is stored with the run, and read again with each claim."""

TOOLS_MAX: Final = 128
TOOL_CHARS_SHOWN: Final = 64  # of a name that a client made up
_NOT_OFFERED: Final = "nothing of that name is offered there"
_MODES: Final = frozenset(runs_pb2.AgentMode.values())
_CHOICES: Final = frozenset(runs_pb2.ToolChoice.values())
NEED_TOOLS: Final = (runs_pb2.TOOL_CHOICE_REQUIRED, runs_pb2.TOOL_CHOICE_EACH)


def check(request: runs_pb2.RunAgentRequest, tenant: Tenant) -> None:
    """Raises INVALID_ARGUMENT for a wrong field, PERMISSION_DENIED for what is not the tenant's."""
    check_uuid(request.request_id, "request_id")
    if request.ByteSize() > REQUEST_BYTES_MAX:
        field = "messages" if request.messages else "task"
        raise invalid(field, f"the request is more than {REQUEST_BYTES_MAX} bytes")
    if bool(request.task) == bool(request.messages):
        raise invalid("task", "exactly one of task and messages is needed")
    _check_messages(request)
    if request.mode not in _MODES:
        raise invalid("mode", "is not a known mode")
    if request.tool_choice not in _CHOICES:
        raise invalid("tool_choice", "is not a known choice")
    if request.tool_choice in NEED_TOOLS and not request.tools:
        raise invalid("tool_choice", "needs tools")
    _check_writing(request)
    check_run_budget(request.budget, "budget")
    if request.session_id:
        check_uuid(request.session_id, "session_id")
        check_sessions(tenant)
    _check_tools(request, tenant)


def _check_messages(request: runs_pb2.RunAgentRequest) -> None:
    if len(request.messages) > translate.MESSAGES_MAX:
        raise invalid("messages", f"at most {translate.MESSAGES_MAX} are allowed")
    for index, message in enumerate(request.messages):
        check_message(message, f"messages[{index}]")
    if request.messages and request.messages[-1].role != "user":
        raise invalid(f"messages[{len(request.messages) - 1}].role", "the last one must be user")


def _check_writing(request: runs_pb2.RunAgentRequest) -> None:
    if request.sampling.HasField("structured_output"):
        raise invalid("sampling.structured_output", "a run has answer_schema_json instead")
    if request.sampling.HasField("n") and request.sampling.n != 1:
        raise invalid("sampling.n", "a run writes one output")
    translate.check_sampling(request.sampling)
    if request.answer_schema_json:
        _check_schema(request.answer_schema_json)


def _check_schema(text: str) -> None:
    schema = json_schemas.parse_object(text)
    problem = "must be a JSON object" if schema is None else json_schemas.check_schema(schema)
    if problem:
        raise invalid("answer_schema_json", problem)


def _check_tools(request: runs_pb2.RunAgentRequest, tenant: Tenant) -> None:
    if len(request.tools) > TOOLS_MAX:
        raise invalid("tools", f"has {len(request.tools)} entries; at most {TOOLS_MAX} are allowed")
    seen = set()
    for index, tool in enumerate(request.tools):
        if not tool:
            raise invalid(f"tools[{index}]", "must not be empty")
        if tool in seen:
            raise invalid(f"tools[{index}]", "is named twice")
        seen.add(tool)
        if not may_use(tool, tenant):
            name = tool[:TOOL_CHARS_SHOWN]
            raise permission_denied(
                "TOOL_NOT_ALLOWED",
                f"tools[{index}]: {name!r} is not in this tenant's list of tools;"
                " ListTools has those that are, and an operator adds it by"
                " `sluice tenants set TENANT --add-tool TOOL`",
                metadata={"tool": name},
                field=f"tools[{index}]",
            )


def may_use(tool: str, tenant: Tenant) -> bool:
    """Whether the tenant's list has the tool, or the server or document that it belongs to."""
    return tool in tenant.tools or any(owner in tenant.tools for owner in _owners(tool))


def listed_tools(known: Iterable[tools_pb2.ToolState], tenant: Tenant) -> list[tools_pb2.ToolState]:
    """The known tools that the tenant may use, and each name of its list that gives none with the
    reason; by name."""
    states = {tool.name: tool for tool in known}
    listed = [tool for tool in states.values() if may_use(tool.name, tenant)]
    given = {name for tool in listed for name in (tool.name, *_owners(tool.name))}
    for name in tenant.tools - given:
        problem = "nothing of that name is declared"
        for owner in _owners(name):
            if owner in states:
                problem = states[owner].problem or _NOT_OFFERED
            elif any(other.startswith(owner + JOINT) for other in states):
                problem = _NOT_OFFERED
        listed.append(tools_pb2.ToolState(name=name, problem=problem))
    return sorted(listed, key=lambda tool: tool.name)


def _owners(tool: str) -> Iterator[str]:
    at = tool.find(JOINT)
    while at > 0:
        yield tool[:at]
        at = tool.find(JOINT, at + 1)


def check_sessions(tenant: Tenant) -> None:
    """Raises unless the tenant may keep sessions."""
    if not tenant.sessions:
        raise permission_denied("SESSIONS_NOT_ALLOWED", "this tenant may not keep sessions")


def is_turn(request: runs_pb2.RunAgentRequest) -> bool:
    """Whether it is a turn of a session: one model call, under the right to sessions."""
    return bool(request.session_id) and not request.tools


def some_limits(budget: runs_pb2.RunBudget) -> SomeLimits:
    """The limits in a message that was checked."""
    return SomeLimits(
        steps_max=budget.steps_max if budget.HasField("steps_max") else None,
        tokens_max=budget.tokens_max if budget.HasField("tokens_max") else None,
        tool_calls_max=budget.tool_calls_max if budget.HasField("tool_calls_max") else None,
        wall_time_s=wall_time_s(budget) if budget.HasField("wall_time_max") else None,
        cost_max=budget.cost_max if budget.HasField("cost_max") else None,
    )


def shown(limits: RunLimits) -> runs_pb2.RunBudget:
    """The limits in force as a message, all set."""
    budget = runs_pb2.RunBudget(
        steps_max=limits.steps_max,
        tokens_max=limits.tokens_max,
        tool_calls_max=limits.tool_calls_max,
        cost_max=limits.cost_max,
    )
    nanos = round(limits.wall_time_s * 1e9)
    budget.wall_time_max.CopyFrom(
        duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
    )
    return budget


def parsed(text: str, field: str, bytes_max: int) -> object:
    """What JSON text says. INVALID_ARGUMENT names the field."""
    try:
        return json_schemas.parse(text, bytes_max=bytes_max)
    except json_schemas.JsonError as error:
        raise invalid(field, str(error)) from None
