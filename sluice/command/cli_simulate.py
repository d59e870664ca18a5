"""`sluice simulate`: hands its arguments to the simulation, a program of the scheduler service.

The simulation runs the scheduler's own domain, which this package must not import; so it is started
as a module of its own, as `sluice up` starts the services (docs/adr/0004).
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import typer

MODULE: Final = "scheduler_svc.simulation"


def add_simulate(app: typer.Typer) -> None:
    """Adds the command. Its options, `--help` too, are the module's."""
    settings = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
    app.command(context_settings=settings)(simulate)


def simulate(context: typer.Context) -> None:
    """Simulate a fleet behind the real scheduler, or plan one (`sluice simulate --help`)."""
    with subprocess.Popen([sys.executable, "-m", MODULE, *context.args]) as process:
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                continue  # it went to both: the simulation ends by it, and says how
    raise typer.Exit(128 - status if status < 0 else status)
