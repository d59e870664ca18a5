"""`sluice agent`: starts runs, watches them, and decides what they wait for.

What a run does is told on standard error as it happens; its answer alone goes to standard output,
so that a pipe gets the answer. A run goes on whether or not it is watched.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Annotated, Final

import typer

from sluice.command import run_show
from sluice.command.agent_options import (
    EventsJsonOption,
    RunArgument,
    WatchOption,
    number,
    set_budget,
)
from sluice.command.cli_agent_decide import add_decisions
from sluice.command.cli_agent_look import add_looks
from sluice.command.cli_calls import (
    INT32_MAX,
    ClassOption,
    ModelOption,
    SystemOption,
    TemperatureOption,
    class_number,
)
from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    KeyFileOption,
    open_client,
)
from sluice.command.schema_files import schema_text

CHOICES: Final = ("auto", "required", "each")
WATCH_S: Final = 3600.0

agent_app: Final = typer.Typer(
    help="Durable runs: a model that calls tools, step by step.", no_args_is_help=True
)


@agent_app.command()
def run(
    task: Annotated[str, typer.Argument(help="What to do; - reads standard input.")],
    tool: Annotated[
        list[str] | None,
        typer.Option(help="A tool that it may call; repeatable. `sluice agent tools` lists them."),
    ] = None,
    choice: Annotated[
        str,
        typer.Option(
            help="auto: the model decides; required: at least one call before it answers; each:"
            " every tool once, in the order given."
        ),
    ] = "auto",
    model: ModelOption = "",
    system: SystemOption = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most output tokens of one model call. Default: agent.output_tokens_max.",
            min=1,
            max=INT32_MAX,
        ),
    ] = None,
    temperature: TemperatureOption = None,
    answer_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the answer must follow.")
    ] = None,
    session: Annotated[str, typer.Option(help="A session that it reads and appends to.")] = "",
    priority: ClassOption = "",
    optional: Annotated[
        bool,
        typer.Option("--auto", help="Answer directly where the agent path is not open now."),
    ] = False,
    background: Annotated[
        bool, typer.Option(help="Return as soon as the run is stored, and print its name.")
    ] = False,
    budget_steps: Annotated[int | None, typer.Option(help="Most steps.", min=1)] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Most tokens.", min=1)] = None,
    budget_calls: Annotated[int | None, typer.Option(help="Most tool calls.", min=0)] = None,
    budget_time: Annotated[str, typer.Option(help="Longest time, e.g. 90s, 10m or 2h.")] = "",
    budget_cost: Annotated[float | None, typer.Option(help="Most cost.", min=0.0)] = None,
    as_json: EventsJsonOption = False,
    timeout: WatchOption = WATCH_S,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Start a run and watch it to its end. It goes on when this command is interrupted. A limit
    beyond the tenant's or the mesh's is lowered to that, and said."""
    from sluice.command import run_watch
    from sluice.scheduler.v1 import runs_pb2

    request = runs_pb2.RunAgentRequest(
        request_id=str(uuid.uuid4()),
        tools=tool or (),
        tool_choice=number(runs_pb2.ToolChoice, "TOOL_CHOICE", choice, CHOICES, "--choice"),
        model=model,
        session_id=session,
        priority_class=class_number(priority),
        mode=runs_pb2.AGENT_MODE_AUTO if optional else runs_pb2.AGENT_MODE_REQUIRED,
        background=background,
    )
    text = sys.stdin.read() if task == "-" else task
    if not text.strip():
        raise typer.BadParameter("the task is empty", param_hint="TASK")
    if system:
        request.messages.add(role="system", content=system)
        request.messages.add(role="user", content=text)
    else:
        request.task = text
    if max_tokens is not None:
        request.sampling.max_tokens = max_tokens
    if temperature is not None:
        request.sampling.temperature = temperature
    if answer_schema is not None:
        request.answer_schema_json = schema_text(answer_schema, "--answer-schema", applied=True)
    set_budget(request, budget_steps, budget_tokens, budget_calls, budget_time, budget_cost)
    with open_client(config, endpoint, key_file) as client:
        events = run_watch.start(client, request, timeout)
        status = run_show.show(
            client, events, as_json=as_json, once=background, asked=request.budget
        )
        raise typer.Exit(status)


@agent_app.command()
def watch(
    run_id: RunArgument,
    from_sequence: Annotated[
        int, typer.Option("--from", help="First event wanted, by its number.", min=1)
    ] = 1,
    as_json: EventsJsonOption = False,
    timeout: WatchOption = WATCH_S,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Show what a run did, then follow it to its end."""
    from sluice.command import run_watch

    with open_client(config, endpoint, key_file) as client:
        events = run_watch.watch(client, run_id, from_sequence, timeout)
        raise typer.Exit(run_show.show(client, events, as_json=as_json, first=from_sequence))


add_looks(agent_app)
add_decisions(agent_app)
