"""The guard ends a service's children when the service is killed, and only then."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from sluice.process_guard import ProcessGuard

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
# A process that starts a sleeper, guards it, says its pid and waits to be killed.
GUARDED = """
import subprocess, sys, time
from sluice.process_guard import ProcessGuard
sleeper = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
guard = ProcessGuard()
guard.watch([sleeper.pid])
print(sleeper.pid, guard.pid, flush=True)
time.sleep(60)
"""
SECONDS_MAX = 20.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is still there when nobody ends it."""
    process = subprocess.Popen(SLEEPER)
    yield process
    process.kill()
    process.wait()


def test_what_is_guarded_ends_when_the_guarded_process_is_killed() -> None:
    """Goal: a SIGKILL to the service leaves no child behind. Method: a real process with a
    child, killed. Oracle: the child and the guard are gone. Seed: none. Seen to fail with the kill
    at the end of the guard removed."""
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True
    ) as guarded:
        assert guarded.stdout is not None
        pids = [int(word) for word in guarded.stdout.readline().split()]
        watched = [psutil.Process(pid) for pid in pids]
        guarded.kill()
    _, alive = psutil.wait_procs(watched, timeout=SECONDS_MAX)
    # Without a parent that waits for it a dead process may stay as a zombie.
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_a_farewell_leaves_the_processes_alone(sleeper: subprocess.Popen[bytes]) -> None:
    guard = ProcessGuard()
    guard.watch([sleeper.pid])
    guard.close()
    guard.close()
    assert sleeper.poll() is None


def test_a_process_that_ended_before_is_no_trouble(sleeper: subprocess.Popen[bytes]) -> None:
    guard = ProcessGuard()
    sleeper.kill()
    sleeper.wait()
    guard.watch([sleeper.pid])
    guard.close()


def test_a_guard_that_was_killed_does_not_disturb(sleeper: subprocess.Popen[bytes]) -> None:
    guard = ProcessGuard()
    psutil.Process(guard.pid).kill()
    deadline_s = time.monotonic() + SECONDS_MAX
    while psutil.Process(guard.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
    guard.watch([sleeper.pid])
    guard.close()
    assert sleeper.poll() is None


# A process that starts a leader with a child of its own, guards the group, says both and waits.
GUARDED_GROUP = """
import subprocess, sys, time
from sluice.process_guard import ProcessGuard
member = "import time; print(1, flush=True); time.sleep(60)"
leader = (
    "import subprocess, sys, time\\n"
    f"command = [sys.executable, '-I', '-S', '-c', {member!r}]\\n"
    "p = subprocess.Popen(command, stdout=subprocess.PIPE)\\n"
    "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
)
process = subprocess.Popen(
    [sys.executable, "-I", "-S", "-c", leader], stdout=subprocess.PIPE, start_new_session=True
)
guard = ProcessGuard()
guard.watch_group(process.pid)
print(process.pid, int(process.stdout.readline()), guard.pid, flush=True)
time.sleep(60)
"""


def test_a_guarded_group_ends_with_all_its_members() -> None:
    """Goal: what a tool server started ends with it. Method and oracle as above, with a leader
    that has a child. Seen to fail with the leader alone killed."""
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED_GROUP], stdout=subprocess.PIPE, text=True
    ) as guarded:
        assert guarded.stdout is not None
        watched = [psutil.Process(int(word)) for word in guarded.stdout.readline().split()]
        guarded.kill()
    assert len(watched) == 3
    _, alive = psutil.wait_procs(watched, timeout=SECONDS_MAX)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_what_was_forgotten_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    guard = ProcessGuard()
    guard.watch([sleeper.pid])
    guard.forget(sleeper.pid)
    stdin = guard._process.stdin  # the pipe's end without a farewell, as after a kill
    assert stdin is not None
    stdin.close()
    guard._process.wait(SECONDS_MAX)
    assert sleeper.poll() is None
