"""What can go wrong for the person at the command line, beside what the mesh itself answers.

Light, so that even a broken environment gets its one line.
"""

from __future__ import annotations

from typing import Final

from sluice.errors import SluiceError

_COMMANDS: Final = {"ListTools has": "`sluice agent tools` lists"}


class StartError(Exception):
    """The mesh cannot start; the text says why and what to do, one problem a line."""


class NotReadyError(Exception):
    """The mesh did not become ready. `process` is empty when it is not one process's doing."""

    def __init__(self, process: str, reason: str) -> None:
        super().__init__(reason)
        self.process = process
        self.reason = reason


class UnreachableError(Exception):
    """Nothing that speaks gRPC answers at the address."""


def one_line(error: SluiceError) -> str:
    """A typed error for a person: code, reason, text, fields, quotas and when to ask again."""
    name = error.code.name
    kind = name if error.reason == name else f"{name} {error.reason}"
    parts = [f"{kind}: {error.message}"]
    details = [
        f"{field.field}: {field.description}"
        for field in error.fields
        if field.description.rstrip(".") not in error.message
    ]
    details += [
        f"{quota.subject}: {quota.description}"
        for quota in error.quotas
        if quota.description.removeprefix("limit of ") not in error.message
    ]
    parts += details
    if error.retry_after_s is not None:
        parts.append(f"try again in {error.retry_after_s:.1f} s")
    return _for_the_command("; ".join(part.rstrip(".") for part in parts))


def _for_the_command(text: str) -> str:
    """A server names calls of its API; here a command stands for each."""
    for call, command in _COMMANDS.items():
        text = text.replace(call, command)
    return text
