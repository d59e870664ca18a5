"""Shows the events of a run on a terminal, for `sluice agent`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from sluice.command.cli_support import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WAITING,
    as_document,
    errors,
    fail_line,
    own_command,
    status_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sluice.command.client import MeshClient
    from sluice.command.run_story import Tokens
    from sluice.scheduler.v1 import runs_pb2


def show(
    client: MeshClient,
    events: Iterator[runs_pb2.RunEvent],
    *,
    as_json: bool,
    first: int = 1,
    once: bool = False,
    asked: runs_pb2.RunBudget | None = None,
) -> int:
    """Prints events to their end; the exit status that the run's state asks for. ``first``: number
    of the first one that is wanted; ``once``: of a run in the background; ``asked``: the limits
    that were asked for."""
    from sluice.command.run_story import Tokens, given_up, lowered
    from sluice.command.run_watch import waits_now

    teller = Teller(errors(), live=sys.stderr.isatty() and not as_json)
    run_id, tokens, begun = "", Tokens(), False
    try:
        for event in events:
            run_id = event.run_id or run_id
            if not (begun or as_json) and (line := given_up(event, first)):
                errors().print(Text(line), soft_wrap=True)
            begun = True
            tokens.add(event)
            if as_json:
                document = as_document(event)
                typer.echo(json.dumps(document, ensure_ascii=False))
            elif once and event.run_id and sys.stdout.isatty() and sys.stderr.isatty():
                pass  # its name comes below, on the same terminal
            elif not event.HasField("ended"):  # said by _end
                teller.tell(event)
            if asked is not None and event.HasField("queued"):
                for line in lowered(asked, event.queued.budget):
                    errors().print(Text(line), soft_wrap=True)
            if event.HasField("ended"):
                teller.close()
                return _end(event.ended, as_json, tokens)
            if waits_now(client, event):
                teller.close()
                for line in how_to_decide(run_id, event.waiting.step):
                    errors().print(Text(line), soft_wrap=True)
                return EXIT_WAITING
    except KeyboardInterrupt:
        teller.close()
        _goes_on(run_id)
        if asked is not None and not begun:
            line = f"{own_command('agent', 'list')} shows whether it began"
            errors().print(Text(line), soft_wrap=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        teller.close()
        status = status_of(error)
        _goes_on(run_id)
        return status
    teller.close()
    if once and run_id and not as_json:
        typer.echo(run_id)
    return 0


class Teller:
    """Tells events to a person, live text too where there is a terminal."""

    def __init__(self, console: Console, *, live: bool) -> None:
        from sluice.command.run_story import Pauses

        self._console = console
        self._live = live
        self._open = False
        self._pauses = Pauses()
        self._untold = ""
        self._rewrites = False

    def tell(self, event: runs_pb2.RunEvent) -> None:
        """One event."""
        from sluice.command.run_story import lines

        if self._pauses.add(event):
            self._pauses_again()
            return
        if event.HasField("partial_text"):
            if self._live:
                if event.partial_text.replaces or self._rewrites:
                    self.close()
                self._console.print(Text(safe(event.partial_text.text), style="dim"), end="")
                self._open = True
            return
        for line in lines(event):
            self.close()
            self._console.print(Text(safe(line), style="dim"), soft_wrap=True)

    def close(self) -> None:
        """Ends a line of live text, and tells pauses that were held back."""
        if self._open:
            self._console.print()
        self._open = self._rewrites = False
        if self._untold:
            self._console.print(Text(safe(self._untold), style="dim"), soft_wrap=True)
        self._untold = ""

    def _pauses_again(self) -> None:
        """On a terminal over the line before; else held back until something else happens."""
        from rich.control import Control
        from rich.segment import ControlType

        if not self._live:
            self._untold = self._pauses.line
            return
        if not self._rewrites:
            self.close()
        self._console.control(Control(ControlType.CARRIAGE_RETURN))
        self._console.print(Text(safe(self._pauses.line), style="dim"), end="", soft_wrap=True)
        self._open = self._rewrites = True


def _end(ended: runs_pb2.RunEnded, as_json: bool, tokens: Tokens) -> int:
    from sluice.scheduler.v1 import runs_pb2
    from sluice.status import from_status

    if ended.answer and not as_json:
        typer.echo(safe(ended.answer) if sys.stdout.isatty() else ended.answer)
    if ended.state == runs_pb2.RUN_STATE_SUCCEEDED:
        if ended.truncated:
            errors().print(Text(tokens.note, style="dim"), soft_wrap=True)
        return 0
    if ended.state == runs_pb2.RUN_STATE_CANCELLED:
        fail_line("the run was cancelled")
        return EXIT_FAILED
    return status_of(from_status(ended.status))


def how_to_decide(run_id: str, step: int) -> Iterator[str]:
    """The commands, one a line, of which one lets a run go on that waits."""
    at = ("--step", str(step))
    for words in (
        ("approve", run_id, *at),
        ("skip", run_id, *at),
        ("supply", run_id, "RESULT_AS_JSON", *at),
        ("cancel", run_id),
    ):
        yield f"  {own_command('agent', *words)}"


def _goes_on(run_id: str) -> None:
    if run_id:
        watch_it = own_command("agent", "watch", run_id)
        end_it = own_command("agent", "cancel", run_id)
        errors().print(Text(f"The run goes on: {watch_it}; {end_it} ends it."), soft_wrap=True)


def safe(text: str) -> str:
    """Without characters that a terminal obeys."""
    from sluice.command.log_files import printable

    return printable(text)
