"""What a message of a conversation must be, as ``protos/sluice/common/v1/input.proto`` says.

The one source for the scheduler, which refuses a wrong message before it waits for anything, and
for the inference layer. Pure functions over the proto; nothing is copied.
"""

from __future__ import annotations

from typing import Final

from sluice.common.v1 import input_pb2
from sluice.errors import invalid

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
TOOL_CALLS_MAX: Final = 256  # in one message
NAME_CHARS_MAX: Final = 256  # of a speaker, a tool or a tool call's id


def check_message(message: input_pb2.ChatMessage, path: str) -> None:
    """Raises INVALID_ARGUMENT naming the field below ``path``."""
    content, calls = message.content, message.tool_calls
    if message.role not in ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(sorted(ROLES))}")
    if not content and not calls:
        raise invalid(f"{path}.content", "must not be empty without tool calls")
    if len(calls) > TOOL_CALLS_MAX:
        raise invalid(f"{path}.tool_calls", f"must hold at most {TOOL_CALLS_MAX} calls")
    if message.name:
        check_name(message.name, f"{path}.name")
    if message.tool_call_id:
        check_name(message.tool_call_id, f"{path}.tool_call_id")
    for index, call in enumerate(calls):
        check_name(call.id, f"{path}.tool_calls[{index}].id")
        check_name(call.name, f"{path}.tool_calls[{index}].name")


def check_name(name: str, path: str) -> None:
    """Raises INVALID_ARGUMENT for a name that is empty or too long."""
    if not 1 <= len(name) <= NAME_CHARS_MAX:
        raise invalid(path, f"must be 1 to {NAME_CHARS_MAX} characters long")
