"""``python -m tests.simulation [SEED | FIRST-LAST] ...``: runs seeds, one after the other.

Prints a line per failed seed with what was broken, and how to run it again. ``--twice`` runs each
seed a second time and compares the event hashes. Exit status 1 when a seed failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import Result

HASH_SEED = "0"
LAST = 25


def main(argv: list[str]) -> int:
    """Runs what was asked for; returns an exit status."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        # Sets of strings come in the order of their hashes: the same in every process from here.
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *argv])
    from tests.simulation.mesh import write_files
    from tests.simulation.world import simulate

    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="*", default=["0-199"], help="numbers or ranges")
    parser.add_argument("--twice", action="store_true", help="compare two runs of each seed")
    parser.add_argument("--events", action="store_true", help="show the last events of each seed")
    parser.add_argument("--logs", action="store_true", help="show what the services log")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    asked = parser.parse_args(argv)
    failed: list[int] = []
    began_s, virtual_s, ended = time.perf_counter(), 0.0, 0
    seeds = [seed for text in asked.seeds for seed in _range(text)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        for seed in seeds:
            result = simulate(seed, folder, logs=asked.logs)
            violations = list(result.violations)
            if asked.twice and (other := difference(result, simulate(seed, folder))):
                violations.append(f"a second run of the seed had other events: {other}")
            virtual_s += result.virtual_s
            ended += result.outcomes.total()
            if asked.events:
                print("\n".join(result.events))
                print(dict(result.outcomes), dict(result.counts), result.digest)
            if violations:
                failed.append(seed)
                events = "" if asked.events else "\n".join(("", *tail(result.events)))
                print(f"seed {seed}: {violations[0]}{events}", flush=True)
                print(f"  again: python -m tests.simulation {seed} --events")
                if asked.stop:
                    break
    took_s = time.perf_counter() - began_s
    print(
        f"{len(seeds)} seeds, {ended} requests, {virtual_s:.0f} s of virtual time in"
        f" {took_s:.1f} s: {len(failed)} failed {failed if failed else ''}"
    )
    return 1 if failed else 0


def tail(events: tuple[str, ...]) -> list[str]:
    """The last events before the end."""
    return [event for event in events if not event.startswith("=")][-LAST:]


def difference(one: Result, two: Result) -> str:
    """The first event that two runs do not share; empty when they are the same."""
    if one.digest == two.digest:
        return ""
    pairs = itertools.zip_longest(one.events, two.events, fillvalue="nothing")
    return next((f"{a!r} and {b!r}" for a, b in pairs if a != b), "none")


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
