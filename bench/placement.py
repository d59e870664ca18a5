"""Placement: what a decision costs, how the index keeps its bound, and what the policies do to a
real trace.

`make bench-placement` prints tables and writes bench/results/bench-placement.json. The trace is the
Mooncake conversation trace in tests/data/mooncake (BENCH_ARGS="--trace FILE" for another in its
format); `--quick` runs a tenth of everything, to see that it runs. One process, no I/O; CPU time.

Keys: ``decision_us_p50_1000``: one decision of ``weighted`` over 1,000 instances with 100,000
indexed prompts of 16 blocks. ``enqueue_us_p50_100k``, ``dequeue_us_p50_100k``: at 100,000 waiting.
``mooncake_hit_rate``, ``mooncake_max_over_mean``: ``weighted`` on eight equal instances (see
``bench.placement_trace``); ``mooncake_ideal`` is one instance with endless memory and speed.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from bench.harness import ROOT, table, write_results
from bench.placement_micro import domain_figures, index_memory_mb, prefix_us
from bench.placement_trace import Replay, ideal_hit_rate, read_trace, replay
from scheduler_svc.domain.placement import POLICIES

TRACE = ROOT / "tests" / "data" / "mooncake" / "conversation_trace.jsonl.gz"
FLEETS = {
    "mooncake": [1.0] * 8,
    "skewed": [2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25],
}
INDEX_BYTES = 32 << 20


def costs(quick: bool) -> dict[str, float]:
    figures = domain_figures()
    prompts = 10_000 if quick else 100_000
    for blocks in (16, 256):
        # As many blocks in all fit the index's default bound: 1.7 million.
        count = min(prompts, 1_600_000 // blocks)
        for name, value in prefix_us(1_000, count, blocks).items():
            unit = "" if name == "indexed_blocks" else "_us"
            figures[f"prefix_{name}{unit}_{blocks}_blocks"] = value
    figures["decision_us_p50_1000"] = figures.pop("prefix_decision_us_16_blocks")
    return figures


def replays(trace: Path, quick: bool) -> tuple[dict[str, list[Replay]], float, int]:
    requests = read_trace(trace)
    if quick:
        requests = requests[:1_000]
    runs = {
        fleet: [replay(policy, requests, speeds) for policy in POLICIES]
        for fleet, speeds in FLEETS.items()
    }
    return runs, ideal_hit_rate(requests), len(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    figures = costs(arguments.quick)
    print(table([["figure", ""], *([name, f"{value:.1f}"] for name, value in figures.items())]))
    memory = index_memory_mb(50_000 if arguments.quick else 1_000_000, 8, INDEX_BYTES)
    print(table([["index", ""], *([name, f"{value:.3f}"] for name, value in memory.items())]))
    runs, ideal, requests = replays(arguments.trace, arguments.quick)
    print(f"{requests} requests, ideal hit rate {ideal:.4f}")
    rows = [["fleet", "policy", "hits", "max/mean", "TTFT p50", "p99", "expected/found"]]
    rows += [
        [
            *(fleet, run.policy, f"{run.hit_rate:.4f}", f"{run.max_over_mean:.3f}"),
            *(f"{run.ttft_p50_s:.2f} s", f"{run.ttft_p99_s:.1f} s"),
            f"{run.expected_over_found:.3f}",
        ]
        for fleet, results in runs.items()
        for run in results
    ]
    print(table(rows))
    (weighted,) = (run for run in runs["mooncake"] if run.policy == "weighted")
    values: dict[str, float] = {
        **figures,
        "mooncake_hit_rate": weighted.hit_rate,
        "mooncake_max_over_mean": weighted.max_over_mean,
        "mooncake_ideal": ideal,
        "mooncake_requests": requests,
        **{f"index_{name}": value for name, value in memory.items()},
    }
    for fleet, results in runs.items():
        for run in results:
            figures_of_run = asdict(run)
            policy = figures_of_run.pop("policy")
            values |= {f"{fleet}_{policy}_{key}": value for key, value in figures_of_run.items()}
    name = "bench-placement-quick" if arguments.quick else "bench-placement"
    print(write_results(name, values))


if __name__ == "__main__":
    main()
