"""What the commands share: options, consoles, and how an error becomes a line and an exit
status.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from sluice.command.failures import NotReadyError, StartError, UnreachableError, one_line
from sluice.config import ConfigError, config_path
from sluice.errors import Code, SluiceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message
    from rich.table import Table

    from sluice.command.client import MeshClient
    from sluice.command.run_files import RunPaths
    from sluice.command.up_screen import UpScreen
    from sluice.mesh_config import MeshFile

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NO_MESH: Final = 3
EXIT_REFUSED: Final = 4
EXIT_BUSY: Final = 5
EXIT_DEADLINE: Final = 6
EXIT_WAITING: Final = 7
EXIT_INTERRUPTED: Final = 130
EXIT_OUTPUT_GONE: Final = 141  # as a shell says of what SIGPIPE ended

_BUSY: Final = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.ABORTED)
_LIMITS_OF_RUNS: Final = ("REPEATED_CALLS", "RUN_TOO_LONG", "WRONG_CALLS")
"""Reasons of runs that ended at a limit, beside those of budgets."""
_FAULTS: Final = (Code.INTERNAL, Code.UNKNOWN, Code.DATA_LOSS)
# Wider than any row; rich pads a table to its own width, not to this.
TABLE_WIDTH_MAX: Final = 10_000
_CONFIG_NAME: Final = "sluice.toml"
PORT_MAX: Final = 65_535
_ENDPOINT: Final = re.compile(r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_SPAN: Final = re.compile(r"(\d{1,6})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

ConfigOption = Annotated[
    Path | None,
    typer.Option(help="Configuration file. Default: $SLUICE_CONFIG, else sluice.toml here."),
]


def _endpoint(text: str) -> str:
    """An address as it was given. Raises BadParameter."""
    found = _ENDPOINT.fullmatch(text)
    if text and not (found and 0 < int(found[1]) <= PORT_MAX):
        raise typer.BadParameter(f"{text!r} is not HOST:PORT")
    return text


EndpointOption = Annotated[
    str,
    typer.Option(
        help="host:port of Envoy. Default: as configured.",
        envvar="SLUICE_ENDPOINT",
        callback=_endpoint,
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(help="File with the API key. Default: api-key of the runtime folder."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def config_file(path: Path | None) -> MeshFile:
    """The configuration: `path`, else SLUICE_CONFIG, else in this folder, else beside the code."""
    from sluice.mesh_config import read

    return read(_config_path(path), os.environ)


def run_paths(path: Path | None) -> RunPaths:
    """The files of the mesh that the configuration names. What is wrong in it is a warning: a mesh
    that runs must be seen and stopped whatever became of its configuration."""
    from sluice.command.run_files import RunPaths
    from sluice.mesh_config import runtime_folder

    if path is not None and not path.exists():
        config_file(path)  # refuses: a file that was named by hand is a slip
    paths = RunPaths(runtime_folder(_config_path(path), os.environ))
    try:
        config_file(path)
    except ConfigError as error:
        warn_line(f"{error}; going on with what {paths.run} says")
    return paths


def _config_path(path: Path | None) -> Path:
    chosen = path or config_path() or Path(_CONFIG_NAME)
    if path is None and config_path() is None and not chosen.is_file():
        chosen = Path(__file__).resolve().parents[2] / _CONFIG_NAME
    return chosen


def output() -> Console:
    """Standard output. Nothing in an answer is markup or gets colours of its own."""
    return Console(highlight=False, markup=False, emoji=False)


def print_table(table: Table) -> None:
    """A table on standard output; whole lines where no terminal limits their width."""
    console = output()
    if not console.is_terminal:
        console.width = TABLE_WIDTH_MAX
    console.print(table)


def print_json(messages: Iterable[Message]) -> None:
    """Prints messages to stdout as one JSON array, as the JSON API writes them."""
    documents = [as_document(one) for one in messages]
    typer.echo(json.dumps(documents, ensure_ascii=False, indent=2))


def errors() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def screen() -> UpScreen:
    """What `up` and `down` write to."""
    from sluice.command.up_screen import UpScreen

    return UpScreen(output(), errors())


def own_command(*words: str) -> str:
    """This command with `words`, as it can be typed here."""
    from sluice.command.up_screen import tool_path

    return shlex.join([tool_path("sluice"), *words])


def fail_line(text: str) -> None:
    """One `error:` line."""
    errors().print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


def warn_line(text: str) -> None:
    """One `warning:` line."""
    errors().print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)


def open_client(config: Path | None, endpoint: str, key_file: Path | None) -> MeshClient:
    """A client of the mesh that runs in the configured runtime folder, else of the one that the
    configuration describes. The key comes from `key_file`, else from SLUICE_API_KEY, else from the
    runtime folder."""
    from sluice.command.client import MeshClient
    from sluice.command.first_files import api_key_path

    key = "" if key_file else os.environ.get("SLUICE_API_KEY", "")
    if not endpoint or not (key or key_file):
        paths = run_paths(config)
        endpoint = endpoint or _running_endpoint(paths) or _configured_endpoint(config)
        key_file = key_file or api_key_path(paths.runtime)
    return MeshClient(endpoint, key or read_key(key_file or Path()))


def open_admin(config: Path | None, endpoint: str) -> MeshClient:
    """A client of the same mesh under the admin key: from SLUICE_ADMIN_KEY, else from the runtime
    folder."""
    from sluice.command.client import MeshClient
    from sluice.command.first_files import admin_key_path

    key = os.environ.get("SLUICE_ADMIN_KEY", "")
    if not endpoint or not key:
        paths = run_paths(config)
        endpoint = endpoint or _running_endpoint(paths) or _configured_endpoint(config)
        key = key or read_key(admin_key_path(paths.runtime))
    return MeshClient(endpoint, key)


def _running_endpoint(paths: RunPaths) -> str:
    """Envoy's address in the mesh that runs; empty when none does."""
    from sluice.command import processes
    from sluice.command.run_files import SUPERVISOR, read_record

    envoy, supervisor = read_record(paths.record("envoy")), read_record(paths.record(SUPERVISOR))
    # Envoy itself may be between two starts.
    runs = any(one and processes.is_alive(one.identity) for one in (envoy, supervisor))
    return envoy.ports.get("http", "") if envoy and runs else ""


