"""`sluice status`, `logs`, `config`: what runs, what it said, and how it is set."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from sluice.command.cli_support import (
    EXIT_NO_MESH,
    ConfigOption,
    config_file,
    errors,
    output,
    run_paths,
)

if TYPE_CHECKING:
    from sluice.command.run_files import RunPaths
    from sluice.config import SettingInfo
    from sluice.mesh_config import MeshFile

LOG_LINES: Final = 40
FOLLOW_POLL_S: Final = 0.3


def show(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(status)
    app.command()(logs)
    app.command("config")(settings)


def status(config: ConfigOption = None) -> None:
    """Show processes (pid, uptime, restarts, memory, health) and instances (load)."""
    from sluice.command.status_view import instance_table, process_table, read_status

    seen = read_status(run_paths(config))
    if not seen.running:
        output().print("No mesh is running; `sluice up` starts one.")
        raise typer.Exit(EXIT_NO_MESH)
    if not seen.supervised:
        errors().print(
            Text("The supervisor is gone: `sluice up` or `sluice down` puts that right.", "yellow")
        )
    output().print(process_table(seen))
    output().print()
    output().print(instance_table(seen))
    if seen.simulated:
        output().print(Text("Answers of this mesh are SIMULATED.", style="bold yellow"))


def logs(
    name: Annotated[str, typer.Argument(help="A process of `sluice status`. Default: all.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Lines from the end.", min=0, max=100_000)
    ] = LOG_LINES,
    raw: Annotated[bool, typer.Option(help="Lines as they were written.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show what the processes wrote."""
    from sluice.command.log_files import size_of, tail

    paths = run_paths(config)
    files = _log_files(paths, name)
    ends = {path: size_of(path) for path in files}
    for path, end in ends.items():
        for line in tail(path, lines, end) if lines else ():
            _print_line(path, line, len(files) > 1, raw)
    if follow:
        for path, line in _follow(ends):
            _print_line(path, line, len(files) > 1, raw)


def settings(
    only: Annotated[str, typer.Argument(help="Only sections or settings that begin so.")] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Defaults only, as docs/CONFIGURATION.md has them.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Print every setting: value, where it comes from, default, range, unit and meaning."""
    from sluice.command.settings_page import declared, render

    if markdown:
        typer.echo(render(), nl=False)
        return
    file = config_file(config)
    section = ""
    for info in declared():
        if not info.where.startswith(only):
            continue
        if info.section != section:
            section = info.section
            output().print(Text(f"\n[{section}]", style="bold"))
        value, origin = _value(info, file)
        limits = f"  {info.range}" if info.range else f"  {info.unit}" if info.unit else ""
        line = Text.assemble(
            f"{info.name} = {value}",
            (f"  ({origin}; default {info.default_text};{limits or ' ' + info.kind})", "dim"),
        )
        output().print(line, soft_wrap=True)
        output().print(Text(f"    {info.help}  ${info.variable}", style="dim"), soft_wrap=True)


def _value(info: SettingInfo, file: MeshFile) -> tuple[str, str]:
    if info.variable in file.environ:
        value: object = file.environ[info.variable]
        return ("(secret)" if info.secret else str(value)), "environment"
    table: object = file.document
    for part in (*info.section.split("."), info.name):
        table = table.get(part) if isinstance(table, Mapping) else None
    if table is None:
        return info.default_text, "default"
    return ("(secret)" if info.secret else json.dumps(table)), "file"


def _log_files(paths: RunPaths, name: str) -> list[Path]:
    if not name:
        files = sorted(paths.logs.glob("*.log"))
        if not files:
            raise typer.BadParameter(f"there are no logs in {paths.logs}")
        return files
    path = paths.log(name)
    if path.parent != paths.logs or not path.is_file():
        known = ", ".join(sorted(one.stem for one in paths.logs.glob("*.log"))) or "none"
        raise typer.BadParameter(f"there is no log of {name!r}; there are: {known}")
    return [path]


def _follow(ends: Mapping[Path, int]) -> Iterator[tuple[Path, str]]:
    """Whole new lines after `ends`, for ever; a file that was truncated is read from its start."""
    from sluice.command.log_files import size_of

    places = dict(ends)
    rests = dict.fromkeys(places, b"")
    while True:
        for path in places:
            size = size_of(path)
            if size < places[path]:
                places[path], rests[path] = 0, b""
            if size == places[path]:
                continue
            with path.open("rb") as file:
                file.seek(places[path])
                data = rests[path] + file.read()
                places[path] = file.tell()
            *whole, rests[path] = data.split(b"\n")
            for line in whole:
                yield path, line.decode("utf-8", "replace")
        time.sleep(FOLLOW_POLL_S)


def _print_line(path: Path, line: str, prefixed: bool, raw: bool) -> None:
    from sluice.command.log_files import printable
    from sluice.command.log_lines import readable

    text = line if raw else readable(line)
    if sys.stdout.isatty():
        text = printable(text)
    typer.echo(f"{path.stem:<12} {text}" if prefixed else text)
