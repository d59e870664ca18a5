"""What the commands of `sluice agent` share: their arguments and options, and what these become."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sluice.command.cli_support import span_s

if TYPE_CHECKING:
    from sluice.scheduler.v1 import runs_pb2

REPLAY_S: Final = 15.0
"""How long to wait for the events that a run has."""

RunArgument = Annotated[str, typer.Argument(help="The run; `sluice agent list` lists them.")]
EventsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the events as JSON, one a line.")
]
WatchOption = Annotated[
    float, typer.Option("--timeout", help="How long to watch, in s; the run goes on.", min=1.0)
]


def number(kind: Any, prefix: str, word: str, words: tuple[str, ...], option: str) -> Any:
    """The value of an enum of the protos by its word. Raises BadParameter."""
    if word not in words:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(words)}", param_hint=option)
    return kind.Value(f"{prefix}_{word.upper()}")


def waiting(events: Iterable[runs_pb2.RunEvent]) -> runs_pb2.RunWaiting | None:
    """What a run with these events, all that it has, waits for."""
    now = None
    for event in events:
        if event.HasField("waiting"):
            now = event.waiting
        elif event.HasField("resumed") or event.HasField("ended"):
            now = None
    return now


def set_budget(
    request: runs_pb2.RunAgentRequest,
    steps: int | None,
    tokens: int | None,
    calls: int | None,
    time: str,
    cost: float | None,
) -> None:
    """Sets the limits that were given. Raises BadParameter."""
    if steps is not None:
        request.budget.steps_max = steps
    if tokens is not None:
        request.budget.tokens_max = tokens
    if calls is not None:
        request.budget.tool_calls_max = calls
    if time:
        request.budget.wall_time_max.seconds = span_s(time, "--budget-time")
    if cost is not None:
        request.budget.cost_max = cost
