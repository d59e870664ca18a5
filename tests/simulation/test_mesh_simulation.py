"""The whole mesh in one process, under random faults, in virtual time.

Goal: at any time no engine gets more than it has room for, no output token is lost, doubled or
exchanged, every domain agrees with a recount of itself; every request ends exactly once; when
faults and arrivals stop, everything ends in bounded time, every counter returns to zero, and every
scheduler and instance serves again. Method: 1 to 3 schedulers, 1 or 2 execution replicas and 2 to 5
instances, made of the services' own parts over in-memory gRPC (``network``), 20 to 60 random
clients (``client``) and random faults (``faults``). Oracle: the next-token function written anew
(``oracle``), counts of engines and recounts of domains. Seed: the number of the run; a failed one
prints how to run it again. Mutants: ``tests/mutants/mesh_*.patch``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0


def simulate(*arguments: str) -> None:
    """Runs seeds in a process of its own: only there can hashing be fixed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("seeds", ["0-49", "50-99", "100-149", "150-199"])
def test_the_mesh_keeps_its_promises_under_faults(seeds: str) -> None:
    simulate(seeds, "--stop")


@pytest.mark.timeout(LIMIT_S)
def test_a_seed_is_the_same_run_every_time() -> None:
    simulate("0-5", "--twice")
