"""`sluice agent cancel`, `approve`, `skip`, `supply`: what a person decides about a run."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.command.agent_options import REPLAY_S, RunArgument, waiting
from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    KeyFileOption,
    open_client,
    output,
)
from sluice.errors import failed_precondition

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.scheduler.v1 import runs_pb2

StepOption = Annotated[
    int | None, typer.Option(help="The step that waits. Default: the one that does.", min=1)
]


def add_decisions(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(cancel)
    app.command()(approve)
    app.command()(skip)
    app.command()(supply)


def cancel(
    run_id: RunArgument,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Cancel a run: its model call and its tool are stopped."""
    with open_client(config, endpoint, key_file) as client:
        output().print(_cancel(client, run_id), soft_wrap=True)


def approve(
    run_id: RunArgument,
    step: StepOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Let the call that a run waits with be made (again, where it may have been made already)."""
    _decide(config, endpoint, key_file, run_id, step, "RETRY")


def skip(
    run_id: RunArgument,
    step: StepOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Let a run go on without the call that it waits with; the model is told."""
    _decide(config, endpoint, key_file, run_id, step, "SKIP")


def supply(
    run_id: RunArgument,
    result: Annotated[
        str, typer.Argument(help="The result as JSON; - reads it from standard input.")
    ],
    step: StepOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Give a run the result of the call that it waits with, as if the tool had given it."""
    text = sys.stdin.read() if result == "-" else result
    try:
        json.loads(text)
    except ValueError:
        raise typer.BadParameter("the result must be JSON; a text stands in quotes") from None
    _decide(config, endpoint, key_file, run_id, step, "SUPPLY_RESULT", text)


def _cancel(client: MeshClient, run_id: str) -> str:
    """Cancels a run; what became of it, in words. Raises SluiceError."""
    from sluice.command.run_story import state_name
    from sluice.scheduler.v1 import runs_pb2

    run = client.call("GetRun", runs_pb2.GetRunRequest(run_id=run_id)).run
    had_ended = run.HasField("end_time")
    if not had_ended:
        request = runs_pb2.CancelRunRequest(run_id=run_id, request_id=str(uuid.uuid4()))
        run = client.call("CancelRun", request).run
        # It may have ended by itself between the two calls.
        had_ended = run.state in (runs_pb2.RUN_STATE_SUCCEEDED, runs_pb2.RUN_STATE_FAILED)
    if had_ended:
        return f"run {run.run_id} had ended before: {state_name(run.state)}; nothing was cancelled"
    noted = "" if run.HasField("end_time") else "; it ends as soon as an agent takes note"
    return f"run {run.run_id}: {state_name(run.state)}{noted}"


def _decide(
    config: Path | None,
    endpoint: str,
    key_file: Path | None,
    run_id: str,
    step: int | None,
    decision: str,
    result_json: str = "",
) -> None:
    from sluice.scheduler.v1 import runs_pb2

    with open_client(config, endpoint, key_file) as client:
        request = runs_pb2.ResumeRunRequest(
            run_id=run_id,
            step=step or _waiting_step(client, run_id),
            decision=runs_pb2.ResumeDecision.Value(f"RESUME_DECISION_{decision}"),
            result_json=result_json,
            request_id=str(uuid.uuid4()),
        )
        _say(client.call("ResumeRun", request).run)


def _waiting_step(client: MeshClient, run_id: str) -> int:
    """The step that waits now. Raises SluiceError NOT_WAITING when none does, as the mesh."""
    from sluice.command import run_watch
    from sluice.command.run_story import state_name
    from sluice.scheduler.v1 import runs_pb2

    found = waiting(run_watch.so_far(client, run_id, REPLAY_S))
    if found is None:
        run = client.call("GetRun", runs_pb2.GetRunRequest(run_id=run_id)).run
        raise failed_precondition(
            "NOT_WAITING", f"the run does not wait: it is {state_name(run.state)}"
        )
    return found.step


def _say(run: runs_pb2.Run) -> None:
    from sluice.command.run_story import state_name

    output().print(f"run {run.run_id}: {state_name(run.state)}", soft_wrap=True)
