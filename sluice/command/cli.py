"""The `sluice` command: runs the mesh on this machine, looks at it, and calls it as a client.

Every call goes through Envoy under an API key, as any client's does; only `status` also asks the
processes themselves. Nothing here decides: options become requests, answers become lines. A person
never sees a traceback: an expected error is one line on standard error and an exit status, and an
unexpected one is a line with its kind (SLUICE_DEBUG=1 shows the rest).

Heavy modules are imported by the commands that need them, so that `sluice --help` is quick.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sluice import __version__
from sluice.command.cli_agent import agent_app
from sluice.command.cli_calls import calls
from sluice.command.cli_docs import docs_app
from sluice.command.cli_explain import add_explain
from sluice.command.cli_fleet import add_fleet
from sluice.command.cli_grant import add_grant
from sluice.command.cli_sessions import sessions_app, with_session_value
from sluice.command.cli_show import show
from sluice.command.cli_simulate import add_simulate
from sluice.command.cli_support import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OUTPUT_GONE,
    ConfigOption,
    config_file,
    errors,
    fail_line,
    run_paths,
    screen,
    status_of,
)
from sluice.command.cli_tenants import tenants_app
from sluice.command.cli_tools import tools_app
from sluice.command.cli_usage import add_usage

if TYPE_CHECKING:
    from sluice.mesh_config import Engine

EPILOG: Final = (
    "Exit status: 0 done; 1 failed; 2 wrong use or configuration; 3 no mesh answers; 4 the mesh"
    " refuses the request; 5 the mesh is busy or not available, try again later; 6 the deadline"
    " passed; 7 the run waits for a person; 130 interrupted; 141 nobody reads the output."
)

app = typer.Typer(
    name="sluice",
    help="Sluice: one gate in front of every GPU.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
compose_app = typer.Typer(help="The docker compose file, made from sluice.toml.")
app.add_typer(compose_app, name="compose")
app.add_typer(tenants_app, name="tenants")
app.add_typer(tools_app, name="tools")
calls(app)
app.add_typer(agent_app, name="agent")
app.add_typer(docs_app, name="docs")
app.add_typer(sessions_app, name="sessions")
add_fleet(app)
add_explain(app)
add_usage(app)
add_grant(app)
show(app)
add_simulate(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sluice {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command; the version has printed itself."""


def _engine(name: str) -> Engine | None:
    from sluice.mesh_config import Engine

    if not name:
        return None
    # `vllm` is what the file says where it says nothing else: it must not undo an entry that is
    # simulated on purpose.
    return Engine.SIMULATED if Engine(name) is Engine.SIMULATED else None


@app.command()
def up(
    config: ConfigOption = None,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm (as sluice.toml says) or simulated (every answer is made up).",
            envvar="ENGINE",
        ),
    ] = "",
    instances: Annotated[
        int | None,
        typer.Option(help="Simulated instances of the first entry, 1 to 64.", min=1, max=64),
    ] = None,
    ready_timeout: Annotated[
        float | None, typer.Option(help="Longest wait until all is ready, in s.", min=1.0)
    ] = None,
    question: Annotated[
        bool, typer.Option(help="Ask one question through Envoy when all is ready.")
    ] = True,
) -> None:
    """Start the mesh, ask one question through it, and return with the mesh running."""
    from sluice.command.startup import UpOptions
    from sluice.command.startup import up as start

    if engine not in ("", "vllm", "simulated"):
        raise typer.BadParameter(f"{engine!r} is not vllm or simulated", param_hint="--engine")
    signal.signal(signal.SIGTERM, _terminated)
    file = config_file(config)
    options = UpOptions(
        engine=_engine(engine),
        instances=instances,
        ready_timeout_s=ready_timeout or file.local.ready_timeout_s,
        question=question,
    )
    raise typer.Exit(start(file, options, screen()))


@app.command()
def down(config: ConfigOption = None) -> None:
    """Stop the mesh. No process is left; harmless when nothing runs."""
    from sluice.command import shutdown

    paths = run_paths(config)
    display = screen()
    result = shutdown.stop(paths, display.say)
    display.stopped(result, paths)
    raise typer.Exit(EXIT_FAILED if result.left else 0)


@compose_app.command("render")
def compose_render(
    config: ConfigOption = None,
    into: Annotated[
        Path | None, typer.Option(help="Folder. Default: that of the configuration file.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Write nothing; fail when a file differs.")] = False,
) -> None:
    """Render docker-compose.yml, and what it mounts, from sluice.toml."""
    from sluice.command.compose import render
    from sluice.mesh_config import read

    path = config or config_file(None).path
    differing = False
    # Without this shell's environment: the files must come out the same everywhere.
    for name, text in render(read(path, {})).items():
        target = (into or path.parent) / name
        if not check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        elif not target.is_file() or target.read_text(encoding="utf-8") != text:
            fail_line(f"{target} is not what `sluice compose render` writes")
            differing = True
    if differing:
        raise typer.Exit(EXIT_FAILED)


def _terminated(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class OutputGoneError(BaseException):
    """The reader of standard output has left, as in `sluice logs | head`. Nothing on the way
    mistakes it for a failure."""


class _Output(io.TextIOWrapper):
    """Standard output that says so when its reader has left."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise OutputGoneError from None

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise OutputGoneError from None


def main() -> None:
    """The entry point; ends the process."""
    if getattr(sys.stdout, "buffer", None) is not None:  # it may be closed
        sys.stdout = _Output(
            sys.stdout.buffer,
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=bool(sys.stdout.line_buffering),
        )
    sys.exit(run(sys.argv[1:], os.environ))


def run(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs one command line; returns its exit status."""
    try:
        status = _status(arguments, environ)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputGoneError:
        # What is still buffered goes nowhere, without a word at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OUTPUT_GONE
    return status


def _status(arguments: list[str], environ: Mapping[str, str]) -> int:
    try:
        result = app(args=with_session_value(arguments) or ["--help"], standalone_mode=False)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        errors().print("\ninterrupted")
        return EXIT_INTERRUPTED
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    except Exception as error:
        if environ.get("SLUICE_DEBUG"):
            raise
        return status_of(error)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    main()
