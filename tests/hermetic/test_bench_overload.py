"""`make bench-overload` in a fraction of its time: that it runs, not what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0


def test_the_overload_benchmark_runs_and_writes_its_figures() -> None:
    offset = 9_000 + os.getpid() % 500 * 10
    command = [sys.executable, "-m", "bench.overload", "--quick", "--without-peers"]
    done = subprocess.run(
        [*command, "--port-offset", str(offset)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((ROOT / "bench" / "results" / "bench-overload-quick.json").read_text())
    for key in ("critical_slo_2x", "jain_index", "noisy_neighbour_cost", "engine_busy_ratio"):
        assert 0.0 <= abs(found[key]) <= 2.0, key
    assert found["2x_offered"] > 100
    assert found["2x_goodput_tokens_per_s"] > 500
    assert found["2x_refused_count"] + found["2x_left_count"] > 0
