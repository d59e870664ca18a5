"""`sluice sessions`, and what `sluice chat --session` does: conversations that the mesh keeps.

A turn is a run of its own: it goes on when this command is interrupted, and its answer is in the
history afterwards.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import (
    EXIT_FAILED,
    ConfigOption,
    EndpointOption,
    JsonOption,
    KeyFileOption,
    errors,
    is_interactive,
    open_client,
    output,
    print_json,
    print_table,
    status_of,
    warn_line,
)
from sluice.errors import Code, SluiceError

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.common.v1 import input_pb2, sampling_pb2
    from sluice.scheduler.v1 import data_pb2

NEW: Final = "new"
PAGE: Final = 1000

SessionArgument = Annotated[str, typer.Argument(help="The session; `list` names them.")]

sessions_app: Final = typer.Typer(
    help="Conversations that the mesh keeps; `sluice chat --session` talks in one.",
    no_args_is_help=True,
)


@sessions_app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(help="Most sessions.", min=1, max=10_000)] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """List the sessions of this key's tenant, newest first."""
    with open_client(config, endpoint, key_file) as client:
        found = list(_sessions(client, limit))
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("session", "messages", "last used (UTC)", "deleted if idle (UTC)"):
        table.add_column(column, overflow="fold", no_wrap=column == "session")
    for one in found:
        table.add_row(
            Text(one.session_id),
            str(one.message_count),
            one.update_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S"),
            one.expire_time.ToDatetime().strftime("%Y-%m-%d %H:%M"),
        )
    print_table(table)


@sessions_app.command()
def show(
    session: SessionArgument,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Show the messages of a session."""
    with open_client(config, endpoint, key_file) as client:
        messages = history(client, session)
    if as_json:
        print_json(messages)
        return
    for message in messages:
        output().print(_told(message), soft_wrap=True)


@sessions_app.command("rm")
def remove(
    sessions: Annotated[list[str], typer.Argument(help="Sessions, as `list` names them.")],
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Delete sessions with their messages."""
    from sluice.scheduler.v1 import data_pb2

    with open_client(config, endpoint, key_file) as client:
        for name in sessions:
            client.call("DeleteSession", data_pb2.DeleteSessionRequest(session_id=name))
            output().print(f"{name} is deleted", soft_wrap=True)


def history(client: MeshClient, session: str) -> list[input_pb2.ChatMessage]:
    """All messages of a session. Raises SluiceError."""
    from sluice.scheduler.v1 import data_pb2

    found: list[input_pb2.ChatMessage] = []
    while True:
        request = data_pb2.GetSessionRequest(
            session_id=session, from_message=len(found), page_size=PAGE
        )
        page = client.call("GetSession", request)
        found += page.messages
        if not page.messages or len(found) >= page.session.message_count:
            return found


class SessionChat:
    """A conversation that the mesh keeps: begun with a system message, if any, or continued."""

    def __init__(
        self,
        client: MeshClient,
        model: str,
        sampling: sampling_pb2.SamplingParams,
        system: str,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling
        self._system = system
        self._timeout_s = timeout_s
        self._unfinished = ""  # the run of a turn whose answer was interrupted here
        self.session = ""

    def begin(self) -> None:
        """Creates a session and says its name."""
        from sluice.scheduler.v1 import data_pb2

        request = data_pb2.CreateSessionRequest(request_id=str(uuid.uuid4()))
        if self._system:
            request.messages.add(role="system", content=self._system)
        self.session = self._client.call("CreateSession", request).session.session_id
        self._unfinished = ""
        errors().print(Text(f"session {self.session}", style="dim"), soft_wrap=True)

    def go_on(self, session: str) -> None:
        """Continues a session and shows what was said."""
        for message in history(self._client, session):
            errors().print(_told(message), soft_wrap=True)
        self.session = session
        if self._system:
            warn_line("--system is for a new session: this one has what it began with")

    def turn(self, text: str) -> bool:
        """One turn, printed as it comes; whether it was answered. Raises SluiceError where going on
        makes no sense."""
        try:
            self._turn(text)
        except SluiceError as error:
            if error.code is Code.UNAUTHENTICATED or not is_interactive():
                raise
            status_of(error)
            return False
        except KeyboardInterrupt:
            output().print()
            if self._unfinished:
                text = "The answer goes on; the next turn waits for it."
                errors().print(Text(text, style="dim"))
            return False
        return True

    def _wait_for_the_last(self) -> None:
        """A session takes one turn at a time."""
        from sluice.command import run_watch

        if self._unfinished:
            for _ in run_watch.watch(self._client, self._unfinished, 0, self._timeout_s):
                pass
        self._unfinished = ""

    def _turn(self, text: str) -> None:
        from sluice.command import run_watch
        from sluice.command.run_story import Tokens
        from sluice.scheduler.v1 import runs_pb2
        from sluice.status import from_status

        request = runs_pb2.RunAgentRequest(
            task=text,
            session_id=self.session,
            model=self._model,
            sampling=self._sampling,
            request_id=str(uuid.uuid4()),
        )
        self._wait_for_the_last()
        shown, tokens = "", Tokens()
        for event in run_watch.start(self._client, request, self._timeout_s):
            self._unfinished = event.run_id
            tokens.add(event)
            if event.HasField("partial_text"):
                part = event.partial_text
                whole = part.text if part.replaces else shown + part.text
                # After a reconnect the whole text comes again.
                if whole.startswith(shown):
                    _write(whole[len(shown) :])
                else:
                    _write("\n" + whole)
                shown = whole
            elif event.HasField("ended"):
                self._unfinished = ""
                if event.ended.state != runs_pb2.RUN_STATE_SUCCEEDED:
                    _write("\n" if shown else "")
                    raise from_status(event.ended.status)
                rest = event.ended.answer.removeprefix(shown)
                _write((rest if event.ended.answer.startswith(shown) else "") + "\n")
                if event.ended.truncated:
                    errors().print(Text(tokens.note, style="dim"), soft_wrap=True)


def chat_in_session(chat: SessionChat, session: str, turns: Iterator[str]) -> int:
    """Talks until the turns end; the exit status."""
    if session == NEW:
        chat.begin()
    else:
        chat.go_on(session)
    answered = True
    for line in turns:
        if line == "/reset":
            chat.begin()
        else:
            answered = chat.turn(line)
    return 0 if answered or is_interactive() else EXIT_FAILED


def with_session_value(arguments: Sequence[str]) -> list[str]:
    """The command line with `new` after a `--session` that stands alone."""
    done: list[str] = []
    for number, word in enumerate(arguments):
        done.append(word)
        following = arguments[number + 1] if number + 1 < len(arguments) else "-"
        if word == "--session" and following.startswith("-") and arguments[0] == "chat":
            done.append(NEW)
    return done


def _sessions(client: MeshClient, limit: int) -> Iterator[data_pb2.Session]:
    from sluice.scheduler.v1 import data_pb2

    request = data_pb2.ListSessionsRequest()
    while limit > 0:
        request.page_size = min(limit, 100)
        page = client.call("ListSessions", request)
        yield from page.sessions
        limit -= len(page.sessions)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _told(message: input_pb2.ChatMessage) -> Text:
    from sluice.command.log_files import printable

    return Text.assemble((f"{message.role}: ", "bold"), printable(message.content))


def _write(text: str) -> None:
    from sluice.command.log_files import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
