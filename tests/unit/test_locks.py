"""The locks are complete, reproducible and documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
SOURCES = sorted(path.stem for path in REQUIREMENTS.glob("*.in"))
# models.in is part of the engine locks and has none of its own.
LOCKS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt") if path.with_suffix(".in").exists())
EVERYTHING = sorted(path.name for path in REQUIREMENTS.iterdir() if path.is_file())
# What pip would read as a place to fetch from.
PLACE = re.compile(r"https?:|file:|--(extra-)?index-url|--find-links|^-[if] ", re.MULTILINE)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines_of(path: Path) -> list[str]:
    """The requirement lines of an .in file, those of included files too."""
    lines: list[str] = []
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.split(" #")[0].strip()
        if line.startswith("-r "):
            lines += lines_of(path.parent / line.removeprefix("-r ").strip())
        elif line and not line.startswith("#"):
            lines.append(line)
    return lines


def direct(source: str) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines_of(REQUIREMENTS / f"{source}.in"))
    return {canonical(match.group()) for match in names if match}


def pins(lock: str) -> dict[str, list[str]]:
    """Canonical name -> the lock's entries for it (several when Python versions differ)."""
    text = (REQUIREMENTS / f"{lock}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            found.setdefault(canonical(re.split(r"[=<>\s;\[]", line)[0]), []).append(line)
    return found


def test_there_is_a_lock_for_every_source() -> None:
    assert sorted({*LOCKS, "models"}) == SOURCES


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_requirement_file_names_a_registry(name: str) -> None:
    assert not PLACE.search((REQUIREMENTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_one_exact_version_and_hashes(lock: str) -> None:
    entries = [entry for several in pins(lock).values() for entry in several]
    assert entries
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==[^\s;+*]+ ", entry), f"not pinned: {entry}"
        assert "--hash=sha256:" in entry, f"no hash: {entry}"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_source_line_is_pinned_in_its_lock(lock: str) -> None:
    assert direct(lock) - pins(lock).keys() == set()


def test_the_locks_fit_into_one_environment() -> None:
    """Layers share packages; a layer that brought another version would break an earlier one."""
    together = (
        [lock for lock in LOCKS if lock != "vllm-gpu"],
        [lock for lock in LOCKS if lock != "vllm-cpu"],
    )
    for locks in together:
        versions: dict[str, set[str]] = {}
        for lock in locks:
            for name, entries in pins(lock).items():
                for entry in entries:
                    versions.setdefault(name, set()).add(entry.split()[0])
        several = {name: found for name, found in versions.items() if len(found) > 1}
        # Their newest releases need Python 3.12, so that the lock names one version for each.
        for name in ("contourpy", "networkx"):
            several.pop(name, None)
        assert several == {}


def test_torch_is_pinned_by_version_alone() -> None:
    """A local version such as +cpu is on no public registry; a hash would fit one machine only."""
    lines = lines_of(REQUIREMENTS / "torch.txt")
    assert len(lines) == 1
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", lines[0])
    gpu = pins("vllm-gpu")["torch"][0]
    assert gpu.startswith(lines[0] + " "), "both engines run on the same torch"


@pytest.mark.parametrize(
    "name", ["torch", "torchvision", "torchaudio", "torchcodec", "vllm-gguf-plugin", "vllm"]
)
def test_the_cpu_lock_leaves_out_what_breaks_it(name: str) -> None:
    assert name not in pins("vllm-cpu")


def test_both_builds_of_the_engine_are_the_same_release() -> None:
    cpu, gpu = pins("vllm-cpu")["vllm-cpu"][0], pins("vllm-gpu")["vllm"][0]
    assert cpu.split()[0].partition("==")[2] == gpu.split()[0].partition("==")[2]


def test_every_direct_dependency_is_documented_and_nothing_else() -> None:
    text = (ROOT / "docs" / "DEPENDENCIES.md").read_text(encoding="utf-8")
    documented = {canonical(name) for name in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)}
    wanted = {name for source in SOURCES for name in direct(source)} | {"torch"}
    assert documented == wanted
