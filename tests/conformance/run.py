"""Runs the conformance scenarios of the Model Context Protocol against our tools.

``make conformance-mcp``: installs the package and its Node below ``.venv`` (240 MB, from npm), runs
every client scenario that a revision of the protocol requires and that applies to tools, one after
the other, and prints a table. Ends with 1 when one fails. What does not apply is listed with the
reason; a scenario that is neither is run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".venv" / "conformance"
REVISIONS = ("2025-11-25", "2026-07-28")
LIMIT_S = 90.0
DOES_NOT_APPLY = {
    "auth/": "authorization in a browser and its grants: a declaration carries fixed headers",
    "elicitation-": "answers in a person's place: nobody is there, and the client says so",
    "sep-2640-": "an extension for skills: only tools are used",
}
_NAME = re.compile(r"^\s+- (\S+)", re.MULTILINE)
_COUNTS = re.compile(r"Passed: (\d+)/(\d+)")


def install() -> list[str]:
    """The command that runs the package."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("package.json"), INSTALLED)
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(command, cwd=INSTALLED, check=True)
    modules = INSTALLED / "node_modules"
    main = modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    return [str(modules / ".bin" / "node"), str(main)]


def scenarios(command: list[str], revision: str) -> list[str]:
    """The client scenarios that a revision requires."""
    listing = [*command, "list"]
    of_clients, required = (
        _NAME.findall(subprocess.run([*listing, *more], capture_output=True, text=True).stdout)
        for more in (["--client"], ["--requirements", revision])
    )
    return [name for name in of_clients if name in required]


def run(command: list[str], revision: str, scenario: str) -> tuple[bool, str]:
    """Whether it passed, and how many of its checks did."""
    client = shlex.join([sys.executable, "-m", "tests.conformance.mcp_client"])
    arguments = ["client", "--command", client, "--scenario", scenario]
    done = subprocess.run(
        [*command, *arguments, "--spec-version", revision],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    counts = _COUNTS.search(done.stdout)
    return done.returncode == 0, "/".join(counts.groups()) if counts else "no result"


def main() -> int:
    """Runs them all; returns an exit status."""
    command = install()
    status = 0
    print("| revision | scenario | checks | result |\n|---|---|---|---|")
    for revision in REVISIONS:
        for scenario in scenarios(command, revision):
            reason = [why for start, why in DOES_NOT_APPLY.items() if scenario.startswith(start)]
            if reason:
                print(f"| {revision} | {scenario} | | does not apply |")
                continue
            passed, checks = run(command, revision, scenario)
            status |= not passed
            print(f"| {revision} | {scenario} | {checks} | {'pass' if passed else 'FAIL'} |")
    print("\nDoes not apply:")
    for start, why in DOES_NOT_APPLY.items():
        print(f"- {start}*: {why}")
    return status


if __name__ == "__main__":
    sys.exit(main())
