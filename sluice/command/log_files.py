"""Log files of bounded size, written by processes that know nothing of rotation.

A process appends to its file through its standard error. Rotation copies the file and truncates it
in place: a writer in append mode goes on at the new end, so no pipe and no copying stand between a
process and its log, and a log survives the supervisor. What is written between copy and truncation,
microseconds, is lost. Each file is at most `bytes_max` plus what one rotation interval adds.
"""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path

# What `tail` reads at most, from the end.
TAIL_BYTES_MAX = 256 << 10


def rotate(path: Path, bytes_max: int, kept: int) -> bool:
    """Moves the content of `path` to `path`.1 when it is over `bytes_max`; keeps `kept` such
    files.
    """
    try:
        if path.stat().st_size <= bytes_max:
            return False
    except FileNotFoundError:
        return False
    for number in range(kept, 1, -1):
        older = _numbered(path, number - 1)
        if older.exists():
            older.replace(_numbered(path, number))
    shutil.copyfile(path, _numbered(path, 1))
    with path.open("r+b") as file:
        file.truncate(0)
    return True


def size_of(path: Path) -> int:
    """Bytes in the file; 0 when there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail(path: Path, lines: int, end: int | None = None, begin: int = 0) -> list[str]:
    """The last `lines` lines, at most 256 KiB of them; empty when there is no file.

    `end` is where the file ended for the caller: who goes on from there misses nothing. What stood
    before `begin` is left out, unless the file was rotated since.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2) if end is None else end
            start = max(0, size - TAIL_BYTES_MAX, begin if begin <= size else 0)
            file.seek(start)
            text = file.read(size - start).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=lines))


def printable(text: str) -> str:
    """`text` without control characters, but tabs and line ends: it cannot steer a terminal."""
    return "".join(one for one in text if one in "\n\t" or one.isprintable() or one == "\u200d")


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
