"""Shows how far each process is while a mesh starts: a live table on a terminal, else plain lines.

Owns only what is on the screen. Not thread-safe; driven by one loop. A terminal that cannot be
drawn on gets lines: one per change of phase, and one in 15 s while nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

PLAIN_REPEAT_S: Final = 15.0
READY: Final = "ready"
_STYLES: Final = {READY: "green", "starting": "yellow", "loading model": "cyan"}
_DETAIL_CHARS_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One process."""

    name: str
    phase: str
    seconds: float
    """Since it was started; when it is ready, how long it took."""
    detail: str = ""


class Progress:
    """What is shown. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, auto_refresh=False, transient=False)
            if console.is_terminal and not console.is_dumb_terminal
            else None
        )
        self._phases: dict[str, str] = {}
        self._said_s = 0.0

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, rows: list[Row], now_s: float) -> None:
        """Draws `rows`; `now_s` is a monotonic time."""
        if self._live:
            self._live.update(_table(rows), refresh=True)
            return
        changed = [row for row in rows if self._phases.get(row.name) != row.phase]
        if not changed and now_s - self._said_s >= PLAIN_REPEAT_S:
            changed = [row for row in rows if row.phase != READY]
        for row in changed:
            self._said_s = now_s
            self._phases[row.name] = row.phase
            line = f"  {row.name:<12} {row.phase:<14} {row.seconds:5.1f} s  {row.detail}"
            self._console.print(line.rstrip(), highlight=False, soft_wrap=True)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=True, show_header=False)
    for row in rows:
        style = _STYLES.get(row.phase, "red")
        table.add_row(
            row.name,
            Text(row.phase, style=style),
            f"{row.seconds:.1f} s",
            Text(row.detail[:_DETAIL_CHARS_MAX], style="dim"),
        )
    return table
