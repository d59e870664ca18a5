"""Shared memory that engines leave behind when they are killed.

A segment is a file in /dev/shm with a name that says nothing about its owner, so only what a live
process of the mesh had mapped is known to be the mesh's: it is noted before the processes are ended
and removed once nobody maps it. What was left by processes that died earlier cannot be told from
others' and stays. Blocking; Linux only (elsewhere nothing is found).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where the kernel keeps them
# As Python's multiprocessing names them; nothing else is touched.
_NAME: Final = re.compile(r"(?:psm_|sem\.mp-)[A-Za-z0-9_]+")


def mapped(pids: Iterable[int]) -> set[Path]:
    """The segments that these processes map now."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == FOLDER and _NAME.fullmatch(path.name):
                    found.add(path)
    return found


def remove(segments: Iterable[Path]) -> int:
    """Removes those that are this user's and that no process maps any more; returns how many."""
    left = {one for one in segments if _is_own(one)}
    if left:
        left -= mapped(psutil.pids())
    removed = 0
    for path in left:
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False
