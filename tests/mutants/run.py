"""Applies each mutant to a copy of the tree and shows that the test it names fails.

`python -m tests.mutants.run [NAME ...]`, from the root; about 10 s a mutant. A mutant is a patch
whose first line says `Kills: FILE -k "EXPRESSION"`. Exit status 1 when one survives or does not
apply: then the code it changes has changed, and the patch has to follow.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
# What git does not know but a run needs.
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def copy_tree(into: Path) -> None:
    """The files that git knows, as they are now, and the generated stubs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    names = [Path(name) for name in listed.stdout.split("\0") if name]
    for pattern in GENERATED:
        names += [path.relative_to(ROOT) for path in (ROOT / "sluice").rglob(pattern)]
    names += [path.relative_to(ROOT) for path in (ROOT / "protos" / "build").glob("*")]
    for name in names:
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def judge(patch: Path, tree: Path) -> str:
    """ "killed", or why not."""
    kills = patch.read_text().splitlines()[0].removeprefix("Kills: ")
    apply = ["git", "apply", "--whitespace=nowarn", str(patch)]
    if subprocess.run(apply, cwd=tree, capture_output=True, check=False).returncode:
        return "does not apply"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(kills)],
            cwd=tree,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        subprocess.run([*apply, "--reverse"], cwd=tree, check=True)
    return "killed" if done.returncode == 1 else f"survived (pytest ended with {done.returncode})"


def main(names: list[str]) -> int:
    """Runs the mutants `names`, or all; returns an exit status."""
    patches = sorted(Path(__file__).parent.glob("*.patch"))
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for patch in patches:
            if names and patch.stem not in names:
                continue
            verdict = judge(patch, tree)
            status |= verdict != "killed"
            print(f"{patch.stem}: {verdict}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
