"""`sluice agent`: starts runs, watches them, and decides what they wait for.

What a run does is told on standard error as it happens; its answer alone goes to standard output,
so that a pipe gets the answer. A run goes on whether or not it is watched.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command import run_show
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
    JsonOption,
    KeyFileOption,
    as_document,
    open_client,
    output,
    print_json,
    print_table,
    span_s,
    status_of,
    warn_line,
)
from sluice.command.run_show import safe
from sluice.errors import failed_precondition

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.scheduler.v1 import runs_pb2

CHOICES: Final = ("auto", "required", "each")
KINDS: Final = ("task", "turn", "ingest")
STATES: Final = ("queued", "running", "paused", "waiting", "succeeded", "failed", "cancelled")
WATCH_S: Final = 3600.0
DECISION_TIMEOUT_S: Final = 15.0
ANSWER_SHOWN_MAX: Final = 60

RunArgument = Annotated[str, typer.Argument(help="The run; `sluice agent list` lists them.")]
EventsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the events as JSON, one a line.")
]
WatchOption = Annotated[
    float, typer.Option("--timeout", help="How long to watch, in s; the run goes on.", min=1.0)
]
StepOption = Annotated[
    int | None, typer.Option(help="The step that waits. Default: the one that does.", min=1)
]

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
    beyond the mesh's own is lowered to that, and said."""
    from sluice.command import run_watch
    from sluice.scheduler.v1 import runs_pb2

    request = runs_pb2.RunAgentRequest(
        request_id=str(uuid.uuid4()),
        tools=tool or (),
        tool_choice=_number(runs_pb2.ToolChoice, "TOOL_CHOICE", choice, CHOICES, "--choice"),
        model=model,
        session_id=session,
        priority_class=class_number(priority),
        mode=runs_pb2.AGENT_MODE_AUTO if optional else runs_pb2.AGENT_MODE_REQUIRED,
        background=background,
    )
    text = sys.stdin.read() if task == "-" else task
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
        request.answer_schema_json = answer_schema.read_text(encoding="utf-8")
    _set_budget(request, budget_steps, budget_tokens, budget_calls, budget_time, budget_cost)
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


@agent_app.command("list")
def list_runs(
    state: Annotated[str, typer.Option(help=f"Only {', '.join(STATES)}.")] = "",
    kind: Annotated[
        str,
        typer.Option(
            help="Only task (of an agent), turn (of a session) or ingest (of a document)."
        ),
    ] = "",
    limit: Annotated[int, typer.Option(help="Most runs.", min=1, max=10_000)] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """List the runs of this key's tenant, newest first: tasks of agents, turns of sessions, ingests
    of documents."""
    from sluice.command.run_story import kind_name, short, state_name
    from sluice.scheduler.v1 import runs_pb2

    wanted = _number(runs_pb2.RunState, "RUN_STATE", state, STATES, "--state") if state else 0
    only = _number(runs_pb2.RunKind, "RUN_KIND", kind, KINDS, "--kind") if kind else 0
    with open_client(config, endpoint, key_file) as client:
        found = list(islice(_pages(client, wanted, only, limit), limit))
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    columns = ("run", "kind", "state", "begun (UTC)", "steps", "calls", "tokens", "cost", "answer")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "run")
    for one in found:
        table.add_row(
            Text(one.run_id),
            kind_name(one.kind),
            state_name(one.state),
            one.create_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S"),
            str(one.steps),
            str(one.tool_calls),
            str(one.usage.prompt_tokens + one.usage.completion_tokens),
            f"{one.cost:.6g}",
            Text(short(one.answer, ANSWER_SHOWN_MAX)),
        )
    print_table(table)


