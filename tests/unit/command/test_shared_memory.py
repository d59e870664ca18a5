"""Shared memory of killed processes: only what was ours, and only once nobody uses it.

Seen to fail on mutants: `remove` without its look at who still maps, and `_NAME` matching all.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sluice.command import shared_memory

# Untracked, as after SIGKILL of a process and its resource tracker together.
HOLD = """
import sys
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
one = shared_memory.SharedMemory(create=True, size=4096)
print(one.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = shared_memory.FOLDER / process.stdout.readline().strip()
    yield process, path
    process.kill()
    process.communicate()
    with suppress(FileNotFoundError):
        path.unlink()


def test_a_killed_process_leaves_a_segment_that_is_removed(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    process, path = holder
    segments = shared_memory.mapped([process.pid])
    assert segments == {path}
    assert shared_memory.remove(segments) == 0  # it is in use
    assert path.exists()
    process.kill()
    process.wait()
    assert path.exists()
    assert shared_memory.remove(segments) == 1
    assert not path.exists()


def test_only_names_of_segments_are_taken() -> None:
    with tempfile.NamedTemporaryFile(prefix="other-", dir=shared_memory.FOLDER) as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            assert Path(file.name) not in shared_memory.mapped([os.getpid()])


def test_processes_and_segments_that_are_gone_are_nothing_to_remove() -> None:
    assert shared_memory.mapped([2**30]) == set()
    assert shared_memory.remove([shared_memory.FOLDER / "psm_not_there"]) == 0
