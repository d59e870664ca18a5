"""`make bench-agent` in a fraction of its time: that it runs, not what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
KEYS = (
    "agent_step_overhead_ms_p50",
    "session_append_ms_p50",
    "takeover_s",
    "vector_search_ms_p50_5k",
    "crowd_agent_mb_peak",
    "direct_idle_agents_ratio",
)


def test_the_agent_benchmark_runs_and_writes_its_figures() -> None:
    offset = 9_000 + os.getpid() % 500 * 10
    command = [sys.executable, "-m", "bench.agent", "--quick", "--port-offset", str(offset)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((ROOT / "bench" / "results" / "bench-agent-quick.json").read_text())
    for key in KEYS:
        assert found[key] > 0, key
