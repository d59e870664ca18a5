"""What can go wrong for the person at the command line, beside what the mesh itself answers.

Light, so that even a broken environment gets its one line.
"""

from __future__ import annotations

from sluice.errors import SluiceError


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
    parts = [f"{error.code.name} {error.reason}: {error.message}"]
    details = [f"{field.field}: {field.description}" for field in error.fields]
    details += [
        f"{quota.subject}: {quota.description}"
        for quota in error.quotas
        if quota.description.removeprefix("limit of ") not in error.message
    ]
    # The message of a single wrong field or quota often says the same already.
    parts += [detail for detail in details if detail.rstrip(".") not in error.message]
    if error.retry_after_s is not None:
        parts.append(f"try again in {error.retry_after_s:.1f} s")
    return "; ".join(part.rstrip(".") for part in parts)
