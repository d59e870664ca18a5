"""The tools of one run, and the only way to call them.

What a run may call is decided here, at the moment of the call, from the names in its spec and the
tenant's list as it is now, and nothing else: not from what the model was shown, wrote, or was told
to write.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

from agent_svc.domain.authority import grants
from agent_svc.domain.model import ToolInfo
from agent_svc.domain.tool_format import check_arguments
from agent_svc.ports import Rights, ToolBox, ToolContext, ToolError, ToolResult
from sluice.errors import SluiceError, unavailable


class RunTools:
    """Of one run of one tenant. ``names``: those of its spec."""

    def __init__(
        self, tenant: str, run_id: str, names: Sequence[str], box: ToolBox, rights: Rights
    ) -> None:
        self._tenant = tenant
        self._run_id = run_id
        self._names = tuple(names)
        self._box = box
        self._rights = rights

    async def infos(self, *, begun: bool = False) -> Sequence[ToolInfo]:
        """What may be called now, in the order of the names. ``begun``: whether the model was asked
        already. Raises SluiceError UNAVAILABLE: as the resolving does, while nobody knows the
        tenant's list, and TOOL_UNAVAILABLE for a name that gives no tool. Of a name that the
        tenant's list does not hold: at the beginning the list here may be older than the one that
        admitted the run; later it was taken away, and the run goes on with what is left."""
        if not self._names:
            return []
        listed = self._rights.tools(self._tenant)
        if listed is None:
            raise unavailable("STATE_UNREACHABLE", "The state service has said nothing yet.")
        names = [name for name in self._names if _overlap(name, listed)]
        if not names or (not begun and len(names) < len(self._names)):
            gone = next(name for name in self._names if name not in names)
            raise _none(gone, "The tenant's list does not hold it.")
        found = [tool.info for tool in await self._box.resolve(self._tenant, names)]
        offered = [info for info in found if self._granted(info.name)]
        for name in names:
            if not any(grants([name], info.name) for info in offered):
                raise _none(name, "There is no such tool.")
        return offered

    def _granted(self, name: str) -> bool:
        listed = self._rights.tools(self._tenant)
        return listed is not None and grants(self._names, name) and grants(listed, name)

    async def call(
        self, name: str, arguments_json: str, context: ToolContext, *, approved: bool = False
    ) -> ToolResult:
        """Makes one call. ``arguments_json``: checked here, against the schema as it is now.
        ``approved``: whether a person agreed to this call. Raises ToolError: TOOL_NOT_GRANTED,
        TOOL_UNKNOWN, TOOL_NOT_APPROVED and TOOL_REFUSED before anything was done."""
        if not self._granted(name):
            raise ToolError("TOOL_NOT_GRANTED", "The run may not call this tool.", made=False)
        try:
            found = await self._box.resolve(self._tenant, [name])
        except SluiceError:
            message = "The tool cannot be called now."
            raise ToolError("TOOL_UNAVAILABLE", message, made=False) from None
        tool = next((one for one in found if one.info.name == name), None)
        if tool is None:
            raise ToolError("TOOL_UNKNOWN", "There is no such tool now.", made=False)
        if tool.info.needs_approval and not approved:
            raise ToolError("TOOL_NOT_APPROVED", "The call needs a person's approval.", made=False)
        text = arguments_json or "{}"
        if problem := check_arguments(tool.info, text):
            said = json.dumps({"error": problem}, ensure_ascii=False)
            message = "The arguments do not fit the tool."
            raise ToolError("TOOL_REFUSED", message, made=False, content_json=said)
        # Whose run it is says the spec, whatever the context was filled with.
        bound = replace(context, tenant=self._tenant, run_id=self._run_id)
        return await tool.call(json.loads(text), bound)


def _overlap(name: str, listed: Collection[str]) -> bool:
    """Whether the list holds the name, what it belongs to, or some of what it stands for."""
    return grants(listed, name) or any(grants([name], one) for one in listed)


def _none(name: str, problem: str) -> SluiceError:
    return unavailable("TOOL_UNAVAILABLE", f"Tool {name}: {problem}")
