"""The current time, in a time zone."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ToolContext, ToolError, ToolResult

PARAMETERS = {
    "type": "object",
    "properties": {
        "time_zone": {
            "type": "string",
            "maxLength": 64,
            "description": "IANA name of a time zone. Left out: UTC.",
        }
    },
    "additionalProperties": False,
}


class ClockTool:
    """See Tool. ``now``: Unix seconds."""

    def __init__(self, info: ToolInfo, now: Callable[[], float]) -> None:
        self._info = info
        self._now = now
        self._zones = available_timezones()

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        name = str(arguments.get("time_zone") or "UTC")
        if name not in self._zones:  # a name is a path in the zone files: only known ones are read
            raise ToolError("TOOL_REFUSED", "There is no such time zone.", made=False)
        moment = datetime.fromtimestamp(self._now(), UTC).astimezone(ZoneInfo(name))
        answer = {
            "time": moment.isoformat(timespec="seconds"),
            "weekday": moment.strftime("%A"),
            "time_zone": name,
        }
        return ToolResult(json.dumps(answer))
