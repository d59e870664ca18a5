"""`python -m tests.robustness.chaos --seeds A-B [--service NAME]`: rounds of random kills, for
every service or for one, in one mesh each. Prints a line per round and a table; exit status 1 when
anything was wrong. Figures: bench/results/chaos.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.harness import quantile, table, write_results
from tests.robustness.chaos.world import RECOVERY_MAX_S, SERVICES, Round, world


def rounds(service: str, seeds: range) -> Iterator[Round]:
    """The rounds of a service, in a mesh of their own."""
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder, world(Path(folder)) as made:
        for seed in seeds:
            found = asyncio.run(made.round(service, seed))
            print(line(found), flush=True)
            yield found


def line(found: Round) -> str:
    """One round."""
    words = "; ".join(found.problems) or "well"
    return (
        f"{found.service} {found.seed}: killed at {found.killed_at_s:.2f} s, answers after"
        f" {found.recovery_s:.2f} s, all ended after {found.done_s:.2f} s, in doubt"
        f" {found.in_doubt}, direct answers {found.direct_answers}: {words}"
    )


def figures(found: list[Round]) -> dict[str, float]:
    """What a service's rounds add up to."""
    service = found[0].service
    recovery = [one.recovery_s for one in found]
    return {
        f"{service}_rounds": len(found),
        f"{service}_rounds_with_problems": sum(bool(one.problems) for one in found),
        f"{service}_recovery_s_p50": quantile(recovery, 0.5),
        f"{service}_recovery_s_max": max(recovery),
        f"{service}_runs_done_s_max": max(one.done_s for one in found),
        f"{service}_in_doubt": sum(one.in_doubt for one in found),
    }


def main(argv: list[str]) -> int:
    """Runs what the command line asks for; returns an exit status."""
    parser = argparse.ArgumentParser(prog="tests.robustness.chaos")
    parser.add_argument("--seeds", default="0-4", help="A-B, both included")
    parser.add_argument("--service", choices=[*SERVICES, "all"], default="all")
    options = parser.parse_args(argv)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    results: dict[str, float] = {}
    rows = [["service", "rounds", "with problems", "recovery p50 s", "max s", "all ended max s"]]
    wrong = 0
    for service in SERVICES if options.service == "all" else [options.service]:
        found = list(rounds(service, seeds))
        got = figures(found)
        wrong += sum(bool(one.problems) or one.recovery_s > RECOVERY_MAX_S for one in found)
        names = ("rounds", "rounds_with_problems", "recovery_s_p50", "recovery_s_max")
        cells = [f"{got[f'{service}_{name}']:g}" for name in (*names, "runs_done_s_max")]
        rows.append([service, *cells])
        results |= got
    print(table(rows))
    write_results("chaos", results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