@agent_app.command()
def show(
    run_id: RunArgument,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Show a run as it is now: its events so far, what it used, its answer."""
    from sluice.command import run_watch
    from sluice.command.run_story import given_up, lines, state_name
    from sluice.scheduler.v1 import runs_pb2

    with open_client(config, endpoint, key_file) as client:
        found = client.call("GetRun", runs_pb2.GetRunRequest(run_id=run_id)).run
        if as_json:
            typer.echo(json.dumps(as_document(found), ensure_ascii=False, indent=2))
            return
        for number, event in enumerate(run_watch.so_far(client, run_id, DECISION_TIMEOUT_S)):
            if number == 0 and (line := given_up(event, 1)):
                output().print(Text(line), soft_wrap=True)
            for line in lines(event):
                output().print(Text(safe(line)), soft_wrap=True)
    tokens = found.usage.prompt_tokens + found.usage.completion_tokens
    output().print(
        Text(
            f"{state_name(found.state)}; {found.steps} steps, {found.tool_calls} tool calls,"
            f" {tokens} tokens, cost {found.cost:.6g}"
        ),
        soft_wrap=True,
    )
    if found.answer:
        output().print(Text(safe(found.answer)), soft_wrap=True)


@agent_app.command()
def result(
    run_id: RunArgument,
    step: Annotated[int, typer.Argument(help="The step of a tool call that has ended.", min=1)],
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Print the whole result of a tool call as JSON; events show the beginning of a large one."""
    from sluice.status import from_status

    with open_client(config, endpoint, key_file) as client:
        ended = _ended_call(client, run_id, step)
        if ended.HasField("status"):
            raise typer.Exit(status_of(from_status(ended.status)))
        text = ended.result_json
        if ended.blob:
            text = _blob(client, run_id, ended.blob).decode(errors="replace")
        elif ended.truncated:
            warn_line("the whole result could not be kept: this is its beginning")
    typer.echo(safe(text) if sys.stdout.isatty() else text)


@agent_app.command()
def cancel(
    run_id: RunArgument,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Cancel a run: its model call and its tool are stopped."""
    from sluice.scheduler.v1 import runs_pb2

    request = runs_pb2.CancelRunRequest(run_id=run_id, request_id=str(uuid.uuid4()))
    with open_client(config, endpoint, key_file) as client:
        _say(client.call("CancelRun", request).run)


@agent_app.command()
def approve(
    run_id: RunArgument,
    step: StepOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Let the call that a run waits with be made (again, where it may have been made already)."""
    _decide(config, endpoint, key_file, run_id, step, "RETRY")


@agent_app.command()
def skip(
    run_id: RunArgument,
    step: StepOption = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Let a run go on without the call that it waits with; the model is told."""
    _decide(config, endpoint, key_file, run_id, step, "SKIP")


@agent_app.command()
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


@agent_app.command()
def tools(
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """List the tools that runs of this key's tenant may use. Agent services read the [[tool]]
    tables of sluice.toml when they start: a change there needs a restart (make down, make up); what
    `sluice tools add` registers holds within seconds."""
    from sluice.scheduler.v1 import runs_pb2

    with open_client(config, endpoint, key_file) as client:
        found = client.call("ListTools", runs_pb2.ListToolsRequest()).tools
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("tool", "available", "does"):
        table.add_column(column, overflow="fold", no_wrap=column == "tool")
    for one in found:
        available = "yes" if one.available else f"no: {one.problem}"
        table.add_row(Text(safe(one.name)), Text(safe(available)), Text(safe(one.description)))
    print_table(table)


def _number(kind: Any, prefix: str, word: str, words: tuple[str, ...], option: str) -> Any:
    """The value of an enum of the protos by its word. Raises BadParameter."""
    if word not in words:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(words)}", param_hint=option)
    return kind.Value(f"{prefix}_{word.upper()}")


def _set_budget(
    request: runs_pb2.RunAgentRequest,
    steps: int | None,
    tokens: int | None,
    calls: int | None,
    time: str,
    cost: float | None,
) -> None:
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


def _pages(client: MeshClient, state: int, kind: int, limit: int) -> Iterator[runs_pb2.Run]:
    from sluice.scheduler.v1 import runs_pb2

    request = runs_pb2.ListRunsRequest(state=state, kind=kind)  # type: ignore[arg-type]  # known
    while limit > 0:
        request.page_size = 100 if kind else min(limit, 100)  # of a kind a page may hold few
        page = client.call("ListRuns", request)
        yield from page.runs
        limit -= len(page.runs)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


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

    step = 0
    for event in run_watch.so_far(client, run_id, DECISION_TIMEOUT_S):
        kind = event.WhichOneof("kind")
        step = event.waiting.step if kind == "waiting" else step
        if kind in ("resumed", "ended"):
            step = 0
    if not step:
        run = client.call("GetRun", runs_pb2.GetRunRequest(run_id=run_id)).run
        raise failed_precondition(
            "NOT_WAITING", f"the run does not wait: it is {state_name(run.state)}"
        )
    return step


def _ended_call(client: MeshClient, run_id: str, step: int) -> runs_pb2.ToolCallEnded:
    """How the call of a step ended, the last time. Raises BadParameter."""
    from sluice.command import run_watch
    from sluice.command.run_story import given_up

    ended, gone = None, None
    for event in run_watch.so_far(client, run_id, DECISION_TIMEOUT_S):
        gone = given_up(event, 1) if gone is None else gone
        if event.HasField("tool_call_ended") and event.tool_call_ended.step == step:
            ended = event.tool_call_ended
    if gone:
        raise typer.BadParameter(gone)
    if ended is None:
        raise typer.BadParameter(
            f"step {step} is no tool call that has ended: `sluice agent show` lists the steps"
        )
    return ended


def _blob(client: MeshClient, run_id: str, blob: str) -> bytes:
    """A large result, read in parts."""
    from sluice.scheduler.v1 import runs_pb2

    request = runs_pb2.GetRunBlobRequest(run_id=run_id, blob=blob)
    content = b""
    while True:
        part: runs_pb2.GetRunBlobResponse = client.call("GetRunBlob", request)
        content += part.content
        if not part.content or len(content) >= part.size_bytes:
            return content
        request.offset = len(content)


def _say(run: runs_pb2.Run) -> None:
    from sluice.command.run_story import state_name

    output().print(f"run {run.run_id}: {state_name(run.state)}", soft_wrap=True)