def _configured_endpoint(config: Path | None) -> str:
    from sluice import edge

    file = config_file(config)
    settings = edge.load_settings(file.path, edge.Target.LOCAL, file.environ)
    own = "SLUICE_ENVOY_PORT" in file.environ
    return f"{settings.host}:{settings.port if own else file.shifted(settings.port, 'envoy.port')}"


def read_key(path: Path) -> str:
    """The key in `path`. Raises BadParameter."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        raise typer.BadParameter(
            f"there is no key in {path}: `sluice up` makes one, --key-file names another"
        ) from None


def status_of(error: Exception) -> int:
    """Says what happened in one line; returns the exit status."""
    match error:
        case SluiceError():
            fail_line(one_line(error))
            status = _status_of_code(error.code)
            # Asked again it would end alike: a run's own limits ended it, not a mesh that is busy
            # or that refuses it.
            own = error.reason in _LIMITS_OF_RUNS or error.reason.startswith("BUDGET_")
            return EXIT_FAILED if own and status != EXIT_DEADLINE else status
        case UnreachableError():
            fail_line(str(error))
            return EXIT_NO_MESH
        case ConfigError():
            fail_line(str(error))
            return EXIT_USAGE
        case StartError():
            for line in str(error).splitlines():
                fail_line(line)
            return EXIT_FAILED
        case NotReadyError():
            fail_line(error.reason)
            return EXIT_FAILED
        case ModuleNotFoundError():
            fail_line(f"the module {error.name} is not there: run `make env protos`")
            return EXIT_FAILED
        case UnicodeError():  # an argument or standard input; messages are UTF-8
            fail_line("what was given is not text in UTF-8")
            return EXIT_USAGE
        case OSError() if error.filename:
            fail_line(f"{error.filename}: {error.strerror}")
            return EXIT_FAILED
    # Of the command-line library, which words wrong usage well; its class is not public.
    words = getattr(error, "format_message", None)
    if words is not None:
        fail_line(words())
        return EXIT_USAGE
    kind = re.sub(r"[^A-Za-z0-9_.]", "", type(error).__name__)
    fail_line(f"unexpected {kind}; SLUICE_DEBUG=1 shows where. Please report it.")
    return EXIT_FAILED


def _status_of_code(code: Code) -> int:
    if code in _BUSY:
        return EXIT_BUSY
    if code is Code.DEADLINE_EXCEEDED:
        return EXIT_DEADLINE
    if code in _FAULTS:
        return EXIT_FAILED
    return EXIT_REFUSED


def counted(number: int, noun: str) -> str:
    """How many of something, e.g. 1 chunk and 2 chunks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def is_interactive() -> bool:
    """Whether a person types."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def span_s(text: str, option: str) -> int:
    """The seconds of e.g. 30s, 5m, 12h or 90d. Raises BadParameter, which names `option`."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r} must be a number and s, m, h or d, e.g. 90d", param_hint=option
        )
    return int(found[1]) * _SECONDS[found[2]]


def as_document(message: Message) -> dict[str, Any]:
    """A message as the JSON API writes it: the protos' names, and defaults as such."""
    from google.protobuf import json_format

    document: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document
