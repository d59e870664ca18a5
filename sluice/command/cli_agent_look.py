"""`sluice agent list`, `show`, `result`, `tools`: what runs did, and with what."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.agent_options import REPLAY_S, RunArgument, number, waiting
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
    status_of,
    warn_line,
)
from sluice.command.run_show import how_to_decide, safe

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.scheduler.v1 import runs_pb2

KINDS: Final = ("task", "turn", "ingest")
STATES: Final = ("queued", "running", "paused", "waiting", "succeeded", "failed", "cancelled")
ANSWER_SHOWN_MAX: Final = 60


def add_looks(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("list")(list_runs)
    app.command()(show)
    app.command()(result)
    app.command()(tools)


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

    wanted = number(runs_pb2.RunState, "RUN_STATE", state, STATES, "--state") if state else 0
    only = number(runs_pb2.RunKind, "RUN_KIND", kind, KINDS, "--kind") if kind else 0
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


def show(
    run_id: RunArgument,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Show a run as it is now: its events so far, what it used, its answer, and how to decide where
    it waits."""
    from sluice.command import run_watch
    from sluice.scheduler.v1 import runs_pb2

    with open_client(config, endpoint, key_file) as client:
        found = client.call("GetRun", runs_pb2.GetRunRequest(run_id=run_id)).run
        events = list(run_watch.so_far(client, run_id, REPLAY_S))
    if as_json:
        typer.echo(json.dumps(_document(found, events), ensure_ascii=False, indent=2))
        return
    for line in _told(found, events):
        output().print(Text(safe(line)), soft_wrap=True)


def _document(run: runs_pb2.Run, events: Sequence[runs_pb2.RunEvent]) -> dict[str, Any]:
    """A run as JSON with its events, whether its answer was cut off, and what it waits for."""
    waits = _waits(run, events)
    return as_document(run) | {
        "truncated": _is_cut(events),
        "waiting": as_document(waits) if waits else None,
        "events": [as_document(one) for one in events],
    }


def _told(run: runs_pb2.Run, events: Sequence[runs_pb2.RunEvent]) -> Iterator[str]:
    """The same as lines."""
    from sluice.command.run_story import Tokens, folded, given_up, state_name

    if events and (line := given_up(events[0], 1)):
        yield line
    yield from folded(events)
    tokens = run.usage.prompt_tokens + run.usage.completion_tokens
    yield (
        f"{state_name(run.state)}; {run.steps} steps, {run.tool_calls} tool calls,"
        f" {tokens} tokens, cost {run.cost:.6g}"
    )
    if run.answer:
        yield run.answer
    if _is_cut(events):
        used = Tokens()
        for event in events:
            used.add(event)
        yield used.note
    if waits := _waits(run, events):
        yield from how_to_decide(run.run_id, waits.step)


def _waits(run: runs_pb2.Run, events: Sequence[runs_pb2.RunEvent]) -> runs_pb2.RunWaiting | None:
    """What it waits for: nothing any more once a decision is stored, before its agent says so."""
    from sluice.scheduler.v1 import runs_pb2

    return waiting(events) if run.state == runs_pb2.RUN_STATE_WAITING else None


def _is_cut(events: Sequence[runs_pb2.RunEvent]) -> bool:
    return bool(events) and events[-1].ended.truncated


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


def _ended_call(client: MeshClient, run_id: str, step: int) -> runs_pb2.ToolCallEnded:
    """How the call of a step ended, the last time. Raises BadParameter."""
    from sluice.command import run_watch
    from sluice.command.run_story import given_up

    ended, gone = None, None
    for event in run_watch.so_far(client, run_id, REPLAY_S):
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
