"""``make bench-vllm``: real vLLM through the mesh against the same load on inference_svc directly.

16 streams, closed loop, alternated pairs: direct, mesh, mesh, direct, ... The ratio of tokens per
second is taken pair by pair, so that the machine's drift cancels. Also reports the idle memory of
every service except vLLM itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import ROOT, Mesh, mesh, table, write_results

CONFIG = ROOT / "sluice.toml"
INSTANCE = "chat-0"


def tokens_per_s(running: Mesh, *, direct: bool, streams: int, seconds: float) -> float:
    """Throughput of one load."""
    arguments = ["--streams", str(streams), "--tokens", "64", "--warmup", "4"]
    arguments += ["--seconds", str(seconds), "--key", running.key]
    if direct:
        arguments += ["--target", running.instance(), "--direct", INSTANCE]
        arguments += ["--keys", str(running.runtime / "keys")]
    else:
        arguments += ["--target", running.envoy]
    command = [sys.executable, "-m", "bench.load", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    tally = json.loads(done.stdout.splitlines()[-1])
    if tally["errors"]:
        raise SystemExit(f"the load met errors: {tally['error_codes']}")
    return float(tally["tokens"]) / float(tally["seconds"])


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    rows = [["pair", "direct tok/s", "mesh tok/s", "ratio"]]
    ratios: list[float] = []
    meshed: list[float] = []
    directs: list[float] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        mesh(Path(scratch) / "run", engine="vllm", config=CONFIG) as running,
    ):
        time.sleep(3)
        idle = running.memory_mb()
        tokens_per_s(running, direct=True, streams=arguments.streams, seconds=2)  # warm
        for pair in range(arguments.pairs):
            speed: dict[bool, float] = {}
            for direct in (True, False) if pair % 2 == 0 else (False, True):
                speed[direct] = tokens_per_s(
                    running, direct=direct, streams=arguments.streams, seconds=arguments.seconds
                )
            ratios.append(speed[False] / speed[True])
            meshed.append(speed[False])
            directs.append(speed[True])
            rows.append(
                [str(pair + 1), f"{speed[True]:.1f}", f"{speed[False]:.1f}", f"{ratios[-1]:.3f}"]
            )
    print(table(rows))
    services = sum(mb for name, mb in idle.items() if name not in ("chat-0", "embed-0"))
    figures = {
        "throughput_ratio_median": statistics.median(ratios),
        "throughput_ratio_min": min(ratios),
        "throughput_ratio_max": max(ratios),
        "pairs": float(len(ratios)),
        "mesh_tokens_per_s_median": statistics.median(meshed),
        "direct_tokens_per_s_median": statistics.median(directs),
        "idle_memory_mb_without_vllm": services,
        **{f"idle_memory_mb_{name}": mb for name, mb in idle.items()},
    }
    print(
        f"median ratio {figures['throughput_ratio_median']:.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs)"
    )
    print(f"idle memory without the vLLM instances: {services:.0f} MB")
    print(f"written: {write_results('bench-vllm', figures).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
