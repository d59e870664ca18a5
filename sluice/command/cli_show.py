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
    print_table,
    run_paths,
)

if TYPE_CHECKING:
    from sluice.command.run_files import RunPaths
    from sluice.config import SettingInfo
    from sluice.mesh_config import MeshFile

LOG_LINES: Final = 40
# Of each file: what is left out must not leave too few.
TAIL_LINES: Final = 100_000
ENVOY: Final = "envoy"
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
    print_table(process_table(seen))
    output().print()
    print_table(instance_table(seen))
    if seen.simulated:
        output().print(Text("Answers of this mesh are SIMULATED.", style="bold yellow"))


def logs(
    name: Annotated[str, typer.Argument(help="A process of `sluice status`. Default: all.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="Lines from the end.", min=0, max=100_000)
    ] = LOG_LINES,
    raw: Annotated[bool, typer.Option(help="Lines as they were written, all of them.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also requests for health and reflection.")
    ] = False,
    envoy: Annotated[bool, typer.Option(help="With Envoy's log.")] = True,
    config: ConfigOption = None,
) -> None:
    """Show what the processes wrote, in the order of time. Requests that only look at the mesh
    (health, reflection, `sluice status`) are left out unless --raw or --all is given."""
    from sluice.command.log_files import size_of, tail
    from sluice.command.log_lines import is_noise, merged

    paths = run_paths(config)
    files = [one for one in _log_files(paths, name) if envoy or one.stem != ENVOY]
    ends = {path: size_of(path) for path in files}
    several = len(files) > 1

    def wanted(line: str) -> bool:
        return raw or everything or not is_noise(line)

    if lines:
        last = {
            path: [line for line in tail(path, TAIL_LINES, end) if wanted(line)][-lines:]
            for path, end in ends.items()
        }
        for path, line in merged(last)[-lines:]:
            _print_line(path, line, several, raw)
    if follow:
        for path, line in _follow(ends):
            if wanted(line):
                _print_line(path, line, several, raw)


def settings(
    only: Annotated[str, typer.Argument(help="Only sections or settings that begin so.")] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Defaults only, as docs/CONFIGURATION.md has them.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Print every setting: value, where it comes from, default, range, unit and meaning. One that a
    service would refuse is refused here too."""
    from sluice.command.settings_page import check, declared, render

    if markdown:
        typer.echo(render(), nl=False)
        return
    file = config_file(config)
    check(file)
    section = ""
    for info in declared():
        if not info.where.startswith(only):
            continue
        if info.section != section:
            section = info.section
            output().print(Text(f"\n[{section}]", style="bold"))
        value, origin = _value(info, file)
        limits = info.range or info.unit or info.kind
        line = Text.assemble(
            f"{info.name} = {value}",
            (f"  ({origin}; default {info.default_text}; {limits})", "dim"),
        )
        output().print(line, soft_wrap=True)
        output().print(Text(f"    {info.help} ${info.variable}", style="dim"), soft_wrap=True)
    if "instance".startswith(only) or only.startswith("instance"):
        _print_instances(file)


def _print_instances(file: MeshFile) -> None:
    """Each [[instance]] as this machine resolves it, engine and device included."""
    from sluice.command import preflight
    from sluice.command.toml_text import dumps

    for one in file.instances(preflight.find_device(file.local.device)):
        output().print(Text("\n[[instance]]", style="bold"))
        table = {**one.table, **({"env": dict(one.env)} if one.env else {})}
        # The tables inside it have names that count from it.
        text = dumps(table).replace("\n[", "\n[instance.")
        output().print(Text(text.strip()), soft_wrap=True)


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
