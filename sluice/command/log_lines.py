"""Log lines as a person reads them: one line each, without tracebacks and what every line repeats.

Pure. A line that is not structured, a program's own, stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

CAUSE_CHARS_MAX: Final = 300
# What `sluice.process` writes before it ends with EXIT_CONFIG.
CONFIGURATION: Final = "configuration: "
_LOOKS: Final = (
    "/grpc.health.",
    "/grpc.reflection.",
    "/sluice.scheduler.v1.SchedulerAdminService/Watch",
)
# Each program's own way to write it; all in UTC, so that texts compare as times do.
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:\.\d+)?)")
_LEFT_OUT: Final = ("time", "level", "service", "logger", "message")
# The last line of a traceback: an exception's name, mostly dotted, and its text.
_EXCEPTION: Final = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?")
# As Envoy's access log has them; the rest of such a line is for searches in the raw form.
_ACCESS_FIELDS: Final = ("grpc_status", "details", "duration_ms", "request_id")


def parsed(line: str) -> Mapping[str, object] | None:
    """A structured line's fields; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def readable(line: str) -> str:
    """A structured line as `time LEVEL message key=value ...`; any other line as it is."""
    entry = parsed(line)
    if entry is None:
        return line
    if is_access(entry):
        return _access(entry)
    if "message" not in entry:
        return line
    rest = []
    for key, value in entry.items():
        if key == "error":
            rest.append(f"error={last_line(str(value))}")
        elif key not in _LEFT_OUT and key != "error_type" and value not in ("", None):
            rest.append(f"{key}={value}")
    head = f"{entry.get('time', '')} {str(entry.get('level', '')).upper():<7} {entry['message']}"
    return f"{head}  {' '.join(rest)}".rstrip()


def is_access(entry: Mapping[str, object]) -> bool:
    """Whether Envoy wrote the line about a request."""
    return entry.get("service") == "envoy" and "path" in entry


def is_noise(line: str) -> bool:
    """Whether Envoy wrote the line about a request that only looks at the mesh."""
    entry = parsed(line)
    path = str(entry.get("path", "")) if entry is not None and is_access(entry) else ""
    return path.startswith(_LOOKS)


def merged(by_file: Mapping[Path, Iterable[str]]) -> list[tuple[Path, str]]:
    """The lines of several files by time. A file's own order stays: what has no time of its own, or
    an earlier one (the start of a request that was written at its end), follows its line before."""
    timed: list[tuple[str, Path, str]] = []
    for path, lines in by_file.items():
        now = ""
        for line in lines:
            found = _TIME.search(line)
            now = max(now, "T".join(found.groups()) if found else "")
            timed.append((now, path, line))
    timed.sort(key=lambda entry: entry[0])
    return [(path, line) for _, path, line in timed]


def last_line(error: str) -> str:
    """The line of a traceback that says what happened, shortened."""
    lines = [line for line in error.splitlines() if line.strip()]
    # Its text may go on for lines; the name of the exception stands at a line's beginning.
    said = next((line for line in reversed(lines) if _EXCEPTION.match(line)), "")
    return _shortened(said or (lines[-1].strip() if lines else ""))


def cause(lines: Iterable[str]) -> str:
    """Why a process ended, from what it wrote; empty when its lines do not say."""
    written = list(lines)
    for line in reversed(written):
        # Before all else: what a process says while it is torn down is no cause.
        if line.startswith(CONFIGURATION):
            return _shortened(line.removeprefix(CONFIGURATION))
    for line in reversed(written):
        entry = parsed(line)
        if entry is not None and isinstance(entry.get("error"), str):
            return last_line(str(entry["error"]))
        if entry is None and _EXCEPTION.match(line):
            return _shortened(line)
    return ""


def _access(entry: Mapping[str, object]) -> str:
    fields = (f"{key}={entry[key]}" for key in _ACCESS_FIELDS if entry.get(key) not in ("", None))
    what = f"{entry.get('method', '-')} {entry.get('path', '-')} {entry.get('status', '-')}"
    return f"{entry.get('time', '')} ACCESS  {what}  {' '.join(fields)}".rstrip()


def _shortened(text: str) -> str:
    return text if len(text) <= CAUSE_CHARS_MAX else f"{text[: CAUSE_CHARS_MAX - 4]} ..."
